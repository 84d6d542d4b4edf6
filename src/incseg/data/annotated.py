"""The base of datasets whose labels are shapes or colours: COCO, LabelMe, YOLO, CVAT, Label Studio.

A reader finds images with their labels (`scan`) and draws the labels of one image (`draw`). The rest is common:

Images. Only files under the root are opened. A name in an annotation file is matched with their paths from the end: a
path from another machine matches the file of that name, and `../../secret` matches nothing.
Labelled or not. An image with an entry is labelled; if the entry has no shape, all of the image is background. An image
without an entry or without a label file is not labelled yet. It is left out, and a note gives the number of these.
Classes. Classes are numbered in the order of the format's own numbers or list. "background" is 0; "ignore", "void" and
the like are not annotated, 255.
Overlap. Smaller objects are drawn over larger ones.
Orientation. Labels refer to the image as viewers show it. If the width and height of the entry fit only the stored
pixels, labels refer to the stored pixels and are transposed like the image.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import unicodedata
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
from PIL import Image

from incseg.data.files import (
    SIZES,
    FileError,
    FileSource,
    PairFiles,
    PathLike,
    overlap_note,
    stored_size,
    text_lines,
    turn_of,
)
from incseg.data.folder import IMAGE_SUFFIXES, chosen_splits, first_three, read_classes, require_folder
from incseg.data.json_parts import BROKEN, MOST_BYTES
from incseg.data.outlines import Patch, Ring, area, fill_all, pixels_of_runs
from incseg.data.source import Split
from incseg.io import counted
from incseg.types import BACKGROUND, IGNORE, MAX_CLASSES, DatasetInfo, UserError

Size = tuple[int, int]
"""Width and height."""
_VERSION = 2
"""Version of the rule from shapes to pixels, part of the fingerprint."""
_MOST_WORK = 10_000_000_000
"""Limit on the pixels in the boxes of all objects of an image. Drawing as many takes about a minute."""
_CROSSING = 20
"""Cost of a row that an edge crosses, in drawn pixels."""

IGNORE_NAME = "__ignore__"
"""LabelMe's name for pixels that are not annotated. All our writers use it."""
_BACKGROUND_NAMES = {"background", "_background_", "__background__"}
_IGNORE_NAMES = {IGNORE_NAME, "ignore", "ignored", "void", "unlabelled", "unlabeled"}
_IMAGE_FOLDERS = {"images", "jpegimages", "img", "imgs"}
_LABEL_FOLDERS = {"annotations", "masks", "segmentationclass", "segmentationobject"}
_UPLOAD = re.compile(r"^[0-9a-f]{8}(-|__)")
"""What Label Studio puts before the names of files: for uploads a dash follows, for local files two underscores."""
_SUBSET = re.compile(r"(?:^|[^a-z])(train|training|val|valid|validation|test|testing)\d*(?:[^a-z]|$)")


@dataclass(frozen=True)
class Labelled:
    """An image with its labels.

    file:   the file with its labels.
    labels: what the reader needs to find them in this file.
    more:   other files with its labels.
    """

    image: Path
    file: Path
    labels: Any = None
    more: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return self.file, *self.more


@dataclass
class Scan:
    """The images and classes that a reader has found.

    names:   names of the classes, in the order of their numbers.
    subsets: images by "train", "val", "test", or "" if the dataset does not divide them.
    used:    the names that have objects; None if the reader does not know them.
    """

    names: Sequence[str]
    subsets: dict[str, list[Labelled]]
    notes: list[str] = field(default_factory=list)
    used: set[str] | None = None


@dataclass
class Region:
    """An object: polygons, COCO's run lengths of the whole image, or pixels of a part of the image."""

    label: int
    rings: Sequence[Ring] = ()
    runs: np.ndarray | None = None
    patch: Patch | None = None

    @property
    def area(self) -> float:
        if self.runs is not None:
            return float(self.runs[1::2].sum())
        return float(self.patch[2].sum()) if self.patch is not None else sum(map(area, self.rings))

    def pixels(self, size: Size) -> Patch:
        if self.runs is not None:
            return 0, 0, pixels_of_runs(self.runs, *size)
        return self.patch if self.patch is not None else fill_all(self.rings, *size)

    def work(self, size: Size) -> float:
        """Return the approximate cost of drawing, in pixels."""
        if self.patch is not None or not len(self.rings):
            return float(np.prod(size))
        points = np.concatenate(list(self.rings))
        box = float(np.prod(np.clip(np.ptp(points, axis=0), 1, size)))
        rows = np.clip(np.abs(np.diff(points[:, 1])), 0, size[1]).sum()
        return box * len(self.rings) + _CROSSING * float(rows)


