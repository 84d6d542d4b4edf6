"""The softmax model of a pixel, background an output like the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from incseg.types import Prediction


def normalised_entropy(probabilities: Tensor) -> Tensor:
    """(B, C, …) → (B, …) entropy over classes as a share of its maximum log C, in [0, 1]."""
    entropy = -torch.xlogy(probabilities, probabilities).sum(1)
    return (entropy / math.log(max(probabilities.shape[1], 2))).clamp(0, 1)


def softmax_prediction(logits: Tensor) -> Prediction:
    """Arg-max of the softmax; its uncertainty is the normalised entropy."""
    labels = logits.max(1).indices.to(torch.uint8)  # argmax(1) takes three times as long on the CPU
    return Prediction(labels, lambda: logits.softmax(1), lambda: normalised_entropy(logits.softmax(1)))
