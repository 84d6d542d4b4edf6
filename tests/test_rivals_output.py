"""LwF, LwF-MC, ILT, MiB and PLOP: losses by direct formulas, limits in which one equals another, steps, resuming."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import Interrupting, assert_same_run, rows_of, small_config
from torch import Tensor

from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.losses.background import background_cross_entropy_sum, background_distillation_sum, fold_new_into_background
from incseg.losses.distillation import local_pod
from incseg.losses.means import normalised
from incseg.methods import plop as plop_module
from incseg.methods.base import CROSS_ENTROPY, Method, StepContext, StepImages
from incseg.methods.finetune import Finetune
from incseg.methods.ilt import ILT
from incseg.methods.lwf import LwF
from incseg.methods.lwf_mc import LwFMC
from incseg.methods.mib import MiB
from incseg.methods.plop import PLOP, authors_medians, authors_unit, entropy_thresholds, pseudo_labels
from incseg.metrics import BINS, grouped_score_counts
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol, Step
from incseg.run import train
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Output

PROTOCOL = Protocol(DatasetInfo("toy", ("ant", "bee", "cat", "dog")), [["ant", "bee"], ["cat", "dog"]], "overlapped")
FIRST, SECOND = PROTOCOL.steps
HEIGHT, WIDTH = 7, 9


def make_batch(labels: Tensor) -> Batch:
    counts = torch.bincount(labels.flatten(), minlength=256).double()
    return Batch(torch.zeros(len(labels), 3, *labels.shape[1:]), labels, counts)


def example(step: Step = SECOND) -> tuple[Batch, Output, Output | None]:
    """Return labels of background, the step's classes and void; outputs with gradient, all in float64."""
    generator = torch.Generator().manual_seed(step.index)
    first_new = len(step.old) + 1
    kinds = torch.tensor([0, 0, *range(first_new, first_new + len(step.new)), IGNORE], dtype=torch.uint8)
    labels = kinds[torch.randint(0, len(kinds), (3, HEIGHT, WIDTH), generator=generator)]

    def random(*shape: int) -> Tensor:
        return 2 * torch.randn(3, *shape, dtype=torch.float64, generator=generator)

    def output(num_outputs: int) -> Output:
        outputs = Output(random(num_outputs, 3, 4), random(5, 3, 4), (random(2, 6, 8), random(4, 3, 4)))
        return replace(outputs, encoded=outputs.stages[-1].abs())

    out = output(len(step.seen) + 1)
    assert out.encoded is not None
    for tensor in (out.logits, out.embedding, out.encoded, *out.stages):
        tensor.requires_grad_()
    return make_batch(labels), out, output(len(step.old) + 1) if step.old else None


def up(logits: Tensor) -> Tensor:
    return F.interpolate(logits.detach(), (HEIGHT, WIDTH), mode="bilinear", align_corners=False)


def run_losses(method: Method, step: Step = SECOND) -> tuple[dict[str, float], list[Tensor | None]]:
    """Return the named losses, and the gradient of their sum at logits, embedding and stages."""
    batch, out, teacher = example(step)
    terms = normalised(method.losses(batch, out, teacher, step), batch)
    reached = (out.logits, out.embedding, *out.stages)
    gradients = torch.autograd.grad(torch.stack(list(terms.values())).sum(), reached, allow_unused=True)
    return {name: float(value.detach()) for name, value in terms.items()}, list(gradients)


def mean_over(valid: Tensor, costs: Tensor) -> float:
    return float(costs[valid].sum() / valid.sum())


def cross_entropy(step: Step = SECOND) -> float:
    batch, out, _ = example(step)
    valid = batch.labels != IGNORE
    picked = up(out.logits).softmax(1).gather(1, torch.where(valid, batch.labels.long(), 0).unsqueeze(1)).squeeze(1)
    return mean_over(valid, -picked.log())


def output_kd() -> float:
    _, out, teacher = example()
    assert teacher is not None
    student, old = up(out.logits)[:, :3].softmax(1), up(teacher.logits).softmax(1)
    return float(-(old * student.log()).sum(1).mean() / 3)


