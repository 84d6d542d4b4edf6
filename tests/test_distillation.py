"""Distillation of outputs and feature maps: loops over pixels and tiles, minima at the teacher, known values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from incseg.losses.distillation import (
    feature_distillation,
    local_pod,
    output_distillation_sum,
    sigmoid_distillation_sum,
)
from incseg.losses.sigmoid import binary_cross_entropy
from incseg.outputs.sigmoid import sigmoid_prediction
from incseg.types import IGNORE

Loss = Callable[[Tensor, Tensor], Tensor]


def output_distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over all pixels."""
    return output_distillation_sum(logits, teacher) / teacher[:, 0].numel()


def sigmoid_distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over all pixels."""
    return sigmoid_distillation_sum(logits, teacher) / teacher[:, 0].numel()


OUTPUT_LOSSES = pytest.mark.parametrize("loss", [output_distillation, sigmoid_distillation])


def random(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pixels(logits: Tensor) -> list[list[float]]:
    return logits.movedim(1, -1).flatten(0, -2).tolist()


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def binary_cost(z: float, yes: float) -> float:
    return -(yes * math.log(sigmoid(z)) + (1 - yes) * math.log(sigmoid(-z)))


# --- outputs -------------------------------------------------------------------------------------------------


def test_output_distillation_is_the_loop() -> None:
    logits, teacher = random(2, 5, 3, 4), random(2, 3, 3, 4, seed=1)
    total = 0.0
    for scores, old in zip(pixels(logits), pixels(teacher), strict=True):
        student = [math.exp(z) for z in scores[:3]]
        target = [math.exp(z) for z in old]
        for q, p in zip(target, student, strict=True):
            total -= q / sum(target) * math.log(p / sum(student)) / 3
    assert float(output_distillation_sum(logits, teacher)) == pytest.approx(total, rel=1e-12)
    assert float(output_distillation(logits, teacher)) == pytest.approx(total / 24, rel=1e-12)


def test_sigmoid_distillation_is_the_loop() -> None:
    logits, teacher = random(2, 5, 3, 4), random(2, 3, 3, 4, seed=1)
    total = sum(
        binary_cost(z, sigmoid(t))
        for scores, old in zip(pixels(logits), pixels(teacher), strict=True)
        for z, t in zip(scores[:3], old, strict=True)
    )
    assert float(sigmoid_distillation_sum(logits, teacher)) == pytest.approx(total, rel=1e-12)
    assert float(sigmoid_distillation(logits, teacher)) == pytest.approx(total / 24, rel=1e-12)


@OUTPUT_LOSSES
def test_it_is_minimal_at_the_teacher_and_leaves_new_outputs_alone(loss: Loss) -> None:
    teacher = random(2, 3, 2, 2)
    student = torch.cat([teacher, random(2, 2, 2, 2, seed=1)], dim=1).requires_grad_()
    least = loss(student, teacher)
    assert torch.autograd.grad(least, student)[0].abs().max() < 1e-12
    for seed in range(5):
        other = student.detach() + 0.3 * random(2, 5, 2, 2, seed=2 + seed)
        assert loss(other, teacher) > least
        (gradient,) = torch.autograd.grad(loss(other.requires_grad_(), teacher), other)
        assert not gradient[:, 3:].any()


def test_values_at_the_teacher() -> None:
    silent = torch.zeros(1, 4, 2)
    assert float(output_distillation(silent, silent)) == pytest.approx(math.log(4) / 4)
    assert float(sigmoid_distillation(silent, silent)) == pytest.approx(4 * math.log(2))


def test_a_constant_on_all_outputs_matters_to_sigmoids_alone() -> None:
    logits, teacher = random(2, 3, 2), random(2, 3, 2, seed=1)
    torch.testing.assert_close(output_distillation(logits + 1, teacher), output_distillation(logits, teacher))
    assert not torch.isclose(sigmoid_distillation(logits + 1, teacher), sigmoid_distillation(logits, teacher))


@OUTPUT_LOSSES
def test_gradcheck(loss: Loss) -> None:
    teacher = random(2, 2, 2, 2, seed=1)
    assert torch.autograd.gradcheck(lambda z: loss(z, teacher), random(2, 3, 2, 2).requires_grad_())


@OUTPUT_LOSSES
def test_far_scores_stay_finite(loss: Loss) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, -1e4]]).requires_grad_()
    value = loss(logits, torch.tensor([[-1e4, 1e4], [0.0, -1e4]]))
    assert value.isfinite()
    assert torch.autograd.grad(value, logits)[0].isfinite().all()


@OUTPUT_LOSSES
def test_a_student_with_fewer_outputs_is_an_error(loss: Loss) -> None:
    with pytest.raises(ValueError, match=r"student of 2 outputs .* teacher's 3"):
        loss(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4))


# --- the sigmoid model ---------------------------------------------------------------------------------------


def sigmoid_example() -> tuple[Tensor, Tensor]:
    kinds = torch.tensor([0, 1, 2, IGNORE], dtype=torch.uint8)
    return random(2, 3, 3, 4), kinds[torch.randint(4, (2, 3, 4), generator=torch.Generator().manual_seed(5))]


def test_binary_cross_entropy_is_the_loop() -> None:
    logits, labels = sigmoid_example()
    total = sum(
        binary_cost(z, float(label == number))
        for scores, label in zip(pixels(logits), labels.flatten().tolist(), strict=True)
        if label != IGNORE
        for number, z in enumerate(scores)
    )
    assert float(binary_cross_entropy(logits, labels).sum()) == pytest.approx(total, rel=1e-12)


def test_binary_cross_entropy_limits() -> None:
    logits, labels = sigmoid_example()
    valid = int((labels != IGNORE).sum())
    assert float(binary_cross_entropy(logits * 0, labels).sum()) == pytest.approx(valid * 3 * math.log(2))
    void = binary_cross_entropy(logits.requires_grad_(), torch.full_like(labels, IGNORE)).sum()
    assert float(void.detach()) == 0
    assert not torch.autograd.grad(void, logits)[0].any()


def test_binary_cross_entropy_gradcheck() -> None:
    logits, labels = sigmoid_example()
    assert torch.autograd.gradcheck(lambda z: binary_cross_entropy(z, labels).sum(), logits.requires_grad_())


def test_sigmoid_prediction_by_hand() -> None:
    logits = random(1, 3, 2, 5)
    prediction = sigmoid_prediction(logits)
    for index, scores in enumerate(pixels(logits)):
        on = [sigmoid(z) for z in scores]
        place = (0, index // 5, index % 5)
        assert int(prediction.labels[place]) == on.index(max(on))
        assert float(prediction.uncertainty[place]) == pytest.approx(1 - max(on))
        shown = prediction.probabilities[0, :, index // 5, index % 5].tolist()
        assert shown == pytest.approx([share / sum(on) for share in on])


def test_sigmoid_prediction_where_no_output_is_positive() -> None:
    logits = torch.tensor([-300.0, -200.0, -250.0]).view(1, 3, 1, 1)
    prediction = sigmoid_prediction(logits)
    assert int(prediction.labels) == 1
    assert float(prediction.uncertainty) == 1
    assert prediction.probabilities.flatten().tolist() == pytest.approx([0, 1, 0])


# --- features ------------------------------------------------------------------------------------------------


def test_feature_distillation_is_the_mean_square() -> None:
    one, other = random(2, 3, 2, 2), random(2, 3, 2, 2, seed=1)
    differences = [(a - b) ** 2 for a, b in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)]
    assert float(feature_distillation(one, other)) == pytest.approx(sum(differences) / len(differences))
    assert float(feature_distillation(one, one)) == 0
    assert torch.autograd.gradcheck(lambda x: feature_distillation(x, other), one.requires_grad_())
    assert feature_distillation(one.half(), other.half()).dtype == torch.float32


def parts(size: int, scale: int) -> list[list[int]]:
    """Return the positions 0..size−1 in `scale` runs, the longer ones first, none empty."""
    number = min(scale, size)
    lengths = [size // number + (index < size % number) for index in range(number)]
    ends = list(itertools.accumulate(lengths))
    return [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]


def pod_vector(sample: Tensor, scales: tuple[int, ...]) -> list[float]:
    """Return the row and column means of all tiles of all channels of (C, H, W), tile by tile."""
    _, height, width = sample.shape
    vector = []
    for scale in scales:
        for rows, columns in itertools.product(parts(height, scale), parts(width, scale)):
            for channel in sample.tolist():
                vector += [sum(channel[y][x] ** 2 for x in columns) / len(columns) for y in rows]
                vector += [sum(channel[y][x] ** 2 for y in rows) / len(rows) for x in columns]
    return vector


def naive_pod(maps: list[Tensor], teacher_maps: list[Tensor], scales: tuple[int, ...]) -> float:
    distances = []
    for x, t in zip(maps, teacher_maps, strict=True):
        norms = [math.dist(pod_vector(a, scales), pod_vector(b, scales)) for a, b in zip(x, t, strict=True)]
        distances.append(sum(norms) / len(norms))
    return sum(distances) / len(distances)


@pytest.mark.parametrize("scales", [(1,), (1, 2, 4), (3, 5)], ids=str)
def test_pod_is_the_loop(scales: tuple[int, ...]) -> None:
    """Maps of several sizes, some with sides that no scale divides or shorter than a scale."""
    sizes = [(8, 8), (14, 14), (7, 5), (3, 1)]
    maps = [random(2, 2, *size, seed=number) for number, size in enumerate(sizes)]
    teacher = [random(2, 2, *size, seed=10 + number) for number, size in enumerate(sizes)]
    assert float(local_pod(maps, teacher, scales)) == pytest.approx(naive_pod(maps, teacher, scales), rel=1e-12)


def test_pod_of_fourteen_in_four() -> None:
    assert [len(part) for part in parts(14, 4)] == [4, 4, 3, 3]
    teacher = torch.zeros(1, 1, 14, 14, dtype=torch.float64)
    corner = teacher.clone()
    corner[..., 13, 13] = 1  # the last row and column count
    assert float(local_pod([corner], [teacher], (4,))) == pytest.approx(math.sqrt((1 / 3) ** 2 * 2))


def test_pod_of_equal_maps_is_zero_without_gradient() -> None:
    maps = [random(2, 3, 14, 14).requires_grad_(), random(2, 3, 6, 6).requires_grad_()]
    distance = local_pod(maps, [x.detach() for x in maps])
    assert float(distance.detach()) == 0
    for gradient in torch.autograd.grad(distance, maps):
        assert not gradient.any()


@pytest.mark.parametrize("factor", [0.5, 3.0, -2.0])
def test_pod_of_a_scaled_copy(factor: float) -> None:
    x = random(3, 2, 14, 14)
    norms = [math.hypot(*pod_vector(sample, (1, 2, 4))) for sample in x]
    expected = abs(factor**2 - 1) * sum(norms) / len(norms)
    assert float(local_pod([factor * x], [x])) == pytest.approx(expected, rel=1e-12)


def test_pod_of_a_constant_map() -> None:
    """All means are equal: 2·√(Σ_s C·side·s)."""
    twos = torch.full((1, 3, 8, 8), 2.0)
    assert float(local_pod([twos], [0 * twos])) == pytest.approx(4 * math.sqrt(2 * 3 * 8 * (1 + 2 + 4)))


def test_pod_gradcheck() -> None:
    teacher = [random(2, 2, 5, 3, seed=1), random(2, 1, 2, 2, seed=2)]
    maps = [random(2, 2, 5, 3, seed=3).requires_grad_(), random(2, 1, 2, 2, seed=4).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: local_pod(x, teacher), maps)


def test_pod_of_half_precision_does_not_overflow() -> None:
    large = torch.full((1, 2, 4, 4), 1000.0, dtype=torch.float16)
    distance = local_pod([large], [torch.zeros_like(large)])
    assert distance.dtype == torch.float32
    assert float(distance) == pytest.approx(1e6 * math.sqrt(2 * 2 * 4 * 7))


def test_maps_that_do_not_pair_are_an_error() -> None:
    x = torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match="2 maps cannot be compared with 1"):
        local_pod([x, x], [x])
    with pytest.raises(ValueError, match="0 maps"):
        local_pod([], [])
    with pytest.raises(ValueError, match=r"\(1, 2, 4, 4\) cannot be compared with one of \(1, 2, 4, 5\)"):
        local_pod([x], [torch.zeros(1, 2, 4, 5)])
