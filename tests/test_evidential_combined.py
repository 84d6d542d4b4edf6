"""Parts of other methods in the evidential one: pseudo-labels by u, local POD, and why replay is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.distillation import local_pod
from incseg.losses.evidential import evidential_cross_entropy, increments_cross_entropy
from incseg.losses.means import normalised
from incseg.methods import build_method
from incseg.methods.base import StepContext, StepImages
from incseg.methods.evidential import Evidential
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Output, UserError

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox")
STEPS = Protocol(DatasetInfo("toy", CLASSES), "ant,bee,cat/dog/elk,fox", "overlapped").steps
STEP = STEPS[-1]  # three old classes, one old, two new
SIZES = (3, 1)
LIMIT = 0.45


def method(**options: Any) -> Evidential:
    """Return the method in the last step, in the state that the trainer would give it."""
    made = Evidential(Evidential.Config(**options))
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1)), False)
    for step in STEPS:
        model.grow(Increment(step.names, step.new, 5))
    made.begin_step(StepContext(STEP, model, None, StepImages(lambda: iter([]))))
    return made


def example() -> tuple[Batch, Output, Output]:
    generator = torch.Generator().manual_seed(5)
    allowed = torch.tensor([0, 0, 0, 5, 6, IGNORE], dtype=torch.uint8)
    labels = allowed[torch.randint(len(allowed), (2, 7, 9), generator=generator)]
    logits = torch.randn(2, 6, 3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = 2 * torch.randn(2, 4, 3, 4, dtype=torch.float64, generator=generator)
    maps = [torch.randn(2, 3, 8, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
    counts = torch.bincount(labels.flatten(), minlength=256).double()
    batch = Batch(torch.zeros(2, 3, 7, 9), labels, counts)
    stages, others = (maps[0].requires_grad_(), maps[1]), (maps[2], maps[3])
    return batch, Output(logits, logits * 2, stages), Output(teacher, teacher_embedding(logits), others)


def teacher_embedding(logits: Tensor) -> Tensor:
    return logits.detach() + 1


def evidence(z: float) -> float:
    return math.exp(z) / (1 + math.exp(-z))


def probabilities(scores: list[float]) -> list[float]:
    """Return u, then (1 − u)·α_i/S, of the scores of one scope."""
    alpha = [evidence(z) + 1 for z in scores]
    u = len(alpha) / sum(alpha)
    return [u, *((1 - u) * a / sum(alpha) for a in alpha)]


def values(terms: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(term.detach()) for name, term in terms.items()}


def pixels_of(batch: Batch, logits: Tensor) -> list[list[float]]:
    up = F.interpolate(logits.detach(), batch.size, mode="bilinear", align_corners=False)
    return up.permute(0, 2, 3, 1).flatten(0, 2).tolist()


def sure_class(teacher: list[float], scope: str) -> int:
    """Return the teacher's class where its u is below the limit, else 0; u is of each increment or of all classes."""
    if scope == "seen":
        u = probabilities(teacher)[0]
        strengths = [evidence(z) for z in teacher]
    else:
        own = [probabilities(teacher[:3])[0], probabilities(teacher[3:])[0]]
        u = 1 / (1 + sum((1 - v) / v for v in own))
        strengths = [evidence(z) / (3 if i < 3 else 1) for i, z in enumerate(teacher)]
    return strengths.index(max(strengths)) + 1 if u < LIMIT else 0


