"""Runs that can be drawn into one figure: the same dataset, task, setting and class order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from incseg.engine.rundir import RunDir
from incseg.report.compare import JOINT, learns_everything, lines_of
from incseg.report.published import family_of, family_rank
from incseg.report.records import RunRecord, Warn, options_text
from incseg.report.tables import Group, Spread, group, spread, task_rank

MAIN = "evidential"
"""The method that stands above, where it was run."""


@dataclass(frozen=True)
class MethodRuns:
    """A method with its options in a section: the runs of its seeds, as far as they are."""

    label: str
    runs: Group

    @property
    def num_steps(self) -> int:
        """Steps that at least one seed has done."""
        return max(len(record.rows) for record in self.runs.records)

    @property
    def longest(self) -> RunRecord:
        """The run that has got furthest, smallest seed first: the one whose models are shown."""
        return max(self.runs.records, key=lambda record: len(record.rows))

    def figure(self, name: str, step: int) -> Spread | None:
        """Base, New, All or Inc after a step, over the seeds that have done it."""
        return spread(record.rows[step][name] for record in self.runs.records if step < len(record.rows))

    def iou(self, name: str, step: int) -> float | None:
        found = spread(r.rows[step]["iou"].get(name) for r in self.runs.records if step < len(r.rows))
        return found.mean if found else None

    @property
    def classes(self) -> list[tuple[str, int]]:
        """Every learnt class with the step that learnt it; the background, where it counts, first."""
        rows = self.longest.rows
        learnt = [(name, row["index"]) for row in rows for name in row["classes"]]
        return ([("background", 0)] if "background" in rows[0]["iou"] else []) + learnt

    def confusion(self, step: int, warn: Warn) -> np.ndarray | None:
        """(N+1, N+1) shares of each true label's pixels by predicted label, the mean over seeds; NaN rows of labels
        that no test image shows. None where no file can be read."""
        num_labels = 1 + sum(len(row["classes"]) for row in self.longest.rows[: step + 1])
        shares = []
        for record in self.runs.records:
            if step >= len(record.rows):
                continue
            file = RunDir(record.folder).confusion(step)
            try:
                counts = np.load(file, allow_pickle=False).astype(np.float64)
            except (OSError, ValueError, EOFError) as error:
                warn(
                    f"{file} cannot be read ({' '.join(str(error).split())}); who took whose pixels is told without it"
                )
                continue
            if counts.shape != (num_labels, num_labels):
                warn(f"{file} has shape {counts.shape}, not {num_labels} × {num_labels}; its confusions are left out")
                continue
            total = counts.sum(1, keepdims=True)
            shares.append(np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0))
        return np.mean(shares, axis=0) if shares else None


@dataclass(frozen=True)
class Section:
    """What was run on a dataset, task, setting and order.

    methods:  the main one first, then the others, floor first.
    ceilings: joint training, which has no steps and belongs to every setting.
    key:      what its files are named by.
    """

    dataset: str
    task: str
    setting: str
    order: str
    methods: tuple[MethodRuns, ...]
    ceilings: tuple[MethodRuns, ...] = ()
    key: str = ""

    @property
    def title(self) -> str:
        return " ".join([self.dataset, self.task, self.setting] + ["order b"] * (self.order == "b"))

    @property
    def main(self) -> MethodRuns:
        return self.methods[0]

    @cached_property
    def steps(self) -> list[tuple[str, ...]]:
        """The classes of each step that any run has done."""
        longest = max((method.longest for method in self.methods), key=lambda record: len(record.rows))
        return [tuple(row["classes"]) for row in longest.rows]

    @property
    def step_names(self) -> list[str]:
        return [step_name(index, classes) for index, classes in enumerate(self.steps)]


def step_name(index: int, classes: Sequence[str]) -> str:
    """+ sheep; of many classes their number."""
    sign = "+ " if index else ""
    short = len(classes) == 1 or sum(map(len, classes)) <= 14
    return sign + (", ".join(classes) if short else f"{len(classes)} classes")


def sections_of(records: Sequence[RunRecord], warn: Warn) -> list[Section]:
    """Sections of runs that have done a step, in the order of tables; retests and kept runs, which have no steps to
    show, left out."""
    groups = group([r for r in records if r.retest is None and not r.kept and r.rows], warn)
    sections = []
    for dataset in sorted({one.first.dataset for one in groups}):
        own = [one for one in groups if one.first.dataset == dataset]
        ceilings = [one for one in own if one.first.setting == JOINT]
        places = {(one.first.task, one.first.setting, one.first.order) for one in own if one.first.setting != JOINT}
        for task, setting, order in sorted(places, key=lambda place: (task_rank(place[0]), *place[1:])):
            here = [o for o in own if (o.first.task, o.first.setting, o.first.order) == (task, setting, order)]
            above = [o for o in ceilings if o.first.task == task and o.first.order == order]
            above = above or [o for o in ceilings if learns_everything(o.first.task) and learns_everything(task)][:1]
            sections.append(Section(dataset, task, setting, order, _methods(dataset, here), _methods(dataset, above)))
        if not places:  # joint training alone
            orders = sorted({(one.first.task, one.first.order) for one in own})
            for task, order in orders:
                here = [one for one in own if (one.first.task, one.first.order) == (task, order)]
                sections.append(Section(dataset, task, JOINT, order, _methods(dataset, here)))
    return _with_keys(sections)


def _with_keys(sections: Sequence[Section]) -> list[Section]:
    """Own groups of class names are tasks too, and may differ only in what no file is named by."""
    keys: list[str] = []
    for section in sections:
        key = "".join(c if c.isalnum() or c in "-_" else "_" for c in section.title)[:80]
        keys.append(key if key not in keys else f"{key}-{len(keys)}")
    return [replace(section, key=key) for section, key in zip(sections, keys, strict=True)]


def _methods(dataset: str, groups: Sequence[Group]) -> tuple[MethodRuns, ...]:
    """The main method with the fewest options first. Labels are short, as figures need them: a method by its name, and
    only where there are several of that name by what they differ in; the tables tell everything."""
    full = [(line.label.replace("`", ""), one) for line in lines_of(dataset, groups, []) for one in line.groups]
    short = [_short_label(one.first, [other.first for _, other in full]) for _, one in full]
    found = [
        MethodRuns(label if short.count(label) == 1 else whole, one)
        for label, (whole, one) in zip(short, full, strict=True)
    ]
    return tuple(
        sorted(found, key=lambda m: (_family(m) != MAIN, family_rank(m.runs.first.method), len(m.runs.first.options)))
    )


def _short_label(record: RunRecord, others: Sequence[RunRecord]) -> str:
    alike = [other for other in others if other.method == record.method]
    differing = {
        key: value
        for key, value in record.options.items()
        if any(key not in other.options or other.options[key] != value for other in alike)
    }
    parts = ["joint"] * (record.setting == JOINT and record.method != JOINT) + [options_text(differing)] * bool(
        differing
    )
    return record.method + (f" ({', '.join(parts)})" if parts else "")


def _family(method: MethodRuns) -> str:
    return family_of(method.runs.first.method)
