"""The evidential mathematics against direct formulas, its limits, and its behaviour for extreme scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from incseg.losses.evidential import (
    distill_foreground,
    distill_uncertainty,
    evidential_cross_entropy,
    foreground_background_weights,
)
from incseg.outputs.evidential import (
    Dirichlet,
    balance,
    balanced_log_probabilities,
    dirichlet,
    evidential_labels,
    evidential_probabilities,
    log_evidence,
    log_probabilities,
    odds_log_probabilities,
    paper_factor,
)
from incseg.types import IGNORE, UserError

RECTIFIERS = ("exp_sigmoid", "exp", "relu", "softplus")
SCALINGS = ("none", "paper", "ratio", "exact")
BALANCINGS = (*SCALINGS, "odds")

# The log form of relu keeps a floor of 1e-6 under the evidence; softplus switches to its asymptote at ±20.
TOLERANCE = {"exp_sigmoid": 1e-12, "exp": 1e-12, "relu": 1e-5, "softplus": 1e-8}

DIRECT: dict[str, Callable[[Tensor], Tensor]] = {
    "exp_sigmoid": lambda z: torch.exp(z) / (1 + torch.exp(-z)),
    "exp": torch.exp,
    "relu": lambda z: z.clamp(min=0),
    "softplus": lambda z: torch.log(1 + torch.exp(z)),
}


def direct_probabilities(evidence: Tensor) -> Tensor:
    alpha = evidence + 1
    strength = alpha.sum(1, keepdim=True)
    uncertainty = evidence.shape[1] / strength
    return torch.cat([uncertainty, (1 - uncertainty) * alpha / strength], 1)


def scores(*shape: int, spread: float = 3.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return spread * torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def extremes(dtype: torch.dtype) -> Tensor:
    """Return (P, 3) pixels that combine every pair of extreme scores."""
    ends = torch.tensor([-1e4, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e4], dtype=dtype)
    return torch.cartesian_prod(ends, ends, ends)


# ---------------------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_log_form_equals_direct_form(rectifier: str, size: int) -> None:
    z = scores(2, size, 4, 5, spread=8)
    direct = direct_probabilities(DIRECT[rectifier](z))
    assert torch.allclose(log_probabilities(z, rectifier).exp(), direct, rtol=0, atol=TOLERANCE[rectifier])


@pytest.mark.parametrize("rectifier", RECTIFIERS)
def test_logarithms_equal_the_direct_ones(rectifier: str) -> None:
    z = scores(500, 4).abs() if rectifier == "relu" else scores(500, 4)
    direct = direct_probabilities(DIRECT[rectifier](z)).log()
    assert torch.allclose(log_probabilities(z, rectifier), direct, rtol=0, atol=1e-7)


@pytest.mark.parametrize("rectifier", RECTIFIERS)
def test_float32_is_close_to_float64(rectifier: str) -> None:
    z = scores(1000, 6, spread=6, dtype=torch.float32)
    low, high = log_probabilities(z, rectifier), log_probabilities(z.double(), rectifier)
    assert low.dtype == torch.float32
    assert torch.allclose(low.exp().double(), high.exp(), rtol=0, atol=5e-6)
    assert torch.allclose(low.double(), high, rtol=1e-6, atol=5e-6)


@given(
    rectifier=st.sampled_from(RECTIFIERS),
    z=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_probabilities_sum_to_one(rectifier: str, z: list[float], dtype: torch.dtype) -> None:
    p = log_probabilities(torch.tensor([z], dtype=dtype), rectifier).exp()
    # The numbers are as fine as their own spacing at the largest logarithm, twice |z|.
    allowed = 8 * torch.finfo(dtype).eps * max(1.0, *map(abs, z))
    assert bool((p >= 0).all())
    assert float(p.sum()) == pytest.approx(1, abs=allowed)
    assert float(p[0, 0]) <= 1


@pytest.mark.parametrize("size", [1, 2, 20, 150])
def test_no_score_means_two_thirds_uncertain(size: int) -> None:
    p = log_probabilities(torch.zeros(1, size, dtype=torch.float64)).exp()[0]
    assert float(p[0]) == pytest.approx(2 / 3, abs=1e-12)
    assert torch.allclose(p[1:], torch.full_like(p[1:], 1 / (3 * size)))


def test_dirichlet_keeps_its_definitions() -> None:
    d = dirichlet(scores(50, 5))
    e = d.log_evidence.exp()
    assert torch.allclose(d.log_alpha.exp(), e + 1)
    assert torch.allclose(d.log_total.exp(), e.sum(1))
    assert torch.allclose(d.log_strength.exp(), (e + 1).sum(1))
    assert torch.allclose(d.log_uncertainty.exp() + d.log_certainty.exp(), torch.ones(50, dtype=torch.float64))
    assert torch.allclose(d.log_foreground.exp().sum(1), torch.ones(50, dtype=torch.float64))


def test_certainty_is_exact_where_uncertainty_rounds_to_one() -> None:
    d = dirichlet(torch.full((1, 2), -60.0), "exp")
    assert float(d.log_uncertainty.exp()) == 1
    assert float(d.log_certainty) == pytest.approx(-60)


# ---------------------------------------------------------------------------------------------- losses


def test_cross_entropy_is_minus_the_labels_log_probability() -> None:
    z = scores(2, 3, 4, 4)
    labels = torch.randint(0, 4, (2, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    labels[0, 0] = IGNORE
    foreground, background = evidential_cross_entropy(z, labels)
    log_p = log_probabilities(z)
    for b, y, x in torch.cartesian_prod(*map(torch.arange, labels.shape)).tolist():
        label = int(labels[b, y, x])
        wanted = 0.0 if label == IGNORE else -float(log_p[b, label, y, x])
        own, other = (background, foreground) if label == 0 else (foreground, background)
        assert float(own[b, y, x]) == pytest.approx(wanted)
        assert float(other[b, y, x]) == 0


def test_ignored_pixels_ask_for_nothing() -> None:
    z = scores(1, 3, 2, 2).requires_grad_()
    labels = torch.tensor([[[0, 2], [IGNORE, 3]]], dtype=torch.uint8)
    sum(part.sum() for part in evidential_cross_entropy(z, labels)).backward()
    assert z.grad is not None
    asked = (z.grad != 0).any(1)[0]
    assert asked.tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize("distill", [distill_foreground, distill_uncertainty])
def test_distillation_is_minimal_at_the_teacher(distill: Callable[[Dirichlet, Dirichlet], Tensor]) -> None:
    z = scores(40, 5)
    teacher = dirichlet(z)
    student = z.clone().requires_grad_()
    at_teacher = distill(dirichlet(student), teacher)
    (gradient,) = torch.autograd.grad(at_teacher.sum(), student)
    assert torch.allclose(gradient, torch.zeros_like(gradient), atol=1e-12)
    for seed in range(1, 30):
        other = distill(dirichlet(z + scores(40, 5, spread=1.0, seed=seed)), teacher)
        assert bool((other > at_teacher.detach()).all())


def test_distillation_at_the_teacher_is_its_entropy() -> None:
    d = dirichlet(scores(40, 5))
    u, p = d.log_uncertainty.exp(), d.log_foreground.exp()
    assert torch.allclose(distill_uncertainty(d, d), -(u * u.log() + (1 - u) * (1 - u).log()))
    assert torch.allclose(distill_foreground(d, d), -(p * p.log()).sum(1))


def test_printed_sign_of_uncertainty_distillation_is_minimal_at_one_for_every_teacher() -> None:
    """The paper has a misprint: with its sign every teacher favours background; with ours the minimum is at the
    teacher's u."""
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    grid = Dirichlet.of((1 / u - 1).log().unsqueeze(1))  # one class: u = 1 / (1 + e)
    assert torch.allclose(grid.log_uncertainty.exp(), u)
    for index in range(49, 999, 50):
        one = Dirichlet.of(grid.log_evidence[index : index + 1])
        taught = float(u[index])
        printed = -(taught * grid.log_uncertainty - (1 - taught) * grid.log_certainty)
        assert int(printed.argmin()) == len(u) - 1
        assert int(distill_uncertainty(grid, one).argmin()) == index


