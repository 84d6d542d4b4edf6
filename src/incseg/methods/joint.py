"""Joint training: all classes in one step with softmax cross-entropy. The ceiling of what steps can reach.

`--method evidential --setting joint` is the same ceiling for the evidential model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from incseg.methods.base import Method
from incseg.methods.finetune import Finetune
from incseg.protocol import Step
from incseg.types import Batch, Increment, Output, Prediction


class Joint(Method):
    background_output = True
    single_step = True

    def __init__(self, config: Method.Config | None = None) -> None:
        super().__init__(config)
        self._softmax = Finetune()

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        return self._softmax.losses(batch, out, teacher, step)

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return self._softmax.predict(logits, increments)
