"""Dataset views and loaders: batches of a step for training and test, of pixels or of cached features.

A dataset view selects the images of a step and relabels their masks; nothing is copied. Trainer and evaluator do not
know which kind of loader they use: the model takes either.
"""

from __future__ import annotations

import queue
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from incseg.data.features import FeatureStore
from incseg.data.source import Source, Split
from incseg.data.transforms import Mirrored, TestTransform, TrainTransform, Transform, WholeTransform
from incseg.protocol import Step
from incseg.types import Inputs, UserError

Sample = tuple[Tensor, Tensor, int]
"""Image, labels, and the image's number in the source."""


class StepView(Dataset[Sample | UserError]):
    """Images of one step, relabelled by its table.

    Items are indexed by (epoch, position), which also seed the augmentation. So a sample is the same in every worker
    and process, and in a resumed run.
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
        except UserError as error:  # workers would wrap it in a traceback; `batches` raises it
            return error
        pixels, labels = self.transform(image, self.table[mask], sample_generator(self.seed, epoch, position))
        return pixels, labels, index


def sample_generator(seed: Sequence[int], epoch: int, position: int) -> np.random.Generator:
    """Return the random generator that augments one sample."""
    return np.random.default_rng([*seed, epoch, position])


class EpochOrder(Sampler[list[tuple[int, int]]]):
    """The batches of a whole step, all epochs in a row, as (epoch, position) keys.

    Every epoch has its own permutation, divided into full batches. The rest is dropped, and a set smaller than a batch
    is repeated to fill one. With several processes, each takes every world-th sample of the same global batch. An
    interrupted run resumes at batch `first`.
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
    """Stack samples; return the first error instead, if any."""
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
        batch_sampler=order,  # type: ignore[arg-type]  # an iterable is enough
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
    """Ignore Ctrl-C in a worker. It reaches every process of a terminal, and a worker that stops would end the run
    before it is saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_order(positions: Sequence[int], batch_size: int) -> list[list[tuple[int, int]]]:
    """Return the keys of one pass over `positions`, in order."""
    return [[(0, p) for p in positions[i : i + batch_size]] for i in range(0, len(positions), batch_size)]


Keys = Iterable[list[tuple[int, int]]]
"""Batches of (epoch, position)."""
Loaded = tuple[Inputs, Tensor, list[int]]
"""Inputs of the model, labels, and the indices of the images in the source."""
Labels = TypeVar("Labels", np.ndarray, Tensor)


@dataclass
class Loaders(ABC):
    """The images of a protocol.

    train_images: of each step.   test_images: of all steps.   seed: of the augmentation.
    """

    train_images: Sequence[Sequence[int]]
    test_images: Sequence[int]
    seed: int

    @abstractmethod
    def inputs(self, images: Sequence[Image.Image], encode: Callable[[Tensor], Inputs]) -> Inputs:
        """Return images from elsewhere in the form of `plain`; `encode` computes the features that the head reads."""

    @abstractmethod
    def training(self, step: Step, keys: Keys) -> Iterator[Loaded]:
        """Yield augmented images of a step with their training labels, in the order of `keys`."""

    @abstractmethod
    def plain(self, step: Step, batch_size: int, positions: Sequence[int] | None = None) -> Iterator[Loaded]:
        """Yield one pass over the training images of a step as the test would show them, or over some of them."""

    @abstractmethod
    def mask(self, image: int) -> np.ndarray:
        """Return the mask of a training image, in dataset ids."""

    def label_counts(self, step: Step) -> Tensor:
        """Return the (256,) number of pixels with each training label in the step's images; reads masks only."""
        counts = np.zeros(256, dtype=np.int64)
        for image in self.train_images[step.index]:
            counts += np.bincount(step.train_table[self.mask(image)].ravel(), minlength=256)
        return torch.from_numpy(counts)

    @abstractmethod
    def testing(self, step: Step, positions: Sequence[int], batch_size: int) -> Iterator[Loaded]:
        """Yield test images with the labels that `step` tests against."""


