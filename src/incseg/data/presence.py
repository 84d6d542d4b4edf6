"""The class-presence index: which classes are in which image, computed once and cached as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from incseg.data.files import FileError, PathLike, text_lines
from incseg.data.source import Source, Split
from incseg.files import cache_path, write_text
from incseg.types import BACKGROUND, IGNORE, UserError

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Presence:
    """`classes[i]` are the foreground ids, ascending from 1, in the image `names[i]`."""

    names: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...]


def classes_in(mask: np.ndarray) -> tuple[int, ...]:
    """The foreground ids of a mask, ascending; background and void are left out."""
    counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)
    counts[[BACKGROUND, IGNORE]] = 0
    return tuple(np.flatnonzero(counts).tolist())


def read_presence(path: PathLike, num_classes: int) -> Presence:
    """Read lines "name id id …" with ids from zero over the foreground, as they circulate.

    A name with blanks in it is followed by a tab.
    """
    index: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        if "\t" in line:
            name, _, rest = line.partition("\t")
            ids = rest.split()
        else:
            name, *ids = line.split()
        where = f"{path}:{number}"
        if name in index:
            raise FileError(where, f"'{name}' comes twice", "keep one of the two lines")
        for text in ids:
            if not text.isdecimal() or len(text) > 9 or int(text) >= num_classes:
                raise FileError(
                    where,
                    f"'{text}' is not a class",
                    f"ids run from 0, the first foreground class, to {num_classes - 1}",
                )
        index[name] = tuple(sorted({int(text) + 1 for text in ids}))
    if not index:
        raise FileError(path, "it is empty", "write one line 'name id id …' per image")
    return Presence(tuple(index), tuple(index.values()))


def write_presence(path: PathLike, presence: Presence) -> None:
    """Write what `read_presence` reads, whole or not at all."""
    lines = []
    for name, ids in zip(presence.names, presence.classes, strict=True):
        start = f"{name}\t" if " " in name else name
        lines.append(" ".join([start, *(str(i - 1) for i in ids)]) + "\n")
    write_text(Path(path), "".join(lines))


def presence_of(
    source: Source,
    split: Split,
    file: PathLike | None = None,
    cache_dir: PathLike | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Presence:
    """The index of a split in the order of its names.

    From `file` if given, else from what the source knows, else from the cache, else from every mask, read in
    `workers` threads (as many as there are cores) and then cached.
    """
    names, num_classes = tuple(source.names(split)), len(source.info.classes)
    if file is not None:
        return _in_order(read_presence(file, num_classes), names, f"{source.info.name} {split}", file)
    known = source.known_presence(split)
    if known is not None:
        return Presence(names, tuple(known))
    cached = cached_presence(source, split, cache_dir)
    # A cache that cannot be read is computed again, one that cannot be written is done without.
    with suppress(UserError):
        presence = read_presence(cached, num_classes)
        if presence.names == names:
            return presence
    found = in_threads(lambda index: classes_in(source.mask(split, index)), len(names), workers, progress)
    presence = Presence(names, tuple(found))
    with suppress(OSError):
        write_presence(cached, presence)
    return presence


def cached_presence(source: Source, split: Split, cache_dir: PathLike | None = None) -> Path:
    """The file that caches the index of a split."""
    folder = Path(cache_dir).expanduser() if cache_dir is not None else cache_path("presence")
    return folder / f"{source.info.name}-{split}-{source.fingerprint(split)[:32]}.txt"


def in_threads(
    read: Callable[[int], _Result], total: int, workers: int | None, progress: Progress | None
) -> Iterator[_Result]:
    """read(0), read(1), … in order. Threads, because Pillow decodes outside Python's lock."""
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    try:
        for done, result in enumerate(pool.map(read, range(total)), start=1):
            if progress is not None:
                progress(done, total)
            yield result
    finally:  # also on Ctrl-C, which must not wait for the files not yet begun
        pool.shutdown(cancel_futures=True)


def _in_order(presence: Presence, names: Sequence[str], what: str, file: PathLike) -> Presence:
    index = dict(zip(presence.names, presence.classes, strict=True))
    missing = [name for name in names if name not in index]
    foreign = sorted(index.keys() - set(names))
    for fault, some in (("has no line for", missing), ("has lines for images that are not in it:", foreign)):
        if some:
            shown = ", ".join(some[:3]) + (", …" if len(some) > 3 else "")
            raise FileError(
                file,
                f"{what} has {len(names)} images and the file {fault} {len(some)} ({shown})",
                "give the presence file of this split, or none to read the masks",
            )
    return Presence(tuple(names), tuple(index[name] for name in names))
