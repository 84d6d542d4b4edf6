"""The sigmoid model of a pixel: every output says yes or no for itself, background too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.types import IGNORE, Prediction


def binary_cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ over the pixels that are not ignored of Σ_c BCE(z_c, 1[y = c]); zero where all are.

    logits (B, C, …), labels (B, …). C·log 2 per pixel where the scores say nothing (z = 0).
    """
    valid = (labels != IGNORE).unsqueeze(1)
    own = torch.where(valid, labels.long().unsqueeze(1), 0)
    yes = torch.zeros_like(logits).scatter_(1, own, 1.0)
    losses = F.binary_cross_entropy_with_logits(logits, yes, reduction="none")
    return torch.where(valid, losses, 0).sum()


def sigmoid_prediction(logits: Tensor) -> Prediction:
    """The output with the highest score, background among them.

    Probabilities are the sigmoids divided by their sum, formed by logarithms so that scores which are all far below
    zero still have one; they keep the order of the scores. The uncertainty is 1 − max_c σ(z_c): one where no output
    says yes, which a softmax cannot express.
    """
    highest = logits.max(1)
    return Prediction(
        labels=highest.indices.to(torch.uint8),
        probabilities=F.logsigmoid(logits).softmax(1),
        uncertainty=(-highest.values).sigmoid(),
    )
