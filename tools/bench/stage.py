"""The common part of benches of training: steps without a dataset, and a trainer with batches in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incseg.data.loaders import Keys, Loaded, Loaders
from incseg.engine.curves import TensorBoard
from incseg.engine.evaluator import EvalConfig, Evaluator
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.engine.step_cache import StepCache
from incseg.engine.trainer import TrainConfig, Trainer
from incseg.methods import Evidential
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol, Step
from incseg.types import MAX_CLASSES, DatasetInfo, Increment, Inputs

NETWORK = ModelConfig("efficientnet-lite0", output_stride=16, stages=(2, 3), width=96, dilations=(1, 3, 6))
"""The network of the preset voc-laptop, without weights."""
QUICK_NETWORK = ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 2, 3))

_BYTES = np.arange(256, dtype=np.uint8)


def protocol_of(sizes: Sequence[int]) -> Protocol:
    """Return a protocol whose steps have these numbers of classes."""
    names = iter(f"class {i}" for i in range(sum(sizes)))
    groups = [list(islice(names, size)) for size in sizes]
    classes = tuple(name for group in groups for name in group)
    return Protocol(DatasetInfo("made up", classes), groups, "overlapped")


def step_of(old: int, new: int) -> Step:
    """Return a step by its numbers of classes. A protocol allows only as many as fit into a byte."""
    ids = tuple(range(1, old + new + 1))
    return Step(int(old > 0), ids[:old], ids[old:], (), ("",) * new, _BYTES, _BYTES)


def grown(config: ModelConfig, sizes: Sequence[int]) -> Segmenter:
    """Return a model with steps of these sizes and random weights."""
    torch.manual_seed(0)
    model = Segmenter(config, background_output=False)
    for number, size in enumerate(sizes):
        model.grow(Increment(tuple(f"class {number}.{i}" for i in range(size)), tuple(range(size))))
    return model


def made_up_labels(images: int, size: int, old: int, total: int) -> Tensor:
    """Return (images, size, size) labels of a step: blobs of background and new classes."""
    dtype = torch.uint8 if total <= MAX_CLASSES else torch.int32
    blobs = torch.randint(old, total + 1, (images, size // 8, size // 8), dtype=dtype)
    labels = blobs.repeat_interleave(8, 1).repeat_interleave(8, 2)
    return torch.where(labels == old, 0, labels)


@dataclass
class MemoryLoaders(Loaders):
    """Loaders of batches in memory; each process takes its share."""

    loaded: Sequence[Loaded]

    def training(self, step: Step, keys: Keys) -> Iterator[Loaded]:
        for number, _ in enumerate(keys):
            yield self.loaded[number % len(self.loaded)]

    def inputs(self, images: Sequence[Image.Image], encode: Callable[[Tensor], Inputs]) -> Inputs:
        raise NotImplementedError("a bench shows no photographs")

    def mask(self, image: int) -> np.ndarray:
        raise NotImplementedError("a bench has labels without masks")

    def plain(self, step: Step, batch_size: int, positions: Sequence[int] | None = None) -> Iterator[Loaded]:
        return iter(self.loaded)

    def testing(self, step: Step, positions: Sequence[int], batch_size: int) -> Iterator[Loaded]:
        return iter(self.loaded)


def second_step(
    config: ModelConfig, images: int, size: int, updates: int, runtime: Runtime, folder: Path, **train: Any
) -> tuple[Trainer, Segmenter]:
    """Return a trainer of the evidential method at the second step of 15-5, and its teacher; `images` per update.

    Its batches are pixels or, if the backbone is frozen, the features that the head reads.
    """
    protocol = protocol_of((15, 5))
    teacher, model = grown(config, (15,)).frozen_copy(), grown(config, (15, 5)).train()
    own = images // runtime.world
    loaded: list[Loaded] = []
    for _ in range(2):
        pixels = torch.randn(own, 3, size, size)
        inputs = model.features(pixels) if config.freeze_backbone else pixels
        loaded.append((inputs, made_up_labels(own, size, 15, 20), list(range(own))))
    loaders = MemoryLoaders([range(images * updates)] * 2, (), 0, loaded)
    trainer = Trainer(
        protocol=protocol,
        loaders=loaders,
        evaluator=Evaluator(protocol, loaders, [], EvalConfig(), runtime),
        method=Evidential(),
        model=model,
        train=TrainConfig(epochs=1, batch_size=images, crop=size, lr=1e-3, lr_later=1e-3, **train),
        seed=0,
        runtime=runtime,
        folder=RunDir(folder),
        curves=TensorBoard(None),
        cache=StepCache(None, lambda step: {}),
        about={},
    )
    return trainer, teacher


def fit_seconds(trainer: Trainer, teacher: Segmenter) -> float:
    """Return the seconds of the trainer's loop over one epoch, without its last checkpoint."""
    progress = trainer._fit(trainer.protocol.steps[-1], teacher)
    trainer.folder.checkpoint.unlink(missing_ok=True)
    trainer.runtime.barrier()  # otherwise another process finds the checkpoint when it fits again
    return progress.seconds
