"""Labels of a batch seen otherwise: over another scope of classes, or with the background filled in."""

from __future__ import annotations

import torch
from torch import Tensor

from incseg.types import BACKGROUND, IGNORE


def shifted(labels: Tensor, skipped: int) -> Tensor:
    """Learnt labels → labels of a scope that leaves out the first `skipped` classes, none of which may occur.

    Background and ignored pixels stay; with nothing skipped, all do.
    """
    if skipped == 0:
        return labels
    keep = (labels == BACKGROUND) | (labels == IGNORE)
    return torch.where(keep, labels, labels - skipped)


def fill_background(labels: Tensor, other: Tensor) -> Tensor:
    """Background pixels take the label that `other` gives them, all others keep their own.

    labels (…) uint8; other, of the same shape, is background where it knows nothing better: then nothing changes.
    """
    return torch.where(labels == BACKGROUND, other.to(labels.dtype), labels)
