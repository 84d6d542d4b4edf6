"""Label Studio's export "Brush labels to PNG": a grey PNG for each stroke.

Its name is task-13-annotation-15-by-1-TAG-LABEL-0.png: the task, its annotation, the annotator, the brush tag and the
label of the interface, and a number. It does not name the image.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from incseg.data.annotated import ImageFiles, Region, Size, clean_name
from incseg.data.files import FileError, read_stored
from incseg.data.outlines import Patch

_NAME = re.compile(r"task-(\d+)-annotation-(\d+|None)-by-[^-]*-(.+)-\d+\.png")
_SLASH = re.compile(r"[/\\]")
_NO_LABEL = "no_label"


def is_brush_png(file: Path) -> bool:
    return _NAME.fullmatch(unicodedata.normalize("NFC", file.name)) is not None


def brush_pngs(images: ImageFiles, tags: Sequence[str], labels: Sequence[str]) -> dict[str, dict[Path, str | None]]:
    """Return the brush PNGs of each task with their labels; of several annotations of a task only the last.

    tags:   names of the brush tags of the interface, if it is known.
    labels: its labels.
    """
    found: dict[str, dict[int, dict[Path, str | None]]] = defaultdict(lambda: defaultdict(dict))
    for file in images.images():
        if match := _NAME.fullmatch(unicodedata.normalize("NFC", file.name)):
            task, annotation, name = match.groups()
            number = 0 if annotation == "None" else int(annotation)
            found[task][number][file] = _label(clean_name(name), file, tags, labels)
    return {task: annotations[max(annotations)] for task, annotations in found.items()}


def _label(name: str, file: Path, tags: Sequence[str], labels: Sequence[str]) -> str | None:
    """Return the label in "TAG-LABEL", None for no label. Both may have dashes: an unknown tag ends at the first.

    Of the labels of a stroke, "TAG-FIRST-SECOND", the first counts, as in JSON. A slash in a label is a dash here.
    """
    if name.endswith(f"-{_NO_LABEL}"):
        return None
    if not labels:
        return name.partition("-")[2]
    starts = {f"{tag}-{_SLASH.sub('-', label)}-": label for tag in tags for label in labels}
    fits = [start for start in starts if f"{name}-".startswith(start)]
    if not fits:
        raise FileError(file, "its label is not in config.xml", "add it there")
    return starts[max(fits, key=len)]


@dataclass
class Brush(Region):
    """A brush PNG of an image of this size. It is read when it is drawn, so that only one is in memory."""

    file: Path = Path()
    size: Size = (0, 0)

    @cached_property
    def area(self) -> float:  # type: ignore[override]
        return float(self.pixels(self.size)[2].sum())

    def pixels(self, size: Size) -> Patch:
        return 0, 0, opaque(np.asarray(read_stored(self.file, [size]).convert("L")))


def opaque(alpha: np.ndarray) -> np.ndarray:
    """Return the pixels of a stroke: at least half of its strongest value, which is 255, or 100 from some models."""
    found: np.ndarray = alpha >= max(1, (int(alpha.max(initial=0)) + 1) // 2)
    return found
