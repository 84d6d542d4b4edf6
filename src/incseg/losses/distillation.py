"""Distillation of outputs."""

from __future__ import annotations

from torch import Tensor


def output_distillation_sum(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Σ −(1/|O|) Σ_c softmax(z_old)_c·log softmax(z[O])_c over pixels, O the teacher's outputs."""
    num_old = teacher_logits.shape[1]
    return -(teacher_logits.softmax(1) * logits[:, :num_old].log_softmax(1)).sum() / num_old
