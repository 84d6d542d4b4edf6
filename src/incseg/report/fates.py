"""What became of each class of a run: its IoU when learnt and at the end, and who took whose pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from incseg.engine.rundir import RunDir
from incseg.report.records import RunRecord, Warn
from incseg.report.tables import Group, Spread, spread

LEAST_SHARE = 0.005
"""Smaller shares of pixels are not told."""


@dataclass(frozen=True)
class Fate:
    """A class in one run. Shares are of pixels of the test set and leave out those below LEAST_SHARE.

    iou_learnt, iou_end: percent, after the step that learnt it and at the end; None where no test image shows it.
    recall_learnt: share of its pixels that were found after step 0; None of a class learnt later.
    recall_end:    the same at the end.
    precision:     share of the pixels called by its name that are its own, at the end; None where none are.
    lost_to:       shares of its pixels that went to other classes since step 0; of a class learnt later, in all.
    taken_from:    shares of the pixels that were called by its name and belong to others.
    """

    name: str
    step: int
    iou_learnt: float | None
    iou_end: float | None
    recall_learnt: float | None
    recall_end: float | None
    precision: float | None
    lost_to: dict[str, float]
    taken_from: dict[str, float]


def fates_of(record: RunRecord, warn: Warn) -> list[Fate]:
    """Every learnt class of a finished run, the background, where it counts, first; of a kept run as far as kept."""
    if record.fates is not None:
        return [Fate(**fate) for fate in record.fates]
    learnt_in = {name: row["index"] for row in record.rows for name in row["classes"]}
    names = ["background", *learnt_in]
    first, last = _confusion(record, 0, warn), _confusion(record, record.num_steps - 1, warn)
    fates = []
    for label, name in enumerate(names):
        step = learnt_in.get(name, 0)
        if name not in record.rows[-1]["iou"]:
            continue  # ADE20k has no background
        lost, taken = _shares(last, label, axis=1), _shares(last, label, axis=0)
        recall_end, precision = lost.pop(label, None), taken.pop(label, None)
        recall_learnt = None
        if label > 0 and step == 0 and record.num_steps > 1:
            before = _shares(first, label, axis=1)
            recall_learnt = before.pop(label, None)
            lost = {other: share - before.get(other, 0.0) for other, share in lost.items()}
        fates.append(
            Fate(
                name,
                step,
                record.rows[step]["iou"][name],
                record.rows[-1]["iou"][name],
                recall_learnt,
                recall_end,
                precision,
                {names[other]: share for other, share in lost.items() if abs(share) >= LEAST_SHARE},
                {names[other]: share for other, share in taken.items() if share >= LEAST_SHARE},
            )
        )
    return fates


def fates_as_dicts(record: RunRecord, warn: Warn) -> list[dict[str, Any]]:
    return [asdict(fate) for fate in fates_of(record, warn)]


def _confusion(record: RunRecord, step: int, warn: Warn) -> np.ndarray | None:
    """(N+1, N+1) counts, row = target, column = predicted; None where the file lacks or is broken."""
    num_labels = 1 + sum(len(row["classes"]) for row in record.rows[: step + 1])
    file = RunDir(record.folder).confusion(step)
    try:
        counts = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        warn(f"{file} cannot be read ({' '.join(str(error).split())}); its classes are shown without it")
        return None
    if counts.shape != (num_labels, num_labels):
        warn(f"{file} has shape {counts.shape}, not {num_labels} × {num_labels}; its classes are shown without it")
        return None
    return counts


def _shares(confusion: np.ndarray | None, label: int, axis: int) -> dict[int, float]:
    """Where the pixels of a row (axis 1: the true class) or column (axis 0: the predicted one) went, as shares."""
    if confusion is None:
        return {}
    counts = confusion[label] if axis == 1 else confusion[:, label]
    total = counts.sum()
    return {other: float(count / total) for other, count in enumerate(counts)} if total else {}


# --- over seeds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanFate:
    """A class over the seeds of a group: IoUs with their spread, the rest as means of what is known."""

    name: str
    step: int
    iou_learnt: Spread | None
    iou_end: Spread | None
    recall_learnt: float | None
    recall_end: float | None
    precision: float | None
    lost_to: dict[str, float]
    taken_from: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "class": self.name,
            "learnt_in": self.step,
            "iou_learnt": self.iou_learnt.as_dict() if self.iou_learnt else None,
            "iou_end": self.iou_end.as_dict() if self.iou_end else None,
            "recall_after_step_0": self.recall_learnt,
            "recall_end": self.recall_end,
            "precision": self.precision,
            "lost_to": self.lost_to,
            "taken_from": self.taken_from,
        }


def mean_fates(one: Group, warn: Warn) -> list[MeanFate]:
    """The classes of a group over the seeds whose fates are known."""
    by_seed = [found for record in one.records if (found := fates_of(record, warn))]
    return [_mean_fate(of_class) for of_class in zip(*by_seed, strict=True)] if by_seed else []


def _mean_fate(fates: Sequence[Fate]) -> MeanFate:
    def mean(value: Callable[[Fate], float | None]) -> float | None:
        found = spread(value(fate) for fate in fates)
        return found.mean if found else None

    return MeanFate(
        fates[0].name,
        fates[0].step,
        spread(fate.iou_learnt for fate in fates),
        spread(fate.iou_end for fate in fates),
        mean(lambda fate: fate.recall_learnt),
        mean(lambda fate: fate.recall_end),
        mean(lambda fate: fate.precision),
        _mean_shares([fate.lost_to for fate in fates]),
        _mean_shares([fate.taken_from for fate in fates]),
    )


def _mean_shares(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: sum(one.get(name, 0.0) for one in shares) / len(shares) for name in names}
