"""Path integral, PI: synaptic intelligence (Zenke et al., 2017; for segmentation as MiB runs it, 2020).

Like EWC a spring at every parameter, cross-entropy + λ·Σ I·(θ − θ_old)² (`quadratic_penalty`), but I is what the
parameter did for the loss on the way, Σ g·Δθ (`path_step`), per squared way of the whole step (`path_importance`);
the importances of the steps add up and are min-max normalised per tensor (`min_max`).

As in MiB the gradient is taken at the end of each update, where Zenke et al. take the one that made it: that one is
never against the update, so noise alone makes importance. Ours keeps their damping ξ = 10⁻³; MiB's 10⁻²⁰ lets the
parameters that did not move outweigh all others in the normalisation.
"""

from __future__ import annotations

from torch import Tensor

from incseg.losses.importance import min_max
from incseg.methods.consolidation import ConsolidatedMethod


class PI(ConsolidatedMethod):
    @staticmethod
    def importance(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        return min_max(path)
