"""The test of a model: one pass over the test images gives integer counts, and these give the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from incseg.data.loaders import Loaders
from incseg.engine.progress import show_progress
from incseg.engine.runtime import Runtime
from incseg.losses.pixelwise import row_strips
from incseg.methods.base import Method
from incseg.metrics import (
    BINS,
    FINE_BINS,
    TRIMAP_WIDTHS,
    boundary_counts,
    boundary_iou,
    confusion_counts,
    expected_calibration_error,
    grouped_score_counts,
    iou,
    mean,
    ranking,
    reliability_counts,
    summary,
    trimap_counts,
)
from incseg.models.segmenter import Segmenter
from incseg.outputs.softmax import normalised_entropy
from incseg.protocol import Protocol, Step
from incseg.settings import setting
from incseg.types import BACKGROUND, IGNORE, UNSEEN, Prediction, UserError


@dataclass
class EvalConfig:
    """How models are tested.

    Args:
        size: shorter side and centre crop of test images; 0 tests images at their own size, one at a time.
        batch_size: test images per batch.
        boundary: also measure quality at edges: boundary IoU, and IoU within 3 and 8 pixels of a boundary.
        workers: loader processes; empty for a choice by machine and data.
    """

    size: int = setting(512, affects="inference")
    batch_size: int = setting(8, affects="machine")
    boundary: bool = setting(False, affects="inference")
    workers: int | None = setting(None, affects="machine")

    def __post_init__(self) -> None:
        for name, least in (("size", 0), ("batch_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"eval.{name} is {value}; it must be at least {least}")


GROUPS = ("background", "seen", "unseen")
SCORES = ("not_background", "uncertainty", "entropy", "not_strongest")
"""1 − P(background), the method's own uncertainty, the entropy of its probabilities, 1 − their maximum."""
CLAIMS = ("strongest", "background")
"""The probability of the most probable label, and that of background. Calibration compares them with frequencies."""
SCORE_STRIDE = 2
"""Every N-th pixel in both directions is ranked: neighbours are similar, and probabilities are expensive."""


@dataclass
class Counts:
    """The counts of an evaluation. They add up over batches and processes.

    confusion: (N+1, N+1) over the images that the rules count.
    scores:    (groups, scores, BINS) histograms over all images of SCORES at pixels of GROUPS.
    claims:    (claims, 2, FINE_BINS) `reliability_counts` of CLAIMS over the images that the rules count.
    boundary:  (3, N+1) `boundary_counts` of these images; zero unless asked for.
    trimaps:   (widths, N+1, N+1) `trimap_counts` of these images; zero unless asked for.
    """

    confusion: Tensor
    scores: Tensor
    claims: Tensor
    boundary: Tensor
    trimaps: Tensor

    @staticmethod
    def zero(num_labels: int, device: torch.device) -> Counts:
        shapes = (
            (num_labels, num_labels),
            (len(GROUPS), len(SCORES), BINS),
            (len(CLAIMS), 2, FINE_BINS),
            (3, num_labels),
            (len(TRIMAP_WIDTHS), num_labels, num_labels),
        )
        return Counts(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))

    def reduce(self, runtime: Runtime) -> Counts:
        return Counts(*(runtime.sum(getattr(self, part.name)).cpu() for part in fields(self)))


@dataclass
class Evaluator:
    """The test set of a protocol, for any of its models.

    counted: for each step, whether the label rules count an image in the confusion matrix. Uncertainty is counted on
             all images.
    """

    protocol: Protocol
    loaders: Loaders
    counted: Sequence[Sequence[bool]]
    config: EvalConfig
    runtime: Runtime
    unshown_is_zero: bool = True
    """Whether a class that is predicted but shown by no test image has an IoU of 0; otherwise it has none."""

    @torch.no_grad()
    def count(self, model: Segmenter, method: Method, step: Step) -> Counts:
        """Predict every image at the size of its labels by the method's decision rule, and count."""
        model.eval()
        device = self.runtime.device
        counts = Counts.zero(model.num_classes + 1, device)
        images = self.loaders.test_images
        allowed = dict(zip(images, self.counted[step.index], strict=True))
        unseen = BACKGROUND if self.protocol.rules.unseen_at_test == "background" else IGNORE
        mine, size = self.runtime.share(range(len(images))), self.config.batch_size if self.config.size else 1
        with show_progress(f"test {step.index}/{len(self.protocol.steps) - 1}", len(images)) as advance:
            for inputs, labels, indices in self.loaders.testing(step, mine, size):
                labels = labels.to(device, non_blocking=True)
                in_matrix = torch.tensor([allowed[i] for i in indices], device=device).view(-1, 1, 1)
                with self.runtime.autocast():
                    logits = model.scores(self.runtime.move(inputs))
                if not bool(logits.isfinite().all()):
                    raise UserError(
                        f"step {step.index}: the model's scores are not finite, so its training has diverged; lower "
                        "the learning rate or set --train.clip 1, with another --out"
                    )
                predicted, counted = [], []
                for rows, strip in row_strips(logits, (labels.shape[-2], labels.shape[-1])):
                    target = labels[:, rows]
                    first = -rows.start % SCORE_STRIDE
                    some = (..., slice(first, None, SCORE_STRIDE), slice(None, None, SCORE_STRIDE))
                    thinned = method.predict(strip[some].contiguous(), model.increments)  # twice as fast as strided
                    if step.future:
                        _count_scores(counts.scores, thinned, target[some])
                    found = method.predict(strip, model.increments).labels
                    target = torch.where(target == UNSEEN, unseen, target)
                    target = torch.where(in_matrix, target, IGNORE)
                    _count_claims(counts.claims, thinned, target[some])
                    counts.confusion += confusion_counts(found, target, model.num_classes + 1)
                    predicted.append(found)
                    counted.append(target)
                if self.config.boundary:
                    both = torch.cat(predicted, 1), torch.cat(counted, 1)
                    counts.boundary += boundary_counts(*both, model.num_classes + 1)
                    counts.trimaps += trimap_counts(*both, model.num_classes + 1)
                advance(len(indices) * self.runtime.world)
        return counts.reduce(self.runtime)

    def figures(self, counts: Counts, step: Step) -> dict[str, Any]:
        """Return the figures of a row: test images, Base / New / All / Inc, IoU per class, ranking by uncertainty."""
        return {
            "test_images": sum(self.counted[step.index]),
            **figures(counts, self.protocol, step, self.unshown_is_zero),
        }


