"""Forgetting in figures: how much of the old classes stayed when new ones were learnt, and how well those are found."""

from __future__ import annotations

from typing import Any

MOST_LOST = 1.0
"""Points of agreement that the old classes may lose outside the new objects."""


def agreement(counts: dict[str, Any]) -> float | None:
    """Percent of the pixels of old classes, outside new objects, that are labelled as before; None without any."""
    return 100 * counts["kept"] / counts["pixels"] if counts["pixels"] else None


def mean_new_iou(found: dict[str, Any]) -> float:
    """Over the new classes that the images show; 0 without any."""
    known = [of_class["iou"] for of_class in found["new"].values() if of_class["iou"] is not None]
    return sum(known) / len(known) if known else 0.0
