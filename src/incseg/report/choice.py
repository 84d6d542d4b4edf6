"""Which test images a page shows: by a score and a rule, never by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from incseg.types import IGNORE

LEAST_SHARE = 0.01
"""Of an image's pixels that a class must have to be shown by it."""
SCORE_RULE = (
    "An image's score is its IoU averaged over the labels, background too, that its truth or the prediction shows."
)


def image_score(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Mean IoU over the labels in either of the two, in percent; what is ignored in the truth does not count."""
    counted = truth != IGNORE
    predicted, truth = predicted[counted], truth[counted]
    shares = []
    for label in np.union1d(predicted, truth):
        hit, shown = predicted == label, truth == label
        shares.append((hit & shown).sum() / (hit | shown).sum())
    return 100 * float(np.mean(shares)) if shares else 100.0


def shown_classes(truth: np.ndarray, learnt: Sequence[int]) -> list[int]:
    """The learnt classes that an image shows, largest first."""
    counts = np.bincount(truth.ravel(), minlength=256)
    least = LEAST_SHARE * truth.size
    return sorted((i for i in learnt if counts[i] >= max(1, least)), key=lambda i: (-counts[i], i))


def extremes(scores: dict[int, float]) -> dict[str, int]:
    """The hardest, the median and the best image of these; an image stands under its first name only."""
    ranked = sorted(scores, key=lambda image: (scores[image], image))
    if not ranked:
        return {}
    return _once({"hardest": ranked[0], "median": ranked[(len(ranked) - 1) // 2], "best": ranked[-1]}, {})


def largest_fall(over_steps: Sequence[dict[int, float]]) -> int | None:
    """The image whose score has fallen most since the best of the earlier steps; None where none has."""
    if len(over_steps) < 2:
        return None
    last = over_steps[-1]
    falls = {i: max(scores[i] for scores in over_steps[:-1]) - last[i] for i in last}
    worst = max(falls, key=lambda i: (falls[i], -i), default=None)
    return worst if worst is not None and falls[worst] > 0 else None


def leads(mine: dict[int, float], theirs: dict[int, float], taken: dict[str, int]) -> dict[str, int]:
    """Where one method is furthest ahead of another and where furthest behind, among images not taken yet."""
    ahead = {i: mine[i] - theirs[i] for i in mine if i in theirs}
    found: dict[str, int] = {}
    if ahead:
        best, worst = max(ahead, key=lambda i: (ahead[i], -i)), min(ahead, key=lambda i: (ahead[i], i))
        found |= {"largest lead": best} if ahead[best] > 0 else {}
        found |= {"largest lag": worst} if ahead[worst] < 0 else {}
    return _once(found, taken)


def with_two_classes(scores: dict[int, float], classes: dict[int, list[int]]) -> int | None:
    """The median of the images that show at least two classes; of all where there is none such."""
    several = {i: score for i, score in scores.items() if len(classes[i]) > 1} or scores
    return extremes(several).get("median", next(iter(several), None))


def _once(found: dict[str, int], taken: dict[str, int]) -> dict[str, int]:
    names: dict[int, str] = {image: name for name, image in taken.items()}
    return {name: image for name, image in found.items() if names.setdefault(image, name) == name}
