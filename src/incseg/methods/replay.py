"""Replay: each batch gets as many images of old classes as it has images of the step.

Replay images have no masks. A method may give scores for background and the classes of the increment that an image
belongs to; their arg-max becomes its labels. Without scores every pixel is labelled background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incseg.data.unlabelled import Generator, ImageFolders, Picture, Unlabelled
from incseg.losses.pixelwise import row_strips
from incseg.losses.prototypes import nearest
from incseg.methods.base import Processes, StepContext
from incseg.types import BACKGROUND, Batch, Inputs, UserError

log = logging.getLogger("incseg")

PER_CLASS = 100
"""Default number of replay images of a class."""
_BATCH = 16
_HALF_MAX = 65504.0

Scores = Callable[[int, Inputs], Tensor]
"""(number of the increment, inputs) → (B, 1 + classes of that increment, h, w), background first."""


@dataclass(frozen=True)
class _ReplayImage:
    """One image of the pool.

    features: input of the head in half precision if the run trains on features; otherwise the file is read again.
    scores:   (1 + K, h, w) half precision, or None for background everywhere.
    first:    number of classes learnt before the increment that the scores belong to.
    """

    picture: Picture
    features: tuple[Tensor, ...] | None
    scores: Tensor | None
    first: int

    def labels(self, size: tuple[int, int]) -> Tensor:
        """Return (H, W) uint8 learnt labels: the arg-max of the scores upsampled to `size`."""
        if self.scores is None:
            return torch.full(size, BACKGROUND, dtype=torch.uint8)
        strips = [strip.max(1).indices[0] for _, strip in row_strips(self.scores[None], size)]
        found = torch.cat(strips)
        return torch.where(found == BACKGROUND, found, found + self.first).to(torch.uint8)

    def memory(self) -> int:
        tensors = [*(self.features or ()), *([] if self.scores is None else [self.scores])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def open_replay(folder: str | None, generator: str | None, per_class: int | None) -> Replay | None:
    """Return the replay that the user asked for, or None. Nothing is read or imported yet."""
    if folder is not None and generator is not None:
        raise UserError(f"replay is '{folder}' and generator '{generator}'; give one of the two")
    if per_class is not None and per_class < 1:
        raise UserError(f"replay_images is {per_class}; it must be at least 1")
    if folder is None and generator is None:
        return None
    source = ImageFolders(folder) if folder is not None else Generator(str(generator))
    return Replay(source, per_class or PER_CLASS)


class Replay:
    """A pool of images of all old classes, filled when a step begins, and the order in which they are drawn.

    Every class has the same share: images of a class with fewer are drawn more often. The pool is traversed in one
    permutation after another, determined by the run's seed and the step. The number of images drawn so far is saved,
    so an interrupted step resumes with the same images. Each process takes its share of the same global draw, as it
    does of the step's own images. Replay images are prepared as in the test: neither cropped at random nor mirrored.

    Memory: with cached features 2 bytes per value in every process (170 KB per image at 224 pixels with
    EfficientNet-Lite0). Otherwise files are read again each time, and generated images stay in memory. Features in
    memory are reused in the next step: neither the frozen backbone nor the scores of an increment change.
    """

    _context: StepContext

    def __init__(self, source: Unlabelled, per_class: int) -> None:
        self._source, self._per_class = source, per_class
        self._pool: list[_ReplayImage] = []
        self._order: list[int] = []
        self._seed = 0
        self._drawn = torch.zeros((), dtype=torch.int64)

    def in_recipe(self, recipe: dict[str, Any]) -> dict[str, Any]:
        """Return a method's recipe of a step that replays, with the images' fingerprint instead of their folder."""
        return {**recipe, "replay": self._source.fingerprint()} if {"replay", "generator"} & recipe.keys() else recipe

    def begin_step(self, context: StepContext, scores: Scores | None = None) -> None:
        """Fill the pool; in step 0 only check that there are images of the classes.

        `scores` must return for an increment what it returned in earlier steps.
        """
        known = {(image.picture, image.first): image for image in self._pool if image.features is not None}
        self._pool, self._order = [], []
        self._drawn = torch.zeros((), dtype=torch.int64)
        self._context, self._seed = context, torch.initial_seed()
        old = context.model.increments[:-1]
        self._source.require([name for increment in old for name in increment.classes])
        if context.step.index == 0:
            self._source.require(context.step.names if context.step.future else ())
            return
        places: list[range] = []
        for number, increment in enumerate(old):
            first = sum(len(before.classes) for before in old[:number])
            for position, name in enumerate(increment.classes, start=first):
                seed = int(np.random.SeedSequence([self._seed, position]).generate_state(1)[0])
                pictures = self._source.pictures(name, self._per_class, seed)
                new = [picture for picture in pictures if (picture, first) not in known]
                known |= {(image.picture, first): image for image in self._prepared(new, number, first, scores)}
                added = [known[picture, first] for picture in pictures]
                places.append(range(len(self._pool), len(self._pool) + len(added)))
                self._pool += added
        most = max(len(of_class) for of_class in places)
        self._order = [int(i) for of_class in places for i in np.resize(of_class, most)]
        megabytes = sum(image.memory() for image in self._pool) / 1e6
        log.info(f"replay: {len(self._pool)} images of {len(places)} old classes, {megabytes:.0f} MB in memory")

    @torch.no_grad()
    def _prepared(
        self, pictures: list[Picture], increment: int, first: int, scores: Scores | None
    ) -> list[_ReplayImage]:
        found = []
        for start in range(0, len(pictures), _BATCH):
            some = pictures[start : start + _BATCH]
            inputs = self._inputs(some)
            scored = None if scores is None else _half(scores(increment, inputs))
            stored = tuple(_half(part) for part in inputs) if isinstance(inputs, tuple) else None
            for row, picture in enumerate(some):
                features = None if stored is None else tuple(part[row] for part in stored)
                found.append(_ReplayImage(picture, features, None if scored is None else scored[row], first))
        return found

    def _inputs(self, pictures: list[Picture]) -> Inputs:
        if self._context.images.inputs is None:
            raise RuntimeError("a step without StepImages.inputs cannot replay")
        return self._context.images.inputs([picture() for picture in pictures])

    def extend(self, batch: Batch) -> Batch:
        """Return the batch followed by as many replay images; the batch itself if no class is old."""
        if not self._pool:
            return batch
        chosen = [self._pool[i] for i in self._draw(len(batch.labels))]
        labels = torch.stack([image.labels(batch.size) for image in chosen])
        return add_images(batch, [Batch(self._inputs_of(chosen), labels, batch.counts)], self._context.processes)

    def _inputs_of(self, chosen: list[_ReplayImage]) -> Inputs:
        rows = [image.features for image in chosen if image.features is not None]
        if len(rows) < len(chosen):
            return self._inputs([image.picture for image in chosen])
        return tuple(torch.stack(parts).float() for parts in zip(*rows, strict=True))

    def _draw(self, num_images: int) -> list[int]:
        """Return the next pool positions of this process; over all processes as many as the batch has images."""
        total = round(float(self._context.processes.sum(torch.tensor(float(num_images)))))
        begin = int(self._drawn)
        self._drawn = self._drawn + total
        permutations: dict[int, np.ndarray] = {}
        drawn = []
        for place in range(begin, begin + total):
            turn, position = divmod(place, len(self._order))
            if turn not in permutations:
                permutations[turn] = np.random.default_rng([self._seed, turn]).permutation(len(self._order))
            drawn.append(self._order[permutations[turn][position]])
        return self._context.processes.share(drawn)

    def state(self) -> dict[str, Tensor]:
        return {"replay.drawn": self._drawn}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._drawn = state.get("replay.drawn", self._drawn)


def _half(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision of the feature cache: half, without infinities."""
    return tensor.clamp(-_HALF_MAX, _HALF_MAX).half().cpu()


