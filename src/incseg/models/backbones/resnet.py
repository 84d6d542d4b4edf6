"""ResNet-18/50/101 under torchvision's parameter names, with a choice of output stride."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from incseg.models.backbones.base import Backbone, StrideBudget, initialise
from incseg.models.norms import NormKind, make_norm

STAGE_WIDTHS = (64, 128, 256, 512)


def conv3x3(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False)


def shortcut(inputs: int, outputs: int, stride: int, norm: NormKind) -> nn.Sequential | None:
    """Return the projection of a residual block whose input and output differ."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), make_norm(norm, outputs))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions. The second works on the strided grid, so it takes the later dilation.

    Blocks return their sum without the last activation, because local POD compares the sums of stages.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, dilation: int, later: int, norm: NormKind):
        super().__init__()
        self.conv1 = conv3x3(inputs, width, stride, dilation)
        self.bn1 = make_norm(norm, width)
        self.conv2 = conv3x3(width, width, dilation=later)
        self.bn2 = make_norm(norm, width)
        self.downsample = shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return out + (x if self.downsample is None else self.downsample(x))


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1; the 3×3 carries the stride, as in torchvision (not the first 1×1 of the paper)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, dilation: int, later: int, norm: NormKind):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = make_norm(norm, width)
        self.conv2 = conv3x3(width, width, stride, dilation)
        self.bn2 = make_norm(norm, width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = make_norm(norm, outputs)
        self.downsample = shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        return out + (x if self.downsample is None else self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]


class Stage(nn.Sequential):
    """Residual blocks with an activation between them; none before the first and after the last."""

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self
        x = first(x)
        for block in rest:
            x = block(F.relu(x, inplace=True))
        return x


LAYOUTS: dict[int, tuple[Block, tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}


def residual_stage(
    block: Block, inputs: int, width: int, blocks: int, stride: int, budget: StrideBudget, norm: NormKind
) -> nn.Sequential:
    """Return residual blocks of one width, the first of which carries the stride."""
    stride, dilation, later = budget.spend(stride)
    first = block(inputs, width, stride, dilation, later, norm)
    outputs = width * block.expansion
    rest = (block(outputs, width, 1, later, later, norm) for _ in range(blocks - 1))
    return Stage(first, *rest)


class ResNet(Backbone):
    """Four stages, of strides 4, 8, 16 and 32, each capped at the output stride."""

    def __init__(self, depth: int, output_stride: int, norm: NormKind):
        super().__init__(f"resnet{depth}", output_stride)
        block, blocks = LAYOUTS[depth]
        self._strided = "conv1" if block is BasicBlock else "conv2"
        self.channels = tuple(width * block.expansion for width in STAGE_WIDTHS)

        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = make_norm(norm, 64)
        budget = StrideBudget(output_stride, used=4)
        inputs = (64, *self.channels)
        self.layer1 = residual_stage(block, inputs[0], STAGE_WIDTHS[0], blocks[0], 1, budget, norm)
        self.layer2 = residual_stage(block, inputs[1], STAGE_WIDTHS[1], blocks[1], 2, budget, norm)
        self.layer3 = residual_stage(block, inputs[2], STAGE_WIDTHS[2], blocks[2], 2, budget, norm)
        self.layer4 = residual_stage(block, inputs[3], STAGE_WIDTHS[3], blocks[3], 2, budget, norm)
        initialise(self)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        stages = [self.layer1(x)]
        for layer in (self.layer2, self.layer3, self.layer4):
            stages.append(layer(F.relu(stages[-1])))
        return tuple(stages)

    def activate(self, stage: Tensor) -> Tensor:
        return F.relu(stage)

    def dilate_first_blocks(self) -> None:
        for stage in (self.layer2, self.layer3, self.layer4):
            first, second = (getattr(block, self._strided) for block in (stage[0], stage[1]))
            if first.stride == (1, 1):
                first.dilation = first.padding = second.dilation
