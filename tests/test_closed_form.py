"""The closed forms against autograd on the losses in log space, term by term."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from incseg.losses.evidential import (
    LIMIT,
    evidential_losses,
    fits,
)
from incseg.methods import Evidential
from incseg.outputs.evidential import Rectifier
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


SCALES = [torch.tensor(scale, dtype=torch.float64) for scale in (0.7, 1.9, 0.3, 2.5)]


@pytest.mark.parametrize("rectifier", RECTIFIERS)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("classes", "old", "skipped"), [(1, 0, 0), (4, 0, 0), (5, 0, 3), (5, 3, 3), (5, 3, 0)])
def test_losses_and_gradient(rectifier: Rectifier, spread: float, classes: int, old: int, skipped: int) -> None:
    z, labels = scores(classes, spread).requires_grad_(), some_labels(classes - skipped)
    teacher = scores(old, spread, seed=1) if old else None
    found, wanted = (
        evidential_losses(z, labels, SCALES, teacher, skipped, rectifier, closed_form) for closed_form in (True, False)
    )
    assert len(found) == (3 if old else 1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    for weights in ((1.0, 1.0, 1.0), (0.5, 2.0, -1.0)):  # the plain sum, and another
        totals = (sum(weight * term for weight, term in zip(weights, terms, strict=False)) for terms in (found, wanted))
        gradient, wanted_gradient = (torch.autograd.grad(total, z, retain_graph=True)[0] for total in totals)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-8, atol=1e-12)


def test_a_teacher_of_other_classes_than_those_skipped_is_refused() -> None:
    with pytest.raises(ValueError, match="2 classes are skipped, and the teacher has 3"):
        evidential_losses(scores(5, 1.0), some_labels(3), SCALES, scores(3, 1.0), skipped=2)


@pytest.mark.parametrize("spread", SPREADS)
def test_float32_keeps_its_digits(spread: float) -> None:
    z, teacher, labels = scores(4, spread).float(), scores(4, spread, seed=1).float(), some_labels(4)
    results = []
    for dtype in (torch.float32, torch.float64):
        own = z.to(dtype, copy=True).requires_grad_()
        total = torch.stack(evidential_losses(own, labels, [s.to(dtype) for s in SCALES], teacher.to(dtype))).sum()
        results.append([total, *torch.autograd.grad(total, own)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_was_changed_is_right_when_asked_for_again() -> None:
    z = scores(4, 1.0).requires_grad_()
    (term,) = evidential_losses(z, some_labels(4), SCALES)
    (first,) = torch.autograd.grad(term, z, retain_graph=True)
    wanted = first.clone()
    first.zero_()
    assert torch.equal(torch.autograd.grad(term, z)[0], wanted)
    assert wanted.any()


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
    """Large scores use log space, small ones do not. Losses and gradients equal those in log space alone."""
    method = Evidential(Evidential.Config(scope=scope))  # type: ignore[arg-type]
    step = type("Step", (), {"old": (1, 2, 3), "new": (4, 5), "seen": (1, 2, 3, 4, 5)})()
    labels = torch.randint(3, 6, (2, 20, 24), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    labels[labels == 3] = 0
    batch = Batch(torch.empty(0), labels, torch.bincount(labels.flatten().long(), minlength=256).float())
    teacher = scores(3, 2.0, seed=1)
    calls = []

    def spied(*arguments: Any) -> tuple[Tensor, ...]:
        calls.append(arguments[-1])  # whether in closed form
        return evidential_losses(*arguments)

    results = []
    for limit in (True, False):
        monkeypatch.setattr("incseg.methods.evidential.evidential_losses", spied)
        if not limit:
            monkeypatch.setattr("incseg.methods.evidential.fits", lambda *scores: False)
        z = (scores(5, 2.0) + shift).requires_grad_()
        terms = method.losses(batch, Output(z, z), Output(teacher, teacher), step)
        sum(terms.values()).backward()  # type: ignore[arg-type, union-attr]
        results.append((terms, z.grad))
    assert calls == [shift == 0.0, False]
    assert results[0][0].keys() == results[1][0].keys()
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, results[1][0][name], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-9)
