"""Figures of a report. From run folders: curves over steps, the score against the number of increments, IoU of each
class after each step, forgetting, confusion. From predictions on test images: reliability, and how well unknown classes
are detected."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from incseg.metrics import ranking
from incseg.report.sections import Ladder, MethodRuns, Section
from incseg.report.style import FAINT, INK, PAPER, WIDTH, axes_at, line_style, new_figure, styled, text_on

_LEAST_PERCENT = 1.5
"""Smallest number that is written in a confusion matrix."""
_LEAST_TAKEN = 0.02
"""Smallest share of an older class's pixels that counts as a `Taking`."""
MOST_ROWS = 45
"""Most rows with single classes. If there are more classes, a row is an increment."""
_TITLES = {
    "all": "All: every class learnt so far",
    "inc": "Inc: mean over increments",
    "base": "Base: classes of step 0",
    "new": "New: classes of later steps",
}


def wrapped(label: str, width: int = 44) -> str:
    return "\n".join(textwrap.wrap(label, width)) or label


def _with_legend(figure: Figure, handles: list[Line2D] | None = None) -> Figure:
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    return figure


# --- curves over steps ---------------------------------------------------------------------------------------


@styled
def curves(section: Section) -> Figure:
    """Draw All, Inc, Base and New after every step, mean and standard deviation over seeds, with joint training as a
    horizontal line."""
    rows = -(-(len(section.methods) + len(section.ceilings)) // 3)
    figure = new_figure(WIDTH, 6.3 + 0.22 * rows)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    names = section.step_names
    for axes, name in zip(panels.flat, _TITLES, strict=True):
        for index, method in enumerate(section.methods):
            _curve(axes, method, name, index)
        for index, ceiling in enumerate(section.ceilings):
            same_split = ceiling.runs.first.task == section.task
            level = ceiling.figure(name, 0) if same_split or name == "all" else None
            if level:
                axes.axhline(level.mean, color=INK, linewidth=1.2, linestyle=_ceiling_dashes(index))
        axes.set(title=_TITLES[name], ylim=(0, _ceil(section)), xlim=(-0.3, len(names) - 0.7))
        _step_ticks(axes, names)
    for axes in panels[:, 0]:
        axes.set_ylabel("mIoU, %")
    handles = [Line2D([], [], label=wrapped(_with_seeds(m)), **line_style(i)) for i, m in enumerate(section.methods)]
    handles += [
        Line2D([], [], color=INK, linewidth=1.2, linestyle=_ceiling_dashes(i), label=wrapped(_with_seeds(m)))
        for i, m in enumerate(section.ceilings)
    ]
    return _with_legend(figure, handles)


def _ceil(section: Section) -> float:
    """Return a value slightly above the highest point of the figure."""
    found = [m.figure(name, k) for m in section.methods for k in range(m.num_steps) for name in _TITLES]
    found += [m.figure(name, 0) for m in section.ceilings for name in _TITLES]
    return 1.06 * max([1.0, *(value.mean + (value.deviation or 0) for value in found if value)])


def _ceiling_dashes(index: int) -> tuple[int, tuple[float, ...]]:
    return 0, (6, 3) if index == 0 else (2, 2)


def _with_seeds(method: MethodRuns) -> str:
    seeds = len(method.runs.seeds)
    return method.label + (f", {seeds} seeds" if seeds > 1 else "")


def _curve(axes: Axes, method: MethodRuns, name: str, index: int) -> None:
    found = [(step, method.figure(name, step)) for step in range(method.num_steps)]
    points = [(step, value) for step, value in found if value]
    steps, means = [step for step, _ in points], np.array([value.mean for _, value in points])
    spreads = np.array([value.deviation or 0.0 for _, value in points])
    style = line_style(index)
    axes.plot(steps, means, **style)
    if spreads.any():
        axes.fill_between(steps, means - spreads, means + spreads, color=style["color"], alpha=0.18, linewidth=0)


# --- over tasks ----------------------------------------------------------------------------------------------


@styled
def against_increments(ladder: Ladder) -> Figure:
    """Draw All after the last step against the number of increments, one line per method, with joint training as a
    horizontal line.

    Tasks with the same number are drawn side by side, in the order of their names below the axis.
    """
    figure = new_figure(8.5, 4.4 + 0.2 * -(-(len(ladder.drawn) + len(ladder.ceilings)) // 3))
    axes = figure.subplots()
    places = _beside_each_other(ladder.increments)
    highest = 1.0
    for index, line in enumerate(ladder.drawn):
        style = line_style(index)
        tasks = [task for task in ladder.increments if task in line.scores]
        x, means = [places[task] for task in tasks], np.array([line.scores[task].mean for task in tasks])
        spreads = np.array([line.scores[task].deviation or 0.0 for task in tasks])
        axes.vlines(x, means - spreads, means + spreads, color=style["color"], linewidth=1.2)
        axes.plot(x, means, label=wrapped(line.label), **style)
        highest = max(highest, *(means + spreads))
    for index, (label, level) in enumerate(ladder.ceilings.items()):
        axes.axhline(level.mean, color=INK, linewidth=1.2, linestyle=_ceiling_dashes(index), label=wrapped(label))
        highest = max(highest, level.mean)
    numbers = sorted(set(ladder.increments.values()))
    names = [[_short(task) for task, count in ladder.increments.items() if count == number] for number in numbers]
    axes.set_xticks(numbers, ["\n".join([str(n), *own]) for n, own in zip(numbers, names, strict=True)])
    axes.set(xlabel="increments: steps after the base", ylabel="All: mIoU after the last step, %")
    axes.set_ylim(0, 1.06 * highest)
    axes.grid(axis="x", visible=False)
    return _with_legend(figure)


def _beside_each_other(increments: dict[str, int]) -> dict[str, float]:
    """Return the x position of each task: its number of increments, or close to it if several tasks have the same."""
    values = list(increments.values())
    reach = max(values) - min(values)
    places = {}
    for number in set(values):
        own = [task for task, count in increments.items() if count == number]
        gap = min(0.03 * reach, 0.8 / max(len(own) - 1, 1))  # must not reach the next number
        for index, task in enumerate(own):
            places[task] = number + gap * (index - (len(own) - 1) / 2)
    return places


def _short(task: str) -> str:
    """Shorten the name of a task: groups of class names are long."""
    return task if len(task) <= 14 else f"{task[:13]}…"


# --- class × step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassTable:
    """IoU in percent by row (a class, or the mean of an increment) and step; NaN before it is learnt.

    learnt: the step that learnt each row.
    """

    names: list[str]
    learnt: list[int]
    values: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        """Return the changes by each step, (rows, steps − 1), and in a last column the sum since a row was learnt."""
        steps = np.diff(self.values, axis=1)
        first = self.values[np.arange(len(self.names)), self.learnt]
        total = self.values[:, -1] - first
        total[np.array(self.learnt) == self.values.shape[1] - 1] = np.nan
        return np.concatenate([steps, total[:, None]], axis=1)


def class_table(method: MethodRuns) -> ClassTable:
    classes = method.classes
    values = np.full((len(classes), method.num_steps), np.nan)
    for row, (name, learnt) in enumerate(classes):
        for step in range(learnt, method.num_steps):
            found = method.iou(name, step)
            values[row, step] = np.nan if found is None else found
    names, steps = [name for name, _ in classes], [step for _, step in classes]
    if len(names) <= MOST_ROWS:
        return ClassTable(names, steps, values)
    increments = sorted(set(steps))
    merged = np.full((len(increments), values.shape[1]), np.nan)
    for row, step in enumerate(increments):
        own = np.ma.masked_invalid(values[np.array(steps) == step, step:])
        merged[row, step:] = own.mean(axis=0).filled(np.nan)
    return ClassTable([f"step {step}: mean of {steps.count(step)}" for step in increments], increments, merged)


@styled
def class_heat_map(method: MethodRuns, step_names: Sequence[str]) -> Figure:
    """Draw the IoU of every class after every step on the left, and the changes by each step on the right."""
    table = class_table(method)
    steps = table.values.shape[1]
    cell, row = (0.56 if steps <= 8 else 0.4), 0.235
    left, top, gap = 1.35, 1.05, 0.5
    height = max(len(table.names) * row, 1.2)
    panels = [(table.values, list(step_names[:steps]))]
    if steps == 2:  # the sum would repeat the only change
        panels.append((table.changes[:, :1], list(step_names[1:2])))
    elif steps > 2:
        panels.append((table.changes, [*step_names[1:steps], "in all"]))
    bar = 0.75
    width = left + sum(len(columns) * cell for _, columns in panels) + (len(panels) - 1) * (gap + bar) + bar + 0.35
    # leave room for the title of a narrow last panel
    width = max(width, width - bar - 0.35 - cell * len(panels[-1][1]) + 2.2)
    figure = new_figure(width, top + height + 0.2)
    start = left
    for index, (values, columns) in enumerate(panels):
        axes = axes_at(figure, start, top, cell * len(columns), height)
        if index == 0:
            shade: Any = (Normalize(0, 100), colormaps["viridis"])
        else:
            largest = float(np.abs(values[np.isfinite(values)]).max(initial=5.0))
            shade = (TwoSlopeNorm(0, -largest, largest), colormaps["PuOr"])
        _heat(axes, values, columns, table.names if index == 0 else [], *shade)
        for border in np.flatnonzero(np.diff(table.learnt)) + 0.5:
            axes.axhline(border, color=INK, linewidth=0.8)
        if index == 1 and steps > 2:
            axes.axvline(len(columns) - 1.5, color=INK, linewidth=0.8)
        figure.text(
            start / figure.get_figwidth(), 1 - 0.12 / figure.get_figheight(), va="top", fontsize=10,
            s="IoU after each step, %" if index == 0 else "change by the step, points",
        )  # fmt: skip
        start += cell * len(columns) + 0.12
        colours = axes_at(figure, start, top, 0.11, min(height, 2.2))
        _colour_bar(colours, *shade)
        start += bar - 0.12 + gap
    return figure


def _heat(axes: Axes, values: np.ndarray, columns: Sequence[str], rows: Sequence[str], norm: Any, shades: Any) -> None:
    axes.grid(False)
    axes.pcolormesh(
        np.arange(values.shape[1] + 1) - 0.5, np.arange(values.shape[0] + 1) - 0.5, np.ma.masked_invalid(values),
        norm=norm, cmap=shades, edgecolors=PAPER, linewidth=0.6,
    )  # fmt: skip
    axes.invert_yaxis()
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            text = f"{value:+.0f}" if norm.vmin < 0 else f"{value:.0f}"
            text = "0" if text in ("+0", "-0") else text.replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=text_on(shades(norm(value))))
    _table_axes(axes, columns, rows)


def _table_axes(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Write names above the columns and left of the rows, without frame and ticks."""
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _colour_bar(axes: Axes, norm: Any, shades: Any) -> None:
    levels = np.linspace(norm.vmin, norm.vmax, 128)
    axes.grid(False)
    picture = shades(norm(levels), bytes=True)[:, None, :3]
    axes.imshow(picture, origin="lower", aspect="auto", extent=(0, 1, norm.vmin, norm.vmax))
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_ylim(norm.vmin, norm.vmax)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)


# --- forgetting ----------------------------------------------------------------------------------------------


@styled
def forgetting(section: Section) -> Figure | None:
    """Draw the points of IoU that each class has lost since it was learnt, by method; None if there are no old
    classes."""
    lost: dict[str, dict[str, float]] = {}
    for method in section.methods:
        table = class_table(method)
        by_name = dict(zip(table.names, -table.changes[:, -1], strict=True)) if table.values.shape[1] > 1 else {}
        if by_name := {name: value for name, value in by_name.items() if np.isfinite(value)}:
            lost[method.label] = by_name
    if not lost:
        return None
    first = next(iter(lost.values()))
    names = sorted({n for by_name in lost.values() for n in by_name}, key=lambda n: (-first.get(n, -np.inf), n))
    figure = new_figure(8.5, 1.0 + 0.23 * len(names) + 0.24 * len(lost))
    axes = figure.subplots()
    axes.axvline(0, color=FAINT, linewidth=1)
    spread = np.linspace(-0.22, 0.22, len(lost)) if len(lost) > 1 else [0.0]
    indices = [index for index, method in enumerate(section.methods) if method.label in lost]
    for index, offset, (label, by_name) in zip(indices, spread, lost.items(), strict=True):
        style = line_style(index)
        rows = np.array([names.index(name) for name in by_name]) + offset
        values = np.array(list(by_name.values()))
        axes.hlines(rows, 0, values, color=style["color"], linewidth=1, alpha=0.55)
        mean = f"{label}: mean {values.mean():.1f}"
        axes.plot(values, rows, label=wrapped(mean, 80), **{**style, "linestyle": "none"})
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("points of IoU lost since the class was learnt (left of 0: gained)")
    axes.grid(axis="y", visible=True)
    figure.legend(loc="outside lower left")
    figure.set_layout_engine("constrained")
    return figure


# --- confusion -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taking:
    """A class of a later step that is predicted on pixels of an older class: shares after its step, and at the end."""

    taker: str
    victim: str
    step: int
    then: float
    now: float


def takings(confusions: Sequence[np.ndarray | None], steps: Sequence[Sequence[str]]) -> list[Taking]:
    """Return the takings of all steps, largest share first. `confusions` are the shares of the true labels' pixels
    after each step."""
    names = ["background", *(name for classes in steps for name in classes)]
    last = confusions[-1]
    found = []
    learnt = 1
    for step, (classes, shares) in enumerate(zip(steps, confusions, strict=True)):
        for taker in range(learnt, learnt + len(classes)):
            for victim in range(1, learnt):
                if step == 0 or shares is None or last is None or not shares[victim, taker] >= _LEAST_TAKEN:
                    continue
                now = float(np.nan_to_num(last[victim, taker]))
                found.append(Taking(names[taker], names[victim], step, float(shares[victim, taker]), now))
        learnt += len(classes)
    return sorted(found, key=lambda taking: (-taking.then, taking.taker, taking.victim))


@styled
def confusion_map(shares: np.ndarray, names: Sequence[str], learnt: Sequence[int]) -> Figure:
    """Draw the predicted labels (columns) of the pixels of each true label (row), in percent, without small shares."""
    cell, left, top = 0.315, 1.35, 1.0
    side = cell * len(names)
    figure = new_figure(left + side + 0.85, top + side + 0.15)
    axes = axes_at(figure, left, top, side, side)
    norm, shades = Normalize(0, 100), colormaps["viridis_r"]  # small shares are light, like the paper
    percent = 100 * shares
    axes.grid(True, linewidth=0.4)
    edges = np.arange(len(names) + 1) - 0.5
    axes.pcolormesh(edges, edges, np.ma.masked_where(~(percent >= _LEAST_PERCENT), percent), norm=norm, cmap=shades)
    axes.invert_yaxis()
    for (row, column), value in np.ndenumerate(percent):
        if value >= _LEAST_PERCENT:
            colour = text_on(shades(norm(value)))
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)
    _table_axes(axes, names, names)
    for border in np.flatnonzero(np.diff(learnt)) + 0.5:
        axes.axhline(border, color=INK, linewidth=0.7)
        axes.axvline(border, color=INK, linewidth=0.7)
    corner = ((left - 0.12) / figure.get_figwidth(), 1 - (top - 0.12) / figure.get_figheight())
    figure.text(*corner, "predicted →\ntruth ↓", ha="right", va="bottom", color=FAINT)
    _colour_bar(axes_at(figure, left + side + 0.12, top, 0.11, min(side, 2.2)), norm, shades)
    return figure


# --- predictions on test images ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reliability:
    """Pixels in bins of confidence of equal width: their number, their summed confidence, and the number of right
    ones."""

    pixels: np.ndarray
    confidence: np.ndarray
    right: np.ndarray

    @property
    def error(self) -> float:
        """Return the expected calibration error: |confidence − accuracy|, weighted by pixels."""
        return float(np.abs(self.confidence - self.right).sum() / max(1.0, self.pixels.sum()))


@styled
def reliability(by_method: dict[str, tuple[int, Reliability]]) -> Figure:
    """Draw accuracy over confidence of the last models, and below it the distribution of confidence."""
    figure = new_figure(6.8, 5.4 + 0.24 * len(by_method))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    above.annotate("as right as sure", (0.06, 0.06), color=FAINT, xytext=(8, -2), textcoords="offset points")
    for label, (index, counts) in by_method.items():
        some = counts.pixels > 0
        confidence = counts.confidence[some] / counts.pixels[some]
        style = line_style(index)
        text = f"{label}: calibration error {100 * counts.error:.1f} %"
        above.plot(confidence, counts.right[some] / counts.pixels[some], label=wrapped(text, 80), **style)
        below.plot(confidence, 100 * counts.pixels[some] / counts.pixels.sum(), **style)
    above.set(ylabel="share of pixels that are right", ylim=(0, 1.02), xlim=(0, 1.02))
    below.set(ylabel="% of pixels", xlabel="probability of the predicted label", yscale="log")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # no mathematics in labels: a class may be named $x$
    below.yaxis.set_minor_formatter("")
    figure.legend(loc="outside lower left")
    figure.set_layout_engine("constrained")
    return figure


@dataclass(frozen=True)
class Unknown:
    """Histograms (BINS,) of a score at pixels of classes not learnt yet and at another kind of pixels."""

    unseen: torch.Tensor
    other: torch.Tensor

    @property
    def can_be_drawn(self) -> bool:
        return bool(self.unseen.sum() > 0 and self.other.sum() > 0)


_SCORES = {"seen": "by uncertainty", "background": "by 1 − P(background)"}


@styled
def unknown_curves(counts: dict[str, dict[str, tuple[int, Unknown]]]) -> Figure:
    """Draw ROC and precision over recall of unknown classes against other pixels.

    counts: {"seen" or "background": {label: (index of its style, histograms)}}.
    """
    methods = {label: index for by_method in counts.values() for label, (index, _) in by_method.items()}
    figure = new_figure(9.0, 3.6 * len(counts) + 0.4 + 0.2 * -(-len(methods) // 2))
    for (other, by_method), (roc, precision) in zip(
        counts.items(), figure.subplots(len(counts), 2, squeeze=False), strict=True
    ):
        roc.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        for label, (index, one) in by_method.items():
            area = ranking(one.unseen, one.other)
            text = f"{wrapped(label, 26)}: area {area['auroc']:.2f}" if area else label
            _ranking_curves(roc, precision, one, index, text)
        title = f"to come against {other}, {_SCORES[other]}"
        roc.set(xlabel=f"share of {other} pixels taken for it", ylabel="share found", title=title)
        precision.set(xlabel="recall: share found", ylabel="precision", title="precision over recall")
        roc.legend(loc="lower right", fontsize=8)
        for axes in (roc, precision):
            axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    return figure


def _ranking_curves(roc: Axes, precision: Axes, counts: Unknown, index: int, label: str) -> None:
    hits, alarms = (np.cumsum(side.numpy()[::-1]).astype(np.float64) for side in (counts.unseen, counts.other))
    style = {**line_style(index), "markevery": 0.12, "markersize": 5}
    recall, false = hits / hits[-1], alarms / alarms[-1]
    corners = np.flatnonzero(np.diff(recall + false, prepend=0) > 0)  # skip empty bins
    corners = corners[np.unique(np.linspace(0, len(corners) - 1, 200).round().astype(int))]
    roc.plot(np.append(0, false[corners]), np.append(0, recall[corners]), label=label, **style)
    corners = corners[recall[corners] >= 0.01]  # below, precision depends on a few pixels
    precision.plot(recall[corners], hits[corners] / (hits + alarms)[corners], **style)


@styled
def unknown_areas(section: Section) -> Figure | None:
    """Draw the area under the ROC of unknown classes after every step, from the runs' own tests.

    None if no run has it, as in runs of older versions.
    """
    areas = {
        other: [(index, _areas(method, other)) for index, method in enumerate(section.methods)] for other in _SCORES
    }
    areas = {other: found for other, found in areas.items() if any(points for _, points in found)}
    if not areas:
        return None
    steps = 1 + max(step for found in areas.values() for _, points in found for step, _ in points)
    figure = new_figure(9.0 if len(areas) > 1 else 5.0, 3.5 + 0.2 * -(-len(section.methods) // 3))
    panels = figure.subplots(1, len(areas), squeeze=False, sharey=True)[0]
    for axes, (other, found) in zip(panels, areas.items(), strict=True):
        axes.axhline(0.5, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        for index, points in found:
            axes.plot([step for step, _ in points], [area for _, area in points], **line_style(index))
        axes.set(title=f"to come against {other}, {_SCORES[other]}", ylim=(0, 1.02), xlim=(-0.3, steps - 0.7))
        _step_ticks(axes, section.step_names[:steps])
    panels[0].set_ylabel("area under the ROC")
    handles = [Line2D([], [], label=wrapped(m.label), **line_style(i)) for i, m in enumerate(section.methods)]
    return _with_legend(figure, handles)


def _areas(method: MethodRuns, other: str) -> list[tuple[int, float]]:
    found = []
    for step in range(method.num_steps):
        rows = [record.rows[step] for record in method.runs.records if step < len(record.rows)]
        ranked = [row["unseen"].get(f"from_{other}") for row in rows]
        areas = [one["auroc"] for one in ranked if isinstance(one, dict) and isinstance(one.get("auroc"), float)]
        if areas:
            found.append((step, float(np.mean(areas))))
    return found


def _step_ticks(axes: Axes, names: Sequence[str]) -> None:
    angle, side = (35, "right") if len(names) > 3 else (0, "center")
    axes.set_xticks(range(len(names)), names, rotation=angle, ha=side, rotation_mode="anchor")
