"""Metrics: confusion and IoU, quality at edges, summaries of a run, forgetting, ranking by uncertainty, calibration.

Every metric is a pure function of integer counts that add up, so batches and processes do not change it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.types import IGNORE


def confusion_counts(predicted: Tensor, target: Tensor, num_labels: int) -> Tensor:
    """Return (num_labels, num_labels) int64 counts: row = target, column = predicted. Target 255 is left out.

    Both maps hold labels below num_labels, but for ignored targets.
    """
    # Ignored pixels land in rows past the last label and are cut off: cheaper than selecting the others.
    # int32 halves the memory traffic of the sum, and holds every 255 * 254 + 253.
    pair = target.to(torch.int32, copy=True).mul_(num_labels).add_(predicted.to(torch.int32)).flatten()
    counts = torch.bincount(pair, minlength=(IGNORE + 1) * num_labels)
    return counts[: num_labels * num_labels].view(num_labels, num_labels)


def iou(confusion: Tensor) -> Tensor:
    """Return the IoU per label, TP / (target + predicted − TP); NaN where a label is neither shown nor predicted."""
    confusion = confusion.double()
    hits = confusion.diagonal()
    return hits / (confusion.sum(0) + confusion.sum(1) - hits)


BOUNDARY_SHARE = 0.02
"""Width of the band of boundary IoU, as a share of the image's diagonal (Cheng et al., 2021)."""
TRIMAP_WIDTHS = (3, 8)
"""Pixels to each side of a boundary that a trimap holds."""


def boundary_counts(predicted: Tensor, target: Tensor, num_labels: int) -> Tensor:
    """Return (3, num_labels) int64 counts for boundary IoU of (B, H, W) labels: both, target, predicted.

    The band of a label is its pixels that are at most BOUNDARY_SHARE of the diagonal from its edge; the edge of the
    image is an edge, too. A pixel counts as both where its label is the same and it lies in both bands. Void pixels
    (target 255) are not counted and take the predicted label first, so that the width of a void rim does not matter.
    """
    valid = target != IGNORE
    target = torch.where(valid, target, predicted)
    height, width = target.shape[-2:]
    distance = max(1, round(BOUNDARY_SHARE * math.hypot(height, width)))
    shown, found = (near_boundary(labels, distance, image_edge=True) & valid for labels in (target, predicted))
    both = shown & found & (target == predicted)
    parts = (target[both], target[shown], predicted[found])
    return torch.stack([torch.bincount(part.flatten(), minlength=num_labels) for part in parts])


def boundary_iou(counts: Tensor) -> Tensor:
    """Return the boundary IoU per label from `boundary_counts`; NaN where a label is neither shown nor predicted."""
    both, target, predicted = counts.double()
    return both / (target + predicted - both)


def trimap_counts(predicted: Tensor, target: Tensor, num_labels: int) -> Tensor:
    """Return (len(TRIMAP_WIDTHS), num_labels, num_labels): `confusion_counts` of the pixels near a boundary.

    A pixel is near if another label, or void, is at most so many pixels away.
    """
    near = [near_boundary(target, width) for width in TRIMAP_WIDTHS]
    return torch.stack([confusion_counts(predicted, torch.where(at, target, IGNORE), num_labels) for at in near])


def near_boundary(labels: Tensor, distance: int, image_edge: bool = False) -> Tensor:
    """Return where the square of `distance` pixels around a pixel of (B, H, W) labels holds another label.

    With `image_edge` the outside of the image is another label. The time does not depend on the distance: changes
    between neighbours are summed over squares by cumulative sums.
    """
    height, width = labels.shape[-2:]
    rows, columns = (torch.arange(size, device=labels.device) for size in (height, width))
    top, left = (rows - distance).clamp(min=0), (columns - distance).clamp(min=0)
    bottom, right = (rows + distance).clamp(max=height - 1), (columns + distance).clamp(max=width - 1)
    across = _sum_over(labels[:, :, 1:] != labels[:, :, :-1], top, bottom + 1, left, right)
    down = _sum_over(labels[:, 1:] != labels[:, :-1], top, bottom, left, right + 1)
    near = (across + down) > 0
    if image_edge:
        near |= ((rows < distance) | (rows >= height - distance)).unsqueeze(1)
        near |= (columns < distance) | (columns >= width - distance)
    return near


