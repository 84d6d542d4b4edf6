"""The command line: the output of each command; a mistake gives one line and never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from small_runs import methods_that_differ, rows_of, small_config, write_config

from incseg.cli import main
from incseg.cli.main import COMMANDS
from incseg.cli.settings import parse_run
from incseg.config import RunConfig
from incseg.data import SOURCES
from incseg.methods import METHODS
from incseg.models.backbones import BACKBONES
from incseg.presets import PRESETS, default_preset
from incseg.protocol import RULES, SETTINGS, TASKS
from incseg.run import train
from incseg.types import UserError


def parsed(*argv: str) -> RunConfig:
    return parse_run("incseg train", "Learn.", argv)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder of the test, so that a command that goes too far writes its runs/ there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(tmp_path_factory.mktemp("runs") / "run", train={"epochs": 1})
    train(config)
    return config.folder


# --- help ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: incseg {command}")
    assert len(shown.splitlines()) > 3


def test_every_setting_of_train_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    shown = capsys.readouterr().out
    for flag, text in (
        ("--train.checkpoint_seconds", "the most work that an interruption loses"),
        ("--method.balancing", "how increments of different size are compared"),
        ("--data.train_limit", "for a quick test, not for benchmarks"),
        ("--task", "for example 15-1"),
        ("--eval.size", "shorter side"),
        ("--model.norm", "batch; group"),
    ):
        assert flag in shown
        assert text in shown


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("incseg 0.")


# --- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["trian"], "did you mean 'train'?"),
        (["xyz"], "Allowed: train, sweep, eval"),
        (["train", "--train.bach_size", "4"], "did you mean --train.batch_size?"),
        (["train", "--epochs", "4"], "did you mean --train.epochs?"),
        (["train", "stray"], "unknown argument 'stray'"),
        (["train", "--preset", "shape-quick"], "did you mean 'shapes-quick'?"),
        (["train", "--method", "evidental"], "did you mean 'evidential'?"),
        (["train", "--method", "no.such:Thing"], "cannot be imported"),
        (["train", "--data", "vok"], "did you mean 'voc'?"),
        (["train", "--data", "voc"], "give --root DIR"),
        (["train", "--data", "voc", "--root", "absent"], "no VOC2012"),
        (["train", "--task", "6_2"], "did you mean '6-2'?"),
        (["train", "--task", "disk/ring"], "did you mean 'disc'?"),
        (["train", "--setting", "overlaped"], "did you mean 'overlapped'?"),
        (["train", "--rules", "plob"], "did you mean 'plop'?"),
        (["train", "--order", "b"], "order 'b' exists for ade20k only"),
        (["train", "--model.backbone", "resnet19"], "did you mean 'resnet18'?"),
        (["train", "--model.norm", "grop"], "did you mean 'group'?"),
        (["train", "--method.balancing", "od"], "Allowed: none, paper, ratio, exact, odds"),
        (["train", "--train.lr", "fast"], "train.lr is 'fast'; it must be a number"),
        (["train", "--train.clip", "fast"], "train.clip is 'fast'; it must be a number or null"),
        (["train", "--train.epochs", "1.5"], "train.epochs is '1.5'; it must be a whole number"),
        (["train", "--train.epochs", "-1"], "train.epochs is -1; it must be at least 1"),
        (["train", "--train.scale", "[1,2,3]"], "it must be [a number, a number]"),
        (["train", "--train.scale", "2"], "it must be [a number, a number]"),
        (["train", "--train.flip", "maybe"], "it must be true or false"),
        (["train", "--train.epochs"], "expected one argument"),
        (["train", "--seed", "-1"], "seed is -1"),
        (["train", "--threads", "0"], "threads is 0"),
        (["train", "--device", "gpu"], "device 'gpu' is unknown"),
        (["train", "--config"], "--config needs a value"),
        (["train", "--method"], "--method.name needs a value"),
        (["train", "--data.image_size", "3"], "image_size"),
        (["train", "--data.presence", "absent.txt"], "absent.txt: no such file"),
        (["eval"], "RUN"),
        (["eval", "absent"], "absent does not exist"),
        (["eval", __file__], "is a file, not a run folder; give the folder that incseg train wrote"),
        (["train", "--config", "absent.yaml"], "--config absent.yaml does not exist"),
        (["train", "--config", "."], "--config . is a folder"),
        (["protocol", "--data", "shapes"], "--task"),
        (["protocol", "--data", "shapes", "--task", "12-2"], "12-2"),
        (["protocol", "--data", "shapes", "--task", "6-2", "--jso"], "did you mean --json?"),
        (["data", "chek", "--data", "shapes"], "check"),
        (["data", "check", "--data", "folder"], "give --root DIR"),
        (["list", "--everything"], "unknown argument '--everything'"),
        (["predict", "absent", "x.png", "--out", "o"], "x.png"),
    ],
)
def test_a_mistake_gives_one_line(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.err.endswith("\n")
    assert expected in shown.err
    assert "Traceback" not in shown.err + shown.out
    assert not Path("runs").exists()


def test_a_wrong_option_of_eval(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, expected in (
        (["--stpe", "1"], "did you mean --step?"),
        (["--step", "9"], "has no step 9; its finished steps are 0 to 2"),
        (["--step", "last"], "invalid int value: 'last'"),
        (["--method.balncing", "odds"], "did you mean --method.balancing?"),
        (["--method.balancing", "od"], "unknown method.balancing 'od'"),
        (["--method.balancing"], "expected one argument"),
        (["more"], "unknown argument 'more'"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--root", "elsewhere", "--step", "-1"], "has no step -1"),
    ):
        assert main(["eval", str(finished), *argv]) == 2, argv
        error = capsys.readouterr().err
        assert expected in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (UserError("two\nlines"), 2, "error: two lines\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (MemoryError(), 2, "error: out of memory; use a smaller --train.batch_size"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), 2, "error: out of memory; use a smaller"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            2,
            "error: out of memory",
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), 2, "error: out of memory"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
            2,
            "error: a loader process has ended",
        ),
        (RuntimeError("[gloo] Connection closed by peer [::1]:1"), 2, "error: another process of this run has ended"),
        (OSError(28, "No space left on device", "runs/x"), 2, "error: No space left on device runs/x; check that"),
        (OSError("cannot write x (disk full)"), 2, "error: cannot write x (disk full); check that"),
        (FileExistsError(17, "File exists", "x"), 2, "error: File exists x; a file of this name exists"),
        (
            NotADirectoryError(20, "Not a directory", "x/y"),
            2,
            "error: Not a directory x/y; a part of this path",
        ),
        (
            IsADirectoryError(21, "Is a directory", "x"),
            2,
            "error: Is a directory x; this is a folder; give",
        ),
        (OSError(36, "File name too long", "x"), 2, "error: File name too long x; choose a shorter name"),
    ],
)
def test_failures_of_the_machine_cost_one_line(
    raised: BaseException, code: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> int:
        raise raised

    monkeypatch.setattr("incseg.cli.list.run", fail)
    assert main(["list"]) == code
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert error.count("\n") == 1


def test_our_own_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: Any) -> int:
        raise RuntimeError("shape '[2, 3]' is invalid for input of size 7")

    monkeypatch.setattr("incseg.cli.list.run", fail)
    with pytest.raises(RuntimeError, match="is invalid for input"):
        main(["list"])


def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "incseg", "list"], stdout=_closed_pipe(), stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stderr == ""


def _closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


# --- what wins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 2])
def test_explicit_flags_win_over_preset_and_file_in_any_order(order: int, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train: {epochs: 7, crop: 40}\ntask: 8-2\n")
    pairs = [["--train.epochs", "3"], ["--preset", "shapes-quick"], ["--config", "c.yaml"]]
    config = parsed(*(token for pair in pairs[order:] + pairs[:order] for token in pair))
    assert config.train.epochs == 3, "the flag"
    assert (config.train.crop, config.task) == (40, "8-2"), "the file"
    assert config.train.batch_size == PRESETS["shapes-quick"]["train"]["batch_size"], "the preset"
    assert config.train.momentum == 0.9, "the default"
    assert config.preset == "shapes-quick"


def test_a_flag_may_have_the_default_value() -> None:
    assert PRESETS["shapes-quick"]["train"]["lr"] != 0.01
    assert parsed("--preset", "shapes-quick", "--train.lr", "0.01").train.lr == 0.01


def test_the_last_of_two_flags_wins() -> None:
    assert parsed("--train.epochs=2", "--train.epochs", "4").train.epochs == 4
    assert parsed("--method", "finetune", "--method=joint").method == {"name": "joint"}


@pytest.mark.parametrize("data", SOURCES)
def test_each_dataset_has_its_preset(data: str) -> None:
    config = parsed("--data", data)
    assert config.preset == default_preset(data)
    assert config.model.backbone == PRESETS[default_preset(data)]["model"]["backbone"]


@pytest.mark.parametrize(("preset", "method"), [(p, method) for p in PRESETS for method in methods_that_differ(p)])
def test_presets_are_accepted_by_methods(preset: str, method: str, tmp_path: Path) -> None:
    config = parsed("--preset", preset, "--method", method)
    for_method = PRESETS[preset].get("for_method", {}).get(method, {})
    for group in ("data", "method", "model", "train", "eval"):
        for key, value in {**PRESETS[preset].get(group, {}), **for_method.get(group, {})}.items():
            assert config.as_dict()[group][key] == value
    assert parsed("--config", write_config(config, tmp_path / "c.yaml")).as_dict() == config.as_dict()


# --- files ---------------------------------------------------------------------------------------------------


def test_a_saved_configuration_gives_itself_again(finished: Path) -> None:
    saved = yaml.safe_load((finished / "config.yaml").read_text())
    again = parsed("--config", str(finished / "config.yaml"))
    complete = saved | {"method": again.method}  # the run was made without naming its method's defaults
    assert again.as_dict() == complete
    assert again.method["name"] == "evidential"


def test_every_setting_of_flags_survives_the_file(tmp_path: Path) -> None:
    config = parsed(
        "--data=folder", "--root", "my data/2012", "--task", '[["a b", "c"], ["d"]]', "--out", "123", "--seed", "7",
        "--train.clip", "1e-5", "--train.weight_decay", "1e-7", "--model.dilations", "[1, 2, 4]", "--train.scale",
        "[0.25, 1]", "--model.weights", "none.pth", "--method.ridge", "0.5", "--train.flip", "false", "--precision",
        "bfloat16", "--train.workers", "0",
    )  # fmt: skip
    assert config.as_dict() == parsed("--config", write_config(config, tmp_path / "c.yaml")).as_dict()
    assert (config.out, config.data.root, config.train.flip) == ("123", "my data/2012", False)
    assert tuple(config.model.dilations or ()) == (1, 2, 4)
    assert (config.train.clip, config.train.weight_decay) == (1e-5, 1e-7)


def test_short_forms_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "method: finetune\ndata: shapes\nmodel:\n  dilations: [1, 2, 3]\ntrain: {lr: 1e-3}"
    )
    config = parsed("--config", "c.yaml")
    assert config.method == {"name": "finetune"}
    assert config.data.name == "shapes"
    assert config.train.lr == 0.001
    assert list(config.model.dilations or ()) == [1, 2, 3]


def test_another_method_drops_the_options_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("method: {name: evidential, prior: 0.3}")
    assert parsed("--config=c.yaml").method["prior"] == 0.3
    assert parsed("--config=c.yaml", "--method", "finetune").method == {"name": "finetune"}
    assert parsed("--config=c.yaml", "--method", "evidential").method["prior"] == 0.3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("train: {bach_size: 4}", "c.yaml: unknown setting 'train.bach_size'; did you mean train.batch_size?"),
        ("sead: 4", "c.yaml: unknown setting 'sead'; did you mean seed?"),
        ("method: {name: finetune, balancing: odds}", "unknown setting 'method.balancing'"),
        ("method: finetun", "did you mean 'finetune'?"),
        ("method: [finetune]", "'method' holds ['finetune']; write its settings indented under it"),
        ("method: {name: 5}", "'method.name' holds 5"),
        ("data: {name: [voc]}", "'data.name' holds ['voc']"),
        ("preset: 3", "'preset' holds 3"),
        ("train: fast", "'train' holds 'fast'"),
        ("train: {epochs: many}", "train.epochs is 'many'; it must be a whole number"),
        ("train: {epochs: [1]}", "train.epochs is '[1]'; it must be a whole number"),
        ("train: {scale: [1]}", "it must be [a number, a number]"),
        ("train: {epochs: null}", "train.epochs is 'None'"),
        ("seed: -3", "seed is -3"),
        ("1: 2", "unknown setting '1'"),
        ("- a\n- b", "c.yaml holds list, not settings"),
        ("", "c.yaml holds NoneType, not settings"),
        ("just words", "c.yaml holds str, not settings"),
        ("a: [1", "c.yaml is not valid YAML"),
        ("a: !!python/object:os.system x", "c.yaml is not valid YAML"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "c.yaml is not valid YAML"),
        (b"\x00\x01", "c.yaml is not valid YAML"),
    ],
)
def test_faulty_files_are_named(
    content: str | bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["train", "--config", "c.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error


def test_a_folder_in_place_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


# --- commands ------------------------------------------------------------------------------------------------


def test_train_and_eval_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = write_config(small_config(tmp_path / "run", train={"epochs": 1}), tmp_path / "c.yaml")
    assert main(["train", "--config", settings]) == 0
    shown = capsys.readouterr().out
    assert "evidential on shapes 6-2, overlapped, seed 3" in shown
    assert "label rules: plop" in shown
    assert f"run folder: {tmp_path / 'run'}" in shown
    row = rows_of(tmp_path / "run")[-1]
    assert f"Base {row['base']:.1f}  New {row['new']:.1f}  All {row['all']:.1f}  Inc {row['inc']:.1f}" in shown
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    again = json.loads(printed.out)
    assert {**again, **{key: row[key] for key in ("losses", "gradient", "reused_from")}} == row
    assert "step 2" in printed.err
    assert main(["eval", str(tmp_path / "run"), "--step", "0", "--method.balancing=odds"]) == 0
    assert "step 0" in capsys.readouterr().out


def test_run_folders_are_named_for_their_settings() -> None:
    assert parsed("--seed", "5").folder == Path("runs/shapes-6-2-overlapped-evidential-s5")
    assert parsed("--task", "disc/ring, star").folder.name == "shapes-disc_ring__star-overlapped-evidential-s42"
    assert parsed("--out", "here/x").folder == Path("here/x")


def test_protocol_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protocol", "--data", "shapes", "--task", "6-2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {"dataset", "task", "setting", "order", "rules", "steps"} == summary.keys()
    assert [step["index"] for step in summary["steps"]] == [0, 1, 2]
    for step in summary["steps"]:
        assert {"index", "classes", "ids", "train_images"} <= step.keys()
        assert len(step["classes"]) == len(step["ids"])
        assert step["train_images"] > 0
    assert [i for step in summary["steps"] for i in step["ids"]] == list(range(1, 11))


def test_list_mentions_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    words = [word.strip(",;") for word in shown.split()]
    for name in (*SOURCES, *METHODS, *BACKBONES, *PRESETS, *SETTINGS, *RULES):
        assert name in words, name
    for tasks in TASKS.values():
        for task in tasks:
            assert task in words, task
    assert "package.module:Class" in words
    assert "incseg[timm]" in shown


def broken_folder(root: Path) -> None:
    """Write ten images, five of them with a fault each, all different."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    (root / "classes.txt").write_text("cat\n[dog]\n")
    for number in range(10):
        Image.new("RGB", (8, 6)).save(root / "images" / f"{number}.png")
        Image.fromarray(np.full((6, 8), number % 3, dtype=np.uint8)).save(root / "masks" / f"{number}.png")
    (root / "masks" / "0.png").unlink()
    Image.new("RGB", (8, 6)).save(root / "masks" / "1.png")
    Image.fromarray(np.full((6, 8), 77, dtype=np.uint8)).save(root / "masks" / "2.png")
    Image.new("RGB", (9, 9)).save(root / "images" / "3.png")
    (root / "images" / "4.png").write_bytes(b"no image")


