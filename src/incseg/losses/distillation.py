"""Distillation: what a student is asked to keep of its teacher's feature maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def local_pod(
    features: Sequence[Tensor], teacher_features: Sequence[Tensor], scales: Sequence[int] = (1, 2, 4)
) -> Tensor:
    """Distance of the maps' local statistics (PLOP): mean over the samples of the batch and over the maps.

    features, teacher_features: as many maps (B, C, H, W), equal in shape pair by pair. Each map is squared and split
    into s×s tiles for every scale s; the means of the rows and of the columns of all tiles make one vector per sample,
    and the distance is the L2 norm of the difference of the two vectors. Zero for equal maps, with zero gradient.
    """
    distances = []
    for own, other in zip(features, teacher_features, strict=True):
        difference = own.float().square() - other.float().square()
        parts = []
        for scale in scales:
            height, width = difference.shape[-2:]
            for rows in difference.tensor_split(min(scale, height), dim=-2):
                for tile in rows.tensor_split(min(scale, width), dim=-1):
                    parts += [tile.mean(-1).flatten(1), tile.mean(-2).flatten(1)]
        distances.append(torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1).mean())
    return torch.stack(distances).mean()
