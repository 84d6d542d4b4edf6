"""The segmenter: backbone, head (ASPP) and one 1×1 convolution per step.

Classes that are added later may get a head of their own (`Increment.head`). Then nothing that was learnt before
changes, and each head may look at the image at its own size (`shrinks`): small new objects want a larger input, and the
old classes go on to see the size that they were trained at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.models.aspp import ASPP, Neck, TorchvisionHead, default_dilations
from incseg.models.backbones import build_backbone
from incseg.models.weights import load_weights
from incseg.types import Increment, Inputs, Output, UserError

CLASSIFIER_STD = 0.01
"""Small weights and zero bias: a new class starts undecided (PAPER.md section 2)."""

FINER = 4
"""Scores of heads that see the image at different sizes meet on a grid so much finer than the features. Interpolated
straight to the features' grid and then to the image, small objects of the old classes would be smoothed away."""
Frozen = Literal["nothing", "statistics", "head", "model"]


@dataclass
class ModelConfig:
    """The network.

    Args:
        backbone: tiny, efficientnet-lite0, resnet18, resnet50, resnet101, or timm:NAME.
        weights: Pretrained backbone: a file (.pth, .pt, .safetensors), 'imagenet' where available, or none.
        output_stride: Pixels of the image per position of the logits; strides beyond it become dilation.
        width: Channels of the head.
        stages: Which stages of the backbone the head reads, 0 the shallowest; all are brought to the resolution of
            the first named. Empty for the last one alone, as in DeepLabv3.
        dilations: Of the head's three 3x3 convolutions; by default 6, 12, 18 at stride 16, doubled at 8.
        norm: batch; group (no batch statistics); frozen (the backbone's running statistics never
            change, its affine parameters train; the head, which has no statistics to keep, uses batch); or
            frozen-group (the same backbone, group in the head: no statistics of batches anywhere).
        freeze_backbone: Train the head only; neither parameters nor statistics of the backbone change.
        head: Empty for the field's (MiB's); torchvision for that of its DeepLabv3, which has one layer more
            (incseg import makes such models).
    """

    backbone: str = "resnet101"
    weights: str | None = None
    output_stride: int = 16
    width: int = 256
    stages: tuple[int, ...] | None = None
    dilations: tuple[int, int, int] | None = None
    norm: Literal["batch", "group", "frozen", "frozen-group"] = "batch"
    freeze_backbone: bool = False
    head: Literal["torchvision"] | None = None


class Head(nn.Module):
    """What the backbone's stages become before a classifier reads them: (B, width, h, w)."""

    def __init__(self, neck: Neck | None, aspp: ASPP | TorchvisionHead) -> None:
        super().__init__()
        self.neck, self.aspp = neck, aspp

    def forward(self, features: tuple[Tensor, ...]) -> Tensor:
        return self.aspp(features[0] if self.neck is None else self.neck(features))


