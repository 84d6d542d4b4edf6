"""Unlabelled images of a class, for replay: a folder of images for each class, or a generator."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from incseg.data.files import PairFiles, PathLike, as_rgb, read_image
from incseg.data.folder import IMAGE_SUFFIXES
from incseg.io import import_named
from incseg.types import UserError

Picture = Callable[[], Image.Image]
"""Function that returns an RGB image. Equal functions return equal images."""


@dataclass(frozen=True)
class _File:
    path: Path

    def __call__(self) -> Image.Image:
        return read_image(self.path)


class Unlabelled(ABC):
    """A source of replay images of a class."""

    @abstractmethod
    def require(self, names: Sequence[str]) -> None:
        """Raise a UserError unless there are images of every class. Do not read or make any yet."""

    @abstractmethod
    def pictures(self, name: str, most: int, seed: int) -> list[Picture]:
        """Return at least one and at most `most` images of a class, the same for the same seed."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the images, as far as they are known in advance."""


class ImageFolders(Unlabelled):
    """root/CLASS/*.jpg and the like: one folder per class, named by the class as the dataset spells it.

    If a folder has more images than needed, they are chosen evenly from its sorted names.
    """

    def __init__(self, root: PathLike) -> None:
        self.root = Path(root).expanduser()

    def require(self, names: Sequence[str]) -> None:
        for name in names:
            self._files(name)

    def pictures(self, name: str, most: int, seed: int) -> list[Picture]:
        files = self._files(name)
        chosen = np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int)
        return [_File(files[i]) for i in chosen]

    def fingerprint(self) -> str:
        """Return a digest of the names and bytes of all images: a copy of the folders has the same one."""
        digest = hashlib.sha256()
        for name in self._classes():
            files = tuple(self._files(name))
            content = PairFiles((), files, ()).fingerprint()
            digest.update(f"{name}\t{content}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _classes(self) -> list[str]:
        if not self.root.is_dir():
            raise UserError(f"no folder '{self.root}' to replay from; give one that has a folder of images per class")
        return sorted(folder.name for folder in self.root.iterdir() if folder.is_dir() and folder.name[0] != ".")

    def _files(self, name: str) -> list[Path]:
        folder = self.root / name
        if not folder.is_dir():
            there = self._classes()
            listed = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
            raise UserError(
                f"'{self.root}' has no folder for the class '{name}', but {listed or 'none at all'}; make one folder "
                "of images per class, named as the dataset spells it"
            )
        return image_files(folder)


def image_files(folder: Path) -> list[Path]:
    """Return the images directly in a folder, by name."""
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder; give one that has images in it")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in IMAGE_SUFFIXES and f.name[0] != ".")
    if not files:
        raise UserError(f"'{folder}' has no image; put some of type {', '.join(IMAGE_SUFFIXES)} directly into it")
    return files


class Generator(Unlabelled):
    """A callable of the user's own, `package.module:callable`, imported when it is first needed.

    It is called as generator(class_name, count, seed), with the class as the dataset spells it, and returns `count`
    Pillow images or fewer, the same ones for the same arguments.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def require(self, names: Sequence[str]) -> None:
        self._callable()

    def pictures(self, name: str, most: int, seed: int) -> list[Picture]:
        made = list(self._callable()(name, most, seed))[:most]
        if not made or not all(isinstance(image, Image.Image) for image in made):
            raise UserError(
                f"generator '{self.name}' gave {_kinds(made)} for the class '{name}'; it must return a list of "
                f"{most} Pillow images"
            )
        return [partial(as_rgb, image) for image in made]

    def fingerprint(self) -> str:
        """Return its name: its images are not known in advance."""
        return self.name

    def _callable(self) -> Callable[[str, int, int], Sequence[Any]]:
        found = import_named("generator", self.name, "package.module:callable")
        if not callable(found):
            raise UserError(
                f"generator '{self.name}' is {type(found).__name__}, not callable; give a function of "
                "(class_name, count, seed) that returns Pillow images"
            )
        return found


def _kinds(made: Sequence[Any]) -> str:
    return " and ".join(sorted({type(item).__name__ for item in made})) or "nothing"
