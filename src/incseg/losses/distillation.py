"""Distillation of a teacher's outputs and feature maps.

Losses on outputs are per pixel, with classes in dimension 1 and any shape after it. A student may have more outputs
than its teacher, the old ones first. Losses on maps take (B, C, H, W) at the resolution of the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.sigmoid import binary_distillation
from incseg.types import Output


def output_distillation_sum(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return −(1/|O|) Σ_{c∈O} softmax(z')_c · log softmax(z[O])_c, O the teacher's outputs: the sum over all pixels
    (LwF).

    logits (B, C, …), teacher_logits (B, |O|, …) with C ≥ |O|. Minimal where the old outputs equal the teacher's up to a
    constant; there it is the teacher's entropy over |O|. New outputs have no influence.
    """
    log_probabilities = _old_outputs(logits, teacher_logits).log_softmax(1)
    return -(teacher_logits.softmax(1) * log_probabilities).sum() / teacher_logits.shape[1]


def sigmoid_distillation_sum(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return Σ_{c∈O} BCE(z_c, σ(z'_c)) over the old outputs: the sum over all pixels (LwF-MC).

    Shapes as in `output_distillation_sum`. Minimal at z[O] = z', where it is the teacher's binary entropy; |O|·log 2
    per pixel at z = z' = 0.
    """
    return binary_distillation(_old_outputs(logits, teacher_logits), teacher_logits).sum()


def feature_distillation(features: Tensor, teacher_features: Tensor) -> Tensor:
    """Mean square of the difference of two maps (ILT); zero where they are equal."""
    return F.mse_loss(_single(features), _single(teacher_features))


def local_pod(
    features: Sequence[Tensor], teacher_features: Sequence[Tensor], scales: Sequence[int] = (1, 2, 4)
) -> Tensor:
    """Distance of the maps' local statistics (PLOP): mean over the samples of the batch and over the maps.

    features, teacher_features: equal numbers of maps (B, C, H, W) with the same shapes. Each map is squared and split
    into s×s tiles for every scale s. The means of the rows and columns of all tiles make one vector per sample; the
    distance is the L2 norm of the difference of the two vectors.

    A side that s does not divide is split into s parts that differ by at most one (14 in four: 4, 4, 3, 3), so that
    every position counts; a side shorter than s has as many parts as positions. Zero for equal maps, with zero
    gradient; k·x against x is |k² − 1| times the norm of the vector of x.
    """
    if len(features) != len(teacher_features) or not features:
        raise ValueError(
            f"{len(features)} maps cannot be compared with {len(teacher_features)}; give equal numbers, at least 1"
        )
    distances = [_pod_distance(x, t, scales) for x, t in zip(features, teacher_features, strict=True)]
    return torch.stack([distance.mean() for distance in distances]).mean()


def trained_maps(out: Output, teacher: Output) -> tuple[list[Tensor], list[Tensor]]:
    """Return the maps that training can change, and those of the teacher: the stages of a backbone that is not frozen
    (with cached features there are none), before their last activation, and the embedding."""
    pairs = [(own, old) for own, old in zip(out.stages, teacher.stages, strict=True) if own.requires_grad]
    pairs.append((out.embedding, teacher.embedding))
    return [own for own, _ in pairs], [old for _, old in pairs]


def _pod_distance(x: Tensor, teacher: Tensor, scales: Sequence[int]) -> Tensor:
    """(B, C, H, W) each → (B,). Means are linear, so the means of the difference of squares suffice."""
    if x.shape != teacher.shape:
        raise ValueError(f"a map of shape {tuple(x.shape)} cannot be compared with one of {tuple(teacher.shape)}")
    difference = _single(x).square() - _single(teacher).square()
    height, width = x.shape[-2:]
    row_means = difference @ _tile_means(width, scales, difference)  # each row, over the columns of each tile
    column_means = difference.transpose(-1, -2) @ _tile_means(height, scales, difference)
    # vector_norm has gradient 0 at 0, where a root of a sum of squares has none
    return torch.linalg.vector_norm(torch.cat([row_means.flatten(1), column_means.flatten(1)], dim=1), dim=1)


def _tile_means(size: int, scales: Sequence[int], like: Tensor) -> Tensor:
    """Return (size, Σ parts) weights. Each column averages over one part of an axis that is split at each scale."""
    columns = []
    for scale in scales:
        for part in torch.arange(size).tensor_split(min(scale, size)):
            column = torch.zeros(size, dtype=like.dtype)
            column[part] = 1 / len(part)
            columns.append(column)
    return torch.stack(columns, dim=1).to(like.device)


def _old_outputs(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    num_old = teacher_logits.shape[1]
    if logits.shape[1] < num_old:
        raise ValueError(f"a student of {logits.shape[1]} outputs has lost some of its teacher's {num_old}")
    return logits[:, :num_old]


def _single(x: Tensor) -> Tensor:
    """Return at least float32: squares of half-precision features overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
