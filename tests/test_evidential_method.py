"""The evidential method: its losses against a loop over pixels with direct formulas, and its decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.methods.evidential import Evidential
from incseg.outputs.evidential import balanced_log_probabilities, log_probabilities
from incseg.protocol import Protocol, Step
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Output

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox")
PROTOCOL = Protocol(DatasetInfo("toy", CLASSES), [["ant", "bee", "cat"], ["dog", "elk"]], "overlapped")
FIRST, SECOND = PROTOCOL.steps


def method(**options: Any) -> Evidential:
    return Evidential(Evidential.Config(**options))


def make_batch(labels: Tensor) -> Batch:
    counts = torch.bincount(labels.flatten(), minlength=256).double()
    return Batch(torch.zeros(labels.shape[0], 3, *labels.shape[1:]), labels, counts)


def example(step: Step = SECOND, dtype: torch.dtype = torch.float64) -> tuple[Batch, Output, Output | None]:
    """Return labels of background, the step's own classes and void; logits with gradient; the teacher's logits after
    step 0."""
    generator = torch.Generator().manual_seed(step.index)
    first_new = len(step.old) + 1
    allowed = torch.tensor([0, *range(first_new, first_new + len(step.new)), IGNORE], dtype=torch.uint8)
    labels = allowed[torch.randint(0, len(allowed), (2, 7, 9), generator=generator)]
    logits = 2 * torch.randn(2, len(step.seen), 3, 4, dtype=dtype, generator=generator)
    teacher = 2 * torch.randn(2, len(step.old), 3, 4, dtype=dtype, generator=generator) if step.old else None
    out = Output(logits.requires_grad_(), logits)
    return make_batch(labels), out, None if teacher is None else Output(teacher, teacher)


def values(terms: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(term.detach()) for name, term in terms.items()}


def gradient(terms: dict[str, Tensor], out: Output) -> Tensor:
    return torch.autograd.grad(torch.stack(list(terms.values())).sum(), out.logits)[0]


# ---------------------------------------------------------------------------------------------- the loop

EVIDENCE = {
    "exp_sigmoid": lambda z: math.exp(z) / (1 + math.exp(-z)),
    "exp": math.exp,
    "relu": lambda z: max(z, 0.0),
    "softplus": lambda z: math.log(1 + math.exp(z)),
}


def naive_losses(
    batch: Batch, logits: Tensor, teacher: Tensor | None, step: Step, config: Evidential.Config
) -> dict[str, float]:
    """Return the losses by the paper's section 2, one pixel after the other in Python floats."""

    def up(x: Tensor) -> Tensor:
        return F.interpolate(x, batch.size, mode="bilinear", align_corners=False)

    def dirichlet(scores: list[float]) -> tuple[float, list[float]]:
        """Return u and the probabilities given foreground."""
        alpha = [EVIDENCE[config.rectifier](z) + 1 for z in scores]
        return len(alpha) / sum(alpha), [a / sum(alpha) for a in alpha]

    labels = batch.labels.flatten().tolist()
    num_background = labels.count(0)
    num_foreground = len(labels) - num_background - labels.count(IGNORE)
    num_valid = num_background + num_foreground

    def weight(count: int) -> float:
        return min(config.max_weight, num_valid / count) if config.foreground_weight else 1.0

    pixels = up(logits.detach()).permute(0, 2, 3, 1).flatten(0, 2).tolist()
    old_pixels = up(teacher).permute(0, 2, 3, 1).flatten(0, 2).tolist() if teacher is not None else None
    num_old = len(step.old)
    skipped = num_old if config.scope == "increment" else 0
    new = kd_fg = kd_u = 0.0
    for index, (label, z) in enumerate(zip(labels, pixels, strict=True)):
        u, p = dirichlet(z[skipped:])
        if label == 0:
            new -= weight(num_background) * math.log(u)
        elif label != IGNORE:
            new -= weight(num_foreground) * math.log((1 - u) * p[label - 1 - skipped])
        if old_pixels is not None:
            u, p = dirichlet(z[:num_old])
            old_u, old_p = dirichlet(old_pixels[index])
            kd_fg -= sum(q * math.log(s) for q, s in zip(old_p, p, strict=True))
            kd_u -= old_u * math.log(u) + (1 - old_u) * math.log(1 - u)
    terms = {"new": config.lambda_new * new / num_valid}
    if old_pixels is not None and config.lambda_kd > 0:
        terms["kd_fg"] = config.lambda_kd * kd_fg / len(labels) / (num_old if config.kd_reduction == "mean" else 1)
        terms["kd_u"] = config.lambda_kd * kd_u / len(labels)
    return terms


