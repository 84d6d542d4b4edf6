"""Edge cases of training: less than a batch, one image, a step without images, no test image of a class."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import listening, reevaluated_row, rows_of, small_config

from incseg.engine.checkpoint import Progress, load_checkpoint, save_checkpoint
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.methods import build_method
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
    """After the last update, training can still be finite while the test is not."""
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
    assert "a quick test, not the full protocol: at most 8 training images per step, 2 test images" in shown.getvalue()


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


FOREIGN = {"config.yaml": "mine: 1\n", ".x.tmp": "mine", "sub/.config.yaml.12345678.tmp": "mine", "notes.txt": "mine"}


@pytest.mark.parametrize("present", [[*FOREIGN], *([name] for name in FOREIGN)])
def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, present: list[str]) -> None:
    config = small_config(tmp_path / "run", task="8-2", train={"epochs": 1})
    for name in present:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(FOREIGN[name])
    with pytest.raises(UserError, match=r"holds '.*', which no run of incseg wrote; choose a new folder with --out"):
        train(config)
    files = [path for path in config.folder.rglob("*") if path.is_file()]
    found = {path.relative_to(config.folder).as_posix(): path.read_text() for path in files}
    assert found == {name: FOREIGN[name] for name in present}


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.root / "steps" / "0").mkdir(parents=True)
    left = [".config.yaml.0a1b2c3d.tmp", "steps/0/.model.safetensors.0a1b2c3d.tmp"]
    mine = ["steps/0/.x.tmp", "steps/.y.tmp"]
    for name in left + mine:
        (run.root / name).touch()
    with contextlib.closing(run):
        run.lock()
        assert [(run.root / name).exists() for name in left + mine] == [False, False, True, True]
    (run.root / "predictions").mkdir()
    with pytest.raises(UserError, match="holds 'predictions'"):
        run.lock()
    run.write_config({"task": "8-2"})
    run.environment.write_text("{}")
    with contextlib.closing(run):
        run.lock()  # a run may have other things beside it


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    config = small_config(tmp_path / "run", task="joint", train={"epochs": 1})
    with pytest.raises(UserError, match="is missing"):  # the rows that the first process would have written
        train(config)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_checkpoint_of_another_step_is_not_taken(tmp_path: Path) -> None:
    model, method = torch.nn.Linear(2, 2), build_method({"name": "finetune"})
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(tmp_path / "c.safetensors", 1, Progress(iteration=7), model, optimizer, scaler, method)
    torch.nn.init.zeros_(model.weight)
    for step, iteration in ((0, 0), (2, 0), (1, 7)):
        found = load_checkpoint(tmp_path / "c.safetensors", step, model, optimizer, scaler, method, Runtime("cpu"))
        assert found.iteration == iteration
        assert bool(model.weight.any()) == (step == 1)
