"""The softmax model of a pixel against naive loops and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from incseg.losses.softmax import cross_entropy_per_image, cross_entropy_sum
from incseg.outputs.softmax import normalised_entropy, softmax_prediction
from incseg.types import IGNORE


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 5, (2, 3, 5), generator=generator).to(torch.uint8)
    labels[labels == 4] = IGNORE
    return logits, labels


def test_cross_entropy_by_hand() -> None:
    logits, labels = example()
    total = 0.0
    for b, y, x in torch.cartesian_prod(*map(torch.arange, labels.shape)).tolist():
        label = int(labels[b, y, x])
        if label != IGNORE:
            weights = [math.exp(z) for z in logits[b, :, y, x].tolist()]
            total -= math.log(weights[label] / sum(weights))
    assert bool((labels == IGNORE).any())
    assert float(cross_entropy_sum(logits, labels)) == pytest.approx(total)


def test_images_make_up_the_sum() -> None:
    logits, labels = example()
    costs = cross_entropy_per_image(logits, labels)
    assert costs.shape == (2,)
    for image in range(2):
        torch.testing.assert_close(costs[image], cross_entropy_sum(logits[image, None], labels[image, None]))


def test_void_alone_has_loss_zero() -> None:
    logits, labels = example()
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORE))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == 0
    assert not gradient.any()


def test_gradcheck() -> None:
    logits, labels = example()
    assert torch.autograd.gradcheck(lambda z: cross_entropy_sum(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("size", [1, 2, 21])
def test_entropy_is_between_certain_and_uniform(size: int) -> None:
    uniform = torch.full((1, size, 2), 1 / size)
    certain = torch.zeros(1, size, 2)
    certain[:, 0] = 1
    assert torch.allclose(normalised_entropy(uniform), torch.full((1, 2), float(size > 1)))
    assert torch.equal(normalised_entropy(certain), torch.zeros(1, 2))
    between = normalised_entropy(torch.randn(50, size, 2).softmax(1))
    assert bool(((between >= 0) & (between <= 1)).all())


def test_prediction() -> None:
    logits, _ = example()
    prediction = softmax_prediction(logits)
    assert prediction.labels.dtype == torch.uint8
    assert torch.equal(prediction.labels.long(), logits.argmax(1))
    assert torch.allclose(prediction.probabilities.sum(1), torch.ones(2, 3, 5, dtype=torch.float64))
    p = prediction.probabilities
    assert torch.allclose(prediction.uncertainty, -(p * p.log()).sum(1) / math.log(4))


def test_prediction_is_finite_at_far_scores() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    prediction = softmax_prediction(logits.view(2, 3, 1, 1))
    assert prediction.uncertainty.flatten().tolist() == pytest.approx([0, 1])
    assert bool(prediction.probabilities.isfinite().all())
