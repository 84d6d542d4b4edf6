"""Write images with labels for other tools: what the writers of all formats have in common.

A writer takes one image at a time and copies it unchanged. Areas become polygons along pixel edges, and the reader of
the format turns them back into exactly the same pixels. Several classes never share a polygon.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import numpy as np
from PIL import Image

from incseg.data.annotated import IGNORE_NAME, Size
from incseg.data.folder import flat_name
from incseg.data.outlines import Ring, outlines
from incseg.io import replacing
from incseg.types import BACKGROUND, IGNORE, UserError


class Writer(ABC):
    """Write a dataset to a new folder; a context manager.

    out:       the folder, which must be new or empty.
    classes:   names, id 1 first.
    palette:   (256, 3) colours by id.
    tolerance: largest error of polygons in pixels. A larger one gives fewer points; 0 is exact.
    """

    format: ClassVar[str]

    def __init__(self, out: Path, classes: Sequence[str], palette: np.ndarray, tolerance: float = 0.0) -> None:
        require_new(out)
        self.out, self.classes, self.palette, self.tolerance = out, tuple(classes), palette, tolerance
        self.void_shown = False
        self._taken: set[str] = set()
        self._open = ExitStack()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            with self._open:
                self.finish()
        else:
            self._open.__exit__(kind, error, at)

    def add(self, name: str, image: Path | Image.Image, mask: np.ndarray, split: str = "") -> None:
        """Write an image and its mask of ids.

        name:  a name or a path, from which the name of the file is made.
        split: "train" or "val"; empty to let the reader choose.
        """
        flat = flat_name(name, self._taken)
        suffix = image.suffix if isinstance(image, Path) else ".png"
        self.void_shown |= bool((mask == IGNORE).any())
        target = self.image_file(flat + suffix, split)
        with replacing(target) as temporary:
            if isinstance(image, Path):
                shutil.copyfile(image, temporary)
            else:
                image.save(temporary, format="PNG")
        self.write(flat, target, mask, split)

    @abstractmethod
    def image_file(self, name: str, split: str) -> Path:
        """Return the file to write an image to."""

    @abstractmethod
    def write(self, name: str, image: Path, mask: np.ndarray, split: str) -> None:
        """Write the labels of an image."""

    @abstractmethod
    def finish(self) -> None:
        """Write the files that need all images: lists and names."""

    @property
    def names(self) -> list[str]:
        """The names of classes, and IGNORE_NAME last if some mask has pixels that are not annotated."""
        return [*self.classes, IGNORE_NAME] if self.void_shown else [*self.classes]

    def name_of(self, label: int) -> str:
        return IGNORE_NAME if label == IGNORE else self.classes[label - 1]

    def number_of(self, label: int) -> int:
        """Return the position of a label in `names`, from 0."""
        return len(self.classes) if label == IGNORE else label - 1

    def objects(self, mask: np.ndarray) -> Iterator[tuple[int, Ring]]:
        """Yield the label and polygon of each object; connected pixels of a class are one."""
        for label in np.unique(mask).tolist():
            if label != BACKGROUND:
                yield from ((label, ring) for ring in outlines(mask == label, self.tolerance))


def size_of(mask: np.ndarray) -> Size:
    return mask.shape[1], mask.shape[0]


def plain(value: float) -> int | float:
    """Return a coordinate as an int if it is a whole number, else rounded to three decimals."""
    return int(value) if value == int(value) else round(value, 3)


def require_new(out: Path) -> None:
    """Refuse a folder that is not empty: labels corrected there would be lost."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out '{out}' exists and is not an empty folder; choose a new one")
