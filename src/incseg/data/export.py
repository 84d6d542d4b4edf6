"""Write any source as a folder that the `folder` dataset reads: images, index masks, class names, lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from incseg.data.files import FileSource
from incseg.data.presence import Progress
from incseg.data.source import SPLITS, Source, Split
from incseg.files import replacing, write_text
from incseg.types import UserError


def export(
    source: Source,
    out: Path,
    splits: Sequence[Split] = SPLITS,
    limit: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the first `limit` pairs of each split to `out`; returns how many were written."""
    _require_elsewhere(source, out)
    chosen = [(split, i) for split in splits for i in range(len(source.names(split)))[:limit]]
    palette = source.palette.flatten().tolist()
    for done, (split, index) in enumerate(chosen, start=1):
        image, mask = source.pair(split, index)
        name = f"{source.names(split)[index]}.png"
        painted = Image.fromarray(mask)
        painted.putpalette(palette)
        for folder, picture in (("images", image), ("masks", painted)):
            with replacing(out / folder / name) as temporary:
                picture.save(temporary, format="PNG")
        if progress is not None:
            progress(done, len(chosen))
    for split in splits:
        names = [source.names(s)[i] for s, i in chosen if s == split]
        write_text(out / f"{split}.txt", "".join(f"{name}\n" for name in names))
    lines = ("background", *source.info.classes) if source.info.has_background else source.info.classes
    write_text(out / "classes.txt", "".join(f"{name}\n" for name in lines))
    return len(chosen)


def _require_elsewhere(source: Source, out: Path) -> None:
    """Refuse a folder that the dataset itself is read from: its images and masks would be replaced."""
    if not isinstance(source, FileSource):
        return
    files = [file for split in SPLITS for file in (*source.files(split).images, *source.files(split).masks)]
    read_from = {folder.resolve() for folder in {file.parent for file in files}}
    for folder in (out / "images", out / "masks"):
        if folder.resolve() in read_from:
            raise UserError(
                f"the dataset is read from '{folder}', and the export would replace it; choose another --out"
            )