def add_images(batch: Batch, more: Sequence[Batch], processes: Processes) -> Batch:
    """Return the batch followed by the images of others; label counts are over all processes."""
    device = batch.labels.device
    labels = torch.cat([nearest(one.labels, batch.size) for one in more]).to(batch.labels)
    counts = processes.mean(torch.bincount(labels.flatten(), minlength=256).to(batch.counts))
    parts = [_parts(one.inputs) for one in (batch, *more)]
    inputs = tuple(torch.cat([part.to(device) for part in same]) for same in zip(*parts, strict=True))
    images = [i for one in more for i in one.images or [-1] * len(one.labels)]
    return Batch(
        inputs if isinstance(batch.inputs, tuple) else inputs[0],
        torch.cat([batch.labels, labels]),
        batch.counts + counts,
        [*batch.images, *images],
    )


def packed(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return stored images as tensors by name, for the state of a method."""
    state: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        state |= {f"stored.{number}.{i}": part for i, part in enumerate(_parts(batch.inputs))}
        state |= {f"stored.{number}.labels": batch.labels, f"stored.{number}.images": torch.tensor(batch.images)}
    return state


def unpacked(state: dict[str, Tensor]) -> list[Batch]:
    """Return the images that `packed` made tensors of."""
    batches: list[Batch] = []
    while f"stored.{len(batches)}.0" in state:
        first = f"stored.{len(batches)}."
        parts = tuple(state[first + str(i)] for i in range(len(state)) if first + str(i) in state)
        labels = state[first + "labels"]
        counts = torch.bincount(labels.flatten(), minlength=256).float()
        batches.append(Batch(parts[0] if len(parts) == 1 else parts, labels, counts, state[first + "images"].tolist()))
    return batches


def _parts(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)