@pytest.mark.parametrize(
    ("num_background", "num_foreground", "weights"),
    [
        (50, 50, (2, 2)),
        (75, 25, (4 / 3, 4)),
        (99, 1, (100 / 99, 10)),
        (1, 999, (10, 1000 / 999)),
        (80, 0, (1, 0)),
        (0, 80, (0, 1)),
        (0, 0, (0, 0)),
        (3.5, 0.5, (8 / 7, 8)),  # one foreground pixel on one of two processes
    ],
)
def test_foreground_background_weights(num_background: float, num_foreground: float, weights: tuple) -> None:
    got = foreground_background_weights(torch.tensor(float(num_background)), torch.tensor(float(num_foreground)), 10)
    assert [float(w) for w in got] == pytest.approx(list(weights))


# ---------------------------------------------------------------------------------------------- far scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rectifier", RECTIFIERS)
def test_losses_and_gradients_stay_finite_at_far_scores(rectifier: str, dtype: torch.dtype) -> None:
    pixels = extremes(dtype)
    teacher = dirichlet(pixels.flip(0), rectifier)
    labels = torch.arange(len(pixels)) % 4

    def cross_entropy(z: Tensor) -> Tensor:
        foreground, background = evidential_cross_entropy(z, labels, rectifier)
        return foreground + background

    for loss in (
        lambda z: log_probabilities(z, rectifier),
        cross_entropy,
        lambda z: distill_foreground(dirichlet(z, rectifier), teacher),
        lambda z: distill_uncertainty(dirichlet(z, rectifier), teacher),
    ):
        z = pixels.clone().requires_grad_()
        value = loss(z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert bool(value.isfinite().all())
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("mode", BALANCINGS)
def test_balanced_probabilities_stay_finite_at_far_scores(mode: str, rectifier: str, dtype: torch.dtype) -> None:
    z = extremes(dtype).requires_grad_()
    log_p = balanced_log_probabilities(z, (2, 1), mode, rectifier, prior=0.5, images=(90, 10))
    (gradient,) = torch.autograd.grad(log_p.sum(), z)
    assert bool(log_p.isfinite().all())
    assert bool(gradient.isfinite().all())
    total = log_p.exp().sum(1)
    assert torch.allclose(total, torch.ones_like(total), atol=1e5 * torch.finfo(dtype).eps)


def test_a_far_score_decides() -> None:
    p = log_probabilities(torch.tensor([[1e4, 0.0], [-1e4, -1e4]])).exp()
    assert p.argmax(1).tolist() == [1, 0]
    assert torch.allclose(p.amax(1), torch.ones(2), atol=2e-3)


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("rectifier", RECTIFIERS)
def test_gradcheck_of_the_losses(rectifier: str) -> None:
    z = scores(1, 3, 2, 2, spread=2)
    z = torch.where(z.abs() < 0.05, z + 0.2, z).requires_grad_()  # relu has a corner at 0
    labels = torch.tensor([[[0, 1], [3, IGNORE]]], dtype=torch.uint8)
    teacher = dirichlet(scores(1, 3, 2, 2, seed=9), rectifier)
    assert torch.autograd.gradcheck(lambda x: log_probabilities(x, rectifier), z)
    assert torch.autograd.gradcheck(lambda x: evidential_cross_entropy(x, labels, rectifier), z)
    assert torch.autograd.gradcheck(lambda x: distill_foreground(dirichlet(x, rectifier), teacher), z)
    assert torch.autograd.gradcheck(lambda x: distill_uncertainty(dirichlet(x, rectifier), teacher), z)


@pytest.mark.parametrize("mode", BALANCINGS)
def test_gradcheck_of_balancing(mode: str) -> None:
    z = scores(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: balanced_log_probabilities(x, (3, 1), mode), z)


# ---------------------------------------------------------------------------------------------- balancing


def alone(e: Tensor, size: int) -> Tensor:
    """Return the paper's p_i when class i is the only one of `size` with evidence."""
    return (e + 1) / (e + size) * (e / (e + size))


def factors(e: Tensor, size: int, total: int, mode: str) -> Tensor:
    """Return o as `balance` applies it to the first of `size` classes when no other increment has evidence."""
    z = torch.full((len(e), total), -1e3, dtype=torch.float64)
    z[:, 0] = e.log()
    sizes = (size, total - size) if total > size else (size,)
    return (balance(z, sizes, mode, "exp")[:, 0] - e.log()).exp()


SIZES = [(1, 2), (1, 20), (5, 20), (15, 20), (10, 150), (100, 150), (100, 110), (19, 20)]
EVIDENCE = torch.logspace(-9, 15, 97, dtype=torch.float64)


@pytest.mark.parametrize(("size", "total"), SIZES)
def test_exact_satisfies_the_equation(size: int, total: int) -> None:
    scaled = factors(EVIDENCE, size, total, "exact") * EVIDENCE
    assert torch.allclose(alone(scaled, total), alone(EVIDENCE, size), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("size", "total"), SIZES)
def test_exact_is_the_closed_form(size: int, total: int) -> None:
    e = torch.logspace(-2, 2, 41, dtype=torch.float64)
    a = alone(e, size)
    closed = (2 * a * total - 1 + (1 + 4 * a * total * (total - 1)).sqrt()) / (2 * (1 - a))
    assert torch.allclose(factors(e, size, total, "exact") * e, closed, rtol=1e-9)


@pytest.mark.parametrize(("size", "total"), SIZES)
def test_limits_of_the_exact_factor(size: int, total: int) -> None:
    small, large = factors(torch.tensor([1e-12, 1e14], dtype=torch.float64), size, total, "exact").tolist()
    assert small == pytest.approx((total / size) ** 2, rel=1e-6)
    assert large == pytest.approx((2 * total - 1) / (2 * size - 1), rel=1e-6)


@pytest.mark.parametrize(("size", "total"), SIZES)
def test_paper_factor_does_not_satisfy_its_equation(size: int, total: int) -> None:
    """It is always less than for the increment alone: it under-compensates."""
    e = EVIDENCE[EVIDENCE > 1]  # where z = log e > 0, the only place it is applied
    o = factors(e, size, total, "paper")
    assert torch.allclose(o, torch.full_like(o, paper_factor(size, total)))
    assert bool((o < factors(e, size, total, "exact")).all())
    small = e[e < 1e3]  # beyond, every probability is one to rounding
    assert bool((alone(paper_factor(size, total) * small, total) < alone(small, size) * (1 - 1e-6)).all())


@pytest.mark.parametrize(("size", "total", "paper", "exact"), [(10, 150, 14.3, 15.7), (1, 20, 10.3, 39)])
def test_published_numbers_of_the_factors(size: int, total: int, paper: float, exact: float) -> None:
    assert paper_factor(size, total) == pytest.approx(paper, abs=0.05)
    large = factors(torch.tensor([1e12], dtype=torch.float64), size, total, "exact")
    assert float(large) == pytest.approx(exact, abs=0.05)


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("mode", BALANCINGS)
@pytest.mark.parametrize("size", [1, 5])
def test_one_increment_needs_no_balancing(mode: str, rectifier: str, size: int) -> None:
    z = scores(2, size, 3, 3)
    got = balanced_log_probabilities(z, (size,), mode, rectifier, prior=0.5, images=(7,))
    assert torch.allclose(got, log_probabilities(z, rectifier), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(5, 1), (2, 3, 1), (1, 1, 1, 1)])
