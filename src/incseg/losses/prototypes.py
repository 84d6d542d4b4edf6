"""Class prototypes in feature space: running means, and the losses of SDR on features.

Features (B, D, h, w) and labels (`position_labels`) are at the resolution of the network; labels are 0 background, 1…
classes, 255 void. There are N = B·h·w positions and K labels with background. `counts` are positions per label, the
mean over the parts of a batch like `Batch.counts`: sums divided by them average to the value of the whole batch, also
for gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.types import BACKGROUND, IGNORE

_SMALLEST_COUNT = 1e-6  # below any share of one position among processes
_SMALLEST_DISTANCE = 1e-3  # bounds the gradient of means that coincide


def nearest(labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (B, H, W) labels by nearest neighbour."""
    return F.interpolate(labels.unsqueeze(1).float(), size, mode="nearest").squeeze(1).long()


def position_labels(labels: Tensor, teacher_logits: Tensor | None, size: tuple[int, int]) -> Tensor:
    """Return (B, h, w): the label of each position; on background, which may show old classes, that of the teacher."""
    own = nearest(labels, size)
    if teacher_logits is None:
        return own
    return torch.where(own == BACKGROUND, nearest(teacher_logits.max(1).indices, size), own)


def membership(labels: Tensor, num_labels: int) -> Tensor:
    """(B, h, w) labels → (N, K) ones and zeros; a void position is in no class."""
    flat = labels.flatten()
    known = torch.where(flat == IGNORE, num_labels, flat)
    return F.one_hot(known, num_labels + 1)[:, :num_labels].float()


def flatten_positions(features: Tensor) -> Tensor:
    """(B, D, h, w) → (N, D), in float32 at least."""
    return features.movedim(1, -1).flatten(0, -2).to(torch.promote_types(features.dtype, torch.float32))


def class_sums(positions: Tensor, members: Tensor) -> Tensor:
    """(N, D), (N, K) → (K, D + 1): the sum of positions of each class, and their number. Without gradient."""
    members, positions = members.to(positions.dtype), positions.detach()
    return torch.cat([members.T @ positions, members.sum(0).unsqueeze(1)], dim=1)


def means_of(sums: Tensor) -> tuple[Tensor, Tensor]:
    """`class_sums` → the classes' means (K, D) and counts (K). Absent classes have mean zero."""
    counts = sums[:, -1]
    return sums[:, :-1] / counts.clamp(min=_SMALLEST_COUNT).unsqueeze(1), counts


def class_means(positions: Tensor, members: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(N, D), (N, K) → `means_of` the whole batch, with gradient.

    `sums` is the mean of `class_sums` over all parts of the batch; None if there is only one part. The means are the
    same in each part. The gradient is that of the part's positions, scaled so that the average over parts is the
    gradient of the means.
    """
    own = members.to(positions.dtype).T @ positions
    own_part = F.pad(own - own.detach(), (0, 1))  # zero, with the gradient
    return means_of((class_sums(positions, members) if sums is None else sums) + own_part)


def running_mean(average: Tensor, seen: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of all positions so far: (average over `seen`, means over `counts`) → (new average, new seen)."""
    total = seen + counts
    share = (counts / total.clamp(min=_SMALLEST_COUNT)).unsqueeze(1)
    return average + share * (means - average), total


def matching(means: Tensor, prototypes: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen classes (K booleans) of MSE(mean, prototype); zero if they agree or none is chosen."""
    return (chosen * (means - prototypes).square().mean(1)).sum() / chosen.sum().clamp(min=1)


def attraction(positions: Tensor, members: Tensor, prototypes: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen classes of MSE(features of the class, its prototype)."""
    members = members.to(positions.dtype) * chosen
    own_prototype = members @ prototypes
    errors = (positions - own_prototype).square().mean(1)
    return (errors @ members / counts.clamp(min=_SMALLEST_COUNT)).sum() / chosen.sum().clamp(min=1)


def repulsion(means: Tensor, chosen: Tensor) -> Tensor:
    """Mean of 1/‖μ_i − μ_j‖ over pairs of chosen classes; zero if there is no pair."""
    present = means[chosen]
    first, second = torch.triu_indices(len(present), len(present), offset=1, device=means.device)
    distances = (present[first] - present[second]).square().sum(1).clamp(min=_SMALLEST_DISTANCE**2).sqrt()
    return (1 / distances).sum() / max(1, len(distances))


def sparsity_sum(features: Tensor, labels: Tensor) -> Tensor:
    """Σ over labelled positions of Σ_k exp(f_k) / Σ_k f_k, f = max(F, 0) / the maximum in its class and image.

    It is e if all D channels are at the maximum, and e + D − 1 if one is and the others are zero: as in the paper, the
    loss falls with every f_k. If the f of a position sum to less than 1, they count as if they summed to 1, because the
    form in the paper is unbounded there.
    """
    rectified = features.to(torch.promote_types(features.dtype, torch.float32)).clamp(min=0)
    group = (labels + 256 * torch.arange(len(labels), device=labels.device).view(-1, 1, 1)).flatten()
    height = rectified.amax(1).flatten()
    peaks = height.new_zeros(256 * len(labels)).scatter_reduce(0, group, height, "amax")
    peaks = torch.where(peaks > 0, peaks, torch.ones_like(peaks))
    normalised = rectified / peaks[group].view(labels.shape).unsqueeze(1)
    ratio = normalised.exp().sum(1) / normalised.sum(1).clamp(min=1)
    return torch.where(labels == IGNORE, torch.zeros_like(ratio), ratio).sum()
