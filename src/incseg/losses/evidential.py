"""The evidential losses: cross-entropy and distillation of the Dirichlet of each pixel.

They come twice. In log space (`evidential_cross_entropy`, `distill_foreground`, `distill_uncertainty`) they hold for
all scores and are differentiated by autograd. `evidential_losses` has the gradient in closed form, in a third of the
time and memory. With e = rectifier(z) and e′ its derivative, T = Σe and S = T + K over a scope, and q, u′ the teacher's
p^fg and u,

    foreground   −log T + 2 log S − log(1 + e_y)        d/de_i = 2/S − 1/T − [i = y] / (1 + e_y)
    background   log S − log K                          d/de_i = 1/S
    L_KD-fg      log S − Σ q_i log(1 + e_i)             d/de_i = 1/S − q_i / (1 + e_i)
    L_KD-u       log S − u′ log K − (1 − u′) log T      d/de_i = 1/S − (1 − u′)/T

so that all but one term of the gradient is a factor per pixel times e′. Evidence is not taken by its logarithm there:
`fits` says where float32 holds all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from incseg.outputs.evidential import RELU_FLOOR, Dirichlet, Rectifier, dirichlet, log_one_plus
from incseg.types import BACKGROUND, IGNORE

LIMIT = 40.0
"""exp(±2·40) is a normal float32."""


def evidential_cross_entropy(
    logits: Tensor, labels: Tensor, rectifier: Rectifier = "exp_sigmoid"
) -> tuple[Tensor, Tensor]:
    """−log p_y per pixel, as (foreground part, background part): one of them is zero at every pixel.

    logits (B, K, …) of the scope; labels (B, …) with 0 background, 1..K the scope's classes, 255 ignored.
    The parts come apart because the foreground-background weight treats them apart. Only the label's own
    probability is formed, never all K+1.
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
    """Σ_k −log p_y^(k) per pixel, increment k's Dirichlet over its own sizes[k] classes only: what each of them was
    trained by. A class of another increment is background to it, so that one term is −log p_y, the others −log u.

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
    """(w_0, w_fg) = min(limit, N_total / N_set); an empty set weighs nothing."""
    total = num_background + num_foreground

    def weight(count: Tensor) -> Tensor:
        # a count may lie below one: it is the mean over processes
        return torch.where(count > 0, (total / count).clamp(max=limit), torch.zeros_like(total))

    return weight(num_background), weight(num_foreground)


def inverse_frequency_weights(counts: Tensor, power: float) -> Tensor:
    """(256,) weight of a pixel by its label, w_c ∝ n_c^(−power), scaled so that the weights of all pixels sum to their
    number; 0 for labels that no pixel has and for ignored ones.

    power 0 weighs all pixels alike; with power 1 every label counts as much as every other, however rare.
    """
    counts = counts.double().clone()
    counts[IGNORE] = 0
    weights = torch.where(counts > 0, counts.clamp(min=1).pow(-power), torch.zeros_like(counts))
    return (weights * counts.sum() / (weights * counts).sum().clamp(min=1e-12)).float()


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


class _CrossEntropy:
    """Both parts of `evidential_cross_entropy` as maps, and their gradient for given weights of the pixels."""

    def losses(self, logits: Tensor, labels: Tensor, rectifier: Rectifier) -> tuple[Tensor, Tensor]:
        size = logits.shape[1]
        e, self._slope = _EVIDENCE[rectifier](logits)
        self._total = e.sum(1)
        self._strength = self._total + size
        self._is_background = labels == BACKGROUND
        self._is_foreground = (labels != IGNORE) & ~self._is_background
        self._own = (labels.long() - 1).clamp_(0, size - 1).unsqueeze(1)
        self._own_alpha = e.gather(1, self._own).squeeze(1).add_(1)
        log_strength = (self._total / size).log1p_()  # the background's probability is exact where it is nearly one
        foreground = 2 * (log_strength + math.log(size)) - self._total.log() - self._own_alpha.log()
        return self._is_foreground * foreground, self._is_background * log_strength

    def gradient(self, of_foreground: Tensor, of_background: Tensor) -> Tensor:
        """Return the gradient by the logits; works in place, so it is asked for once."""
        at_foreground, at_background = self._is_foreground * of_foreground, self._is_background * of_background
        factor = at_foreground * (2 / self._strength - 1 / self._total) + at_background / self._strength
        pull = self._slope.gather(1, self._own).squeeze(1).mul_(at_foreground / self._own_alpha)
        gradient = self._slope.mul_(factor.unsqueeze(1))
        return gradient.scatter_add_(1, self._own, -pull.unsqueeze(1))


class _Distillation:
    """The sums of `distill_foreground` and `distill_uncertainty`, and their gradient for given weights of both."""

    def losses(self, logits: Tensor, teacher_logits: Tensor, rectifier: Rectifier) -> tuple[Tensor, Tensor]:
        size = logits.shape[1]
        e, self._slope = _EVIDENCE[rectifier](logits)
        wanted = _EVIDENCE[rectifier](teacher_logits)[0]
        teacher_total = wanted.sum(1)
        teacher_strength = teacher_total + size
        self._certainty = teacher_total / teacher_strength
        wanted = wanted.add_(1).div_(teacher_strength.unsqueeze(1))
        self._total = e.sum(1)
        self._strength = self._total + size
        log_strength = (self._total / size).log1p_() + math.log(size)
        alpha = e.add_(1)
        foreground = log_strength.sum() - torch.dot(alpha.log().flatten(), wanted.flatten())
        self._pull = wanted.div_(alpha)
        certainty = self._certainty
        uncertainty = log_strength - (1 - certainty) * math.log(size) - certainty * self._total.log()
        return foreground, uncertainty.sum()

    def gradient(self, of_foreground: Tensor, of_uncertainty: Tensor) -> Tensor:
        """Return the gradient by the logits; works in place, so it is asked for once."""
        factor = (of_foreground + of_uncertainty) / self._strength - of_uncertainty * self._certainty / self._total
        return self._pull.mul_(-of_foreground).add_(factor.unsqueeze(1)).mul_(self._slope)


class _EvidentialLosses(torch.autograd.Function):
    """One function for all terms, so that the gradients of old and new classes are never padded and added."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, skipped: int, rectifier: Rectifier
    ) -> tuple[Tensor, ...]:
        ctx.skipped, ctx.parts = skipped, [_CrossEntropy()]
        losses = ctx.parts[0].losses(logits[:, skipped:], labels, rectifier)
        if teacher_logits is None:
            return losses
        ctx.parts.append(_Distillation())
        return losses + ctx.parts[1].losses(logits[:, : teacher_logits.shape[1]], teacher_logits, rectifier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        new, *old = ctx.parts
        ctx.parts = None  # what they hold is large, and the graph may live longer
        gradient = new.gradient(*upstream[:2])
        of_old = old[0].gradient(*upstream[2:]) if old else None
        if of_old is not None and ctx.skipped:
            gradient = torch.cat([of_old, gradient], dim=1)
        elif of_old is not None:
            gradient[:, : of_old.shape[1]] += of_old
        elif ctx.skipped:
            gradient = F.pad(gradient, (0, 0, 0, 0, ctx.skipped, 0))
        return gradient, None, None, None, None


def evidential_losses(
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None = None,
    skipped: int = 0,
    rectifier: Rectifier = "exp_sigmoid",
) -> tuple[Tensor, ...]:
    """Return both parts of `evidential_cross_entropy` as maps and, with a teacher, the sums of `distill_foreground` and
    `distill_uncertainty`; their gradient is in closed form and can be asked for once.

    logits (B, K, H, W); labels (B, H, W) of the scope, which leaves out the first `skipped` classes; teacher_logits
    (B, K', H, W) of the first K' classes; where classes are skipped, these are just they. All scores must fit (`fits`).
    """
    if teacher_logits is not None and skipped not in (0, teacher_logits.shape[1]):
        raise ValueError(f"{skipped} classes are skipped, and the teacher has {teacher_logits.shape[1]}")
    return _EvidentialLosses.apply(logits, labels, teacher_logits, skipped, rectifier)
