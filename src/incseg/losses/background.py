"""MiB's two losses: background stands for old classes in the labels, for new ones in the teacher's eyes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.types import IGNORE


def background_cross_entropy_sum(logits: Tensor, labels: Tensor, num_old: int) -> Tensor:
    """Σ −log p_y over labelled pixels, p of background summed over the `num_old` old outputs, background's included.

    Equals cross-entropy when only background is old (num_old = 1).
    """
    log_total = logits.logsumexp(1, keepdim=True)
    log_background = logits[:, :num_old].logsumexp(1, keepdim=True) - log_total
    log_p = torch.cat([log_background, logits[:, 1:] - log_total], dim=1)
    return F.nll_loss(log_p, labels.long(), ignore_index=IGNORE, reduction="sum")


def background_distillation_sum(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Σ −(1/|O|) Σ_c q_old(c)·log p(c) over pixels, p of background summed over it and the new classes."""
    num_old = teacher_logits.shape[1]
    log_total = logits.logsumexp(1, keepdim=True)
    background = torch.cat([logits[:, :1], logits[:, num_old:]], dim=1).logsumexp(1, keepdim=True)
    log_p = torch.cat([background, logits[:, 1:num_old]], dim=1) - log_total
    return -(teacher_logits.softmax(1) * log_p).sum() / num_old
