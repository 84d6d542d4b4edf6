"""Which input size fits a dataset: small objects must cover several cells of the feature map to be learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from incseg.data.presence import Presence, in_threads
from incseg.data.source import Source, Split
from incseg.data.transforms import frame_for

CELLS = 3.0
"""Side of the median object on the feature map: below it objects are found, if at all, as blobs."""
MOST_LOOKED_AT = 60
"""Images that are read of each class, evenly spread: a median needs no more."""
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
        sides = ", ".join(f"{name} {side:.1f}" for name, side in self.sides.items())
        text = (
            f"input: shorter side {self.size} pixels; side of the median object, in cells of the feature map: {sides}"
        )
        if self.wanted > self.size:
            text += f" ({CELLS:g} would be better: --size {self.wanted}, which takes longer)"
        return text


def object_sides(source: Source, split: Split, presence: Presence, classes: Mapping[int, str]) -> dict[str, float]:
    """Per class, the median over images of √(pixels of the class) per pixel of the image's shorter side."""
    shown = {i: [n for n, ids in enumerate(presence.classes) if i in ids] for i in classes}
    wanted = {i: _spread(images, MOST_LOOKED_AT) for i, images in shown.items()}
    images = sorted({image for some in wanted.values() for image in some})

    def counts(position: int) -> tuple[np.ndarray, int]:
        mask = source.mask(split, images[position])
        return np.bincount(mask.ravel(), minlength=256), min(mask.shape)

    found = dict(zip(images, in_threads(counts, len(images), None, None), strict=True))
    return {
        name: float(np.median([math.sqrt(found[n][0][i]) / found[n][1] for n in wanted[i]]))
        for i, name in classes.items()
        if wanted[i]
    }


def choose_size(
    sides: Mapping[str, float], allowed: Sequence[int], image_sizes: Sequence[tuple[int, int]], stride: int
) -> ChosenSize:
    """The smallest of the `allowed` sizes, ascending, at which the median object of every class is CELLS cells wide;
    the largest that takes no more than MOST_PIXELS where there is none.

    sides: of the objects, relative to the shorter side of an image. stride: pixels per cell.
    """
    smallest = min(sides.values(), default=1.0)
    wanted = next((size for size in allowed if smallest * size / stride >= CELLS), allowed[-1])

    def fits(size: int) -> bool:
        pixels = math.prod(frame_for(image_sizes, size))
        return pixels <= MOST_PIXELS_EACH and pixels * len(image_sizes) <= MOST_PIXELS

    size = max((size for size in allowed if size <= wanted and fits(size)), default=allowed[0])
    return ChosenSize(size, {name: side * size / stride for name, side in sides.items()}, wanted)


def _spread(images: Sequence[int], most: int) -> list[int]:
    if len(images) <= most:
        return list(images)
    return [images[i] for i in np.linspace(0, len(images) - 1, most).round().astype(int)]
