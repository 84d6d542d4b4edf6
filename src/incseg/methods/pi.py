"""Path integral, PI: synaptic intelligence (Zenke et al., 2017; for segmentation as MiB runs it, 2020).

Like EWC a spring at every parameter, cross-entropy + λ·Σ I·(θ − θ_old)² (`quadratic_penalty`), but I is what the
parameter did for the loss on the way, Σ g·Δθ (`path_step`), per squared way of the whole step (`path_importance`);
the importances of the steps add up and are min-max normalised per tensor (`min_max`).

As in MiB the gradient is taken at the end of each update, where Zenke et al. take the one that made it: that one is
never against the update, so noise alone makes importance. Ours keeps their damping ξ = 10⁻³; MiB's 10⁻²⁰ lets the
parameters that did not move outweigh all others in the normalisation.
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


class PI(Method):
    background_output = True
    first_step = FIRST_STEP
    later_options = frozenset({"weight"})

    @dataclass
    class Config:
        """Options of PI.

        Args:
            weight: of the penalty; 0 is fine-tuning. SGD with momentum 0.9 needs 2·weight·lr below 1.36.
        """

        weight: float = 500.0  # MiB

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._held = Consolidation(lambda square, path, walk: min_max(path), self.config.weight)

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
