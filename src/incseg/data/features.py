"""Feature maps on disk: the output of a frozen backbone for every image of a split, computed once.

A store is a folder of blocks. A block has the maps of some images in half precision, with mirrored ones if needed, and
their masks as dataset ids. It is written whole or not at all, has a checksum, and is mapped into memory when read.
The folder's name is a digest of everything the maps depend on, so all runs, tasks, methods and seeds share it.

A writer holds the folder's lock: two runs do not make the same blocks, and `clear` does not delete them meanwhile. A
reader needs no lock: a mapped block stays readable until the reader ends, even if its file is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from incseg.data.presence import Progress, in_threads
from incseg.io import replacing, write_json
from incseg.types import UserError

BLOCK = 64
"""Images per block: the most work that an interruption loses."""
_ABOUT = "about.json"
_LOCK = ".lock"
_MARGIN = 0.01
"""Share of the size of a cache that must also be free: files take whole blocks of the disk, and runs write too."""
_OUR_FILES = ("block-*.bin", _ABOUT, _LOCK, ".*.tmp")


class StoreUnwritable(Exception):
    """Blocks of a store are missing and cannot be written. The run continues without the store."""


class _Damaged(UserError):
    """A block exists but is damaged."""


@dataclass(frozen=True)
class Layout:
    """The arrays of one image: its stages, each (channels, height, width), and its mask.

    The mask is size × size for the centre of the image, or (height, width) `frame` for the whole image.
    """

    stages: tuple[tuple[int, int, int], ...]
    size: int
    flips: bool
    frame: tuple[int, int] | None = None

    @property
    def mask_shape(self) -> tuple[int, int]:
        return self.frame or (self.size, self.size)

    @property
    def values(self) -> int:
        """Number of half-precision values of one view of an image."""
        return sum(math.prod(stage) for stage in self.stages)

    @property
    def views(self) -> int:
        return 2 if self.flips else 1

    @property
    def bytes_per_image(self) -> int:
        return self.views * self.values * 2 + math.prod(self.mask_shape)

    def split(self, row: np.ndarray) -> list[np.ndarray]:
        """Split (…, values) into one array (…, channels, height, width) per stage."""
        ends = np.cumsum([math.prod(stage) for stage in self.stages])[:-1]
        parts = np.split(row, ends, axis=-1)
        return [part.reshape(*row.shape[:-1], *stage) for part, stage in zip(parts, self.stages, strict=True)]


class FeatureStore:
    """The maps of one split under one key; complete when every block is there."""

    def __init__(self, root: Path, key: dict[str, Any], count: int, layout: Layout) -> None:
        self.key, self.count, self.layout = key, count, layout
        content = [key, layout.stages, layout.size, layout.flips, *([layout.frame] if layout.frame else [])]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        self.folder = root / f"{key['dataset']}-{key['split']}-{digest.hexdigest()[:24]}"
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def blocks_of(self, images: Iterable[int]) -> list[int]:
        """Return the blocks of some images."""
        return sorted({image // BLOCK for image in images})

    def images_of(self, block: int) -> range:
        return range(block * BLOCK, min((block + 1) * BLOCK, self.count))

    def missing(self, blocks: Sequence[int], progress: Progress | None = None) -> tuple[list[int], list[Path]]:
        """Return the blocks still to be made, and the files of those among them that are damaged.

        All others are mapped and checked by their checksums. That takes about a second per gigabyte. It also brings
        them into the system's file cache, from which training reads them.
        """
        faults = list(in_threads(lambda row: self._try_open(blocks[row]), len(blocks), progress))
        to_make = [block for block, fault in zip(blocks, faults, strict=True) if fault is not None]
        return to_make, [self._path(b) for b, f in zip(blocks, faults, strict=True) if isinstance(f, _Damaged)]

    def mark_used(self) -> None:
        with contextlib.suppress(OSError):  # a store of another user is read-only for us
            os.utime(self.folder / _ABOUT)

    @contextlib.contextmanager
    def building(self, busy: Callable[[], None]) -> Iterator[None]:
        """Lock the folder for writing blocks; call `busy` before waiting for another run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder, busy):
            for left in self.folder.glob(".*.tmp"):  # left by a killed process
                left.unlink(missing_ok=True)
            about = {**self.key, "stages": self.layout.stages, "size": self.layout.size, "flips": self.layout.flips}
            write_json(self.folder / _ABOUT, {**about, "frame": self.layout.frame, "images": self.count})
            yield

    def write(self, block: int, maps: np.ndarray, masks: np.ndarray) -> None:
        """Store a block: maps (images, views, values) float16, masks (images, height, width) uint8."""
        body = np.ascontiguousarray(maps, np.float16).tobytes() + np.ascontiguousarray(masks, np.uint8).tobytes()
        with replacing(self._path(block)) as temporary, temporary.open("wb") as stream:
            stream.write(body)
            stream.write(zlib.crc32(body).to_bytes(4, "little"))
        self._open[block] = self._parts(block, np.memmap(self._path(block), dtype=np.uint8, mode="r"))

    def read(self, index: int, flipped: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (values,) float16 and (height, width) uint8 of an image, views of the mapped file."""
        block, row = divmod(index, BLOCK)
        if fault := self._try_open(block):
            raise UserError(
                f"cache block {self._path(block)} cannot be used ({fault}); start the run again to rebuild it"
            ) from fault
        maps, masks = self._open[block]
        if not flipped:
            return maps[row, 0], masks[row]
        return maps[row, 1], masks[row, :, ::-1]

    def _try_open(self, block: int) -> OSError | _Damaged | None:
        """Map and check a block once. Return what is wrong with it, or None."""
        if block in self._open:
            return None
        try:
            raw = np.memmap(self._path(block), dtype=np.uint8, mode="r")
            body, checksum = raw[:-4], raw[-4:].tobytes()
            expected = len(self.images_of(block)) * self.layout.bytes_per_image
            if body.size != expected or zlib.crc32(body.data) != int.from_bytes(checksum, "little"):
                return _Damaged("it is damaged")
        except ValueError:  # an empty file cannot be mapped
            return _Damaged("it is empty")
        except OSError as error:
            return error
        self._open[block] = self._parts(block, raw)
        return None

    def _parts(self, block: int, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, layout = len(self.images_of(block)), self.layout
        end_of_maps = images * layout.views * layout.values * 2
        maps = raw[:end_of_maps].view(np.float16).reshape(images, layout.views, layout.values)
        return maps, raw[end_of_maps:-4].reshape(images, *layout.mask_shape)

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:05d}.bin"


def require_space(stores: Sequence[FeatureStore], images: Sequence[int]) -> None:
    """Refuse before the work begins if the disk cannot hold that many more images of each store."""
    if not stores:
        return
    root = stores[0].folder.parent
    content = sum(store.layout.bytes_per_image * more for store, more in zip(stores, images, strict=True))
    needed = content * (1 + _MARGIN)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise UserError(
            f"the feature cache needs {needed / 1e9:.1f} GB and {root} has {free / 1e9:.1f} GB free; "
            "set INCSEG_CACHE to a larger disk, clear old ones with incseg cache clear, or use --data.cache off"
        )


@dataclass(frozen=True)
class StoredCache:
    """A feature cache found on disk; `about` is empty where its description cannot be read."""

    folder: Path
    about: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(file.lstat().st_size for file in self.files())

    @property
    def images_done(self) -> int:
        blocks = [int(file.stem.removeprefix("block-")) for file in self.folder.glob("block-*.bin")]
        return sum(min(BLOCK, max(0, self.about["images"] - block * BLOCK)) for block in blocks)

    @property
    def last_used(self) -> float:
        return (self.folder / _ABOUT).stat().st_mtime

    def files(self) -> list[Path]:
        return [file for pattern in _OUR_FILES for file in self.folder.glob(pattern)]


def stored_caches(root: Path) -> Iterator[StoredCache]:
    """Return the feature caches under a folder, complete or not."""
    for path in sorted(root.glob(f"*/{_ABOUT}")):
        about = None
        with contextlib.suppress(OSError, ValueError):
            about = json.loads(path.read_text(encoding="utf-8"))
        yield StoredCache(path.parent, about if isinstance(about, dict) else {})


def clear(caches: Sequence[StoredCache]) -> int:
    """Delete caches, all or none, and return the number of bytes freed. Only files of the caches are deleted."""
    for cache in caches:
        if cache.folder.is_symlink():
            raise UserError(f"{cache.folder} is a symbolic link and is not followed; remove it by hand")
    with contextlib.ExitStack() as held:
        for cache in caches:
            held.enter_context(_locked(cache.folder, partial(_refuse, cache)))
        freed = sum(cache.bytes for cache in caches)
        for cache in caches:
            for file in cache.files():
                # Windows does not delete the lock that we hold
                with contextlib.suppress(*([PermissionError] if file.name == _LOCK else [])):
                    file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it has other files
                cache.folder.rmdir()
    return freed


def _refuse(cache: StoredCache) -> None:
    raise UserError(f"a run is building {cache.folder.name} right now; stop it or wait, then clear again")


@contextlib.contextmanager
def _locked(folder: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process; call `busy` before waiting for another process."""
    lock = FileLock(folder / _LOCK, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        busy()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
