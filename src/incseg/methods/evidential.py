"""Evidential class-incremental segmentation (Holmquist, Klasén, Felsberg, 2022): the method of the paper.

There is no background output. The network gives evidence for the foreground classes, and the uncertainty u of the
resulting Dirichlet is the probability of background. Pixels labelled background may show old and future classes: there
the loss only asks for no evidence of the step's own classes, and does not merge these objects into one class.

Training is `L_new + λ_KD·(L_KD-fg + L_KD-u)`: `evidential_cross_entropy` over the step's own classes,
`distill_foreground` and `distill_uncertainty` over the old ones. Inference makes the scores of increments comparable
(`balance`, `odds_log_probabilities`) and decides.

Differences from the paper: the sign of L_KD-u, whose printed form is minimal at u = 1 for every teacher; L_KD-fg is
divided by the number of old classes, as in MiB, the source of the weight 10 (`kd_reduction: sum` does not divide);
balancing by `ratio`, not none (VOC) or `paper` (ADE).

Later steps can use three parts of other methods: pseudo-labels where the teacher's u is low (`_confident_labels`),
local POD on the feature maps (`local_pod`, PLOP), and replay of images of old classes (`Replay`, RECALL). Replay images
are background for the new classes, and get distillation and pseudo-labels like all background.
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
            rectifier: function from score to evidence; exp_sigmoid is exp(z)·σ(z).
            scope: classes of the Dirichlet in L_new: the step's own (increment) or all seen ones (seen).
            lambda_new: weight of L_new.
            lambda_kd: weight of both distillation terms; 0 is fine-tuning.
            kd_reduction: divide L_KD-fg by the number of old classes (mean), as MiB does, or not (sum).
            start_score: initial score of the class in a later step of one class; each of K classes starts at a K-th
                of it. 0 is undecided, -2 a weak no. All images of such a step show its class, so a class that starts
                at 0 is first predicted everywhere. Set --train.clip_later with it.
            foreground_weight: weight foreground and background pixels of L_new by their inverse share of the batch
                (the paper on ADE20k).
            max_weight: upper limit of that weight.
            class_weight: exponent p of the weight of rare classes in L_new: a pixel of label c, also of background, is
                weighted by n_c^(−p), n_c the pixels of c in the step's training images; 0 weights all equally.
            pseudo_labels: label background pixels with the teacher's class where the teacher's u is below this limit
                (such as 0.3); empty for none.
            pod: weight of local POD between the feature maps of model and teacher, as in PLOP (0.01 there); empty for
                none.
            replay: folder with one folder of unlabelled images per class, named by the class; each batch gets as many
                images of old classes as it has images.
            generator: package.module:callable that makes the images instead; it is called as
                generator(class_name, count, seed) and returns Pillow images.
            replay_images: most images of a class; empty for 100.
            balancing: how increments of different size are compared at inference.
            prior: with odds, the share of log(n_t / Σn) added to the scores of step t, n_t its training images.
            decision: argmax of the probabilities (argmax), or foreground where u < threshold and then the best class
                (hierarchical).
            threshold: limit of u in the hierarchical decision.
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
                raise UserError("class_weight and foreground_weight both weight L_new; set only one")
            if self.pod is not None and self.pod < 0:
                raise UserError(f"pod is {self.pod}; give a weight from 0")
            if (self.replay or self.generator) and self.scope == "seen" and self.pseudo_labels is None:
                raise UserError(
                    "replay with scope seen would train old objects as background; set scope increment, or "
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
        """Add replay images, but still divide losses by the step's own pixels alone.

        A mean over both would halve the weight of a pixel of a new class, and rare classes were then not learnt at all.
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
            pseudo = self._confident_labels(labels, old)
            if pseudo is not None and config.scope == "seen":
                labels = fill_background(labels, pseudo)
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
            if pseudo is not None and config.scope == "increment":
                old_labels = torch.where(pseudo == BACKGROUND, IGNORE, pseudo)
                again = increments_cross_entropy(logits[:, :num_old], old_labels, self._old_sizes, config.rectifier)
                terms["pseudo"] = PixelMean(again, config.lambda_new)
            return terms | {name: PixelSum(value) for name, value in zip(("kd_fg", "kd_u"), kd, strict=False)}

        terms: dict[str, Term] = {**pixelwise(strip, batch, out.logits, read)}
        if teacher is not None and config.pod:
            weight = config.pod * math.sqrt(len(step.seen) / len(step.new))
            terms["pod"] = ImageMean(weight * local_pod(*trained_maps(out, teacher)))
        return terms

    def _confident_labels(self, labels: Tensor, teacher_logits: Tensor | None) -> Tensor | None:
        """Return the teacher's class at background pixels where its u is below the limit, elsewhere background.

        With scope increment the evidence is balanced by `ratio`, so that (1−u)/u = Σ_k (1−u_k)/u_k over the old
        increments: the number of later increments does not change a class. With scope seen they were trained as one.
        """
        if teacher_logits is None or self.config.pseudo_labels is None:
            return None
        sizes = self._old_sizes if self.config.scope == "increment" else (teacher_logits.shape[1],)
        found = evidential_labels(teacher_logits, sizes, "ratio", self.config.rectifier, self.config.pseudo_labels)
        return torch.where(labels == BACKGROUND, found.to(labels.dtype), BACKGROUND)

    def _pixel_scales(self, batch: Batch) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function from labels to the weights of foreground and background pixels in L_new.

        A weight is λ over the number of pixels, times that of the class. The first result is a number, or with
        `class_weight` a map.
        """
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