# --- whole losses --------------------------------------------------------------------------------------------


def test_lwf_is_its_formula() -> None:
    terms, _ = run_losses(LwF())
    assert terms == pytest.approx({"ce": cross_entropy(), "kd": 100 * output_kd()}, rel=1e-10)


def test_ilt_is_its_formula() -> None:
    _, out, teacher = example()
    assert teacher is not None
    assert out.encoded is not None
    assert teacher.encoded is not None
    mse = float((out.encoded.detach() - teacher.encoded).square().mean())
    terms, _ = run_losses(ILT())
    assert terms == pytest.approx({"ce": cross_entropy(), "kd": 100 * output_kd(), "features": 100 * mse}, rel=1e-10)


def test_lwf_mc_is_its_formula() -> None:
    """Σ_c BCE(z_c, 1[y = c]) + 10·|O|·mean BCE(z[O], σ(z_old))."""
    batch, out, teacher = example()
    assert teacher is not None
    on, old = up(out.logits).sigmoid(), up(teacher.logits).sigmoid()
    own = torch.stack([batch.labels == label for label in range(5)], dim=1)
    bce = -torch.where(own, on.log(), (1 - on).log()).sum(1)
    kd = -(old * on[:, :3].log() + (1 - old) * (1 - on[:, :3]).log()).mean()
    terms, _ = run_losses(LwFMC())
    expected = {"bce": mean_over(batch.labels != IGNORE, bce), "kd": float(10 * 3 * kd)}
    assert terms == pytest.approx(expected, rel=1e-10)


def test_mib_is_its_formula() -> None:
    batch, out, teacher = example()
    assert teacher is not None
    logits = up(out.logits)
    expected = {
        "ce": float(background_cross_entropy_sum(logits, batch.labels, 3) / (batch.labels != IGNORE).sum()),
        "kd": 7 * float(background_distillation_sum(logits, up(teacher.logits)) / batch.labels.numel()),
    }
    terms, _ = run_losses(MiB(MiB.Config(lambda_kd=7)))
    assert terms == pytest.approx(expected, rel=1e-10)


def test_the_teacher_affects_old_and_new_outputs_of_each_method() -> None:
    """LwF trains new outputs by labels only; MiB lets them take what the teacher called background."""
    plain = run_losses(LwF(LwF.Config(lambda_kd=0)))[1][0]
    kept = run_losses(LwF())[1][0]
    assert plain is not None
    assert kept is not None
    torch.testing.assert_close(kept[:, 3:], plain[:, 3:])
    assert not torch.allclose(kept[:, :3], plain[:, :3])
    apart = [run_losses(MiB(MiB.Config(lambda_kd=weight)))[1][0] for weight in (0, 10)]
    assert not torch.allclose(apart[0][:, 3:], apart[1][:, 3:])  # type: ignore[index]


