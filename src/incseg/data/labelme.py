"""LabelMe: a JSON file of shapes beside each image."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from incseg.data.annotated import (
    Annotated,
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
    png_of_text,
    subset_of,
    unlabelled_note,
)
from incseg.data.files import FileError, text_lines
from incseg.data.json_parts import BROKEN, MOST_BYTES
from incseg.data.outlines import Patch, ellipse, rectangle
from incseg.data.writing import Writer, plain, size_of
from incseg.io import write_json, write_text
from incseg.types import UserError

_MOST_FILE = 512_000_000
"""Limit on the bytes of a file. Most of them can be the image itself, which is removed before the rest is parsed."""
_IMAGE_DATA = re.compile(rb'"imageData"\s*:\s*"[A-Za-z0-9+/=\\\s]*"')
_VERSION = "5.5.0"
"""The version of LabelMe that our files name. LabelMe warns about other versions."""


class LabelMe(Annotated):
    """LabelMe's JSON beside each image: polygons, masks, rectangles and circles. labels.txt can list the classes.

    Without labels.txt, classes are numbered in alphabetical order. Folders named train and val are the splits.
    """

    format = "labelme"

    def scan(self) -> Scan:
        subsets: dict[str, list[Labelled]] = {"train": [], "val": [], "test": [], "": []}
        listed = self.images.path("labels.txt")
        names: set[str] = set()
        found: dict[Path, Path] = {}
        missing, empty, number = list[str](), 0, 0
        for file in self.images.with_suffix(".json"):
            image = self.images.beside(file)
            if listed is None or image is None:
                content = read_labelme(file)
                if content is None:
                    continue
                names |= {clean_name(str(shape["label"])) for shape in content["shapes"]}
                empty += not content["shapes"]
                if image is None:
                    image = self.images.find(str(content.get("imagePath") or file.stem), file)
            number += 1
            if image is None:
                missing.append(self.images.key(file))
                continue
            if image in found:
                raise FileError(file, f"it labels the image of '{self.images.key(found[image])}' too", "keep one")
            found[image] = file
            subsets[subset_of(self.images.key(file))].append(Labelled(image, file))
        if missing and not found:
            raise UserError(f"no image is beside the labels in '{self.root}' ('{missing[0]}' …); put them there")
        if not number:
            raise UserError(f"no JSON file of LabelMe is under '{self.root}'; choose another --data")
        images = self.images.images()
        notes = missing_note(missing, number) + empty_note(empty)
        without = [self.images.key(image) for image in images if image not in found]
        notes += unlabelled_note(without, len(images), "save its file in LabelMe without shapes")
        if listed is None:
            return Scan(sorted(names, key=str.casefold), subsets, notes, names)
        return Scan([line.strip() for line in text_lines(listed) if line.strip()], subsets, notes)

    def shapes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        content = read_labelme(item.file)
        if content is None:
            raise FileError(item.file, "it has no shapes", "save it in LabelMe again")
        size = labelled_size(item, content.get("imageWidth"), content.get("imageHeight"), sizes)
        regions: list[Region] = []
        remarks: list[str] = []
        for shape in content["shapes"]:
            label = self.label(clean_name(str(shape["label"])), item.file)
            kind, points = shape.get("shape_type") or "polygon", as_ring(shape["points"])
            if kind == "mask":
                regions.append(Region(label, patch=_mask(shape["mask"], points, size)))
                continue
            ring = _ring(kind, points)
            reason = f"of the kind {str(kind)[:20]!r}" if ring is None else left_out(ring, size)
            if reason or ring is None:
                remarks.append(f"shapes {reason}")
            else:
                regions.append(Region(label, [ring]))
        return size, regions, remarks


def read_labelme(file: Path) -> dict[str, Any] | None:
    """Return the content of a file without an embedded image; None if the file is from another tool."""
    if (size := file.stat().st_size) > _MOST_FILE:
        raise FileError(file, f"has {size // 1_000_000} MB", "save it in LabelMe without the image data")
    text = file.read_bytes()
    if b'"shapes"' not in text:
        return None
    text = _IMAGE_DATA.sub(b'"imageData": null', text)
    if len(text) > MOST_BYTES:
        raise FileError(file, f"its shapes take {len(text) // 1_000_000} MB, and {MOST_BYTES // 1_000_000} are allowed",
                        "label with fewer points")  # fmt: skip
    try:
        content = json.loads(text)
    except BROKEN as error:
        reason = " ".join(str(error).split())[:100]
        raise FileError(file, f"is not a valid file of LabelMe ({reason})", "save it again") from None
    return content if isinstance(content, dict) and isinstance(content.get("shapes"), list) else None


def _ring(kind: str, points: np.ndarray) -> np.ndarray | None:
    """Return the outline of a shape; None for lines, points and unknown kinds."""
    if kind in ("polygon", "oriented_rectangle"):
        return points
    if kind == "rectangle" and len(points) == 2:
        (left, top), (right, bottom) = points.min(0), points.max(0)
        return rectangle(left, top, right, bottom)
    if kind == "circle" and len(points) == 2:
        radius = float(np.hypot(*(points[1] - points[0])))
        return ellipse(points[0, 0], points[0, 1], radius, radius)
    return None


def _mask(text: str, points: np.ndarray, size: Size) -> Patch:
    """Return the pixels of a mask shape: a PNG as text. The two points are its first and its last pixel; if the mask
    was dragged, they are between pixels."""
    left, top = np.ceil(points[0] - 0.5).astype(np.int64).tolist()
    width, height = np.rint(np.diff(points[:2], axis=0)[0] + 1).astype(np.int64).tolist()
    image = png_of_text(text, size)
    if image.size != (width, height):
        raise ValueError(f"a mask of {image.width}×{image.height} pixels in a box of another size")
    pixels = np.asarray(image.convert("L")) > 0
    pixels = pixels[max(0, -top) : max(0, size[1] - top), max(0, -left) : max(0, size[0] - left)]
    return max(0, left), max(0, top), pixels


class LabelMeWriter(Writer):
    """NAME.json beside each image, in train/ and val/ where there are splits; labels.txt for `labelme --labels`."""

    format = "labelme"

    def image_file(self, name: str, split: str) -> Path:
        return self.out / split / name

    def write(self, name: str, image: Path, mask: np.ndarray, split: str) -> None:
        width, height = size_of(mask)
        shapes: list[dict[str, Any]] = [
            {
                "label": self.name_of(label),
                "points": [[plain(x), plain(y)] for x, y in ring],
                "group_id": None,
                "description": "",
                "shape_type": "polygon",
                "flags": {},
            }
            for label, ring in self.objects(mask)
        ]
        content: dict[str, Any] = {
            "version": _VERSION,
            "flags": {},
            "shapes": shapes,
            "imagePath": image.name,
            "imageData": None,
            "imageHeight": height,
            "imageWidth": width,
        }
        write_json(image.with_suffix(".json"), content)

    def finish(self) -> None:
        write_text(self.out / "labels.txt", "".join(f"{name}\n" for name in ["_background_", *self.names]))
