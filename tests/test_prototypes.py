"""Prototypes: every term of SDR against loops over positions in float64, and the state of the method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_config
from torch import Tensor

from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.losses.background import background_cross_entropy_sum
from incseg.losses.means import normalised
from incseg.losses.prototypes import (
    attraction,
    class_means,
    flatten_positions,
    matching,
    membership,
    nearest,
    position_labels,
    repulsion,
    running_mean,
    sparsity_sum,
)
from incseg.methods.base import StepContext, StepImages
from incseg.methods.sdr import SDR
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol
from incseg.run import train
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Output

NUM_LABELS = 4  # background and three classes; the third is in no position


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def labels() -> Tensor:
    return torch.tensor([[[0, 1, 1], [2, IGNORE, 1]], [[2, 2, 0], [1, 0, IGNORE]]])


@pytest.fixture
def features() -> Tensor:
    return draw(2, 5, 2, 3, seed=1)


@pytest.fixture
def prototypes() -> Tensor:
    return draw(NUM_LABELS, 5, seed=2)


CHOSEN = torch.tensor([False, True, True, False])


def by_class(features: Tensor, labels: Tensor) -> dict[int, list[list[float]]]:
    """Yield the feature vectors of each label, one position after the other."""
    found: dict[int, list[list[float]]] = {}
    for image, rows in enumerate(labels.tolist()):
        for y, row in enumerate(rows):
            for x, label in enumerate(row):
                found.setdefault(label, []).append(features[image, :, y, x].tolist())
    return found


def mean_of(vectors: list[list[float]]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def mse(one: list[float], other: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one)


# --- terms ---------------------------------------------------------------------------------------------------


def test_means_equal_a_loop(features: Tensor, labels: Tensor) -> None:
    means, counts = class_means(flatten_positions(features), membership(labels, NUM_LABELS))
    found = by_class(features, labels)
    assert counts.tolist() == [3, 4, 3, 0]
    for label in range(3):
        assert means[label].tolist() == pytest.approx(mean_of(found[label]))
    assert torch.equal(means[3], torch.zeros(5, dtype=torch.float64))


def test_running_means_are_the_mean_of_all_positions() -> None:
    average, seen = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    vectors: list[list[float]] = []
    for seed, count in enumerate((4, 1, 7)):
        positions = draw(count, 3, seed=seed)
        vectors += positions.tolist()
        batch, counts = class_means(positions, torch.eye(2)[[0] * count])
        average, seen = running_mean(average, seen, batch, counts)
    assert average[0].tolist() == pytest.approx(mean_of(vectors))
    assert seen.tolist() == [12, 0]
    assert torch.equal(average[1], torch.zeros(3, dtype=torch.float64))


def test_matching_and_attraction_equal_loops(features: Tensor, labels: Tensor, prototypes: Tensor) -> None:
    positions, members = flatten_positions(features), membership(labels, NUM_LABELS)
    means, counts = class_means(positions, members)
    found, wanted = by_class(features, labels), prototypes.tolist()
    matched = sum(mse(mean_of(found[c]), wanted[c]) for c in (1, 2)) / 2
    assert float(matching(means, prototypes, CHOSEN)) == pytest.approx(matched)
    drawn = sum(sum(mse(f, wanted[c]) for f in found[c]) / len(found[c]) for c in (1, 2)) / 2
    assert float(attraction(positions, members, prototypes, counts, CHOSEN)) == pytest.approx(drawn)
    nobody = torch.zeros(NUM_LABELS, dtype=torch.bool)
    assert matching(means, prototypes, nobody) == 0
    assert attraction(positions, members, prototypes, counts, nobody) == 0
    assert matching(prototypes, prototypes, CHOSEN) == 0


def test_repulsion_equals_a_loop() -> None:
    means, chosen = draw(4, 5), torch.tensor([False, True, True, True])
    pairs = [(1, 2), (1, 3), (2, 3)]
    wanted = sum(1 / math.dist(means[i].tolist(), means[j].tolist()) for i, j in pairs) / len(pairs)
    assert float(repulsion(means, chosen)) == pytest.approx(wanted)
    assert repulsion(means, torch.tensor([False, True, False, False])) == 0
    alike = torch.zeros(2, 3, requires_grad=True)
    force = repulsion(alike, torch.tensor([True, True]))
    force.backward()
    assert force.isfinite()
    assert alike.grad is not None
    assert alike.grad.isfinite().all()


def test_sparsity_equals_a_loop(features: Tensor, labels: Tensor) -> None:
    total = 0.0
    for image in range(2):
        for label, vectors in by_class(features[image : image + 1], labels[image : image + 1]).items():
            peak = max(max(v) for v in vectors)
            for vector in vectors if label != IGNORE else []:
                f = [max(value, 0) / peak for value in vector]
                total += sum(map(math.exp, f)) / max(sum(f), 1)
    assert float(sparsity_sum(features, labels)) == pytest.approx(total)


def test_sparsity_at_its_ends() -> None:
    """The printed formula is smallest if all channels are at their maximum, so it does not make features sparse."""
    labels = torch.ones(1, 1, 1, dtype=torch.long)
    full, single = torch.full((1, 6, 1, 1), 3.0), torch.zeros(1, 6, 1, 1)
    single[0, 2] = 3.0
    assert float(sparsity_sum(full, labels)) == pytest.approx(math.e)
    assert float(sparsity_sum(single, labels)) == pytest.approx(math.e + 5)
    silent = torch.zeros(1, 6, 1, 1, requires_grad=True)
    sparsity_sum(silent, labels).backward()
    assert silent.grad is not None
    assert silent.grad.isfinite().all()
    assert sparsity_sum(full, torch.full((1, 1, 1), IGNORE)) == 0


def test_gradients(features: Tensor, labels: Tensor, prototypes: Tensor) -> None:
    members = membership(labels, NUM_LABELS)

    def terms(x: Tensor) -> tuple[Tensor, ...]:
        positions = flatten_positions(x)
        means, counts = class_means(positions, members)
        return (
            matching(means, prototypes, CHOSEN),
            attraction(positions, members, prototypes, counts, CHOSEN),
            repulsion(means, CHOSEN),
            sparsity_sum(x, labels),
        )

    assert torch.autograd.gradcheck(terms, features.requires_grad_())


def test_labels_come_to_the_features_and_old_classes_from_the_teacher() -> None:
    labels = torch.tensor([[[0, 9, 3, 9], [9, 9, 9, 9], [IGNORE, 9, 0, 9], [9, 9, 9, 9]]], dtype=torch.uint8)
    assert nearest(labels, (2, 2)).tolist() == [[[0, 3], [IGNORE, 0]]]
    teacher = torch.zeros(1, 3, 2, 2)
    teacher[0, 2, 0] = teacher[0, 0, 1] = 1  # class 2 above, background below
    assert position_labels(labels, teacher, (2, 2)).tolist() == [[[2, 3], [IGNORE, 0]]]
    assert position_labels(labels, None, (2, 2)).tolist() == [[[0, 3], [IGNORE, 0]]]


# --- the method ----------------------------------------------------------------------------------------------

STEPS = Protocol(DatasetInfo("toy", ("ant", "bee", "cow")), "ant,bee/cow", "overlapped").steps


class Scene:
    """SDR in step 1 of two, after one batch of step 0."""

    def __init__(self, freeze_backbone: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.method = SDR(SDR.Config(**options))
        config = ModelConfig(
            "tiny", output_stride=8, width=16, dilations=(1, 1, 1), norm="group", freeze_backbone=freeze_backbone
        )
        self.model = Segmenter(config, True)
        self.teacher: Segmenter | None = None
        for step in STEPS:
            self.step = step
            self.teacher = self.model.frozen_copy() if step.index else None
            self.model.grow(Increment(step.names, step.new, 4))
            torch.nn.init.normal_(self.model.classifiers[-1].get_parameter("weight"), std=0.5)
            self.method.begin_step(StepContext(step, self.model, self.teacher, StepImages(lambda: iter(()))))
            if step.index == 0:
                self.losses(self.batch([0, 1, 2, IGNORE]))

    def batch(self, choices: list[int]) -> Batch:
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randint(len(choices), (2, 3, 3), generator=generator)
        labels = torch.tensor(choices, dtype=torch.uint8)[drawn]
        labels = labels.repeat_interleave(8, 1).repeat_interleave(8, 2)
        images = torch.randn(2, 3, 24, 24, generator=generator)
        return Batch(images, labels, torch.bincount(labels.flatten(), minlength=256).float())

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            teacher = self.teacher(batch.inputs) if self.teacher else None
        return self.losses_of(batch, self.model(batch.inputs), teacher)

    def losses_of(self, batch: Batch, out: Output, teacher: Output | None) -> dict[str, Tensor]:
        self.method.before_update(lambda of: of(batch, out, teacher), self.step)
        return normalised(self.method.losses(batch, out, teacher, self.step), batch)


@pytest.mark.parametrize("freeze_backbone", [False, True])
def test_prototypes_are_means_of_the_features_that_can_change(freeze_backbone: bool) -> None:
    scene = Scene(freeze_backbone)
    state = scene.method.state()
    batch = scene.batch([0, 1, 2, IGNORE])
    assert scene.teacher is not None
    with torch.no_grad():
        out = scene.teacher(batch.inputs)
    features = out.embedding if freeze_backbone else out.encoded
    assert features is not None
    assert state["prototypes"].shape == (4, features.shape[1])
    found = by_class(features, nearest(batch.labels, (3, 3)))
    for label in (1, 2):
        assert state["prototypes"][label].tolist() == pytest.approx(mean_of(found[label]), rel=1e-4, abs=1e-5)
        assert state["seen"][label] == len(found[label])
    assert not state["prototypes"][[0, 3]].any()


def test_old_prototypes_rest_and_new_ones_form() -> None:
    scene = Scene()
    before = scene.method.state()["prototypes"].clone()
    losses = scene.losses(scene.batch([0, 3]))
    after = scene.method.state()["prototypes"]
    assert torch.equal(after[:3], before[:3])
    assert after[3].any()
    assert list(losses) == ["ce", "kd", "matching", "attraction", "repulsion", "sparsity"]
    assert all(float(value.detach()) > 0 for value in losses.values())


def test_new_classifiers_may_start_as_those_of_mib() -> None:
    drawn, shares = (Scene(start_from_background=start).model.classifiers for start in (False, True))
    first, newest = shares
    assert torch.equal(newest.get_parameter("weight")[0], first.get_parameter("weight")[0])
    assert not torch.equal(newest.get_parameter("weight"), drawn[1].get_parameter("weight"))
    assert torch.equal(newest.get_parameter("bias"), first.get_parameter("bias")[:1])


def test_matching_is_zero_as_long_as_features_are_where_they_were() -> None:
    """The teacher is right about every background pixel, and the student still equals the teacher."""
    scene = Scene()
    batch = scene.batch([0, 1, 2, IGNORE])
    batch.labels[(batch.labels == 1) | (batch.labels == 2)] = 0
    out = scene.model(batch.inputs)
    assert scene.teacher is not None
    right = scene.batch([0, 1, 2, IGNORE]).labels
    with torch.no_grad():
        teacher = scene.teacher(batch.inputs)
    teacher.logits = torch.nn.functional.one_hot(nearest(right, (3, 3)).clamp(max=2), 3).movedim(-1, 1).float()
    losses = scene.losses_of(batch, out, teacher)
    assert float(losses["matching"].detach()) == pytest.approx(0, abs=1e-9)


def test_losses_on_the_outputs_are_plain_or_those_of_mib() -> None:
    batch = Scene().batch([0, 3, IGNORE])
    plain, mixed, mib = (Scene(output=output).losses(batch) for output in ("kd", "mib_ce", "mib"))
    assert list(plain) == list(mixed) == list(mib)
    for name in ("matching", "attraction", "repulsion", "sparsity"):
        assert torch.equal(plain[name], mib[name])
    assert torch.equal(mixed["ce"], mib["ce"])
    assert torch.equal(mixed["kd"], plain["kd"])
    assert not torch.equal(mixed["kd"], mib["kd"])
    default = Scene().losses(batch)
    assert all(torch.equal(default[name], mib[name]) for name in mib), "the default is the authors' preset"
    logits = Scene().model(batch.inputs).logits
    up = torch.nn.functional.interpolate(logits, batch.size, mode="bilinear")
    wanted = background_cross_entropy_sum(up, batch.labels, 3) / batch.valid_pixels
    torch.testing.assert_close(mib["ce"], wanted)
    assert mib["ce"] < plain["ce"]


def test_a_run_keeps_old_prototypes_and_makes_new_ones(tmp_path: Path) -> None:
    train(small_config(tmp_path / "run", task="6-4", method={"name": "sdr"}, train={"epochs": 1}))
    before, after = (read_tensors(RunDir(tmp_path / "run").state(step))[0] for step in range(2))
    assert torch.equal(after["prototypes"][:7], before["prototypes"])
    assert (after["seen"][1:] > 0).all()
