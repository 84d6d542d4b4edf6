"""Calibration of new classes: how readily a model predicts them, chosen on held-out images.

A number is added to the scores of each new class. First it is the same for all of them, then each class gets its own,
the worst class first. The rule is that of `incseg extend`: of the shifts that leave the pixels of old classes unchanged
outside new objects (`unchanged`), take those with the best mean IoU of the new classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from incseg.data.loaders import Loaded, thinned
from incseg.engine.forgetting import MARGIN, near_new_objects, zero_counts
from incseg.engine.runtime import Runtime
from incseg.losses.pixelwise import row_strips
from incseg.methods.base import HeldOutScore, Method
from incseg.metrics import ALLOWED, best, mean_new_iou, unchanged
from incseg.models.segmenter import Segmenter

SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0, -1.5, -2.0, -2.5, -3.0)
"""The shifts that are tried; the first of equals is taken."""
_STRIDE = 4
"""Every fourth pixel in both directions is enough to choose by."""
_MOST_APART = 8
"""Classes that get a shift of their own at most: each takes a pass over the images."""


@dataclass(frozen=True)
class Calibration:
    """Held-out images, and the rule.

    batches:   function that yields the images; it is called once for each pass.
    protected: old classes that do not give way to new classes that lie on them.

    Everything but the newest classifier and its head must have been frozen, so that the old classes' scores are those
    of the model before.
    """

    method: Method
    batches: Callable[[], Iterable[Loaded]]
    runtime: Runtime
    protected: Collection[str] = ()

    def score(self, model: Segmenter, apart: bool = False) -> HeldOutScore:
        """Return the best shifts and the result of the model with them. The model is unchanged.

        With `apart` the classes have shifts of their own.
        """
        newest = model.increments[-1].classes
        common = [(shift,) * len(newest) for shift in SHIFTS]
        found = self._count(model, common)
        chosen = self._best(model, found)
        shifts, result = common[chosen], found[chosen]
        worst_first = sorted(range(len(newest)), key=lambda number: result["new"][newest[number]]["iou"] or 0.0)
        for number in worst_first[:_MOST_APART] if apart and len(newest) > 1 else ():
            # the shift of before comes first, so that it stays where no other is better
            others = [shifts, *((*shifts[:number], shift, *shifts[number + 1 :]) for shift in SHIFTS)]
            found = self._count(model, others)
            chosen = self._best(model, found)
            shifts, result = others[chosen], found[chosen]
        return HeldOutScore(*self._figures(model, result), shifts)

    def _best(self, model: Segmenter, found: Sequence[dict[str, Any]]) -> int:
        return best([self._figures(model, one) for one in found], ALLOWED)

    def _figures(self, model: Segmenter, found: dict[str, Any]) -> tuple[float, float]:
        beside = model.increments[-1].beside
        added = {name for i in model.increments[:-1] if i.solved and beside for name in i.classes}
        return mean_new_iou(found), unchanged(found, ALLOWED, added, self.protected)

    @torch.no_grad()
    def _count(self, model: Segmenter, candidates: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Return the comparison of the models before and after (engine/forgetting.py) with each of these shifts."""
        model.eval()
        newest = model.increments[-1]
        are_odds = newest.solved and not newest.beside  # the scores of all classes
        old = [replace(i, solved=i.solved or are_odds) for i in model.increments[:-1]]
        num_old = model.num_classes - len(newest.classes)
        shifts = torch.tensor(candidates, device=self.runtime.device).view(len(candidates), 1, -1, 1, 1)
        counts = [zero_counts(model.num_classes, num_old) for _ in candidates]
        for inputs, labels, _ in self.batches():
            labels = thinned(labels, _STRIDE).to(self.runtime.device)
            with self.runtime.autocast():
                logits = model.scores(self.runtime.move(inputs))
            near = near_new_objects(labels, num_old, MARGIN // _STRIDE)
            for rows, strip in row_strips(logits, (labels.shape[-2], labels.shape[-1])):
                before = self.method.predict(strip[:, :num_old], old).labels
                for shift, counted in zip(shifts, counts, strict=True):
                    shifted = torch.cat([strip[:, :num_old], strip[:, num_old:] + shift], 1)
                    after = self.method.predict(shifted, model.increments).labels
                    counted.add(before, after, labels[:, rows], near[:, rows])
        names = [name for increment in model.increments for name in increment.classes]
        return [counted.summary(names) for counted in counts]
