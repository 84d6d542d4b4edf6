"""Records grouped over seeds, and tables of them in the paper's layout: method × task × setting × figure."""

from __future__ import annotations

import json
import logging
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from incseg.io import counted
from incseg.metrics import FIGURES
from incseg.report.published import PUBLISHED, SOURCES, UNRANKED, Column, Published, family_of, family_rank
from incseg.report.runs import ALL_FIGURES, RunRecord, options_text

log = logging.getLogger("incseg")

JOINT = "joint"
_LAYOUTS: dict[str, tuple[Column, ...]] = {
    "voc": tuple((task, setting) for task in ("15-5", "15-1") for setting in ("disjoint", "overlapped")),
    "ade20k": (("100-50", ""), ("50-50", ""), ("100-10", "")),
}
"""The columns of the paper's tables. Other tasks follow them."""
_USUAL_SETTING = {"ade20k": "pseudo-disjoint"}
"""Of datasets where a row has the setting, not a column: the setting that labels do not mention."""
_BOTH_ORDERS = "a+b"
ABLATIONS = "ablations"
"""The folder of a study for variants that are compared with its other runs and are not methods of their own."""


@dataclass(frozen=True)
class Spread:
    """A figure over seeds. Deviation and variance divide by n − 1 and are None for a single seed."""

    mean: float
    deviation: float | None
    variance: float | None
    seeds: int

    def as_dict(self) -> dict[str, float | int | None]:
        deviation = {"standard_deviation": self.deviation, "variance": self.variance}
        return {"mean": self.mean, **deviation, "seeds": self.seeds}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread over the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    if len(numbers) == 1:
        return Spread(numbers[0], None, None, 1)
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers), statistics.variance(numbers), len(numbers))


@dataclass(frozen=True)
class Group:
    """Records that differ only in the seed, smallest seed first."""

    records: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        return self.records[0]

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    def figure(self, name: str) -> Spread | None:
        return spread(record.figure(name) for record in self.records)

    def as_dict(self) -> dict[str, Any]:
        names = ("dataset", "task", "setting", "order", "method", "options", "preset")
        return {
            **{name: getattr(self.first, name) for name in names},
            "rules": self.first.rules["name"],
            "seeds": self.seeds,
            **{name: found.as_dict() if (found := self.figure(name)) else None for name in ALL_FIGURES},
        }


