"""Walk a whole dataset, open every pair, and list everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from incseg.data.files import FileError
from incseg.data.presence import Progress, classes_in, in_threads
from incseg.data.source import SPLITS, Source, Split
from incseg.types import UserError


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file, and what to do about it."""

    file: str
    fault: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}" + (f"; {self.remedy}" if self.remedy else "")


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
    """All faults of a dataset and what it holds. Only faults make it not `ok`."""

    faults: list[Fault]
    counts: dict[Split, SplitCounts]

    @property
    def ok(self) -> bool:
        return not self.faults

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
    report = Report(
        [],
        {split: SplitCounts(len(source.names(split)), dict.fromkeys(source.info.classes, 0)) for split in splits},
    )
    for (split, index), (faults, ids) in zip(pairs, results, strict=True):
        report.faults += faults
        if ids is None:
            continue
        counts = report.counts[split]
        for i in ids:
            counts.images_per_class[source.info.classes[i - 1]] += 1
        if not ids:
            counts.unlabelled.append(source.names(split)[index])
    return report


def _check_pair(source: Source, split: Split, index: int) -> tuple[list[Fault], tuple[int, ...] | None]:
    """The faults of a pair, and the ids in its mask if that could be read."""
    where = f"{source.info.name} {split} '{source.names(split)[index]}'"
    faults: list[Fault] = []
    image: Image.Image | None = None
    mask: np.ndarray | None = None
    try:
        image = source.image(split, index)
    except UserError as error:
        faults.append(_fault(error, where))
    try:
        mask = source.mask(split, index)
    except UserError as error:
        faults.append(_fault(error, where))
    if image is not None and mask is not None and image.size != mask.shape[::-1]:
        sizes = f"the image is {image.width}×{image.height} but its mask {mask.shape[1]}×{mask.shape[0]}"
        faults.append(Fault(where, sizes, "export both at one size"))
    return faults, None if mask is None else classes_in(mask)


def _fault(error: UserError, where: str) -> Fault:
    if isinstance(error, FileError):
        return Fault(error.file, error.fault, error.remedy)
    return Fault(where, str(error), "")