def test_ratio_keeps_the_uncertainty_of_an_increment(sizes: tuple[int, ...]) -> None:
    """N / (N + (N/K) Σe) = K / (K + Σe): its value alone, as long as no other increment has evidence."""
    parts = scores(30, sum(sizes)).split(sizes, 1)
    for t, part in enumerate(parts):
        z = torch.cat([p if i == t else torch.full_like(p, -1e4) for i, p in enumerate(parts)], 1)
        together = balanced_log_probabilities(z, sizes, "ratio")[:, 0]
        assert torch.allclose(together, log_probabilities(part)[:, 0], rtol=0, atol=1e-12)


def test_ratio_adds_the_odds_of_foreground() -> None:
    z, sizes = scores(30, 6), (3, 2, 1)

    def odds(p: Tensor) -> Tensor:
        return (1 - p[:, 0]) / p[:, 0]

    together = odds(balanced_log_probabilities(z, sizes, "ratio").exp())
    apart = sum(odds(log_probabilities(part).exp()) for part in z.split(sizes, 1))
    assert torch.allclose(together, apart)


def test_none_is_the_dirichlet_over_all() -> None:
    z = scores(30, 6)
    assert torch.equal(balanced_log_probabilities(z, (4, 2), "none"), log_probabilities(z))


def test_paper_scales_the_strongest_positive_score_of_each_increment() -> None:
    z = torch.tensor([[1.0, 2.0, -1.0, 0.5, 0.1], [-1.0, -2.0, -3.0, -0.1, 4.0]], dtype=torch.float64)
    grown = (balance(z, (3, 2), "paper") - log_evidence(z)).exp()
    first, second = paper_factor(3, 5), paper_factor(2, 5)
    wanted = torch.tensor([[1, first, 1, second, 1], [1, 1, 1, 1, second]], dtype=torch.float64)
    assert torch.allclose(grown, wanted)


