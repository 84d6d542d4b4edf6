"""The evidential model of a pixel: scores → evidence → Dirichlet → probabilities, all in log space.

A pixel has one raw score z_i per foreground class and no background output. With e = rectifier(z),
α = e + 1 and S = Σα over a scope of K classes,

    background     p_0 = u = K / S
    class i        p_i = (1 − u) · α_i / S

which sum to one. exp(z) overflows float32 at z = 89, so scores are not exponentiated: the log forms equal the direct
ones, with finite values and gradients for |z| up to 10⁴ and beyond. Classes are dimension 1; any shape may follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.io import require_known
from incseg.types import Increment, Prediction, UserError

Rectifier = Literal["exp_sigmoid", "exp", "relu", "softplus"]
Balancing = Literal["none", "paper", "ratio", "exact", "odds"]

RELU_FLOOR = 1e-6  # log 0 would make the loss of a pixel without evidence infinite


def _log_relu(z: Tensor) -> Tensor:
    return z.clamp(min=RELU_FLOOR).log()


def _log_softplus(z: Tensor) -> Tensor:
    # softplus(z) → exp(z) far below zero, where its logarithm would be log 0
    return torch.where(z < -20, z, F.softplus(z.clamp(min=-20)).log())


_LOG_RECTIFIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp_sigmoid": lambda z: z - F.softplus(-z, threshold=40),  # log σ(z) as −softplus(−z): half the time
    "exp": lambda z: z,
    "relu": _log_relu,
    "softplus": _log_softplus,
}


_LARGEST_SCORE = 40.0  # above it, exp(z)² overflows float32; u is zero there


def _exp_sigmoid(z: Tensor) -> Tensor:
    e = z.clamp(max=_LARGEST_SCORE).exp_()
    return e.square().div_(e.add_(1))  # one transcendental function instead of two


_RECTIFIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp_sigmoid": _exp_sigmoid,
    "exp": lambda z: z.clamp(max=_LARGEST_SCORE).exp_(),
    "relu": lambda z: z.clamp(min=RELU_FLOOR),
    "softplus": F.softplus,
}


def log_evidence(logits: Tensor, rectifier: Rectifier = "exp_sigmoid") -> Tensor:
    """log e of raw scores. `exp_sigmoid`: e = exp(z)·σ(z), the paper's choice."""
    require_known("rectifier", rectifier, _LOG_RECTIFIERS)
    return _LOG_RECTIFIERS[rectifier](logits)


@dataclass(frozen=True)
class Dirichlet:
    """A Dirichlet per pixel over the K classes of a scope, in logarithms.

    log_evidence, log_alpha: (B, K, …); log_total (log Σe), log_strength (log S): (B, …). As S = Σe + K, u is
    the logistic function of log K − log Σe: no difference of large numbers, and Σα is never needed.
    """

    log_evidence: Tensor
    log_total: Tensor

    @staticmethod
    def of(log_evidence: Tensor) -> Dirichlet:
        return Dirichlet(log_evidence, log_evidence.logsumexp(1))

    @property
    def _log_size(self) -> float:
        return math.log(self.log_evidence.shape[1])

    @property
    def log_alpha(self) -> Tensor:
        return log_one_plus(self.log_evidence)

    @property
    def log_strength(self) -> Tensor:
        return self._log_size - self.log_uncertainty

    @property
    def log_uncertainty(self) -> Tensor:
        """log u = log K − log S."""
        return F.logsigmoid(self._log_size - self.log_total)

    @property
    def log_certainty(self) -> Tensor:
        """log(1 − u) = log Σe − log S, exact even if u rounds to one."""
        return F.logsigmoid(self.log_total - self._log_size)

    @property
    def log_foreground(self) -> Tensor:
        """log p^fg_i = log α_i − log S: the class, given that it is foreground."""
        return self.log_alpha - self.log_strength.unsqueeze(1)


def log_one_plus(log_e: Tensor) -> Tensor:
    """log(1 + e)."""
    return F.softplus(log_e, threshold=40)  # the default, 20, cuts float64 short


def dirichlet(logits: Tensor, rectifier: Rectifier = "exp_sigmoid") -> Dirichlet:
    """Return the Dirichlet over all channels of `logits`. Slice them to choose the scope."""
    return Dirichlet.of(log_evidence(logits, rectifier))


