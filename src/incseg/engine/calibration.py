"""Calibration of new classes: how boldly a model predicts them, chosen on held-back images.

All scores of the new classes are shifted by one number. The rule is that of `incseg extend`: of the shifts under which
the old classes keep their pixels outside new objects, the one with the best mean IoU of the new classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from incseg.data.loaders import Loaded, thinned
from incseg.engine.forgetting import MARGIN, near_new_objects, zero_counts
from incseg.engine.runtime import Runtime
from incseg.losses.pixelwise import row_strips
from incseg.methods.base import Judged, Method
from incseg.metrics import ALLOWED, agreement, best, mean_new_iou
from incseg.models.segmenter import Segmenter

SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0, -1.5, -2.0, -3.0)
"""What is tried; of equals the first is taken."""
_STRIDE = 4
"""Every fourth pixel in both directions is enough to choose by."""


@torch.no_grad()
def judge(model: Segmenter, method: Method, batches: Iterable[Loaded], runtime: Runtime) -> Judged:
    """Return the best of SHIFTS on these images, and what it reaches; the model stays as it is.

    The old classes' scores must be those of the model before: everything but the newest classifier and its head was
    frozen.
    """
    model.eval()
    newest = model.increments[-1]
    form = model.closed_form
    are_odds = newest.solved and form is not None and form.sgd_share < 1  # of all classes
    old = [replace(i, solved=i.solved or are_odds) for i in model.increments[:-1]]
    num_new = len(newest.classes)
    num_old = model.num_classes - num_new
    shifts = torch.tensor(SHIFTS, device=runtime.device)
    counts = [zero_counts(model.num_classes, num_old) for _ in SHIFTS]
    for inputs, labels, _ in batches:
        labels = thinned(labels, _STRIDE).to(runtime.device)
        with runtime.autocast():
            logits = model(runtime.move(inputs)).logits
        near = near_new_objects(labels, num_old, MARGIN // _STRIDE)
        for rows, strip in row_strips(logits, (labels.shape[-2], labels.shape[-1])):
            before = method.predict(strip[:, :num_old], old).labels
            for shift, counted in zip(shifts, counts, strict=True):
                shifted = torch.cat([strip[:, :num_old], strip[:, num_old:] + shift], 1)
                counted.add(before, method.predict(shifted, model.increments).labels, labels[:, rows], near[:, rows])
    names = [name for increment in model.increments for name in increment.classes]
    figures = []
    for counted in counts:
        found = counted.summary(names)
        kept = agreement(found)
        figures.append((mean_new_iou(found), 100.0 if kept is None else kept))
    chosen = best(figures, ALLOWED)
    return Judged(*figures[chosen], SHIFTS[chosen])
