"""The curves for TensorBoard never end a run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from incseg.engine.tensorboard import TensorBoard

pytest.importorskip("tensorboard")


def test_curves_can_be_read_at_once(tmp_path: Path) -> None:
    """Also after kill -9: nothing waits in a buffer."""
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


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "curves").write_text("a file")
    board = TensorBoard(tmp_path / "curves")
    board.losses({"ce": 0.5}, 1)
    board.close()
