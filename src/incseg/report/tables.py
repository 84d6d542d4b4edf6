"""Records over seeds, in the order of tables."""

from __future__ import annotations

import json
import logging
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from incseg.report.published import family_rank
from incseg.report.runs import ALL_FIGURES, RunRecord

log = logging.getLogger("incseg")


@dataclass(frozen=True)
class Spread:
    """A figure over seeds. Deviation and variance divide by n − 1 and are None where there is one seed only."""

    mean: float
    deviation: float | None
    variance: float | None
    seeds: int

    def as_dict(self) -> dict[str, float | int | None]:
        return {
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "variance": self.variance,
            "seeds": self.seeds,
        }


def spread(values: Iterable[float | None]) -> Spread | None:
    """Over the values there are; None where there is none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    if len(numbers) == 1:
        return Spread(numbers[0], None, None, 1)
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers), statistics.variance(numbers), len(numbers))


@dataclass(frozen=True)
class Group:
    """Records that differ in nothing but the seed, smallest seed first."""

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
        first = self.first
        return {
            **{
                key: getattr(first, key)
                for key in ("dataset", "task", "setting", "order", "method", "options", "preset")
            },
            "rules": first.rules["name"],
            "seeds": self.seeds,
            **{name: found.as_dict() if (found := self.figure(name)) else None for name in ALL_FIGURES},
        }


def group(records: Iterable[RunRecord], quiet: bool = False) -> list[Group]:
    """Return records over seeds, in the order of tables. Of two with the same seed the second is left out with a
    warning, and a retest before a run that was trained with its options."""
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
    """Where a record stands in a table: floor first, ceiling last, fewer options before more."""
    options = json.dumps(record.options, sort_keys=True, default=str)
    return (
        record.dataset, task_rank(record.task), record.setting, record.order, family_rank(record.method), record.method,
        len(record.options), options, str(record.preset), record.rules["name"],
    )  # fmt: skip


def task_rank(task: str) -> tuple[int, int, int, str]:
    """15-5 before 15-1 before 10-1, own groups after."""
    if match := re.fullmatch(r"(\d+)-(\d+)", task):
        return 0, -int(match[1]), -int(match[2]), task
    return 1, 0, 0, task
