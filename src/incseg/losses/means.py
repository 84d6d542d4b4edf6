"""What a loss term is a mean over. Methods name it; the engine divides, so that any number of parts gives one result.

An update's images are dealt out to processes and micro-batches, and gradients are averaged over these parts. A sum over
the pixels of a part is therefore divided by the pixels of a mean part, not by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from incseg.types import Batch


@dataclass(frozen=True)
class PixelMean:
    """The mean of per-pixel values over the whole batch, times a weight.

    values:  (B, h, w) at any resolution, or sums of them at that of the labels.
    weight:  of the term; None for 1.
    over:    the pixels that the mean counts: those with a label, or all, void ones too.
    each:    a weight for every value, or one for all.
    classes: values are sums over so many classes, and their mean is meant.
    """

    values: Tensor
    weight: float | None = None
    over: Literal["labelled", "all"] = "labelled"
    each: Tensor | None = None
    classes: int = 1

    def scalar(self, batch: Batch, positions: float = 1.0) -> Tensor:
        """Return the term; `positions` says how many values there are per pixel."""
        pixels = batch.valid_pixels if self.over == "labelled" else batch.counts.sum()
        if positions != 1:
            pixels = pixels * positions
        if self.weight is None and self.each is None:
            return self.values.sum() / pixels
        scale = (1.0 if self.weight is None else self.weight) / pixels / self.classes
        return self.values.sum() * scale if self.each is None else (scale * self.each * self.values).sum()


PixelTerm = PixelMean | tuple[PixelMean, ...]
"""A loss term of pixels; several means are added."""


def pixel_scalar(term: PixelTerm, batch: Batch, in_strips: bool) -> Tensor:
    """Return a term of pixels as a scalar; `in_strips` where the values are a part of a map that is as large as the
    labels, as sums always are."""
    total: Tensor | None = None
    for mean in (term,) if isinstance(term, PixelMean) else term:
        whole = mean.values.ndim == 3 and not in_strips
        positions = mean.values.shape[-2:].numel() / batch.labels.shape[-2:].numel() if whole else 1.0
        value = mean.scalar(batch, positions)
        total = value if total is None else total + value
    assert total is not None
    return total


@dataclass(frozen=True)
class ImageMean:
    """A mean over the images of this part, already weighted."""

    value: Tensor


Term = Tensor | PixelTerm | ImageMean
"""A loss term; a tensor is one of the whole batch and taken as it is, such as a penalty on parameters."""


def normalised(terms: Mapping[str, Term], batch: Batch) -> dict[str, Tensor]:
    """Return the terms as scalars whose mean over the parts is that of the whole batch."""

    def scalar(term: Term) -> Tensor:
        if isinstance(term, Tensor):
            return term
        return term.value * batch.share if isinstance(term, ImageMean) else pixel_scalar(term, batch, in_strips=False)

    return {name: scalar(term) for name, term in terms.items()}
