"""Detect the format of a folder of labels."""

from __future__ import annotations

from pathlib import Path

from incseg.data.annotated import ImageFiles
from incseg.data.brushes import is_brush_png
from incseg.data.coco import looks_like_coco
from incseg.data.cvat import LABELMAP, VALUES_FILE
from incseg.data.folder import require_folder
from incseg.data.labelstudio import looks_like_labelstudio
from incseg.types import UserError

AUTO = "auto"
_MOST_FILES = 50
"""Most JSON files to look into; the others are assumed to be alike."""


def detect(root: str | Path) -> str:
    """Return the name of the format of the labels in a folder."""
    folder = require_folder(root)
    found = formats_in(folder)
    if len(found) == 1:
        return found[0]
    if not found and any(b"<annotation" in _start(path) for path in ImageFiles(folder).with_suffix(".xml")):
        what = f"'{root}' has labels as XML, which are not read"
        raise UserError(f"{what}; export 'COCO 1.0' or 'Segmentation mask 1.1' from CVAT instead")
    what = f"labels of {' and '.join(found)}" if found else "no labels of a known format"
    raise UserError(f"'{root}' has {what}; name the format with --data: folder, coco, labelme, yolo, cvat, labelstudio")


def formats_in(root: Path) -> list[str]:
    """Return the names of the formats whose typical files are in a folder."""
    if (root / "classes.txt").is_file() and (root / "masks").is_dir() and (root / "images").is_dir():
        return ["folder"]
    files = ImageFiles(root)
    names = {path.name for path in files.with_suffix(".txt", ".csv", ".names", ".yaml", ".yml")}
    found = ["cvat"] if {LABELMAP, VALUES_FILE} & names else []
    for path in files.with_suffix(".json")[:_MOST_FILES]:
        if looks_like_labelstudio(path):
            found.append("labelstudio")
        elif looks_like_coco(path):
            found.append("coco")
        elif b'"shapes"' in _start(path):
            found.append("labelme")
    if any(map(is_brush_png, files.images())):
        found.append("labelstudio")
    if {"data.yaml", "data.yml", "dataset.yaml", "obj.names"} & names or ("classes.txt" in names and _is_yolo(files)):
        found.append("yolo")
    return list(dict.fromkeys(found))


def _start(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(1 << 16)


def _is_yolo(files: ImageFiles) -> bool:
    return any(files.beside(path) or "labels" in files.key(path).split("/") for path in files.with_suffix(".txt"))
