"""Runs that share a figure: those of the same dataset, task, setting and class order, and those of several tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from incseg.report.class_statistics import read_confusion
from incseg.report.published import family_of, family_rank
from incseg.report.runs import RunRecord, options_text
from incseg.report.tables import JOINT, Group, Spread, group, learns_everything, lines_of, replays, spread, task_rank

MAIN = "evidential"
"""The method that is shown first, if it was run."""
MOST_NAMED = 4
"""Most classes of a group that a title names."""
MOST_LINES = 12
"""Most methods in a figure over several tasks."""


def task_title(task: str) -> str:
    """Return a task for a title: of many named classes their number, "20 classes / cup"."""
    groups = [group.split(",") for group in task.split("/")]
    if max(map(len, groups)) <= MOST_NAMED:
        return task
    return " / ".join(f"{len(group)} classes" if len(group) > MOST_NAMED else ", ".join(group) for group in groups)


@dataclass(frozen=True)
class MethodRuns:
    """A method with its options in a section: the runs of its seeds, finished or not."""

    label: str
    runs: Group

    @property
    def num_steps(self) -> int:
        """Return the number of steps that at least one seed has done."""
        return max(len(record.rows) for record in self.runs.records)

    @property
    def longest(self) -> RunRecord:
        """Return the run with most steps, of several that with the smallest seed. Its models are shown."""
        return max(self.runs.records, key=lambda record: len(record.rows))

    def figure(self, name: str, step: int) -> Spread | None:
        """Return Base, New, All or Inc after a step, over the seeds that have done it."""
        return spread(record.rows[step][name] for record in self.runs.records if step < len(record.rows))

    def iou(self, name: str, step: int) -> float | None:
        found = spread(r.rows[step]["iou"].get(name) for r in self.runs.records if step < len(r.rows))
        return found.mean if found else None

    @property
    def classes(self) -> list[tuple[str, int]]:
        """Return every learnt class with the step that learnt it; first the background, if it counts."""
        rows = self.longest.rows
        learnt = [(name, row["index"]) for row in rows for name in row["classes"]]
        return ([("background", 0)] if "background" in rows[0]["iou"] else []) + learnt

    def confusion(self, step: int) -> np.ndarray | None:
        """Return (N+1, N+1): the shares of each true label's pixels by predicted label, mean over seeds.

        Rows of labels that no test image shows are NaN. None if no file can be read.
        """
        shares = []
        for record in self.runs.records:
            if step >= len(record.rows):
                continue
            counts = read_confusion(record.folder, record.rows, step)
            if counts is not None:
                total = counts.sum(1, keepdims=True)
                shares.append(np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0))
        return np.mean(shares, axis=0) if shares else None


@dataclass(frozen=True)
class Section:
    """The runs on a dataset, task, setting and class order.

    methods:  the main one first, then the others, the lower bound first.
    ceilings: joint training, which has no steps and belongs to every setting.
    key:      prefix of the file names.
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
        return " ".join([self.dataset, task_title(self.task), self.setting] + ["order b"] * (self.order == "b"))

    @property
    def main(self) -> MethodRuns:
        return self.methods[0]

    @cached_property
    def steps(self) -> list[tuple[str, ...]]:
        """Return the classes of each step that any run has done."""
        longest = max((method.longest for method in self.methods), key=lambda record: len(record.rows))
        return [tuple(row["classes"]) for row in longest.rows]

    @property
    def step_names(self) -> list[str]:
        return [step_name(index, classes) for index, classes in enumerate(self.steps)]


def differing_names(sections: Sequence[Section]) -> list[str]:
    """Return a name for each section, of the parts in which they differ: task, setting, class order."""
    parts = [(task_title(one.task), one.setting, f"order {one.order}") for one in sections]
    differing = [index for index, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
    return [" ".join(names[index] for index in differing) for names in parts]


def step_name(index: int, classes: Sequence[str]) -> str:
    """Return the name of a step: "+ sheep", or the number of classes if there are many."""
    sign = "+ " if index else ""
    short = len(classes) == 1 or sum(map(len, classes)) <= 14
    return sign + (", ".join(classes) if short else f"{len(classes)} classes")


def sections_of(records: Sequence[RunRecord]) -> list[Section]:
    """Return the sections of all runs that have done a step, in the order of tables.

    Retests and summaries are left out: they have no steps to show.
    """
    groups = group([r for r in records if r.retest is None and not r.is_summary and r.rows])
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
    keys = _file_names([section.title for section in sections])
    return [replace(section, key=key) for section, key in zip(sections, keys, strict=True)]


def _file_names(titles: Sequence[str]) -> list[str]:
    """Return a unique file name for each title: groups of class names may differ only in special characters."""
    names: list[str] = []
    for title in titles:
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in title)[:80]
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def _methods(dataset: str, groups: Sequence[Group]) -> tuple[MethodRuns, ...]:
    """Return the methods, first the main one with the fewest options.

    Labels are short because they are for figures: the name of the method and, if several have that name, the options
    that differ. Tables have all options.
    """
    full = [(line.label.replace("`", ""), one) for line in lines_of(dataset, groups, []) for one in line.groups]
    short = [_short_label(one.first, [other.first for _, other in full]) for _, one in full]
    found = [
        MethodRuns(label if short.count(label) == 1 else whole, one)
        for label, (whole, one) in zip(short, full, strict=True)
    ]
    return tuple(sorted(found, key=lambda method: _line_rank(method.runs.first)))


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


