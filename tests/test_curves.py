"""Curves for TensorBoard, wandb and trackio. They never end a run."""

from __future__ import annotations

import errno
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from small_runs import listening, small_config

from incseg.engine.curves import TensorBoard, logger_names, open_curves
from incseg.engine.rundir import RunDir
from incseg.run import train
from incseg.types import UserError

pytest.importorskip("tensorboard")


def test_curves_can_be_read_at_once(tmp_path: Path) -> None:
    """Also after kill -9, because nothing waits in a buffer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "curves")
    board.losses({"ce": 0.5}, 1)
    board.losses({"ce": 0.25}, 2)
    curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert [(event.step, event.value) for event in curves.Scalars("losses/ce")] == [(1, 0.5), (2, 0.25)]
    board.close()


def test_a_full_disk_ends_the_curves_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written = []

    def full(self: object, record: bytes) -> None:
        written.append(record)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    board = TensorBoard(tmp_path / "curves")
    board.losses({"ce": 0.5}, 1)
    board.losses({"ce": 0.5}, 2)
    board.close()
    assert len(written) == 1
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "curves").write_text("a file")
    board = TensorBoard(tmp_path / "curves")
    board.losses({"ce": 0.5}, 1)
    board.close()


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, fails_at: str = "") -> list[Any]:
    """Install a module in place of wandb or trackio. Return the list of its calls."""
    calls: list[Any] = []
    module = types.ModuleType(name)

    def call(what: str) -> Any:
        def noted(*args: Any, **options: Any) -> None:
            calls.append((what, *args, options))
            if what == fails_at:
                raise RuntimeError("no\nnetwork")

        return noted

    for what in ("init", "log", "finish"):
        setattr(module, what, call(what))
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_logs_to_a_tracker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    calls = stand_in(monkeypatch, name)
    config = small_config(tmp_path / "run", log=f"tensorboard,{name}", task="8-2")
    train(config)
    first, *logged, last = calls
    assert first[1]["project"] == "incseg"
    assert first[1]["name"] == "run"
    assert first[1]["config"]["train"]["epochs"] == 2
    assert last[0] == "finish"
    assert [options["step"] for _, _, options in logged] == [1, 2, 2, 3, 4, 4]
    row = RunDir(tmp_path / "run").rows()[-1]
    assert logged[-1][1] == {f"figures/{figure}": row[figure] for figure in ("base", "new", "all", "inc")}
    assert any(key.startswith("losses/") for key in logged[0][1])
    assert (tmp_path / "run/tensorboard").is_dir()


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
def test_a_tracker_that_fails_ends_the_curves_and_nothing_else(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(monkeypatch, "wandb", fails_at)
    with listening() as shown:
        curves = open_curves("wandb", tmp_path, {})
        curves.losses({"ce": 0.5}, 1)
        curves.losses({"ce": 0.5}, 2)
        curves.close()
    assert [what for what, *_ in calls].count(fails_at) == 1
    assert "warning: wandb failed (RuntimeError: no network); the run continues without it" in shown.getvalue()


def test_only_the_main_process_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "wandb")
    curves = open_curves("wandb,tensorboard", None, {})
    curves.losses({"ce": 0.5}, 1)
    curves.close()
    assert calls == []


def test_a_missing_tracker_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"--log trackio needs the package trackio; pip install 'incseg\[trackio\]'"):
        train(small_config(tmp_path / "run", log="trackio"))
    assert not (tmp_path / "run").exists()


def test_the_setting() -> None:
    assert logger_names("tensorboard, wandb,wandb") == ["tensorboard", "wandb"]
    assert logger_names("none") == []
    for wrong in ("mlflow", "", "wandb,"):
        with pytest.raises(UserError, match=f"unknown log '{wrong.partition(',')[2]}|unknown log 'mlflow'"):
            logger_names(wrong)