def test_odds_by_hand() -> None:
    z, sizes = scores(20, 4), (1, 3)
    ratios = []
    for part in z.split(sizes, 1):
        p = direct_probabilities(DIRECT["exp_sigmoid"](part))
        ratios.append(p[:, 1:] / p[:, :1])
    unnormalised = torch.cat([torch.ones(20, 1, dtype=torch.float64), *ratios], 1)
    wanted = unnormalised / unnormalised.sum(1, keepdim=True)
    assert torch.allclose(odds_log_probabilities(z, sizes).exp(), wanted)


@pytest.mark.parametrize("prior", [0.5, 1.0])
def test_prior_moves_the_log_odds_by_the_share_of_images(prior: float) -> None:
    z, sizes, images = scores(20, 4), (3, 1), (90, 10)

    def log_odds(log_p: Tensor) -> Tensor:
        return log_p[:, 1:] - log_p[:, :1]

    moved = log_odds(odds_log_probabilities(z, sizes, prior=prior, images=images)) - log_odds(
        odds_log_probabilities(z, sizes)
    )
    shares = torch.tensor([0.9, 0.9, 0.9, 0.1], dtype=torch.float64)
    assert torch.allclose(moved, prior * shares.log().expand_as(moved))


def test_one_class_needs_much_evidence_to_beat_background_among_many() -> None:
    """Without balancing e ≳ 1.618·N. A one-class step learnt to decide at e = 1 and needs 31.6 at N = 20."""

    def wins(e: float, total: int) -> bool:
        z = torch.full((1, total), -1e3, dtype=torch.float64)
        z[0, 0] = math.log(e)
        return int(log_probabilities(z, "exp").argmax()) == 1

    assert wins(1.001, 1)
    assert not wins(0.999, 1)
    assert wins(31.7, 20)
    assert not wins(31.5, 20)


