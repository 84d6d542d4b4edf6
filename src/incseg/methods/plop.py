"""PLOP (Douillard et al., 2021): pseudo-labels from the teacher, and distillation of features by local POD.

A background pixel gets the teacher's class if the teacher's entropy there is below the median of that class; otherwise
it is ignored. An image is weighted by the share of its background that got a label. Local POD pulls multi-scale row
and column means of the squared feature maps to those of the teacher.

Training is `CE + √(n_seen/n_new)·(0.01·Σ POD(map) + 0.0005·POD(logits)) / (maps + 1)`, background counted in n_seen:
`pseudo_labels` and `cross_entropy_per_image`, thresholds from `entropy_thresholds`, and `local_pod`. The maps are the
backbone's stages before their last activation and the embedding. The logits, after `fold_new_into_background`, count as
one more map. New classifiers start by `initialise_from_background`, as in MiB.

The authors' code divides the entropy of a pixel, which is a share of its maximum here as in the paper, once more by the
number of old outputs and by the log of the number of all. `least_threshold` is in their units (`authors_unit`). Their
histogram has 100 bins in these units, most of them empty, and their search for the median adds up numbers of bins, not
of pixels: they accept four of five pixels instead of one of two. `median: authors` does what their code does.

Differences from PLOP:
- `median: exact` uses a histogram of 2000 bins in log-odds, exact to 1 %.
- An image without background has full weight; there it has none.
- CE is divided by the number of pixels that are not void, including those without a pseudo-label.
- New logits are folded into background by log-sum-exp, not added, so POD(logits) is 0 at the start of a step.
- Tiles cover maps of any size (`local_pod`).
If the backbone is frozen, its stages cannot differ (with cached features they are not computed); POD(map) is then on
the embedding alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from incseg.losses.background import fold_new_into_background
from incseg.losses.distillation import local_pod, trained_maps
from incseg.losses.means import ImageMean, PixelMean, PixelTerm, Term
from incseg.losses.pixelwise import pixelwise, row_strips
from incseg.losses.softmax import cross_entropy_per_image
from incseg.methods.base import CROSS_ENTROPY, Method, StepContext
from incseg.metrics import BINS, bin_scores, grouped_score_counts, median_scores
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
            least_threshold: lowest threshold of a class, in the units of the authors' code: 0.001 is a share of the
                largest entropy of 0.045 in the first later step of VOC 15-1 and of 0.48 in that of ADE20k 100-10.
            median: how the median entropy of a class is found: exact, or as in the authors' code (authors), where it is
                larger.
        """

        lambda_pod: float = 0.01  # PLOP's published settings
        lambda_pod_logits: float = 0.0005  # PLOP's published settings
        least_threshold: float = 0.001  # PLOP's published settings
        median: Literal["exact", "authors"] = "exact"

    config: Config
    _thresholds: Tensor | None = None

    def begin_step(self, context: StepContext) -> None:
        self._thresholds = None
        if context.teacher is not None:
            initialise_from_background(context.model)
            unit = authors_unit(context.teacher.num_outputs, context.model.num_outputs)
            find = authors_medians(unit) if self.config.median == "authors" else median_scores
            medians = entropy_thresholds(context.teacher, context.images.batches(), find)
            self._thresholds = medians.clamp(min=self.config.least_threshold * unit)

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
        share = torch.tensor(math.sqrt((1 + len(step.seen)) / len(step.new))) / (len(maps) + 1)
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
        # until 2026-11 POD(logits) was not divided by the number of maps, then the unit of the threshold was another
        return super().recipe(step) | ({"revision": 3} if step else {})

    def state(self) -> dict[str, Tensor]:
        return {} if self._thresholds is None else {"thresholds": self._thresholds}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._thresholds = state.get("thresholds")


def authors_unit(num_old: int, num_all: int) -> float:
    """Return the share of the largest entropy that is 1 in the units of the authors' code: |O|·log(|O| + |N|), for
    numbers of outputs with background."""
    return num_old * math.log(num_all)


AUTHORS_BINS = 100


def authors_medians(unit: float) -> Callable[[Tensor], Tensor]:
    """Return a function from score counts to what the authors' code takes for their medians.

    It counts in 100 bins of the authors' units and adds the number of a bin, not its count, to its running sum. So its
    result is usually (n/2) / n_0 hundredths, n_0 of the n pixels in the lowest bin: half of that bin if it has all.
    """
    shares = bin_scores() / unit

    def medians(counts: Tensor) -> Tensor:
        bins = (shares * AUTHORS_BINS).long().clamp(max=AUTHORS_BINS - 1).to(counts.device)
        histogram = torch.zeros(len(counts), AUTHORS_BINS, dtype=counts.dtype, device=counts.device)
        histogram.index_add_(1, bins, counts)
        return counts.new_tensor([unit * _authors_median(row) for row in histogram.tolist()], dtype=torch.float32)

    return medians


def _authors_median(histogram: list[int]) -> float:
    half, running = sum(histogram) / 2, 0
    for number, count in enumerate(histogram):
        if count and running <= half <= running + count:
            return (number + (half - running) / count) / len(histogram)
        running += number
    # Their code divides by zero here. Every pixel is below plus infinity; the least threshold replaces minus infinity.
    return 1.0 if half > running else 0.0


@torch.no_grad()
def entropy_thresholds(
    teacher: Segmenter, batches: Iterable[Batch], medians: Callable[[Tensor], Tensor] = median_scores
) -> Tensor:
    """Return (outputs,): the median of the teacher's normalised entropy over the background pixels where it predicts
    each output; 0 where there are none. Pixels are counted in bins, so memory does not grow with their number.

    medians: function from (outputs, BINS) counts to the medians.
    """
    counts = torch.zeros(teacher.num_outputs, BINS, dtype=torch.int64)
    for batch in batches:
        for rows, logits in row_strips(teacher(batch.inputs).logits, batch.size):
            guess = softmax_prediction(logits)
            shown = batch.labels[:, rows] == BACKGROUND
            found = grouped_score_counts(guess.uncertainty[shown], guess.labels[shown], len(counts))
            counts = counts.to(found.device) + found
    return medians(counts)


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
