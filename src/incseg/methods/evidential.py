"""Evidential class-incremental segmentation (Holmquist, Klasén, Felsberg, 2022): the method of the paper.

No background output: the network gives evidence for the foreground classes, and the uncertainty of the
Dirichlet that the evidence makes IS the background probability. Objects of old and future classes, hidden in
today's background, are asked for no evidence of today's classes, and never pulled into one class.

Training is `L_new + λ_KD·(L_KD-fg + L_KD-u)`: `evidential_cross_entropy` over the step's own classes,
`distill_foreground` and `distill_uncertainty` over the old ones. Inference brings the increments to one scale
(`balance`, `odds_log_probabilities`) and decides. Where ours departs from the print: the sign of L_KD-u, whose
printed form is minimal at u = 1 for every teacher; L_KD-fg divided by the number of old classes, as in MiB, from
where the weight 10 comes (`kd_reduction: sum` sets it back); balancing by `ratio`, not none (VOC) or `paper` (ADE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from incseg.losses.evidential import (
    Balancing,
    Rectifier,
    balanced_log_probabilities,
    dirichlet,
    distill_foreground,
    distill_uncertainty,
    evidential_cross_entropy,
    evidential_labels,
    foreground_background_weights,
)
from incseg.losses.pixelwise import pixelwise
from incseg.methods.base import Method, StepContext
from incseg.methods.calibration import calibrate
from incseg.protocol import Step
from incseg.types import BACKGROUND, IGNORE, Batch, Increment, Output, Prediction


class Evidential(Method):
    background_output = False
    inference_options = frozenset({"balancing", "prior", "decision", "threshold"})
    later_options = frozenset({"scope", "lambda_kd", "kd_reduction", "reject", "calibrate"})

    @dataclass
    class Config:
        """Options of the evidential method.

        Args:
            rectifier: how a score becomes evidence; exp_sigmoid is exp(z)·σ(z).
            scope: classes of the Dirichlet in L_new: the step's own (increment) or all seen ones (seen).
            lambda_new: weight of L_new.
            lambda_kd: weight of both distillation terms; 0 is fine-tuning.
            kd_reduction: divide L_KD-fg by the number of old classes (mean), as MiB does, or not (sum).
            reject: at pixels labelled as a new class, teach the old classes with this weight that it is none of them,
                instead of what the teacher, who did not know it, took it for; empty distils there as everywhere.
            calibrate: after a later step, move the thresholds of its classes to where they serve best if its classes
                are as rare as the steps' numbers of images say; see methods/calibration.py.
            foreground_weight: weigh foreground and background pixels of L_new by their inverse share of the batch
                (the paper on ADE20k).
            max_weight: limit of that weight.
            balancing: how increments of different size are compared at inference.
            prior: with odds, the share of log(n_t / Σn) added to the scores of step t, n_t its training images.
            decision: argmax of the probabilities, or hierarchical, foreground where u < threshold, then the class.
            threshold: of the hierarchical decision.
        """

        rectifier: Rectifier = "exp_sigmoid"
        scope: Literal["increment", "seen"] = "increment"
        lambda_new: float = 1.0
        lambda_kd: float = 10.0  # paper, section 4.3, as in MiB
        kd_reduction: Literal["mean", "sum"] = "mean"
        reject: float | None = None
        calibrate: bool = False
        foreground_weight: bool = False
        max_weight: float = 10.0  # paper, section 3.2
        balancing: Balancing = "ratio"
        prior: float = 0.0
        decision: Literal["argmax", "hierarchical"] = "argmax"
        threshold: float = 0.5

    config: Config

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        config = self.config
        num_old = len(step.old)
        skipped = num_old if config.scope == "increment" else 0
        foreground_scale, background_scale = self._pixel_scales(batch)
        distills = teacher is not None and config.lambda_kd > 0
        kd_scale = config.lambda_kd / batch.counts.sum().clamp(min=1)
        fg_divisor = num_old if config.kd_reduction == "mean" else 1

        def strip(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> dict[str, Tensor]:
            foreground, background = evidential_cross_entropy(
                logits[:, skipped:], _shift(labels, skipped), config.rectifier
            )
            terms = {"new": foreground_scale * foreground.sum() + background_scale * background.sum()}
            if teacher_logits is not None:
                student = dirichlet(logits[:, :num_old], config.rectifier)
                old = dirichlet(teacher_logits, config.rectifier)
                foreground, uncertainty = distill_foreground(student, old), distill_uncertainty(student, old)
                if config.reject is not None:
                    is_new = (labels > num_old) & (labels != IGNORE)
                    foreground = torch.where(is_new, 0.0, foreground)
                    uncertainty = torch.where(is_new, 0.0, uncertainty)
                    terms["reject"] = -(student.log_uncertainty * is_new).sum() * (config.reject / batch.valid_pixels)
                terms["kd_fg"] = foreground.sum() * (kd_scale / fg_divisor)
                terms["kd_u"] = uncertainty.sum() * kd_scale
            return terms

        return pixelwise(strip, out.logits, batch.labels, teacher.logits if teacher and distills else None)

    def end_step(self, context: StepContext) -> None:
        if self.config.calibrate and context.step.index:
            calibrate(context, self.config.rectifier)

    def _pixel_scales(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What a foreground and a background pixel of L_new count: λ over the pixels, times their weight."""
        scale = self.config.lambda_new / batch.valid_pixels
        if not self.config.foreground_weight:
            return scale, scale
        num_background = batch.counts[BACKGROUND]
        num_foreground = batch.counts.sum() - num_background - batch.counts[IGNORE]
        background, foreground = foreground_background_weights(num_background, num_foreground, self.config.max_weight)
        return scale * foreground, scale * background

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        config = self.config
        sizes = [len(i.classes) for i in increments]

        @cache
        def probabilities() -> Tensor:
            images = [i.train_images for i in increments]
            return balanced_log_probabilities(
                logits, sizes, config.balancing, config.rectifier, config.prior, images
            ).exp()

        threshold = config.threshold if config.decision == "hierarchical" else None
        if config.balancing in ("none", "ratio"):
            labels = evidential_labels(logits, sizes, config.balancing, config.rectifier, threshold)
        elif threshold is None:
            labels = probabilities().max(1).indices  # argmax(1) takes three times as long on the CPU
        else:
            strongest = probabilities()[:, 1:].max(1).indices + 1
            labels = torch.where(probabilities()[:, 0] < threshold, strongest, torch.zeros_like(strongest))
        return Prediction(labels.to(torch.uint8), probabilities, lambda: probabilities()[:, 0])


def _shift(labels: Tensor, skipped: int) -> Tensor:
    """Learnt labels → labels of a scope that leaves out the first `skipped` classes."""
    if skipped == 0:
        return labels
    keep = (labels == BACKGROUND) | (labels == IGNORE)
    return torch.where(keep, labels, labels - skipped)
