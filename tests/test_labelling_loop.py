"""The labelling loop: a model labels images for a tool, the most uncertain first, and learns from the corrected
labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import small_config
from test_inference import picture, save_model

from incseg.cli import main
from incseg.cli.predict import image_uncertainty
from incseg.config import DataConfig, load_run_config
from incseg.data import build_source
from incseg.data.convert import convert
from incseg.data.shapes import Shapes
from incseg.data.source import SPLITS, Source
from incseg.inference import Predictor, load
from incseg.run import train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Write two folders with images of one name, awkward names, and one broken image."""
    for i, name in enumerate(["a/one.png", "b/one.jpg", "a/with blank.png", "a/50%.png", "a/new\nline.png"]):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        picture(60 + i, 48, seed=i).save(tmp_path / "in" / name)
    return tmp_path / "in"


def predicted(*arguments: object) -> int:
    return main(["predict", *map(str, arguments), "--device", "cpu", "--threads", "1"])


def masks(source: Source) -> Iterator[tuple[str, Any, np.ndarray]]:
    for split in SPLITS:
        for index, name in enumerate(source.names(split)):
            yield name, *source.pair(split, index)


@pytest.mark.parametrize("to", ["coco", "labelme", "yolo"])
def test_predicted_labels_are_read_back_as_predicted(to: str, model: Path, photographs: Path, tmp_path: Path) -> None:
    out = tmp_path / "todo"
    assert predicted(model, photographs / "a", photographs / "b", "--format", to, "--out", out) == 0
    predictor: Predictor = load(model, device="cpu", threads=1)
    source = build_source("auto", out)
    assert source.info.name == to
    found = dict[str, np.ndarray]()
    for name, image, mask in masks(source):
        labels = predictor.predict(image).labels
        names = np.array(["background", *source.info.classes])[mask]
        assert (names == np.array(predictor.classes)[labels]).all()
        found[name] = mask
    assert sorted(found) == ["50%", "new_line", "one", "one_2", "with blank"]
    listed = json.loads((out / "predictions.json").read_text())["images"]
    uncertain = [one["uncertainty"] for one in listed]
    assert uncertain == sorted(uncertain, reverse=True)
    assert len(set(uncertain)) == 5
    if to == "coco":
        order = json.loads((out / "annotations" / "instances_default.json").read_text())["images"]
        assert [Path(one["file_name"]).stem for one in order] == [one["name"].replace("\n", "_") for one in listed]
    assert not list(tmp_path.glob(".incseg-*")), "what waited to be ranked is deleted"


def test_only_the_most_uncertain_are_written_and_nothing_is_overwritten(
    model: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photographs / "a" / "broken.png").write_bytes(b"no image")
    every, top = tmp_path / "every", tmp_path / "top"
    assert predicted(model, photographs / "a", "--format", "yolo", "--out", every) == 1
    argv = (model, photographs / "a", "--format", "yolo", "--out", top, "--top", 2, "--tolerance", 1)
    assert predicted(*argv) == 1
    ranked = json.loads((every / "predictions.json").read_text())
    best = json.loads((top / "predictions.json").read_text())
    assert best["images"] == ranked["images"][:2]
    assert len(best["skipped"]) == len(ranked["skipped"]) == 1
    assert len(list((top / "images").iterdir())) == 2
    assert (top / "train.txt").read_text().splitlines()[0].endswith(Path(best["images"][0]["file"]).name)
    corrected = next((top / "labels").iterdir())
    corrected.write_text("")
    capsys.readouterr()
    assert predicted(*argv) == 2
    assert "exists and is not an empty folder; choose a new one" in capsys.readouterr().err
    assert corrected.read_text() == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top", "3"], "--top is for labels to be corrected; add --format"),
        (["--tolerance", "1"], "--tolerance is for labels to be corrected"),
        (["--format", "coco", "--top", "0"], "--top is 0; give a number of images from 1"),
        (["--format", "coco", "--probabilities"], "--probabilities are written with --format png alone"),
        (["--format", "coco", "--tolerance", "nan"], "--tolerance is nan; give pixels, 0 to 100"),
        (["--format", "voc"], "invalid choice: 'voc'"),
    ],
)
def test_wrong_options(
    flags: list[str], message: str, model: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predicted(model, photographs / "b", "--out", tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_image_is_uncertain_where_its_pixels_cannot_decide() -> None:
    """An image without any object is all background with u = 1, which is certain."""
    nothing, object_, torn = np.ones((4, 4)), np.zeros((4, 4)), np.full((4, 4), 0.5)
    assert [image_uncertainty(u, is_background=True) for u in (nothing, object_, torn)] == [0, 0, 1]
    assert [image_uncertainty(u, is_background=False) for u in (nothing, object_, torn)] == [1, 0, 0.5]


def test_labels_of_a_tool_are_learnt_extended_and_tested_like_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = Shapes(train_size=24, val_size=6, image_size=48)
    for to in ("folder", "coco", "labelme"):
        convert(scenes, to, tmp_path / to)
    out = tmp_path / "run"
    config = small_config(
        out, task="disc,square", data={"name": "auto", "root": str(tmp_path / "coco")}, method={"name": "analytic"}
    )
    assert config.data.name == "coco"
    train(config)
    assert load_run_config(out).data == DataConfig(**vars(config.data))
    assert (out / "photographs.png").is_file()
    assert json.loads((out / "protocol.json").read_text())["steps"][0]["classes"] == ["disc", "square"]
    tested = []
    for data in ("folder", "labelme"):
        capsys.readouterr()
        argv = ["eval", str(out), "--data", data, "--root", str(tmp_path / data), "--json", "--threads", "1"]
        assert main(argv) == 0
        tested.append(json.loads(capsys.readouterr().out))
    assert tested[0] == tested[1]
    argv = ["extend", str(out), "--data", "auto", "--root", str(tmp_path / "labelme"), "--classes", "star"]
    assert main([*argv, "--out", str(tmp_path / "more"), "--threads", "1", "--train.workers", "0"]) == 0
    assert load_run_config(tmp_path / "more").data.name == "labelme"
    assert "disc, square, star" in capsys.readouterr().out
