"""Which test images a page shows: by a score and a rule, never by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from incseg.types import IGNORE

LEAST_SHARE = 0.01
"""Of an image's pixels that a label must have to count as shown: a few stray pixels must not halve a score."""
SCORE_RULE = (
    "An image's score is its IoU averaged over the labels, background too, that its truth or the prediction shows on "
    "at least 1 % of the pixels."
)


def image_score(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Mean IoU over the labels that either of the two shows, in percent; what the truth ignores does not count."""
    counted = truth != IGNORE
    predicted, truth = predicted[counted], truth[counted]
    shares = []
    for label in np.union1d(predicted, truth):
        hit, shown = predicted == label, truth == label
        if max(hit.sum(), shown.sum()) < LEAST_SHARE * truth.size:
            continue
        shares.append((hit & shown).sum() / (hit | shown).sum())
    return 100 * float(np.mean(shares)) if shares else 100.0


def shown_classes(truth: np.ndarray, learnt: Sequence[int]) -> list[int]:
    """The learnt classes that an image shows, largest first."""
    counts = np.bincount(truth.ravel(), minlength=256)
    least = LEAST_SHARE * truth.size
    return sorted((i for i in learnt if counts[i] >= max(1, least)), key=lambda i: (-counts[i], i))


def extremes(scores: dict[int, float]) -> dict[str, int]:
    """The hardest, the median and the best image of these; one image may be all three."""
    ranked = sorted(scores, key=lambda image: (scores[image], image))
    if not ranked:
        return {}
    return {"hardest": ranked[0], "median": ranked[(len(ranked) - 1) // 2], "best": ranked[-1]}


def largest_fall(over_steps: Sequence[dict[int, float]]) -> dict[str, int]:
    """The image whose score has fallen most since the best of the earlier steps, if any has; those that lack a score
    after some step are passed over."""
    images = set.intersection(*map(set, over_steps)) if len(over_steps) > 1 else set()
    falls = {i: max(scores[i] for scores in over_steps[:-1]) - over_steps[-1][i] for i in images}
    return _largest("largest fall", falls)


def leads(mine: dict[int, float], theirs: dict[int, float]) -> dict[str, int]:
    """Where one method is furthest ahead of another, and where furthest behind."""
    ahead = {i: mine[i] - theirs[i] for i in mine if i in theirs}
    return _largest("largest lead", ahead) | _largest("largest lag", {i: -gap for i, gap in ahead.items()})


def _largest(name: str, values: dict[int, float]) -> dict[str, int]:
    image = max(values, key=lambda i: (values[i], -i), default=None)
    return {name: image} if image is not None and values[image] > 0 else {}


def with_two_classes(scores: dict[int, float], classes: dict[int, list[int]]) -> int | None:
    """The median of the images that show at least two classes; of all where there is none such."""
    several = {i: score for i, score in scores.items() if len(classes[i]) > 1} or scores
    return extremes(several).get("median")


def each_once(chosen: dict[str, int]) -> dict[str, int]:
    """An image that has several names stands once, under all of them: {"hardest, largest fall": 3}."""
    names: dict[int, list[str]] = {}
    for name, image in chosen.items():
        names.setdefault(image, []).append(name)
    return {", ".join(of_image): image for image, of_image in names.items()}
