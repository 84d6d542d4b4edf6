"""The DeepLabv3 head of the field: atrous spatial pyramid pooling, as MiB and its successors wire it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.models.norms import NormKind, make_norm
from incseg.types import UserError

LEAKY_SLOPE = 0.01
"""MiB's in-place ABN is a norm followed by leaky ReLU of this slope, so every norm here is too."""


def default_dilations(output_stride: int) -> tuple[int, int, int]:
    """DeepLabv3's (6, 12, 18) at stride 16; the same reach in pixels at others, so doubled at stride 8."""
    small, medium, large = (max(1, rate * 16 // output_stride) for rate in (6, 12, 18))
    return small, medium, large


class ASPP(nn.Module):
    """1×1 and three dilated 3×3 convolutions side by side, and the image's mean added to their mix.

    [branches] → concat → norm, leaky ReLU → 1×1 ┐
    mean → 1×1 → norm, leaky ReLU → 1×1 ─────────┴ + → norm, leaky ReLU.  No convolution has a bias.
    """

    def __init__(self, inputs: int, width: int, dilations: tuple[int, int, int], norm: NormKind):
        super().__init__()
        if width < 1:
            raise UserError(f"the head's width is {width}; it must be at least 1")
        if len(dilations) != 3 or min(dilations) < 1:
            raise UserError(f"the head's dilations are {list(dilations)}; give three numbers of at least 1")
        self.branches = nn.ModuleList([nn.Conv2d(inputs, width, 1, bias=False)])
        self.branches.extend(nn.Conv2d(inputs, width, 3, padding=rate, dilation=rate, bias=False) for rate in dilations)
        self.branch_norm = make_norm(norm, width * len(self.branches))
        self.mix = nn.Conv2d(width * len(self.branches), width, 1, bias=False)
        self.pool_conv = nn.Conv2d(inputs, width, 1, bias=False)
        self.pool_norm = make_norm(norm, width)
        self.pool_mix = nn.Conv2d(width, width, 1, bias=False)
        self.norm = make_norm(norm, width)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, a=LEAKY_SLOPE, nonlinearity="leaky_relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) → (B, width, h, w)."""
        if x.shape[0] == 1 and isinstance(self.pool_norm, nn.BatchNorm2d) and self.pool_norm.training:
            raise UserError(
                "batch norm cannot train on a batch of one image: the pooled branch has one value each; "
                "use a batch of two or more, or norm 'group'"
            )
        out = torch.cat([branch(x) for branch in self.branches], dim=1)
        out = self.mix(activate(self.branch_norm(out)))
        pooled = self.pool_conv(x.mean(dim=(2, 3), keepdim=True))
        pooled = self.pool_mix(activate(self.pool_norm(pooled)))
        return activate(self.norm(out + pooled))


class Neck(nn.Module):
    """Several stages as one map: each through a 1×1 convolution, brought to the first one's size, and added.

    Adding after the convolutions is one 1×1 convolution over the concatenated stages, without making them.
    """

    def __init__(self, inputs: list[int], width: int, norm: NormKind):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, width, 1, bias=False) for channels in inputs)
        self.norm = make_norm(norm, width)
        for conv in self.convs:
            # each adds its share to a sum that has the variance of one convolution over all
            nn.init.normal_(conv.get_parameter("weight"), std=math.sqrt(2 / sum(inputs)))

    def forward(self, stages: tuple[Tensor, ...]) -> Tensor:
        """(B, channels_i, h_i, w_i) each → (B, width, h_0, w_0)."""
        size = stages[0].shape[-2:]
        total = self.convs[0](stages[0])
        for conv, stage in zip(self.convs[1:], stages[1:], strict=True):
            reduced = conv(stage)
            total = total + (reduced if reduced.shape[-2:] == size else _resize(reduced, size))
        return activate(self.norm(total))


def _resize(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, (size[0], size[1]), mode="bilinear", align_corners=False)


def activate(x: Tensor) -> Tensor:
    return F.leaky_relu(x, LEAKY_SLOPE)
