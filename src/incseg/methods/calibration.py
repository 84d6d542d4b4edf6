"""Where a class's evidence should begin to count, judged on the step's own images.

A step's images always contain its classes, the images to come seldom do: where the step saw one pixel of false alarm,
r = Σn/n_t of them wait outside, n the training images of the steps so far. So the threshold of a class is moved to
where TP / (GT + r·FP), counted over the step's images, is largest. Nothing is kept but the bias of a classifier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from incseg.losses.evidential import Rectifier, log_evidence
from incseg.losses.pixelwise import row_strips
from incseg.methods.base import StepContext
from incseg.models.segmenter import Segmenter
from incseg.types import IGNORE, Batch

_LIMIT, _BINS = 20.0, 800
"""Scores are counted from −20 to 20, twenty bins to a unit."""


def score_histograms(model: Segmenter, batches: Iterable[Batch], num_old: int) -> Tensor:
    """(new classes, 2, BINS): in which bins the score z of each falls, at pixels of other labels and at its own."""
    model.eval()
    counts = torch.zeros(model.num_classes - num_old, 2, _BINS, dtype=torch.int64)
    for batch in batches:
        for rows, strip in row_strips(model(batch.inputs).logits, batch.size):
            labels = batch.labels[:, rows]
            bins = ((strip[:, num_old:] + _LIMIT) * (_BINS / (2 * _LIMIT))).long().clamp_(0, _BINS - 1)
            for k, of_class in enumerate(counts):
                own = labels == num_old + k + 1
                for row, chosen in enumerate((~own & (labels != IGNORE), own)):
                    of_class[row] += torch.bincount(bins[:, k][chosen], minlength=_BINS).cpu()
    return counts


def best_threshold(others: Tensor, own: Tensor, ratio: float) -> float:
    """The score from which on a pixel should be given to the class: where TP / (GT + ratio·FP) is largest.

    others, own: (BINS,) counts at pixels of other labels and of the class.
    """
    hits, alarms = own.flip(0).cumsum(0).flip(0).double(), others.flip(0).cumsum(0).flip(0).double()
    share = hits / (own.sum() + ratio * alarms).clamp(min=1)
    best = (share == share.max()).nonzero().flatten()
    return float(best.double().mean()) * (2 * _LIMIT / _BINS) - _LIMIT


def natural_threshold(size: int, rectifier: Rectifier) -> float:
    """The score z at which a class beats u, when it alone of an increment of `size` classes has evidence.

    By bisection of log p − log u = log e(1+e) − log K(K+e), which rises with z.
    """

    def lead(z: float) -> float:
        e = math.exp(float(log_evidence(torch.tensor(z, dtype=torch.float64), rectifier)))
        return math.log(e * (1 + e)) - math.log(size * (size + e))

    low, high = -_LIMIT, float(max(_LIMIT, 4 * size))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if lead(middle) > 0 else (middle, high)
    return high


@torch.no_grad()
def calibrate(context: StepContext, rectifier: Rectifier) -> None:
    """Shift the biases of the step's classifier so that its classes are predicted from their best thresholds on."""
    step, model = context.step, context.model
    images = [increment.train_images for increment in model.increments]
    counts = score_histograms(model, context.batches(), len(step.old))
    natural = natural_threshold(len(step.new), rectifier)
    ratio = sum(images) / max(images[-1], 1)
    shifts = [natural - best_threshold(others, own, ratio) for others, own in counts]
    bias = model.classifiers[-1].get_parameter("bias")
    bias.add_(torch.tensor(shifts).to(bias))
