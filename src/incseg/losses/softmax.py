"""Softmax cross-entropy of pixels. Background is an output like the others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from incseg.types import IGNORE


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ −log softmax(z)_y over the pixels that are not ignored; zero if all are."""
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="sum")


def cross_entropy_per_image(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) Σ −log softmax(z)_y over each image's pixels that are not ignored: the parts of `cross_entropy_sum`."""
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="none").flatten(1).sum(1)
