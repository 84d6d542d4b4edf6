"""Console output: lines, tables and progress by logging, on a screen and in a file, from one process only."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console
from small_runs import listening, small_config

import incseg.engine.progress as module
from incseg.engine.progress import Screen, counting, log, log_file, show_progress, showing
from incseg.engine.rundir import RunDir
from incseg.run import train


def test_lines_are_plain_and_the_file_has_their_time(tmp_path: Path) -> None:
    with listening() as shown, log_file(tmp_path / "log.txt"):
        log.info("a line with [brackets] and 100 %")
    log.info("nobody listens")
    assert shown.getvalue() == "a line with [brackets] and 100 %\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  a line .*\n", (tmp_path / "log.txt").read_text())


def test_the_outer_screen_stays() -> None:
    with listening() as outer, listening() as inner:
        log.info("once")
    assert (outer.getvalue(), inner.getvalue()) == ("once\n", "")
    assert not [handler for handler in log.handlers if isinstance(handler, Screen)]


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    with listening() as shown, show_progress("work", 2) as advance:
        log.warning("not heard")
        advance()
    assert shown.getvalue() == caplog.text == ""
    monkeypatch.setenv("RANK", "0")
    log.warning("heard")
    assert "heard" in caplog.text


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as shown:
        with show_progress("work", 4, done=1) as advance:
            advance(1, "soon")
            monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
            advance(1, "epoch 1/2")
        monkeypatch.setattr(module, "_LINE_SECONDS", 15.0)
    assert re.fullmatch(r"work  3/4  ETA 0:00:00  epoch 1/2\n", shown.getvalue())


def test_on_a_terminal_progress_is_a_bar_that_goes() -> None:
    out = io.StringIO()
    with showing(Screen(Console(file=out, force_terminal=True, width=120))):
        with contextlib.suppress(KeyboardInterrupt), show_progress("outer", 9) as advance, show_progress("inner", 3):
            advance(2)
            log.info("a line above the bar")
            raise KeyboardInterrupt
        assert "a line above the bar" in out.getvalue()
        assert "outer" in out.getvalue()
        assert "inner" in out.getvalue()
        log.info("after it")
    assert out.getvalue().endswith("after it\n")
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back


def test_what_is_counted_is_shown_only_where_there_is_work() -> None:
    begun = []

    class Noting(Screen):
        def begin(self, what: str, total: int, done: int = 0) -> module.Task:
            begun.append((what, total))
            return super().begin(what, total, done)

    with showing(Noting(Console(file=io.StringIO()))):
        with counting("nothing"):
            pass
        with counting("masks") as count:
            count(1, 2)
            count(2, 2)
    assert begun == [("masks", 2)]


def test_a_full_disk_is_not_passed_over(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), log_file(tmp_path / "log.txt"):
        log.info("a line")


def test_a_run_shows_its_table_and_logs_its_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small_config(tmp_path / "run", task="joint", train={"epochs": 1})
    with listening() as shown:
        train(config)
    assert "evidential on shapes joint, overlapped, seed 3" in shown.getvalue()
    assert "unseen AUROC" in shown.getvalue()
    written = RunDir(config.folder).log.read_text()
    assert re.search(r"step 0: Base [\d.]+  New –  All [\d.]+  Inc", written)
    assert [record.levelno for record in caplog.records if record.getMessage().startswith("step 0: Base")] == [
        logging.INFO
    ]
