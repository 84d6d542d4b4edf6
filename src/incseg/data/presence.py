"""The class-presence index (which classes are in which image) and pixel counts by value; computed once and cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from incseg.data.extended import Extended
from incseg.data.files import FileError, PathLike, as_file_error, text_lines
from incseg.data.source import SPLITS, Source, Split
from incseg.io import cache_path, first_few, write_array, write_text
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
    """Return the foreground ids of a mask, ascending; background and void are left out."""
    counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)
    counts[[BACKGROUND, IGNORE]] = 0
    return tuple(np.flatnonzero(counts).tolist())


def read_presence(path: PathLike, num_classes: int) -> Presence:
    """Read lines "name id id …" with ids from 0 for the first foreground class, the format of published lists.

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
            raise FileError(where, f"'{name}' is listed twice", "delete one of the two lines")
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
    source: Source, split: Split, file: PathLike | None = None, progress: Progress | None = None
) -> Presence:
    """Return the index of a split in the order of its names.

    It is taken from `file` if given, else from the source, else from the cache. Otherwise all masks are read, and the
    index is cached.
    """
    names, num_classes = tuple(source.names(split)), len(source.info.classes)
    if file is not None:
        return _in_order(read_presence(file, num_classes), names, f"{source.info.name} {split}", file)
    known = source.known_presence(split)
    if known is not None:
        return Presence(names, tuple(known))
    cached = cached_presence(source, split)
    # An index that cannot be read is computed again. Failing to cache it is not an error.
    with suppress(UserError):
        presence = read_presence(cached, num_classes)
        if presence.names == names:
            return presence
    found = in_threads(lambda index: classes_in(source.mask(split, index)), len(names), progress)
    presence = Presence(names, tuple(found))
    with suppress(OSError):
        write_presence(cached, presence)
    return presence


def cached_presence(source: Source, split: Split) -> Path:
    """Return the file that caches the index of a split."""
    return cache_path("presence") / f"{source.info.name}-{split}-{source.fingerprint(split)[:32]}.txt"


def in_threads(read: Callable[[int], _Result], total: int, progress: Progress | None) -> Iterator[_Result]:
    """Yield read(0), read(1), … in order, from a thread per core. Pillow decodes outside Python's lock."""
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
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
            raise FileError(
                file,
                f"{what} has {len(names)} images and the file {fault} {len(some)} ({first_few(some)})",
                "give the presence file of this split, or none to read the masks",
            )
    return Presence(tuple(names), tuple(index[name] for name in names))


VALUES = IGNORE + 1


@dataclass(frozen=True)
class PixelCounts:
    """The pixels of each value in each mask of a split. Zeros are not stored, to save memory.

    names: the images.
    rows:  (K, 3) uint32, each an image's index, a value of its mask and the number of pixels, in ascending order. A
           mask that could not be read has no row.
    """

    names: tuple[str, ...]
    rows: np.ndarray

    @classmethod
    def of_histograms(cls, names: Sequence[str], histograms: Iterable[np.ndarray | None]) -> PixelCounts:
        """Build the counts from (256,) pixels by value for each image; None for an unreadable mask."""
        rows = [np.empty((0, 3), dtype=np.uint32)]
        for index, found in enumerate(histograms):
            if found is not None:
                values = np.flatnonzero(found)
                rows.append(np.stack([np.full_like(values, index), values, found[values]], axis=1).astype(np.uint32))
        return cls(tuple(names), np.concatenate(rows))

    def histogram(self, index: int) -> np.ndarray:
        """Return (256,) int64, the pixels of an image by value."""
        first, last = np.searchsorted(self.rows[:, 0], [index, index + 1])
        found = np.zeros(VALUES, dtype=np.int64)
        found[self.rows[first:last, 1]] = self.rows[first:last, 2]
        return found

    def of(self, value: int) -> np.ndarray:
        """Return (images,) int64, the pixels of a value in each image."""
        rows = self.rows[self.rows[:, 1] == value]
        found = np.zeros(len(self.names), dtype=np.int64)
        found[rows[:, 0]] = rows[:, 2]
        return found

    @property
    def complete(self) -> bool:
        """Whether every mask could be read."""
        return bool(self.sizes.all())

    @property
    def sizes(self) -> np.ndarray:
        """(images,) int64, all pixels of each mask; 0 where it could not be read."""
        found = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(found, self.rows[:, 0], self.rows[:, 2].astype(np.int64))
        return found

    @property
    def totals(self) -> np.ndarray:
        """(256,) int64, the pixels of each value in all images."""
        found = np.zeros(VALUES, dtype=np.int64)
        np.add.at(found, self.rows[:, 1], self.rows[:, 2].astype(np.int64))
        return found

    @property
    def images(self) -> np.ndarray:
        """(256,) int64, the images that show each value."""
        return np.bincount(self.rows[:, 1], minlength=VALUES).astype(np.int64)

    @property
    def presence(self) -> Presence:
        classes: list[list[int]] = [[] for _ in self.names]
        for index, value, _ in self.rows.tolist():
            if value not in (BACKGROUND, IGNORE):
                classes[index].append(value)
        return Presence(self.names, tuple(tuple(ids) for ids in classes))

    def renamed(self, table: np.ndarray) -> PixelCounts:
        """Return the counts with each value v renamed to table[v]; counts of merged values are added."""
        return PixelCounts.of_histograms(
            self.names,
            (
                np.bincount(table, weights=self.histogram(index), minlength=VALUES) if size else None
                for index, size in enumerate(self.sizes)
            ),
        )