@pytest.mark.parametrize("scope", ["increment", "seen"])
@pytest.mark.parametrize("lambda_kd", [10.0, 0.0])
def test_pseudo_labels_pixel_by_pixel(scope: str, lambda_kd: float) -> None:
    batch, out, teacher = example()
    new = pseudo = valid = 0.0
    chosen = []
    every = zip(batch.labels.flatten().tolist(), pixels_of(batch, out.logits), pixels_of(batch, teacher.logits),
                strict=True)  # fmt: skip
    for label, z, old in every:
        if label == IGNORE:
            continue
        valid += 1
        sure = sure_class(old, scope) if label == 0 else 0
        chosen.append(sure)
        if scope == "seen":
            new -= math.log(probabilities(z)[sure or label])
            continue
        new -= math.log(probabilities(z[4:])[max(0, label - 4)])
        if sure:
            pseudo -= math.log(probabilities(z[:3])[sure if sure <= 3 else 0])
            pseudo -= math.log(probabilities(z[3:4])[1 if sure == 4 else 0])
    assert set(chosen) == {0, 1, 2, 3, 4}
    options = {"scope": scope, "lambda_kd": lambda_kd}
    found = values(method(pseudo_labels=LIMIT, **options).losses(batch, out, teacher, STEP))
    without = values(method(**options).losses(batch, out, teacher, STEP))
    assert found["new"] == pytest.approx(new / valid)
    if scope == "increment":
        assert found.pop("pseudo") == pytest.approx(pseudo / valid)
        assert found["new"] == pytest.approx(without["new"]), "old objects are background to the new classes"
    else:
        assert found["new"] != pytest.approx(without["new"])
    assert found.keys() == without.keys()
    for name in found.keys() - {"new"}:
        assert found[name] == pytest.approx(without[name])


@pytest.mark.parametrize("scope", ["increment", "seen"])
def test_a_teacher_that_is_never_sure_changes_nothing(scope: str) -> None:
    batch, out, teacher = example()
    teacher.logits.fill_(-3.0)
    terms = values(method(pseudo_labels=LIMIT, scope=scope).losses(batch, out, teacher, STEP))
    assert terms.pop("pseudo", 0.0) == 0
    assert terms == pytest.approx(values(method(scope=scope).losses(batch, out, teacher, STEP)))


def test_a_class_has_the_same_u_however_many_came_after_it() -> None:
    """One-class steps decide at e = 1. Over all old classes together, their u would hardly ever be low."""
    teacher = torch.full((1, 4, 1, 1), -9.0)
    teacher[:, 3] = 1.5
    labels = torch.zeros(1, 1, 1, dtype=torch.uint8)
    assert probabilities([-9.0, -9.0, -9.0, 1.5])[0] > LIMIT > probabilities([1.5])[0]
    methods = [method(pseudo_labels=LIMIT, scope=scope) for scope in ("increment", "seen")]
    found = [one._confident_labels(labels, teacher) for one in methods]
    assert [int(labels) for labels in found if labels is not None] == [4, 0]


def test_the_sizes_of_old_increments_survive() -> None:
    batch, out, teacher = example()
    made = method(pseudo_labels=LIMIT)
    fresh = Evidential(Evidential.Config(pseudo_labels=LIMIT))
    fresh.load_state(made.state())
    assert values(fresh.losses(batch, out, teacher, STEP)) == values(made.losses(batch, out, teacher, STEP))
    assert method().state() == {}


def test_increments_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.tensor([[0, 1, 3, 4, IGNORE], [4, 2, 0, IGNORE, 1]], dtype=torch.uint8)
    found = increments_cross_entropy(logits.detach(), labels, SIZES)
    for image in range(2):
        for pixel in range(5):
            label, z = int(labels[image, pixel]), logits[image, :, pixel].tolist()
            first, second = probabilities(z[:3]), probabilities(z[3:])
            expected = -math.log(first[label if label <= 3 else 0]) - math.log(second[label == 4])
            assert float(found[image, pixel]) == pytest.approx(0 if label == IGNORE else expected)
    one = increments_cross_entropy(logits, labels, (4,))
    torch.testing.assert_close(one, torch.stack(evidential_cross_entropy(logits, labels)).sum(0))
    assert torch.autograd.gradcheck(lambda z: increments_cross_entropy(z, labels, SIZES), (logits,))


