"""Statistics of each class of a run: its IoU when it was learnt and at the end, and the classes it is confused with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from incseg.engine.rundir import RunDir

log = logging.getLogger("incseg")

LEAST_SHARE = 0.005
"""Smaller shares of pixels are left out."""


class ClassStatistics(NamedTuple):
    """A class in one run. Shares are of pixels of the test set; those below LEAST_SHARE are left out.

    step:          the step that learnt it.
    iou_learnt:    percent, after that step; None if no test image shows the class.
    iou_end:       the same after the last step.
    recall_learnt: share of its pixels that were found after step 0; None for later classes.
    recall_end:    the same after the last step.
    precision:     for later classes, the share of the pixels predicted as the class that belong to it.
    lost_to:       for classes of step 0, the shares of its pixels that other classes have gained since.
    taken_from:    for later classes, the shares of the pixels predicted as the class that belong to others.
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


def class_statistics(folder: Path, rows: Sequence[dict[str, Any]]) -> list[ClassStatistics]:
    """Return every learnt class of a finished run; first the background, if it counts."""
    learnt_in = {name: row["index"] for row in rows for name in row["classes"]}
    names = ["background", *learnt_in]
    first, last = (read_confusion(folder, rows, step) for step in (0, len(rows) - 1))
    found = []
    for label, name in enumerate(names):
        if name not in rows[-1]["iou"]:
            continue  # ADE20k has no background
        step = learnt_in.get(name, 0)
        went, came = _shares(last, label, axis=1), _shares(last, label, axis=0)
        recall_end, precision = went.pop(label, None), came.pop(label, None)
        recall_learnt, lost, taken = None, {}, {}
        if step > 0:
            taken = {names[other]: share for other, share in came.items() if share >= LEAST_SHARE}
        elif label > 0 and len(rows) > 1:
            before = _shares(first, label, axis=1)
            recall_learnt = before.pop(label, None)
            lost = {names[other]: share - before.get(other, 0.0) for other, share in went.items()}
            lost = {other: share for other, share in lost.items() if abs(share) >= LEAST_SHARE}
        ious = rows[step]["iou"][name], rows[-1]["iou"][name]
        precision = precision if step > 0 else None
        found.append(ClassStatistics(name, step, *ious, recall_learnt, recall_end, precision, lost, taken))
    return found


def read_confusion(folder: Path, rows: Sequence[dict[str, Any]], step: int) -> np.ndarray | None:
    """Return (N+1, N+1) counts, row = target, column = predicted; None if the file is missing or broken."""
    num_labels = 1 + sum(len(row["classes"]) for row in rows[: step + 1])
    file = RunDir(folder).confusion(step)
    try:
        counts = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        log.warning(f"{file} cannot be read ({' '.join(str(error).split())}); its classes are shown without it")
        return None
    if counts.shape != (num_labels, num_labels):
        shape = f"has shape {counts.shape}, not {num_labels} × {num_labels}"
        log.warning(f"{file} {shape}; its classes are shown without it")
        return None
    return counts


def _shares(confusion: np.ndarray | None, label: int, axis: int) -> dict[int, float]:
    """Return the shares of a row (axis 1: a true class) or a column (axis 0: a predicted class)."""
    if confusion is None:
        return {}
    counts = confusion[label] if axis == 1 else confusion[:, label]
    total = counts.sum()
    return {other: float(count / total) for other, count in enumerate(counts)} if total else {}
