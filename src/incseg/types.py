"""The types that all other modules share. Importing them does not import torch, so the command line starts fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class UserError(ValueError):
    """An error that the user can fix. Shown as one line: what came, what is allowed, what to do."""


BACKGROUND = 0
"""Label of a pixel that shows none of the classes of interest."""
IGNORE = 255
"""Label of a pixel that counts neither in a loss nor in a metric."""
UNSEEN = 254
"""Test label of a pixel whose class is learnt in a later step. The label rules decide whether it counts."""
MAX_CLASSES = UNSEEN - 1
"""Most classes of a dataset: labels are bytes, and two of them are reserved."""


Later: TypeAlias = "Tensor | Callable[[], Tensor]"
"""A tensor, or a function that returns it."""
Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""What a model takes: (B, 3, H, W) normalised images, or the backbone's stages that its head reads."""


@dataclass(frozen=True)
class DatasetInfo:
    """Name and foreground classes of a dataset, id 1 first.

    If `has_background` is false (ADE20k), id 0 means "unlabelled" and is left out of every metric.
    """

    name: str
    classes: tuple[str, ...]
    has_background: bool = True


@dataclass(frozen=True)
class Increment:
    """A learnt step, as saved in the model file and used by inference.

    head:   the head of the network that its classifier reads; 0 is the first.
    solved: whether its scores were solved in closed form, not trained.
    beside: whether it was solved beside the classes before, whose scores it leaves as they are; it then has a head of
            its own. Otherwise a solved increment reads the closed form, whose classes are solved anew with every step.
    """

    classes: tuple[str, ...]
    ids: tuple[int, ...]
    train_images: int = 0
    head: int = 0
    solved: bool = False
    beside: bool = False


@dataclass
class Batch:
    """A part of the images of an update, with their training labels, on the device.

    The images of an update are divided among processes, and in each among micro-batches (`train.accumulate`). These are
    the parts; gradients are averaged over all of them.

    inputs:  input of the model.
    labels:  (B, H, W) uint8, learnt indices: 0 background, 1.. in the order of learning, 255 ignored.
    counts:  (256,) float, number of pixels with each label: the mean over all parts, so that dividing a local sum by it
             and averaging gradients gives the mean over the whole batch.
    images:  numbers of the images in the dataset; -1 for an image from outside.
    """

    inputs: Inputs
    labels: Tensor
    counts: Tensor
    images: Sequence[int] = ()

    @property
    def valid_pixels(self) -> Tensor:
        """Number of pixels with a label; slightly above zero if there are none, so that a void batch has loss 0."""
        return (self.counts.sum() - self.counts[IGNORE]).clamp(min=1e-6)

    @property
    def share(self) -> Tensor:
        """Images of this part divided by the mean number over all parts. A mean over images times this factor averages
        to the mean over the whole batch, even if parts differ by one image."""
        return self.labels.numel() / self.counts.sum()

    @property
    def size(self) -> tuple[int, int]:
        return self.labels.shape[-2], self.labels.shape[-1]

    def parts(self, number: int) -> list[Batch]:
        """Split into micro-batches. Images are assigned in turn, so replay images at the end are spread over all."""

        def dealt(first: int) -> Inputs:
            if isinstance(self.inputs, tuple):
                return tuple(part[first::number] for part in self.inputs)
            return self.inputs[first::number]

        if number == 1:
            return [self]
        counts = self.counts / number
        return [Batch(dealt(i), self.labels[i::number], counts, self.images[i::number]) for i in range(number)]


@dataclass
class Output:
    """The output of the network, at the network's resolution.

    logits:    (B, C, h, w), one channel per output, in the order of learning.
    embedding: (B, D, h, w), input of the classifiers.
    stages:    the backbone's stages, shallow to deep, without their last activation; none with cached features.
    encoded:   the backbone's output: the last stage, with its activation; None with cached features.
    """

    logits: Tensor
    embedding: Tensor
    stages: tuple[Tensor, ...] = ()
    encoded: Tensor | None = None


class Prediction:
    """The prediction of a method for each pixel, by its own decision rule.

    labels:        (B, H, W) uint8 learnt indices.
    probabilities: (B, C+1, H, W), background first; they sum to one.
    uncertainty:   (B, H, W) in [0, 1].

    Often only labels are needed, which is much faster; so the other two may be functions, called on first access.
    """

    def __init__(self, labels: Tensor, probabilities: Later, uncertainty: Later) -> None:
        self.labels = labels
        self._probabilities, self._uncertainty = probabilities, uncertainty

    @cached_property
    def probabilities(self) -> Tensor:
        return self._probabilities() if callable(self._probabilities) else self._probabilities

    @cached_property
    def uncertainty(self) -> Tensor:
        return self._uncertainty() if callable(self._uncertainty) else self._uncertainty