# --- local POD ----------------------------------------------------------------------------------------------------


def naive_pod(own: Tensor, other: Tensor) -> float:
    """Return row and column means of all tiles of the squared maps, one after the other."""
    distances = []
    for x, t in zip(own.square().tolist(), other.square().tolist(), strict=True):
        total = 0.0
        for a, b in zip(x, t, strict=True):
            height, width = len(a), len(a[0])
            for scale in (1, 2, 4):
                h, w = height // scale, width // scale
                for top in range(0, height, h):
                    for left in range(0, width, w):
                        tile = [[a[top + i][left + j] - b[top + i][left + j] for j in range(w)] for i in range(h)]
                        means = [sum(row) / w for row in tile] + [sum(column) / h for column in zip(*tile, strict=True)]
                        total += sum(mean**2 for mean in means)
        distances.append(math.sqrt(total))
    return sum(distances) / len(distances)


def test_pod_is_added_over_the_maps_that_train() -> None:
    batch, out, teacher = example()
    out.embedding, teacher.embedding = torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 4)
    without, terms = (
        values(normalised(method(pod=pod).losses(batch, out, teacher, STEP), batch)) for pod in (None, 0.5)
    )
    pod = terms.pop("pod")
    expected = (naive_pod(out.stages[0].detach(), teacher.stages[0]) + naive_pod(out.embedding, teacher.embedding)) / 2
    assert pod == pytest.approx(0.5 * math.sqrt(6 / 2) * expected, rel=1e-5), "the frozen second stage is left out"
    assert terms == without
    assert "pod" not in method(pod=0.5).losses(batch, out, None, STEPS[0])
    no_stages = Output(out.logits, out.embedding), Output(teacher.logits, teacher.embedding)
    alone = values(normalised(method(pod=0.5).losses(batch, *no_stages, STEP), batch))["pod"]
    assert alone == pytest.approx(0.5 * math.sqrt(3) * naive_pod(out.embedding, teacher.embedding), rel=1e-5)


def test_equal_maps_are_at_distance_zero_and_at_rest() -> None:
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    distance = local_pod([x], [x.detach().clone()])
    distance.backward()
    assert distance == 0
    assert x.grad is not None
    assert (x.grad == 0).all()


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pseudo_labels": 0.0}, "pseudo_labels is 0.0; give a limit of u above 0 and up to 1"),
        ({"pseudo_labels": 1.5}, "pseudo_labels is 1.5"),
        ({"pod": -1.0}, "pod is -1.0; give a weight from 0"),
        ({"replay": "web", "scope": "seen"}, "replay with scope seen would train old objects as background; set"),
        ({"replay": "web", "generator": "a:b"}, "give one of the two"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_method({"name": "evidential", **options})


def test_the_base_does_not_depend_on_them() -> None:
    options = {"pseudo_labels": 0.3, "pod": 0.1, "replay": "web", "replay_images": 3}
    plain, combined = (build_method({"name": "evidential", **some}) for some in ({}, options))
    assert plain.recipe(0) == combined.recipe(0)
    assert build_method({"name": "evidential", "pod": 0.1}).recipe(1) != plain.recipe(1)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("start", [0.0, -2.0])
def test_start_lowers_the_scores_of_new_classes_in_later_steps_alone(steps: int, start: float) -> None:
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1)), False)
    for step in STEPS[:steps]:
        model.grow(Increment(step.names, step.new, 5))
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model.eval()
    before = model(image).logits.detach()

    Evidential(Evidential.Config(start_score=start)).begin_step(
        StepContext(STEPS[steps - 1], model, None, StepImages(lambda: iter([])))
    )

    lowered = torch.zeros(before.shape[1])
    if steps > 1:
        num_new = len(STEPS[steps - 1].new)
        lowered[-num_new:] = start / num_new
    torch.testing.assert_close(model(image).logits.detach(), before + lowered[None, :, None, None])
