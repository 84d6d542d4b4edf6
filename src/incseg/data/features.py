"""Feature maps on disk: what a frozen backbone says of every image of a split, computed once.

A store is a folder of blocks. A block holds the maps of some images in half precision, both ways round, and their
masks as dataset ids; it is written whole or not at all, carries a checksum, and is mapped into memory when read.
The folder's name is a digest of everything the maps depend on, so that all runs, tasks, methods and seeds share it.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from incseg.files import replacing, write_json
from incseg.types import UserError

BLOCK = 64
"""Images per block: what an interruption may cost."""
_ABOUT = "about.json"


@dataclass(frozen=True)
class Layout:
    """What one image takes: its stages, each (channels, height, width), and its square mask."""

    stages: tuple[tuple[int, int, int], ...]
    size: int
    flips: bool

    @property
    def values(self) -> int:
        """Half-precision numbers of one view of an image."""
        return sum(math.prod(stage) for stage in self.stages)

    @property
    def views(self) -> int:
        return 2 if self.flips else 1

    @property
    def bytes_per_image(self) -> int:
        return self.views * self.values * 2 + self.size**2

    def split(self, row: np.ndarray) -> list[np.ndarray]:
        """(…, values) → one array (…, channels, height, width) per stage."""
        ends = np.cumsum([math.prod(stage) for stage in self.stages])[:-1]
        parts = np.split(row, ends, axis=-1)
        return [part.reshape(*row.shape[:-1], *stage) for part, stage in zip(parts, self.stages, strict=True)]


class FeatureStore:
    """The maps of one split under one key; complete when every block is there."""

    def __init__(self, root: Path, key: dict[str, Any], count: int, layout: Layout) -> None:
        self.key, self.count, self.layout = key, count, layout
        digest = hashlib.sha256(json.dumps([key, layout.stages, layout.size, layout.flips], sort_keys=True).encode())
        self.folder = root / f"{key['dataset']}-{key['split']}-{digest.hexdigest()[:24]}"
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def images_of(self, block: int) -> range:
        return range(block * BLOCK, min((block + 1) * BLOCK, self.count))

    def missing(self, images: Iterable[int]) -> list[int]:
        """The blocks still to be made for some images."""
        return [block for block in sorted({i // BLOCK for i in images}) if not self._path(block).exists()]

    def require_space(self, blocks: Sequence[int]) -> None:
        """Say before the work begins whether the disk will hold these blocks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = len(blocks) * BLOCK * self.layout.bytes_per_image
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"the feature cache needs {needed / 1e9:.1f} GB and {self.folder.parent} has {free / 1e9:.1f} GB free; "
                "set INCSEG_CACHE to a larger disk, clear old ones with incseg cache clear, or use --data.cache off"
            )

    def write(self, block: int, maps: np.ndarray, masks: np.ndarray) -> None:
        """Store a block: maps (images, views, values) float16, masks (images, size, size) uint8."""
        if not (self.folder / _ABOUT).exists():
            about = {**self.key, "stages": self.layout.stages, "size": self.layout.size, "flips": self.layout.flips}
            write_json(self.folder / _ABOUT, {**about, "images": self.count})
        body = np.ascontiguousarray(maps, np.float16).tobytes() + np.ascontiguousarray(masks, np.uint8).tobytes()
        with replacing(self._path(block)) as temporary, temporary.open("wb") as stream:
            stream.write(body)
            stream.write(zlib.crc32(body).to_bytes(4, "little"))

    def read(self, index: int, flipped: bool) -> tuple[np.ndarray, np.ndarray]:
        """(values,) float16 and (size, size) uint8 of an image, views of the mapped file."""
        maps, masks = self._block(index // BLOCK)
        row = index % BLOCK
        if not flipped:
            return maps[row, 0], masks[row]
        return maps[row, 1], masks[row, :, ::-1]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if block not in self._open:
            self._open[block] = self._map(block)
        return self._open[block]

    def _map(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        path, layout, images = self._path(block), self.layout, len(self.images_of(block))
        try:
            raw = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"cache block {path} cannot be read ({error}); delete it, and it is made again") from error
        expected = images * layout.bytes_per_image
        # Read once from end to end, which also brings it into the system's file cache.
        body, checksum = raw[:expected], raw[expected:].tobytes()
        if raw.size != expected + 4 or zlib.crc32(body.data) != int.from_bytes(checksum, "little"):
            raise UserError(f"cache block {path} is damaged; delete it, and it is made again")
        split = images * layout.views * layout.values * 2
        maps = raw[:split].view(np.float16).reshape(images, layout.views, layout.values)
        masks = raw[split:expected].reshape(images, layout.size, layout.size)
        return maps, masks

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:05d}.bin"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # loader processes map the files anew


@dataclass(frozen=True)
class StoredCache:
    """A feature cache found on disk."""

    folder: Path
    about: dict[str, Any]

    @cached_property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    @property
    def blocks(self) -> int:
        return sum(1 for _ in self.folder.glob("block-*.bin"))


def stored_caches(root: Path) -> Iterator[StoredCache]:
    """The feature caches under a folder, complete or not."""
    for about in sorted(root.glob(f"*/{_ABOUT}")):
        try:
            yield StoredCache(about.parent, json.loads(about.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            yield StoredCache(about.parent, {})


def clear(caches: Sequence[StoredCache]) -> int:
    """Delete caches; returns the bytes set free."""
    freed = sum(cache.bytes for cache in caches)
    for cache in caches:
        shutil.rmtree(cache.folder)
    return freed
