"""YOLO segmentation: a text file of polygons for each image, names in data.yaml, classes.txt or obj.names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import yaml

from incseg.data.annotated import (
    Annotated,
    Labelled,
    Region,
    Scan,
    Size,
    as_ring,
    clean_name,
    empty_note,
    left_out,
    read_text,
    subset_of,
    unlabelled_note,
    without_upload,
)
from incseg.data.files import BOXES, FileError, text_lines
from incseg.data.folder import first_three
from incseg.data.writing import Writer, size_of
from incseg.io import parse_yaml, write_text
from incseg.types import UserError

_MOST_YAML = 1_000_000
_FARTHEST = 4.0
"""Coordinates are shares of the image's sides. An object may reach outside; a larger value is probably in pixels."""
_LISTS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
_NAMES = ("classes.txt", "obj.names")


class Yolo(Annotated):
    """YOLO segmentation as Ultralytics, Roboflow, CVAT and Label Studio export it: a text file of polygons per image.

    NAME.txt is in labels/ if the image is in images/, or beside the image. data.yaml has the names and the splits.
    """

    format = "yolo"

    def scan(self) -> Scan:
        self._names: dict[int, str] = {}
        self._uploads: dict[str, list[Path]] = defaultdict(list)
        for path in self.images.with_suffix(".txt"):
            if (name := without_upload(path.name)) != path.name:
                self._uploads[self.images.key(path).removesuffix(path.name) + name].append(path)
        file, settings = self._settings()
        subsets: dict[str, list[Labelled]] = {"train": [], "val": [], "test": [], "": []}
        notes: list[str] = []
        chosen: dict[str, list[Path]] = {}
        for subset in ("train", "val", "test"):
            given = settings.get(subset) or (settings.get("valid") if subset == "val" else None)
            if given is None:
                continue
            places = [str(place) for place in (given if isinstance(given, list) else [given])]
            images = [image for place in places for image in self._images_in(place, settings.get("path"), file)]
            if images:
                chosen[subset] = list(dict.fromkeys(images))
            elif subset != "test":
                notes.append(f"'{subset}: {first_three(places)[1:-1]}' of {file.name} leads to no image here")
        if chosen.get("train") == chosen.get("val"):  # Ultralytics needs both, so some tools write one twice
            chosen.pop("val", None)
        self._undivided = [*chosen] == ["train"] and str(settings["train"]).endswith(".txt")
        if "train" not in chosen and "val" not in chosen:
            chosen = self._by_folder()
        without, empty, number = list[str](), 0, 0
        for subset, images in chosen.items():
            for image in images:
                labels = self._labels(image)
                number += 1
                if labels is None:
                    without.append(self.images.key(image))
                    continue
                empty += labels.stat().st_size == 0
                subsets[subset].append(Labelled(image, labels))
        notes += empty_note(empty) + unlabelled_note(without, number, "write an empty NAME.txt")
        return Scan([*self._names.values()], subsets, notes)

    def _settings(self) -> tuple[Path, dict[str, Any]]:
        """Return the file that names the classes, and its other settings."""
        others = sorted(self.images.key(path) for path in self.images.with_suffix(".yaml", ".yml"))
        for key in dict.fromkeys([*_LISTS, *(key for key in others if "/" not in key), *others]):
            if (path := self.images.path(key)) is not None:
                settings = _read_yaml(path)
                if isinstance(settings, dict) and "names" in settings:
                    names = settings["names"]
                    pairs = names.items() if isinstance(names, dict) else enumerate(names)
                    self._names = {int(i): clean_name(str(name)) for i, name in sorted(pairs, key=lambda p: int(p[0]))}
                    return path, settings
        for key in _NAMES:
            if (path := self.images.path(key)) is not None:
                lines = [line.strip() for line in text_lines(path)]
                self._names = {i: clean_name(line) for i, line in enumerate(lines) if line}
                return path, {"train": self._own_list("train"), "val": self._own_list("valid", "val")}
        raise UserError(f"no names of classes are in '{self.root}'; add data.yaml with names:, or classes.txt")

    def _own_list(self, *names: str) -> str | None:
        return next((f"{name}.txt" for name in names if self.images.path(f"{name}.txt") is not None), None)

    def _by_folder(self) -> dict[str, list[Path]]:
        """Return the images in folders named images, or all if there are none, by the subset that their path names."""
        every = self.images.images()
        inside = [image for image in every if "images" in PurePosixPath(self.images.key(image).lower()).parts[:-1]]
        found: dict[str, list[Path]] = {}
        for image in inside or every:
            found.setdefault(subset_of(self.images.key(image)), []).append(image)
        return found

    def _images_in(self, place: str, path: Any, file: Path) -> list[Path]:
        """Return the images of a folder, or of a list of images, that data.yaml names.

        All must be under the root. Of a path to another place only the end counts: other machines and Roboflow write
        such paths.
        """
        base = self.images.key(file).rpartition("/")[0]
        joined = "/".join(str(part) for part in (base, path, place) if part)
        for text in (joined, f"{base}/{place}", place):
            parts = [part for part in text.replace("\\", "/").split("/") if part not in ("", ".", "..")]
            for first in range(len(parts) + 1):
                key = "/".join(parts[first:])
                if key.endswith(".txt") and (listing := self.images.path(key)) is not None:
                    found = [self.images.find(line.strip(), listing) for line in text_lines(listing) if line.strip()]
                    return [image for image in found if image is not None]
                if key and (inside := self.images.under(key)):
                    return inside
        return []

    def _listed(self, file: Path, named: dict[str, Labelled]) -> list[str] | None:
        """Return the images in a list; None for a train.txt that data.yaml names without val: it has all images."""
        own = self._undivided and file.name == "train.txt" and self.images.path("val.txt") is None
        return None if own else super()._listed(file, named)

    def _labels(self, image: Path) -> Path | None:
        """Return the text file of an image: in labels/ instead of images/, or beside it."""
        path = PurePosixPath(self.images.key(image)).with_suffix(".txt")
        parts = list(path.parts)
        at = [i for i, part in enumerate(parts[:-1]) if part == "images"]
        options = ["/".join([*parts[:i], "labels", *parts[i + 1 :]]) for i in reversed(at)]
        options += [str(path), f"labels/{path.name}"]
        lists = {f"{name}.txt" for name in ("train", "val", "valid", "test", "classes")}
        found = (self.images.path(option) or self._uploaded(option) for option in options if option not in lists)
        return next((one for one in found if one is not None), None)

    def _uploaded(self, key: str) -> Path | None:
        """Return the text file that Label Studio has named after an uploaded image."""
        files = self._uploads.get(key, [])
        if len(files) > 1:
            raise FileError(files[0], f"'{files[1].name}' is for the same image", "keep one of them")
        return files[0] if files else None

    def shapes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        size = sizes[0]
        regions: list[Region] = []
        remarks: list[str] = []
        for number, line in enumerate(read_text(item.file).decode("utf-8-sig").splitlines(), start=1):
            words = line.split()
            if not words:
                continue
            where = f"{item.file}:{number}"
            values = [float(word) for word in words]
            if values[0] not in self._names:
                some = ", ".join(str(i) for i in list(self._names)[:12])
                raise FileError(
                    where, f"the class {words[0]} has no name", f"names are given for {some} …; add it there"
                )
            if len(values) == 5:
                raise FileError(where, "it is a box, not a polygon", "export for segmentation", BOXES)
            label = self.label(self._names[int(values[0])], where)
            # One more number may follow the points: a track of CVAT or a score of Ultralytics.
            ring = as_ring(values[1 : len(values) - (len(values) - 1) % 2], pairs=False)
            if np.abs(ring).max(initial=0) > _FARTHEST:
                raise FileError(where, "its points are not between 0 and 1", "divide them by the image's sides")
            ring = ring * size
            if reason := left_out(ring, size):
                remarks.append(f"polygons {reason}")
            else:
                regions.append(Region(label, [ring]))
        return size, regions, remarks


