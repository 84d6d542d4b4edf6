"""Datasets by name. A new one is a file here and a line in SOURCES; from outside, `package.module:Class`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from incseg.data.ade20k import ADE20k
from incseg.data.folder import Folder
from incseg.data.shapes import Shapes
from incseg.data.source import Source
from incseg.data.voc import VOC
from incseg.io import find_class
from incseg.types import DatasetInfo, UserError

SOURCES: dict[str, type[Source]] = {"shapes": Shapes, "voc": VOC, "ade20k": ADE20k, "folder": Folder}
_EMBEDDED = "shapes"


def find_source(name: str) -> type[Source]:
    """Return the class behind a name of SOURCES or behind `package.module:Class`."""
    return find_class("dataset", name, SOURCES, Source)


def dataset_info(name: str) -> DatasetInfo:
    """Return the name and classes of a dataset, without its files."""
    kind = find_source(name)
    if not hasattr(kind, "info"):
        where = "in its classes.txt" if name == "folder" else "known once it is open"
        raise UserError(f"the classes of a {name} are {where}; give --root")
    return kind.info


def build_source(name: str, root: str | Path | None = None, **options: Any) -> Source:
    """Open a dataset; `options` are those of its class."""
    kind = find_source(name)
    if name == _EMBEDDED or (root is None and name not in SOURCES):
        return kind(**options)
    if root is None:
        raise UserError(f"dataset '{name}' needs its folder; give --root DIR")
    return kind(root, **options)  # type: ignore[call-arg]