class Annotated(FileSource):
    """Images whose labels are not index masks; see the top of this module."""

    preset = "laptop"
    own = True
    format: ClassVar[str]
    """Its name on the command line."""

    def __init__(self, root: PathLike, classes_file: PathLike | None = None) -> None:
        self.root = require_folder(root)
        self.images = ImageFiles(self.root)
        try:
            scan = self.scan()
        except UserError:
            raise
        except (OSError, *BROKEN) as error:
            reason = " ".join(str(error).split())[:100]
            raise UserError(f"'{root}' cannot be read as {self.format} ({reason}); export it again") from error
        self.notes: list[str] = [f"{self.format}: {note}" for note in scan.notes]
        self.label_of, classes = self._numbered(scan)
        if classes_file is not None:
            classes = _renamed(classes, classes_file)
        self.info = DatasetInfo(self.format, classes, has_background=True)
        self._items = self._split(scan.subsets)
        self._files = {split: self._pair_files(items) for split, items in self._items.items()}
        self.notes += overlap_note(self.format, self.names("train"), self.names("val"))

    @abstractmethod
    def scan(self) -> Scan:
        """Find images, their labels and the names of classes. The shapes themselves are read later, when drawn."""

    def shapes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        """Return the size at which an image was labelled, its objects, and why others are left out.

        sizes: of the image as shown and as stored. Labels must have one of these sizes.
        """
        raise NotImplementedError

    def draw(self, item: Labelled, sizes: Sequence[Size]) -> np.ndarray:
        """Return the mask of an image at the size at which it was labelled."""
        size, regions, _ = self.shapes(item, sizes)
        return paint(regions, size, str(item.file))

    def files(self, split: Split) -> PairFiles:
        return self._files[split]

    def mask(self, split: Split, index: int) -> np.ndarray:
        item = self._items[split][index]
        sizes = shown, _ = _sizes_of(item.image)
        mask = self._guarded(self.draw, item, sizes)
        if mask.shape[::-1] == shown:
            return mask
        return np.asarray(Image.fromarray(mask).transpose(turn_of(item.image)))

    def remarks(self, split: Split, index: int) -> Sequence[str]:
        if type(self).shapes is Annotated.shapes:
            return ()
        item = self._items[split][index]
        return tuple(self._guarded(self.shapes, item, _sizes_of(item.image))[2])

    def _guarded(self, read: Any, item: Labelled, sizes: Sequence[Size]) -> Any:
        try:
            return read(item, sizes)
        except UserError:
            raise
        except OSError as error:
            raise FileError(item.file, f"cannot be read ({error.strerror or error})", "restore it") from None
        except BROKEN as error:
            reason = " ".join(str(error).split())[:100]
            fault = f"the labels of '{item.image.name}' are not those of {self.format} ({reason})"
            raise FileError(item.file, fault, "export them again") from error

    def fingerprint(self, split: Split) -> str:
        table = sorted((repr(name), label) for name, label in self.label_of.items())
        reading = f"{self.format} {_VERSION} {table} {self.files(split).fingerprint()}"
        return hashlib.sha256(reading.encode("utf-8", "surrogateescape")).hexdigest()

    def label(self, name: Any, where: PathLike) -> int:
        """Return the number of a class."""
        if (label := self.label_of.get(name)) is None:
            raise FileError(where, f"the class {name!r} is not in the list of names", "add it there, or correct it")
        return label

    def _numbered(self, scan: Scan) -> tuple[dict[str, int], tuple[str, ...]]:
        names = [clean_name(name) for name in scan.names]
        folded = [name.casefold() for name in names]
        special = {name for name, fold in zip(names, folded, strict=True) if fold in _BACKGROUND_NAMES | _IGNORE_NAMES}
        classes = list(dict.fromkeys(name for name in names if name not in special))
        if len(classes) > MAX_CLASSES and scan.used is not None:
            classes = [name for name in classes if name in scan.used]
        if not 1 <= len(classes) <= MAX_CLASSES:
            remedy = "label with a few classes" if classes else "label some objects first"
            raise UserError(f"'{self.root}' has {len(classes)} classes as {self.format}, and 1 to {MAX_CLASSES} "
                            f"are allowed; {remedy}")  # fmt: skip
        label_of = {name: number for number, name in enumerate(classes, start=1)}
        for name in special:
            label_of[name] = BACKGROUND if name.casefold() in _BACKGROUND_NAMES else IGNORE
            if label_of[name] == IGNORE and (scan.used is None or name in scan.used):
                self.notes.append(f"{self.format}: '{name}' is read as not annotated")
        return label_of, tuple(classes)

    def _split(self, subsets: dict[str, list[Labelled]]) -> dict[Split, list[Labelled]]:
        rest, train = subsets.get("", []), subsets.get("train", [])
        val, test = subsets.get("val", []), subsets.get("test", [])
        if not (rest or train or val or test):
            raise UserError(
                f"'{self.root}' has no labelled image as {self.format}; label some, or choose another --data"
            )
        if (rest or train) and (val or test):
            if val and test:
                self.notes.append(f"{self.format}: {counted(len(test), 'image')} of the test set left out")
            return {"train": rest + train, "val": val or test}
        named = {self._name(item.image): item for item in [*rest, *train, *val, *test]}
        if len(named) < len(rest + train + val + test):
            self._require_names([item.image for item in [*rest, *train, *val, *test]])

        def listed(file: Path) -> list[str] | None:
            return self._listed(file, named)

        splits, notes = chosen_splits(self.root, self.format, sorted(named), listed)
        self.val_given = (self.root / "val.txt").is_file()
        self.notes += notes
        return {split: [named[name] for name in names] for split, names in splits.items()}

    def _listed(self, file: Path, named: dict[str, Labelled]) -> list[str] | None:
        """Return the names of the images in a list of names, files or paths; None if the list divides nothing."""
        found, unknown = [], []
        for line in (line.strip() for line in text_lines(file)):
            path = self.images.find(line)
            name = line if line in named else self._name(path) if path is not None else None
            if name in named:
                found.append(str(name))
            elif line:
                unknown.append(line)
        if unknown:
            fault = f"{len(unknown)} of {len(found) + len(unknown)} names have no labelled image"
            raise FileError(file, f"{fault} ({first_three(unknown)})", "add the images or delete the lines")
        return list(dict.fromkeys(found))

    def _name(self, image: Path) -> str:
        """Return the path under the root without suffix and without folders named images or the like."""
        path = PurePosixPath(self.images.key(image))
        return "/".join([*(part for part in path.parent.parts if part.lower() not in _IMAGE_FOLDERS), path.stem])

    def _pair_files(self, items: Sequence[Labelled]) -> PairFiles:
        self._require_names([item.image for item in items])
        names = tuple(self._name(item.image) for item in items)
        labels = tuple(dict.fromkeys(file for item in items for file in item.files))
        return PairFiles(names, tuple(item.image for item in items), labels)

    def _require_names(self, images: Iterable[Path]) -> None:
        """Refuse two images of one name, and names that cannot be printed."""
        known: dict[str, Path] = {}
        for image in images:
            name = self._name(image)
            if name in known:
                one, other = self.images.key(known[name]), self.images.key(image)
                what = f"'{one}' and '{other}' share the name '{name}'" if one != other else f"'{one}' is listed twice"
                raise UserError(f"{what} in '{self.root}'; rename or remove one")
            if not name.isprintable():
                raise UserError(f"the name {name!r} in '{self.root}' has unprintable characters; rename the file")
            known[name] = image