@pytest.mark.parametrize(
    ("one", "other", "step"),
    [
        (LwF(LwF.Config(lambda_kd=0)), Finetune(), SECOND),
        (ILT(ILT.Config(lambda_kd=0, lambda_features=0)), Finetune(), SECOND),
        (ILT(ILT.Config(lambda_kd=30, lambda_features=0)), LwF(LwF.Config(lambda_kd=30)), SECOND),
        (LwF(), Finetune(), FIRST),
        (ILT(), Finetune(), FIRST),
        (MiB(), Finetune(), FIRST),
        (PLOP(), Finetune(), FIRST),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else str(value.index),
)
def test_one_method_is_the_other(one: Method, other: Method, step: Step) -> None:
    """At weight zero, and in step 0, which these methods share."""
    (terms, gradients), (same_terms, same_gradients) = run_losses(one, step), run_losses(other, step)
    assert terms == pytest.approx(same_terms, rel=1e-12)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        assert (gradient is None) == (same is None)
        if gradient is not None and same is not None:
            torch.testing.assert_close(gradient, same, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", [LwF, ILT, MiB, PLOP])
def test_the_base_of_softmax_methods_is_shared(kind: type[Method]) -> None:
    assert kind().recipe(0) == Finetune().recipe(0) == {"method": CROSS_ENTROPY}
    assert kind().recipe(1) != Finetune().recipe(1)


def test_the_base_of_sigmoids_is_their_own() -> None:
    few, many = (LwFMC(LwFMC.Config(lambda_kd=weight)) for weight in (1, 10))
    assert few.recipe(0) == many.recipe(0) != Finetune().recipe(0)
    assert few.recipe(1) != many.recipe(1)


def test_steps_of_the_old_formula_of_plop_are_not_reused() -> None:
    old = {"method": "incseg.methods.plop:PLOP"}
    assert PLOP().recipe(1) == {**old, "revision": 3}
    assert PLOP().recipe(0) == MiB().recipe(0)


def without_trained_stages(out: Output, kept: bool) -> Output:
    return Output(out.logits, out.embedding, () if kept else tuple(stage.detach() for stage in out.stages))


@pytest.mark.parametrize("kept", [True, False], ids=["kept features", "frozen"])
def test_features_of_a_frozen_backbone_are_those_of_the_head(kept: bool) -> None:
    batch, out, teacher = example()
    assert teacher is not None
    frozen, old = without_trained_stages(out, kept), without_trained_stages(teacher, kept)
    ilt = normalised(ILT().losses(batch, frozen, old, SECOND), batch)["features"]
    torch.testing.assert_close(ilt, 100 * (out.embedding - teacher.embedding).square().mean())
    pod = normalised(plop_with([1.0, 1.0, 1.0]).losses(batch, frozen, old, SECOND), batch)["pod"]
    torch.testing.assert_close(pod, 0.01 * math.sqrt(5 / 2) / 2 * local_pod([out.embedding], [teacher.embedding]))


# --- models --------------------------------------------------------------------------------------------------


def grown(method: Method) -> tuple[Segmenter, StepContext]:
    """Return a model that has learnt the first step and has grown for the second, before `begin_step`."""
    torch.manual_seed(0)
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 1, 1), norm="group"), True)
    model.grow(Increment(FIRST.names, FIRST.new))
    torch.nn.init.normal_(model.classifiers[0].get_parameter("weight"))
    method.begin_step(StepContext(FIRST, model, None, StepImages(lambda: iter([]))))
    teacher = model.frozen_copy()
    model.grow(Increment(SECOND.names, SECOND.new))
    labels = torch.randint(0, 2, (2, 24, 24), generator=torch.Generator().manual_seed(1), dtype=torch.uint8) * 3
    batch = make_batch(labels)
    batch.inputs = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    return model, StepContext(SECOND, model, teacher, StepImages(lambda: iter([batch])))


@pytest.mark.parametrize("method", [MiB(), PLOP()], ids=["mib", "plop"])
def test_new_classes_start_as_shares_of_background(method: Method) -> None:
    model, context = grown(method)
    method.begin_step(context)
    image = torch.randn(1, 3, 24, 24)
    assert context.teacher is not None
    with torch.no_grad():
        before, after = context.teacher(image).logits.softmax(1), model(image).logits.softmax(1)
    torch.testing.assert_close(after[:, 1:3], before[:, 1:3])
    torch.testing.assert_close(after[:, [0, 3, 4]], before[:, :1].expand(-1, 3, -1, -1) / 3)


def test_mib_may_start_with_small_weights() -> None:
    method = MiB(MiB.Config(start_from_background=False))
    model, context = grown(method)
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    method.begin_step(context)
    assert all(torch.equal(value, drawn[name]) for name, value in model.state_dict().items())


def trained_steps(tmp_path: Path, method: dict[str, Any], **changes: Any) -> list[dict[str, Tensor]]:
    """Return the models of a small run's steps."""
    config = small_config(tmp_path / "run", method=method, train={"epochs": 1, "weight_decay": 0.1}, **changes)
    train(config)
    return [read_tensors(RunDir(config.folder).model(step))[0] for step in range(3)]


