"""Importance of parameters for what was learnt, and the penalty on their change: EWC, PI and RW.

All functions work on one parameter tensor at a time, any shape, except `quadratic_penalty`, which sums over
named ones. θ are parameters, g the gradient of the loss without the penalty.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SQUARE_RATE = 0.9
"""Share of the newest g² in its running mean (MiB's code, the source of the published figures of EWC and RW)."""
WALK_UPDATES = 10
"""Updates between two scores of Riemannian walk (MiB's code)."""
RANGE_DAMPING = 1e-8
"""Added to the range of a tensor that is scaled to [0, 1] (MiB's code)."""
PATH_DAMPING = 1e-3
"""ξ of the path integral (Zenke et al. 2017, section 5.1): prevents division by zero if a parameter hardly moved."""
WALK_DAMPING = 1e-8
"""ε of Riemannian walk (MiB's code)."""


def quadratic_penalty(
    parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor], importance: Mapping[str, Tensor]
) -> Tensor:
    """Σ I·(θ − θ_old)² over the parameters that `importance` names; zero if nothing has moved.

    The sum is in the order of `parameters`: importance that was saved and loaded may have another order.
    """
    return torch.stack(
        [
            (importance[name] * (parameter - anchors[name]).square()).sum()
            for name, parameter in parameters.items()
            if name in importance
        ]
    ).sum()


def penalty_gradient(parameter: Tensor, anchor: Tensor, importance: Tensor) -> Tensor:
    """2·I·(θ − θ_old): the gradient of `quadratic_penalty`."""
    return 2 * importance * (parameter - anchor)


def running_square(average: Tensor, gradient: Tensor, rate: float = SQUARE_RATE) -> Tensor:
    """rate·g² + (1 − rate)·average: the diagonal of the Fisher information, estimated from the last batches."""
    return torch.lerp(average, gradient.square(), rate)


def path_step(gradient: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """g(now)·(before − now): the decrease of the loss due to this parameter, from one point of the path to the next.

    The sum over updates is the path integral with the gradient at the end of each piece. For a quadratic loss its
    error is half of the curvature times the squared step.
    """
    return gradient * (before - now)


def walk_step(gradient: Tensor, before: Tensor, now: Tensor, square: Tensor) -> Tensor:
    """`path_step` per distance on the Riemannian manifold, ½·F·(now − before)²; zero if nothing moves."""
    return path_step(gradient, before, now) / (0.5 * square * (now - before).square() + WALK_DAMPING)


def path_importance(path: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """max(path, 0) / ((end − start)² + ξ): the decrease of the loss per squared change over the whole step."""
    return path.clamp(min=0) / ((end - start).square() + PATH_DAMPING)


def min_max(x: Tensor) -> Tensor:
    """Scale a tensor to [0, 1]; a constant tensor becomes zero, and a range far below 1e-8 nearly so."""
    low, high = x.min(), x.max()
    return (x - low) / (high - low + RANGE_DAMPING)