def paint(regions: Iterable[Region], size: Size, where: str) -> np.ndarray:
    """Draw the mask of an image: smaller objects over larger ones; of the same area, later ones over earlier ones."""
    ordered = sorted(regions, key=lambda region: -region.area)
    if sum(region.work(size) for region in ordered) > _MOST_WORK:
        raise FileError(where, f"its {len(ordered)} objects are too large to be drawn", "label with fewer objects")
    mask = np.full(size[::-1], BACKGROUND, dtype=np.uint8)
    for region in ordered:
        left, top, pixels = region.pixels(size)
        mask[top : top + pixels.shape[0], left : left + pixels.shape[1]][pixels] = region.label
    return mask


def as_ring(points: Any, pairs: bool = True) -> Ring:
    """Return the points of a polygon, [[x, y], …] or flat, as (N, 2)."""
    ring = np.array(points, dtype=np.float64)
    if not pairs or ring.size == 0:
        ring = ring.reshape(-1, 2)
    if ring.ndim != 2 or ring.shape[1] != 2:
        raise ValueError(f"points of shape {ring.shape}")
    if not np.isfinite(ring).all():
        raise ValueError("a coordinate is not a number")
    return ring


def left_out(ring: Ring, size: Size) -> str | None:
    """Return why a polygon is left out; None if it is not."""
    if len(ring) < 3:
        return "with fewer than 3 points"
    low, high = ring.min(0), ring.max(0)
    return "outside the image" if (low >= size).any() or (high <= 0).any() else None


