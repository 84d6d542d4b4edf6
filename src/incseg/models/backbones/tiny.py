"""A backbone of a quarter of a million parameters, for tests and the embedded dataset of small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from incseg.models.backbones.base import Backbone, StrideBudget, initialise
from incseg.models.backbones.resnet import BasicBlock, conv3x3, residual_stage
from incseg.models.norms import NormKind, make_norm


class TinyNet(Backbone):
    """Four residual stages, of strides 2, 4, 8 and 16, each capped at the output stride."""

    allowed_strides = (4, 8, 16)
    from_nothing = True
    natural_strides = (2, 4, 8, 16)
    channels = (24, 48, 64, 96)
    mean = (0.5, 0.5, 0.5)
    std = (0.25, 0.25, 0.25)

    def __init__(self, output_stride: int, norm: NormKind):
        super().__init__("tiny", output_stride)
        self.stem = conv3x3(3, self.channels[0], stride=2)
        self.stem_norm = make_norm(norm, self.channels[0])
        budget = StrideBudget(output_stride, used=2)
        self.stages = nn.ModuleList()
        inputs = self.channels[0]
        for width, stride in zip(self.channels, (1, 2, 2, 2), strict=True):
            self.stages.append(residual_stage(BasicBlock, inputs, width, 1, stride, budget, norm))
            inputs = width
        initialise(self)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.stem_norm(self.stem(images)), inplace=True)
        outputs = []
        for stage in self.stages:
            outputs.append(stage(x))
            x = F.relu(outputs[-1])
        return tuple(outputs)

    def activate(self, stage: Tensor) -> Tensor:
        return F.relu(stage)
