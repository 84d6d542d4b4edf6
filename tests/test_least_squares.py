"""Closed-form increments: limit cases of the pure functions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from incseg.losses.least_squares import (
    FEWEST,
    Sums,
    cell_targets,
    double,
    fill_background,
    label_weights,
    log_odds,
    packed,
    unpacked,
    with_doubles,
)
from incseg.outputs.evidential import odds_evidence_probabilities
from incseg.types import IGNORE

LABELS, COLUMNS = 4, 6


def cells(number: int, seed: int = 0, labels: int = LABELS) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, targets that sum to one, and weights, in float64."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.rand(number, labels, generator=generator, dtype=torch.float64) ** 3
    weights = torch.rand(number, generator=generator, dtype=torch.float64) + 0.1
    return features, targets / targets.sum(1, keepdim=True), weights


def summed(*parts: tuple[Tensor, Tensor, Tensor]) -> Sums:
    sums = Sums.zero(COLUMNS, LABELS)
    for part in parts:
        sums.add(*part)
    return sums


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.lists(st.integers(1, 59), max_size=4), st.randoms(use_true_random=False))
def test_order_and_split_do_not_matter(seed: int, cuts: list[int], random: object) -> None:
    """With true targets, learning in steps equals learning at once."""
    whole = cells(60, seed)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    edges = sorted({0, 60, *cuts})
    steps = [tuple(part[order][first:last] for part in whole) for first, last in pairwise(edges)]
    at_once = summed(whole)
    in_steps = Sums.zero(COLUMNS, LABELS)
    for step in steps:
        in_steps = in_steps + summed(step)  # type: ignore[arg-type]
    assert torch.allclose(at_once.solve(1e-3), in_steps.solve(1e-3), atol=1e-10)
    assert torch.allclose(at_once.counts, in_steps.counts)


def test_a_class_that_comes_later_is_solved_against_all_cells_before() -> None:
    """Sums with fewer labels have no cell of the other labels: their target is zero everywhere."""
    features, targets, weights = cells(40)
    early = Sums.zero(COLUMNS, 2)
    few = targets[:20, :2] / targets[:20, :2].sum(1, keepdim=True)
    early.add(features[:20], few, weights[:20])
    late = Sums.zero(COLUMNS, LABELS)
    late.add(features[20:], targets[20:], weights[20:])
    padded = torch.cat([few, torch.zeros(20, LABELS - 2, dtype=torch.float64)], 1)
    expected = summed((features, torch.cat([padded, targets[20:]]), weights))
    assert torch.allclose((early + late).solve(1e-4), expected.solve(1e-4), atol=1e-10)


def test_removing_a_class_is_as_if_it_had_been_background() -> None:
    """With equal weights the sum of φφᵀ does not depend on labels, so nothing of the class remains."""
    features, targets, _ = cells(50)
    ones = torch.ones(50, dtype=torch.float64)
    never = torch.cat([targets[:, :1] + targets[:, 2:3], targets[:, 1:2], targets[:, 3:]], 1)
    expected = Sums.zero(COLUMNS, LABELS - 1)
    expected.add(features, never, ones)
    assert torch.allclose(summed((features, targets, ones)).without(2).solve(1e-3), expected.solve(1e-3), atol=1e-10)


def test_without_ridge_it_is_weighted_least_squares() -> None:
    features, targets, weights = cells(50)
    root = weights.sqrt().unsqueeze(1)
    expected = torch.linalg.lstsq(features * root, targets * root).solution.T
    assert torch.allclose(summed((features, targets, weights)).solve(1e-14), expected, atol=1e-8)


def test_ridge_is_relative_to_the_features() -> None:
    """Features ten times as large give weights a tenth as large, and the same scores."""
    features, targets, weights = cells(50)
    plain = summed((features, targets, weights)).solve(1e-2)
    scaled = summed((10 * features, targets, weights)).solve(1e-2)
    assert torch.allclose(plain, 10 * scaled, atol=1e-10)


def test_gram_is_that_of_a_loop() -> None:
    features, targets, weights = cells(9)
    expected = sum(w * torch.outer(f, f) for f, w in zip(features, weights, strict=True))
    sums = summed((features, targets, weights))
    assert torch.allclose(sums.symmetric_gram(), expected, atol=1e-12)
    assert torch.equal(unpacked(packed(sums.gram), COLUMNS), sums.gram.triu())


def test_label_weights_at_both_ends() -> None:
    counts = torch.tensor([1e6, 1e4, FEWEST, 0.0], dtype=torch.float64)
    assert label_weights(counts, 0.0).tolist() == [1, 1, 1, 1]
    totals = label_weights(counts, 1.0) * counts
    assert totals[0] == pytest.approx(totals[1]) == pytest.approx(totals[2])
    assert label_weights(counts, 0.5)[-1] == 1


def test_cell_targets_are_shares_of_labelled_pixels() -> None:
    """Against a loop, on a grid that does not divide the image, with void."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (2, 11, 17), generator=generator, dtype=torch.uint8)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE
    labels[0, :4, :4] = IGNORE
    shares, labelled = cell_targets(labels, 3, 4, 4)
    for image in range(2):
        for row in range(3):
            for column in range(4):
                pixels = [
                    int(labels[image, i, j])
                    for i in range(11)
                    for j in range(17)
                    if int((i + 0.5) * 3 / 11) == row and int((j + 0.5) * 4 / 17) == column
                ]
                known = [p for p in pixels if p != IGNORE]
                cell = shares[image, 4 * row + column]
                assert labelled[image, 4 * row + column] == pytest.approx(len(known) / len(pixels))
                for label in range(4):
                    assert cell[label] == pytest.approx(known.count(label) / max(len(known), 1))


def test_background_goes_to_what_the_model_before_found() -> None:
    targets = torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.5, 0.0, 0.5]])
    filled = fill_background(targets, torch.tensor([2, 0, 2]))
    assert filled.tolist() == [[0.0, 0.25, 0.75], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


def test_log_odds_decide_as_the_largest_score() -> None:
    scores = torch.rand(50, 5)
    odds = log_odds(scores)
    best = odds.max(1)
    decided = torch.where(best.values > 0, best.indices + 1, 0)
    assert torch.equal(decided, scores.argmax(1))
    assert log_odds(torch.tensor([[7.0, -3.0]])).isfinite().all()


def test_odds_become_evidence_whose_uncertainty_is_background() -> None:
    """u = N / (N + Σe) with e = N·exp(o), and p_c > u just where o_c > 0."""
    odds = 3 * torch.randn(40, 6, dtype=torch.float64)
    found = odds_evidence_probabilities(odds)
    evidence = 6 * odds.exp()
    assert torch.allclose(found[:, 0], 6 / (6 + evidence.sum(1)))
    assert torch.allclose(found.sum(1), torch.ones(40, dtype=torch.float64))
    assert torch.equal(found[:, 1:] > found[:, :1], odds > 0)
    assert odds_evidence_probabilities(torch.zeros(1, 1))[0, 0] == 0.5


def test_sums_of_an_apple_gpu_are_on_the_cpu() -> None:
    """mps has no float64."""
    assert {part.device.type for part in vars(Sums.zero(3, 2, "mps")).values()} == {"cpu"}
    assert with_doubles("cuda:1") == torch.device("cuda:1")
    assert double(torch.ones(2)).dtype == torch.float64
