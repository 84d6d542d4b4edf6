"""The public API: lazy imports, types, and the same runs and predictions as on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import PYTHON_PATH, assert_same_run

import incseg
from incseg.cli import main
from incseg.data.folder import export
from incseg.data.shapes import Shapes
from incseg.io import load_tensors
from incseg.losses.softmax import cross_entropy_sum
from incseg.methods.base import Method

SMALL = {
    "seed": 3,
    "device": "cpu",
    "threads": 1,
    "preset": "shapes-quick",
    "train": {"epochs": 1, "crop": 48, "workers": 0},
    "eval": {"size": 48, "workers": 0},
    "model": {"width": 16},
}
FLAGS = (
    "--seed=3", "--device=cpu", "--threads=1", "--preset=shapes-quick", "--train.epochs=1", "--train.crop=48",
    "--train.workers=0", "--eval.size=48", "--eval.workers=0", "--model.width=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mine")
    export(Shapes(seed=5, train_size=28, val_size=6, image_size=48), root)
    return root


@pytest.fixture(scope="module")
def first(mine: Path, tmp_path_factory: pytest.TempPathFactory) -> incseg.Run:
    out = tmp_path_factory.mktemp("runs") / "first"
    return incseg.train(
        data="folder", root=mine, task=[["disc", "square"], ["star"]], method="analytic", out=out, quiet=True, **SMALL
    )


def test_the_import_is_light() -> None:
    """Importing the package, its version, its error and the list of its names imports neither torch nor NumPy."""
    script = (
        "import sys, incseg; incseg.__version__; incseg.UserError; assert set(incseg.__all__) <= set(dir(incseg));"
        "print([name for name in ('torch', 'numpy', 'PIL', 'rich') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": PYTHON_PATH}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_public_name_is_there_and_has_an_example() -> None:
    for name in incseg.__all__:
        assert getattr(incseg, name) is getattr(incseg, name)
    for name in (
        "Predictor",
        "Protocol",
        "Result",
        "Run",
        "evaluate",
        "extend",
        "load",
        "push",
        "remove",
        "to_onnx",
        "train",
    ):
        assert ">>> " in (getattr(incseg, name).__doc__ or ""), name
    assert ">>> import incseg" in (incseg.__doc__ or "")
    with pytest.raises(AttributeError, match="module 'incseg' has no attribute 'trian'"):
        incseg.trian  # noqa: B018


def test_extend_stays_a_function_when_everything_is_imported() -> None:
    """A module incseg.extend would replace the function when it is imported."""
    for name in incseg.__all__:
        assert not (Path(incseg.__file__).parent / f"{name}.py").exists()


def test_training_is_that_of_the_command_line(first: incseg.Run, mine: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "command"
    flags = ["--data=folder", f"--root={mine}", "--task=disc,square/star", "--method=analytic", f"--out={out}", *FLAGS]
    assert main(["train", *flags]) == 0
    capsys.readouterr()
    assert_same_run(first.folder, out)
    seconds = [row["seconds"] for row in incseg.Run(out, "analytic").rows]
    dotted = {
        "train.epochs": 1,
        "train": {"crop": np.int64(48), "workers": 0},
        "data.root": mine,
        "data": {"name": "folder"},
    }
    again = incseg.train(**{**SMALL, **dotted}, task="disc,square/star", method="analytic", out=out)
    assert again.folder == out
    assert [row["seconds"] for row in again.rows] == seconds  # the same settings, so nothing was trained again
    table = first.table().splitlines()
    assert table[0].split() == ["step", "learns", "images", "Base", "New", "All", "Inc"]
    assert len(table) == 3
    assert first.forgetting is None
    assert first.model(0, "cpu").classes == ("background", "disc", "square")


def test_extending_is_that_of_the_command_line(first: incseg.Run, mine: Path, tmp_path: Path, capsys) -> None:
    here = {"device": "cpu", "threads": 1, "train": {"workers": 0}, "eval": {"workers": 0}}
    run = incseg.extend(
        first.model(device="cpu"), root=mine, classes=["ring"], out=tmp_path / "python", quiet=True, **here
    )
    assert capsys.readouterr().out == ""
    out = tmp_path / "command"
    flags = ["--classes=ring", f"--out={out}", "--device=cpu", "--threads=1", "--train.workers=0", "--eval.workers=0"]
    assert main(["extend", str(first.folder), f"--root={mine}", *flags]) == 0
    assert_same_run(run.folder, out)
    assert run.forgetting is not None
    assert set(run.forgetting["classes"]) == {"disc", "square", "star"}
    rows = run.table().splitlines()
    assert rows[0].split() == ["class", "photographs", "unchanged", "IoU", "before", "IoU"]
    assert [row.split()[:2] for row in rows[1:5]] == [
        ["disc", "old"],
        ["square", "old"],
        ["star", "old"],
        ["ring", "new"],
    ]
    assert run.model(device="cpu").classes == ("background", "disc", "square", "star", "ring")


class Mine(Method):
    """A method from outside incseg."""

    def losses(self, batch, out, teacher, step):
        labels = batch.labels[:, ::8, ::8]
        return {"ce": cross_entropy_sum(out.logits, labels) / labels.numel()}


def test_a_class_of_ones_own_is_a_method(tmp_path: Path) -> None:
    data = {"name": "shapes", "train_size": 16, "val_size": 4, "image_size": 48}
    run = incseg.train(data=data, task="joint", method=Mine, out=tmp_path / "run", quiet=True, **SMALL)
    assert run.method == "test_api:Mine"
    assert isinstance(run.model(device="cpu").method, Mine)
    assert run.table().splitlines()[0].split() == ["class", "IoU"]
    # it was named in this process; tests/test_damage.py has what nobody named
    assert isinstance(incseg.load(run.folder, device="cpu").method, Mine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"epoch": 3}}, r"unknown setting 'train\.epoch'; did you mean train\.epochs\?"),
        ({"train.lr": "fast"}, r"train\.lr is 'fast'; it must be a number"),
        ({"train": 3}, "train is 3; give its settings as a dict"),
        ({"method": {"name": "evidential", "balancing": "oods"}}, r"method\.balancing 'oods'; did you mean 'odds'"),
        ({"speed": 1}, "unknown setting 'speed'"),
        ({"preset": 3}, "preset is 3; give a name"),
        ({"data": "vocc"}, "unknown dataset 'vocc'; did you mean 'voc'"),
        ({"method": "lfw"}, "unknown method 'lfw'; did you mean 'lwf'"),
    ],
)
def test_wrong_settings(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(incseg.UserError, match=message):
        incseg.train(out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": {"epoch": 3}}, r"unknown setting 'train\.epoch'; did you mean"),
        ({"task": "joint"}, "unknown setting 'task' of an extension"),
        ({"recipe": "gentl"}, "unknown recipe 'gentl'; did you mean 'gentle'"),
        ({"classes": ["rign"]}, "unknown class 'rign'; did you mean 'ring'"),
        ({"root": "gone"}, "gone"),
    ],
)
def test_wrong_extensions(first: incseg.Run, mine: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(incseg.UserError, match=message):
        incseg.extend(first, **{"root": mine, "out": tmp_path / "run", **options})


def test_removing_evaluating_and_exporting_are_those_of_the_command_line(
    first: incseg.Run, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="pip install incseg[onnx] brings what runs exported models")
    less = incseg.remove(first, ["star"], tmp_path / "less.safetensors")
    assert less.classes == ("background", "disc", "square")
    assert main(["remove", str(first.folder), "--classes", "star", "--out", str(tmp_path / "same.safetensors")]) == 0
    (mine_, my_about), (theirs, about) = (load_tensors(tmp_path / f"{name}.safetensors") for name in ("less", "same"))
    assert my_about == about
    assert all(torch.equal(mine_[name], tensor) for name, tensor in theirs.items())
    capsys.readouterr()
    found = incseg.evaluate(less, data="folder", root=mine)
    assert main(["eval", str(tmp_path / "same.safetensors"), "--data", "folder", "--root", str(mine), "--json"]) == 0
    assert found == json.loads(capsys.readouterr().out)
    row = incseg.evaluate(first)
    assert row["iou"] == first.rows[-1]["iou"]
    with pytest.raises(incseg.UserError, match="give data and root"):
        incseg.evaluate(less)
    assert main(["export", str(first.folder), "--out", str(tmp_path / "command.onnx")]) == 0
    file = incseg.to_onnx(first, tmp_path / "mine.onnx")
    pictures = [np.full((48, 60, 3), value, np.uint8) for value in (0, 200)]
    labels = [
        [result.labels.tolist() for result in incseg.load(one).predict(pictures)]
        for one in (file, tmp_path / "command.onnx")
    ]
    assert labels[0] == labels[1]
    with pytest.raises(incseg.UserError, match=r"ends in \.onnx"):
        incseg.to_onnx(first, tmp_path / "mine.pt")


def test_a_video_is_predicted_frame_by_frame(first: incseg.Run) -> None:
    """No frame is read in advance and none is stored, so a video may have any length."""
    read, frames = 0, list[Any]()

    class Frame(np.ndarray):  # a plain array takes no weak reference
        pass

    def video() -> Iterator[np.ndarray]:
        nonlocal read
        while True:
            read += 1
            frame = np.full((48, 48, 3), read % 256, np.uint8).view(Frame)
            frames.append(weakref.ref(frame))
            yield frame
            del frame

    results = first.model().predict(video())
    assert read == 0
    names = []
    for number, result in zip(range(1, 6), results, strict=False):
        assert read == number
        assert sum(frame() is not None for frame in frames) <= 2
        names.append(result.name)
    assert names == ["image", "image_2", "image_3", "image_4", "image_5"]
