"""MiB, Modeling the Background (Cermelli et al., 2020): background is whatever the step does not label.

In a later step, a pixel labelled background may show any old class, and what the teacher calls background may be any
new class. Both losses treat background as that union. New classifiers start as equal shares of background, so the old
classes lose no probability.

Training is `CE + λ_KD·KD`: `background_cross_entropy_sum` (cross-entropy in step 0) and `background_distillation_sum`;
new classifiers start by `initialise_from_background`. λ is 10, as in MiB's repository and as stated in the evidential
paper.

Two ablations of the evidential paper are options; its second row has both. `background: bias` holds the weights of
background at zero, also in step 0, so that background is a single bias. `freeze_old` trains neither the classifiers of
old steps nor background, and does not move the bias of background at the start of a step.

Difference from MiB: a pixel labelled with an old foreground class, as by pseudo-labels, is scored by that class alone
and not as background. The protocol itself gives no such labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from incseg.losses.background import background_cross_entropy_sum, background_distillation_sum
from incseg.losses.means import PixelMean, PixelTerm
from incseg.methods.base import CROSS_ENTROPY, Method, StepContext
from incseg.models.classifiers import initialise_from_background
from incseg.protocol import Step
from incseg.types import BACKGROUND


class MiB(Method):
    first_step = CROSS_ENTROPY

    @dataclass
    class Config:
        """Options of MiB.

        Args:
            lambda_kd: weight of the distillation.
            start_from_background: start new classifiers as shares of background; otherwise with small random weights.
            background: a full output (output), or a bias that is the same at every pixel (bias).
            freeze_old: after step 0, train only the newest classifier, not the older ones or background.
        """

        lambda_kd: float = 10.0  # MiB
        start_from_background: bool = True
        background: Literal["output", "bias"] = "output"
        freeze_old: bool = False

    config: Config

    def begin_step(self, context: StepContext) -> None:
        if self.config.background == "bias":
            with torch.no_grad():
                _first_weight(context.model)[BACKGROUND] = 0
        if context.step.index == 0:
            return
        if self.config.start_from_background:
            initialise_from_background(context.model, move_background=not self.config.freeze_old)
        if self.config.freeze_old:
            # not by a gradient of zero: weight decay would still move the parameters
            context.model.classifiers[:-1].requires_grad_(False)

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        ce = background_cross_entropy_sum(logits, labels, len(step.old) + 1)
        terms: dict[str, PixelTerm] = {"ce": PixelMean(ce)}
        if teacher is not None and self.config.lambda_kd > 0:
            terms["kd"] = PixelMean(background_distillation_sum(logits, teacher), self.config.lambda_kd, over="all")
        return terms

    def after_backward(self, model: nn.Module) -> None:
        gradient = _first_weight(model).grad
        if self.config.background == "bias" and gradient is not None:
            gradient[BACKGROUND] = 0

    def recipe(self, step: int) -> dict[str, Any]:
        if step == 0 and self.config.background == "bias":
            return {"method": CROSS_ENTROPY, "background": "bias"}
        return super().recipe(step)


def _first_weight(model: nn.Module) -> nn.Parameter:
    """Return the weight whose first row is that of background."""
    return model.get_parameter("classifiers.0.weight")