@pytest.mark.parametrize("step", PROTOCOL.steps, ids=["first", "second"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scope": "seen"},
        {"kd_reduction": "sum"},
        {"foreground_weight": True},
        {"foreground_weight": True, "max_weight": 1.5, "scope": "seen"},
        {"lambda_new": 0.3, "lambda_kd": 2.0},
        {"rectifier": "exp"},
        {"rectifier": "softplus"},
    ],
    ids=str,
)
def test_losses_equal_a_loop_over_pixels(step: Step, options: dict[str, Any]) -> None:
    batch, out, teacher = example(step)
    tested = method(**options)
    got = values(tested.losses(batch, out, teacher, step))
    wanted = naive_losses(batch, out.logits, teacher.logits if teacher else None, step, tested.config)
    assert list(got) == list(wanted)
    assert got == pytest.approx(wanted, rel=1e-8)


def test_relu_equals_the_loop_where_there_is_evidence() -> None:
    """Elsewhere the loop divides by zero, and the log form has a floor of 1e-6."""
    batch, out, teacher = example()
    assert teacher is not None
    out.logits.data.abs_().add_(0.1)
    tested = method(rectifier="relu")
    got = values(tested.losses(batch, out, teacher, SECOND))
    assert got == pytest.approx(naive_losses(batch, out.logits, teacher.logits, SECOND, tested.config), rel=1e-4)


# ---------------------------------------------------------------------------------------------- scopes


def test_scope_increment_learns_on_the_steps_own_channels() -> None:
    batch, out, _ = example()
    num_old = len(SECOND.old)
    terms = method().losses(batch, out, None, SECOND)
    moved = gradient(terms, out)
    assert not moved[:, :num_old].any()
    assert bool(moved[:, num_old:].any())
    other = Output(torch.cat([out.logits[:, :num_old] + 5, out.logits[:, num_old:]], 1), out.embedding)
    assert values(method().losses(batch, other, None, SECOND)) == values(terms)


def test_scope_seen_also_moves_the_old_channels() -> None:
    batch, out, _ = example()
    moved = gradient(method(scope="seen").losses(batch, out, None, SECOND), out)
    assert bool(moved[:, : len(SECOND.old)].any())


def test_scopes_are_one_in_the_first_step() -> None:
    batch, out, _ = example(FIRST)
    increment, seen = (values(method(scope=scope).losses(batch, out, None, FIRST)) for scope in ("increment", "seen"))
    assert increment == seen


def test_distillation_reaches_old_channels_only() -> None:
    batch, out, teacher = example()
    terms = method().losses(batch, out, teacher, SECOND)
    moved = gradient({name: terms[name] for name in ("kd_fg", "kd_u")}, out)
    assert bool(moved[:, : len(SECOND.old)].any())
    assert not moved[:, len(SECOND.old) :].any()


def test_distillation_is_content_with_the_teachers_own_scores() -> None:
    batch, out, teacher = example()
    assert teacher is not None
    out.logits.data[:, : len(SECOND.old)] = teacher.logits
    for name in ("kd_fg", "kd_u"):
        term = method().losses(batch, out, teacher, SECOND)[name]
        assert torch.allclose(gradient({name: term}, out), torch.zeros_like(out.logits), atol=1e-12)


def test_old_scores_are_distilled_on_void_too() -> None:
    """Void has no label, but the teacher's output there is as good as anywhere."""
    batch, out, teacher = example()
    void = make_batch(torch.full_like(batch.labels, IGNORE))
    with_labels, without = (values(method().losses(b, out, teacher, SECOND)) for b in (batch, void))
    assert without["kd_fg"] == pytest.approx(with_labels["kd_fg"])
    assert without["kd_u"] == pytest.approx(with_labels["kd_u"])


# ---------------------------------------------------------------------------------------------- options


def test_sum_is_mean_times_the_old_classes() -> None:
    batch, out, teacher = example()
    mean, total = (values(method(kd_reduction=how).losses(batch, out, teacher, SECOND)) for how in ("mean", "sum"))
    assert total["kd_fg"] == pytest.approx(len(SECOND.old) * mean["kd_fg"])
    assert (total["kd_u"], total["new"]) == pytest.approx((mean["kd_u"], mean["new"]))


def test_distillation_without_weight_needs_no_teacher() -> None:
    batch, out, teacher = example()
    without, alone = (
        method(lambda_kd=0.0).losses(batch, out, teacher, SECOND),
        method().losses(batch, out, None, SECOND),
    )
    assert values(without) == values(alone)
    assert torch.equal(gradient(without, out), gradient(alone, out))


@pytest.mark.parametrize("label", [0, 4])
def test_foreground_weight_of_one_set_alone_is_one(label: int) -> None:
    """N_total / N_set = 1 for the only set; the empty one has no weight."""
    batch, out, _ = example()
    only = make_batch(torch.full_like(batch.labels, label))
    plain, weighted = (
        values(method(foreground_weight=on).losses(only, out, None, SECOND))["new"] for on in (False, True)
    )
    assert weighted == pytest.approx(plain)


def test_foreground_weight_is_limited() -> None:
    batch, out, _ = example()
    rare = torch.zeros_like(batch.labels)
    rare[0, 0, 0] = 5
    terms = [
        values(method(foreground_weight=on, max_weight=w).losses(make_batch(rare), out, None, SECOND))["new"]
        for on, w in ((False, 1.0), (True, 10.0), (True, 20.0))
    ]
    ten_more = (terms[2] - terms[1]) / 10
    num = rare.numel()
    background_alone = terms[0] - ten_more
    assert terms[1] == pytest.approx(10 * ten_more + background_alone * num / (num - 1))


