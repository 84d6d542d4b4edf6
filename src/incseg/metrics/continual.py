"""The field's summary figures of an incremental run, in percent: Base, New, All, Inc, and PLOP's average."""

from __future__ import annotations

import math
from collections.abc import Sequence

FIGURES = ("base", "new", "all", "inc")


def mean(values: Sequence[float]) -> float | None:
    """Mean of the defined values: a label neither shown nor predicted is NaN and left out, a missed one is 0."""
    defined = [v for v in values if not math.isnan(v)]
    return sum(defined) / len(defined) if defined else None


def summary(iou: Sequence[float], groups: Sequence[Sequence[int]], has_background: bool) -> dict[str, float | None]:
    """Base / New / All / Inc of one model.

    iou:    per learnt label, background first (as fractions).
    groups: the labels of each increment learnt so far; the first is the base.
    Background counts in Base, All and the first increment of Inc; on datasets without one (ADE20k)
    label 0 is left out everywhere. New is None before anything was added.
    """
    increments = [[iou[label] for label in group] for group in groups]
    if has_background:
        increments[0] = [iou[0], *increments[0]]
    later = [value for increment in increments[1:] for value in increment]
    per_increment = [m for m in map(mean, increments) if m is not None]
    figures = {
        "base": mean(increments[0]),
        "new": mean(later),
        "all": mean(increments[0] + later),
        "inc": mean(per_increment),
    }
    return {name: None if value is None else 100 * value for name, value in figures.items()}


def plop_average(alls: Sequence[float | None]) -> float | None:
    """PLOP's "avg": the mean of All over the models after each step."""
    return mean([a for a in alls if a is not None])