def _sum_over(values: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return (B, H, W) sums of `values` over rows top ≤ y < bottom and columns left ≤ x < right of each pixel."""
    sums = F.pad(values.to(torch.int32).cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32), (1, 0, 1, 0))
    columns = sums[:, :, right] - sums[:, :, left]
    return columns[:, bottom] - columns[:, top]


FIGURES = ("base", "new", "all", "inc")


def percent(value: float | None) -> str:
    """Return a figure in percent as text; a dash for None."""
    return "–" if value is None else f"{value:.1f}"


def mean(values: Sequence[float]) -> float | None:
    """Return the mean without NaN (labels neither shown nor predicted); None if nothing is left."""
    defined = [v for v in values if not math.isnan(v)]
    return sum(defined) / len(defined) if defined else None


def summary(iou: Sequence[float], groups: Sequence[Sequence[int]], has_background: bool) -> dict[str, float | None]:
    """Return Base / New / All / Inc of one model, in percent.

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
    """Return PLOP's "avg": the mean of All over the models after each step."""
    return mean([a for a in alls if a is not None])


MOST_LOST = 1.0
"""Percent of their pixels that the trained classes together may lose outside the new objects."""
MAY_GIVE_WAY = 10.0
"""Percent of its own pixels that a class may lose there if an earlier extension added it or a new class lies on it."""
_RESERVE = 0.25
"""Points that calibration leaves: whole images are counted later and must stay within MOST_LOST, too."""
ALLOWED = MOST_LOST - _RESERVE


def agreement(counts: dict[str, Any]) -> float | None:
    """Return the percentage of old-class pixels, outside new objects, whose label is unchanged; None without any."""
    return 100 * counts["kept"] / counts["pixels"] if counts["pixels"] else None


_FEWEST = 100
"""Pixels below which the share that a class lost says nothing."""


def unchanged(
    found: dict[str, Any], most_lost: float = MOST_LOST, added: Collection[str] = (), protected: Collection[str] = ()
) -> float:
    """Return the percentage of old pixels outside new objects whose label is unchanged, as the rule counts it.

    found:     the counts of engine/forgetting.py.
    most_lost: percent that the trained classes may lose.
    added:     classes of earlier extensions. They claim more that is not theirs than trained classes do.
    protected: classes that do not give way to new classes that lie on them.

    Trained classes count together. A class that was added, or that a new class lies on, has a limit of its own: at
    MAY_GIVE_WAY of its pixels lost, `most_lost` is reached.
    """
    classes = found["classes"]
    apart = set(added) | (hosts(found) - set(protected))
    together = [of_class for name, of_class in classes.items() if name not in apart]
    pixels, kept = (sum(of_class[key] for of_class in together) for key in ("pixels", "kept"))
    lost = 100 * (1 - kept / pixels) if pixels else 0.0
    for of_class in (classes[name] for name in apart):
        if of_class["pixels"] >= _FEWEST:
            lost = max(lost, 100 * (1 - of_class["kept"] / of_class["pixels"]) * most_lost / MAY_GIVE_WAY)
    return 100 - lost


def hosts(found: dict[str, Any]) -> set[str]:
    """Return the old classes that a new class lies on, as a dress lies on a person."""
    return {name for of_class in found["new"].values() if (name := of_class.get("lies_on")) is not None}


def mean_new_iou(found: dict[str, Any]) -> float:
    """Return the mean IoU of the new classes that the images show; 0 without any."""
    known = [of_class["iou"] for of_class in found["new"].values() if of_class["iou"] is not None]
    return sum(known) / len(known) if known else 0.0


def best(figures: Sequence[tuple[float, float]], most_lost: float = MOST_LOST) -> int:
    """Return the index of the best (mean IoU of new classes, percentage of unchanged old pixels), first of equals.

    Take the best new classes among those that lose at most `most_lost` points of the old. If none does, take the one
    that loses least.
    """
    allowed = [index for index, (_, unchanged) in enumerate(figures) if 100 - unchanged <= most_lost]
    if allowed:
        return max(allowed, key=lambda index: figures[index][0])
    return max(range(len(figures)), key=lambda index: figures[index][1])


_SMALLEST = 6e-8  # float32 cannot tell a probability above one minus this from one
_LIMIT = 16.6  # its log-odds
BINS = 2000


def score_counts(scores: Tensor) -> Tensor:
    """Return (BINS,) int64 histogram of scores in [0, 1]; a higher bin is a higher score."""
    return torch.bincount(_bins(scores), minlength=BINS)


def grouped_score_counts(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return (num_groups, BINS) int64, the `score_counts` of each group; `groups` has the shape of `scores`."""
    flat = groups.flatten().int() * BINS + _bins(scores)
    return torch.bincount(flat, minlength=num_groups * BINS).view(num_groups, BINS)


def median_scores(counts: Tensor) -> Tensor:
    """Return the (groups,) medians of counts (groups, BINS), to the middle of its bin; 0 where a group has no score."""
    reached = counts.cumsum(1)
    total = reached[:, -1]
    below = (reached * 2 < total.unsqueeze(1)).sum(1)
    return torch.where(total > 0, bin_scores().to(counts.device)[below.clamp(max=BINS - 1)], 0)


def bin_scores() -> Tensor:
    """Return (BINS,) the scores in the middle of the bins."""
    odds = (torch.arange(BINS) + 0.5) * (2 * _LIMIT / BINS) - _LIMIT
    return odds.sigmoid()


def _bins(scores: Tensor) -> Tensor:
    odds = torch.logit(scores.detach().flatten().float(), eps=_SMALLEST)
    return odds.add_(_LIMIT).mul_(BINS / (2 * _LIMIT)).clamp_(0, BINS - 1).int()


def ranking(positive: Tensor, negative: Tensor) -> dict[str, float] | None:
    """Return AUROC, average precision and FPR at 95 % recall of "a positive scores higher", from two histograms.

    Ties inside a bin count half, as in the trapezoidal AUROC. None where either side has no pixel.
    """
    if positive.sum() == 0 or negative.sum() == 0:
        return None
    hits = positive.flip(0).cumsum(0).double()
    alarms = negative.flip(0).cumsum(0).double()
    recall, fall_out = hits / hits[-1], alarms / alarms[-1]
    previous_recall = torch.cat([recall.new_zeros(1), recall[:-1]])
    step = torch.diff(fall_out, prepend=fall_out.new_zeros(1))
    precision = hits / (hits + alarms).clamp(min=1)
    return {
        "auroc": float(((recall + previous_recall) / 2 * step).sum()),
        "average_precision": float((precision * (recall - previous_recall)).sum()),
        "fpr95": float(fall_out[(recall >= 0.95).nonzero()[0, 0]]),
    }


_CALIBRATION_BINS = 15
_FINER = 100
FINE_BINS = _CALIBRATION_BINS * _FINER


def reliability_counts(probabilities: Tensor, came_true: Tensor, counted: Tensor) -> Tensor:
    """Return (2, FINE_BINS) int64: how many of the counted pixels fall into each bin without coming true, and with."""
    place = (probabilities[counted].float() * FINE_BINS).long().clamp_(0, FINE_BINS - 1)
    return torch.bincount(came_true[counted].long() * FINE_BINS + place, minlength=2 * FINE_BINS).view(2, FINE_BINS)


def expected_calibration_error(counts: Tensor) -> float | None:
    """Return Σ_bins share · |mean probability − share that came true|, in percent; None where nothing was counted."""
    total = counts.sum(0).double()
    if total.sum() == 0:
        return None
    centres = (torch.arange(FINE_BINS, dtype=torch.float64) + 0.5) / FINE_BINS
    claimed, came_true = (side.view(_CALIBRATION_BINS, _FINER).sum(1) for side in (total * centres, counts[1].double()))
    return float(100 * (claimed - came_true).abs().sum() / total.sum())
