"""Thresholds of a step's classes, moved to where they serve best when the classes are rare."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_runs import quiet, rows_of, small_config

from incseg.experiment import train
from incseg.losses.evidential import log_probabilities
from incseg.methods.base import StepContext
from incseg.methods.calibration import best_threshold, calibrate, natural_threshold, score_histograms
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol
from incseg.types import IGNORE, Batch, DatasetInfo, Increment


@pytest.mark.parametrize("rectifier", ["exp_sigmoid", "exp", "relu", "softplus"])
@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_a_lone_class_beats_background_from_the_natural_threshold_on(rectifier: str, size: int) -> None:
    z = natural_threshold(size, rectifier)
    scores = torch.full((2, size), -200.0, dtype=torch.float64)
    scores[:, 0] = torch.tensor([z - 1e-3, z + 1e-3])
    assert log_probabilities(scores, rectifier).argmax(1).tolist() == [0, 1]


def test_one_class_decides_at_evidence_one() -> None:
    golden = (1 + math.sqrt(5)) / 2  # e^2z / (1 + e^z) = 1
    assert natural_threshold(1, "exp_sigmoid") == pytest.approx(math.log(golden))


@pytest.mark.parametrize("ratio", [1.0, 20.0])
def test_the_best_threshold_is_the_best_of_all(ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z_other, z_own = torch.randn(5000, generator=generator) - 1, torch.randn(800, generator=generator) + 1
    others, own = (torch.histc(z, 800, -20, 20).long() for z in (z_other, z_own))

    def share(threshold: float) -> float:
        hits, alarms = int((z_own >= threshold).sum()), int((z_other >= threshold).sum())
        return hits / (len(z_own) + ratio * alarms)

    found = best_threshold(others, own, ratio)
    assert share(found) == pytest.approx(max(share(t / 20) for t in range(-400, 400)), abs=5e-3)


def test_rarer_classes_need_more_evidence() -> None:
    generator = torch.Generator().manual_seed(1)
    others = torch.histc(torch.randn(5000, generator=generator) - 1, 800, -20, 20).long()
    own = torch.histc(torch.randn(800, generator=generator) + 1, 800, -20, 20).long()
    thresholds = [best_threshold(others, own, ratio) for ratio in (0.1, 1, 10, 100)]
    assert thresholds == sorted(set(thresholds))


@pytest.fixture
def context() -> StepContext:
    torch.manual_seed(0)
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 2, 3)), background_output=False)
    steps = Protocol(DatasetInfo("toy", ("ant", "bee", "cow")), "ant,bee/cow", "overlapped").steps
    model.grow(Increment(("ant", "bee"), (1, 2), 900))
    model.grow(Increment(("cow",), (3,), 100))
    labels = torch.zeros(2, 24, 24, dtype=torch.uint8)
    labels[0, :12], labels[1, :4] = 3, IGNORE
    batch = Batch(torch.randn(2, 3, 24, 24), labels, torch.zeros(256))
    return StepContext(steps[1], model, None, lambda: iter([batch]))


def test_counts_are_of_every_labelled_pixel(context: StepContext) -> None:
    with torch.no_grad():
        counts = score_histograms(context.model, context.batches(), 2)
    assert counts.shape[:2] == (1, 2)
    assert counts.sum(-1).tolist() == [[2 * 24 * 24 - 12 * 24 - 4 * 24, 12 * 24]]


def test_the_new_bias_puts_the_best_threshold_where_the_class_decides(context: StepContext) -> None:
    model = context.model
    before = [classifier.get_parameter("bias").clone() for classifier in model.classifiers]
    with torch.no_grad():
        ((others, own),) = score_histograms(model, context.batches(), 2)
    calibrate(context, "exp_sigmoid")
    after = [classifier.get_parameter("bias").detach() for classifier in model.classifiers]
    assert torch.equal(before[0], after[0]), "what was learnt before stays"
    shift = natural_threshold(1, "exp_sigmoid") - best_threshold(others, own, 10.0)
    assert (after[1] - before[1]).item() == pytest.approx(shift, abs=1e-5)


def test_a_calibrated_run_shares_its_base_and_differs_after_it(tmp_path: Path) -> None:
    train(small_config(tmp_path / "plain", reuse=True), quiet)
    train(small_config(tmp_path / "moved", reuse=True, method={"name": "evidential", "calibrate": True}), quiet)
    plain, moved = rows_of(tmp_path / "plain"), rows_of(tmp_path / "moved")
    assert moved[0]["reused_from"] is not None
    assert moved[0]["all"] == plain[0]["all"]
    assert moved[1]["reused_from"] is None
    assert moved[1]["iou"] != plain[1]["iou"]
