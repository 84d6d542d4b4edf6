"""Datasets by name. A new one is a file here and a line in SOURCES; from outside, `package.module:Class`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from incseg.data.ade20k import ADE20k
from incseg.data.coco import Coco
from incseg.data.cvat import Cvat
from incseg.data.detect import AUTO, detect, formats_in
from incseg.data.folder import Folder
from incseg.data.labelme import LabelMe
from incseg.data.labelstudio import LabelStudio
from incseg.data.shapes import Shapes
from incseg.data.source import Source
from incseg.data.voc import VOC
from incseg.data.yolo import Yolo
from incseg.io import find_class
from incseg.types import DatasetInfo, UserError

SOURCES: dict[str, type[Source]] = {
    "shapes": Shapes, "voc": VOC, "ade20k": ADE20k, "folder": Folder, "coco": Coco, "labelme": LabelMe, "yolo": Yolo,
    "cvat": Cvat, "labelstudio": LabelStudio,
}  # fmt: skip
OWN = frozenset(name for name, kind in SOURCES.items() if kind.own)
"""The kinds of datasets that people label themselves."""
_EMBEDDED = "shapes"


def find_source(name: str) -> type[Source]:
    """Return the class behind a name of SOURCES or behind `package.module:Class`."""
    if name == AUTO:
        return Folder  # all formats that can be detected share its preset
    return find_class("dataset", name, SOURCES, Source)


def detected(name: str, root: str | Path | None) -> str:
    """Return the name of a dataset. For "auto", detect the format of the folder if it exists."""
    is_there = root is not None and Path(root).expanduser().is_dir()
    return detect(root) if name == AUTO and root is not None and is_there else name


def dataset_info(name: str) -> DatasetInfo:
    """Return the name and classes of a dataset, without its files."""
    kind = find_source(name)
    if not hasattr(kind, "info"):
        where = "in its classes.txt" if name == "folder" else "known once it is open"
        raise UserError(f"the classes of a {name} are {where}; give --root")
    return kind.info


def build_source(name: str, root: str | Path | None = None, **options: Any) -> Source:
    """Open a dataset. `options` are the options of its class."""
    name = detected(name, root)
    kind = find_source(name)
    if name == _EMBEDDED or (root is None and name not in (*SOURCES, AUTO)):
        return kind(**options)
    if root is None:
        raise UserError(f"dataset '{name}' needs its folder; give --root DIR")
    try:
        return kind(root, **options)  # type: ignore[call-arg]
    except UserError as error:
        others = formats_in(Path(root).expanduser()) if kind.own and Path(root).expanduser().is_dir() else []
        if not others or name in others:
            raise
        raise UserError(f"{error}; the folder looks like {' and '.join(others)}: try --data {others[0]}") from error
