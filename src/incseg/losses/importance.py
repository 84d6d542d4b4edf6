"""How much each parameter matters to what was learnt, and the penalty for moving it: EWC, PI and RW.

All functions work on one parameter tensor at a time, any shape, except `quadratic_penalty`, which sums over
named ones. θ are parameters, g the gradient of the loss without the penalty.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SQUARE_RATE = 0.9
"""Share of the newest g² in its running mean (MiB's code, which the published figures of EWC and RW come from)."""
PATH_DAMPING = 1e-3
"""ξ of the path integral (Zenke et al. 2017, section 5.1): parameters that hardly moved are not divided by zero."""
WALK_DAMPING = 1e-8
"""ε of Riemannian walk (MiB's code)."""


def quadratic_penalty(
    parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor], importance: Mapping[str, Tensor]
) -> Tensor:
    """Σ I·(θ − θ_old)² over the parameters that `importance` names; zero where nothing has moved.

    Summed in the order of `parameters`: importance that was saved and loaded may stand in another.
    """
    return torch.stack(
        [
            (importance[name] * (parameter - anchors[name]).square()).sum()
            for name, parameter in parameters.items()
            if name in importance
        ]
    ).sum()


def penalty_gradient(parameter: Tensor, anchor: Tensor, importance: Tensor) -> Tensor:
    """2·I·(θ − θ_old): what `quadratic_penalty` adds to a gradient."""
    return 2 * importance * (parameter - anchor)


def running_square(average: Tensor, gradient: Tensor, rate: float = SQUARE_RATE) -> Tensor:
    """rate·g² + (1 − rate)·average: the diagonal of the Fisher information, as the last batches show it."""
    return torch.lerp(average, gradient.square(), rate)


def path_step(gradient: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """g(now)·(before − now): how much of the loss's fall in the last update this parameter accounts for.

    The sum over updates is the path integral with the gradient at the end of each piece. On a straight line
    through a quadratic loss it errs by half of the curvature times the squared step, so less with every halving.
    """
    return gradient * (before - now)


def walk_step(gradient: Tensor, before: Tensor, now: Tensor, square: Tensor) -> Tensor:
    """`path_step` per distance on the Riemannian manifold, ½·F·(now − before)²; zero where nothing moves."""
    return path_step(gradient, before, now) / (0.5 * square * (now - before).square() + WALK_DAMPING)


def path_importance(path: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """max(path, 0) / ((end − start)² + ξ): the fall of the loss per squared way, from where a step began."""
    return path.clamp(min=0) / ((end - start).square() + PATH_DAMPING)


def min_max(x: Tensor) -> Tensor:
    """To [0, 1] within the tensor; a constant tensor, and so one of a single value, becomes zero."""
    low, high = x.min(), x.max()
    return torch.where(high > low, (x - low) / (high - low), torch.zeros_like(x))