def labelled_size(item: Labelled, width: Any, height: Any, sizes: Sequence[Size]) -> Size:
    """Return the size in the entry of an image, or that of the image if there is none. It must be one of `sizes`."""
    if not width or not height:
        return sizes[0]
    if (int(width), int(height)) not in sizes:
        shown = f"the image is {sizes[0][0]}×{sizes[0][1]} but was labelled at {int(width)}×{int(height)}"
        raise FileError(item.image, shown, "export both at one size", SIZES)
    return int(width), int(height)


def read_text(file: Path) -> bytes:
    """Return the content of a file with the labels of one image. Refuse a large file."""
    if (size := file.stat().st_size) > MOST_BYTES:
        raise FileError(file, f"has {size // 1_000_000} MB, more than the {MOST_BYTES // 1_000_000} allowed for one "
                        "image", "export it with fewer points")  # fmt: skip
    return file.read_bytes()


def png_of_text(text: str, most: Size) -> Image.Image:
    """Return a PNG in Base64. Refuse one that is larger than its image before it is decoded."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text)), formats=("PNG",))
        if fits := image.width <= most[0] and image.height <= most[1]:
            image.load()
    except Exception as error:  # the decoder of a damaged file can raise nearly anything
        raise ValueError("a mask that cannot be read") from error
    if not fits:
        raise ValueError("a mask larger than the image")
    return image


def clean_name(name: str) -> str:
    """Return the name of a class without blanks around it, on one line."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def subset_of(text: str) -> str:
    """Return "train", "val" or "test" if a name or path has such a word, else ""; of several words the last."""
    found = _SUBSET.findall(text.lower().replace("/", " / "))
    return {"tr": "train", "va": "val", "te": "test"}[found[-1][:2]] if found else ""


def missing_note(missing: Sequence[str], number: int) -> list[str]:
    """Return a note if an annotation file lists images that do not exist."""
    if not missing:
        return []
    return [
        f"{len(missing)} of {number} images are not under the root and are left out ({first_three(missing)}); add them "
        "beside the labels"
    ]


def unlabelled_note(images: Sequence[str], number: int, how: str) -> list[str]:
    """Return a note if there are images without labels. `how` is the advice for an image without objects."""
    if not images:
        return []
    return [
        f"{len(images)} of {number} images have no labels yet and are left out ({first_three(images)}); for an image "
        f"without any object {how}"
    ]


def empty_note(number: int) -> list[str]:
    """Return a note if there are images whose entry has no object."""
    some = "1 image has" if number == 1 else f"{number} images have"
    return [f"{some} an entry without any object and count as background"] if number else []


