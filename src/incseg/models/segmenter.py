"""The segmenter: backbone, ASPP and one 1×1 convolution per step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.models.aspp import ASPP, default_dilations
from incseg.models.backbones import build_backbone
from incseg.models.weights import load_weights
from incseg.types import Increment, Output

CLASSIFIER_STD = 0.01
"""Small weights and zero bias: a new class starts undecided (PAPER.md section 2)."""


@dataclass
class ModelConfig:
    """The network.

    Args:
        backbone: tiny, efficientnet-lite0, resnet18, resnet50, resnet101, or timm:NAME.
        weights: Pretrained backbone: a file (.pth, .pt, .safetensors), 'imagenet' where available, or none.
        output_stride: Pixels of the image per position of the logits; strides beyond it become dilation.
        width: Channels of the head.
        dilations: Of the head's three 3x3 convolutions; by default 6, 12, 18 at stride 16, doubled at 8.
        norm: batch; group (no batch statistics); or frozen (the backbone's running statistics never
            change, its affine parameters train; the head, which has no statistics to keep, uses batch).
        freeze_backbone: Train the head only; neither parameters nor statistics of the backbone change.
    """

    backbone: str = "resnet101"
    weights: str | None = None
    output_stride: int = 16
    width: int = 256
    dilations: tuple[int, int, int] | None = None
    norm: Literal["batch", "group", "frozen"] = "batch"
    freeze_backbone: bool = False


class Segmenter(nn.Module):
    """Logits of every class learnt so far; it starts with none and grows by one increment per step.

    With `background_output` the first classifier has one more output, the background's, before the others.
    """

    def __init__(self, config: ModelConfig, background_output: bool):
        super().__init__()
        self.config = config
        self.background_output = background_output
        self.increments: list[Increment] = []
        self.backbone = build_backbone(config.backbone, config.output_stride, config.norm)
        dilations = config.dilations or default_dilations(config.output_stride)
        head_norm: Literal["batch", "group"] = "group" if config.norm == "group" else "batch"
        self.aspp = ASPP(self.backbone.channels[-1], config.width, dilations, head_norm)
        self.classifiers = nn.ModuleList()
        self.backbone.requires_grad_(not config.freeze_backbone)
        self.train()

    @property
    def num_classes(self) -> int:
        """Foreground classes learnt so far."""
        return sum(len(increment.classes) for increment in self.increments)

    @property
    def num_outputs(self) -> int:
        """Channels of the logits."""
        return self.num_classes + (self.background_output and bool(self.increments))

    def grow(self, increment: Increment) -> None:
        """Add the classifier of a new step; what was learnt stays as it is."""
        outputs = len(increment.classes) + (self.background_output and not self.increments)
        classifier = nn.Conv2d(self.config.width, outputs, 1)
        nn.init.normal_(classifier.weight, std=CLASSIFIER_STD)
        nn.init.zeros_(classifier.get_parameter("bias"))
        # Drawn on the CPU and moved, so that a seed gives the same weights on every device.
        self.classifiers.append(classifier.to(self.aspp.mix.weight))
        self.increments.append(increment)

    def train(self, mode: bool = True) -> Segmenter:
        super().train(mode)
        if self.config.freeze_backbone:
            self.backbone.eval()
        return self

    def encode(self, images: Tensor) -> tuple[Tensor, ...]:
        """The backbone's stages; without gradient where it is frozen."""
        if self.config.freeze_backbone:
            with torch.no_grad():
                return self.backbone(images)
        return self.backbone(images)

    def decode(self, stages: tuple[Tensor, ...]) -> Output:
        """Head and classifiers on the backbone's stages."""
        if not self.classifiers:
            raise RuntimeError("the model has no classes yet; call grow first")
        embedding = self.aspp(stages[-1])
        weight = torch.cat([classifier.get_parameter("weight") for classifier in self.classifiers])
        bias = torch.cat([classifier.get_parameter("bias") for classifier in self.classifiers])
        return Output(logits=F.conv2d(embedding, weight, bias), embedding=embedding, stages=stages)

    def forward(self, images: Tensor) -> Output:
        """(B, 3, H, W) normalised images → logits at the output stride."""
        return self.decode(self.encode(images))

    def frozen_copy(self) -> Segmenter:
        """A teacher: a copy in evaluation mode that takes no gradient."""
        return copy.deepcopy(self).eval().requires_grad_(False)


def build_segmenter(config: ModelConfig, background_output: bool, log: Callable[[str], None] = print) -> Segmenter:
    """A new model with its pretrained backbone; what the weights matched is logged."""
    model = Segmenter(config, background_output)
    if config.weights is not None:
        log(str(load_weights(model.backbone, config.weights)))
    elif config.freeze_backbone or config.norm == "frozen":
        log(f"note: {config.backbone} is frozen but has no pretrained weights; give --model.weights")
    return model