def log_probabilities(logits: Tensor, rectifier: Rectifier = "exp_sigmoid") -> Tensor:
    """(B, K, H, W) scores → (B, K+1, H, W) log-probabilities, background first.

    At z = 0 with `exp_sigmoid`, u = 2/3 for every K.
    """
    return _log_probabilities(dirichlet(logits, rectifier))


def _log_probabilities(d: Dirichlet) -> Tensor:
    foreground = d.log_certainty.unsqueeze(1) + d.log_foreground
    return torch.cat([d.log_uncertainty.unsqueeze(1), foreground], dim=1)


def deciding_evidence(size: int) -> float:
    """Return the evidence e of one class, with none for the others, at which it and background are equally probable.

    p_i = u where e·(1 + e) = K·(e + K); 1 for K = 1, towards 1.618·K for many classes.
    """
    return ((size - 1) + math.sqrt((size - 1) ** 2 + 4 * size**2)) / 2


def deciding_score(size: int, rectifier: Rectifier = "exp_sigmoid") -> float:
    """Return the raw score with evidence `deciding_evidence`, for rectifiers that grow exponentially.

    Let d_i be scores relative to background. If this score is added to them, the evidential decision is almost that of
    softmax, which is foreground where d > 0. If the largest d_i is above 0, the decisions are equal for any other
    scores, because all evidence supports foreground. If it is below −ln(deciding_evidence / K), both decide for
    background: then e_i < K, and Σe·(1 + e_i) > K·(Σe + K) cannot hold. This bound is 0 for K = 1 and above −0.482 for
    any K. Between the bound and 0 the decisions may differ if several classes compete.
    """
    require_known("rectifier that grows exponentially", rectifier, ("exp_sigmoid", "exp"))
    e = deciding_evidence(size)
    # exp_sigmoid: with x = exp(z), e = x² / (1 + x)
    return math.log(e) if rectifier == "exp" else math.log((e + math.sqrt(e * e + 4 * e)) / 2)


def paper_factor(size: int, total: int) -> float:
    """The paper's o = (2K−1)N² / (K²(2N−1)). It does not solve its own equation: see `balance`."""
    return (2 * size - 1) * total**2 / (size**2 * (2 * total - 1))


def _balance_paper(log_e: Tensor, logits: Tensor, size: int, total: int) -> Tensor:
    highest = logits.max(1, keepdim=True)
    strongest = torch.zeros_like(log_e).scatter_(1, highest.indices, math.log(paper_factor(size, total)))
    return log_e + torch.where(highest.values > 0, strongest, torch.zeros_like(strongest))


def _balance_exact(log_e: Tensor, size: int, total: int) -> Tensor:
    """log(o·e) with o·e = [2AN − 1 + √(1 + 4AN(N−1))] / (2(1−A)), A = e(e+1)/(e+K)².

    Rewritten so that neither e → 0 (the root minus one) nor e → ∞ (one minus A) cancels:
    o·e = e·(e+1)·[2N + 4N(N−1)/(1 + √(1 + 4AN(N−1)))] / (2·((2K−1)e + K²)).
    """
    log_alpha = log_one_plus(log_e)
    log_k = torch.full_like(log_e, math.log(size))
    a = (log_e + log_alpha - 2 * torch.logaddexp(log_e, log_k)).exp()
    grown = 4 * total * (total - 1)
    bracket = 2 * total + grown / (1 + (1 + grown * a).sqrt())
    denominator = torch.logaddexp(log_e + math.log(2 * size - 1), 2 * log_k)
    return log_e + log_alpha + bracket.log() - math.log(2) - denominator


