"""The evidential losses: cross-entropy and distillation of the Dirichlet of each pixel.

They exist in two forms. In log space (`evidential_cross_entropy`, `distill_foreground`, `distill_uncertainty`) they
hold for all scores, and autograd differentiates them. `evidential_losses` has the gradient in closed form, in a third
of the time and memory. With e = rectifier(z) and e′ its derivative, T = Σe and S = T + K over a scope, and q, u′ the
teacher's p^fg and u,

    foreground   −log T + 2 log S − log(1 + e_y)        d/de_i = 2/S − 1/T − [i = y] / (1 + e_y)
    background   log S − log K                          d/de_i = 1/S
    L_KD-fg      log S − Σ q_i log(1 + e_i)             d/de_i = 1/S − q_i / (1 + e_i)
    L_KD-u       log S − u′ log K − (1 − u′) log T      d/de_i = 1/S − (1 − u′)/T

so that all but one term of the gradient is a factor per pixel times e′. The closed form uses evidence itself, not its
logarithm: `fits` checks that float32 can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from incseg.losses.least_squares import double
from incseg.outputs.evidential import RELU_FLOOR, Dirichlet, Rectifier, dirichlet, log_one_plus
from incseg.types import BACKGROUND, IGNORE

LIMIT = 40.0
"""exp(±2·40) is a normal float32."""


def evidential_cross_entropy(
    logits: Tensor, labels: Tensor, rectifier: Rectifier = "exp_sigmoid"
) -> tuple[Tensor, Tensor]:
    """−log p_y per pixel, as (foreground part, background part): one of them is zero at every pixel.

    logits (B, K, …) of the scope; labels (B, …) with 0 background, 1..K the scope's classes, 255 ignored.
    The parts are separate because their weights can differ. Only the probability of the label is computed, not all
    K+1.
    """
    d = dirichlet(logits, rectifier)
    is_background, is_foreground = labels == 0, (labels != 0) & (labels != IGNORE)
    own = (labels.long() - 1).clamp(0, logits.shape[1] - 1).unsqueeze(1)
    log_own_alpha = log_one_plus(d.log_evidence.gather(1, own).squeeze(1))
    foreground = d.log_certainty + log_own_alpha - d.log_strength
    zero = foreground.new_zeros(())
    return (
        -torch.where(is_foreground, foreground, zero),
        -torch.where(is_background, d.log_uncertainty, zero),
    )


def increments_cross_entropy(
    logits: Tensor, labels: Tensor, sizes: Sequence[int], rectifier: Rectifier = "exp_sigmoid"
) -> Tensor:
    """Σ_k −log p_y^(k) per pixel, with the Dirichlet of increment k over its own sizes[k] classes, as in its training.
    A class of another increment is background for it, so one term is −log p_y and the others are −log u.

    logits (B, N, …) with N = Σ sizes; labels (B, …) with 0 background, 1..N, 255 ignored. With one increment it is the
    sum of both parts of `evidential_cross_entropy`.
    """
    total, first = logits.new_zeros(labels.shape), 0
    for size, part in zip(sizes, logits.split(list(sizes), 1), strict=True):
        own = (labels > first) & (labels <= first + size)
        of_own = torch.where(own, labels - first, BACKGROUND)
        of_own = torch.where(labels == IGNORE, labels, of_own)
        foreground, background = evidential_cross_entropy(part, of_own, rectifier)
        total = total + foreground + background
        first += size
    return total


def distill_foreground(student: Dirichlet, teacher: Dirichlet) -> Tensor:
    """−Σ_i p^fg_i(teacher)·log p^fg_i(student) per pixel; minimal where student and teacher agree."""
    return -(teacher.log_foreground.exp() * student.log_foreground).sum(1)


def distill_uncertainty(student: Dirichlet, teacher: Dirichlet) -> Tensor:
    """−[u' log u + (1−u') log(1−u)] per pixel, u' the teacher's; minimal at u = u'.

    The paper prints the second term with the other sign, whose minimum is u = 1 for every teacher.
    """
    u = teacher.log_uncertainty.exp()
    certainty = teacher.log_certainty.exp()
    return -(u * student.log_uncertainty + certainty * student.log_certainty)


def foreground_background_weights(
    num_background: Tensor, num_foreground: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """(w_0, w_fg) = min(limit, N_total / N_set); 0 for an empty set."""
    total = num_background + num_foreground

    def weight(count: Tensor) -> Tensor:
        # a count may be below one: it is a mean over processes
        return torch.where(count > 0, (total / count).clamp(max=limit), torch.zeros_like(total))

    return weight(num_background), weight(num_foreground)


def inverse_frequency_weights(counts: Tensor, power: float) -> Tensor:
    """(256,) weight of a pixel by its label, w_c ∝ n_c^(−power), scaled so that the weights of all pixels sum to their
    number; 0 for labels that no pixel has and for ignored ones.

    With power 0 all pixels have the same weight; with power 1 all labels have the same total weight.
    """
    device, counts = counts.device, double(counts).clone()
    counts[IGNORE] = 0
    weights = torch.where(counts > 0, counts.clamp(min=1).pow(-power), torch.zeros_like(counts))
    return (weights * counts.sum() / (weights * counts).sum().clamp(min=1e-12)).float().to(device)


def fits(*scores: Tensor) -> bool:
    """Return whether evidence of these scores neither overflows nor vanishes."""
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
"""Evidence and its derivative."""


def _cross_entropy(
    logits: Tensor, labels: Tensor, rectifier: Rectifier, of_foreground: Tensor, of_background: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of both parts of `evidential_cross_entropy`, times their scales, and its gradient."""
    size = logits.shape[1]
    e, slope = _EVIDENCE[rectifier](logits)
    total = e.sum(1)
    strength = total + size
    is_background = labels == BACKGROUND
    is_foreground = (labels != IGNORE) & ~is_background
    own = (labels.long() - 1).clamp_(0, size - 1).unsqueeze(1)
    own_alpha = e.gather(1, own).squeeze(1).add_(1)
    at_foreground, at_background = is_foreground * of_foreground, is_background * of_background
    log_strength = (total / size).log1p_()  # exact even if the probability of background is almost one
    foreground = 2 * (log_strength + math.log(size)) - total.log() - own_alpha.log()
    factor = at_foreground * (2 / strength - 1 / total) + at_background / strength
    pull = slope.gather(1, own).squeeze(1).mul_(at_foreground / own_alpha)
    # In place: a new array costs several times the page faults, as the allocator returns memory after each strip.
    gradient = slope.mul_(factor.unsqueeze(1)).scatter_add_(1, own, -pull.unsqueeze(1))
    return (at_foreground * foreground).sum() + (at_background * log_strength).sum(), gradient


