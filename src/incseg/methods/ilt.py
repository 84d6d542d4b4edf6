"""ILT (Michieli, Zanuttigh, 2019): LwF, and distillation of the encoder's features.

The first work on incremental segmentation. The input of the classifiers must not drift, so the deep features of
student and teacher are compared directly, besides their outputs.

Training is `CE + λ_KD·KD + λ_F·MSE`: `cross_entropy_sum`, `output_distillation_sum` as in LwF, `feature_distillation`
on the backbone's last stage, with the weights 100 and 100 of MiB's comparison. If the backbone is frozen, its stages
cannot differ (with cached features they are not computed), and the embedding, the classifiers' input, is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from incseg.losses.distillation import feature_distillation, output_distillation_sum
from incseg.losses.means import ImageMean, PixelMean, PixelTerm, Term
from incseg.losses.softmax import cross_entropy_sum
from incseg.methods.base import CROSS_ENTROPY, Method
from incseg.protocol import Step
from incseg.types import Batch, Output


class ILT(Method):
    first_step = CROSS_ENTROPY

    @dataclass
    class Config:
        """Options of ILT.

        Args:
            lambda_kd: weight of the distillation of outputs.
            lambda_features: weight of the distillation of features; 0 is LwF, both 0 fine-tuning.
        """

        lambda_kd: float = 100.0  # MiB's comparison
        lambda_features: float = 100.0  # MiB's comparison

    config: Config

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        terms: dict[str, PixelTerm] = {"ce": PixelMean(cross_entropy_sum(logits, labels))}
        if teacher is not None and self.config.lambda_kd > 0:
            terms["kd"] = PixelMean(output_distillation_sum(logits, teacher), self.config.lambda_kd, over="all")
        return terms

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        terms = super().losses(batch, out, teacher, step)
        if teacher is not None and self.config.lambda_features > 0:
            features = feature_distillation(*_deepest_trained(out, teacher))
            terms["features"] = ImageMean(self.config.lambda_features * features)
        return terms


def _deepest_trained(out: Output, teacher: Output) -> tuple[Tensor, Tensor]:
    """Return the backbone's last stage of both models, or their embeddings where the backbone is not trained."""
    if out.encoded is not None and teacher.encoded is not None and out.encoded.requires_grad:
        return out.encoded, teacher.encoded
    return out.embedding, teacher.embedding