# --- over several tasks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LadderLine:
    """A method with its options over several tasks.

    scores:  All after the last step, by task.
    options: number of options.
    replays: whether the method uses replay images.
    """

    label: str
    scores: dict[str, Spread]
    options: int
    replays: bool


@dataclass(frozen=True)
class Ladder:
    """Tasks that learn the same classes in different numbers of increments, and the final scores of methods on them.

    increments: number of steps after the base by task, fewest first.
    lines:      methods that were run with at least two different numbers of increments, the main one first.
    ceilings:   All of joint training by label.
    key:        prefix of the file names.
    """

    title: str
    increments: dict[str, int]
    lines: tuple[LadderLine, ...]
    ceilings: dict[str, Spread]
    key: str = ""

    @property
    def drawn(self) -> list[LadderLine]:
        """Return the lines to draw. If there are too many, prefer those with most numbers of increments, then those
        with fewest options, then those with the highest score."""
        best = sorted(self.lines, key=self._rank)[:MOST_LINES]
        return [line for line in self.lines if line in best]

    def _rank(self, line: LadderLine) -> tuple[int, int, float]:
        tasks = [task for task in self.increments if task in line.scores]
        return -len({self.increments[task] for task in tasks}), line.options, -line.scores[tasks[-1]].mean


def ladders_of(records: Sequence[RunRecord]) -> list[Ladder]:
    """Return a ladder for each dataset, setting, class order, preset, label rules and set of classes that has one.

    Only the last models of finished runs are used, so summaries count too.
    """
    groups = group([r for r in records if r.retest is None and r.finished and r.rows and r.all is not None])
    by_place: dict[tuple[str, ...], list[Group]] = {}
    for one in groups:
        if one.first.setting != JOINT and one.first.num_steps > 1:
            by_place.setdefault(_place(one.first), []).append(one)
    several = {index: len({place[index] for place in by_place}) > 1 for index in (3, 4)}
    ladders = []
    for place, members in sorted(by_place.items()):
        lines = _lines(members)
        if not lines:
            continue
        dataset, setting, order, preset, rules, _ = place
        shown = [dataset, setting] + ["order b"] * (order == "b") + [preset] * several[3] + [rules] * several[4]
        tasks = {task for line in lines for task in line.scores}
        increments = {one.first.task: one.first.num_steps - 1 for one in members if one.first.task in tasks}
        increments = dict(sorted(increments.items(), key=lambda item: (item[1], task_rank(item[0]))))
        above = [one for one in groups if one.first.setting == JOINT and _place(one.first, setting) == place]
        levels = {m.label: level for m in _methods(dataset, above) if (level := m.runs.figure("all"))}
        ladders.append(Ladder(" ".join(shown), increments, lines, levels))
    keys = _file_names([ladder.title for ladder in ladders])
    return [replace(ladder, key=key) for ladder, key in zip(ladders, keys, strict=True)]


def _place(record: RunRecord, setting: str | None = None) -> tuple[str, ...]:
    """Return the properties that the runs of a ladder share. Joint training belongs to every setting."""
    # a set, because summaries of joint runs name each class twice
    classes = sorted({name for row in record.rows for name in row["classes"]})
    rules = str(record.rules["name"])
    return record.dataset, setting or record.setting, record.order, str(record.preset), rules, json.dumps(classes)


def _lines(groups: Sequence[Group]) -> tuple[LadderLine, ...]:
    by_method: dict[str, list[Group]] = {}
    for one in groups:
        same = json.dumps([one.first.method, one.first.options], sort_keys=True, default=str)
        by_method.setdefault(same, []).append(one)
    lines = [own for own in by_method.values() if len({one.first.num_steps for one in own}) > 1]
    lines.sort(key=lambda own: _line_rank(own[0].first))
    firsts = [own[0].first for own in lines]
    scores = [{one.first.task: found for one in own if (found := one.figure("all"))} for own in lines]
    return tuple(
        LadderLine(_short_label(first, firsts), found, len(first.options), replays(first))
        for first, found in zip(firsts, scores, strict=True)
    )


def _line_rank(record: RunRecord) -> tuple[bool, int, int]:
    return family_of(record.method) != MAIN, family_rank(record.method), len(record.options)
