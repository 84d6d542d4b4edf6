"""SSUL: segmentation with unknown label (Cha et al., 2021), without its memory and without its saliency detector.

After step 0 the network, the statistics of its norms and the old classifiers are frozen. Only the new classifier and
the score of background are trained. Every class has its own sigmoid (`binary_cross_entropy`), so a new class does not
lower the old ones. Among pixels labelled background, confident predictions of the teacher separate old classes from
background (`sure_background`).

SSUL splits background with a pretrained saliency detector. Salient pixels without a class label are "unknown": an
output that is trained from step 0 on, that counts as background in the prediction, and that new classifiers start
from. Background itself learns at a ten-thousandth of the learning rate.

This implementation has no saliency detector, and the network cannot detect unknown objects in step 0. So it has no
unknown output. A background pixel is unknown if the teacher is confident neither of background nor of an old class;
the score of background is not trained there (`unknown: ignore`). Step 0 taught that future objects are background, so
that score must be corrected: pixels of new and old classes are its negatives, confident background its positives.
New classifiers start with small random weights and are one 1×1 convolution; those of SSUL have a 3×3 convolution and a
norm in addition.
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
            unknown: treatment of background pixels where the teacher is not confident: leave them out of the loss of
                background (ignore), or use them as background (background).
            confidence: lowest sigmoid at which the teacher counts as confident.
        """

        unknown: Literal["ignore", "background"] = "ignore"
        confidence: float = 0.7  # SSUL's threshold of pseudo-labels

        def __post_init__(self) -> None:
            if not 0 < self.confidence < 1:
                raise UserError(f"method.confidence is {self.confidence}; it must lie between 0 and 1")

    config: Config

    def begin_step(self, context: StepContext) -> None:
        """Freeze all but the new classifier and the one that holds the output of background."""
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
        """Return the BCE of the score of background at each pixel; 0 where the pixel is left out."""
        positive, old = sure_background(labels, teacher_logits, self.config.confidence)
        if self.config.unknown == "background":
            positive = (labels == BACKGROUND) & ~old
        negative = old | ((labels != BACKGROUND) & (labels != IGNORE))
        return torch.where(positive, log_one_plus_exp(-score), 0) + torch.where(negative, log_one_plus_exp(score), 0)

    def end_step(self, context: StepContext) -> None:
        """Restore the base classes: they share a tensor with background, so weight decay has changed them."""
        if context.teacher is None:
            return
        mine, old = context.model.classifiers[0], context.teacher.classifiers[0]
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                parameter[1:] = old.get_parameter(name)[1:]
