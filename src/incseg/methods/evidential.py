"""Evidential class-incremental segmentation (Holmquist, Klasén, Felsberg, 2022): the method of the paper.

No background output: the network gives evidence for the foreground classes, and the uncertainty of the
Dirichlet that the evidence makes IS the background probability. Objects of old and future classes, hidden in
today's background, are asked for no evidence of today's classes, and never pulled into one class.

Training is `L_new + λ_KD·(L_KD-fg + L_KD-u)`: `evidential_cross_entropy` over the step's own classes,
`distill_foreground` and `distill_uncertainty` over the old ones. Inference brings the increments to one scale
(`balance`, `odds_log_probabilities`) and decides. Where ours departs from the print: the sign of L_KD-u, whose
printed form is minimal at u = 1 for every teacher; L_KD-fg divided by the number of old classes, as in MiB, from
where the weight 10 comes (`kd_reduction: sum` sets it back); balancing by `ratio`, not none (VOC) or `paper` (ADE).

Three pieces of other methods can be added to the later steps: pseudo-labels where the teacher's u is low
(`_sure_labels`), local POD on the feature maps (`local_pod`, PLOP), and replay of photographs of old classes (`Replay`,
RECALL), which are background to the new classes and go through distillation and pseudo-labels like all background.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from incseg.losses.distillation import local_pod, trained_maps
from incseg.losses.evidential import (
    evidential_losses,
    fits,
    foreground_background_weights,
    increments_cross_entropy,
    inverse_frequency_weights,
)
from incseg.losses.labels import fill_background, shifted
from incseg.losses.means import ImageMean, PixelMean, PixelSum, PixelTerm, Term, pixel_count
from incseg.losses.pixelwise import pixelwise
from incseg.methods.base import Method, StepContext
from incseg.methods.replay import open_replay
from incseg.models.pretrained import evidential_from_softmax
from incseg.models.segmenter import Segmenter
from incseg.outputs.evidential import Balancing, Rectifier, evidential_labels, evidential_prediction
from incseg.protocol import Step
from incseg.settings import setting
from incseg.types import BACKGROUND, IGNORE, Batch, Increment, Output, Prediction, UserError


class Evidential(Method):
    background_output = False

    @dataclass
    class Config:
        """Options of the evidential method.

        Args:
            rectifier: how a score becomes evidence; exp_sigmoid is exp(z)·σ(z).
            scope: classes of the Dirichlet in L_new: the step's own (increment) or all seen ones (seen).
            lambda_new: weight of L_new.
            lambda_kd: weight of both distillation terms; 0 is fine-tuning.
            kd_reduction: divide L_KD-fg by the number of old classes (mean), as MiB does, or not (sum).
            start_score: score at which the class of a later step of one class starts, each of K classes at a K-th of
                it; 0 is undecided, -2 a quiet no: all images of such a step show its class, and it would begin by
                seeing it everywhere. Wants --train.clip_later.
            foreground_weight: weigh foreground and background pixels of L_new by their inverse share of the batch
                (the paper on ADE20k).
            max_weight: limit of that weight.
            class_weight: exponent p by which rare classes are weighed up in L_new: a pixel of label c, background too,
                weighs in proportion to n_c^(−p), n_c its pixels in the step's training images; 0 weighs all alike.
            pseudo_labels: background pixels whose u by the teacher is below this (such as 0.3) are labelled with its
                class; empty for none.
            pod: weight of local POD between the feature maps of model and teacher, as in PLOP (0.01 there); empty for
                none.
            replay: folder with a folder of unlabelled images for each class, named by the class; as many of old
                classes as there are images in a batch are added to it.
            generator: package.module:callable that makes them instead, called as generator(class_name, count, seed)
                and returning Pillow images.
            replay_images: the most images of a class; empty for 100.
            balancing: how increments of different size are compared at inference.
            prior: with odds, the share of log(n_t / Σn) added to the scores of step t, n_t its training images.
            decision: argmax of the probabilities, or hierarchical, foreground where u < threshold, then the class.
            threshold: of the hierarchical decision.
        """

        rectifier: Rectifier = "exp_sigmoid"
        scope: Literal["increment", "seen"] = setting("increment", affects="later")
        lambda_new: float = 1.0
        lambda_kd: float = setting(10.0, affects="later")  # paper, section 4.3, as in MiB
        kd_reduction: Literal["mean", "sum"] = setting("mean", affects="later")
        start_score: float = setting(0.0, affects="later")
        foreground_weight: bool = False
        max_weight: float = 10.0  # paper, section 3.2
        class_weight: float = 0.0
        pseudo_labels: float | None = setting(None, affects="later")
        pod: float | None = setting(None, affects="later")
        replay: str | None = setting(None, affects="later")
        generator: str | None = setting(None, affects="later")
        replay_images: int | None = setting(None, affects="later")
        balancing: Balancing = setting("ratio", affects="inference")
        prior: float = setting(0.0, affects="inference")
        decision: Literal["argmax", "hierarchical"] = setting("argmax", affects="inference")
        threshold: float = setting(0.5, affects="inference")

        def __post_init__(self) -> None:
            if self.pseudo_labels is not None and not 0 < self.pseudo_labels <= 1:
                raise UserError(f"pseudo_labels is {self.pseudo_labels}; give a limit of u above 0 and up to 1")
            if not 0 <= self.class_weight <= 1:
                raise UserError(f"class_weight is {self.class_weight}; give an exponent from 0 to 1")
            if self.class_weight and self.foreground_weight:
                raise UserError("class_weight and foreground_weight both weigh L_new; choose one")
            if self.pod is not None and self.pod < 0:
                raise UserError(f"pod is {self.pod}; give a weight from 0")
            if (self.replay or self.generator) and self.scope == "seen" and self.pseudo_labels is None:
                raise UserError(
                    "replay with scope seen would teach that old objects are background; set scope increment, or "
                    "pseudo_labels such as 0.3"
                )

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._replay = open_replay(self.config.replay, self.config.generator, self.config.replay_images)
        self._old_sizes: tuple[int, ...] = ()
        self._class_weights: Tensor | None = None

    def begin_step(self, context: StepContext) -> None:
        if self.config.class_weight and context.images.label_counts is not None:
            self._class_weights = inverse_frequency_weights(context.images.label_counts(), self.config.class_weight)
        self._old_sizes = tuple(len(increment.classes) for increment in context.model.increments[:-1])
        if self._old_sizes and self.config.start_score:
            with torch.no_grad():
                bias = context.model.classifiers[-1].get_parameter("bias")
                bias.fill_(self.config.start_score / len(bias))
        if self._replay is not None:
            self._replay.begin_step(context)

    def extend(self, batch: Batch) -> Batch:
        """Photographs come on top: losses are divided by the step's own pixels alone.

        A mean over both would halve what a pixel of a new class counts, and rare classes were then not learnt at all.
        """
        return batch if self._replay is None else replace(self._replay.extend(batch), counts=batch.counts)

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        config = self.config
        num_old = len(step.old)
        skipped = num_old if config.scope == "increment" else 0
        scales_of = self._pixel_scales(batch)
        distills = config.lambda_kd > 0
        kd_scale = config.lambda_kd / pixel_count(batch, over="all")
        kd_scales = kd_scale / (num_old if config.kd_reduction == "mean" else 1), kd_scale
        read = teacher.logits if teacher and (distills or config.pseudo_labels is not None) else None
        # upsampled scores lie between those of the network, so that one check is usually enough for all strips
        all_fit = fits(out.logits, *([] if read is None else [read]))

        def strip(logits: Tensor, labels: Tensor, old: Tensor | None) -> dict[str, PixelTerm]:
            sure = self._sure_labels(labels, old)
            if sure is not None and config.scope == "seen":
                labels = fill_background(labels, sure)
            closed = config.pseudo_labels is None and (all_fit or fits(logits, *([] if old is None else [old])))
            new, *kd = evidential_losses(
                logits,
                shifted(labels, skipped),
                (*scales_of(labels), *kd_scales),
                old if distills else None,
                skipped,
                config.rectifier,
                closed,
            )
            terms: dict[str, PixelTerm] = {"new": PixelSum(new)}
            if sure is not None and config.scope == "increment":
                old_labels = torch.where(sure == BACKGROUND, IGNORE, sure)
                again = increments_cross_entropy(logits[:, :num_old], old_labels, self._old_sizes, config.rectifier)
                terms["pseudo"] = PixelMean(again, config.lambda_new)
            return terms | {name: PixelSum(value) for name, value in zip(("kd_fg", "kd_u"), kd, strict=False)}

        terms: dict[str, Term] = {**pixelwise(strip, batch, out.logits, read)}
        if teacher is not None and config.pod:
            weight = config.pod * math.sqrt(len(step.seen) / len(step.new))
            terms["pod"] = ImageMean(weight * local_pod(*trained_maps(out, teacher)))
        return terms

    def _sure_labels(self, labels: Tensor, teacher_logits: Tensor | None) -> Tensor | None:
        """The teacher's class at background pixels where its u is below the limit, elsewhere background.

        With scope increment the evidence is balanced by `ratio`, so that (1−u)/u = Σ_k (1−u_k)/u_k over the old
        increments: a class says the same however many came after it. With scope seen they were trained as one.
        """
        if teacher_logits is None or self.config.pseudo_labels is None:
            return None
        sizes = self._old_sizes if self.config.scope == "increment" else (teacher_logits.shape[1],)
        found = evidential_labels(teacher_logits, sizes, "ratio", self.config.rectifier, self.config.pseudo_labels)
        return torch.where(labels == BACKGROUND, found.to(labels.dtype), BACKGROUND)

    def _pixel_scales(self, batch: Batch) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function of labels: what their foreground and background pixels count in L_new, λ over the number of
        pixels, times a weight. The first is one number, or with `class_weight` one for every pixel."""
        scale = self.config.lambda_new / pixel_count(batch)
        if self._class_weights is not None:
            scales = scale * self._class_weights.to(scale)
            return lambda labels: (scales[labels.long()], scales[BACKGROUND])
        if not self.config.foreground_weight:
            return lambda labels: (scale, scale)
        num_background = batch.counts[BACKGROUND]
        num_foreground = batch.counts.sum() - num_background - batch.counts[IGNORE]
        background, foreground = foreground_background_weights(num_background, num_foreground, self.config.max_weight)
        return lambda labels: (scale * foreground, scale * background)

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        config = self.config
        threshold = config.threshold if config.decision == "hierarchical" else None
        return evidential_prediction(logits, increments, config.balancing, config.rectifier, config.prior, threshold)

    def recipe(self, step: int) -> dict[str, Any]:
        recipe = super().recipe(step)
        return recipe if self._replay is None else self._replay.in_recipe(recipe)

    def state(self) -> dict[str, Tensor]:
        state = {} if self._replay is None else self._replay.state()
        if self.config.pseudo_labels is not None:
            state["old_sizes"] = torch.tensor(self._old_sizes, dtype=torch.int64)
        return state

    def without_background_output(self, model: Segmenter) -> Segmenter:
        return evidential_from_softmax(model, self.config.rectifier)

    def load_state(self, state: dict[str, Tensor]) -> None:
        if self._replay is not None:
            self._replay.load_state(state)
        if "old_sizes" in state:
            self._old_sizes = tuple(state["old_sizes"].tolist())