def _read_yaml(path: Path) -> Any:
    try:
        if path.stat().st_size > _MOST_YAML:
            raise FileError(path, "it is too large for a list of names", "shorten it")
        return parse_yaml(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileError(path, f"is not valid YAML ({' '.join(str(error).split())[:100]})", "correct it") from None


class YoloWriter(Writer):
    """images/, labels/, data.yaml; with splits in train/ and val/ of each, otherwise listed in train.txt."""

    format = "yolo"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._splits: dict[str, list[str]] = {}

    def image_file(self, name: str, split: str) -> Path:
        return self.out / "images" / split / name

    def write(self, name: str, image: Path, mask: np.ndarray, split: str) -> None:
        size = size_of(mask)
        lines = []
        for label, ring in self.objects(mask):
            points = " ".join(f"{value:.7f}".rstrip("0").rstrip(".") for value in (ring / size).ravel())
            lines.append(f"{self.number_of(label)} {points}\n")
        write_text(self.out / "labels" / split / f"{name}.txt", "".join(lines))
        self._splits.setdefault(split, []).append(f"./images/{image.name}")

    def finish(self) -> None:
        places: dict[str, Any] = {split: f"images/{split}" for split in self._splits if split}
        if "" in self._splits:  # a list has an order, a folder has none
            write_text(self.out / "train.txt", "".join(f"{line}\n" for line in self._splits[""]))
            places = {"train": "train.txt"}
        # Ultralytics needs both splits. Without "path", places are relative to this file.
        places = {"train": places.get("val"), "val": places.get("train"), **places}
        settings = {**places, "names": dict(enumerate(self.names))}
        write_text(self.out / "data.yaml", yaml.safe_dump(settings, allow_unicode=True, sort_keys=False))
