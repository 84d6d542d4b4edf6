"""Walk a whole dataset, open every pair, and list everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from PIL import Image

from incseg.data.faults import SIZES, Fault, fault_of
from incseg.data.meaning import judge
from incseg.data.pixels import PixelCounts, histogram, joined, store
from incseg.data.presence import Progress, in_threads
from incseg.data.source import SPLITS, Source, Split
from incseg.types import UserError


@dataclass
class SplitCounts:
    """What a split holds, as far as its masks could be read."""

    images: int
    images_per_class: dict[str, int]
    """How many images show each class, in the order of the ids."""
    unlabelled: list[str] = field(default_factory=list)
    """Images whose mask is background or void all over."""


@dataclass
class Report:
    """All faults of a dataset and what it holds. Only faults, of files or of meaning, make it not `ok`."""

    faults: list[Fault]
    """Of single files."""
    meaning: list[str]
    """Faults of the masks as a whole: they mean something else than is assumed."""
    notes: list[str]
    """What the user should look at."""
    counts: dict[Split, SplitCounts]
    pixels: dict[Split, PixelCounts]

    @property
    def ok(self) -> bool:
        return not self.faults and not self.meaning

    @property
    def classes_without_image(self) -> list[str]:
        """Classes that no image of the checked splits shows."""
        per_class = [split.images_per_class for split in self.counts.values()]
        return [name for name in (per_class[0] if per_class else ()) if not any(one[name] for one in per_class)]


def check(
    source: Source,
    splits: Sequence[Split] = SPLITS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Read every image and mask of the splits. Nothing raises: all faults end in the report.

    `progress` counts over all splits together.
    """
    pairs = [(split, index) for split in splits for index in range(len(source.names(split)))]
    results = in_threads(lambda i: _check_pair(source, *pairs[i]), len(pairs), workers, progress)
    faults: list[Fault] = []
    pixels: dict[Split, PixelCounts] = {}

    def histograms(images: int) -> Iterator[np.ndarray | None]:
        for found, counted in islice(results, images):
            faults.extend(found)
            yield counted

    for split in splits:
        names = source.names(split)
        pixels[split] = PixelCounts.of_histograms(names, histograms(len(names)))
        if pixels[split].complete:
            store(source, split, pixels[split])
    meaning, notes = judge(source, joined([*pixels.values()]))
    counts = {split: _counts(source, pixels[split]) for split in splits}
    return Report(faults, meaning, notes, counts, pixels)


def _counts(source: Source, pixels: PixelCounts) -> SplitCounts:
    images, presence = pixels.images, pixels.presence
    per_class = {name: int(images[number]) for number, name in enumerate(source.info.classes, start=1)}
    read = pixels.sizes > 0
    unlabelled = [
        name for name, ids, one in zip(presence.names, presence.classes, read, strict=True) if one and not ids
    ]
    return SplitCounts(len(pixels.names), per_class, unlabelled)


def _check_pair(source: Source, split: Split, index: int) -> tuple[list[Fault], np.ndarray | None]:
    """The faults of a pair, and the pixels of each value in its mask if that could be read."""
    where = f"{source.info.name} {split} '{source.names(split)[index]}'"
    faults: list[Fault] = []
    image: Image.Image | None = None
    mask: np.ndarray | None = None
    try:
        image = source.image(split, index)
    except UserError as error:
        faults.append(fault_of(error, where))
    try:
        mask = source.mask(split, index)
    except UserError as error:
        faults.append(fault_of(error, where))
    if image is not None and mask is not None and image.size != mask.shape[::-1]:
        sizes = f"the image is {image.width}×{image.height} but its mask {mask.shape[1]}×{mask.shape[0]}"
        faults.append(Fault(where, sizes, "export both at one size", SIZES))
    return faults, None if mask is None else histogram(mask)
