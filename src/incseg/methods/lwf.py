"""LwF, Learning without Forgetting (Li, Hoiem, 2016): cross-entropy, and distillation of the old outputs.

LwF was made for the classification of images. At every pixel it pulls the softmax over the old outputs to the
teacher's. It does not model that pixels labelled background can show old or future classes.

Training is `CE + λ_KD·KD`: `cross_entropy_sum` on all outputs, `output_distillation_sum` on the old ones, background
included. The form is that of MiB's comparison: no temperature, KD divided by the number of old outputs, weight 100.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from incseg.losses.distillation import output_distillation_sum
from incseg.losses.means import PixelMean, PixelTerm
from incseg.losses.softmax import cross_entropy_sum
from incseg.methods.base import CROSS_ENTROPY, Method
from incseg.protocol import Step


class LwF(Method):
    first_step = CROSS_ENTROPY

    @dataclass
    class Config:
        """Options of LwF.

        Args:
            lambda_kd: weight of the distillation; 0 is fine-tuning.
        """

        lambda_kd: float = 100.0  # MiB's comparison

    config: Config

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        terms: dict[str, PixelTerm] = {"ce": PixelMean(cross_entropy_sum(logits, labels))}
        if teacher is not None and self.config.lambda_kd > 0:
            terms["kd"] = PixelMean(output_distillation_sum(logits, teacher), self.config.lambda_kd, over="all")
        return terms