def balance(logits: Tensor, sizes: Sequence[int], mode: Balancing, rectifier: Rectifier = "exp_sigmoid") -> Tensor:
    """Log evidence of all increments on a common scale, (B, N, …) with N = Σ sizes.

    Increment t was trained with K = sizes[t] classes of N in total. The evidence needed for the same probability grows
    with N. With one increment every mode is the identity.

    none:  no scaling (the paper on VOC).
    paper: `paper_factor` on the strongest class of each increment where its z > 0 (the paper on ADE).
    ratio: N/K on all evidence: u of one increment is exactly as without the others.
    exact: the solution of p_i^(t) = p_i^(1:T) for evidence on one class. Its factor goes from (N/K)² for
           e → 0 to (2N−1)/(2K−1) for e → ∞; the paper's lies below it whenever N > K.
    `odds` scales nothing and is not an evidence: see `odds_log_probabilities`.
    """
    require_known("balancing of evidence", mode, ("none", "paper", "ratio", "exact"))
    log_e = log_evidence(logits, rectifier)
    total = sum(sizes)
    if total != logits.shape[1]:
        raise ValueError(f"increments of {list(sizes)} classes do not make the {logits.shape[1]} channels given")
    if mode == "none":
        return log_e
    parts = []
    for size, e, z in zip(sizes, log_e.split(list(sizes), 1), logits.split(list(sizes), 1), strict=True):
        if mode == "paper":
            parts.append(_balance_paper(e, z, size, total))
        elif mode == "ratio":
            parts.append(e + math.log(total / size))
        else:
            parts.append(_balance_exact(e, size, total))
    return torch.cat(parts, dim=1)


def odds_log_probabilities(
    logits: Tensor,
    sizes: Sequence[int],
    rectifier: Rectifier = "exp_sigmoid",
    prior: float = 0.0,
    images: Sequence[int] | None = None,
) -> Tensor:
    """(B, N+1, …) log-probabilities by odds: background scores 0, class i of increment t
    log p_i^(t) − log u^(t), each over its own increment; then softmax over all scores.

    An increment learnt "one of my classes, or none of them", so increments combine by their odds. With one increment
    this is the identity. `prior` ω adds ω·log(n_t / Σn) to the scores of increment t, which n_t = images[t] images
    trained: its classes are in all of these, but in few test images.
    """
    if prior and not (images and all(images)):
        raise UserError(
            f"prior {prior:g} needs the number of training images of every step, but the model knows {images}; "
            "set prior 0 or train the model again"
        )
    scores = [torch.zeros_like(logits[:, :1])]
    for t, part in enumerate(logits.split(list(sizes), 1)):
        d = dirichlet(part, rectifier)
        score = (d.log_certainty - d.log_uncertainty).unsqueeze(1) + d.log_foreground
        if prior and images:
            score = score + prior * math.log(images[t] / sum(images))
        scores.append(score)
    return torch.cat(scores, dim=1).log_softmax(1)


def odds_evidence_probabilities(odds: Tensor) -> Tensor:
    """(B, N, …) log-odds o_c of each class against background → (B, N+1, …) probabilities, background first.

    The evidence is e_c = N·exp(o_c), so that u = N / (N + Σe) is the probability of background, and class c takes the
    share e_c / Σe of the rest: p_c > p_0 just where o_c > 0. One class with o = 0 gives u = 1/2.
    """
    return torch.cat([torch.zeros_like(odds[:, :1]), odds], dim=1).softmax(1)


def balanced_log_probabilities(
    logits: Tensor,
    sizes: Sequence[int],
    mode: Balancing,
    rectifier: Rectifier = "exp_sigmoid",
    prior: float = 0.0,
    images: Sequence[int] | None = None,
) -> Tensor:
    """(B, N+1, …) log-probabilities over all increments, by any of the five balancings."""
    if mode == "odds":
        return odds_log_probabilities(logits, sizes, rectifier, prior, images)
    return _log_probabilities(Dirichlet.of(balance(logits, sizes, mode, rectifier)))


def _scaled_parts(logits: Tensor, sizes: Sequence[int], mode: Balancing) -> Iterator[tuple[int, float, Tensor]]:
    """Yield (classes, constant, scores), with neighbouring increments of the same constant merged.

    So fifty steps of equal size take the time of one.
    """
    total = sum(sizes)
    scaled = groupby(sizes, key=lambda size: total / size if mode == "ratio" else 1.0)
    parts = [(sum(alike), scale) for scale, alike in scaled]
    for (size, scale), part in zip(parts, logits.split([size for size, _ in parts], 1), strict=True):
        yield size, scale, part


