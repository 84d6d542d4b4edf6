"""Normalisation layers by name."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.types import UserError

NormKind = Literal["batch", "group", "frozen"]
NORMS: tuple[NormKind, ...] = get_args(NormKind)

MAX_GROUPS = 32
MIN_CHANNELS_PER_GROUP = 4


class FrozenBatchNorm2d(nn.Module):
    """Batch norm that always uses its running statistics, in training too; weight and bias still train.

    Deliberately not a subclass of nn.BatchNorm2d: `SyncBatchNorm.convert_sync_batchnorm` would turn that into
    a layer that updates its statistics again. State-dict names are those of nn.BatchNorm2d.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


def num_groups(channels: int) -> int:
    """Return the most groups, up to 32, that divide the channels and hold four or more each.

    One channel per group would normalise the 1×1 map of the image-pooling branch to zero.
    """
    most = max(1, min(MAX_GROUPS, channels // MIN_CHANNELS_PER_GROUP))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def make_norm(kind: str, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> nn.Module:
    """Return a norm layer for (B, channels, H, W); `momentum` matters to `batch` only."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, eps=eps, momentum=momentum)
    if kind == "group":
        return nn.GroupNorm(num_groups(channels), channels, eps=eps)
    if kind == "frozen":
        return FrozenBatchNorm2d(channels, eps=eps)
    raise UserError(f"unknown norm '{kind}'; choose one of {', '.join(NORMS)}")
