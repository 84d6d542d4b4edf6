"""How the features of a class are spread, as mean and covariance, and features drawn from that.

Positions (N, D) and members (N, K) are those of `losses.prototypes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def moments(positions: Tensor, members: Tensor) -> Tensor:
    """(N, D), (N, K) → (K, D + 1, D + 1), in double precision: Σ of outer products of a class's positions, a one put
    behind each. It holds their number, their sum and their products, and adds up over batches."""
    extended = F.pad(positions.detach().double(), (0, 1), value=1.0)
    found = [extended[member] for member in members.bool().T]
    return torch.stack([of_class.T @ of_class for of_class in found])


@dataclass(frozen=True)
class Gaussians:
    """K normal distributions: counts (K,), means (K, D), factors (K, D, D), symmetric, with covariance F².

    A class without positions has count zero and is never drawn.
    """

    counts: Tensor
    means: Tensor
    factors: Tensor

    @staticmethod
    def of(moments: Tensor) -> Gaussians:
        """From `moments`. The factor is the symmetric root: a covariance of few positions or dead channels has no other
        that does not depend on the sign of eigenvectors."""
        counts = moments[:, -1, -1]
        number = counts.clamp(min=1)[:, None]
        means = moments[:, :-1, -1] / number
        covariances = moments[:, :-1, :-1] / number[:, None] - means[:, :, None] * means[:, None, :]
        values, vectors = torch.linalg.eigh(covariances)
        factors = (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mT
        return Gaussians(counts.float(), means.float(), factors.float())

    def joined(self, more: Gaussians) -> Gaussians:
        """These, then the others."""
        return Gaussians(
            torch.cat([self.counts, more.counts]),
            torch.cat([self.means, more.means]),
            torch.cat([self.factors, more.factors]),
        )

    def draw(self, number: int, generator: torch.Generator) -> Tensor:
        """(number, D), each class with the share of its count, in the order of classes. The generator is the CPU's, so
        that every device draws the same."""
        chosen = torch.multinomial(self.counts.cpu(), number, replacement=True, generator=generator)
        noise = torch.randn(number, self.means.shape[1], generator=generator).to(self.means)
        of_class = torch.bincount(chosen, minlength=len(self.counts)).tolist()
        parts = noise.split(of_class)
        return torch.cat([m + part @ f for m, f, part in zip(self.means, self.factors, parts, strict=True)])
