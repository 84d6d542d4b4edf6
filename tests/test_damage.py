"""Faults that the torture harness found: flipped bits, deleted folders, made-up settings and models."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from small_runs import Interrupting, assert_same_run, small_config

from incseg.cli import main
from incseg.config import load_run_config
from incseg.engine.progress import Task, showing
from incseg.engine.rundir import RunDir, read_config
from incseg.inference import load
from incseg.io import TRUSTED, import_named, read_record, read_tensors, write_record, write_tensors
from incseg.losses.pixelwise import row_strips
from incseg.run import evaluate, train
from incseg.types import UserError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run. Tests must not change it."""
    config = small_config(tmp_path_factory.mktemp("runs") / "run", task="8-2", train={"epochs": 1})
    train(config)
    return config.folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def turn_bit(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


# --- turned bits ---------------------------------------------------------------------------------------------


def test_a_turned_bit_in_a_tensor_or_in_the_description_is_found_out(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    for at in (-3, 60):
        write_tensors(file, {"a": torch.arange(5.0), "b": torch.zeros((), dtype=torch.bfloat16)}, {"step": "seven"})
        assert read_tensors(file)[1] == {"step": "seven"}
        turn_bit(file, at)
        with pytest.raises(UserError, match="cannot be read"):
            read_tensors(file)


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "t.safetensors", {"step": "0"})
    assert read_tensors(tmp_path / "t.safetensors")[1] == {"step": "0"}
    (tmp_path / "row.json").write_text('{"all": 1.5}')
    assert read_record(tmp_path / "row.json") == {"all": 1.5}


def test_a_turned_bit_in_a_figure_is_found_out(tmp_path: Path) -> None:
    file = tmp_path / "row.json"
    record = {"all": 61.25, "iou": {"Bäume": 0.5, "dog": None}, "losses": {"ce": float("inf")}}
    write_record(file, record)
    assert read_record(file) == record
    turn_bit(file, file.read_bytes().index(b"61"))
    with pytest.raises(UserError, match=r"row\.json is damaged \(its checksum is wrong\); delete it"):
        read_record(file)


def test_a_damaged_model_of_a_run_is_named_and_the_remedy_works(finished: Path, copied: Path) -> None:
    config = small_config(copied, task="8-2", train={"epochs": 1})
    run = RunDir(copied)
    shutil.rmtree(copied / "steps/1")
    turn_bit(run.model(0), -5)
    with pytest.raises(UserError, match=rf"{run.model(0)}.*delete it and the row\.json beside it") as refused:
        train(config)
    assert "\n" not in str(refused.value)
    run.model(0).unlink()
    run.row(0).unlink()
    train(config)
    assert_same_run(finished, copied)


# --- folders that go -----------------------------------------------------------------------------------------


class Vanishing(Interrupting):
    """A screen that deletes something when step 1 begins."""

    def __init__(self, gone: Path) -> None:
        super().__init__("nothing")
        self._gone = gone

    def begin(self, what: str, total: int, done: int = 0) -> Task:
        if what == "step 1/2":
            shutil.rmtree(self._gone)
        return super().begin(what, total, done)


@pytest.mark.parametrize(
    ("gone", "said"), [(".", "was deleted or moved while this run"), ("steps/0", r"steps/0/row\.json is missing")]
)
def test_a_folder_that_vanishes_ends_the_run_with_a_line(tmp_path: Path, gone: str, said: str) -> None:
    config = small_config(tmp_path / "run", train={"epochs": 1, "checkpoint_seconds": 0.0})
    with pytest.raises(UserError, match=said), showing(Vanishing(config.folder / gone)):
        train(config)
    assert not RunDir(config.folder).results.exists()
    train(config)
    assert RunDir(config.folder).steps_done() == [0, 1, 2]


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x, x]\nb: [*a, *a]\n", "it has aliases"),
        ("a: &a {b: *a}\n", "it has aliases"),
        ("task: " + "[" * 5000, "not valid YAML"),
        ("seed: " + "9" * 5000, "not valid YAML"),
        ("seed: 0x" + "f" * 5000, "'seed' holds a number of 20000 bits"),
        ("train: {lr: 2020-01-01}", r"'train\.lr' holds a date"),
        ("task: !!set {a}", "'task' holds a set"),
        ('data: {root: "a\\0b"}', r"'data\.root' holds 'a\\x00b'"),
        ('out: "\\ud800"', "'out' holds"),
        ("1: 2", "unknown setting '1'"),
    ],
)
def test_settings_are_plain_values(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["train"].update(epochs="many"), "'epochs' holds 'many'"),
        (lambda c: c["train"].update(epochs=True), "'epochs' holds True"),
        (lambda c: c["train"].update(scale=[1.0]), r"'scale' holds \[1\.0\]"),
        (lambda c: c["model"].update(norm="none"), "'norm' holds 'none'"),
        (lambda c: c.update(data=[1]), r"holds \[1\] in place of the settings of 'data'"),
        (
            lambda c: c.pop("data"),
            r"run/config\.yaml lacks 'data', which every run has; restore it or start",
        ),
        (lambda c: c.pop("method"), "lacks 'method', which"),
        (lambda c: c.update(method={}), r"lacks 'method\.name'"),
        (lambda c: c.update(method="mib"), "holds 'mib' in place of the settings of 'method'"),
        (lambda c: c["train"].update(lr=-1.0), r"config\.yaml: train\.lr is -1\.0"),
    ],
)
def test_the_configuration_of_a_run_is_checked(copied: Path, change: Callable[[Any], None], said: str) -> None:
    load_run_config(copied)
    file = RunDir(copied).config
    config = yaml.safe_load(file.read_text())
    change(config)
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=said):
        load_run_config(copied)