def test_a_background_of_one_bias_has_no_weights_in_any_step(tmp_path: Path) -> None:
    models = trained_steps(tmp_path, {"name": "mib", "background": "bias"})
    for model in models:
        weight = model["classifiers.0.weight"]
        assert not weight[0].any()
        assert weight[1:].flatten(1).any(1).all()
    biases = [float(model["classifiers.0.bias"][0]) for model in models]
    assert len(set(biases)) == 3, "the bias learns"
    assert all(model["classifiers.1.weight"].flatten(1).any(1).all() for model in models[1:])


def test_a_background_of_one_bias_has_a_base_of_its_own() -> None:
    method = MiB(MiB.Config(background="bias"))
    assert method.recipe(0) == MiB(MiB.Config(background="bias", lambda_kd=3)).recipe(0) != MiB().recipe(0)
    assert method.recipe(1) != MiB().recipe(1)


def test_frozen_classifiers_are_bit_identical(tmp_path: Path) -> None:
    """Weight decay does not change them either; the newest classifier and the head learn."""
    first, second, third = trained_steps(tmp_path, {"name": "mib", "freeze_old": True})
    for old, new in ((first, second), (second, third)):
        for name in old:
            if name.startswith("classifiers"):
                assert torch.equal(old[name], new[name]), name
        assert not torch.equal(old["aspp.mix.weight"], new["aspp.mix.weight"])
    newest = third["classifiers.2.weight"]
    assert not torch.allclose(newest[0], newest[1]), "both started alike"


# --- PLOP ----------------------------------------------------------------------------------------------------


def plop_with(thresholds: list[float], **options: Any) -> PLOP:
    method = PLOP(PLOP.Config(**options))
    method.load_state({"thresholds": torch.tensor(thresholds)})
    return method


def entropy(p: np.ndarray) -> np.ndarray:
    """Return the share of the largest entropy of (…, C) scores."""
    return -(p * np.log(p)).sum(-1) / math.log(p.shape[-1])


def test_thresholds_are_medians_to_a_bin() -> None:
    """Two batches of unequal size against numpy, class by class, over background pixels only."""
    method = PLOP(PLOP.Config(least_threshold=1e-6))
    _, context = grown(method)
    assert context.teacher is not None
    generator = torch.Generator().manual_seed(5)
    batches = []
    for number in (3, 2):
        labels = torch.randint(0, 3, (number, 24, 20), generator=generator, dtype=torch.uint8)
        batch = make_batch(torch.where(labels == 2, IGNORE, labels * 3))
        batch.inputs = torch.randn(number, 3, 24, 20, generator=generator)
        batches.append(batch)
    context = replace(context, images=StepImages(lambda: iter(batches)))
    method.begin_step(context)
    found = method.state()["thresholds"]
    assert found.dtype == torch.float32

    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for batch in batches:
        with torch.no_grad():
            logits = F.interpolate(context.teacher(batch.inputs).logits.double(), (24, 20), mode="bilinear")
        p = logits.softmax(1).movedim(1, -1).numpy()[(batch.labels == 0).numpy()]
        for guess, value in zip(p.argmax(-1), entropy(p), strict=True):
            values[int(guess)].append(value)
    assert sum(len(value) for value in values.values()) == sum(int((b.labels == 0).sum()) for b in batches)
    assert len([value for value in values.values() if len(value) > 20]) > 1, "more than one class is predicted"
    for label, threshold in enumerate(found.tolist()):
        if values[label]:
            middle = np.median(values[label])
            assert math.log(threshold / (1 - threshold)) == pytest.approx(math.log(middle / (1 - middle)), abs=0.03)
        else:
            assert threshold == pytest.approx(1e-6)


def test_thresholds_have_a_floor() -> None:
    method = PLOP()
    _, context = grown(method)
    assert context.teacher is not None
    for parameter in context.teacher.classifiers.parameters():
        parameter.mul_(1000)  # sure of itself everywhere
    method.begin_step(context)
    assert float(entropy_thresholds(context.teacher, context.images.batches()).max()) < 1e-6
    torch.testing.assert_close(method.state()["thresholds"], torch.full((3,), 0.001 * 3 * math.log(5)))


