"""Importance of parameters: the formulas against loops, the bookkeeping of EWC, PI and RW, and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, small_config
from torch import Tensor, nn

from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.losses.importance import (
    PATH_DAMPING,
    WALK_DAMPING,
    min_max,
    path_importance,
    path_step,
    penalty_gradient,
    quadratic_penalty,
    running_square,
    walk_step,
)
from incseg.methods.consolidation import Consolidation
from incseg.run import train

METHODS = ("ewc", "pi", "rw")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- formulas ------------------------------------------------------------------------------------------------


def test_the_penalty_equals_a_loop_and_its_gradient_the_closed_form() -> None:
    parameters = {"a": draw(3, 2, seed=1).requires_grad_(), "b": draw(4, seed=2).requires_grad_()}
    anchors = {"a": draw(3, 2, seed=3), "b": draw(4, seed=4)}
    importance = {"a": draw(3, 2, seed=5).abs(), "b": draw(4, seed=6).abs()}
    wanted = sum(
        i * (p - o) ** 2
        for name in parameters
        for p, o, i in zip(
            *(named[name].flatten().tolist() for named in (parameters, anchors, importance)), strict=True
        )
    )
    penalty = quadratic_penalty(parameters, anchors, importance)
    assert float(penalty.detach()) == pytest.approx(wanted)
    for name, gradient in zip(parameters, torch.autograd.grad(penalty, list(parameters.values())), strict=True):
        torch.testing.assert_close(gradient, penalty_gradient(parameters[name], anchors[name], importance[name]))
    assert torch.autograd.gradcheck(
        lambda a, b: quadratic_penalty({"a": a, "b": b}, anchors, importance), tuple(parameters.values())
    )


def test_the_penalty_is_zero_where_nothing_moved_or_nothing_matters() -> None:
    one, other = {"a": draw(5, seed=1)}, {"a": draw(5, seed=2)}
    assert quadratic_penalty(one, one, {"a": torch.ones(5, dtype=torch.float64)}) == 0
    assert quadratic_penalty(one, other, {"a": torch.zeros(5, dtype=torch.float64)}) == 0
    assert quadratic_penalty(one, other, {"a": torch.ones(5, dtype=torch.float64)}) > 0


def test_squares_run() -> None:
    average, wanted = torch.zeros(1, dtype=torch.float64), 0.0
    for gradient in (2.0, -3.0, 0.5):
        average = running_square(average, torch.tensor([gradient], dtype=torch.float64), 0.9)
        wanted = 0.9 * gradient**2 + 0.1 * wanted
    assert float(average) == pytest.approx(wanted)


@pytest.mark.parametrize("pieces", [1, 10, 100])
def test_the_path_integral_is_the_fall_of_the_loss(pieces: int) -> None:
    """Loss ½·h·θ² from 3 to 1: each piece is too small by half the curvature times its squared length."""
    curvature = 2.0
    points = torch.linspace(3, 1, pieces + 1, dtype=torch.float64)
    path = sum(path_step(curvature * now, before, now) for before, now in pairwise(points))
    fall = 0.5 * curvature * (3**2 - 1**2)
    assert float(path) == pytest.approx(fall - pieces * 0.5 * curvature * (2 / pieces) ** 2)


def test_walk_and_path_scores() -> None:
    gradient, before, now, square = (draw(6, seed=seed) for seed in range(4))
    square = square.abs()
    for i in range(6):
        g, b, n, f = (float(x[i]) for x in (gradient, before, now, square))
        wanted = g * (b - n) / (0.5 * f * (n - b) ** 2 + WALK_DAMPING)
        assert float(walk_step(gradient, before, now, square)[i]) == pytest.approx(wanted)
        wanted = max(g, 0) / ((n - b) ** 2 + PATH_DAMPING)
        assert float(path_importance(gradient, before, now)[i]) == pytest.approx(wanted)
    still = torch.zeros(6, dtype=torch.float64)
    assert torch.equal(walk_step(gradient, before, before, still), still)
    assert torch.equal(path_importance(-gradient.abs(), before, now), still)


def test_normalisation_is_to_the_unit_interval() -> None:
    x = draw(3, 4)
    scaled = min_max(x)
    assert scaled.min() == 0
    assert float(scaled.max()) == pytest.approx(1, abs=1e-8)
    torch.testing.assert_close(scaled * (x.max() - x.min()) + x.min(), x)
    assert float(min_max(torch.tensor([0.0, 1e-8])).max()) == 0.5  # a range of the damping counts half
    assert torch.equal(min_max(torch.full((3,), 7.0)), torch.zeros(3))
    assert torch.equal(min_max(torch.tensor([7.0])), torch.zeros(1))


# --- bookkeeping ---------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A model with one parameter that always exists, and a second one that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)


def learn(held: Consolidation, model: nn.Module, updates: int, seed: int) -> list[dict[str, Any]]:
    """Train a quadratic loss plus the penalty by SGD. Yield the parameters and the loss's own gradient at every
    update."""
    curvature = draw(3, seed=seed).abs() + 0.1
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    history = []
    for update in range(updates):
        target = draw(3, seed=1000 * seed + update)
        own = {name: 2 * curvature * (p.detach() - target) for name, p in trained.items()}
        loss = torch.stack([(curvature * (p - target).square()).sum() for p in trained.values()]).sum()
        model.zero_grad()
        sum(held.penalty().values(), loss).backward()
        held.after_backward()
        history.append({name: (p.detach().clone(), own[name]) for name, p in trained.items()})
        with torch.no_grad():
            for p in trained.values():
                assert p.grad is not None
                p -= 0.01 * p.grad
    return history


def naive(history: list[dict[str, Any]], name: str, square: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(running g², path importance, walk score) of one step from its history and its last parameters."""
    start = before = since = history[0][name][0]
    path, walk = torch.zeros_like(square), torch.zeros_like(square)
    for update, entry in enumerate(history):
        now, gradient = entry[name]
        path = path + gradient * (before - now)
        if update % 10 == 0:
            walk = walk + gradient * (since - now) / (0.5 * square * (now - since) ** 2 + WALK_DAMPING)
            since = now
        square = 0.9 * gradient**2 + 0.1 * square
        before = now
    return square, path.clamp(min=0) / ((end - start) ** 2 + PATH_DAMPING), walk.clamp(min=0)


