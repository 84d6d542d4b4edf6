"""Fill the feature cache: run a frozen backbone once over a split."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incseg.data.features import FeatureStore, Layout, StoreUnwritable, require_space
from incseg.data.loaders import StepView, batches, in_order
from incseg.data.source import Source, Split
from incseg.data.transforms import shown_at
from incseg.engine.progress import Advance, log, show_progress
from incseg.engine.runtime import Runtime
from incseg.io import tensors_digest
from incseg.models.segmenter import Segmenter

_VERSION = 1  # raise it when the same key would give other numbers
_BATCH = 16
_IDENTITY = np.arange(256, dtype=np.uint8)


def feature_store(
    root: Path, model: Segmenter, source: Source, split: Split, size: int,
    frame: tuple[int, int] | None = None, flips: bool = True,
) -> FeatureStore:  # fmt: skip
    """Return the store of a split for a model's backbone at an input size, filled or not.

    With a `frame`, whole images are stored, otherwise their centre. With `flips`, training images are also stored
    mirrored.

    The key of the store has everything that the features depend on: weights and structure of the backbone, stages,
    size, preprocessing, and the content of the dataset.
    """
    config, backbone = model.config, model.backbone
    key: dict[str, Any] = {
        "version": _VERSION,
        "dataset": source.info.name,
        "split": split,
        "content": source.fingerprint(split),
        "backbone": config.backbone,
        "output_stride": config.output_stride,
        "stages": config.stages or (len(backbone.channels) - 1,),
        "weights": tensors_digest(backbone.state_dict()),
        "mean": backbone.mean,
        "std": backbone.std,
    }
    if model.sizes != [1]:
        key["sizes"] = model.sizes
    if config.dilate_first:
        key["dilate_first"] = True
    with torch.no_grad():
        model.eval()
        side = frame or (size, size)
        shown = model.features(torch.zeros(1, 3, *side, device=next(model.parameters()).device))
    stages = tuple((s.shape[1], s.shape[2], s.shape[3]) for s in shown)
    layout = Layout(stages, size, flips and split == "train", frame)
    return FeatureStore(root, key, len(source.names(split)), layout)


@dataclass(frozen=True)
class Wanted:
    """Images of a store that a run will read, and the number of loader processes to compute them with."""

    store: FeatureStore
    images: Iterable[int]
    workers: int

    @property
    def name(self) -> str:
        return f"features of {self.store.key['dataset']} {self.store.key['split']}"


def fill(wanted: Sequence[Wanted], model: Segmenter, source: Source, runtime: Runtime) -> None:
    """Compute the blocks that are missing or damaged. Each process computes its share.

    Afterwards this process has mapped its share, so the files may be deleted during the run. If one process cannot
    write, all raise StoreUnwritable.
    """
    missing = [_checked(part, runtime) for part in wanted]
    unfinished = [(part, mine) for part, mine in zip(wanted, missing, strict=True) if runtime.any(bool(mine))]
    with contextlib.ExitStack() as held:
        with _failing_together(runtime):
            if runtime.is_main:
                for part, _ in unfinished:
                    waiting = f"waiting for another run that is making the {part.name}"
                    held.enter_context(part.store.building(partial(log.info, waiting)))
        jobs = [(part, _still_missing(part.store, mine)) for part, mine in unfinished]
        totals = [_total(part.store, mine, runtime) for part, mine in jobs]
        require_space([part.store for part, _ in jobs], totals)
        for (part, mine), total in zip(jobs, totals, strict=True):
            with show_progress(f"{part.name}, once", total) as advance, _failing_together(runtime):
                for block, maps, masks in _computed(part, mine, model, source, runtime, advance):
                    part.store.write(block, maps, masks)
    for part in wanted:
        part.store.mark_used()


def _checked(part: Wanted, runtime: Runtime) -> list[int]:
    """Return the missing or damaged blocks of this process's share."""
    mine = runtime.share(part.store.blocks_of(part.images))
    with show_progress(f"checking the {part.name}", len(mine)) as advance:
        missing, _ = part.store.missing(mine, progress=lambda done, total: advance())
    return missing


def _still_missing(store: FeatureStore, blocks: list[int]) -> list[int]:
    """Return the blocks that another run has not made while this one waited for it."""
    missing, damaged = store.missing(blocks)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        log.info(f"damaged in the feature cache and made again: {damaged[0]}{more}")
    return missing


def _total(store: FeatureStore, blocks: list[int], runtime: Runtime) -> int:
    """Return the number of images that all processes must compute."""
    return int(runtime.sum(torch.tensor(sum(len(store.images_of(block)) for block in blocks))))


def _computed(
    part: Wanted, blocks: list[int], model: Segmenter, source: Source, runtime: Runtime, advance: Advance
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (block, maps, masks) of each block."""
    store = part.store
    model.eval()
    transform = shown_at(store.layout.size, store.layout.frame, model.backbone.mean, model.backbone.std)
    view = StepView(source, store.key["split"], range(store.count), _IDENTITY, transform)
    keys = [key for block in blocks for key in in_order(store.images_of(block), _BATCH)]  # none crosses two blocks
    loaded = batches(view, keys, part.workers, False)
    for block in blocks:
        maps, masks = [], []
        for pixels, labels, _ in itertools.islice(loaded, math.ceil(len(store.images_of(block)) / _BATCH)):
            maps.append(_views(model, pixels.to(runtime.device), store.layout.flips))
            masks.append(labels.numpy())
            advance(len(labels) * runtime.world)
        yield block, np.concatenate(maps), np.concatenate(masks)


@contextlib.contextmanager
def _failing_together(runtime: Runtime) -> Iterator[None]:
    """Raise StoreUnwritable in all processes if one cannot write, so that none waits for its blocks."""
    failed: OSError | None = None
    try:
        yield
    except OSError as error:
        failed = error
    if runtime.any(failed is not None):
        cause = failed or "another process of this run failed"
        raise StoreUnwritable(f"the feature cache cannot be written ({cause})") from failed


@torch.no_grad()
def _views(model: Segmenter, images: Tensor, flips: bool) -> np.ndarray:
    """Return (images, views, values) float16: features of the images and, with `flips`, of their mirror images."""
    images = images.contiguous(memory_format=torch.channels_last)  # a third less time for EfficientNet-Lite on a CPU
    shown = [images, images.flip(-1)] if flips else [images]
    views = []
    for view in shown:
        features = model.features(view)
        views.append(torch.cat([f.flatten(1) for f in features], dim=1).clamp(-65504, 65504).half().cpu().numpy())
    return np.stack(views, axis=1)
