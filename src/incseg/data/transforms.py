"""Transforms of an image and its mask (crop, flip, resize, normalise), and the input size that fits a dataset."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incseg.data.presence import PixelCounts
from incseg.data.source import Source
from incseg.types import IGNORE, UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

ASPECT_RATIOS = (3 / 4, 4 / 3)
"""Range of width to height of a random crop, as usual for the random resized crop."""
_TRIES = 10
LONGEST = 8
"""Longest strip, in shorter sides. Of a longer one only the middle is used, so memory does not grow with its length."""


class Transform(ABC):
    """(image, mask) -> ((3, H, W) float32 normalised, (H, W) uint8).

    All randomness comes from `generator`, so a sample can be drawn again from its seed. It is numpy's, because numpy
    makes independent streams from keys like (seed, epoch, index). Without a mask every pixel is void.
    """

    @abstractmethod
    def __call__(
        self, image: Image.Image, mask: np.ndarray | None, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class TrainTransform(Transform):
    """Random resized crop and horizontal flip.

    The crop covers a share of the image's area drawn from `scale`, with a log-uniform aspect ratio of 3/4 to 4/3,
    anywhere in the image; it becomes crop × crop pixels. A draw that does not fit is drawn again, up to ten times; then
    the largest centred crop of an allowed ratio is used. A share above one never fits. So the usual (0.5, 2) is in
    effect (0.5, 1), with the centred crop in one of seven draws at 500×375.
    """

    crop: int
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    scale: tuple[float, float] = (0.5, 2.0)
    flip: bool = True

    def __post_init__(self) -> None:
        _check_size("crop", self.crop)
        if not 0 < self.scale[0] <= self.scale[1] or self.scale[0] > 1:
            raise UserError(
                f"scale={tuple(self.scale)} is not a range of area shares; give (low, high) with "
                "0 < low <= high and low <= 1, such as (0.5, 2.0)"
            )

    def __call__(
        self, image: Image.Image, mask: np.ndarray | None, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        left, top, width, height = self._draw_crop(image.width, image.height, generator)
        size, box = (self.crop, self.crop), (left, top, left + width, top + height)
        image = image.resize(size, Image.Resampling.BILINEAR, box=box)
        labels = _mask_image(mask, size, box)
        if self.flip and generator.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            labels = labels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return normalise(image, self.mean, self.std), torch.from_numpy(np.array(labels))

    def _draw_crop(self, width: int, height: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
        """Return (left, top, width, height) of the part of the image to show."""
        low, high = ASPECT_RATIOS
        for _ in range(_TRIES):
            area = width * height * generator.uniform(*self.scale)
            ratio = math.exp(generator.uniform(math.log(low), math.log(high)))
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left = int(generator.integers(width - crop_width + 1))
                top = int(generator.integers(height - crop_height + 1))
                return left, top, crop_width, crop_height
        crop_width = min(width, max(1, round(height * high)))
        crop_height = min(height, max(1, round(width / low)))
        return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


@dataclass(frozen=True)
class TestTransform(Transform):
    """Resize the shorter side to `size` (image bilinear, mask nearest) and crop the centre; None changes nothing."""

    __test__ = False  # pytest would take the name for a test

    size: int | None
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.size is not None:
            _check_size("size", self.size)

    def __call__(
        self, image: Image.Image, mask: np.ndarray | None, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.size is not None and max(image.size) > LONGEST * min(image.size):
            image, mask = _middle(image, mask)
        size = image.size
        if self.size is not None:
            short = min(size)
            # The long side is rounded down, as in the usual evaluation code.
            size = (self.size * size[0] // short, self.size * size[1] // short)
        if size != image.size:
            labels = _mask_image(mask, size, (0, 0, *image.size))
            image = image.resize(size, Image.Resampling.BILINEAR)
        else:
            labels = _mask_image(mask, size, None)
        if self.size is not None:
            left, top = round((size[0] - self.size) / 2), round((size[1] - self.size) / 2)
            centre = (left, top, left + self.size, top + self.size)
            image, labels = image.crop(centre), labels.crop(centre)
        return normalise(image, self.mean, self.std), torch.from_numpy(np.array(labels))


def _middle(image: Image.Image, mask: np.ndarray | None) -> tuple[Image.Image, np.ndarray | None]:
    """Return the middle of a long strip. The rest would be resized and then cut off."""
    side = LONGEST * min(image.size)
    left, top = (max(0, (length - side) // 2) for length in image.size)
    right, bottom = left + min(side, image.width), top + min(side, image.height)
    return image.crop((left, top, right, bottom)), None if mask is None else mask[top:bottom, left:right]


@dataclass(frozen=True)
class WholeTransform(Transform):
    """The whole image in a frame of (height, width). Nothing of it is cut off.

    The shorter side becomes `size`, or less if the image would not fit the frame. The rest of the frame has the mean
    colour and is void.
    """

    size: int
    frame: tuple[int, int]
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for side in (self.size, *self.frame):
            _check_size("size", side)

    def __call__(
        self, image: Image.Image, mask: np.ndarray | None, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        height, width = self.frame
        factor = min(self.size / min(image.size), width / image.width, height / image.height)
        size = max(1, min(width, round(image.width * factor))), max(1, min(height, round(image.height * factor)))
        labels = _mask_image(mask, size, (0, 0, *image.size))
        shown = normalise(image.resize(size, Image.Resampling.BILINEAR), self.mean, self.std)
        pixels = torch.zeros(3, height, width)
        pixels[:, : size[1], : size[0]] = shown
        void = np.full(self.frame, IGNORE, dtype=np.uint8)
        void[: size[1], : size[0]] = np.asarray(labels)
        return pixels, torch.from_numpy(void)


def shown_at(
    size: int | None, frame: tuple[int, int] | None, mean: Sequence[float], std: Sequence[float]
) -> TestTransform | WholeTransform:
    """Return the test transform: the whole image if there is a frame, else its centre; size None keeps the size."""
    if frame is None or size is None:
        return TestTransform(size, mean, std)
    return WholeTransform(size, frame, mean, std)


@dataclass(frozen=True)
class Mirrored(Transform):
    """The test transform with a random horizontal flip."""

    shown: TestTransform | WholeTransform
    flip: bool = True

    def __call__(
        self, image: Image.Image, mask: np.ndarray | None, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        pixels, labels = self.shown(image, mask)
        if self.flip and generator.random() < 0.5:
            return pixels.flip(-1), labels.flip(-1)
        return pixels, labels


FRAME_SHARE = 0.9
"""Share of the images that fit the frame at full size in each direction; the others are shrunk."""
FRAME_UNIT = 32
LONGEST_FRAME = 2.5
"""Longest frame, in shorter sides, so that a panorama does not make the frame of every image long."""


def frame_for(sizes: Sequence[tuple[int, int]], shorter: int) -> tuple[int, int]:
    """Return (height, width) of a frame for images of these (width, height) when their shorter side is `shorter`.

    Images that are all portrait get a portrait frame, mixed ones a square frame with room for both.
    """
    if not sizes:
        return shorter, shorter
    sides = np.array(sizes, dtype=np.float64)
    sides *= shorter / sides.min(1, keepdims=True)
    width, height = np.quantile(sides, FRAME_SHARE, axis=0, method="higher").clip(shorter, LONGEST_FRAME * shorter)
    return _rounded_up(height), _rounded_up(width)


def _rounded_up(side: float) -> int:
    return math.ceil(round(side, 3) / FRAME_UNIT) * FRAME_UNIT


def normalise(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return an RGB image as (3, H, W) float32, (value / 255 - mean) / std by channel."""
    # The pixels are rearranged while they are still bytes, which is three times faster than as floats.
    planes = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    means, stds = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (mean, std))
    return planes.float().div_(255).sub_(means).div_(stds)


