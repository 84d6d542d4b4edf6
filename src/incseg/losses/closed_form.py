"""The evidential losses of a strip with their gradient in closed form: a third of autograd's time and memory.

With e = rectifier(z) and e′ its derivative, T = Σe and S = T + K over a scope, and q, u′ the teacher's p^fg and u,

    foreground   −log T + 2 log S − log(1 + e_y)        d/de_i = 2/S − 1/T − [i = y] / (1 + e_y)
    background   log S − log K                          d/de_i = 1/S
    L_KD-fg      log S − Σ q_i log(1 + e_i)             d/de_i = 1/S − q_i / (1 + e_i)
    L_KD-u       log S − u′ log K − (1 − u′) log T      d/de_i = 1/S − (1 − u′)/T

so that all but one term of the gradient is a factor per pixel times e′. Evidence is not taken by its logarithm here:
`fits` says where float32 holds all of it, and elsewhere `incseg.losses.evidential` has the same losses in log space.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.evidential import RELU_FLOOR, Rectifier
from incseg.types import BACKGROUND, IGNORE

LIMIT = 40.0
"""exp(±2·40) is a normal float32."""


def fits(*scores: Tensor) -> bool:
    """Whether evidence of these scores neither overflows nor vanishes."""
    ends = [end for z in scores if z.numel() for end in torch.aminmax(z.detach())]
    return all(-LIMIT <= float(end) <= LIMIT for end in ends)


def _exp_sigmoid(z: Tensor) -> tuple[Tensor, Tensor]:
    a = z.exp()
    share = a / (a + 1)
    e = a.mul_(share)
    return e, share.neg_().add_(2).mul_(e)


def _exp(z: Tensor) -> tuple[Tensor, Tensor]:
    e = z.exp()
    return e, e.clone()


def _relu(z: Tensor) -> tuple[Tensor, Tensor]:
    return z.clamp(min=RELU_FLOOR), (z >= RELU_FLOOR).to(z)


def _softplus(z: Tensor) -> tuple[Tensor, Tensor]:
    return F.softplus(z), z.sigmoid()


_EVIDENCE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "exp_sigmoid": _exp_sigmoid,
    "exp": _exp,
    "relu": _relu,
    "softplus": _softplus,
}


def cross_entropy_with_gradient(
    logits: Tensor, labels: Tensor, rectifier: Rectifier, foreground_scale: Tensor, background_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Both parts of `evidential_cross_entropy`, each times its scale, summed; and the gradient by the logits."""
    e, slope = _EVIDENCE[rectifier](logits)
    size = logits.shape[1]
    total = e.sum(1)
    strength = total + size
    is_background = labels == BACKGROUND
    is_foreground = (labels != IGNORE) & ~is_background
    own = (labels.long() - 1).clamp_(0, size - 1).unsqueeze(1)
    own_alpha = e.gather(1, own).squeeze(1).add_(1)
    at_foreground = is_foreground * foreground_scale
    at_background = is_background * background_scale
    log_strength = (total / size).log1p_()  # and the background's probability is exact where it is nearly one
    foreground = 2 * (log_strength + math.log(size)) - total.log() - own_alpha.log()
    loss = (at_foreground * foreground).sum() + (at_background * log_strength).sum()
    factor = at_foreground * (2 / strength - 1 / total) + at_background / strength
    pull = slope.gather(1, own).squeeze(1).mul_(at_foreground / own_alpha)
    gradient = slope.mul_(factor.unsqueeze(1))
    return loss, gradient.scatter_add_(1, own, -pull.unsqueeze(1))


def distillation_with_gradient(
    logits: Tensor, teacher_logits: Tensor, rectifier: Rectifier, foreground_scale: Tensor, uncertainty_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`distill_foreground` and `distill_uncertainty`, each times its scale and summed; and the gradient of both."""
    e, slope = _EVIDENCE[rectifier](logits)
    size = logits.shape[1]
    wanted = _EVIDENCE[rectifier](teacher_logits)[0]
    teacher_total = wanted.sum(1)
    teacher_strength = teacher_total + size
    certainty = teacher_total / teacher_strength
    wanted = wanted.add_(1).div_(teacher_strength.unsqueeze(1))
    total = e.sum(1)
    strength = total + size
    log_strength = (total / size).log1p_() + math.log(size)
    alpha = e.add_(1)
    foreground = log_strength.sum() - torch.dot(alpha.log().flatten(), wanted.flatten())
    uncertainty = (log_strength - (1 - certainty) * math.log(size) - certainty * total.log()).sum()
    factor = (foreground_scale + uncertainty_scale) / strength - uncertainty_scale * certainty / total
    gradient = wanted.div_(alpha).mul_(-foreground_scale).add_(factor.unsqueeze(1)).mul_(slope)
    return foreground_scale * foreground, uncertainty_scale * uncertainty, gradient
