"""Calibration of new classes: how readily a model predicts them, chosen on held-out images.

All scores of the new classes are shifted by one number. The rule is that of `incseg extend`: of the shifts that leave
the pixels of old classes unchanged outside new objects, take the one with the best mean IoU of the new classes. Classes
that earlier extensions solved have a limit of their own, for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from incseg.data.loaders import Loaded, thinned
from incseg.engine.forgetting import MARGIN, near_new_objects, zero_counts
from incseg.engine.runtime import Runtime
from incseg.losses.pixelwise import row_strips
from incseg.methods.base import HeldOutScore, Method
from incseg.metrics import ALLOWED, best, mean_new_iou
from incseg.models.segmenter import Segmenter

SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0, -1.5, -2.0, -3.0)
"""The shifts that are tried; the first of equals is taken."""
_STRIDE = 4
"""Every fourth pixel in both directions is enough to choose by."""
SOLVED_MAY_LOSE = 10.0
"""Percent of its pixels that a class of an earlier extension may lose. Such classes claim more that is not theirs than
trained ones do; counted together with these, they would keep new classes from being found (docs/lab-log.md)."""
_FEWEST = 100
"""Pixels, of those looked at, below which the share that a class lost says nothing."""


@torch.no_grad()
def score_on_held_out(
    model: Segmenter, method: Method, batches: Iterable[Loaded], runtime: Runtime
) -> HeldOutScore:  # fmt: skip
    """Return the best of SHIFTS on these images, and its result; the model is unchanged.

    Everything but the newest classifier and its head must have been frozen, so that the old classes' scores are those
    of the model before.
    """
    model.eval()
    newest = model.increments[-1]
    are_odds = newest.solved and not newest.beside  # the scores of all classes
    old = [replace(i, solved=i.solved or are_odds) for i in model.increments[:-1]]
    num_new = len(newest.classes)
    solved = {name for i in model.increments[:-1] if i.solved and newest.beside for name in i.classes}
    num_old = model.num_classes - num_new
    shifts = torch.tensor(SHIFTS, device=runtime.device)
    counts = [zero_counts(model.num_classes, num_old) for _ in SHIFTS]
    for inputs, labels, _ in batches:
        labels = thinned(labels, _STRIDE).to(runtime.device)
        with runtime.autocast():
            logits = model.scores(runtime.move(inputs))
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
        figures.append((mean_new_iou(found), _unchanged(found["classes"], solved)))
    chosen = best(figures, ALLOWED)
    return HeldOutScore(*figures[chosen], SHIFTS[chosen])


def _unchanged(classes: Mapping[str, Mapping[str, Any]], solved: Collection[str]) -> float:
    """Return the percentage of trained classes' pixels that are unchanged.

    classes: by name, how many pixels a class had and how many it kept.
    solved:  those of earlier extensions. As soon as one of them loses more than SOLVED_MAY_LOSE, the result is below
             what is allowed.
    """
    trained = [of_class for name, of_class in classes.items() if name not in solved]
    pixels, kept = (sum(of_class[key] for of_class in trained) for key in ("pixels", "kept"))
    lost = 1 - kept / pixels if pixels else 0.0
    for name in solved:
        pixels, kept = classes[name]["pixels"], classes[name]["kept"]
        if pixels >= _FEWEST:
            lost = max(lost, (1 - kept / pixels) * ALLOWED / SOLVED_MAY_LOSE)
    return 100 * (1 - lost)
