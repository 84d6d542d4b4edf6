"""A source: images and index masks by split and number. It does not know about steps."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image

from incseg.types import DatasetInfo, UserError

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


class Source(ABC):
    """Random access to the images and masks of one dataset.

    Masks hold the dataset's own ids: 0 background (or unlabelled), i the i-th class, 255 void.
    """

    info: DatasetInfo
    preset: ClassVar[str | dict[str, Any] | None] = None
    """Default settings of a run on this dataset: the name of a preset, or settings nested as in a preset."""
    own: ClassVar[bool] = False
    """Whether users label such images themselves. Then mask values are checked, and tables have one row per class."""
    val_given: bool = True
    """Whether the dataset itself defines its test images."""
    notes: Sequence[str] = ()
    """Lines that the user should read before trusting the numbers, such as a list that had to be replaced."""

    @abstractmethod
    def names(self, split: Split) -> Sequence[str]:
        """Return the names of the images of a split, in the order of `index`."""

    @abstractmethod
    def image(self, split: Split, index: int) -> Image.Image:
        """Return the image as RGB."""

    @abstractmethod
    def mask(self, split: Split, index: int) -> np.ndarray:
        """Return the mask, (H, W) uint8 of dataset ids. Raise a UserError that names the file if it is wrong."""

    @abstractmethod
    def fingerprint(self, split: Split) -> str:
        """Return a digest of the content of the split: the key of every cache made from it."""

    def sizes(self, split: Split) -> Sequence[tuple[int, int]]:
        """Return (width, height) of every image, as `image` returns it."""
        return [self.image(split, index).size for index in range(len(self.names(split)))]

    def known_presence(self, split: Split) -> Sequence[tuple[int, ...]] | None:
        """Return the class ids in each image if the source knows them without reading masks, else None."""
        return None

    def pair(self, split: Split, index: int) -> tuple[Image.Image, np.ndarray]:
        """Return image and mask. Raise a UserError if their sizes differ."""
        image, mask = self.image(split, index), self.mask(split, index)
        if image.size != mask.shape[::-1]:
            name = self.names(split)[index]
            raise UserError(
                f"{self.info.name} {split} '{name}': the image is {image.size[0]}×{image.size[1]} but its mask "
                f"{mask.shape[1]}×{mask.shape[0]}; export both at one size"
            )
        return image, mask

    def remarks(self, split: Split, index: int) -> Sequence[str]:
        """Return why objects are left out of the mask, such as "polygons with fewer than 3 points"."""
        return ()

    def preview(self, split: Split, index: int, side: int) -> tuple[Image.Image, tuple[int, int]]:
        """Return the image with its longer side reduced to at most `side`, and its full size."""
        image = self.image(split, index)
        small = image.copy()
        small.thumbnail((side, side))
        return small, image.size

    def default_workers(self, processes: int) -> int:
        """Return how many loader processes each of `processes` training processes needs, at least one for decoding."""
        return max(1, min(8, (os.cpu_count() or 1) // processes - 1))

    @property
    def palette(self) -> np.ndarray:
        """(256, 3) uint8 colours by dataset id."""
        return voc_palette()


def voc_palette() -> np.ndarray:
    """Return Pascal VOC's colours: the bits of the id, spread over the channels from the highest bit down."""
    ids = np.arange(256)
    colours = np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((ids >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colours
