"""Which input size fits a dataset: small objects must cover several cells of the feature map to be learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from incseg.data.pixels import PixelCounts
from incseg.data.source import Source
from incseg.data.transforms import frame_for

CELLS = 3.0
"""Side of the median object on the feature map: below it objects are found, if at all, as blobs."""
SMALL_SHARE = 0.25
"""Of the classes that may have smaller objects: one class of tiny things does not make all others slow."""
OWN_SIZES = (224, 320, 448)
"""Shorter sides that photographs may be trained at."""
CELL = 16
"""Pixels per cell of the feature map of the preset for own photographs."""
_NEARLY = 0.95
"""Of CELLS is enough: twice the size would cost four times the time."""
_MOST_NAMED = 6
MOST_PIXELS = 400e6
"""Of all images together at the chosen size: three to four minutes of features on two cores."""
MOST_PIXELS_EACH = 1.2e6
"""Of one image, so that few images do not take a size that prediction would be slow at."""


@dataclass(frozen=True)
class ChosenSize:
    """size: shorter side of the input. sides: of the median object of each class, in cells at that size."""

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
    """Per class, the median over the images that show it of √(its pixels) per pixel of the image's shorter side.

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
    """The smallest of the `allowed` sizes, ascending, at which the median objects of all classes but SMALL_SHARE of
    them, are CELLS cells wide; the largest that takes no more than MOST_PIXELS where there is none.

    sides: of the objects, relative to the shorter side of an image. stride: pixels per cell.
    """
    smallest = float(np.quantile(list(sides.values()), SMALL_SHARE, method="lower")) if sides else 1.0
    wanted = next((size for size in allowed if smallest * size / stride >= _NEARLY * CELLS), allowed[-1])

    def fits(size: int) -> bool:
        pixels = math.prod(frame_for(image_sizes, size))
        return pixels <= MOST_PIXELS_EACH and pixels * len(image_sizes) <= MOST_PIXELS

    size = max((size for size in allowed if size <= wanted and fits(size)), default=allowed[0])
    return ChosenSize(size, {name: side * size / stride for name, side in sides.items()}, wanted)
