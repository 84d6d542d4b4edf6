"""SSUL: segmentation with unknown label (Cha et al., 2021), without its memory and without its saliency detector.

Nothing is forgotten that does not move: after step 0 the network, the statistics of its norms and the old
classifiers are frozen, and only the new classifier learns. Every class is a sigmoid of its own
(`binary_cross_entropy`), so a new one does not press on the old. The teacher's confident predictions tell old classes
from background in today's background (`sure_background`).

SSUL splits background by a pretrained saliency detector: salient pixels that no class claims are "unknown", a class
of its own from step 0 on, trained in every step, merged with background in the prediction and the start of the new
classifiers; background itself all but rests (a ten-thousandth of the learning rate). No such detector is at hand,
and the network cannot tell unknown objects in step 0. So ours has no unknown output: unknown is a background pixel of
which the teacher is neither sure that it is background nor that it is an old class, and there the background's score
is not trained (`unknown: ignore`). As step 0 taught future objects as background, that score must give way: it goes on
learning, from pixels of new classes (no), of old ones (no) and of sure background (yes). New classifiers start small,
and are one 1×1 convolution; SSUL's have a 3×3 convolution and a norm of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from incseg.losses.means import PixelMean, PixelTerm
from incseg.losses.sigmoid import binary_cross_entropy, log_one_plus_exp, sure_background
from incseg.methods.base import Method, StepContext
from incseg.protocol import Step
from incseg.types import BACKGROUND, IGNORE, UserError


class SSUL(Method):
    first_step = "binary_cross_entropy"

    @dataclass
    class Config:
        """Options of SSUL.

        Args:
            unknown: background pixels of which the teacher is not sure: left out of the background's loss (ignore),
                or background like the others (background).
            confidence: the sigmoid from which on the teacher is sure.
        """

        unknown: Literal["ignore", "background"] = "ignore"
        confidence: float = 0.7  # SSUL's threshold of pseudo-labels

        def __post_init__(self) -> None:
            if not 0 < self.confidence < 1:
                raise UserError(f"method.confidence is {self.confidence}; it must lie between 0 and 1")

    config: Config

    def begin_step(self, context: StepContext) -> None:
        """Freeze all but the new classifier and the one with the background's output."""
        if context.step.index == 0:
            return
        model = context.model.eval().requires_grad_(False)
        for classifier in (model.classifiers[0], model.classifiers[-1]):
            classifier.requires_grad_(True)

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        first_new = len(step.old) + 1
        if teacher is None:
            return {"bce": PixelMean(binary_cross_entropy(logits, labels))}
        new = binary_cross_entropy(logits[:, first_new:], labels, first_new)
        return {"bce": PixelMean(new), "background": PixelMean(self._background_loss(logits[:, 0], labels, teacher))}

    def _background_loss(self, score: Tensor, labels: Tensor, teacher_logits: Tensor) -> Tensor:
        """BCE of the background's score per pixel: yes, no, or not asked."""
        yes, old = sure_background(labels, teacher_logits, self.config.confidence)
        if self.config.unknown == "background":
            yes = (labels == BACKGROUND) & ~old
        no = old | ((labels != BACKGROUND) & (labels != IGNORE))
        return torch.where(yes, log_one_plus_exp(-score), 0) + torch.where(no, log_one_plus_exp(score), 0)

    def end_step(self, context: StepContext) -> None:
        """The base classes share a tensor with background: put them back where weight decay has moved them."""
        if context.teacher is None:
            return
        mine, old = context.model.classifiers[0], context.teacher.classifiers[0]
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                parameter[1:] = old.get_parameter(name)[1:]
