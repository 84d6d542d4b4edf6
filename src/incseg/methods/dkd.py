"""DKD: decomposed knowledge distillation (Baek et al., 2022).

There is no background output: every class is a sigmoid, and a pixel is background if no sigmoid exceeds one half
(`foreground_prediction`). A logit is the sum of positive evidence for a class and negative evidence against it
(`decompose`). Both parts are distilled besides the logit (`binary_distillation`). An auxiliary classifier is trained
with every pixel of every step as a negative. New classifiers start as copies of it: they know the negatives of all
steps.

The auxiliary classifier is the first output, which in other methods is background. It sends no gradient to the
features and has no part in the prediction. Loss: Σ BCE of the step's own classes (`binary_cross_entropy`) + λ_KD·Σ BCE
to the teacher's old logits (`binary_distillation`) + λ_DKD·(the same of both parts, `decompose`) + BCE(auxiliary, 0)
(`log_one_plus_exp`).

The pixels of a class can have a higher weight in its BCE. The authors' scripts use 2 in step 0 on VOC and 1 in later
steps, and 35 in every step on ADE20k; the presets for these datasets do the same.

The authors train the head ten times as fast as the backbone. In later steps they freeze norms with their parameters,
and only new classifiers have weight decay. The presets paper-voc and paper-ade do the same (`train.head_rate`,
`train.frozen_later norms`, `train.decay_later new`).

Differences from DKD: void pixels are left out of the loss on labels and the auxiliary loss. The head ends in a leaky
ReLU, so features can be slightly negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.means import PixelMean, PixelTerm, Term
from incseg.losses.pixelwise import pixelwise
from incseg.losses.sigmoid import binary_cross_entropy, binary_distillation, decompose, log_one_plus_exp
from incseg.methods.base import Method, StepContext
from incseg.models.segmenter import Segmenter
from incseg.outputs.sigmoid import foreground_prediction
from incseg.protocol import Step
from incseg.settings import setting
from incseg.types import IGNORE, Batch, Increment, Output, Prediction, UserError


class DKD(Method):
    own_outputs = True  # the first one is not a background score

    @dataclass
    class Config:
        """Options of DKD.

        Args:
            lambda_kd: weight of the distillation of logits.
            lambda_dkd: weight of the distillation of the positive and the negative part of each logit.
            lambda_auxiliary: weight of the auxiliary classifier's loss.
            positive_weight: weight of a class's own pixels in its BCE in step 0, like `pos_weight` of PyTorch's
                BCEWithLogitsLoss; the authors use 2 on VOC and 35 on ADE20k; 1 weights all pixels equally.
            positive_weight_later: the same in later steps; the authors use 1 on VOC and 35 on ADE20k.
        """

        lambda_kd: float = setting(5.0, affects="later")  # the authors' configuration for VOC, as all below
        lambda_dkd: float = setting(5.0, affects="later")
        lambda_auxiliary: float = 1.0
        positive_weight: float = 1.0
        positive_weight_later: float = setting(1.0, affects="later")

        def __post_init__(self) -> None:
            for name in ("positive_weight", "positive_weight_later"):
                if not getattr(self, name) > 0:
                    raise UserError(f"{name} is {getattr(self, name)}; give a weight above 0")

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._model: Segmenter | None = None
        self._teacher: Segmenter | None = None

    def begin_step(self, context: StepContext) -> None:
        """Initialise the new classifiers as copies of the auxiliary one."""
        self._model, self._teacher = context.model, context.teacher
        if context.teacher is None:
            return
        first, newest = context.model.classifiers[0], context.model.classifiers[-1]
        with torch.no_grad():
            for name, parameter in newest.named_parameters():
                parameter.copy_(first.get_parameter(name)[:1].expand_as(parameter))

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        num_old = len(step.old)
        config = self.config
        positive_weight = config.positive_weight_later if step.index else config.positive_weight
        own = binary_cross_entropy(logits[:, num_old + 1 :], labels, num_old + 1, positive_weight)
        terms: dict[str, PixelTerm] = {"bce": PixelMean(own)}
        if teacher is not None:
            kd = binary_distillation(logits[:, 1 : num_old + 1], teacher[:, 1:])
            terms["kd"] = PixelMean(kd, config.lambda_kd, over="all")
        return terms

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        terms = super().losses(batch, out, teacher, step) | self._auxiliary_loss(batch, out)
        return terms | (self._part_losses(out, teacher) if teacher else {})

    def _auxiliary_loss(self, batch: Batch, out: Output) -> dict[str, Term]:
        assert self._model is not None
        first = self._model.classifiers[0]
        weight, bias = first.get_parameter("weight")[:1], first.get_parameter("bias")[:1]

        def strip(logits: Tensor, labels: Tensor, _: Tensor | None) -> dict[str, PixelTerm]:
            loss = torch.where(labels == IGNORE, 0, log_one_plus_exp(logits.squeeze(1)))
            return {"auxiliary": PixelMean(loss, self.config.lambda_auxiliary)}

        return {**pixelwise(strip, batch, F.conv2d(out.embedding.detach().to(weight), weight, bias))}

    def _part_losses(self, out: Output, teacher: Output) -> dict[str, Term]:
        """Return the distillation of both parts of the logits, at the resolution of the network."""
        assert self._model is not None
        assert self._teacher is not None
        weight = _class_weights(self._model)[: self._teacher.num_classes]
        mine = decompose(out.embedding.to(weight), weight)
        theirs = decompose(teacher.embedding.to(weight), _class_weights(self._teacher))
        return {
            name: PixelMean(binary_distillation(part, old), self.config.lambda_dkd, over="all")
            for name, part, old in zip(("for", "against"), mine, theirs, strict=True)
        }

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return foreground_prediction(logits[:, 1:])


def _class_weights(model: Segmenter) -> Tensor:
    """Return (C, D, 1, 1): the weights of all classes, without the auxiliary one."""
    return torch.cat([classifier.get_parameter("weight") for classifier in model.classifiers])[1:]
