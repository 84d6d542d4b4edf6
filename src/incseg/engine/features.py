"""Fill a feature store: run a frozen backbone once over a split."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incseg.data.features import FeatureStore, Layout
from incseg.data.source import Source, Split
from incseg.data.transforms import TestTransform
from incseg.data.views import StepView, batches, in_order
from incseg.engine.progress import Reporter
from incseg.engine.runtime import Runtime
from incseg.models.segmenter import Segmenter

_VERSION = 1  # of what the features are; raise it when the same key would give other numbers
_BATCH = 16
_IDENTITY = np.arange(256, dtype=np.uint8)


def feature_store(root: Path, model: Segmenter, source: Source, split: Split, size: int) -> FeatureStore:
    """The store of a split for a model's backbone at an input size, filled or not.

    Its key holds all that the maps depend on: the backbone's weights and structure, which stages, size and
    preprocessing, and the dataset's content. Training images are kept both ways round.
    """
    config, backbone = model.config, model.backbone
    key: dict[str, Any] = {
        "version": _VERSION,
        "dataset": source.info.name,
        "split": split,
        "content": source.fingerprint(split),
        "backbone": config.backbone,
        "output_stride": config.output_stride,
        "stages": config.stages,
        "weights": _digest(backbone.state_dict()),
        "mean": backbone.mean,
        "std": backbone.std,
    }
    with torch.no_grad():
        model.eval()
        shown = model.read_by_head(model.encode(torch.zeros(1, 3, size, size, device=next(model.parameters()).device)))
    layout = Layout(tuple((s.shape[1], s.shape[2], s.shape[3]) for s in shown), size, flips=split == "train")
    return FeatureStore(root, key, len(source.names(split)), layout)


def fill(
    store: FeatureStore, images: Iterable[int], model: Segmenter, source: Source, split: Split, workers: int,
    runtime: Runtime, reporter: Reporter,
) -> None:  # fmt: skip
    """Compute the missing blocks that hold `images`, each process its share; a block is written whole."""
    missing = store.missing(images)
    runtime.barrier()  # all have looked before any writes
    if not missing:
        return
    store.require_space(missing)
    total = sum(len(store.images_of(block)) for block in missing)
    reporter.begin(f"features of {store.key['dataset']} {split}, once", total)
    model.eval()
    transform = TestTransform(store.layout.size, model.backbone.mean, model.backbone.std)
    view = StepView(source, split, range(store.count), _IDENTITY, transform)
    mine = runtime.share(missing)
    keys = [key for block in mine for key in in_order(store.images_of(block), _BATCH)]  # none crosses two blocks
    loaded = batches(view, keys, workers, False)
    for block in mine:
        maps, masks = [], []
        for pixels, labels, _ in itertools.islice(loaded, -(-len(store.images_of(block)) // _BATCH)):
            maps.append(_views(model, pixels.to(runtime.device), store.layout.flips))
            masks.append(labels.numpy())
            reporter.advance(len(labels) * runtime.world)
        store.write(block, np.concatenate(maps), np.concatenate(masks))
    reporter.end()
    runtime.barrier()


@torch.no_grad()
def _views(model: Segmenter, images: Tensor, flips: bool) -> np.ndarray:
    """(images, views, values) float16: the images as they are, and mirrored."""
    shown = [images, images.flip(-1)] if flips else [images]
    views = []
    for view in shown:
        features = model.read_by_head(model.encode(view))
        views.append(torch.cat([f.flatten(1) for f in features], dim=1).clamp(-65504, 65504).half().cpu().numpy())
    return np.stack(views, axis=1)


def _digest(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
