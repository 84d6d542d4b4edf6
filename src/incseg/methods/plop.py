"""PLOP (Douillard et al., 2021): pseudo-labels from the teacher, and distillation of features by local POD.

A background pixel gets the teacher's class if the teacher's entropy there is below the median of that class; otherwise
it is ignored. An image is weighted by the share of its background that got a label. Local POD pulls multi-scale row
and column means of the squared feature maps to those of the teacher.

Training is `CE + √(n_seen/n_new)·(0.01·Σ POD(map) + 0.0005·POD(logits)) / (maps + 1)`: `pseudo_labels` and
`cross_entropy_per_image`, thresholds from `entropy_thresholds`, `local_pod` on the backbone's stages and the embedding,
and on the logits after `fold_new_into_background`, which count as one more map. New classifiers start by
`initialise_from_background`, as in MiB. Differences from PLOP:
- The entropy of a pixel is a share of its maximum, as in the paper. Medians come from a histogram of 2000 bins in
  log-odds (exact to 1 %). The authors' code divides once more by the number of classes and has 100 bins, most of them
  empty, so it accepts four of five pixels instead of one of two; `least_threshold` 0.23 is close to that.
- An image without background has full weight.
- CE is divided by the number of pixels that are not void, including those without a pseudo-label.
- New logits are folded into background by log-sum-exp, not added, so POD(logits) is 0 at the start of a step.
- Tiles cover maps of any size (`local_pod`).
If the backbone is frozen, its stages cannot differ (with cached features they are not computed); POD(map) is then on
the embedding alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from incseg.losses.background import fold_new_into_background
from incseg.losses.distillation import local_pod, trained_maps
from incseg.losses.means import ImageMean, PixelMean, PixelTerm, Term
from incseg.losses.pixelwise import pixelwise, row_strips
from incseg.losses.softmax import cross_entropy_per_image
from incseg.methods.base import CROSS_ENTROPY, Method, StepContext
from incseg.metrics import BINS, grouped_score_counts, median_scores
from incseg.models.classifiers import initialise_from_background
from incseg.models.segmenter import Segmenter
from incseg.outputs.softmax import softmax_prediction
from incseg.protocol import Step
from incseg.types import BACKGROUND, IGNORE, Batch, Output


class PLOP(Method):
    first_step = CROSS_ENTROPY

    @dataclass
    class Config:
        """Options of PLOP.

        Args:
            lambda_pod: weight of local POD on the feature maps.
            lambda_pod_logits: weight of local POD on the logits.
            least_threshold: lowest threshold of a class: an entropy, as a share of its maximum.
        """

        lambda_pod: float = 0.01  # PLOP's published settings
        lambda_pod_logits: float = 0.0005  # PLOP's published settings
        least_threshold: float = 0.001  # PLOP's published settings

    config: Config
    _thresholds: Tensor | None = None

    def begin_step(self, context: StepContext) -> None:
        self._thresholds = None
        if context.teacher is not None:
            initialise_from_background(context.model)
            medians = entropy_thresholds(context.teacher, context.images.batches())
            self._thresholds = medians.clamp(min=self.config.least_threshold)

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        labels, shares = batch.labels, torch.ones(len(batch.labels)).to(batch.counts)
        if teacher is not None:
            assert self._thresholds is not None, "begin_step or load_state comes first"
            labels, shares = pseudo_labels(teacher.logits, batch.labels, self._thresholds)

        def strip(logits: Tensor, strip_labels: Tensor, _: Tensor | None) -> dict[str, PixelTerm]:
            return {"ce": PixelMean(cross_entropy_per_image(logits, strip_labels), each=shares)}

        terms = pixelwise(strip, batch, out.logits, labels=labels)
        return {**terms, **(self._pod(out, teacher, step) if teacher else {})}

    def _pod(self, out: Output, teacher: Output, step: Step) -> dict[str, Term]:
        maps, teacher_maps = trained_maps(out, teacher)
        share = torch.tensor(math.sqrt(len(step.seen) / len(step.new))) / (len(maps) + 1)
        terms: dict[str, Term] = {}
        if self.config.lambda_pod > 0:
            terms["pod"] = ImageMean(self.config.lambda_pod * share * len(maps) * local_pod(maps, teacher_maps))
        if self.config.lambda_pod_logits > 0:
            logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
            folded = fold_new_into_background(logits, teacher.logits.shape[1])
            terms["pod_logits"] = ImageMean(
                self.config.lambda_pod_logits * share * local_pod([folded], [teacher.logits])
            )
        return terms

    def recipe(self, step: int) -> dict[str, Any]:
        # until 2026-11 POD(logits) was not divided by the number of maps
        return super().recipe(step) | ({"revision": 2} if step else {})

    def state(self) -> dict[str, Tensor]:
        return {} if self._thresholds is None else {"thresholds": self._thresholds}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._thresholds = state.get("thresholds")


@torch.no_grad()
def entropy_thresholds(teacher: Segmenter, batches: Iterable[Batch]) -> Tensor:
    """Return (outputs,): the median of the teacher's normalised entropy over the background pixels where it predicts
    each output; 0 where there are none. Pixels are counted in bins, so memory does not grow with their number."""
    counts = torch.zeros(teacher.num_outputs, BINS, dtype=torch.int64)
    for batch in batches:
        for rows, logits in row_strips(teacher(batch.inputs).logits, batch.size):
            guess = softmax_prediction(logits)
            shown = batch.labels[:, rows] == BACKGROUND
            found = grouped_score_counts(guess.uncertainty[shown], guess.labels[shown], len(counts))
            counts = counts.to(found.device) + found
    return median_scores(counts)


@torch.no_grad()
def pseudo_labels(teacher_logits: Tensor, labels: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels with background filled in by the teacher, and the filled share of it in each image.

    teacher_logits (B, |O|, h, w), labels (B, H, W) uint8, thresholds (|O|,) → (B, H, W) uint8, (B,). A background pixel
    gets the teacher's class c if its normalised entropy is below thresholds[c], else IGNORE; other labels do not
    change. With thresholds above one, all background is filled in. The share of an image without background is one.
    """
    strips = []
    for rows, logits in row_strips(teacher_logits, (labels.shape[-2], labels.shape[-1])):
        guess, given = softmax_prediction(logits), labels[:, rows]
        is_sure = guess.uncertainty < thresholds[guess.labels.long()]
        strips.append(torch.where(given == BACKGROUND, torch.where(is_sure, guess.labels, IGNORE), given))
    filled = torch.cat(strips, dim=1)
    was_background = labels == BACKGROUND
    num_background = was_background.sum((1, 2))
    num_filled = (was_background & (filled != IGNORE)).sum((1, 2))
    return filled, torch.where(num_background > 0, num_filled / num_background.clamp(min=1), 1)