@dataclass
class PixelLoaders(Loaders):
    """Images decoded and augmented when they are needed, by loader processes."""

    source: Source
    test_split: Split
    train_transform: TrainTransform | Mirrored
    plain_transform: TestTransform | WholeTransform
    test_transform: TestTransform | WholeTransform
    label_stride: int
    train_workers: int
    test_workers: int
    pin: bool

    def mask(self, image: int) -> np.ndarray:
        return self.source.mask("train", image)

    def inputs(self, images: Sequence[Image.Image], encode: Callable[[Tensor], Inputs]) -> Inputs:
        return torch.stack([self.plain_transform(image, None)[0] for image in images])

    def training(self, step: Step, keys: Keys) -> Iterator[Loaded]:
        images, seed = self.train_images[step.index], (self.seed, step.index)
        view = StepView(self.source, "train", images, step.train_table, self.train_transform, seed)
        for inputs, labels, indices in batches(view, keys, self.train_workers, self.pin):
            yield inputs, thinned(labels, self.label_stride), indices

    def plain(self, step: Step, batch_size: int, positions: Sequence[int] | None = None) -> Iterator[Loaded]:
        images = self.train_images[step.index]
        positions = range(len(images)) if positions is None else positions
        view = StepView(self.source, "train", images, step.train_table, self.plain_transform)
        yield from batches(view, in_order(positions, batch_size), self.train_workers, self.pin)

    def testing(self, step: Step, positions: Sequence[int], batch_size: int) -> Iterator[Loaded]:
        view = StepView(self.source, self.test_split, self.test_images, step.test_table, self.test_transform)
        yield from batches(view, in_order(positions, batch_size), self.test_workers, self.pin)


@dataclass
class FeatureLoaders(Loaders):
    """Features of a frozen backbone, read from the cache: the same batches without running the backbone."""

    train_store: FeatureStore
    test_store: FeatureStore
    plain_transform: TestTransform | WholeTransform
    flip: bool
    label_stride: int

    def mask(self, image: int) -> np.ndarray:
        return self.train_store.read(image, False)[1]

    def inputs(self, images: Sequence[Image.Image], encode: Callable[[Tensor], Inputs]) -> Inputs:
        return encode(torch.stack([self.plain_transform(image, None)[0] for image in images]))

    def training(self, step: Step, keys: Keys) -> Iterator[Loaded]:
        images, seed = self.train_images[step.index], (self.seed, step.index)

        def load(batch: list[tuple[int, int]]) -> Loaded:
            mirrors = self.flip and self.train_store.layout.flips
            flips = [mirrors and bool(sample_generator(seed, *key).random() < 0.5) for key in batch]
            chosen = [images[position] for _, position in batch]
            return _stack(self.train_store, chosen, flips, step.train_table, self.label_stride)

        return _ahead(load, keys)

    def plain(self, step: Step, batch_size: int, positions: Sequence[int] | None = None) -> Iterator[Loaded]:
        images = self.train_images[step.index]
        keys = in_order(range(len(images)) if positions is None else positions, batch_size)
        return _ahead(lambda batch: self._unflipped(self.train_store, images, batch, step.train_table), keys)

    def testing(self, step: Step, positions: Sequence[int], batch_size: int) -> Iterator[Loaded]:
        keys = in_order(positions, batch_size)
        return _ahead(lambda batch: self._unflipped(self.test_store, self.test_images, batch, step.test_table), keys)

    def _unflipped(
        self, store: FeatureStore, images: Sequence[int], batch: list[tuple[int, int]], table: np.ndarray
    ) -> Loaded:
        return _stack(store, [images[position] for _, position in batch], [False] * len(batch), table, 1)


def _stack(store: FeatureStore, images: list[int], flips: list[bool], table: np.ndarray, label_stride: int) -> Loaded:
    rows, masks = zip(*(store.read(i, flip) for i, flip in zip(images, flips, strict=True)), strict=True)
    # By numpy, because torch would start threads of its own here and take the cores from the training.
    features = tuple(torch.from_numpy(part.astype(np.float32)) for part in store.layout.split(np.stack(rows)))
    labels = table[np.stack([thinned(mask, label_stride) for mask in masks])]
    return features, torch.from_numpy(labels), images


def thinned(labels: Labels, stride: int) -> Labels:
    """Return every stride-th label in both directions, from the middle of its cell."""
    return labels[..., stride // 2 :: stride, stride // 2 :: stride]


def _ahead(load: Callable[[list[tuple[int, int]]], Loaded], keys: Keys) -> Iterator[Loaded]:
    """Yield load(batch) for each of `keys`; a thread loads a few batches ahead."""
    ready: queue.Queue[Loaded | BaseException | None] = queue.Queue(maxsize=3)
    stopped = threading.Event()

    def put(item: Loaded | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in keys:
                if stopped.is_set():
                    return
                put(load(batch))
            put(None)
        except BaseException as error:  # raised again in the reader's thread
            put(error)

    thread = threading.Thread(target=work, name="feature-reader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
