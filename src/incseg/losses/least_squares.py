"""Least squares in closed form: sums over the cells of feature maps, and the weights that solve them.

A cell is one position of a feature map. φ is its feature vector, t its targets (the share of each label among its
pixels), w its weight. Only two sums over the cells are stored,

    R = Σ w φφᵀ        Q = Σ w t φᵀ        and W = Q (R + γ·mean(diag R)·I)⁻¹ solves  min Σ w |Wφ − t|² + …

The sums do not depend on the order of the cells or on the number of steps. So with the same targets, learning step by
step gives the same solution as learning at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from incseg.types import BACKGROUND, IGNORE

_BLOCKS = 4
"""The Gram matrix is symmetric: of 4 × 4 blocks, the 10 on and above the diagonal are computed."""
FEWEST = 100.0
"""A label with fewer cells has the weight of a label with this number."""


@dataclass
class Sums:
    """The sums of all cells: `gram` R (D, D), `cross` Q (L, D), `counts` (L,) the cells of each label; float64."""

    gram: Tensor
    cross: Tensor
    counts: Tensor

    @staticmethod
    def zero(columns: int, labels: int, device: torch.device | str = "cpu") -> Sums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=with_doubles(device))

        return Sums(zeros(columns, columns), zeros(labels, columns), zeros(labels))

    def add(self, features: Tensor, targets: Tensor, weights: Tensor, cells: Tensor | None = None) -> None:
        """Count the cells with features (n, D), targets (n, L) and weights (n,).

        cells: (n,) number of cells that each row represents in `counts`; by default one.
        Products are taken in the precision of the features, sums in float64.
        """
        root = weights.clamp(min=0).sqrt().unsqueeze(1)
        weighted = features * root
        edges = [round(i * weighted.shape[1] / _BLOCKS) for i in range(_BLOCKS + 1)]
        parts = [weighted[:, a:b] for a, b in pairwise(edges)]
        for i, rows in enumerate(parts):
            for j in range(i, len(parts)):
                self.gram[edges[i] : edges[i + 1], edges[j] : edges[j + 1]] += (rows.T @ parts[j]).to(self.gram.device)
        self.cross += ((targets * root).T @ weighted).to(self.cross.device)
        label, number = targets.argmax(1), torch.ones_like(weights) if cells is None else cells
        self.counts += torch.bincount(label.to(self.counts.device), weights=double(number), minlength=len(self.counts))

    def __add__(self, other: Sums) -> Sums:
        """Return the sum of both. The one with fewer labels has no cell of the others."""
        labels = max(len(self.counts), len(other.counts))
        a, b = self.with_labels(labels), other.with_labels(labels)
        return Sums(a.gram + b.gram, a.cross + b.cross, a.counts + b.counts)

    def times(self, factor: float) -> Sums:
        """Return the sums with the weight of every cell multiplied by a factor. Counts do not change."""
        return Sums(self.gram * factor, self.cross * factor, self.counts)

    def with_labels(self, labels: int) -> Sums:
        """Return the same sums with `labels` labels in all."""
        more = labels - len(self.counts)
        if more < 0:
            raise ValueError(f"there are {len(self.counts)} labels, more than {labels}")
        cross = torch.cat([self.cross, self.cross.new_zeros(more, self.cross.shape[1])])
        return Sums(self.gram, cross, torch.cat([self.counts, self.counts.new_zeros(more)]))

    def without(self, label: int) -> Sums:
        """Return the sums without a label, whose cells become background.

        The solution of the other labels does not change, because each label is solved separately.
        """
        keep = [i for i in range(len(self.counts)) if i != label]
        cross, counts = self.cross.clone(), self.counts.clone()
        cross[BACKGROUND] += cross[label]
        counts[BACKGROUND] += counts[label]
        return Sums(self.gram, cross[keep], counts[keep])

    def symmetric_gram(self) -> Tensor:
        return self.gram.triu() + self.gram.triu(1).T

    def solve(self, ridge: float) -> Tensor:
        """Return (L, D) weights W. `ridge` is γ; for γ → 0 they are those of plain least squares."""
        gram = self.symmetric_gram()
        gram.diagonal().add_(ridge * float(gram.diagonal().mean()))
        return torch.cholesky_solve(self.cross.T, torch.linalg.cholesky(gram)).T


def with_doubles(device: torch.device | str) -> torch.device:
    """Return the device for float64 sums: the same, or the CPU for mps, which has no float64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on a device that supports it."""
    return tensor.to(with_doubles(tensor.device)).double()


def packed(gram: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric (D, D) matrix, row by row."""
    rows, columns = torch.triu_indices(len(gram), len(gram), device=gram.device)
    return gram[rows, columns]


def unpacked(values: Tensor, size: int) -> Tensor:
    """Return the (D, D) matrix with this upper triangle and zeros below it."""
    rows, columns = torch.triu_indices(size, size, device=values.device)
    gram = values.new_zeros(size, size)
    gram[rows, columns] = values
    return gram


def label_weights(counts: Tensor, power: float) -> Tensor:
    """Return the weight of a cell of each label: n^(−p), with n cells of the label; 1 if there are at most FEWEST.

    With power 0 all cells have the same weight, with power 1 all labels, however rare.
    """
    return (double(counts).clamp(min=FEWEST) / FEWEST).pow(-power)


def cell_targets(labels: Tensor, height: int, width: int, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return the (B, h·w, L) share of each label among the labelled pixels of a cell, and the (B, h·w) share of its
    pixels that are labelled, from (B, H, W) labels. Cells are row by row. A pixel belongs to the cell of its centre."""
    batch, rows, columns = labels.shape

    def cell_of(number: int, cells: int) -> Tensor:
        return (torch.arange(number, device=labels.device) * 2 + 1) * cells // (2 * number)

    cell = cell_of(rows, height)[:, None] * width + cell_of(columns, width)
    image = torch.arange(batch, device=labels.device)[:, None, None]
    label = torch.where(labels == IGNORE, num_labels, labels.long())
    index = (image * (height * width) + cell) * (num_labels + 1) + label
    counts = torch.bincount(index.flatten(), minlength=batch * height * width * (num_labels + 1))
    counts = counts.view(batch, height * width, num_labels + 1).float()
    labelled = counts[..., :num_labels].sum(-1)
    return counts[..., :num_labels] / labelled.clamp(min=1).unsqueeze(-1), labelled / counts.sum(-1).clamp(min=1)


def fill_background(targets: Tensor, found: Tensor) -> Tensor:
    """Return (n, L) targets in which the share of background is given to the label (n,) that a model predicts.

    The background of a later step may be an object of an old class, which only the previous model knows.
    """
    filled = targets.clone()
    filled[:, BACKGROUND] = 0
    return filled.scatter_add(1, found.unsqueeze(1), targets[:, BACKGROUND : BACKGROUND + 1])


def log_odds(scores: Tensor, floor: float = 0.002) -> Tensor:
    """Return (B, L − 1, …) log-odds against background, logit s_c − logit s_0, from (B, L, …) scores, background first.
    A score is about the probability of its label. By least squares it may be outside [0, 1], so it is clamped first."""
    logits = scores.clamp(floor, 1 - floor).logit()
    return logits[:, 1:] - logits[:, :1]