class Segmenter(nn.Module):
    """Logits of every class learnt so far; it starts with none and grows by one increment per step.

    With `background_output` the first classifier has one more output, the background's, before the others.

    heads:   those of later increments, numbered from 1; head 0 is `neck` and `aspp`.
    shrinks: for each head, 0 first, how many times smaller than the input its image is: 1, 2, 4, …
    sizes:   those at which `features` looks at an image, the largest image first: the shrinks of all heads, and of the
             one that is to come.
    """

    SHRINKS = (1, 2, 4, 8)
    """Powers of two, so that a smaller image is the mean of whole pixels."""

    def __init__(self, config: ModelConfig, background_output: bool):
        super().__init__()
        self.config = config
        self.background_output = background_output
        self.increments: list[Increment] = []
        norm = "frozen" if config.norm == "frozen-group" else config.norm
        self.backbone = build_backbone(config.backbone, config.output_stride, norm)
        dilations = config.dilations or default_dilations(config.output_stride)
        head_norm: Literal["batch", "group"] = "group" if config.norm in ("group", "frozen-group") else "batch"
        channels = [self.backbone.channels[stage] for stage in self._stages_read()]
        self.neck = Neck(channels, config.width, head_norm) if config.stages else None
        head = ASPP if config.head is None else TorchvisionHead
        self.aspp = head(config.width if config.stages else channels[0], config.width, dilations, head_norm)
        self.classifiers = nn.ModuleList()
        self.heads = nn.ModuleList()
        self.shrinks, self.sizes = [1], [1]
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

    @property
    def finer(self) -> int:
        """How many times finer than the features the logits are, where heads of several sizes come together."""
        return FINER if len(set(self.shrinks)) > 1 else 1

    @property
    def stride(self) -> int:
        """Pixels of the image per position of the logits."""
        return self.backbone.strides[self._stages_read()[0]] * min(self.shrinks) // self.finer

    @property
    def unit(self) -> int:
        """Pixels at whose multiples an image may be cut so that every position of every map stays where it is."""
        return self.config.output_stride * max(self.shrinks)

    def enlarge(self, factor: int) -> None:
        """Take images that are `factor` times larger from now on; all heads so far see them as small as before."""
        shrinks = [shrink * factor for shrink in self.shrinks]
        if not set(shrinks) <= set(self.SHRINKS):
            raise UserError(
                f"an input {factor} times larger would be shrunk by {max(shrinks)} for the first classes, and "
                f"{self.SHRINKS[-1]} is the most; give a smaller --size"
            )
        self.shrinks, self.sizes = shrinks, sorted({1, *shrinks})

    def grow(self, increment: Increment) -> None:
        """Add the classifier of a new step; what was learnt stays as it is.

        Where the increment names a head that is not there yet, it starts as a copy of the first.
        """
        if increment.head > len(self.heads):
            if increment.head > len(self.heads) + 1:
                raise ValueError(f"head {increment.head} is named, and there are {len(self.heads)}")
            self.heads.append(Head(copy.deepcopy(self.neck), copy.deepcopy(self.aspp)).requires_grad_(True))
            self.shrinks.append(1)
            self.sizes = sorted({*self.sizes, 1})
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

    def freeze(self, part: Frozen) -> None:
        """Leave a part as it is in the training that follows, to be said again after every call of `train`.

        statistics: of every batch norm. head: all but the classifiers, its batch norms with it. model: all but the
        newest classifier and, where that has one of its own, its head.
        """
        if part == "model":
            self.eval().requires_grad_(False)
            own = self.increments[-1].head
            trained = [self.classifiers[-1], *([self.heads[own - 1]] if own else [])]
            for module in trained:
                module.train().requires_grad_(True)
        for name, module in self.named_children():
            if part == "head" and name != "classifiers":
                module.eval().requires_grad_(False)
        if part == "statistics":
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def encode(self, images: Tensor) -> tuple[Tensor, ...]:
        """The backbone's stages; without gradient where it is frozen."""
        if self.config.freeze_backbone:
            with torch.no_grad():
                return self.backbone(images)
        return self.backbone(images)

    def read_by_head(self, stages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of the backbone's stages that a head reads."""
        return tuple(stages[stage] for stage in self._stages_read())

    def features(self, images: Tensor) -> tuple[Tensor, ...]:
        """What the heads read of images, at each of `sizes`: what a feature cache holds."""
        return tuple(f for size in self.sizes for f in self.read_by_head(self.encode(shrunk(images, size))))

    def decode(self, features: tuple[Tensor, ...]) -> Output:
        """Heads and classifiers on what `features` gives."""
        number = len(self._stages_read())
        starts = {size: index * number for index, size in enumerate(self.sizes)}
        return self._decode({size: features[first : first + number] for size, first in starts.items()})

    def forward(self, inputs: Inputs) -> Output:
        """(B, 3, H, W) normalised images, or what the heads read of them → logits at the network's resolution."""
        if not isinstance(inputs, Tensor):
            return self.decode(inputs)
        stages = {size: self.encode(shrunk(inputs, size)) for size in sorted(set(self.shrinks))}
        features = {size: self.read_by_head(seen) for size, seen in stages.items()}
        return self._decode(features, stages[self.shrinks[0]])

    def _decode(self, features: dict[int, tuple[Tensor, ...]], stages: tuple[Tensor, ...] = ()) -> Output:
        """Heads and classifiers on the features of each size."""
        if not self.classifiers:
            raise RuntimeError("the model has no classes yet; call grow first")
        embedding = self._embedding(0, features[self.shrinks[0]])
        if not self.heads:
            return Output(self._classified(embedding, range(len(self.classifiers))), embedding, stages)
        height, width = features[min(self.shrinks)][0].shape[-2:]
        by_increment: dict[int, Tensor] = {}
        for head, shrink in enumerate(self.shrinks):
            own = [index for index, increment in enumerate(self.increments) if increment.head == head]
            read = embedding if head == 0 else self._embedding(head, features[shrink])
            logits = resized(self._classified(read, own), (self.finer * height, self.finer * width))
            widths = [self.classifiers[index].get_parameter("bias").numel() for index in own]
            by_increment |= dict(zip(own, logits.split(widths, dim=1), strict=True))
        return Output(torch.cat([by_increment[i] for i in range(len(self.increments))], 1), embedding, stages)

    def _embedding(self, head: int, features: tuple[Tensor, ...]) -> Tensor:
        """What a head makes of the stages it reads; the first is not a module, so that its tensors keep their names."""
        if head > 0:
            return self.heads[head - 1](features)
        return self.aspp(features[0] if self.neck is None else self.neck(features))

    def _classified(self, embedding: Tensor, increments: Sequence[int]) -> Tensor:
        """The scores of some increments, by one convolution."""
        weight = torch.cat([self.classifiers[i].get_parameter("weight") for i in increments])
        bias = torch.cat([self.classifiers[i].get_parameter("bias") for i in increments])
        return F.conv2d(embedding, weight, bias)

    def _stages_read(self) -> tuple[int, ...]:
        count = len(self.backbone.channels)
        chosen = self.config.stages or (count - 1,)
        if any(not 0 <= stage < count for stage in chosen) or list(chosen) != sorted(set(chosen)):
            raise UserError(
                f"model.stages is {list(chosen)}; {self.config.backbone} has stages 0 to {count - 1}, "
                "name each at most once, the shallowest first"
            )
        return tuple(chosen)

    def frozen_copy(self) -> Segmenter:
        """A teacher: a copy in evaluation mode that takes no gradient."""
        return copy.deepcopy(self).eval().requires_grad_(False)


def shrunk(images: Tensor, factor: int) -> Tensor:
    """(B, C, H, W) → each side `factor` times smaller, the mean of the pixels that fall together."""
    if factor == 1:
        return images
    return F.avg_pool2d(images, factor, ceil_mode=True, count_include_pad=False)


def resized(logits: Tensor, size: Sequence[int]) -> Tensor:
    if logits.shape[-2:] == torch.Size(size):
        return logits
    return F.interpolate(logits, (size[0], size[1]), mode="bilinear", align_corners=False)


def build_segmenter(config: ModelConfig, background_output: bool, log: Callable[[str], None] = print) -> Segmenter:
    """A new model with its pretrained backbone; what the weights matched, or that there are none, is logged."""
    model = Segmenter(config, background_output)
    backbone = model.backbone
    file = "a file (.pth, .pt or .safetensors)"
    remedy = f"give --model.weights {f'imagenet or {file}' if backbone.offers_imagenet() else file}"
    if config.weights is not None:
        log(str(load_weights(backbone, config.weights)))
    elif config.freeze_backbone or config.norm.startswith("frozen"):
        log(f"note: {config.backbone} is frozen but has no pretrained weights; {remedy}")
    elif not backbone.from_nothing:
        log(f"note: {config.backbone} has no pretrained weights and learns from random ones; {remedy}")
    return model