def histogram(mask: np.ndarray) -> np.ndarray:
    """Return (256,) int64, the pixels of each value."""
    return np.bincount(mask.ravel(), minlength=VALUES)


def joined(pixels: Sequence[PixelCounts]) -> PixelCounts:
    """Return the images of several splits as one."""
    rows = [np.empty((0, 3), dtype=np.uint32)]
    names: list[str] = []
    for one in pixels:
        rows.append(one.rows + np.array([len(names), 0, 0], dtype=np.uint32))
        names += one.names
    return PixelCounts(tuple(names), np.concatenate(rows))


def pixel_counts(source: Source, progress: Progress | None = None) -> tuple[dict[Split, PixelCounts], list[FileError]]:
    """Return the pixels of each value in the masks of each split, and the faults of masks that cannot be read.

    The counts come from the cache. Otherwise every mask is read, and counts without faults are cached. The
    class-presence index is cached with them, so masks are not read twice.
    """
    pixels = {split: one for split in SPLITS if (one := _cached(source, split)) is not None}
    unread = [split for split in SPLITS if split not in pixels]
    pairs = [(split, index) for split in unread for index in range(len(source.names(split)))]
    results = in_threads(lambda i: _histogram(source, *pairs[i]), len(pairs), progress)
    faults = []

    def histograms(images: int) -> Iterator[np.ndarray | None]:
        for result in islice(results, images):
            if isinstance(result, FileError):
                faults.append(result)
            yield None if isinstance(result, FileError) else result

    for split in unread:
        names = source.names(split)
        pixels[split] = PixelCounts.of_histograms(names, histograms(len(names)))
        if pixels[split].complete:
            store(source, split, pixels[split])
    return {split: pixels[split] for split in SPLITS}, faults


def as_seen_by(source: Source, pixels: Mapping[Split, PixelCounts]) -> dict[Split, PixelCounts]:
    """Return counts of the dataset that `source` wraps in the ids of `source`; unchanged if it wraps none."""
    if not isinstance(source, Extended):
        return dict(pixels)
    seen = {split: one.renamed(source.table) for split, one in as_seen_by(source.inner, pixels).items()}
    for split, one in seen.items():
        if one.complete:
            _store_presence(source, split, one)
    return seen


def store(source: Source, split: Split, pixels: PixelCounts) -> None:
    """Cache the counts of a whole split and the class-presence index. A full disk is not an error."""
    with suppress(OSError):
        write_array(_cache_file(source, split), pixels.rows)
    _store_presence(source, split, pixels)


def _store_presence(source: Source, split: Split, pixels: PixelCounts) -> None:
    file = cached_presence(source, split)
    with suppress(OSError):
        if source.known_presence(split) is None and not file.exists():
            write_presence(file, pixels.presence)


def _histogram(source: Source, split: Split, index: int) -> np.ndarray | FileError:
    try:
        return histogram(source.mask(split, index))
    except UserError as error:
        return as_file_error(error, f"{source.info.name} {split} '{source.names(split)[index]}'")


def _cache_file(source: Source, split: Split) -> Path:
    return cache_path("pixels") / f"{source.info.name}-{split}-{source.fingerprint(split)[:32]}.npy"


def _cached(source: Source, split: Split) -> PixelCounts | None:
    """Return what `store` wrote; None if it is missing or damaged."""
    names = tuple(source.names(split))
    try:
        rows = np.load(_cache_file(source, split), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != np.uint32:
        return None
    images = rows[:, 0].astype(np.int64)
    every_image_in_order = np.array_equal(np.unique(images), np.arange(len(names))) and (np.diff(images) >= 0).all()
    return PixelCounts(names, rows) if every_image_in_order and (rows[:, 1] < VALUES).all() else None
