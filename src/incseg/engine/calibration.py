"""Calibration of new classes: how boldly a model says them, chosen on held-back images.

All scores of the new classes are shifted by one number. The rule is that of `incseg extend`: of the shifts under which
the old classes keep their pixels outside new objects, the one with the best mean IoU of the new classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from incseg.data.feeds import Loaded, thinned
from incseg.engine.forgetting import MARGIN, near_new_objects, zero_counts
from incseg.engine.progress import Reporter
from incseg.engine.runtime import Runtime
from incseg.losses.pixelwise import row_strips
from incseg.methods.base import Method
from incseg.metrics.forgetting import MOST_LOST, agreement, mean_new_iou
from incseg.models.segmenter import Segmenter

SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0, -1.5, -2.0, -3.0)
"""What is tried; of equals the first is taken."""
_RESERVE = 0.25
"""Points that are not used up: the whole images, counted later, must keep within MOST_LOST, too."""
_STRIDE = 4
"""Every fourth pixel in both directions is enough to choose by."""


def best(figures: Sequence[tuple[float, float]], most_lost: float = MOST_LOST) -> int:
    """Which of several (mean IoU of new classes, percent of old pixels that stayed) to take, the first of equals.

    The best new classes among those that lose at most `most_lost` points of the old; where none does, the one that
    loses least.
    """
    allowed = [index for index, (_, kept) in enumerate(figures) if 100 - kept <= most_lost]
    if allowed:
        return max(allowed, key=lambda index: figures[index][0])
    return max(range(len(figures)), key=lambda index: figures[index][1])


@torch.no_grad()
def calibrate(
    model: Segmenter, method: Method, batches: Iterable[Loaded], runtime: Runtime, reporter: Reporter
) -> float:
    """Shift the scores of the newest classes by the best of SHIFTS, in their classifier's bias; returns the shift.

    The old classes' scores must be those of the model before: everything but the newest classifier and its head was
    frozen.
    """
    model.eval()
    old, num_new = model.increments[:-1], len(model.increments[-1].classes)
    num_old = model.num_classes - num_new
    shifts = torch.tensor(SHIFTS, device=runtime.device)
    counts = [zero_counts(model.num_classes, num_old) for _ in SHIFTS]
    for inputs, labels, indices in batches:
        labels = thinned(labels, _STRIDE).to(runtime.device)
        with runtime.autocast():
            logits = model(runtime.move(inputs)).logits
        near = near_new_objects(labels, num_old, MARGIN // _STRIDE)
        for rows, strip in row_strips(logits, (labels.shape[-2], labels.shape[-1])):
            before = method.predict(strip[:, :num_old], old).labels
            for shift, counted in zip(shifts, counts, strict=True):
                shifted = torch.cat([strip[:, :num_old], strip[:, num_old:] + shift], 1)
                counted.add(before, method.predict(shifted, model.increments).labels, labels[:, rows], near[:, rows])
        reporter.advance(len(indices))
    names = [name for increment in model.increments for name in increment.classes]
    figures = []
    for counted in counts:
        found = counted.summary(names)
        kept = agreement(found)
        figures.append((mean_new_iou(found), 100.0 if kept is None else kept))
    chosen = SHIFTS[best(figures, MOST_LOST - _RESERVE)]
    model.classifiers[-1].get_parameter("bias").add_(chosen)
    return chosen
