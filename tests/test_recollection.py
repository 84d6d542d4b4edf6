"""Old features from statistics: mean and covariance of what was seen, draws of them, and what they ask of a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import assert_same_run, quiet, rows_of, small_config
from test_replay import Interrupting, tensors_of

from incseg.engine.rundir import RunDir
from incseg.experiment import train
from incseg.files import read_tensors
from incseg.losses.gaussians import Gaussians, moments
from incseg.losses.prototypes import membership
from incseg.methods import build_method
from incseg.methods.base import StepContext
from incseg.methods.evidential import Evidential
from incseg.methods.recollection import PER_UPDATE, Recollection
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol
from incseg.types import DatasetInfo

LABELS = torch.tensor([0, 1, 1, 3, 0, 1, 255, 0, 1, 3, 3, 1, 0, 1, 0, 3])


def positions(number: int = len(LABELS), seed: int = 0) -> torch.Tensor:
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(seed)) @ torch.tensor(
        [[1.0, 0.5, 0.0], [0.0, 2.0, -1.0], [0.0, 0.0, 0.1]]
    )


# --- the mathematics --------------------------------------------------------------------------------------------


def test_gaussians_are_numpys_mean_and_covariance() -> None:
    x = positions()
    found = Gaussians.of(moments(x, membership(LABELS, 4)))
    assert found.counts.tolist() == [5, 6, 0, 4]
    for label in (0, 1, 3):
        own = x[label == LABELS].double().numpy()
        np.testing.assert_allclose(found.means[label], own.mean(0), rtol=1e-5, atol=1e-6)
        factor = found.factors[label].double()
        np.testing.assert_allclose(factor @ factor, np.cov(own.T, bias=True), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(factor, factor.T)


def test_moments_add_up_over_batches() -> None:
    x, members = positions(), membership(LABELS, 4)
    parts = moments(x[:5], members[:5]) + moments(x[5:], members[5:])
    torch.testing.assert_close(parts, moments(x, members))


def test_draws_have_the_means_covariances_and_shares() -> None:
    labels = (torch.arange(4000) % 4 == 0).long()  # one in four is of class 1
    x = positions(4000) + 20 * labels.unsqueeze(1)
    given = Gaussians.of(moments(x, membership(labels, 2)))
    drawn = given.draw(40000, torch.Generator().manual_seed(1))
    of_one = drawn[:, 2] > 10
    assert float(of_one.float().mean()) == pytest.approx(0.25, abs=0.01)
    for label, chosen in ((0, ~of_one), (1, of_one)):
        own = x[labels == label]
        torch.testing.assert_close(drawn[chosen].mean(0), own.mean(0), rtol=0.02, atol=0.06)
        torch.testing.assert_close(drawn[chosen].T.cov(), own.T.cov(), rtol=0.1, atol=0.1)


def test_what_was_never_seen_is_never_drawn_and_one_position_is_drawn_as_it_is() -> None:
    x = torch.tensor([[1.0, 2.0]])
    found = Gaussians.of(moments(x, membership(torch.tensor([1]), 3)))
    torch.testing.assert_close(found.draw(7, torch.Generator().manual_seed(0)), x.expand(7, 2))


def test_draws_do_not_hang_on_the_last_bit() -> None:
    """Where two directions are spread alike, any eigenvectors do: the draws must not depend on which came out."""
    x = torch.eye(3).repeat(4, 1)
    alike = [Gaussians.of(moments(x + noise, membership(torch.zeros(12).long(), 1))) for noise in (0.0, 1e-7)]
    one, other = (given.draw(100, torch.Generator().manual_seed(0)) for given in alike)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


# --- in the method ----------------------------------------------------------------------------------------------


def config_of(out: Path, recollect: float | None = 1.0, **changes: Any) -> Any:
    return small_config(out, method={"name": "evidential", "recollect": recollect}, **changes)


def test_a_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    whole, parts = (config_of(tmp_path / name) for name in ("whole", "parts"))
    train(whole, quiet)
    with pytest.raises(KeyboardInterrupt):
        train(dataclasses.replace(parts, train=dataclasses.replace(parts.train, checkpoint_seconds=0.0)),
              lambda: Interrupting(2))  # fmt: skip
    assert RunDir(parts.folder).checkpoint.exists()
    train(parts, quiet)
    assert_same_run(whole.folder, parts.folder)


def test_every_class_and_the_first_background_leave_their_spread(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    train(config, quiet)
    for step, rows in ((0, 1 + 6), (1, 1 + 8), (2, 1 + 10)):
        state, _ = read_tensors(RunDir(config.folder).state(step))
        assert state["recollection.means"].shape == (rows, 16)
        assert state["recollection.factors"].shape == (rows, 16, 16)
        assert (state["recollection.counts"] > 0).all()
    losses = [row["losses"] for row in rows_of(config.folder)]
    assert ["absent" in one for one in losses] == [False, True, True]


def test_step_0_is_the_same_model_and_yet_not_shared(tmp_path: Path) -> None:
    for name, weight in (("plain", None), ("with", 1.0), ("heavier", 3.0)):
        train(config_of(tmp_path / name, weight, reuse=True), quiet)
    plain, kept = (tensors_of(tmp_path / name, 0) for name in ("plain", "with"))
    assert all(torch.equal(plain[name], kept[name]) for name in plain)
    first = {name: RunDir(tmp_path / name).rows()[0]["reused_from"] for name in ("with", "heavier")}
    assert first["with"] is None, "a base without statistics would leave nothing to draw from"
    assert first["heavier"] is not None
    for step in (0, 1):
        assert "recollect" not in build_method({"name": "evidential"}).recipe(step), "steps that are kept stay valid"


def test_only_the_new_classifier_is_asked(tmp_path: Path) -> None:
    """The gradient of the term: towards less evidence on old features, and on nothing but the new classifier."""
    config = config_of(tmp_path / "run", train={"epochs": 1})
    train(config, quiet)
    method = build_method({"name": "evidential", "recollect": 2.0})
    assert isinstance(method, Evidential)
    newest = torch.nn.Conv2d(16, 2, 1)
    method._newest = newest
    assert method._absence() == {}
    recollection = method._recollection
    assert isinstance(recollection, Recollection)
    recollection.load_state(read_tensors(RunDir(config.folder).state(1))[0])
    recollection._seed = (0, 2)
    recollection.draw()
    assert recollection.drawn is not None
    assert recollection.drawn.shape == (PER_UPDATE, 16)
    before = method._absence()["absent"]
    scores = newest(recollection.drawn[:, :, None, None]).flatten(1).double()
    evidence = scores.exp() * scores.sigmoid()
    expected = -2 * (2 / (evidence.sum(1) + 2)).log().mean()  # u = K / S
    torch.testing.assert_close(before.double(), expected, rtol=1e-4, atol=1e-5)
    before.backward()
    with torch.no_grad():
        for parameter in newest.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
    assert method._absence()["absent"] < before


def test_a_model_that_kept_nothing_is_told() -> None:
    step = Protocol(DatasetInfo("toy", ("ant", "bee")), "ant/bee", "overlapped").steps[1]
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1)), False)
    said: list[str] = []
    recollection = Recollection()
    recollection.begin_step(StepContext(step, model, model, lambda: iter([]), say=said.append))
    recollection.draw()
    assert said == ["recollect: the model was learnt without it and kept no statistics, so nothing is drawn"]
    assert recollection.drawn is None