def _mask_image(mask: np.ndarray | None, size: tuple[int, int], box: tuple[int, int, int, int] | None) -> Image.Image:
    """Return the part of the mask in `box`, resized by the nearest pixel to (width, height) `size`."""
    if mask is None:
        return Image.new("L", size, IGNORE)
    labels = Image.fromarray(mask)
    return labels if box is None else labels.resize(size, Image.Resampling.NEAREST, box=box)


def _check_size(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name}={value} is not a size; give a number of pixels of at least 1")


CELLS = 3.0
"""Wanted side of the median object, in cells of the feature map. Smaller objects are found as blobs, if at all."""
SMALL_SHARE = 0.25
"""Share of the classes that may have smaller objects, so that one class of tiny objects does not slow down training."""
OWN_SIZES = (224, 320, 448)
"""Allowed shorter sides for training on own photographs."""
CELL = 16
"""Pixels per cell of the feature map of the preset for own photographs."""
_NEARLY = 0.95
"""Share of CELLS that is enough: twice the size would cost four times the time."""
_MOST_NAMED = 6
MOST_PIXELS = 400e6
"""Limit on the pixels of all images at the chosen size: three to four minutes of features on two cores."""
MOST_PIXELS_EACH = 1.2e6
"""Limit on the pixels of one image, so that prediction is not slow even if there are few images."""


