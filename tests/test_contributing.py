"""The examples of CONTRIBUTING.md run unchanged, from a package of the user's own."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_runs import assert_same_run, rows_of, small_config, write_config

from incseg.cli import main
from incseg.config import load_run_config
from incseg.data import build_source
from incseg.engine.rundir import RunDir
from incseg.inference import load
from incseg.io import TRUSTED, read_tensors
from incseg.models.files import load_segmenter, save_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.run import train
from incseg.types import Increment, UserError

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", TEXT, re.S))
MOST_LINES = {"pull": 15, "again": 27, "exemplars": 28, "cosine": 6, "squares": 22, "plain": 15}
"""Code lines, docstrings and blank lines not counted: what it takes to add each."""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the examples as a package on the path that nobody has imported or named yet."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    for name, text in EXAMPLES.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo imports and trust, as in a new process."""
    for module in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delenv(TRUSTED, raising=False)


def code_lines(text: str) -> int:
    tree = ast.parse(text)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    doc = {
        line
        for node in documented
        if ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return sum(1 for number, line in enumerate(text.splitlines(), start=1) if line.strip() and number not in doc)


def test_every_example_is_as_short_as_we_say() -> None:
    lines = {name: code_lines(text) for name, text in EXAMPLES.items()}
    assert lines.keys() == MOST_LINES.keys()
    assert {name: number for name, number in lines.items() if number > MOST_LINES[name]} == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [("pull:Pull", {"strength": 2.0}), ("again:Again", {"generator": "small_runs:noise"}), ("exemplars:Exemplars", {})],
)
def test_a_method(name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUSTED, f"mine.{name}")
    settings = {"method": {"name": f"mine.{name}", **options}, "task": "6-4", "train": {"epochs": 1}}
    config = small_config(tmp_path / "run", **settings)
    train(config)
    rows = rows_of(config.folder)
    assert len(rows) == 2
    assert rows[1]["losses"]["ce"] > 0
    if name == "pull:Pull":
        assert rows[1]["losses"]["pull"] > 0
    if name == "exemplars:Exemplars":
        stored = [key for key in read_tensors(RunDir(config.folder).state(1))[0] if key.endswith(".labels")]
        assert len(stored) == 16


def test_a_memory_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images stored after step 0 are shown in step 1, also by a run that is resumed there."""
    monkeypatch.setenv(TRUSTED, "mine.exemplars:Exemplars")
    settings = {"method": {"name": "mine.exemplars:Exemplars"}, "task": "6-4", "train": {"epochs": 1}}
    whole, parts = (small_config(tmp_path / name, **settings) for name in ("whole", "parts"))
    train(whole)
    train(parts)
    for file in (RunDir(parts.folder).row(1), RunDir(parts.folder).model(1), RunDir(parts.folder).state(1)):
        file.unlink()
    train(parts)
    assert_same_run(whole.folder, parts.folder)


def test_a_memory_adds_stored_images_with_their_numbers() -> None:
    from mine.exemplars import Exemplars  # type: ignore[import-not-found]

    from incseg.methods.base import Alone
    from incseg.types import Batch

    def batch(numbers: list[int], label: int) -> Batch:
        labels = torch.full((len(numbers), 4, 4), label, dtype=torch.uint8)
        counts = torch.bincount(labels.flatten(), minlength=256).float()
        return Batch(torch.full((len(numbers), 3, 4, 4), float(label)), labels, counts, numbers)

    method = Exemplars()
    method._processes = Alone()
    method.memory = batch([7, 8], 1).parts(2)
    longer = method.extend(batch([8, 9], 2))
    assert longer.images == [8, 9, 7, 7]  # 8 is there already
    assert longer.labels[:, 0, 0].tolist() == [2, 2, 1, 1]
    assert longer.counts[[1, 2]].tolist() == [32, 32]
    again = Exemplars()
    again.load_state(method.state())
    assert [one.images for one in again.memory] == [[7], [8]]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(again.memory, method.memory, strict=True))


@pytest.mark.parametrize("setting", ["classifier", "backbone"])
def test_a_part_of_the_network(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"classifier": "mine.cosine:Cosine", "backbone": "mine.plain:Plain"}[setting]
    settings = small_config(tmp_path / "run", task="6-4", train={"epochs": 1}, method={"name": "mib"})
    file = write_config(settings, tmp_path / "c.yaml")
    assert main(["train", "--config", file, f"--model.{setting}", name]) == 0
    assert rows_of(tmp_path / "run")[1]["losses"]["ce"] > 0
    saved = RunDir(tmp_path / "run").model(1)
    model, _ = load_segmenter(saved)
    assert getattr(model.config, setting) == name
    if setting == "classifier":
        bias = torch.cat([one.get_parameter("bias") for one in model.classifiers])
        scores = model(torch.randn(1, 3, 32, 32)).logits - bias.view(1, -1, 1, 1)
        assert scores.abs().max() <= 10.001
    forget(monkeypatch)
    with pytest.raises(UserError, match=f"names the {setting} '{name}', which is not part of incseg"):
        load_segmenter(saved)
    assert not any(module.startswith("mine.") for module in sys.modules)
    monkeypatch.setenv(TRUSTED, name)
    assert load(tmp_path / "run").model.config == model.config


def test_a_dataset_has_its_own_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, flags = str(tmp_path / "run"), ["--train.workers", "0", "--eval.workers", "0", "--method", "finetune"]
    assert main(["train", "--data", "mine.squares:Squares", "--out", run, "--threads", "1", *flags]) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["data"]["name"] == config["preset"] == "mine.squares:Squares"
    assert (config["task"], config["model"]["width"], config["train"]["crop"]) == ("bright/dark", 16, 32)
    assert main(["eval", run]) == 0
    assert build_source("mine.squares:Squares").info.classes == ("bright", "dark")
    forget(monkeypatch)
    with pytest.raises(UserError, match=r"config\.yaml names the dataset 'mine\.squares:Squares'"):
        load_run_config(Path(run))
    assert main(["train", "--config", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "other")]) == 2
    assert not any(module.startswith("mine.") for module in sys.modules)


def test_a_dataset_without_preset_asks_for_one(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"    preset = \{.*?\n    \}\n", "", EXAMPLES["squares"], flags=re.S)
    (mine / "mine" / "bare.py").write_text(text)
    assert main(["train", "--data", "mine.bare:Squares"]) == 2
    assert "dataset 'mine.bare:Squares' has no preset of its own; give --preset" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine.pull:Pull", "pathlib:Path"])
def test_a_class_of_another_kind_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUSTED, name)
    with pytest.raises(UserError, match=r"is not a subclass of incseg\.models\.classifiers\.Classifier"):
        Segmenter(ModelConfig("tiny", output_stride=8, classifier=name), True)
    with pytest.raises(UserError, match=r"is not a subclass of incseg\.data\.source\.Source"):
        build_source(name)


def test_a_model_file_of_plain_parts_is_as_before(tmp_path: Path) -> None:
    """Older versions can read it: they do not know classifiers."""
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=8), True)
    model.grow(Increment(("a",), (1,)))
    save_segmenter(tmp_path / "model.safetensors", model, {})
    assert "classifier" not in read_tensors(tmp_path / "model.safetensors")[1]["config"]