@pytest.mark.parametrize(("old", "new", "share"), [(16, 1, 0.045), (101, 10, 0.476)])
def test_the_floor_is_in_the_units_of_the_authors_code(old: int, new: int, share: float) -> None:
    """H / (|O| log |O|) / log(|O| + |N|) there, H / log |O| here; VOC 15-1 and ADE20k 100-10, first later step."""
    assert 0.001 * authors_unit(old, old + new) == pytest.approx(share, abs=5e-4)


def test_medians_as_in_the_authors_code() -> None:
    """Half of the lowest bin's width for every pixel there; with more bins, their running sum of bin numbers."""

    def found(shares: list[tuple[float, int]], unit: float) -> float:
        scores = torch.cat([torch.full((count,), share / unit * unit) for share, count in shares])
        counts = grouped_score_counts(scores, torch.zeros(len(scores), dtype=torch.uint8), 1)
        return float(authors_medians(unit)(counts)[0])

    unit = 45.3
    assert found([(0.2, 50)], unit) == pytest.approx(unit * 0.005)  # all in the lowest bin: 0.23
    assert found([(0.2, 80), (0.9, 20)], unit) == pytest.approx(unit * 0.01 * 50 / 80)
    assert found([(0.2, 30), (0.7, 70)], unit) == pytest.approx(unit * (1 + 50 / 70) / 100)  # the sum is still 0
    assert found([(0.01, 40), (0.7, 30), (0.99, 30)], unit) == 0  # never reached, and too few for plus infinity
    assert found([(0.01, 40000), (0.7, 30000), (0.99, 30000)], unit) == pytest.approx(unit)  # plus infinity there
    assert float(authors_medians(unit)(torch.zeros(1, BINS, dtype=torch.int64))[0]) == 0


def test_pseudo_labels_are_the_loop() -> None:
    batch, _, teacher = example()
    assert teacher is not None
    thresholds = torch.tensor([0.7, 0.3, 0.9], dtype=torch.float64)
    labels, shares = pseudo_labels(teacher.logits, batch.labels, thresholds)
    p = up(teacher.logits).softmax(1).movedim(1, -1).numpy()
    unsure = entropy(p)
    seen = set()
    for b in range(3):
        filled = background = 0
        for y in range(HEIGHT):
            for x in range(WIDTH):
                given, made = int(batch.labels[b, y, x]), int(labels[b, y, x])
                if given != 0:
                    assert made == given
                    continue
                guess = int(p[b, y, x].argmax())
                expected = guess if unsure[b, y, x] < float(thresholds[guess]) else IGNORE
                assert made == expected
                seen.add(expected)
                background += 1
                filled += expected != IGNORE
        assert float(shares[b]) == pytest.approx(filled / background)
    assert seen == {0, 1, 2, IGNORE}


def test_pseudo_labels_at_the_ends() -> None:
    batch, _, teacher = example()
    assert teacher is not None
    everything, all_of_it = pseudo_labels(teacher.logits, batch.labels, torch.full((3,), 2.0))
    assert torch.equal(everything == IGNORE, batch.labels == IGNORE)
    assert torch.equal(all_of_it, torch.ones(3))
    nothing, none_of_it = pseudo_labels(teacher.logits, batch.labels, torch.zeros(3))
    assert torch.equal(nothing, torch.where(batch.labels == 0, IGNORE, batch.labels))
    assert torch.equal(none_of_it, torch.zeros(3))
    without = torch.where(batch.labels == 0, 3, batch.labels)
    assert torch.equal(pseudo_labels(teacher.logits, without, torch.zeros(3))[1], torch.ones(3))