def evidential_probabilities(
    logits: Tensor, sizes: Sequence[int], mode: Balancing, rectifier: Rectifier = "exp_sigmoid"
) -> Tensor:
    """(B, N+1, …) exp of `balanced_log_probabilities` with `none` or `ratio`, in a fifth of its time; no gradient.

    Sums of positive numbers lose no digits, so evidence can be used instead of logarithms if float32 holds its square.
    """
    require_known("balancing of a constant factor", mode, ("none", "ratio"))
    # A traced graph (ONNX) cannot branch on values, so it uses the form that is valid for all scores.
    if torch.jit.is_tracing() or (logits.numel() and logits.amax() > _LARGEST_SCORE):
        return balanced_log_probabilities(logits, sizes, mode, rectifier).exp()
    total, first = sum(sizes), 1
    result = logits.new_empty(logits.shape[0], total + 1, *logits.shape[2:])
    for size, scale, part in _scaled_parts(logits, sizes, mode):
        result[:, first : first + size] = _RECTIFIERS[rectifier](part).mul_(scale)
        first += size
    evidence = result[:, 1:].sum(1)
    strength = evidence + total
    result[:, 1:].add_(1).mul_((evidence / strength.square()).unsqueeze(1))
    result[:, 0] = total / strength
    return result


def evidential_labels(
    logits: Tensor,
    sizes: Sequence[int],
    mode: Balancing,
    rectifier: Rectifier = "exp_sigmoid",
    threshold: float | None = None,
) -> Tensor:
    """(B, …) the arg-max of `balanced_log_probabilities` with `none` or `ratio`, in a tenth of its time.

    Both scale the evidence of an increment by a constant and every rectifier rises with z, so that the strongest class
    of an increment is that of its largest score, and only its probability must be compared with u:
    Σe·(1 + e_best) > N·(Σe + N). With a `threshold` on u, u < threshold decides instead.
    """
    require_known("balancing of a constant factor", mode, ("none", "ratio"))
    total = sum(sizes)
    first, best, best_label, evidence = 1, None, None, None
    for size, scale, part in _scaled_parts(logits, sizes, mode):
        score, index = part.max(1)
        strength = log_evidence(score, rectifier) + math.log(scale)
        summed = _RECTIFIERS[rectifier](part).sum(1) * scale
        if best is None or best_label is None or evidence is None:
            best, best_label, evidence = strength, index + first, summed
        else:
            best_label = torch.where(strength > best, index + first, best_label)
            best = torch.maximum(best, strength)
            evidence = evidence + summed
        first += size
    if best is None or best_label is None or evidence is None:
        raise ValueError("there is no increment to decide between")
    if threshold is None:
        foreground = evidence * (1 + best.clamp(max=2 * _LARGEST_SCORE).exp()) > total * (evidence + total)
    else:
        foreground = total < threshold * (evidence + total)
    return torch.where(foreground, best_label, torch.zeros_like(best_label))


def evidential_prediction(
    logits: Tensor,
    increments: Sequence[Increment],
    mode: Balancing = "ratio",
    rectifier: Rectifier = "exp_sigmoid",
    prior: float = 0.0,
    threshold: float | None = None,
) -> Prediction:
    """Return the most probable class of all increments on a common scale; u is the uncertainty.

    With a `threshold`, a pixel is foreground if u is below it, and gets the strongest class.
    """
    sizes = [len(i.classes) for i in increments]
    constant = mode in ("none", "ratio")

    @cache
    def probabilities() -> Tensor:
        if constant:
            return evidential_probabilities(logits, sizes, mode, rectifier)
        images = [i.train_images for i in increments]
        return balanced_log_probabilities(logits, sizes, mode, rectifier, prior, images).exp()

    if constant:
        labels = evidential_labels(logits, sizes, mode, rectifier, threshold)
    elif threshold is None:
        labels = probabilities().max(1).indices  # argmax(1) takes three times as long on the CPU
    else:
        strongest = probabilities()[:, 1:].max(1).indices + 1
        labels = torch.where(probabilities()[:, 0] < threshold, strongest, torch.zeros_like(strongest))
    return Prediction(labels.to(torch.uint8), probabilities, lambda: probabilities()[:, 0])