def _count_scores(counts: Tensor, prediction: Prediction, target: Tensor) -> None:
    left_out = len(GROUPS)
    groups = torch.full_like(target, GROUPS.index("seen"))
    groups[target == BACKGROUND] = GROUPS.index("background")
    groups[target == UNSEEN] = GROUPS.index("unseen")
    groups[target == IGNORE] = left_out
    probabilities = prediction.probabilities
    shown = (
        1 - probabilities[:, 0],
        prediction.uncertainty,
        normalised_entropy(probabilities),
        1 - probabilities.amax(1),
    )
    for row, score in enumerate(shown):
        counts[:, row] += grouped_score_counts(score, groups, left_out + 1)[:left_out]


def _count_claims(counts: Tensor, prediction: Prediction, target: Tensor) -> None:
    strongest = prediction.probabilities.max(1)
    claims = (
        (strongest.values, strongest.indices == target),
        (prediction.probabilities[:, 0], target == BACKGROUND),
    )
    for row, (probability, came_true) in enumerate(claims):
        counts[row] += reliability_counts(probability, came_true, target != IGNORE)


def figures(counts: Counts, protocol: Protocol, step: Step, unshown_is_zero: bool = True) -> dict[str, Any]:
    """Return Base / New / All / Inc in percent, IoU per class, calibration, and how well classes not learnt yet are
    detected: against background by 1 − P(background), against seen classes by the uncertainty, and both by entropy and
    maximum."""
    found = iou(counts.confusion)
    if not unshown_is_zero:
        found[counts.confusion.sum(1) == 0] = math.nan
    shares = found.tolist()
    names = ["background", *(protocol.dataset.classes[i - 1] for i in step.seen)]
    has_background = protocol.dataset.has_background
    shown = list(zip(names, shares, strict=True))[0 if has_background else 1 :]

    def ranked(other: str, score: str) -> dict[str, float] | None:
        by = SCORES.index(score)
        return ranking(counts.scores[GROUPS.index("unseen"), by], counts.scores[GROUPS.index(other), by])

    others = ("entropy", "not_strongest")
    _, seen, unseen = counts.scores[:, SCORES.index("not_background")].flip(-1)  # bins are symmetric: P(background)
    by_background = ranking(unseen, seen) if has_background else None
    return {
        **summary(shares, _learnt_groups(protocol, step), has_background),
        "iou": {name: None if math.isnan(share) else 100 * share for name, share in shown},
        **({"boundary": _at_boundaries(counts, len(shares) - len(shown))} if counts.boundary.any() else {}),
        "calibration": {claim: expected_calibration_error(counts.claims[row]) for row, claim in enumerate(CLAIMS)},
        "unseen": {
            "from_background": ranked("background", "not_background") if has_background else None,
            "from_seen": ranked("seen", "uncertainty"),
            "from_background_by": {by: ranked("background", by) if has_background else None for by in others},
            "from_seen_by": {"background": by_background, **{by: ranked("seen", by) for by in others}},
        },
    }


def _at_boundaries(counts: Counts, left_out: int) -> dict[str, float | None]:
    """Return boundary IoU and the IoU of each trimap, means over the same labels as All, in percent."""
    named = {"iou": boundary_iou(counts.boundary)}
    named |= {f"within_{width}": iou(counts.trimaps[row]) for row, width in enumerate(TRIMAP_WIDTHS)}
    means = {name: mean(values[left_out:].tolist()) for name, values in named.items()}
    return {name: None if value is None else 100 * value for name, value in means.items()}


def _learnt_groups(protocol: Protocol, step: Step) -> list[list[int]]:
    """Return the learnt labels of the task's increments that `step` knows, base first, also in joint training."""
    label_of = {dataset_id: label for label, dataset_id in enumerate(step.seen, start=1)}
    groups = [[label_of[i] for i in group if i in label_of] for group in protocol.groups]
    return [group for group in groups if group]
