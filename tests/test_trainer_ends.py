"""The small ends of training: less than a batch, one image, a step without images, no test image of a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import listening, reevaluated_row, rows_of, small_config

from incseg.engine.rundir import RunDir
from incseg.models.files import load_segmenter, save_segmenter
from incseg.run import evaluate, train
from incseg.types import UserError


def test_a_set_smaller_than_a_batch_still_trains(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", data={"train_limit": 3}, train={"batch_size": 16, "epochs": 1})
    train(config)
    rows = rows_of(config.folder)
    assert [row["train_images"] for row in rows] == [3, 3, 3]
    assert reevaluated_row(config.folder) == rows[-1]


def test_one_image_trains_where_no_batch_statistics_are_needed(tmp_path: Path) -> None:
    one = {"data": {"train_limit": 1, "val_limit": 1}, "train": {"batch_size": 1, "epochs": 1}}
    config = small_config(tmp_path / "group", model={"norm": "group"}, **one)
    train(config)
    assert [row["train_images"] for row in rows_of(config.folder)] == [1, 1, 1]
    assert np.load(RunDir(config.folder).confusion(2)).sum() <= 48 * 48
    with pytest.raises(UserError, match=r"batch of one image: .* or norm 'group'"):
        train(small_config(tmp_path / "batch", **one))


def test_one_image_is_repeated_to_fill_a_batch(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", task="joint", data={"train_limit": 1}, train={"batch_size": 4, "epochs": 1})
    train(config)
    assert rows_of(config.folder)[0]["train_images"] == 1


def test_a_model_that_diverged_is_named(tmp_path: Path) -> None:
    """The last update can leave weights with which training was still finite and the test is not."""
    config = small_config(tmp_path / "run", task="joint", train={"epochs": 1})
    train(config)
    file = RunDir(config.folder).model(0)
    model, about = load_segmenter(file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e30)
    save_segmenter(file, model, about)
    with pytest.raises(UserError, match=r"step 0: the model's scores are not finite.*lower the learning rate"):
        evaluate(config.folder)


def test_a_step_without_images_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", task="8-1", data={"train_size": 1})
    with pytest.raises(UserError, match=r"step \d \(.*\) has no training image; see incseg protocol"):
        train(config)


@pytest.mark.parametrize("limit", ["train_limit", "val_limit"])
def test_a_limit_of_nothing_is_refused(tmp_path: Path, limit: str) -> None:
    with pytest.raises(UserError, match="a limit of 0 images leaves none"):
        train(small_config(tmp_path / "run", data={limit: 0}))


def test_limited_runs_say_so(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", task="joint", data={"train_limit": 8, "val_limit": 2}, train={"epochs": 1})
    with listening() as shown:
        train(config)
    assert "a try-out, not the full protocol: at most 8 training images a step, 2 test images" in shown.getvalue()


def test_images_of_any_size_are_tested_one_by_one(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", task="joint", eval={"size": 0, "batch_size": 4}, train={"epochs": 1})
    train(config)
    row = rows_of(config.folder)[0]
    assert np.load(RunDir(config.folder).confusion(0)).sum() > 0.9 * row["test_images"] * 48 * 48


def test_classes_that_no_test_image_shows_have_no_iou(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", data={"val_limit": 1}, train={"epochs": 1})
    train(config)
    row = rows_of(config.folder)[-1]
    assert None in row["iou"].values()
    assert row["all"] is not None