# ---------------------------------------------------------------------------------------------- errors


def test_unknown_names_are_refused_with_the_nearest_match() -> None:
    with pytest.raises(UserError, match="did you mean 'exp_sigmoid'"):
        log_evidence(torch.zeros(1, 2), "exp_sigmoids")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did you mean 'ratio'"):
        balance(torch.zeros(1, 2), (2,), "ratios")  # type: ignore[arg-type]


def test_sizes_must_make_the_channels() -> None:
    with pytest.raises(ValueError, match="do not make the 4 channels"):
        balance(torch.zeros(1, 4), (2, 1), "ratio")


@pytest.mark.parametrize("images", [None, (5, 0)])
def test_prior_needs_image_counts(images: tuple[int, ...] | None) -> None:
    with pytest.raises(UserError, match="number of training images"):
        odds_log_probabilities(torch.zeros(1, 3), (2, 1), prior=0.5, images=images)


@pytest.mark.parametrize("mode", ["none", "ratio"])
@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("sizes", [(6,), (3, 2, 1)])
@pytest.mark.parametrize("spread", [1.0, 8.0, 1000.0])
def test_probabilities_without_logarithms(mode: str, rectifier: str, sizes: tuple[int, ...], spread: float) -> None:
    """Also if the evidence itself would overflow; otherwise to the precision of float32."""
    z = scores(400, 6, spread=spread)
    z = z if spread > 100 else z.clamp(max=39)
    wanted = balanced_log_probabilities(z, sizes, mode, rectifier).exp()
    torch.testing.assert_close(evidential_probabilities(z, sizes, mode, rectifier), wanted, rtol=1e-12, atol=1e-300)
    single = evidential_probabilities(z.float(), sizes, mode, rectifier).double()
    torch.testing.assert_close(single, wanted, rtol=3e-4 if spread > 100 else 2e-5, atol=1e-30)


@pytest.mark.parametrize("mode", ["none", "ratio"])
@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("sizes", [(6,), (3, 2, 1), (1, 1, 1, 3)])
@pytest.mark.parametrize("spread", [1.0, 4.0, 30.0])
def test_labels_alone_are_the_arg_max(mode: str, rectifier: str, sizes: tuple[int, ...], spread: float) -> None:
    z = scores(400, 6, spread=spread) + 2
    wanted = balanced_log_probabilities(z, sizes, mode, rectifier)
    assert torch.equal(evidential_labels(z, sizes, mode, rectifier), wanted.argmax(1))
    strongest = wanted[:, 1:].argmax(1) + 1
    hierarchical = torch.where(wanted[:, 0].exp() < 0.3, strongest, 0)
    assert torch.equal(evidential_labels(z, sizes, mode, rectifier, 0.3), hierarchical)
