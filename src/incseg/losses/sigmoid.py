"""The sigmoid model of a pixel: a binary decision per class. Used by LwF-MC, SSUL and DKD.

If exactly one of several independent classes is true, the probability of class c is ∝ exp(z_c). So the arg-max of
`softmax_prediction` is also the largest sigmoid. Classes are dimension 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.types import BACKGROUND, IGNORE


def log_one_plus_exp(z: Tensor) -> Tensor:
    """−log(1 − σ(z)): the loss of a negative."""
    return F.softplus(z, threshold=40)  # the default, 20, cuts float64 short


def binary_cross_entropy(logits: Tensor, labels: Tensor, first: int = 0, positive_weight: float = 1.0) -> Tensor:
    """Σ_c BCE(σ(z_c), 1[y = c]) per pixel, channel k being label first + k; zero where the label is ignored.

    (B, C, …), (B, …) → (B, …). A label without a channel is a negative for all. Only the term of c = y is multiplied by
    `positive_weight`; 1 is the plain loss.
    """
    own = labels.long() - first
    has_channel = (own >= 0) & (own < logits.shape[1])
    score = logits.gather(1, own.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    zero = torch.zeros_like(score)
    loss = log_one_plus_exp(logits).sum(1) - torch.where(has_channel, score, zero)
    if positive_weight != 1:
        loss = loss + (positive_weight - 1) * torch.where(has_channel, log_one_plus_exp(-score), zero)
    return torch.where(labels == IGNORE, zero, loss)


def binary_distillation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Σ_c BCE(σ(z_c), σ(teacher_c)) per pixel, (B, C, …) → (B, …); minimal where both agree."""
    return (log_one_plus_exp(logits) - teacher_logits.sigmoid() * logits).sum(1)


def sure_background(labels: Tensor, teacher_logits: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Return two masks of background pixels where the teacher is confident: of background, and of an old class.

    Confident means that the largest sigmoid is at least `confidence`. Other pixels are in neither mask.
    """
    strongest = teacher_logits.max(1)
    threshold = math.log(confidence / (1 - confidence))
    sure = (labels == BACKGROUND) & (strongest.values >= threshold)
    return sure & (strongest.indices == 0), sure & (strongest.indices > 0)


def decompose(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores for and against each class: features times the positive and the negative part of the weights.

    features (B, D, h, w), weight (C, D, 1, 1) → two of (B, C, h, w). They sum to the logits without bias.
    """
    return F.conv2d(features, weight.clamp(min=0)), F.conv2d(features, weight.clamp(max=0))
