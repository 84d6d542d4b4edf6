"""Changes of the labels of a batch: to another scope of classes, or with background filled in."""

from __future__ import annotations

import torch
from torch import Tensor

from incseg.types import BACKGROUND, IGNORE


def shifted(labels: Tensor, skipped: int) -> Tensor:
    """Return learnt labels as labels of a scope without the first `skipped` classes, which must not occur.

    Background and ignored pixels do not change.
    """
    if skipped == 0:
        return labels
    unchanged = (labels == BACKGROUND) | (labels == IGNORE)
    return torch.where(unchanged, labels, labels - skipped)


def fill_background(labels: Tensor, other: Tensor) -> Tensor:
    """Return the labels with background pixels replaced by those of `other`; all other pixels do not change.

    labels (…) uint8; other has the same shape.
    """
    return torch.where(labels == BACKGROUND, other.to(labels.dtype), labels)
