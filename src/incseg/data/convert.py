"""Write any dataset in the format of a labelling tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from incseg.data.coco import CocoWriter
from incseg.data.cvat import CvatWriter
from incseg.data.extended import Extended
from incseg.data.files import FileSource
from incseg.data.folder import export
from incseg.data.labelme import LabelMeWriter
from incseg.data.labelstudio import LabelStudioWriter
from incseg.data.presence import Progress
from incseg.data.source import SPLITS, Source, Split
from incseg.data.writing import Writer, require_new
from incseg.data.yolo import YoloWriter
from incseg.types import UserError

WRITERS: dict[str, type[Writer]] = {
    writer.format: writer for writer in (CocoWriter, LabelMeWriter, YoloWriter, CvatWriter, LabelStudioWriter)
}
FOLDER = "folder"
_MOST_TOLERANCE = 100
FORMATS = (FOLDER, *WRITERS)
TOLERANCE_HELP = (
    "largest error of polygons: a larger one gives fewer points, which are easier to correct; parts with an area below "
    "its square are left out (default: 0, exact)"
)


def require_tolerance(value: float) -> None:
    if not 0 <= value <= _MOST_TOLERANCE:
        raise UserError(f"--tolerance is {value:g}; give pixels, 0 to {_MOST_TOLERANCE}, such as 1.5")


def convert(
    source: Source,
    to: str,
    out: Path,
    splits: Sequence[Split] = SPLITS,
    limit: int | None = None,
    tolerance: float = 0.0,
    progress: Progress | None = None,
) -> int:
    """Write the first `limit` images of each split with their labels to a new folder. Return the number written."""
    if to == FOLDER:
        require_new(out)
        return export(source, out, splits, limit, progress)
    chosen = [(split, i) for split in splits for i in range(len(source.names(split)))[:limit]]
    with WRITERS[to](out, source.info.classes, source.palette, tolerance) as writer:
        for done, (split, index) in enumerate(chosen, start=1):
            image, mask = source.pair(split, index)
            writer.add(source.names(split)[index], _file(source, split, index) or image, mask, split)
            if progress is not None:
                progress(done, len(chosen))
    return len(chosen)


def _file(source: Source, split: Split, index: int) -> Path | Image.Image | None:
    """Return the file of an image, to copy it unchanged; None if the image has no file."""
    while isinstance(source, Extended):
        source = source.inner
    return source.files(split).images[index] if isinstance(source, FileSource) else None
