"""The closed forms against autograd on the losses in log space, term by term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from incseg.losses.evidential import LIMIT, cross_entropy_with_gradient, distillation_with_gradient, fits
from incseg.outputs.evidential import Rectifier, dirichlet
from incseg.losses.evidential import distill_foreground, distill_uncertainty, evidential_cross_entropy
from incseg.losses.pixelwise import pixelwise
from incseg.methods import Evidential
from incseg.types import Batch, Output

RECTIFIERS = ("exp_sigmoid", "exp", "relu", "softplus")
SPREADS = (1.0, 8.0, LIMIT)


def scores(classes: int, spread: float, seed: int = 0) -> Tensor:
    z = torch.randn(2, classes, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (spread * z).clamp(-LIMIT, LIMIT)


def some_labels(classes: int) -> Tensor:
    labels = torch.randint(0, classes + 1, (2, 5, 6), generator=torch.Generator().manual_seed(9)).to(torch.uint8)
    labels[0, 0] = 255
    return labels


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("classes", [1, 4])
def test_cross_entropy(rectifier: Rectifier, spread: float, classes: int) -> None:
    z = scores(classes, spread).requires_grad_()
    labels = some_labels(classes)
    fg_scale, bg_scale = torch.tensor(0.7, dtype=torch.float64), torch.tensor(1.9, dtype=torch.float64)
    foreground, background = evidential_cross_entropy(z, labels, rectifier)
    wanted = fg_scale * foreground.sum() + bg_scale * background.sum()
    (wanted_gradient,) = torch.autograd.grad(wanted, z)
    loss, gradient = cross_entropy_with_gradient(z.detach(), labels, rectifier, fg_scale, bg_scale)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("classes", [1, 4])
def test_distillation(rectifier: Rectifier, spread: float, classes: int) -> None:
    z, teacher = scores(classes, spread).requires_grad_(), scores(classes, spread, seed=1)
    fg_scale, u_scale = torch.tensor(0.3, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64)
    student, old = dirichlet(z, rectifier), dirichlet(teacher, rectifier)
    foreground = fg_scale * distill_foreground(student, old).sum()
    uncertainty = u_scale * distill_uncertainty(student, old).sum()
    (wanted_gradient,) = torch.autograd.grad(foreground + uncertainty, z)
    found = distillation_with_gradient(z.detach(), teacher, rectifier, fg_scale, u_scale)
    torch.testing.assert_close(found[0], foreground.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], uncertainty.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[2], wanted_gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("spread", SPREADS)
def test_float32_keeps_its_digits(spread: float) -> None:
    z, teacher, labels = scores(4, spread), scores(4, spread, seed=1), some_labels(4)
    one = torch.ones((), dtype=torch.float64)
    for found, wanted in zip(
        cross_entropy_with_gradient(z.float(), labels, "exp_sigmoid", one.float(), one.float()),
        cross_entropy_with_gradient(z.float().double(), labels, "exp_sigmoid", one, one),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(
        distillation_with_gradient(z.float(), teacher.float(), "exp_sigmoid", one.float(), one.float()),
        distillation_with_gradient(z.float().double(), teacher.float().double(), "exp_sigmoid", one, one),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_where_it_holds() -> None:
    inside = torch.tensor([-LIMIT, 0.0, LIMIT])
    assert fits(inside)
    assert fits(inside, torch.empty(0))
    assert not fits(inside, inside + 1)
    assert not fits(inside - 1)
    assert not fits(torch.tensor([float("nan")]))


@pytest.mark.parametrize("scope", ["increment", "seen"])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_the_method_takes_it_and_gives_the_same(scope: str, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far scores go through log space, near ones do not; losses and gradients agree with log space alone."""
    method = Evidential(Evidential.Config(scope=scope))  # type: ignore[arg-type]
    step = type("Step", (), {"old": (1, 2, 3), "new": (4, 5), "seen": (1, 2, 3, 4, 5)})()
    labels = torch.randint(3, 6, (2, 20, 24), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    labels[labels == 3] = 0
    batch = Batch(torch.empty(0), labels, torch.bincount(labels.flatten().long(), minlength=256).float())
    teacher = scores(3, 2.0, seed=1)
    calls = []

    def spied(*arguments: object) -> dict[str, Tensor]:
        calls.append(arguments[4])
        return pixelwise(*arguments)  # type: ignore[arg-type]

    def without(*arguments: object) -> dict[str, Tensor]:
        return pixelwise(*arguments[:4])  # type: ignore[arg-type]

    results = []
    for used in (spied, without):
        monkeypatch.setattr("incseg.methods.evidential.pixelwise", used)
        z = (scores(5, 2.0) + shift).requires_grad_()
        terms = method.losses(batch, Output(z, z), Output(teacher, teacher), step)
        sum(terms.values()).backward()  # type: ignore[union-attr]
        results.append((terms, z.grad))
    assert calls[0] is not None
    assert results[0][0].keys() == results[1][0].keys()
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, results[1][0][name], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-9)
