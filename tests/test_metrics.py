"""Metrics against naive references: IoU, quality at edges, the summary figures, the ranking by uncertainty."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from incseg.metrics import (
    BINS,
    boundary_counts,
    boundary_iou,
    confusion_counts,
    expected_calibration_error,
    grouped_score_counts,
    iou,
    mean,
    median_scores,
    near_boundary,
    plop_average,
    ranking,
    reliability_counts,
    score_counts,
    summary,
    trimap_counts,
)
from incseg.types import IGNORE, UNSEEN

# ---------------------------------------------------------------------------------------------- confusion


@st.composite
def label_maps(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Draw predicted and target maps with some ignored pixels, and the number of labels."""
    num_labels = draw(st.integers(1, 6))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    predicted = torch.randint(0, num_labels, shape, generator=generator).to(torch.uint8)
    target = torch.randint(0, num_labels + 1, shape, generator=generator).to(torch.uint8)
    target[target == num_labels] = IGNORE
    return predicted, target, num_labels


@given(label_maps())
def test_confusion_equals_naive_counting(maps: tuple[Tensor, Tensor, int]) -> None:
    predicted, target, num_labels = maps
    naive = [[0] * num_labels for _ in range(num_labels)]
    for p, t in zip(predicted.flatten().tolist(), target.flatten().tolist(), strict=True):
        if t != IGNORE:
            naive[t][p] += 1
    counts = confusion_counts(predicted, target, num_labels)
    assert counts.dtype == torch.int64
    assert counts.tolist() == naive


@given(label_maps())
def test_confusion_adds_up_over_batches(maps: tuple[Tensor, Tensor, int]) -> None:
    predicted, target, num_labels = maps
    whole = confusion_counts(predicted, target, num_labels)
    one_by_one = sum(confusion_counts(p, t, num_labels) for p, t in zip(predicted, target, strict=True))
    assert torch.equal(whole, one_by_one)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_confusion_leaves_its_inputs_alone(dtype: torch.dtype) -> None:
    predicted, target = torch.tensor([0, 1, 2], dtype=dtype), torch.tensor([2, IGNORE, 1], dtype=dtype)
    counts = confusion_counts(predicted, target, 3)
    assert counts.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert target.tolist() == [2, IGNORE, 1]
    assert predicted.tolist() == [0, 1, 2]


def test_confusion_at_the_most_labels() -> None:
    predicted = torch.tensor([UNSEEN - 1, 0, UNSEEN - 1], dtype=torch.uint8)
    target = torch.tensor([UNSEEN - 1, UNSEEN - 1, IGNORE], dtype=torch.uint8)
    counts = confusion_counts(predicted, target, UNSEEN)
    assert counts.shape == (UNSEEN, UNSEEN)
    assert counts.nonzero().tolist() == [[UNSEEN - 1, 0], [UNSEEN - 1, UNSEEN - 1]]


def test_everything_ignored_counts_nothing() -> None:
    target = torch.full((2, 3), IGNORE, dtype=torch.uint8)
    counts = confusion_counts(torch.zeros_like(target), target, 4)
    assert not counts.any()
    assert bool(iou(counts).isnan().all())


@given(label_maps())
def test_iou_equals_sets_of_pixels(maps: tuple[Tensor, Tensor, int]) -> None:
    predicted, target, num_labels = maps
    values = iou(confusion_counts(predicted, target, num_labels)).tolist()
    valid = {i for i, t in enumerate(target.flatten().tolist()) if t != IGNORE}
    for label in range(num_labels):
        said = {i for i, p in enumerate(predicted.flatten().tolist()) if p == label} & valid
        true = {i for i, t in enumerate(target.flatten().tolist()) if t == label}
        if said | true:
            assert values[label] == pytest.approx(len(said & true) / len(said | true))
        else:
            assert math.isnan(values[label])


# ---------------------------------------------------------------------------------------------- summary


def test_summary_counts_background_in_the_base() -> None:
    #       bg   base       step 1    step 2
    values = [0.9, 0.6, 0.3, 0.4, 0.2, 0.1]
    figures = summary(values, [[1, 2], [3, 4], [5]], has_background=True)
    assert figures == pytest.approx(
        {
            "base": 100 * (0.9 + 0.6 + 0.3) / 3,
            "new": 100 * (0.4 + 0.2 + 0.1) / 3,
            "all": 100 * (0.9 + 0.6 + 0.3 + 0.4 + 0.2 + 0.1) / 6,
            "inc": 100 * ((0.9 + 0.6 + 0.3) / 3 + (0.4 + 0.2) / 2 + 0.1) / 3,
        }
    )


