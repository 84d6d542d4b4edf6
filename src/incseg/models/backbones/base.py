"""What every backbone offers: stages, their channels, and how its input is normalised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from incseg.types import UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Backbone(nn.Module, ABC):
    """Images in, feature maps out.

    channels:      of each stage, shallow to deep.
    mean, std:     per colour; the input is (x − mean) / std for x in [0, 1].
    output_stride: of the last stage; the stride of earlier stages is the smaller of theirs and this.
    """

    allowed_strides: ClassVar[tuple[int, ...]] = (8, 16, 32)
    natural_strides: ClassVar[tuple[int, ...]] = (4, 8, 16, 32)
    """Of the stages, before the output stride caps them."""
    classifier_keys: ClassVar[tuple[str, ...]] = ("fc.", "classifier.", "head.")
    """How the names of a foreign file begin that belong to its image classifier, which we do not have."""

    from_nothing: ClassVar[bool] = False
    """Whether it is meant to be trained without pretrained weights."""

    channels: tuple[int, ...]
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __init__(self, name: str, output_stride: int):
        super().__init__()
        if output_stride not in self.allowed_strides:
            allowed = ", ".join(map(str, self.allowed_strides))
            raise UserError(f"output stride {output_stride} is not possible with {name}; choose one of {allowed}")
        self.name = name
        self.output_stride = output_stride

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels of the image per position, of each stage."""
        return tuple(min(stride, self.output_stride) for stride in self.natural_strides)

    @abstractmethod
    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the stages of (B, 3, H, W) images, shallow to deep; a stage of stride s is ⌈H/s⌉ × ⌈W/s⌉.

        Stages that end in an activation are returned without it if `activate` applies it.
        """

    def activate(self, stage: Tensor) -> Tensor:
        """Apply the last activation of a stage to what `forward` returns of it."""
        return stage

    def dilate_first_blocks(self) -> None:
        """Dilate the first block of a stage whose stride became dilation like the others, where a backbone can."""

    def fold_norms(self) -> None:
        """Merge frozen batch norms into their convolutions where a backbone can: for prediction only, and faster."""

    def imagenet_weights(self) -> Mapping[str, Tensor]:
        """Return the state dict that `weights: imagenet` stands for, where we can provide one."""
        raise UserError(
            f"weights 'imagenet' are not available for {self.name}; "
            "give the path of a downloaded state dict (.pth or .safetensors), or no weights"
        )

    @classmethod
    def offers_imagenet(cls) -> bool:
        return cls.imagenet_weights is not Backbone.imagenet_weights


class StrideBudget:
    """Turns strides beyond the output stride into dilation.

    The dilation of a converted layer is unchanged: its taps are still those of its input's grid. Layers after it are
    dilated, so the coarse network's values reappear at its coarse positions.
    """

    def __init__(self, output_stride: int, used: int):
        self.output_stride = output_stride
        self.stride = used
        self.dilation = 1

    def spend(self, stride: int) -> tuple[int, int, int]:
        """Return (stride, dilation of the strided layer, dilation of the layers after it)."""
        before = self.dilation
        if self.stride * stride > self.output_stride:
            self.dilation *= stride
            return 1, before, self.dilation
        self.stride *= stride
        return stride, before, self.dilation


def initialise(module: nn.Module) -> None:
    """He initialisation of every convolution, for a network that trains from scratch."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
