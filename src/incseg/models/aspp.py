"""DeepLabv3's head, atrous spatial pyramid pooling: as MiB and its successors wire it, and as torchvision does."""

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
    """Return DeepLabv3's (6, 12, 18) at stride 16, and the same reach in pixels at others (doubled at stride 8)."""
    small, medium, large = (max(1, rate * 16 // output_stride) for rate in (6, 12, 18))
    return small, medium, large


class ASPP(nn.Module):
    """1×1 and three dilated 3×3 convolutions side by side, and the image's mean added to their mix.

    [branches] → concat → norm, leaky ReLU → 1×1 ┐
    mean → 1×1 → norm, leaky ReLU → 1×1 ─────────┴ + → norm, leaky ReLU.  No convolution has a bias.
    """

    def __init__(self, inputs: int, width: int, dilations: tuple[int, int, int], norm: NormKind):
        super().__init__()
        _check(width, dilations)
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
        _require_two_images(x, self.pool_norm)
        out = torch.cat([branch(x) for branch in self.branches], dim=1)
        out = self.mix(activate(self.branch_norm(out)))
        pooled = self.pool_conv(x.mean(dim=(2, 3), keepdim=True))
        pooled = self.pool_mix(activate(self.pool_norm(pooled)))
        return activate(self.norm(out + pooled))


class TorchvisionHead(nn.Module):
    """torchvision's DeepLabv3 head up to its last convolution: every branch with a norm and ReLU of its own, the
    image's mean as a fifth branch, dropout, and a 3×3 convolution behind.

    mean → 1×1 ┐
    [branches] ┴ each norm, ReLU → concat → 1×1, norm, ReLU, dropout → 3×3, norm, ReLU.  No convolution has a bias.
    """

    DROPOUT = 0.5

    def __init__(self, inputs: int, width: int, dilations: tuple[int, int, int], norm: NormKind):
        super().__init__()
        _check(width, dilations)
        branches = [nn.Conv2d(inputs, width, 1, bias=False)]
        branches += (nn.Conv2d(inputs, width, 3, padding=rate, dilation=rate, bias=False) for rate in dilations)
        self.branches = nn.ModuleList(nn.Sequential(conv, make_norm(norm, width)) for conv in branches)
        self.pool = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), make_norm(norm, width))
        self.mix = nn.Conv2d(width * 5, width, 1, bias=False)
        self.mix_norm = make_norm(norm, width)
        self.last = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last_norm = make_norm(norm, width)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) → (B, width, h, w)."""
        _require_two_images(x, self.pool[1])
        pooled = F.relu(self.pool(x.mean(dim=(2, 3), keepdim=True))).expand(-1, -1, *x.shape[-2:])
        out = torch.cat([*(F.relu(branch(x)) for branch in self.branches), pooled], dim=1)
        out = F.dropout(F.relu(self.mix_norm(self.mix(out))), self.DROPOUT, self.training)
        return F.relu(self.last_norm(self.last(out)))


def _check(width: int, dilations: tuple[int, int, int]) -> None:
    if width < 1:
        raise UserError(f"the head's width is {width}; it must be at least 1")
    if len(dilations) != 3 or min(dilations) < 1:
        raise UserError(f"the head's dilations are {list(dilations)}; give three numbers of at least 1")


def _require_two_images(x: Tensor, pool_norm: nn.Module) -> None:
    if x.shape[0] == 1 and isinstance(pool_norm, nn.BatchNorm2d) and pool_norm.training:
        raise UserError(
            "batch norm cannot train on a batch of one image: the pooled branch has one value each; "
            "use a batch of two or more, or norm 'group'"
        )


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
