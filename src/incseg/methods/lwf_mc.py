"""LwF-MC (Rebuffi et al., 2017, in iCaRL's comparison): LwF with one sigmoid per class instead of a softmax.

Classes do not compete in the loss, so a new one does not lower the old ones by itself; still today's labels deny the
old classes on every pixel, and only the distillation holds against it.

Training is `BCE + λ_KD·KD`: `binary_cross_entropy_sum` over all outputs, background among them, and
`sigmoid_distillation_sum` over the old ones; both are sums over outputs, as in MiB's comparison, whose weight is 10.
Prediction is `sigmoid_prediction`: the highest score; probabilities are the sigmoids divided by their sum, the
uncertainty is 1 − the highest sigmoid. Step 0 is the binary cross-entropy, so its base is not shared with softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from incseg.losses.distillation import sigmoid_distillation_sum
from incseg.losses.pixelwise import pixelwise
from incseg.losses.sigmoid import binary_cross_entropy_sum, sigmoid_prediction
from incseg.methods.base import Method
from incseg.protocol import Step
from incseg.types import Batch, Increment, Output, Prediction


class LwFMC(Method):
    background_output = True
    later_options = frozenset({"lambda_kd"})

    @dataclass
    class Config:
        """Options of LwF-MC.

        Args:
            lambda_kd: weight of the distillation; 0 is fine-tuning with sigmoids.
        """

        lambda_kd: float = 10.0  # MiB's comparison

    config: Config

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        kd_scale = self.config.lambda_kd / batch.counts.sum()

        def strip(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> dict[str, Tensor]:
            terms = {"bce": binary_cross_entropy_sum(logits, labels) / batch.valid_pixels}
            if teacher_logits is not None:
                terms["kd"] = sigmoid_distillation_sum(logits, teacher_logits) * kd_scale
            return terms

        distils = teacher is not None and self.config.lambda_kd > 0
        return pixelwise(strip, out.logits, batch.labels, teacher.logits if teacher and distils else None)

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return sigmoid_prediction(logits)
