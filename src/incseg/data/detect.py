"""Detect the format of a folder of labels."""

from __future__ import annotations

from pathlib import Path

from incseg.data.annotated import ImageFiles
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
    found = formats_in(require_folder(root))
    if len(found) == 1:
        return found[0]
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
        elif _has_shapes(path):
            found.append("labelme")
    if {"data.yaml", "data.yml", "dataset.yaml", "obj.names"} & names or ("classes.txt" in names and _is_yolo(files)):
        found.append("yolo")
    return list(dict.fromkeys(found))


def _has_shapes(path: Path) -> bool:
    with path.open("rb") as stream:
        return b'"shapes"' in stream.read(1 << 16)


def _is_yolo(files: ImageFiles) -> bool:
    return any(files.beside(path) or "labels" in files.key(path).split("/") for path in files.with_suffix(".txt"))
