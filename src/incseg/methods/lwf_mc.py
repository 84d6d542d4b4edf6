"""LwF-MC (Rebuffi et al., 2017, in iCaRL's comparison): LwF with one sigmoid per class instead of a softmax.

Classes do not compete in the loss, so a new class alone does not lower the old ones. But the labels of a later step
are negatives for the old classes at every pixel, and only the distillation counters them.

Training is `BCE + λ_KD·KD`: `binary_cross_entropy` over all outputs, background included, and
`sigmoid_distillation_sum` over the old ones. Both are sums over outputs, as in MiB's comparison, whose weight is 10.
Prediction is `sigmoid_prediction`: the highest score. Probabilities are the sigmoids divided by their sum, the
uncertainty is 1 − the highest sigmoid. Step 0 is trained by binary cross-entropy, so softmax methods cannot share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from incseg.losses.distillation import sigmoid_distillation_sum
from incseg.losses.means import PixelMean, PixelTerm
from incseg.losses.sigmoid import binary_cross_entropy
from incseg.methods.base import Method
from incseg.outputs.sigmoid import sigmoid_prediction
from incseg.protocol import Step
from incseg.settings import setting
from incseg.types import Increment, Prediction


class LwFMC(Method):
    @dataclass
    class Config:
        """Options of LwF-MC.

        Args:
            lambda_kd: weight of the distillation; 0 is fine-tuning with sigmoids.
        """

        lambda_kd: float = setting(10.0, affects="later")  # MiB's comparison

    config: Config

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        terms: dict[str, PixelTerm] = {"bce": PixelMean(binary_cross_entropy(logits, labels))}
        if teacher is not None and self.config.lambda_kd > 0:
            terms["kd"] = PixelMean(sigmoid_distillation_sum(logits, teacher), self.config.lambda_kd, over="all")
        return terms

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return sigmoid_prediction(logits)
