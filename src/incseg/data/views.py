"""A step seen through a source: which images, with which labels, in which order. Views, never copies."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from incseg.data.source import Source, Split
from incseg.data.transforms import Transform
from incseg.types import UserError

Sample = tuple[Tensor, Tensor, int]
"""Image, labels, and the image's number in the source."""


class StepView(Dataset[Sample | UserError]):
    """Images of one step, relabelled by its table.

    Items are asked for by (epoch, position): the augmentation's generator is seeded by them, so that it does
    not matter which worker or process draws a sample, or whether the run was interrupted before it.
    """

    def __init__(
        self,
        source: Source,
        split: Split,
        images: Sequence[int],
        table: np.ndarray,
        transform: Transform,
        seed: Sequence[int] = (),
    ) -> None:
        self.source, self.split, self.images = source, split, list(images)
        self.table, self.transform, self.seed = table, transform, tuple(seed)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Sample | UserError:
        epoch, position = key
        index = self.images[position]
        try:
            image, mask = self.source.pair(self.split, index)
        except UserError as error:  # workers would wrap it in a traceback; `batches` raises it whole
            return error
        pixels, labels = self.transform(image, self.table[mask], sample_generator(self.seed, epoch, position))
        return pixels, labels, index


def sample_generator(seed: Sequence[int], epoch: int, position: int) -> np.random.Generator:
    """What augments one sample."""
    return np.random.default_rng([*seed, epoch, position])


class EpochOrder(Sampler[list[tuple[int, int]]]):
    """The batches of a whole step, all epochs in a row, as (epoch, position) keys.

    Every epoch is a permutation of its own, cut into full batches; what is left over is dropped, and a set
    smaller than a batch is repeated to fill one. With several processes each takes every world-th sample of
    the same global batch. Starts at `first`, where an interrupted run goes on.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        epochs: int,
        seed: Sequence[int],
        first: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.size, self.batch_size, self.epochs, self.seed = size, batch_size, epochs, tuple(seed)
        self.first, self.rank, self.world = first, rank, world

    @property
    def batches_per_epoch(self) -> int:
        return max(1, self.size // self.batch_size)

    def __len__(self) -> int:
        return self.batches_per_epoch * self.epochs - self.first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for iteration in range(self.first, self.batches_per_epoch * self.epochs):
            epoch, batch = divmod(iteration, self.batches_per_epoch)
            if batch == 0 or iteration == self.first:
                order = np.random.default_rng([*self.seed, epoch]).permutation(self.size)
            chosen = np.take(order, range(batch * self.batch_size, (batch + 1) * self.batch_size), mode="wrap")
            yield [(epoch, int(position)) for position in chosen[self.rank :: self.world]]


def collate(samples: Sequence[Sample | UserError]) -> tuple[Tensor, Tensor, list[int]] | UserError:
    """Stack samples; the first faulty one, if any, takes the place of the batch."""
    good: list[Sample] = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        good.append(sample)
    images, labels, indices = zip(*good, strict=True)
    return torch.stack(images), torch.stack(labels), list(indices)


def batches(
    view: StepView, order: Iterable[list[tuple[int, int]]], workers: int, pin: bool
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Load batches in order with `workers` processes; a faulty file raises its own UserError."""
    loader = DataLoader(
        view,
        batch_sampler=order,  # type: ignore[arg-type]  # it asks for no more than an iterable
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # else every loader draws a seed from the global one, and resumed runs differ
        worker_init_fn=_leave_interrupts_to_the_parent,
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _leave_interrupts_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; a worker that obeyed would end the run before it is saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_order(positions: Sequence[int], batch_size: int) -> list[list[tuple[int, int]]]:
    """Keys of one pass over `positions` as they stand."""
    return [[(0, p) for p in positions[i : i + batch_size]] for i in range(0, len(positions), batch_size)]