PLANTED = """
import os
from incseg.methods import Evidential
os.environ["PLANTED"] = "imported"
class M(Evidential): pass
def pictures(name, number, seed): return []
"""


@pytest.mark.parametrize("method", [{"name": "planted:M"}, {"name": "recall", "generator": "planted:pictures"}])
@pytest.mark.parametrize(
    "command", ["eval RUN", "train --config RUN/config.yaml", "train --config RUN/config.yaml --out NEW"]
)
def test_a_configuration_does_not_make_code_be_imported(
    copied: Path, tmp_path: Path, method: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    for variable in (TRUSTED, "PLANTED"):
        monkeypatch.delenv(variable, raising=False)
    file = RunDir(copied).config
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"method": method}))
    argv = command.replace("RUN", str(copied)).replace("NEW", str(tmp_path / "new")).split()
    assert main(argv) == 2
    named = method.get("generator", method["name"])
    assert f"'{named}', which is not part of incseg and would be imported; if you trust it, name it" in (
        capsys.readouterr().err
    )
    with pytest.raises(UserError, match=rf"'{named}' is not part of incseg and would be imported"):
        import_named("method", named, "package.module:Class")
    assert "PLANTED" not in os.environ
    assert "planted" not in sys.modules


def test_code_that_the_user_names_is_imported(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PLANTED", "")
    monkeypatch.setenv(TRUSTED, "")
    file = RunDir(copied).config
    file.write_text(file.read_text().replace("name: evidential", "name: planted:M"))
    assert main(["eval", str(copied), "--method", "planted:M"]) == 0
    assert os.environ["PLANTED"] == "imported"
    del sys.modules["planted"]


@pytest.mark.parametrize("task", ["joint", "6-2"])
def test_a_model_is_not_tested_by_another_task(copied: Path, task: str) -> None:
    file = RunDir(copied).config
    file.write_text(file.read_text().replace("task: 8-2", f"task: {task}"))
    with pytest.raises(UserError, match=rf"knows 10 classes, which does not fit step 1 of task '{task}'"):
        evaluate(copied)


# --- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("increments", lambda i: i[0].update(ids=[300, *range(2, 9)]), "ids from 1 to"),
        ("increments", lambda i: i[0].update(ids=[1] * 8), "do not fit together"),
        ("increments", lambda i: i[0].update(classes=[1] * 8), "classes have names"),
        ("extra", lambda e: e.update(palette=[[999, 0, 0]] * 11), "colours are not from 0 to 255"),
        ("extra", lambda e: e.update(palette="red"), "palette is not a list of colours"),
        ("extra", lambda e: e.update(test_size="big"), "test size is 'big'"),
        ("extra", lambda e: e.update(method={"name": ["x"]}), "method has no name"),
        ("config", lambda c: c.update(width=-8), "model file .*width is -8"),
        ("config", lambda c: c.update(output_stride="x"), "model file "),
    ],
)
def test_a_description_that_someone_made_up_is_refused(
    finished: Path, tmp_path: Path, key: str, change: Callable[[Any], None], said: str
) -> None:
    with safe_open(RunDir(finished).model(1), framework="pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    del about["checksum"]
    value = json.loads(about[key])
    change(value)
    save_file(tensors, tmp_path / "model.safetensors", {**about, key: json.dumps(value)})
    with pytest.raises(UserError, match=said) as refused:
        load(tmp_path / "model.safetensors")
    assert "\n" not in str(refused.value)


def test_a_model_with_values_that_are_not_finite_is_refused(finished: Path, tmp_path: Path) -> None:
    tensors, about = read_tensors(RunDir(finished).model(1))
    tensors["aspp.mix.weight"][0] = torch.nan
    write_tensors(tmp_path / "model.safetensors", tensors, about)
    with pytest.raises(UserError, match=r"holds NaN or infinity in aspp\.mix\.weight"):
        load(tmp_path / "model.safetensors")


def test_a_high_strip_needs_memory_by_its_area() -> None:
    logits = torch.randn(1, 3, 3000, 1)
    strips = list(row_strips(logits, (24000, 2)))
    assert max(strip.shape[-2] for _, strip in strips) <= 512
    whole = torch.nn.functional.interpolate(logits, (24000, 2), mode="bilinear")
    torch.testing.assert_close(torch.cat([strip for _, strip in strips], dim=-2), whole)