def test_summary_without_background_leaves_label_0_out() -> None:
    figures = summary([0.0, 0.6, 0.3, 0.4], [[1, 2], [3]], has_background=False)
    assert figures == pytest.approx({"base": 45, "new": 40, "all": 130 / 3, "inc": 42.5})


@pytest.mark.parametrize(("has_background", "value"), [(True, 50), (False, 40)])
def test_summary_of_one_step(has_background: bool, value: float) -> None:
    figures = summary([0.7, 0.5, 0.3], [[1, 2]], has_background)
    assert figures["new"] is None
    assert [figures[name] for name in ("base", "all", "inc")] == pytest.approx([value] * 3)


def test_summary_leaves_undefined_labels_out_but_counts_missed_ones() -> None:
    nan = math.nan
    figures = summary([0.8, nan, 0.0, nan, nan, 0.5], [[1, 2], [3, 4], [5]], has_background=True)
    assert figures == pytest.approx({"base": 40, "new": 50, "all": 130 / 3, "inc": 45})


def test_mean_of_nothing_is_nothing() -> None:
    assert mean([]) is None
    assert mean([math.nan]) is None
    assert mean([math.nan, 0.0, 1.0]) == 0.5


def test_plop_average_is_the_mean_of_all_over_steps() -> None:
    assert plop_average([60.0, 50.0, 10.0]) == pytest.approx(40)
    assert plop_average([60.0, None]) == pytest.approx(60)
    assert plop_average([None]) is None


# ---------------------------------------------------------------------------------------------- ranking


def exact_ranking(positive: Tensor, negative: Tensor) -> dict[str, float]:
    """Return the ranking pair by pair, and threshold by threshold over all scores."""
    difference = positive.unsqueeze(1) - negative.unsqueeze(0)
    auroc = ((difference > 0).double() + (difference == 0).double() / 2).mean()
    average_precision, recall, fpr95 = 0.0, 0.0, None
    for threshold in torch.cat([positive, negative]).unique().flip(0).tolist():
        hits, alarms = int((positive >= threshold).sum()), int((negative >= threshold).sum())
        average_precision += (hits / len(positive) - recall) * hits / (hits + alarms)
        recall = hits / len(positive)
        if fpr95 is None and recall >= 0.95:
            fpr95 = alarms / len(negative)
    assert fpr95 is not None
    return {"auroc": float(auroc), "average_precision": average_precision, "fpr95": fpr95}


def binned(positive: Tensor, negative: Tensor) -> dict[str, float]:
    figures = ranking(score_counts(positive), score_counts(negative))
    assert figures is not None
    return figures


