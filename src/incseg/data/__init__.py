"""Datasets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from incseg.data.ade20k import ADE20k
from incseg.data.folder import Folder
from incseg.data.shapes import Shapes
from incseg.data.source import Source
from incseg.data.voc import VOC
from incseg.names import require_known
from incseg.types import DatasetInfo, UserError

SOURCES: dict[str, type[Source]] = {"shapes": Shapes, "voc": VOC, "ade20k": ADE20k, "folder": Folder}
_EMBEDDED = "shapes"


def dataset_info(name: str) -> DatasetInfo:
    """Names and classes of a dataset, without its files."""
    require_known("dataset", name, SOURCES)
    if name == "folder":
        raise UserError("the classes of a folder are in its classes.txt; give --root")
    return SOURCES[name].info


def build_source(name: str, root: str | Path | None = None, **options: Any) -> Source:
    """Open a dataset; `options` are those of its class."""
    require_known("dataset", name, SOURCES)
    if name == _EMBEDDED:
        return SOURCES[name](**options)
    if root is None:
        raise UserError(f"dataset '{name}' needs its folder; give --root DIR")
    return SOURCES[name](root, **options)  # type: ignore[call-arg]
