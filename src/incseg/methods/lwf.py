"""LwF, Learning without Forgetting (Li, Hoiem, 2016): cross-entropy, and the old outputs stay the teacher's.

The first answer to forgetting, made for images of one class each. On every pixel the softmax over the old outputs is
pulled to the teacher's; that today's background hides old and future classes is not known to it.

Training is `CE + λ_KD·KD`: `cross_entropy_sum` on all outputs, `output_distillation_sum` on the old ones, background
among them. Ours is the form of MiB's comparison: no temperature, KD divided by the number of old outputs, weight 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from incseg.losses.distillation import output_distillation_sum
from incseg.losses.pixelwise import pixelwise
from incseg.losses.softmax import cross_entropy_sum, softmax_prediction
from incseg.methods.base import CROSS_ENTROPY, Method
from incseg.protocol import Step
from incseg.types import Batch, Increment, Output, Prediction


class LwF(Method):
    background_output = True
    first_step = CROSS_ENTROPY

    @dataclass
    class Config:
        """Options of LwF.

        Args:
            lambda_kd: weight of the distillation; 0 is fine-tuning.
        """

        lambda_kd: float = 100.0  # MiB's comparison

    config: Config

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        kd_scale = self.config.lambda_kd / batch.counts.sum()

        def strip(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> dict[str, Tensor]:
            terms = {"ce": cross_entropy_sum(logits, labels) / batch.valid_pixels}
            if teacher_logits is not None:
                terms["kd"] = output_distillation_sum(logits, teacher_logits) * kd_scale
            return terms

        distils = teacher is not None and self.config.lambda_kd > 0
        return pixelwise(strip, out.logits, batch.labels, teacher.logits if teacher and distils else None)

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return softmax_prediction(logits)