@pytest.mark.parametrize("foreground_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_void_teaches_nothing_new(dtype: torch.dtype, foreground_weight: bool) -> None:
    batch, out, teacher = example(dtype=dtype)
    void = make_batch(torch.full_like(batch.labels, IGNORE))
    tested = method(foreground_weight=foreground_weight)
    alone = tested.losses(void, out, None, SECOND)
    assert values(alone) == {"new": 0}
    assert not gradient(alone, out).any()
    taught = tested.losses(void, out, teacher, SECOND)
    assert values(taught)["new"] == 0
    assert all(math.isfinite(v) for v in values(taught).values())
    assert bool(gradient(taught, out).isfinite().all())


@pytest.mark.parametrize("rectifier", ["exp_sigmoid", "exp", "relu", "softplus"])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_losses_are_finite_at_far_scores(rectifier: str, scale: float) -> None:
    batch, out, teacher = example(dtype=torch.float32)
    assert teacher is not None
    far = Output((out.logits.detach() * scale).requires_grad_(), out.embedding)
    old = Output(teacher.logits * -scale, teacher.embedding)
    terms = method(rectifier=rectifier, foreground_weight=True).losses(batch, far, old, SECOND)
    assert all(math.isfinite(v) for v in values(terms).values())
    assert bool(gradient(terms, far).isfinite().all())


def test_means_over_processes_add_up_to_the_whole_batch() -> None:
    """Each process divides by the mean count, and gradients are averaged: the result is the gradient of the whole
    batch."""
    batch, out, teacher = example()
    assert teacher is not None
    tested = method(foreground_weight=True)
    whole = gradient(tested.losses(batch, out, teacher, SECOND), out)
    halves = []
    for b in range(2):
        part = Batch(batch.inputs[b : b + 1], batch.labels[b : b + 1], batch.counts / 2)
        logits = out.logits[b : b + 1]
        old = Output(teacher.logits[b : b + 1], teacher.embedding)
        halves.append(gradient(tested.losses(part, Output(logits, logits), old, SECOND), out))
    assert torch.allclose(sum(halves) / 2, whole)


# ---------------------------------------------------------------------------------------------- decisions

INCREMENTS = (Increment(("ant", "bee", "cat"), (1, 2, 3), 90), Increment(("dog", "elk"), (4, 5), 10))


def seen_scores() -> Tensor:
    return 3 * torch.randn(2, 5, 6, 7, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("balancing", ["none", "paper", "ratio", "exact", "odds"])
def test_argmax_of_the_balanced_probabilities(balancing: str) -> None:
    z = seen_scores()
    prediction = method(balancing=balancing, prior=0.5).predict(z, INCREMENTS)
    wanted = balanced_log_probabilities(z, (3, 2), balancing, prior=0.5, images=(90, 10)).exp()
    torch.testing.assert_close(prediction.probabilities, wanted, rtol=2e-6, atol=0)
    assert torch.equal(prediction.labels.long(), wanted.argmax(1))
    assert prediction.labels.dtype == torch.uint8
    assert torch.equal(prediction.uncertainty, prediction.probabilities[:, 0])
    assert torch.allclose(wanted.sum(1), torch.ones(2, 6, 7), atol=1e-5)
    assert len(prediction.labels.unique()) > 2


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 0.9, 1.1])
def test_hierarchical_decision(threshold: float) -> None:
    """A pixel is foreground where u < τ, and then has the class of the largest α."""
    z = seen_scores()
    tested = method(decision="hierarchical", threshold=threshold, balancing="none")
    prediction = tested.predict(z, INCREMENTS)
    u = log_probabilities(z)[:, 0].exp()
    wanted = torch.where(u < threshold, z.argmax(1) + 1, 0)  # α grows with z
    assert torch.equal(prediction.labels.long(), wanted)
    torch.testing.assert_close(prediction.uncertainty, u, rtol=2e-6, atol=0)


def test_hierarchical_differs_from_argmax_where_evidence_is_shared() -> None:
    """Two classes with equal evidence: foreground for certain, but neither of them is more probable than background."""
    z = torch.full((1, 2, 1, 1), 0.7)
    increments = (Increment(("ant", "bee"), (1, 2)),)
    assert int(method().predict(z, increments).labels) == 0
    uncertainty = float(method().predict(z, increments).uncertainty)
    assert 1 / 3 < uncertainty < 0.5
    assert int(method(decision="hierarchical").predict(z, increments).labels) == 1


def test_strong_evidence_is_predicted_in_either_increment() -> None:
    z = torch.full((1, 5, 1, 3), -5.0)
    z[0, 1, 0, 0] = z[0, 4, 0, 1] = 10
    for balancing in ("none", "paper", "ratio", "exact", "odds"):
        assert method(balancing=balancing).predict(z, INCREMENTS).labels.flatten().tolist() == [2, 5, 0]
