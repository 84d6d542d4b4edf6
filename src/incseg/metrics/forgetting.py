"""Forgetting in figures: how much of the old classes stayed when new ones were learnt, and how well those are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_LOST = 1.0
"""Points of agreement that the old classes may lose outside the new objects."""
_RESERVE = 0.25
"""Points that calibration does not use up: the whole images, counted later, must keep within MOST_LOST, too."""
ALLOWED = MOST_LOST - _RESERVE


def agreement(counts: dict[str, Any]) -> float | None:
    """Percent of the pixels of old classes, outside new objects, that are labelled as before; None without any."""
    return 100 * counts["kept"] / counts["pixels"] if counts["pixels"] else None


def mean_new_iou(found: dict[str, Any]) -> float:
    """Over the new classes that the images show; 0 without any."""
    known = [of_class["iou"] for of_class in found["new"].values() if of_class["iou"] is not None]
    return sum(known) / len(known) if known else 0.0


def best(figures: Sequence[tuple[float, float]], most_lost: float = MOST_LOST) -> int:
    """Which of several (mean IoU of new classes, percent of old pixels that stayed) to take, the first of equals.

    The best new classes among those that lose at most `most_lost` points of the old; where none does, the one that
    loses least.
    """
    allowed = [index for index, (_, kept) in enumerate(figures) if 100 - kept <= most_lost]
    if allowed:
        return max(allowed, key=lambda index: figures[index][0])
    return max(range(len(figures)), key=lambda index: figures[index][1])
