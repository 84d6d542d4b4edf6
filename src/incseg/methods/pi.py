"""Path integral, PI: synaptic intelligence (Zenke et al., 2017; for segmentation as MiB runs it, 2020).

The penalty is that of EWC, cross-entropy + λ·Σ I·(θ − θ_old)² (`quadratic_penalty`). I is the change of the loss due
to the parameter, Σ g·Δθ (`path_step`), divided by its squared change over the whole step (`path_importance`). The
importances of the steps are added and min-max normalised per tensor (`min_max`).

As in MiB, the gradient is taken at the end of each update, and the change ends after the last update. Zenke et al. take
the gradient that caused the update; it never opposes the update, so noise alone adds importance. The damping is theirs,
ξ = 10⁻³. With MiB's 10⁻²⁰, parameters that did not move outweigh all others in the normalisation.
"""

from __future__ import annotations

from torch import Tensor

from incseg.losses.importance import min_max
from incseg.methods.consolidation import ConsolidatedMethod


class PI(ConsolidatedMethod):
    @staticmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        return min_max(path)
