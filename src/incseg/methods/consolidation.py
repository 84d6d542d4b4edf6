"""What EWC, PI and RW share: the statistics of a step's gradients, and the penalty for moving what mattered.

All three gather all statistics, so that one trained step 0 serves them all; each makes its own importance of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from incseg.losses.importance import (
    path_importance,
    path_step,
    penalty_gradient,
    quadratic_penalty,
    running_square,
    walk_step,
)
from incseg.losses.means import Term
from incseg.methods.base import Method, StepContext
from incseg.protocol import Step
from incseg.types import Batch, Output

FIRST_STEP = "cross_entropy+importance"
"""Step 0 by plain softmax cross-entropy, with the statistics of its gradients."""

Tensors = dict[str, Tensor]


class Consolidation:
    """Importance of the trained parameters, by name; a backbone that is frozen has none.

    importance: (running g², path importance, walk score) of a parameter → its importance in the next step.
    weight:     of the penalty.

    The penalty holds parameters where the step began; those of the new classifier are new, and free. Statistics are
    of the loss without the penalty, whose gradient is known in closed form and taken off again. The path integral
    takes the gradient at the end of each update, as MiB does: that needs no gradient of the update before, and what
    changes the model after the last batch does not enter it. The last update of a step is therefore not counted.

    Gradients are averaged over processes before `after_backward`, so all of them keep the same statistics.
    """

    def __init__(self, importance: Callable[[Tensor, Tensor, Tensor], Tensor], weight: float) -> None:
        self._measure = importance
        self._weight = weight
        self._parameters: dict[str, nn.Parameter] = {}
        self._start: Tensors = {}
        self._kept: dict[str, Tensors] = {
            group: {} for group in ("square", "path", "walk", "importance", "new_path", "new_walk", "before")
        }

    def begin_step(self, model: nn.Module) -> None:
        """What was gathered becomes importance; the model as it is becomes what the penalty holds on to."""
        kept = self._kept
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._start = {name: p.detach().clone() for name, p in self._parameters.items()}
        kept["importance"] = {
            name: self._measure(kept["square"][name], kept["path"][name], kept["walk"][name])
            for name in self._parameters
            if name in kept["path"]
        }
        for name, start in self._start.items():
            kept["square"].setdefault(name, torch.zeros_like(start))
        kept["new_path"] = {name: torch.zeros_like(start) for name, start in self._start.items()}
        kept["new_walk"] = {name: torch.zeros_like(start) for name, start in self._start.items()}
        kept["before"] = {name: start.clone() for name, start in self._start.items()}

    def penalty(self) -> Tensors:
        """The loss term by its name; none in step 0, where nothing is old."""
        importance = self._kept["importance"]
        if not importance:
            return {}
        return {"penalty": self._weight * quadratic_penalty(self._parameters, self._start, importance)}

    @torch.no_grad()
    def after_backward(self) -> None:
        """One update's worth of statistics; none where half precision overflowed and no update will follow."""
        kept = self._kept
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return
        for name, gradient in gradients.items():
            now, before = self._parameters[name].detach(), kept["before"][name]
            if name in kept["importance"]:
                pull = penalty_gradient(now, self._start[name], kept["importance"][name])
                gradient = gradient - self._weight * pull
            kept["new_path"][name] += path_step(gradient, before, now)
            kept["new_walk"][name] += walk_step(gradient, before, now, kept["square"][name])
            kept["square"][name] = running_square(kept["square"][name], gradient)
            before.copy_(now)

    def end_step(self) -> None:
        """Path importances of the steps add up, walk scores are averaged with the earlier ones; g² runs on."""
        kept = self._kept
        for name, path in kept["new_path"].items():
            gained = path_importance(path, self._start[name], kept["before"][name])
            kept["path"][name] = kept["path"][name] + gained if name in kept["path"] else gained
            score = kept["new_walk"][name].clamp(min=0)
            kept["walk"][name] = (kept["walk"][name] + score) / 2 if name in kept["walk"] else score
        for group in ("importance", "new_path", "new_walk", "before"):
            kept[group] = {}

    def state(self) -> Tensors:
        """All but where the step began, which `begin_step` reads off the model in a resumed step too."""
        return {f"{group}.{name}": tensor for group, named in self._kept.items() for name, tensor in named.items()}

    def load_state(self, state: Tensors) -> None:
        for named in self._kept.values():
            named.clear()
        for key, tensor in state.items():
            group, _, name = key.partition(".")
            self._kept[group][name] = tensor.clone()


class ConsolidatedMethod(Method):
    """Cross-entropy and the penalty: all of EWC, PI and RW but their importance. `Config` has a `weight`."""

    first_step = FIRST_STEP
    config: Any

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._held = Consolidation(self.importance, self.config.weight)

    @staticmethod
    @abstractmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        """Of a parameter in the next step, from its running g², path importance and walk score."""

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        return super().losses(batch, out, None, step) | self._held.penalty()

    def begin_step(self, context: StepContext) -> None:
        self._held.begin_step(context.model)

    def after_backward(self, model: nn.Module) -> None:
        self._held.after_backward()

    def end_step(self, context: StepContext) -> None:
        self._held.end_step()

    def state(self) -> Tensors:
        return self._held.state()

    def load_state(self, state: Tensors) -> None:
        self._held.load_state(state)