def test_data_check_lists_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken_folder(tmp_path / "d")
    assert main(["data", "check", "--data", "folder", "--root", "d"]) == 1
    shown = capsys.readouterr().out
    faults = [line for line in shown.splitlines() if re.match(r"d/.*\.png: |folder (train|val) '", line)]
    assert len(faults) == 5
    for expected in (
        "masks/0.png: no such file",
        "masks/1.png: the mask has mode RGB",
        "masks/2.png: the mask holds 77",
        "'3': the image is 9×9 but its mask 8×6",
        "images/4.png: cannot be read as an image",
    ):
        assert sum(expected in fault for fault in faults) == 1, expected
    assert "1 of " in shown
    assert "images have no mask ('0')" in shown
    assert "[dog]" in shown
    assert shown.rstrip().endswith("5 faults")


def test_data_check_of_a_sound_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "export", "--data", "shapes", "--limit", "4", "--out", "d"]) == 0
    assert "8 images with masks in d" in capsys.readouterr().out
    assert main(["data", "check", "--data", "folder", "--root", "d"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("no faults")


def test_training_on_a_broken_folder_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken_folder(tmp_path / "d")
    assert main(["train", "--data", "folder", "--root", "d", "--task", "joint", "--model.weights", "null"]) == 2
    error = capsys.readouterr().err
    assert re.match(r"error: d/masks/\d\.png: .*; .*\n$", error)
    assert not Path("runs").exists()


@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_threads_wait_without_spinning(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has set it. It must be set before torch is loaded, and a command starts without torch."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    assert main(["completion", "bash"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == (own or "PASSIVE")
