"""Fine-tuning: softmax cross-entropy on whatever the step labels. The floor: it forgets.

Background is an ordinary output, so old classes, labelled background in later steps, are unlearnt.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from incseg.losses.pixelwise import pixelwise
from incseg.losses.softmax import cross_entropy_sum, softmax_prediction
from incseg.methods.base import CROSS_ENTROPY, Method
from incseg.protocol import Step
from incseg.types import Batch, Increment, Output, Prediction


class Finetune(Method):
    background_output = True
    first_step = CROSS_ENTROPY

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        def strip(logits: Tensor, labels: Tensor, _: Tensor | None) -> dict[str, Tensor]:
            return {"ce": cross_entropy_sum(logits, labels) / batch.valid_pixels}

        return pixelwise(strip, out.logits, batch.labels)

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return softmax_prediction(logits)
