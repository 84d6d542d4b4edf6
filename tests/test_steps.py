"""Steps trained before by the same recipe are taken from the cache, and no others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run, rows_of, small_config

from incseg.engine.rundir import RunDir
from incseg.run import train


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run and its cache. Tests must not change them."""
    folder = tmp_path_factory.mktemp("learnt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INCSEG_CACHE", str(folder / "cache"))
        train(small_config(folder / "run", reuse=True))
    return folder


@pytest.fixture
def first(learnt: Path) -> Path:
    """Return the run, with a copy of its cache for the test."""
    shutil.copytree(learnt / "cache", os.environ["INCSEG_CACHE"], dirs_exist_ok=True)
    return learnt / "run"


def reused(folder: Path) -> list[bool]:
    return [row["reused_from"] is not None for row in RunDir(folder).rows()]


def run(tmp_path: Path, name: str, **changes: Any) -> Path:
    train(small_config(tmp_path / name, reuse=True, **changes))
    return tmp_path / name


def test_the_same_recipe_is_not_trained_again(first: Path, tmp_path: Path) -> None:
    again = run(tmp_path, "again")
    assert reused(first) == [False] * 3
    assert reused(again) == [True] * 3
    trained = small_config(tmp_path / "trained")
    train(trained)
    for row in (rows := rows_of(again)):
        row["reused_from"] = None
    assert rows == rows_of(tmp_path / "trained")
    for step in range(3):
        assert RunDir(again).confusion(step).read_bytes() == RunDir(first).confusion(step).read_bytes()


def test_another_task_shares_the_base_and_inference_options_do_not_matter(first: Path, tmp_path: Path) -> None:
    assert reused(run(tmp_path, "task", task="6-4")) == [True, False]
    assert reused(run(tmp_path, "odds", method={"name": "evidential", "balancing": "odds"})) == [True] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"train": {"lr": 0.05}},
        {"model": {"width": 24}},
        {"data": {"seed": 1}},
        {"rules": "mib"},
        {"method": {"name": "evidential", "rectifier": "exp"}},
        {"method": {"name": "finetune"}},
    ],
    ids=str,
)
def test_any_other_recipe_is_trained(first: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert reused(run(tmp_path, "other", task="6-4", **changes)) == [False, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"lr_later": 0.01}},
        {"train": {"epochs_later": 1}},
        {"train": {"clip_later": 1e-3}},
        {"method": {"name": "evidential", "lambda_kd": 1.0}},
    ],
    ids=str,
)
def test_what_only_later_steps_read_leaves_the_base_shared(
    first: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert reused(run(tmp_path, "other", **changes)) == [True, False, False]


def test_a_damaged_step_is_trained_again(first: Path, tmp_path: Path) -> None:
    for model in Path(os.environ["INCSEG_CACHE"]).glob("steps/*/model.safetensors"):
        model.unlink()
        model.write_bytes(b"damaged")
    again = run(tmp_path, "again")
    assert reused(again) == [False] * 3
    assert_same_run(first, again)
