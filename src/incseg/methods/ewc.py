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

from torch import Tensor

from incseg.losses.importance import min_max
from incseg.methods.consolidation import ConsolidatedMethod


class EWC(ConsolidatedMethod):
    @staticmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        return min_max(square)
