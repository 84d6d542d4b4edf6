"""Loss terms with the pixels or images that they average over. The engine divides, so that the result does not depend
on the number of parts of a batch.

The images of an update are divided among processes and micro-batches, and gradients are averaged over these parts. A
sum over the pixels of one part is therefore divided by the mean number of pixels of a part, not by its own number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from incseg.types import Batch

Pixels = Literal["labelled", "all"]


def pixel_count(batch: Batch, over: Pixels = "labelled") -> Tensor:
    """Return the number of pixels to divide by: those with a label, or all including void ones."""
    return batch.valid_pixels if over == "labelled" else batch.counts.sum()


@dataclass(frozen=True)
class PixelMean:
    """The mean of per-pixel values over the whole batch, times a weight.

    values: (B, h, w) at any resolution, or their sum at the resolution of the labels.
    weight: weight of the term; None for 1.
    over:   pixels to average over: those with a label, or all including void ones.
    each:   weight of each value, or one for all.
    """

    values: Tensor
    weight: float | None = None
    over: Pixels = "labelled"
    each: Tensor | None = None

    def scalar(self, batch: Batch, in_strips: bool = False) -> Tensor:
        """Return the term. Set `in_strips` if the values are rows of a map at the resolution of the labels."""
        pixels = pixel_count(batch, self.over)
        if self.values.ndim == 3 and not in_strips:
            positions = self.values.shape[-2:].numel() / batch.labels.shape[-2:].numel()
            pixels = pixels * positions if positions != 1 else pixels
        if self.weight is None and self.each is None:
            return self.values.sum() / pixels
        scale = (1.0 if self.weight is None else self.weight) / pixels
        return self.values.sum() * scale if self.each is None else (scale * self.each * self.values).sum()


@dataclass(frozen=True)
class PixelSum:
    """A sum over pixels, divided by `pixel_count` already, for losses that need their scale in advance."""

    value: Tensor

    def scalar(self, batch: Batch, in_strips: bool = False) -> Tensor:
        return self.value


PixelTerm = PixelMean | PixelSum
"""A loss term of pixels."""


@dataclass(frozen=True)
class ImageMean:
    """A mean over the images of this part, already weighted."""

    value: Tensor

    def scalar(self, batch: Batch) -> Tensor:
        return self.value * batch.share


Term = Tensor | PixelTerm | ImageMean
"""A loss term. A plain tensor, such as a penalty on parameters, is a term of the whole batch and is not scaled."""


def normalised(terms: Mapping[str, Term], batch: Batch) -> dict[str, Tensor]:
    """Return the terms as scalars whose mean over the parts is that of the whole batch."""
    return {name: term if isinstance(term, Tensor) else term.scalar(batch) for name, term in terms.items()}
