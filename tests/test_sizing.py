"""The input size follows from the size of the objects, and the time is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from incseg.cli import main
from incseg.data.folder import export
from incseg.data.presence import PixelCounts
from incseg.data.shapes import Shapes
from incseg.data.transforms import CELLS, choose_size, object_sides
from incseg.engine.rundir import RunDir, read_config

PHOTOGRAPHS = [(480, 640)] * 50


def counts(*areas: dict[int, int]) -> PixelCounts:
    histograms = []
    for image in areas:
        histogram = np.zeros(256, dtype=np.int64)
        for value, pixels in image.items():
            histogram[value] = pixels
        histograms.append(histogram)
    return PixelCounts.of_histograms([str(n) for n in range(len(areas))], histograms)


def test_the_side_of_the_median_object() -> None:
    pixels = counts({0: 900, 1: 100}, {0: 600, 1: 400}, {0: 1000}, {0: 100, 1: 900, 2: 25})
    sizes = [(50, 20), (20, 50), (20, 50), (40, 20)]
    sides = object_sides(pixels, sizes, {1: "bag", 2: "hat", 3: "never shown"})
    assert sides == pytest.approx({"bag": 20 / 20, "hat": 5 / 20})


def test_small_objects_want_a_larger_input() -> None:
    """Three cells of 16 pixels for an object of a tenth of the shorter side: at least 480 pixels."""
    assert choose_size({"bag": 0.5}, (224, 448, 896), PHOTOGRAPHS, 16).size == 224
    chosen = choose_size({"bag": 0.11}, (224, 448, 896), PHOTOGRAPHS, 16)
    assert (chosen.size, chosen.wanted) == (448, 448)
    assert chosen.sides["bag"] == pytest.approx(0.11 * 448 / 16)
    assert chosen.sides["bag"] >= CELLS
    assert "shorter side 448" in str(chosen)
    assert "would be better" not in str(chosen)


def test_the_time_that_it_takes_is_bounded() -> None:
    """A size at which many photographs would take too long is not chosen, and the text has the wanted size."""
    few = choose_size({"pin": 0.02}, (224, 448, 896), PHOTOGRAPHS, 16)
    many = choose_size({"pin": 0.02}, (224, 448, 896), PHOTOGRAPHS * 100, 16)
    assert (few.size, many.size) == (896, 224)
    assert many.wanted == 896
    assert "a size of 896, which takes longer" in str(many)
    assert choose_size({"pin": 0.001}, (1000, 2000), PHOTOGRAPHS, 16).size == 1000  # nothing smaller is allowed


def test_one_class_of_tiny_things_does_not_decide() -> None:
    sides = {"coat": 0.4, "dress": 0.4, "pants": 0.3, "shoes": 0.2, "bracelet": 0.01}
    assert choose_size(sides, (224, 320, 448, 896), PHOTOGRAPHS, 16).size == 320
    assert choose_size({}, (224, 320), PHOTOGRAPHS, 16).size == 224


def test_training_on_own_photographs_chooses_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder has the size. A resumed run uses it again, and a flag wins."""
    monkeypatch.chdir(tmp_path)
    export(Shapes(seed=5, train_size=12, val_size=4, image_size=64), tmp_path / "photos")
    tiny = ["--model.backbone", "tiny", "--model.weights", "null", "--model.width", "8", "--train.epochs", "1"]
    common = [*tiny, "--model.stages", "null", "--threads", "1", "--train.workers", "0", "--eval.workers", "0"]
    train = ["train", "--data", "folder", "--root", "photos", *common, "--train.batch_size", "4"]
    assert main([*train, "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert "input: shorter side 224 pixels; width of the median object" in said
    assert "photographs.png" in said
    assert "Inc" not in said
    assert (tmp_path / "run" / "photographs.png").is_file()
    saved = read_config(RunDir("run").config)
    assert (saved["train"]["crop"], saved["eval"]["size"]) == (224, 224)
    assert main([*train, "--out", "run"]) == 0
    assert "as the run began" in capsys.readouterr().out
    assert main([*train, "--out", "other", "--train.crop", "64", "--eval.size", "64", "--table", "steps"]) == 0
    assert "Inc" in capsys.readouterr().out
    assert read_config(RunDir("other").config)["train"]["crop"] == 64
