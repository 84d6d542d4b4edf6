"""Elastic weight consolidation, EWC (Kirkpatrick et al., 2017; for segmentation as MiB runs it, 2020).

A quadratic penalty holds the parameters that matter to the old classes: cross-entropy + λ·Σ I·(θ − θ_old)²
(`quadratic_penalty`). I is the diagonal Fisher information: a running mean of g² during training (`running_square`),
min-max normalised per tensor (`min_max`).

Background is an ordinary output, so old objects labelled background still change it. The penalty does not prevent
this. As in MiB, the running mean starts at 1, continues through the steps and uses the gradient of the batch, not of
each image. A tensor of equal values has no importance.
"""

from __future__ import annotations

from torch import Tensor

from incseg.losses.importance import min_max
from incseg.methods.consolidation import ConsolidatedMethod


class EWC(ConsolidatedMethod):
    @staticmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        return min_max(square)
