"""Elastic weight consolidation, EWC (Kirkpatrick et al., 2017; for segmentation as MiB runs it, 2020).

Parameters that the old classes' loss is sensitive to are held by a spring: cross-entropy + λ·Σ I·(θ − θ_old)²
(`quadratic_penalty`), I the diagonal Fisher information, a running mean of g² during training (`running_square`),
min-max normalised per tensor (`min_max`).

Background is an ordinary output, so old objects in today's background still pull at it: the penalty alone does not
see them. As in MiB the running mean goes on through the steps and is made of the batch's gradient, not of each
image's; ours starts at 0, MiB's at 1, which after ten updates is the same. A tensor with a single value, or with equal
ones, has no importance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from incseg.losses.importance import min_max
from incseg.losses.pixelwise import pixelwise
from incseg.losses.softmax import cross_entropy_sum, softmax_prediction
from incseg.methods.base import Method, StepContext
from incseg.methods.consolidation import FIRST_STEP, Consolidation
from incseg.protocol import Step
from incseg.types import Batch, Increment, Output, Prediction


class EWC(Method):
    background_output = True
    first_step = FIRST_STEP
    later_options = frozenset({"weight"})

    @dataclass
    class Config:
        """Options of EWC.

        Args:
            weight: of the penalty; 0 is fine-tuning. SGD with momentum 0.9 needs 2·weight·lr below 1.36.
        """

        weight: float = 500.0  # MiB

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._held = Consolidation(lambda square, path, walk: min_max(square), self.config.weight)

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        def strip(logits: Tensor, labels: Tensor, _: Tensor | None) -> dict[str, Tensor]:
            return {"ce": cross_entropy_sum(logits, labels) / batch.valid_pixels}

        return pixelwise(strip, out.logits, batch.labels) | self._held.penalty()

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        return softmax_prediction(logits)

    def begin_step(self, context: StepContext) -> None:
        self._held.begin_step(context.model)

    def after_backward(self, model: nn.Module) -> None:
        self._held.after_backward()

    def end_step(self, context: StepContext) -> None:
        self._held.end_step()

    def state(self) -> dict[str, Tensor]:
        return self._held.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._held.load_state(state)
