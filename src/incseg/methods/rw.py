"""Riemannian walk, RW (Chaudhry et al., 2018; for segmentation as MiB runs it, 2020).

EWC and PI combined: cross-entropy + λ·Σ I·(θ − θ_old)² (`quadratic_penalty`). I is the Fisher information
(`running_square`) plus a score: the decrease of the loss per distance on the Riemannian manifold (`walk_step`) from
every tenth update to the next, summed over a step and averaged with the score of earlier steps. Both are min-max
normalised per tensor (`min_max`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from incseg.losses.importance import min_max
from incseg.methods.consolidation import ConsolidatedMethod
from incseg.settings import setting


class RW(ConsolidatedMethod):
    @dataclass
    class Config:
        """Options of RW.

        Args:
            weight: weight of the penalty; 0 is fine-tuning. SGD with momentum 0.9 needs 4·weight·lr below 1.36.
        """

        weight: float = setting(100.0, affects="later")  # MiB

    @staticmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        return min_max(square) + min_max(walk)
