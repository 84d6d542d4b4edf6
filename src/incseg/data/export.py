"""Write any source as a folder that the `folder` dataset reads: images, index masks, class names, lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from incseg.data.presence import Progress
from incseg.data.source import SPLITS, Source, Split
from incseg.files import replacing, write_text


def export(
    source: Source,
    out: Path,
    splits: Sequence[Split] = SPLITS,
    limit: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the first `limit` pairs of each split to `out`; returns how many were written."""
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
