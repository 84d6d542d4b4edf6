"""Console output of a run: log lines, tables and progress.

All messages go to the logger "incseg". A `Screen` is its handler for the terminal; log.txt of the run folder gets the
same lines. `show_progress` shows a bar on a terminal and elsewhere logs a line every 15 seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from incseg.data.loaders import Loaded
from incseg.engine.runtime import is_main_process
from incseg.io import counted
from incseg.metrics import FIGURES, percent

log = logging.getLogger("incseg")
log.setLevel(logging.INFO)

_LINE_SECONDS = 15.0
ClassImages = Mapping[str, tuple[int, int]]
"""For each class, the number of training and of test images that show it."""


class Advance(Protocol):
    """Report that `amount` more is done."""

    def __call__(self, amount: int = 1, detail: str = "") -> None: ...


@dataclass
class Task:
    """Work whose progress is shown: `done` of `total` items, `first` of them before it started."""

    what: str
    total: int
    done: int
    first: int
    started: float
    last_line: float
    bar: TaskID | None = None


class Screen(logging.Handler):
    """Show log lines, tables and progress on a console, by default the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            transient=True,
        )

    def emit(self, record: logging.LogRecord) -> None:
        table = getattr(record, "table", None)
        if table is None:
            self.console.print(record.getMessage(), markup=False, soft_wrap=True)
            return
        self.console.print(table)
        for note in record.notes:  # type: ignore[attr-defined]
            self.console.print(f"  {note}", markup=False, style="dim", soft_wrap=True)

    def begin(self, what: str, total: int, done: int = 0) -> Task:
        now = time.monotonic()
        task = Task(what, total, done, done, now, now)
        if self.console.is_terminal:
            self._bars.start()
            task.bar = self._bars.add_task(what, total=total, completed=done, detail="")
        return task

    def advance(self, task: Task, amount: int = 1, detail: str = "") -> None:
        task.done += amount
        if task.bar is not None:
            self._bars.update(task.bar, advance=amount, detail=detail)
            return
        now = time.monotonic()
        if now - task.last_line >= _LINE_SECONDS:
            task.last_line = now
            rate = (task.done - task.first) / (now - task.started)
            left = timedelta(seconds=round((task.total - task.done) / rate)) if rate else "?"
            log.info(f"{task.what}  {task.done}/{task.total}  ETA {left}  {detail}".rstrip())

    def end(self, task: Task) -> None:
        if task.bar is not None:
            self._bars.remove_task(task.bar)
            if not self._bars.tasks:
                self._bars.stop()


@contextlib.contextmanager
def showing(screen: Screen | None = None) -> Iterator[None]:
    """Show log lines and progress on a screen, by default the terminal.

    Inside another `showing`, do nothing. In processes other than the first, log nothing.
    """
    if not is_main_process():
        before, log.disabled = log.disabled, True
        try:
            yield
        finally:
            log.disabled = before
    elif _installed() is not None:
        yield
    else:
        with _handled_by(screen or Screen()):
            yield


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Append log lines to a file."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S"))
    with _handled_by(handler):
        yield


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise


@contextlib.contextmanager
def _handled_by(handler: logging.Handler) -> Iterator[None]:
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def _installed() -> Screen | None:
    return next((handler for handler in log.handlers if isinstance(handler, Screen)), None)


@contextlib.contextmanager
def show_progress(what: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show the progress of some work: yield a function to call after each part."""
    screen = _installed()
    if screen is None or log.disabled:
        yield lambda amount=1, detail="": None
        return
    task = screen.begin(what, total, done)
    try:
        yield partial(screen.advance, task)
    finally:
        screen.end(task)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (done, total) that shows progress. Nothing is shown before its first call."""
    with contextlib.ExitStack() as stack:
        advance: list[Advance] = []

        def count(done: int, total: int) -> None:
            if not advance:
                advance.append(stack.enter_context(show_progress(what, total)))
            advance[0]()

        yield count


def with_progress(batches: Iterable[Loaded], what: str, total: int) -> Iterator[Loaded]:
    """Yield the batches and show how many of their `total` images are done."""
    with show_progress(what, total) as advance:
        for batch in batches:
            yield batch
            advance(len(batch[2]))


def log_rows(
    title: str, rows: list[dict[str, Any]], notes: Iterable[str], class_images: ClassImages | None = None
) -> None:
    """Log the last row. On a screen, show a table of all rows, or with `class_images` of the last one by class."""
    last = rows[-1]
    table = step_table(title, rows) if class_images is None else class_table(last, class_images)
    log.info(f"step {last['index']}: {figures_line(last)}", extra={"table": table, "notes": list(notes)})
    for line in never_predicted(last, class_images or {}):
        log.warning(line, extra={"table": None})


def figures_line(figures: Mapping[str, Any]) -> str:
    line = "  ".join(f"{name.capitalize()} {percent(figures[name])}" for name in FIGURES)
    at_edges = figures.get("boundary")
    return f"{line}  boundary IoU {percent(at_edges['iou'])}" if at_edges else line


def step_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of Base / New / All / Inc after each step."""
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("learns", overflow="fold")
    rows = list(rows)
    edges = ["boundary IoU"] if any("boundary" in row for row in rows) else []
    for name in ("images", *(figure.capitalize() for figure in FIGURES), *edges, "unseen AUROC"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ranking = (row["unseen"]["from_background"] or {}) if row.get("unseen") else {}
        auroc = f"{ranking['auroc']:.3f}" if ranking else "–"
        cells = [percent(row[name]) for name in FIGURES]
        cells += [percent(row.get("boundary", {}).get("iou")) for _ in edges]
        table.add_row(str(row["index"]), Text(", ".join(row["classes"])), str(row["train_images"]), *cells, auroc)
    return table


def class_table(row: Mapping[str, Any], class_images: ClassImages) -> Table:
    """Return a table with one row per class: the photographs that show it, and its IoU on held-back ones."""
    table = Table(title=Text("IoU on held-back photographs"), title_justify="left", header_style="bold")
    table.add_column("class")
    for name in ("learnt from", "tested on", "IoU"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, share in row["iou"].items():
        trained, tested = class_images.get(name, ("", ""))
        table.add_row(Text(name), str(trained), str(tested), percent(share))
    return table


def never_predicted(row: Mapping[str, Any], class_images: ClassImages) -> list[str]:
    """Return a warning for each class that the test shows and the model never predicts."""
    lines = []
    for name, share in row["iou"].items():
        trained, tested = class_images.get(name, (0, 0))
        if share == 0 and trained and tested:
            few = f"{counted(trained, 'photograph')} to learn from is little, so add some"
            reason = few if trained < 20 else "its objects may be too small"
            shown = counted(tested, "photograph")
            lines.append(f"warning: {name} was not found on any of {shown}: {reason}, or try twice the size")
    return lines
