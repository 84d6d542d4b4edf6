"""COCO: one JSON file of images, annotations and categories; polygons or run lengths.

The file is scanned once, entry by entry. An annotation is read again when its image is drawn. So COCO's own training
set, 450 MB, takes only the memory of its list of images.

Several polygons of an annotation are one object, and a polygon inside the others is a hole. A crowd (iscrowd 1) counts
as not annotated. But CVAT and Datumaro write iscrowd 1 for every object with run lengths: brush masks and ellipses. So
an annotation with CVAT's attributes is an object, and all are if most annotations of a file are crowds.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from incseg.data.annotated import (
    Annotated,
    ImageFiles,
    Labelled,
    Region,
    Scan,
    Size,
    as_ring,
    clean_name,
    empty_note,
    labelled_size,
    left_out,
    missing_note,
    subset_of,
)
from incseg.data.files import FileError
from incseg.data.json_parts import BROKEN, MOST_BYTES, parts, read_part
from incseg.data.outlines import area, runs_of_text
from incseg.data.writing import Writer, plain, size_of
from incseg.io import replacing
from incseg.types import IGNORE, UserError

_GLANCE = 1 << 16
"""Bytes at the start and at the end of a file that show what it is."""


class Coco(Annotated):
    """COCO's instances JSON, also as CVAT, Roboflow and Label Studio export it: polygons and run lengths.

    The files can be anywhere under the root: annotations/instances_train2017.json, train/_annotations.coco.json. The
    split follows from their names and folders.
    """

    format = "coco"

    def scan(self) -> Scan:
        names: dict[str, None] = {}
        found = Scan([], {"train": [], "val": [], "test": [], "": []}, used=set())
        seen: dict[Path, Path] = {}
        missing, empty, number, segmented = list[str](), 0, 0, 0
        for file in annotation_files(self.images):
            index = index_of(file)
            names |= dict.fromkeys(index.names.values())
            key = self.images.key(file)
            subset = subset_of(key)
            segmented, number = segmented + index.segmented, number + len(index.images)
            if index.strays:
                found.notes.append(f"{key}: {index.strays} annotations refer to no image of the file and are left out")
            if index.brush:
                found.notes.append(f"{key}: most annotations are crowds, so iscrowd is read as run lengths, not crowds")
            for i, (name, _, _) in enumerate(index.images):
                if (image := self.images.find(name, file)) is None:
                    missing.append(name)
                    continue
                if image in seen:
                    raise FileError(file, f"'{name}' is in '{self.images.key(seen[image])}' too", "keep one of them")
                seen[image] = file
                empty += index.starts[i] == index.starts[i + 1]
                found.subsets[subset].append(Labelled(image, file, i))
            assert found.used is not None
            found.used |= index.used
        if seen and not segmented:
            raise UserError(f"the annotations of '{self.root}' are boxes without outlines; export polygons or masks")
        if missing and not seen:
            raise UserError(f"no image of the annotations is under '{self.root}' ('{missing[0]}' …); put them there")
        found.names = [*names]
        found.notes += [*missing_note(missing, number), *empty_note(empty)]
        return found

    def shapes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        index = index_of(item.file)
        _, width, height = index.images[item.labels]
        size = labelled_size(item, width, height, sizes)
        first, last = index.starts[item.labels], index.starts[item.labels + 1]
        if (total := int(index.lengths[first:last].sum())) > MOST_BYTES:
            fault = f"the annotations of '{item.image.name}' take {total // 1_000_000} MB"
            raise FileError(item.file, fault, f"at most {MOST_BYTES // 1_000_000} MB are allowed for one image")
        regions: list[Region] = []
        remarks: list[str] = []
        with item.file.open("rb") as stream:
            for at in range(first, last):
                one = read_part(stream, int(index.offsets[at]), int(index.lengths[at]))
                self._add(one, item, index, size, regions, remarks)
        return size, regions, remarks

    def _add(
        self, one: dict[str, Any], item: Labelled, index: _Index, size: Size, regions: list[Region], remarks: list[str]
    ) -> None:
        shape = one.get("segmentation")
        crowd = _is_crowd(one) and not index.brush
        label = IGNORE if crowd else self.label(index.names.get(one["category_id"]), item.file)
        if not shape:
            remarks.append("objects with a box but no outline")
        elif isinstance(shape, dict):
            regions.append(Region(label, runs=_runs(shape, size, item)))
        else:
            rings = [as_ring(ring, pairs=False) for ring in (shape if isinstance(shape[0], list) else [shape])]
            reasons = [left_out(ring, size) for ring in rings]
            remarks += [f"polygons {reason}" for reason in reasons if reason]
            if shown := [ring for ring, reason in zip(rings, reasons, strict=True) if not reason]:
                regions.append(Region(label, shown))


@dataclass
class _Index:
    """The places of the annotations of each image in a file.

    images:    the name, width and height of each image.
    names:     names of the categories by id.
    starts:    (images + 1,) the first annotation of each image in `offsets` and `lengths`.
    strays:    annotations of images that the file does not list.
    segmented: annotations that have an outline.
    brush:     whether iscrowd means run lengths.
    used:      the names of categories that have annotations.
    """

    images: list[tuple[str, Any, Any]] = field(default_factory=list)
    names: dict[Any, str] = field(default_factory=dict)
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    strays: int = 0
    segmented: int = 0
    brush: bool = False
    used: set[str] = field(default_factory=set)


def annotation_files(images: ImageFiles) -> list[Path]:
    """Return the JSON files with instances. In a folder with instances_*.json, all other files are left out."""
    files, chosen = images.with_suffix(".json"), []
    for file in files:
        instances = any(other.parent == file.parent and other.name.startswith("instances") for other in files)
        if (not instances or file.name.startswith("instances")) and looks_like_coco(file):
            chosen.append(file)
    if not chosen:
        raise UserError(f"'{images.root}' has no JSON file of COCO, with images, annotations and categories; put it "
                        "there, or choose another --data")  # fmt: skip
    return chosen


def looks_like_coco(file: Path) -> bool:
    """Return whether a JSON file is an object with two of COCO's three members near its start or its end.

    Datumaro's own format has members of these names too, but its categories are no list.
    """
    with file.open("rb") as stream:
        text = stream.read(_GLANCE)
        stream.seek(max(0, file.stat().st_size - _GLANCE))
        text += stream.read()
    if not text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") or re.search(rb'"categories"\s*:\s*\{', text):
        return False
    return sum(member in text for member in (b'"images"', b'"annotations"', b'"categories"')) > 1


def index_of(file: Path) -> _Index:
    """Return the index of a file, which is built again only if the file has changed."""
    stat = file.stat()
    return _index(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _index(file: Path, size: int, modified: int) -> _Index:
    index, owners, crowds = _Index(), array("q"), 0
    offsets, lengths = array("q"), array("q")
    image_ids: list[Any] = []
    numbers: dict[Any, int] = {}
    used: set[Any] = set()
    for part in parts(file):
        if isinstance(part.value, dict) and "segments_info" in part.value:
            raise FileError(file, "has panoptic segments, which are not read", "export instances instead")
        try:
            if part.name == "images":
                one = part.value
                image_ids.append(one["id"])
                index.images.append((str(one["file_name"]), one.get("width"), one.get("height")))
            elif part.name == "categories":
                index.names[part.value["id"]] = clean_name(str(part.value["name"]))
            elif part.name == "annotations":
                owners.append(numbers.setdefault(part.value["image_id"], len(numbers)))
                offsets.append(part.offset)
                lengths.append(part.length)
                used.add(part.value["category_id"])
                crowds += _is_crowd(part.value)
                index.segmented += bool(part.value.get("segmentation"))
        except BROKEN as error:
            what = f"the entry at byte {part.offset} of '{part.name}' is not one of COCO ({error})"
            raise FileError(file, what, "export it again") from None
    if not index.names or not index.images:
        absent = "categories" if index.images else "images"
        raise FileError(file, f"it has no {absent}", "export it as COCO with images, annotations and categories")
    index.names = dict(sorted(index.names.items(), key=lambda pair: (str(type(pair[0])), pair[0])))
    _drop_placeholder(index, used)
    index.used = {index.names[i] for i in used if i in index.names}
    index.brush = 2 * crowds > len(owners)
    order = {numbers[i]: at for at, i in enumerate(image_ids) if i in numbers}
    owner = np.array([order.get(i, -1) for i in range(len(numbers))] or [-1], dtype=np.int64)
    of_image = owner[np.frombuffer(owners, dtype=np.int64)] if len(owners) else np.zeros(0, dtype=np.int64)
    by_image = np.argsort(of_image, kind="stable")
    index.offsets = np.frombuffer(offsets, dtype=np.int64)[by_image]
    index.lengths = np.frombuffer(lengths, dtype=np.int64)[by_image]
    index.starts = np.searchsorted(of_image[by_image], np.arange(len(index.images) + 1))
    index.strays = int((of_image < 0).sum())
    return index


def _drop_placeholder(index: _Index, used: set[Any]) -> None:
    """Drop the category 0 that Roboflow puts before its classes: the name of the project, without annotations."""
    first = next(iter(index.names))
    if first == 0 and first not in used and len(index.names) > 1 and used:
        del index.names[first]


def _is_crowd(one: dict[str, Any]) -> bool:
    """Return whether an annotation is a crowd. One with the attribute that CVAT gives every shape is a brush mask."""
    return bool(one.get("iscrowd")) and "occluded" not in (one.get("attributes") or {})


def _runs(shape: dict[str, Any], size: Size, item: Labelled) -> np.ndarray:
    counts = shape["counts"]
    runs = runs_of_text(counts) if isinstance(counts, str) else np.array(counts, dtype=np.int64)
    height, width = shape["size"]
    if (width, height) != size or runs.ndim != 1 or (runs < 0).any() or runs.sum() != width * height:
        fault = f"run lengths of '{item.image.name}' do not fill its {size[0]}×{size[1]} pixels"
        raise FileError(item.file, fault, "export them again")
    return runs


class CocoWriter(Writer):
    """images/ and annotations/instances_default.json, or instances_train.json and instances_val.json."""

    format = "coco"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams: dict[str, IO[str]] = {}
        self._images: dict[str, list[dict[str, Any]]] = {}
        self._begun: set[str] = set()
        self._written = 0

    def image_file(self, name: str, split: str) -> Path:
        return self.out / "images" / name

    def write(self, name: str, image: Path, mask: np.ndarray, split: str) -> None:
        if split not in self._streams:
            file = self.out / "annotations" / f"instances_{split or 'default'}.json"
            temporary = self._open.enter_context(replacing(file))
            self._streams[split] = self._open.enter_context(temporary.open("w", encoding="utf-8"))
            self._streams[split].write('{"annotations": [')
        images = self._images.setdefault(split, [])
        width, height = size_of(mask)
        number = len(images) + 1
        images.append({"id": number, "file_name": image.name, "width": width, "height": height})
        stream = self._streams[split]
        for label, ring in self.objects(mask):
            (left, top), (right, bottom) = ring.min(0), ring.max(0)
            self._written += 1
            stream.write(",\n" if split in self._begun else "\n")
            self._begun.add(split)
            one = {
                "id": self._written,
                "image_id": number,
                "category_id": self.number_of(label) + 1,
                "segmentation": [[plain(value) for value in ring.ravel()]],
                "area": plain(area(ring)),
                "bbox": [plain(left), plain(top), plain(right - left), plain(bottom - top)],
                "iscrowd": 0,
            }
            json.dump(one, stream)

    def finish(self) -> None:
        categories = [{"id": i, "name": name, "supercategory": ""} for i, name in enumerate(self.names, start=1)]
        for split, stream in self._streams.items():
            rest = {"images": self._images[split], "categories": categories}
            text = json.dumps(rest, ensure_ascii=False, indent=1).removeprefix("{")
            stream.write(f"],{text}\n")
