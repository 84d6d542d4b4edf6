"""Distillation: what a student is asked to keep of its teacher, in its outputs and in its feature maps.

Losses on outputs are per pixel, with classes in dimension 1 and any shape behind it; a student may have more outputs
than its teacher, the old ones first. Losses on maps are (B, C, H, W) at the network's own resolution.
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

    features, teacher_features: as many maps (B, C, H, W), equal in shape pair by pair. Each map is squared and split
    into s×s tiles for every scale s; the means of the rows and of the columns of all tiles make one vector per sample,
    and the distance is the L2 norm of the difference of the two vectors.

    A side that s does not divide is split into s parts that differ by one at most (14 in four: 4, 4, 3, 3), so that
    every position counts; one shorter than s has as many parts as positions. Zero for equal maps, with zero gradient;
    k·x against x is |k² − 1| times the norm of x's own vector.
    """
    if len(features) != len(teacher_features) or not features:
        raise ValueError(
            f"{len(features)} maps cannot be compared with {len(teacher_features)}; give as many, at least 1"
        )
    distances = [_pod_distance(x, t, scales) for x, t in zip(features, teacher_features, strict=True)]
    return torch.stack([distance.mean() for distance in distances]).mean()


def trained_maps(out: Output, teacher: Output) -> tuple[list[Tensor], list[Tensor]]:
    """The maps that training can part from the teacher's, and the teacher's: stages of a backbone that is not frozen
    (with kept features there are none), and what the classifiers read."""
    pairs = [(own, old) for own, old in zip(out.stages, teacher.stages, strict=True) if own.requires_grad]
    pairs.append((out.embedding, teacher.embedding))
    return [own for own, _ in pairs], [old for _, old in pairs]


def _pod_distance(x: Tensor, teacher: Tensor, scales: Sequence[int]) -> Tensor:
    """(B, C, H, W) each → (B,). Means are linear, so those of the difference of squares are all that is needed."""
    if x.shape != teacher.shape:
        raise ValueError(f"a map of shape {tuple(x.shape)} cannot be compared with one of {tuple(teacher.shape)}")
    difference = _single(x).square() - _single(teacher).square()
    height, width = x.shape[-2:]
    row_means = difference @ _tile_means(width, scales, difference)  # each row, over the columns of each tile
    column_means = difference.transpose(-1, -2) @ _tile_means(height, scales, difference)
    # vector_norm has gradient 0 at 0, where a root of a sum of squares has none
    return torch.linalg.vector_norm(torch.cat([row_means.flatten(1), column_means.flatten(1)], dim=1), dim=1)


def _tile_means(size: int, scales: Sequence[int], like: Tensor) -> Tensor:
    """(size, Σ parts) weights: column by column, the mean over one part of an axis split at each scale."""
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
    """At least float32: squares of half-precision features overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