def test_plop_is_its_formula() -> None:
    batch, out, teacher = example()
    assert teacher is not None
    thresholds = [0.7, 0.3, 0.9]
    labels, shares = pseudo_labels(teacher.logits, batch.labels, torch.tensor(thresholds))
    costs = F.cross_entropy(up(out.logits), labels.long(), ignore_index=IGNORE, reduction="none").sum((1, 2))
    pairs = list(zip((*out.stages, out.embedding), (*teacher.stages, teacher.embedding), strict=True))
    with torch.no_grad():
        maps = sum(local_pod([own], [old]) for own, old in pairs)
        logits = local_pod([fold_new_into_background(out.logits, 3)], [teacher.logits])
    growth = math.sqrt(5 / 2) / (len(pairs) + 1)  # background counts as seen
    expected = {
        "ce": float((shares * costs).sum() / (batch.labels != IGNORE).sum()),
        "pod": 0.01 * growth * float(maps),
        "pod_logits": 0.0005 * growth * float(logits),
    }
    terms, gradients = run_losses(plop_with(thresholds))
    assert terms == pytest.approx(expected, rel=1e-6)
    assert all(gradient is not None and gradient.any() for gradient in gradients)


def test_plop_without_pod_has_pseudo_labels_alone() -> None:
    terms, gradients = run_losses(plop_with([0.7, 0.3, 0.9], lambda_pod=0, lambda_pod_logits=0))
    assert terms.keys() == {"ce"}
    assert gradients[1:] == [None, None, None]


def test_a_step_starts_at_the_teacher() -> None:
    """The maps that POD compares are equal then, with new classes or without."""
    method = PLOP()
    model, context = grown(method)
    method.begin_step(context)
    assert context.teacher is not None
    (batch,) = context.images.batches()
    with torch.no_grad():
        teacher = context.teacher(batch.inputs)
    losses = normalised(method.losses(batch, model(batch.inputs), teacher, SECOND), batch)
    assert float(losses["pod"].detach()) == 0
    assert float(losses["pod_logits"].detach()) < 1e-7


def test_the_first_step_leaves_no_state() -> None:
    method = plop_with([0.1, 0.2])
    method.begin_step(StepContext(FIRST, grown(method)[0], None, StepImages(lambda: iter([]))))
    assert method.state() == {}


# --- runs ----------------------------------------------------------------------------------------------------


def test_a_resumed_step_keeps_its_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the checkpoint, whatever `begin_step` would find now."""
    whole, broken = (
        small_config(tmp_path / name, task="6-4", method={"name": "plop"}, train={"checkpoint_seconds": 0.0})
        for name in ("whole", "broken")
    )
    train(whole)
    with pytest.raises(KeyboardInterrupt), showing(Interrupting("step 1/1", 2)):
        train(broken)
    saved, _ = read_tensors(RunDir(broken.folder).checkpoint)
    final, _ = read_tensors(RunDir(whole.folder).state(1))
    assert len(final["thresholds"]) == 7
    assert torch.equal(saved["method.thresholds"], final["thresholds"])
    answers = [torch.full((7,), 0.5)]
    monkeypatch.setattr(plop_module, "entropy_thresholds", lambda *_: answers.pop())
    train(broken)
    assert not answers
    assert_same_run(whole.folder, broken.folder)


def test_plop_uses_the_base_of_fine_tuning(tmp_path: Path) -> None:
    configs = [
        small_config(tmp_path / name, method={"name": name}, train={"epochs": 1}, reuse=True)
        for name in ("finetune", "plop", "mib")
    ]
    for config in configs:
        train(config)
    for config in configs[1:]:
        reused = [row["reused_from"] for row in rows_of(config.folder)]
        assert reused == [str(configs[0].folder), None, None]


@pytest.mark.parametrize("name", ["ilt", "plop"])
def test_cached_features_train_as_a_frozen_backbone_does(name: str, tmp_path: Path) -> None:
    losses = []
    for cache in ("auto", "off"):
        config = small_config(
            tmp_path / cache,
            task="8-2",
            method={"name": name},
            data={"cache": cache},
            model={"freeze_backbone": True},
            train={"epochs": 1, "scale": None},
        )
        train(config)
        losses.append([row["losses"] for row in rows_of(config.folder)])
    for kept, made in zip(*losses, strict=True):
        assert kept == pytest.approx(made, rel=0.02)