@dataclass(frozen=True)
class ChosenSize:
    """The input size for a dataset.

    size:   shorter side of the input.
    sides:  side of the median object of each class, in cells at this size.
    wanted: the size that the objects need; larger than `size` if it would take too long.
    """

    size: int
    sides: dict[str, float]
    wanted: int

    def __str__(self) -> str:
        some = sorted(self.sides.items(), key=lambda item: item[1])[:_MOST_NAMED]
        sides = ", ".join(f"{name} {side:.1f}" for name, side in some)
        text = f"input: shorter side {self.size} pixels; width of the median object in cells of the grid: {sides}"
        if self.wanted > self.size:
            return f"{text} ({CELLS:g} would be better: a size of {self.wanted}, which takes longer)"
        return f"{text} ({CELLS:g} is enough)"


def object_sides(pixels: PixelCounts, sizes: Sequence[tuple[int, int]], classes: Mapping[int, str]) -> dict[str, float]:
    """Return, per class, the median of √(its pixels) / (shorter side) over the images that show it.

    sizes: (width, height) of the images. Classes that no image shows are left out.
    """
    shorter = np.array([min(size) for size in sizes], dtype=np.float64)
    found = {}
    for i, name in classes.items():
        areas = pixels.of(i)
        shown = areas > 0
        if shown.any():
            found[name] = float(np.median(np.sqrt(areas[shown]) / shorter[shown]))
    return found


def size_for(source: Source, pixels: PixelCounts) -> ChosenSize:
    """Return the input size for a model that learns all classes of a dataset; `pixels` are of its training images."""
    sizes = source.sizes("train")
    sides = object_sides(pixels, sizes, dict(enumerate(source.info.classes, start=1)))
    return choose_size(sides, OWN_SIZES, [*sizes, *source.sizes("val")], CELL)


def choose_size(
    sides: Mapping[str, float], allowed: Sequence[int], image_sizes: Sequence[tuple[int, int]], stride: int
) -> ChosenSize:
    """Return the smallest allowed size at which the median objects are CELLS cells wide, for all but SMALL_SHARE of
    the classes. If it takes too many pixels, return the largest smaller size that does not.

    sides:   side of the median object of each class, relative to the shorter side of an image.
    allowed: sizes, ascending.
    stride:  pixels per cell.
    """
    smallest = float(np.quantile(list(sides.values()), SMALL_SHARE, method="lower")) if sides else 1.0
    wanted = next((size for size in allowed if smallest * size / stride >= _NEARLY * CELLS), allowed[-1])

    def fits(size: int) -> bool:
        pixels = math.prod(frame_for(image_sizes, size))
        return pixels <= MOST_PIXELS_EACH and pixels * len(image_sizes) <= MOST_PIXELS

    size = max((size for size in allowed if size <= wanted and fits(size)), default=allowed[0])
    return ChosenSize(size, {name: side * size / stride for name, side in sides.items()}, wanted)