def test_statistics_of_two_steps_equal_a_loop() -> None:
    """In the second step a penalty pulls the old parameter and is in no statistic; the new one has no old value."""
    measured: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def measure(square: Tensor, path: Tensor, walk: Tensor) -> Tensor:
        measured["old"] = (square.clone(), path.clone(), walk.clone())
        return min_max(square) + 0.1

    held, model = Consolidation(measure, 3.0), Two()
    held.begin_step(model)
    assert held.penalty() == {}
    first = learn(held, model, 25, seed=1)
    held.end_step()
    ones = torch.ones(3, dtype=torch.float64)
    wanted = naive(first, "old", ones, model.old.detach().clone())
    model.register_parameter("new", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    anchor = model.old.detach().clone()
    held.begin_step(model)
    for got, want in zip(measured["old"], wanted, strict=True):
        torch.testing.assert_close(got, want)
    assert held.penalty()["penalty"] == 0
    with torch.no_grad():
        model.old += 1
        model.new += 1
    weight = min_max(wanted[0]) + 0.1
    torch.testing.assert_close(held.penalty()["penalty"], 3 * (weight * (model.old - anchor) ** 2).sum())
    with torch.no_grad():
        model.old -= 1
        model.new -= 1
    second = learn(held, model, 14, seed=2)
    held.end_step()
    state = held.state()
    square, path, walk = naive(second, "old", wanted[0], model.old.detach())
    torch.testing.assert_close(state["square.old"], square)
    torch.testing.assert_close(state["path.old"], wanted[1] + path)
    torch.testing.assert_close(state["walk.old"], (wanted[2] + walk) / 2)
    _, path, walk = naive(second, "new", ones, model.new.detach())
    torch.testing.assert_close(state["path.new"], path)
    torch.testing.assert_close(state["walk.new"], walk)
    assert not any("frozen" in name for name in state)


def test_an_overflow_of_half_precision_leaves_the_statistics() -> None:
    held, model = Consolidation(lambda square, path, walk: square, 1.0), Two()
    held.begin_step(model)
    learn(held, model, 2, seed=1)
    before = {name: tensor.clone() for name, tensor in held.state().items()}
    assert model.old.grad is not None
    model.old.grad[1] = torch.inf
    held.after_backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.state().items())


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    def start(name: str, **changes: Any) -> Path:
        # momentum 0.9 needs 2·weight·lr below 1.36
        changes["train"] = {"epochs": 1, "epochs_later": 3, "lr_later": 0.001, **changes.get("train", {})}
        train(small_config(tmp_path / name, **changes))
        return tmp_path / name

    return start


def models(folder: Path, step: int) -> dict[str, Tensor]:
    return read_tensors(RunDir(folder).model(step))[0]


@pytest.mark.parametrize("name", METHODS)
def test_without_weight_it_is_finetuning(name: str, run: Callable[..., Path]) -> None:
    free = run("free", task="6-4", method={"name": "finetune"})
    mine = run("mine", task="6-4", method={"name": name, "weight": 0.0})
    for step in range(2):
        wanted = models(free, step)
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in models(mine, step).items())
    assert rows_of(mine)[1]["losses"]["penalty"] == 0


def test_the_penalty_holds_the_parameters(run: Callable[..., Path]) -> None:
    way = []
    for weight in (0.0, 500.0):
        folder = run(f"w{weight:g}", task="6-4", method={"name": "ewc", "weight": weight}, train={"epochs_later": 4})
        before, after = models(folder, 0), models(folder, 1)
        importance = min_max(read_tensors(RunDir(folder).state(0))[0]["square.aspp.mix.weight"])
        way.append((importance * (after["aspp.mix.weight"] - before["aspp.mix.weight"]).square()).sum())
    assert way[1] < 0.9 * way[0]


def test_all_three_share_one_base(run: Callable[..., Path]) -> None:
    def reused(folder: Path) -> list[bool]:
        return [row["reused_from"] is not None for row in RunDir(folder).rows()]

    ewc, pi, rw = (run(name, task="6-4", method={"name": name}, reuse=True) for name in METHODS)
    assert [reused(folder) for folder in (ewc, pi, rw)] == [[False, False], [True, False], [True, False]]
    assert reused(run("finetune", task="6-4", method={"name": "finetune"}, reuse=True)) == [False, False]
    alone = models(run("alone", task="6-4", method={"name": "rw"}), 1)
    assert all(torch.equal(tensor, alone[key]) for key, tensor in models(rw, 1).items())
    assert not torch.equal(models(ewc, 1)["aspp.mix.weight"], models(pi, 1)["aspp.mix.weight"])


def test_a_frozen_backbone_is_not_penalised(run: Callable[..., Path]) -> None:
    folder = run("frozen", task="6-4", method={"name": "ewc"}, model={"freeze_backbone": True})
    names = set(read_tensors(RunDir(folder).state(1))[0])
    assert any(name.startswith("square.aspp") for name in names)
    assert not any("backbone" in name for name in names)
