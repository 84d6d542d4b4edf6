"""Scores that follow the edges of the image: a bilateral filter on a grid finer than the network's, without training.

The network's scores have a grid of 16 pixels, so enlarged masks have edges that are 16 pixels wide. Here the scores are
interpolated to a grid of GUIDE_STRIDE pixels. Then every position is replaced several times by the mean of its
neighbours, weighted by their distance in space and in colour. So an edge between two classes moves to the nearest edge
between two colours.

The weights depend only on the image and sum to one. So every class is filtered separately, a new class changes no score
of an old one, and probabilities and uncertainty are consistent with the labels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GUIDE_STRIDE = 4
"""Pixels of the image per position of the grid."""
_REACH = 3
"""Number of neighbours on each side in the mean, along rows and then along columns."""
_NEAR = 1.8
"""Standard deviation of the weight by distance, in positions."""
_ALIKE = 0.04
"""Standard deviation of the weight by colour; colours range from 0 to 1."""


def guide_of(images: Tensor) -> Tensor:
    """Return the mean colour of each position of the grid, of (B, 3, H, W) images."""
    return F.avg_pool2d(images, GUIDE_STRIDE, ceil_mode=True, count_include_pad=False)


def sharpened(scores: Tensor, guide: Tensor, rounds: int) -> Tensor:
    """Return (B, C, h, w) scores on the grid of a (B, 3, H, W) guide with colours from 0 to 1.

    Scores are smoothed within regions of one colour, but not across strong edges. With 0 rounds they are interpolated.
    """
    size = (guide.shape[-2], guide.shape[-1])
    fine = F.interpolate(scores, size, mode="bilinear", align_corners=False)
    if rounds == 0:
        return fine
    weights = {axis: _weights(guide, axis) for axis in (-1, -2)}
    for _ in range(rounds):
        for axis, of_axis in weights.items():
            total = torch.zeros_like(fine)
            for weight, neighbour in zip(of_axis, _neighbours(fine, axis), strict=True):
                total = total + weight * neighbour
            fine = total
    return fine


def _weights(guide: Tensor, axis: int) -> list[Tensor]:
    """Return the (B, 1, H, W) weight of each neighbour along an axis; they sum to one."""
    found = []
    for offset, neighbour in zip(range(-_REACH, _REACH + 1), _neighbours(guide, axis), strict=True):
        difference = (neighbour - guide).square().sum(1, keepdim=True)
        found.append((-difference / (2 * _ALIKE**2) - offset**2 / (2 * _NEAR**2)).exp())
    total = torch.stack(found).sum(0)
    return [weight / total for weight in found]


def _neighbours(maps: Tensor, axis: int) -> list[Tensor]:
    """Return the maps moved by −_REACH to _REACH positions along an axis. Values at the edge are repeated."""
    padding = (_REACH, _REACH, 0, 0) if axis == -1 else (0, 0, _REACH, _REACH)
    padded = F.pad(maps, padding, mode="replicate")
    length = maps.shape[axis]
    return [padded.narrow(axis, start, length) for start in range(2 * _REACH + 1)]