def group(records: Iterable[RunRecord], quiet: bool = False) -> list[Group]:
    """Return records grouped over seeds, in the order of tables.

    Of two records with the same seed the second is left out with a warning; a run takes precedence over a retest.
    """
    found: dict[str, dict[int, RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.retest is not None):
        kind = [
            record.dataset, record.task, record.setting, record.order, record.method,
            record.preset, record.options, record.rules,
        ]  # fmt: skip
        seeds = found.setdefault(json.dumps(kind, sort_keys=True, default=str), {})
        if record.seed not in seeds:
            seeds[record.seed] = record
        elif not quiet:
            what = f"{record.folder}{', tested again,' if record.retest else ''} is left out"
            shown = seeds[record.seed]
            also = record.settings.get("start") != shown.settings.get("start")
            though = ", though it extends another model; show the two on their own" if also else ""
            log.warning(f"{what}: the same settings and seed {record.seed} as {shown.folder}{though}")
    groups = [Group(tuple(record for _, record in sorted(seeds.items()))) for seeds in found.values()]
    return sorted(groups, key=lambda group: group_rank(group.first))


def group_rank(record: RunRecord) -> tuple[Any, ...]:
    """Return the sort key of a record: lower bound first, upper bound last, fewer options before more."""
    options = json.dumps(record.options, sort_keys=True, default=str)
    return (
        record.dataset, task_rank(record.task), record.setting, record.order, family_rank(record.method), record.method,
        len(record.options), options, str(record.preset), record.rules["name"],
    )  # fmt: skip


def task_rank(task: str) -> tuple[int, int, int, str]:
    """Return the sort key of a task: 15-5 before 15-1 before 10-1, then groups of class names."""
    if match := re.fullmatch(r"(\d+)-(\d+)", task):
        return 0, -int(match[1]), -int(match[2]), task
    return 1, 0, 0, task


# --- the paper's tables --------------------------------------------------------------------------------------


@dataclass
class Line:
    """A row of a table: Base, New, All, Inc at each column, if known."""

    label: str
    family: str
    published: bool
    cells: dict[Column, dict[str, Spread]]
    ranked: bool = True
    groups: tuple[Group, ...] = ()

    @property
    def seeds(self) -> list[int]:
        """Return the different numbers of seeds of its cells, ascending."""
        return sorted({found.seeds for cell in self.cells.values() for found in cell.values()})


@dataclass
class Table:
    """A table before it is written as text."""

    title: str
    dataset: str
    columns: list[Column]
    lines: list[Line]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def is_best(self, line: Line, column: Column, figure: str) -> bool:
        """Return whether no other ranked line of its kind, ours or published, has a higher printed figure. A line
        without rivals is not best."""
        rivals = [
            round(other.cells[column][figure].mean, 1)
            for other in self.lines
            if other.ranked and other.published == line.published and figure in other.cells.get(column, {})
        ]
        mine = line.cells.get(column, {}).get(figure)
        return line.ranked and mine is not None and len(rivals) > 1 and round(mine.mean, 1) == max(rivals)


def set_apart(records: Iterable[RunRecord], given: Iterable[str | Path]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Return the records for a table of methods, and those to leave out.

    Left out are runs below a folder `ablations` and tests with other inference options: choosing the best of these
    variants by the figures of the table would be selection on the test set. A run that was given itself, not by a
    folder above it, is shown with all its tests.
    """
    places = {Path(place).resolve() for place in given}
    shown: list[RunRecord] = []
    apart: list[RunRecord] = []
    for record in records:
        above = record.folder.parent.resolve()
        ways = [above.relative_to(place).parts for place in places if place in (above, *above.parents)]
        variant = record.retest is not None or all(ABLATIONS in way for way in ways)
        (apart if variant and record.folder.resolve() not in places else shown).append(record)
    return shown, apart


def apart_line(apart: Sequence[RunRecord]) -> str | None:
    """Return a line with the number of records left out; None if there are none."""
    tests = sum(record.retest is not None for record in apart)
    runs = len(apart) - tests
    counts = [f"{counted(runs, 'run')} below {ABLATIONS}/"] if runs else []
    counts += [f"{counted(tests, 'test')} with other inference options"] if tests else []
    return f"{' and '.join(counts)} left out; --everything shows all" if counts else None


def compare(
    records: Sequence[RunRecord], published: bool, quiet: bool = False, all_commands: bool = True
) -> list[Table]:
    """Return a table for each dataset in these records, without unfinished runs.

    all_commands: include the commands of summaries, not only of run folders.
    """
    finished = [record for record in records if record.finished]
    return [
        _table(dataset, [record for record in finished if record.dataset == dataset], published, quiet, all_commands)
        for dataset in sorted({record.dataset for record in finished}, key=lambda name: (name not in _LAYOUTS, name))
    ]


def _table(dataset: str, records: list[RunRecord], published: bool, quiet: bool, all_commands: bool) -> Table:
    groups = group(average_orders(records), quiet)
    columns = columns_of(dataset, groups)
    ours = lines_of(dataset, groups, columns)
    theirs = [_published_line(row, columns) for row in PUBLISHED if published and row.dataset == dataset]
    theirs = [line for line in theirs if line.cells]
    lines = sorted(theirs + ours, key=lambda line: (family_rank(line.family), line.family, not line.published))
    notes = [
        "Percent mIoU of the last model. ± is the standard deviation (n − 1) over seeds, var the variance, which is "
        "what the paper prints after ±. A cell that was not run is empty.",
        f"Best in bold, {'among the published and among ours' if theirs else 'among ours'}; not ranked: joint "
        "training, replayed images (RECALL) and memories, which use more data.",
    ]
    if dataset == "ade20k":
        notes.append(
            "Mean of class orders a and b where a row names none. Setting pseudo-disjoint where a row names none; "
            "other settings are not ranked."
        )
    if any(g.first.setting == JOINT for g in groups):
        notes.append("Joint training has no setting, and its All is the same for every task.")
    if theirs:
        cited = {row.source for row in PUBLISHED if row.dataset == dataset and row.label in {t.label for t in theirs}}
        notes.append("Rows in code type are runs of incseg, the others published figures.")
        notes += [f"{SOURCES[source]}." for source in SOURCES if source in cited]
    notes += [*rules_lines(records), origin_line(records)]
    title = f"{dataset}{': ours beside the published' if theirs else ''}"
    own = [one for one in groups if all_commands or not one.first.is_summary]
    return Table(title, dataset, columns, lines, notes, mixtures(records), commands_of(own))


def columns_of(dataset: str, groups: Sequence[Group]) -> list[Column]:
    """Return the paper's columns, then those of other tasks."""
    layout = _LAYOUTS.get(dataset, ())
    joint_only = all(g.first.setting == JOINT for g in groups)
    others = [] if layout and joint_only else present_columns(dataset, groups)
    return [*layout, *(column for column in others if column not in layout)]


def present_columns(dataset: str, groups: Sequence[Group]) -> list[Column]:
    """Return the columns of the runs. Joint training belongs to every column and has none, unless nothing else was
    run."""
    of_steps = [g.first for g in groups if g.first.setting != JOINT]
    without_setting = dataset in _USUAL_SETTING
    present = {(first.task, "" if without_setting else first.setting) for first in of_steps}
    present = present or {(g.first.task, JOINT) for g in groups}
    return sorted(present, key=lambda column: (task_rank(column[0]), column[1]))


def lines_of(dataset: str, groups: Sequence[Group], columns: Sequence[Column]) -> list[Line]:
    """Return our lines: each has the groups of a method with the same options, over tasks and settings. The lower bound
    is first, the upper bound last."""
    several = {name: len({_of(g.first, name) for g in groups}) > 1 for name in ("preset", "rules")}
    by_label: dict[str, list[Group]] = {}
    for one, label in zip(groups, _labels(groups, dataset, several), strict=True):
        by_label.setdefault(label, []).append(one)
    lines = []
    for label, members in by_label.items():
        first = members[0].first
        joint = first.setting == JOINT
        cells = {column: cell for column in columns if (cell := _cell(members, column, joint))}
        family = "joint" if joint else family_of(first.method)
        comparable = first.setting == _USUAL_SETTING.get(dataset, first.setting)
        ranked = comparable and family not in UNRANKED and not replays(first)
        lines.append(Line(label, family, False, cells, ranked, tuple(members)))
    return sorted(lines, key=lambda line: (family_rank(line.family), line.family, line.label))


def replays(record: RunRecord) -> bool:
    """Return whether a run replayed images of old classes, found or generated: more data than others use."""
    return family_of(record.method) == "recall" or bool(record.options.keys() & {"replay", "generator"})


def _of(record: RunRecord, name: str) -> str | None:
    return record.rules["name"] if name == "rules" else record.preset


def _labels(groups: Sequence[Group], dataset: str, several: dict[str, bool]) -> list[str]:
    """Return the names of rows. That of an extension leaves out its settings, which come from the extended model,
    unless two rows would have the same name."""
    full = [_label(one.first, options_text(one.first.options), dataset, several) for one in groups]
    short = [
        _label(one.first, "extension", dataset, several) if one.first.settings.get("start") else label
        for one, label in zip(groups, full, strict=True)
    ]
    meant = {label: {whole for other, whole in zip(short, full, strict=True) if other == label} for label in short}
    return [label if len(meant[label]) == 1 else whole for label, whole in zip(short, full, strict=True)]


def _label(record: RunRecord, options: str, dataset: str, several: dict[str, bool]) -> str:
    parts = [options]
    parts += [f"{name} {_of(record, name) or 'none'}" for name, shown in several.items() if shown]
    if record.setting == JOINT and family_of(record.method) != "joint":
        parts.append("joint")
    if dataset in _USUAL_SETTING:
        if record.setting not in (_USUAL_SETTING[dataset], JOINT):
            parts.append(record.setting)
        if record.order != _BOTH_ORDERS and record.setting != JOINT:
            parts.append(f"order {record.order}")
    text = ", ".join(part for part in parts if part)
    return f"`{record.method}`" + (f" ({text})" if text else "")


def _cell(groups: Sequence[Group], column: Column, joint: bool) -> dict[str, Spread]:
    task, setting = column
    own = [g for g in groups if g.first.task == task and (joint or setting in ("", g.first.setting))]
    if own:
        return {name: found for name in ALL_FIGURES if (found := own[0].figure(name))}
    others = [g for g in groups if joint and learns_everything(g.first.task) and learns_everything(task)]
    found = others[0].figure("all") if others else None
    return {"all": found} if found else {}


def learns_everything(task: str) -> bool:
    """Return whether a task has all classes, as named tasks have; groups of class names may leave some out."""
    return task == JOINT or re.fullmatch(r"\d+-\d+", task) is not None


def _published_line(row: Published, columns: Sequence[Column]) -> Line:
    cells: dict[Column, dict[str, Spread]] = {}
    for column, values in row.figures.items():
        if column not in columns:
            continue
        variances = row.variance.get(column, (None,) * len(FIGURES))
        cell = {
            name: Spread(value, None, variance, row.seeds)
            for name, value, variance in zip(FIGURES, values, variances, strict=True)
            if value is not None
        }
        if cell:
            cells[column] = cell
    return Line(row.label, row.family, True, cells, row.ranked)


def average_orders(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Merge runs on ADE20k that differ only in the class order (a, b) into one with the mean of their figures."""
    records = list(records)
    in_order_b = {_but_order(r): r for r in records if r.dataset == "ade20k" and r.order == "b"}
    taken, averaged = set(), []
    for one in records:
        other = in_order_b.get(_but_order(one)) if one.order == "a" else None
        if other is None:
            averaged.append(one)
            continue
        taken.add(id(other))
        means: dict[str, Any] = {name: _both(one, other, name) for name in ALL_FIGURES}
        command = f"{one.command}\n{other.command}"
        averaged.append(replace(one, **means, order=_BOTH_ORDERS, seconds=one.seconds + other.seconds, command=command))
    return [record for record in averaged if id(record) not in taken]


def _both(one: RunRecord, other: RunRecord, name: str) -> float | None:
    values = [value for record in (one, other) if (value := record.figure(name)) is not None]
    return statistics.fmean(values) if len(values) == 2 else None


def _but_order(record: RunRecord) -> str:
    names = ("dataset", "task", "setting", "method", "seed", "preset", "options", "rules")
    return json.dumps([getattr(record, name) for name in names], sort_keys=True, default=str)


# --- lines below every table ---------------------------------------------------------------------------------


def rules_lines(records: Iterable[RunRecord]) -> list[str]:
    """Return a line for each set of label rules."""
    texts = {", ".join(f"{key} {value}" for key, value in record.rules.items()) for record in records}
    return [f"Label rules: {text}." for text in sorted(texts)]


def mixtures(records: Iterable[RunRecord]) -> list[str]:
    """Return a warning for each property in which the runs of one table differ."""
    records = list(records)
    found = []
    for what, values in (
        ("label rules", {record.rules["name"] for record in records}),
        ("presets", {record.preset or "none" for record in records}),
        ("test images", {_test_images(record) for record in records}),
    ):
        if len(values) > 1:
            found.append(
                f"runs with different {what} are in one table ({', '.join(sorted(values))}): compare with care"
            )
    return found


def _test_images(record: RunRecord) -> str:
    chosen = {key: record.settings.get(f"data.{key}") for key in ("holdout", "val_limit")}
    return ", ".join(f"data.{key} {value}" for key, value in chosen.items() if value) or "the test set"


def origin_line(records: Iterable[RunRecord]) -> str:
    """Return a line with the time, commits and machines of the runs."""
    records = list(records)
    runs = sum(record.retest is None for record in records)
    tests = len(records) - runs
    hours = sum(record.seconds for record in records) / 3600
    threads = sorted({record.threads for record in records})
    return (
        f"{counted(runs, 'run')}"
        + (f" and {counted(tests, 'test')} with other inference options" if tests else "")
        + f", {hours:.1f} hours in all (a step that several runs share counts in each), "
        f"{' or '.join(map(str, threads))} thread{'s' * (threads != [1])}; "
        f"commits {', '.join(sorted({record.commit for record in records}))}; "
        f"{'; '.join(sorted({record.machine for record in records}))}."
    )


def commands_of(groups: Iterable[Group]) -> list[str]:
    """Return the command of each group's first seed, with a comment on its other seeds."""
    lines: dict[str, None] = {}
    for one in groups:
        *before, last = one.first.command.split("\n")
        others = ", ".join(str(seed) for seed in one.seeds[1:])
        lines |= dict.fromkeys([*before, last + (f"    # also seeds {others}" if others else "")])
    return list(lines)


def as_json(tables: Sequence[Table], records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return a row for every run, the groups over seeds, and the published figures, as plain values."""
    return {
        "rows": [record.as_row() for record in records if record.finished],
        "summary": [one.as_dict() for table in tables for line in table.lines for one in line.groups],
        "published": [
            {
                "dataset": table.dataset,
                "method": line.label,
                "task": column[0],
                "setting": column[1] or _USUAL_SETTING.get(table.dataset),
                **{name: cell[name].mean if name in cell else None for name in FIGURES},
                "variance": {name: cell[name].variance for name in FIGURES if name in cell},
            }
            for table in tables
            for line in table.lines
            if line.published
            for column, cell in line.cells.items()
        ],
        "warnings": [warning for table in tables for warning in table.warnings],
    }
