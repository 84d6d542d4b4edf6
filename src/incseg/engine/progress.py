"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere, and the log file."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from incseg.metrics.continual import FIGURES

_LINE_SECONDS = 15.0
ClassImages = Mapping[str, tuple[int, int]]
"""For each class the training and test images that show it."""


class Reporter(ABC):
    """Tells how far a run is. Tasks are counted: `begin` one, `advance` it, `end` it."""

    @abstractmethod
    def say(self, text: str) -> None: ...

    @abstractmethod
    def rows(
        self, title: str, rows: list[dict[str, Any]], notes: Iterable[str], class_images: ClassImages | None = None
    ) -> None:
        """The table of steps so far; with `class_images` one row per class instead, as the last step tests it."""

    @abstractmethod
    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    @abstractmethod
    def advance(self, amount: int = 1, detail: str = "") -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    def close(self) -> None:
        """Put the terminal right again."""


class Silent(Reporter):
    """For the processes that do not speak."""

    def say(self, text: str) -> None:
        pass

    def rows(
        self, title: str, rows: list[dict[str, Any]], notes: Iterable[str], class_images: ClassImages | None = None
    ) -> None:
        pass

    def begin(self, what: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, amount: int = 1, detail: str = "") -> None:
        pass

    def end(self) -> None:
        pass


class Screen(Reporter):
    """A terminal with a bar, or, where there is none, a line every quarter of a minute."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._log: TextIO | None = None
        self._live = self.console.is_terminal
        self._progress = Progress(
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
        self._task: TaskID | None = None
        self._what, self._total, self._done, self._first = "", 0, 0, 0
        self._started = self._spoken = 0.0

    def log_to(self, path: Path) -> None:
        """Copy what is said to a file, behind what it holds already."""
        self._log = path.open("a", encoding="utf-8")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
        self._write(text)

    def rows(
        self, title: str, rows: list[dict[str, Any]], notes: Iterable[str], class_images: ClassImages | None = None
    ) -> None:
        table = step_table(title, rows) if class_images is None else class_table(rows[-1], class_images)
        self.console.print(table)
        for note in notes:
            self.console.print(f"  {note}", markup=False, style="dim", soft_wrap=True)
        for line in never_predicted(rows[-1], class_images or {}):
            self.say(line)
        for row in rows[-1:]:
            self._write(f"step {row['index']}: " + figures_line(row))

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._first = what, total, done, done
        self._started = self._spoken = time.monotonic()
        if self._live:
            self._progress.start()
            self._task = self._progress.add_task(what, total=total, completed=done, detail="")

    def advance(self, amount: int = 1, detail: str = "") -> None:
        self._done += amount
        if self._task is not None:
            self._progress.update(self._task, advance=amount, detail=detail)
            return
        now = time.monotonic()
        if now - self._spoken >= _LINE_SECONDS:
            self._spoken = now
            rate = (self._done - self._first) / (now - self._started)
            left = timedelta(seconds=round((self._total - self._done) / rate)) if rate else "?"
            self.say(f"{self._what}  {self._done}/{self._total}  ETA {left}  {detail}".rstrip())

    def end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.stop()
            self._task = None

    def close(self) -> None:
        self.end()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, text: str) -> None:
        if self._log is not None:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
            self._log.flush()


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def figures_line(figures: Mapping[str, Any]) -> str:
    return "  ".join(f"{name.capitalize()} {percent(figures[name])}" for name in FIGURES)


def step_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Base / New / All / Inc after each step."""
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("learns", overflow="fold")
    for name in ("images", *(figure.capitalize() for figure in FIGURES), "unseen AUROC"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ranking = (row["unseen"]["from_background"] or {}) if row.get("unseen") else {}
        auroc = f"{ranking['auroc']:.3f}" if ranking else "–"
        cells = [percent(row[name]) for name in FIGURES]
        table.add_row(str(row["index"]), Text(", ".join(row["classes"])), str(row["train_images"]), *cells, auroc)
    return table


def class_table(row: Mapping[str, Any], class_images: ClassImages) -> Table:
    """One row per class: the photographs that show it, and its IoU on those that were not learnt from."""
    table = Table(title=Text("IoU on held-back photographs"), title_justify="left", header_style="bold")
    table.add_column("class")
    for name in ("learnt from", "tested on", "IoU"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, share in row["iou"].items():
        trained, tested = class_images.get(name, ("", ""))
        table.add_row(Text(name), str(trained), str(tested), percent(share))
    return table


def never_predicted(row: Mapping[str, Any], class_images: ClassImages) -> list[str]:
    """A line for each class that the model was tested on and never found."""
    lines = []
    for name, share in row["iou"].items():
        trained, tested = class_images.get(name, (0, 0))
        if share == 0 and trained and tested:
            reason = f"{trained} photographs are few, so add some" if trained < 20 else "its objects may be too small"
            lines.append(
                f"warning: {name} was not found on any of {tested} photographs: {reason}, or try twice the size"
            )
    return lines