class ImageFiles:
    """The files under a root: images by name, and files by suffix. Nothing else is ever opened."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._paths: dict[str, Path] = {}
        self._keys: dict[Path, str] = {}
        for path in _walk(root):
            key = unicodedata.normalize("NFC", path.relative_to(root).as_posix())
            self._paths[key], self._keys[path] = path, key
            if path.suffix.lower() in IMAGE_SUFFIXES:
                self._by_name[key.rpartition("/")[2]].append(key)

    def key(self, path: Path) -> str:
        """Return the path of a file under the root."""
        return self._keys[path]

    def path(self, key: str) -> Path | None:
        """Return the file of exactly this path under the root."""
        return self._paths.get(unicodedata.normalize("NFC", key))

    def with_suffix(self, *suffixes: str) -> list[Path]:
        return [path for path in self._paths.values() if path.suffix.lower() in suffixes]

    def images(self) -> list[Path]:
        return self.with_suffix(*IMAGE_SUFFIXES)

    def under(self, key: str) -> list[Path]:
        """Return the images in the folder of exactly this path under the root, and in its subfolders."""
        return [image for image in self.images() if self._keys[image].startswith(f"{key}/")]

    def beside(self, path: Path) -> Path | None:
        """Return the image that differs from a file in its suffix alone."""
        stem = self.key(path).removesuffix(path.suffix)
        return next((self._paths[f"{stem}{end}"] for end in _suffixes() if f"{stem}{end}" in self._paths), None)

    def find(self, name: str, beside: Path | None = None) -> Path | None:
        """Return the image for a name or path in an annotation file: the one whose path has the longest common end.

        Of several, prefer one outside folders of masks, then one below the folder of the file `beside`, then one whose
        path names the same subset. If there is none, try the name without the prefix of Label Studio.
        """
        near = self.key(beside) if beside is not None else ""
        plain = unicodedata.normalize("NFC", name.replace("\\", "/"))
        for text in dict.fromkeys((plain, unquote(plain), without_upload(unquote(plain).rpartition("/")[2]))):
            wanted = [part for part in text.split("/") if part not in ("", ".", "..")]
            keys = self._by_name.get(wanted[-1], []) if wanted else []
            ranked = sorted(
                ((agreement(key.split("/"), wanted), _nearness(key, near), key) for key in keys), reverse=True
            )
            if len(ranked) > 1 and ranked[0][:2] == ranked[1][:2]:
                raise UserError(
                    f"'{name}' can be '{ranked[1][2]}' or '{ranked[0][2]}' in '{self.root}'; rename one of them"
                )
            if ranked:
                return self._paths[ranked[0][2]]
        return None


def _suffixes() -> Iterator[str]:
    yield from IMAGE_SUFFIXES
    yield from (suffix.upper() for suffix in IMAGE_SUFFIXES)


def agreement(parts: Sequence[str], others: Sequence[str]) -> int:
    """Return the number of parts that two paths have in common at their ends."""
    number = 0
    for own, other in zip(reversed(parts), reversed(others), strict=False):
        if own != other:
            break
        number += 1
    return number


def _nearness(key: str, near: str) -> tuple[bool, bool, bool]:
    folder = near.rpartition("/")[0]
    is_photograph = _LABEL_FOLDERS.isdisjoint(key.lower().split("/")[:-1])
    return (
        is_photograph,
        bool(folder) and key.startswith(f"{folder}/"),
        bool(near) and subset_of(key) == subset_of(near),
    )


def without_upload(name: str) -> str:
    """Return the name of a file without the prefix of Label Studio."""
    return _UPLOAD.sub("", name)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files under a folder in order. Follow links to folders; visit each folder once."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _sizes_of(image: Path) -> tuple[Size, Size]:
    """Return (width, height) of an image as shown and as stored."""
    stored, sideways = stored_size(image)
    return (stored[::-1] if sideways else stored), stored


def _renamed(classes: Sequence[str], file: PathLike) -> tuple[str, ...]:
    names = read_classes(file)
    if len(names) != len(classes):
        raise FileError(
            file,
            f"it has {len(names)} names, but the dataset has {len(classes)} classes ({first_three(list(classes))})",
            "give one name for each, in the order of incseg data check",
        )
    return names
