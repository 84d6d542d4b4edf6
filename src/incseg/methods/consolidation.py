"""The common part of EWC, PI and RW: statistics of gradients, and a penalty on changes of important parameters.

All three collect all statistics, so that they can share one trained step 0. Each computes its importance from them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from incseg.losses.importance import (
    WALK_UPDATES,
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
from incseg.settings import setting
from incseg.types import Batch, Output

FIRST_STEP = "cross_entropy+importance 2"
"""Step 0 by plain softmax cross-entropy, with statistics of its gradients. Until 2026-11 these were others."""

Tensors = dict[str, Tensor]


class Consolidation:
    """Importance of the trained parameters, by name. A frozen backbone has none.

    importance: (running g², path importance, walk score) of a parameter → its importance in the next step.
    weight:     weight of the penalty.

    The penalty pulls parameters to their values at the start of the step; those of the new classifier are free.
    Statistics are of the loss without the penalty: its gradient is known in closed form and is subtracted. As in MiB,
    the path integral takes the gradient at the end of each update, so no earlier gradient is needed and the last update
    of a step adds nothing to it. The squared change that it is divided by is that of the whole step. The walk is scored
    at every tenth update, over the ten.

    Gradients are averaged over processes before `after_backward`, so all processes have the same statistics.
    """

    def __init__(self, importance: Callable[[Tensor, Tensor, Tensor], Tensor], weight: float) -> None:
        self._measure = importance
        self._weight = weight
        self._parameters: dict[str, nn.Parameter] = {}
        self._start: Tensors = {}
        self._statistics: dict[str, Tensors] = {
            group: {}
            for group in ("square", "path", "walk", "importance", "new_path", "new_walk", "before", "walk_before")
        }
        self._updates = 0

    def begin_step(self, model: nn.Module) -> None:
        """Compute the importance from the statistics so far. The penalty pulls to the current parameters."""
        found = self._statistics
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._start = {name: p.detach().clone() for name, p in self._parameters.items()}
        found["importance"] = {
            name: self._measure(found["square"][name], found["path"][name], found["walk"][name])
            for name in self._parameters
            if name in found["path"]
        }
        for name, start in self._start.items():
            found["square"].setdefault(name, torch.ones_like(start))
        found["new_path"] = {name: torch.zeros_like(start) for name, start in self._start.items()}
        found["new_walk"] = {name: torch.zeros_like(start) for name, start in self._start.items()}
        for group in ("before", "walk_before"):
            found[group] = {name: start.clone() for name, start in self._start.items()}
        self._updates = 0

    def penalty(self) -> Tensors:
        """Return the named loss term; none in step 0."""
        importance = self._statistics["importance"]
        if not importance:
            return {}
        return {"penalty": self._weight * quadratic_penalty(self._parameters, self._start, importance)}

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add the statistics of one update, unless half precision overflowed: that update is skipped."""
        found = self._statistics
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return
        scores_walk = self._updates % WALK_UPDATES == 0
        self._updates += 1
        for name, gradient in gradients.items():
            now, before = self._parameters[name].detach(), found["before"][name]
            if name in found["importance"]:
                pull = penalty_gradient(now, self._start[name], found["importance"][name])
                gradient = gradient - self._weight * pull
            found["new_path"][name] += path_step(gradient, before, now)
            if scores_walk:
                since = found["walk_before"][name]
                found["new_walk"][name] += walk_step(gradient, since, now, found["square"][name])
                since.copy_(now)
            found["square"][name] = running_square(found["square"][name], gradient)
            before.copy_(now)

    def end_step(self) -> None:
        """Add the path importance to that of earlier steps, and average the walk score with theirs."""
        found = self._statistics
        for name, path in found["new_path"].items():
            gained = path_importance(path, self._start[name], self._parameters[name].detach())
            found["path"][name] = found["path"][name] + gained if name in found["path"] else gained
            score = found["new_walk"][name].clamp(min=0)
            found["walk"][name] = (found["walk"][name] + score) / 2 if name in found["walk"] else score
        for group in ("importance", "new_path", "new_walk", "before", "walk_before"):
            found[group] = {}
        self._updates = 0

    def state(self) -> Tensors:
        """Return all statistics. The parameters at the start of the step come from `begin_step`, also on resume."""
        groups = self._statistics.items()
        tensors = {f"{group}.{name}": tensor for group, named in groups for name, tensor in named.items()}
        return tensors | ({"updates": torch.tensor(self._updates)} if self._updates else {})

    def load_state(self, state: Tensors) -> None:
        for named in self._statistics.values():
            named.clear()
        self._updates = int(state.get("updates", 0))
        for key, tensor in state.items():
            group, _, name = key.partition(".")
            if name:
                self._statistics[group][name] = tensor.clone()


class ConsolidatedMethod(Method):
    """Cross-entropy and the penalty; subclasses define the importance."""

    first_step = FIRST_STEP

    @dataclass
    class Config:
        """Options of EWC and PI.

        Args:
            weight: weight of the penalty; 0 is fine-tuning. SGD with momentum 0.9 needs 2·weight·lr below 1.36.
        """

        weight: float = setting(500.0, affects="later")  # MiB

    config: Any

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._consolidation = Consolidation(self.importance, self.config.weight)

    @staticmethod
    @abstractmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        """Return the importance of a parameter, from its running g², path importance and walk score."""

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        return super().losses(batch, out, None, step) | self._consolidation.penalty()

    def recipe(self, step: int) -> dict[str, Any]:
        # until 2026-11 ranges were not damped, and the statistics were others
        return super().recipe(step) | ({"revision": 2} if step else {})

    def begin_step(self, context: StepContext) -> None:
        self._consolidation.begin_step(context.model)

    def after_backward(self, model: nn.Module) -> None:
        self._consolidation.after_backward()

    def end_step(self, context: StepContext) -> None:
        self._consolidation.end_step()

    def state(self) -> Tensors:
        return self._consolidation.state()

    def load_state(self, state: Tensors) -> None:
        self._consolidation.load_state(state)