def _distillation(
    logits: Tensor, teacher_logits: Tensor, rectifier: Rectifier, of_foreground: Tensor, of_uncertainty: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of `distill_foreground` and `distill_uncertainty`, times their scales, and their gradient."""
    size = logits.shape[1]
    e, slope = _EVIDENCE[rectifier](logits)
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
    factor = (of_foreground + of_uncertainty) / strength - of_uncertainty * certainty / total
    gradient = wanted.div_(alpha).mul_(-of_foreground).add_(factor.unsqueeze(1)).mul_(slope)
    return of_foreground * foreground, of_uncertainty * uncertainty, gradient


def _with_gradient(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, skipped: int, rectifier: Rectifier, scales: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the terms of `evidential_losses` and the gradient of their sum."""
    new, gradient = _cross_entropy(logits[:, skipped:], labels, rectifier, scales[0], scales[1])
    if teacher is None:
        return (new,), F.pad(gradient, (0, 0, 0, 0, skipped, 0)) if skipped else gradient
    num_old = teacher.shape[1]
    foreground, uncertainty, of_old = _distillation(logits[:, :num_old], teacher, rectifier, scales[2], scales[3])
    if skipped:
        gradient = torch.cat([of_old, gradient], dim=1)
    else:
        gradient[:, :num_old] += of_old
    return (new, foreground, uncertainty), gradient


class _ClosedForm(torch.autograd.Function):
    """The terms, with the gradient of their sum computed in the forward pass, so that nothing else must be stored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        skipped: int,
        rectifier: Rectifier,
        *scales: Tensor,
    ) -> tuple[Tensor, ...]:
        terms, ctx.gradient = _with_gradient(logits, labels, teacher, skipped, rectifier, scales)
        ctx.save_for_backward(logits, labels, teacher, *scales)
        ctx.skipped, ctx.rectifier = skipped, rectifier
        return terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, teacher, *scales = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None  # the receiver may change it
        if gradient is None or not bool((torch.stack(upstream) == 1).all()):
            weighted = [scale * one for scale, one in zip(scales, upstream[:1] + upstream, strict=False)]
            _, gradient = _with_gradient(logits, labels, teacher, ctx.skipped, ctx.rectifier, weighted)
        return gradient, *[None] * (4 + len(scales))


def evidential_losses(
    logits: Tensor,
    labels: Tensor,
    scales: Sequence[Tensor],
    teacher_logits: Tensor | None = None,
    skipped: int = 0,
    rectifier: Rectifier = "exp_sigmoid",
    closed_form: bool = True,
) -> tuple[Tensor, ...]:
    """Return the scaled sums over pixels of `evidential_cross_entropy` and, with a teacher, of `distill_foreground` and
    `distill_uncertainty`.

    logits (B, K, H, W); labels (B, H, W) of the scope, which leaves out the first `skipped` classes; teacher_logits
    (B, K', H, W) of the first K' classes, which are the skipped ones if any are skipped. scales: four factors, of
    foreground pixels (one number or a map), background pixels, and both distillations. They are arguments because the
    closed form computes the gradient together with the terms. It needs scores that fit (`fits`); log space takes all.
    """
    if teacher_logits is not None and skipped not in (0, teacher_logits.shape[1]):
        raise ValueError(f"{skipped} classes are skipped, and the teacher has {teacher_logits.shape[1]}")
    if closed_form:
        return _ClosedForm.apply(logits, labels, teacher_logits, skipped, rectifier, *scales)
    of_foreground, of_background, *of_old = scales
    foreground, background = evidential_cross_entropy(logits[:, skipped:], labels, rectifier)
    weighted = (of_foreground * foreground).sum() if of_foreground.ndim else of_foreground * foreground.sum()
    new = weighted + of_background * background.sum()
    if teacher_logits is None:
        return (new,)
    student, teacher = dirichlet(logits[:, : teacher_logits.shape[1]], rectifier), dirichlet(teacher_logits, rectifier)
    maps = distill_foreground(student, teacher), distill_uncertainty(student, teacher)
    return new, *(scale * values.sum() for scale, values in zip(of_old, maps, strict=True))