def logistic(centre: float, spread: float, number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.sigmoid(centre + spread * torch.randn(number, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize(
    ("positive", "negative"),
    [
        (logistic(1, 2, 1500, 0), logistic(0, 2, 1000, 1)),
        (logistic(-1, 1, 300, 2), logistic(2, 3, 1500, 3)),  # worse than chance
        (logistic(0, 3, 1000, 4), logistic(0, 3, 1000, 5)),  # the same distribution
        (logistic(9, 2, 800, 6), logistic(7, 2, 800, 7)),  # all close to one
        (logistic(0, 2, 1000, 8).round(decimals=1), logistic(0, 1, 900, 9).round(decimals=1)),  # ties, also at 0 and 1
    ],
    ids=["apart", "reversed", "same", "near_one", "ties"],
)
def test_ranking_is_close_to_the_exact_one(positive: Tensor, negative: Tensor) -> None:
    got, wanted = binned(positive, negative), exact_ranking(positive, negative)
    assert got["auroc"] == pytest.approx(wanted["auroc"], abs=1e-3)
    assert got["average_precision"] == pytest.approx(wanted["average_precision"], abs=3e-3)
    assert got["fpr95"] == pytest.approx(wanted["fpr95"], abs=1e-2)


@given(
    positive=st.lists(st.integers(0, BINS - 1), min_size=1, max_size=40),
    negative=st.lists(st.integers(0, BINS - 1), min_size=1, max_size=40),
)
def test_ranking_of_binned_scores_is_exact(positive: list[int], negative: list[int]) -> None:
    """Bins are the only error: for bin numbers as scores the figures are exact."""
    sides = [torch.tensor(side) for side in (positive, negative)]
    histograms = [torch.bincount(side, minlength=BINS) for side in sides]
    assert ranking(*histograms) == pytest.approx(exact_ranking(*sides), abs=1e-12)


def test_ranking_of_separable_scores() -> None:
    high, low = torch.full((40,), 0.9), torch.full((60,), 0.2)
    assert binned(high, low) == {"auroc": 1.0, "average_precision": 1.0, "fpr95": 0.0}
    assert binned(low, high) == pytest.approx({"auroc": 0.0, "average_precision": 0.6, "fpr95": 1.0})


def test_ranking_of_one_score_is_chance() -> None:
    ones = torch.ones(30)
    assert binned(ones, ones[:10]) == pytest.approx({"auroc": 0.5, "average_precision": 0.75, "fpr95": 1.0})


def test_fpr95_is_taken_where_recall_reaches_95_percent() -> None:
    """19 of 20 positives are exactly enough."""
    positive = torch.tensor([0.9] * 19 + [0.1])
    negative = torch.tensor([0.95, 0.5, 0.5, 0.05])
    assert binned(positive, negative)["fpr95"] == 0.25
    assert binned(positive[1:], negative)["fpr95"] == 0.75  # 18 of 19 are not


def test_ranking_needs_both_sides() -> None:
    nothing, something = torch.zeros(BINS, dtype=torch.int64), score_counts(torch.rand(5))
    assert ranking(nothing, something) is None
    assert ranking(something, nothing) is None


def test_scores_are_counted_once_each_and_in_order() -> None:
    scores = torch.tensor([0.0, 1e-12, 1e-6, 0.3, 0.5, 0.7, 1 - 1e-6, 1.0], dtype=torch.float64)
    bins = [int(score_counts(s).nonzero()) for s in scores]
    assert bins == sorted(bins)
    assert (bins[0], bins[-1]) == (0, BINS - 1)
    assert len(set(bins[1:])) == len(bins) - 1
    assert int(score_counts(scores).sum()) == len(scores)


@given(split=st.integers(0, 200), seed=st.integers(0, 1000))
def test_score_counts_add_up(split: int, seed: int) -> None:
    scores = logistic(0, 4, 200, seed).float()
    counts = score_counts(scores)
    assert counts.shape == (BINS,)
    assert torch.equal(score_counts(scores[:split]) + score_counts(scores[split:]), counts)


def test_grouped_counts_are_those_of_each_group() -> None:
    scores = logistic(-2, 3, 500, 0).view(10, 50)
    groups = torch.randint(0, 3, (10, 50), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    counts = grouped_score_counts(scores, groups, 4)
    assert counts.shape == (4, BINS)
    for group in range(4):
        assert torch.equal(counts[group], score_counts(scores[groups == group]))
    assert not counts[3].any()


@pytest.mark.parametrize("number", [1, 2, 7, 1001])
def test_medians_are_exact_to_a_bin(number: int) -> None:
    """A bin is a fiftieth of a nat. Of an even number, the lower of the two middle values is returned."""
    sides = [logistic(-6, 2, number, 0), logistic(1, 2, number, 1)]
    counts = torch.stack([score_counts(side) for side in sides] + [torch.zeros(BINS, dtype=torch.int64)])
    medians = median_scores(counts)
    for side, median in zip(sides, medians, strict=False):
        middle = float(torch.quantile(side, 0.5, interpolation="lower"))
        assert float(torch.logit(median) - math.log(middle / (1 - middle))) == pytest.approx(0, abs=0.0101)
    assert float(medians[2]) == 0


def test_calibration_error_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2000, generator=generator)
    came_true = torch.rand(2000, generator=generator) < probabilities**2
    counted = torch.rand(2000, generator=generator) < 0.9
    found = expected_calibration_error(reliability_counts(probabilities, came_true, counted))
    expected = 0.0
    for first in range(15):
        inside = counted & (probabilities >= first / 15) & (probabilities < (first + 1) / 15)
        gap = probabilities[inside].mean() - came_true[inside].float().mean()
        expected += float(inside.sum() * gap.abs() / counted.sum())
    assert found == pytest.approx(100 * expected, abs=0.05)


def test_certainty_that_always_comes_true_has_no_calibration_error() -> None:
    ones = torch.ones(50)
    assert expected_calibration_error(reliability_counts(ones, ones > 0, ones > 0)) == pytest.approx(0, abs=0.04)
    assert expected_calibration_error(reliability_counts(ones, ones < 0, ones > 0)) == pytest.approx(100, abs=0.04)
    assert expected_calibration_error(reliability_counts(ones, ones > 0, ones < 0)) is None


def naive_band(labels: np.ndarray, distance: int, image_edge: bool) -> np.ndarray:
    height, width = labels.shape
    near = np.zeros(labels.shape, dtype=bool)
    for y in range(height):
        for x in range(width):
            for other_y in range(y - distance, y + distance + 1):
                for other_x in range(x - distance, x + distance + 1):
                    if 0 <= other_y < height and 0 <= other_x < width:
                        near[y, x] |= labels[other_y, other_x] != labels[y, x]
                    else:
                        near[y, x] |= image_edge
    return near


@given(st.integers(0, 2**31), st.integers(1, 5), st.booleans())
@settings(max_examples=20, deadline=None)
def test_pixels_near_a_boundary_by_a_naive_loop(seed: int, distance: int, image_edge: bool) -> None:
    random = np.random.RandomState(seed)
    labels = np.kron(random.randint(0, 3, (3, 4)), np.ones((3, 4), int))
    found = near_boundary(torch.from_numpy(labels)[None], distance, image_edge)
    assert np.array_equal(found[0].numpy(), naive_band(labels, distance, image_edge))


def test_boundary_iou_by_a_naive_loop() -> None:
    random = np.random.RandomState(0)
    target = np.kron(random.randint(0, 3, (2, 6, 8)), np.ones((1, 10, 10), int))
    predicted = np.roll(target, 1, axis=2)
    target[:, 20:24] = IGNORE
    both, shown, found = np.zeros(3), np.zeros(3), np.zeros(3)
    for given_map, predicted_map in zip(target, predicted, strict=True):
        valid = given_map != IGNORE
        filled = np.where(valid, given_map, predicted_map)
        bands = [naive_band(labels, 2, True) & valid for labels in (filled, predicted_map)]  # 2 % of a diagonal of 100
        for label in range(3):
            a, b = (bands[0] & (filled == label)), (bands[1] & (predicted_map == label))
            both[label] += (a & b).sum()
            shown[label] += a.sum()
            found[label] += b.sum()
    counts = boundary_counts(torch.from_numpy(predicted), torch.from_numpy(target), 3)
    assert counts.tolist() == [both.tolist(), shown.tolist(), found.tolist()]
    assert torch.allclose(boundary_iou(counts), torch.from_numpy(both / (shown + found - both)))


def test_boundary_iou_of_a_perfect_prediction_is_one_whatever_the_void_rim() -> None:
    target = torch.zeros(1, 40, 60, dtype=torch.uint8)
    target[:, 10:30, 20:45] = 1
    predicted = target.clone()
    target[:, 8:12] = IGNORE
    assert boundary_iou(boundary_counts(predicted, target, 2)).tolist() == [1, 1]
    coarse = torch.zeros_like(predicted)
    coarse[:, 7:33, 17:48] = 1
    at_edges = boundary_iou(boundary_counts(coarse, target, 2))
    everywhere = iou(confusion_counts(coarse, target, 2))
    assert bool((at_edges < everywhere - 0.2).all())


def test_a_trimap_counts_only_pixels_near_another_label() -> None:
    target = torch.zeros(1, 20, 20, dtype=torch.uint8)
    target[:, :, 10:] = 1
    wrong_far_away = target.clone()
    wrong_far_away[:, :, 0] = 1
    three, eight = trimap_counts(wrong_far_away, target, 2)
    assert three.sum() == 6 * 20
    assert eight.sum() == 16 * 20
    assert torch.equal(iou(three), torch.ones(2, dtype=torch.float64))
    wrong_at_the_edge = target.clone()
    wrong_at_the_edge[:, :, 9] = 1
    three, eight = trimap_counts(wrong_at_the_edge, target, 2)
    assert iou(three)[0] == pytest.approx(2 / 3)
    assert iou(eight)[0] == pytest.approx(7 / 8)
