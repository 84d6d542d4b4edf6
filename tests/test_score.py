"""A model tested on any labelled photographs: classes by name, whole photographs, against a naive count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_runs import small_config

import incseg
from incseg.cli import main
from incseg.data.folder import Folder
from incseg.run import train
from incseg.score import score
from incseg.types import UserError

SIZES = [(480, 640), (641, 481), (97, 203), (37, 53)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INCSEG_CACHE", str(tmp_path_factory.mktemp("cache")))
        train(small_config(out, train={"epochs": 1}, task="joint"))
    return out


def photographs(root: Path, classes: list[str]) -> Path:
    """Write photographs of different sizes, with masks of blocks. The first is for training, the others for the
    test."""
    generator = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for number, (width, height) in enumerate(SIZES):
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(root / "images" / f"{number}.png")
        mask = generator.choice([*range(len(classes) + 1), 255], (4, 4)).astype(np.uint8)
        Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST).save(root / "masks" / f"{number}.png")
    (root / "classes.txt").write_text("\n".join(["background", *classes]))
    (root / "val.txt").write_text("1\n2\n3\n")
    return root


def test_against_a_naive_count(model: Path, tmp_path: Path) -> None:
    """'Disc' is the model's disc in another spelling; a unicorn, which it does not know, is background."""
    root = photographs(tmp_path / "photos", ["unicorn", "Disc", "star"])
    predictor = incseg.load(model, device="cpu", threads=1)
    found = score(predictor, Folder(root), ["val"])
    names = {0: "background", 1: "background", 2: "disc", 3: "star"}
    hits, unions, images = ({name: 0 for name in names.values()} for _ in range(3))
    for number in (1, 2, 3):
        mask = np.array(Image.open(root / "masks" / f"{number}.png"))
        labels = predictor.predict(root / "images" / f"{number}.png").labels
        for name in images:
            truth = np.isin(mask, [value for value, known in names.items() if known == name])
            said = labels == predictor.classes.index(name)
            if name == "background":  # with what the model finds of classes that the folder does not name
                said = ~np.isin(labels, [predictor.classes.index(known) for known in ("disc", "star")])
            said &= mask != 255
            hits[name] += int((truth & said).sum())
            unions[name] += int((truth | said).sum())
            images[name] += bool(truth.any())
    wanted = {name: round(100 * hits[name] / unions[name], 2) if images[name] else None for name in images}
    assert {name: one["iou"] for name, one in found["classes"].items()} == wanted
    assert {name: one["images"] for name, one in found["classes"].items()} == images
    assert found["images"] == 3
    shown = [one["boundary_iou"] for one in found["classes"].values() if one["images"]]
    assert found["boundary_mean"] == pytest.approx(sum(shown) / len(shown), abs=0.01)
    assert all(0 <= value <= 100 for value in shown)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photographs(tmp_path / "photos", ["disc", "star"])
    flags = ["--data", "folder", "--root", str(root), "--threads", "1"]
    assert main(["eval", str(model), *flags]) == 0
    assert "IoU on 3 photographs" in capsys.readouterr().out
    assert main(["eval", str(model), *flags, "--split", "all", "--method.balancing", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["classes"].keys()) == (4, {"background", "disc", "star"})
    for wrong, message in (
        (["--split", "val"], "--split is for --data"),
        ([*flags, "--save"], "--save is for tests on a run's own dataset"),
        (["--data", "folder"], "needs its folder; give --root"),
        (["--data", "folders", "--root", str(root)], "did you mean 'folder'"),
    ):
        assert main(["eval", str(model), *wrong]) == 2
        assert message in capsys.readouterr().err


def test_without_common_classes(model: Path, tmp_path: Path) -> None:
    predictor = incseg.load(model, device="cpu", threads=1)
    source = Folder(photographs(tmp_path / "photos", ["unicorn"]))
    with pytest.raises(UserError, match="knows none of the classes of folder; they are unicorn"):
        score(predictor, source, ["val"])
    with pytest.raises(UserError, match="has no photograph in"):
        score(predictor, Folder(photographs(tmp_path / "more", ["disc"])), [])
