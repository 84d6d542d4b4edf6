"""Methods that act on parameters and single outputs: weight fusion, SSUL's frozen network, DKD's parts of a logit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import Interrupting, rows_of, small_config
from torch import Tensor

from incseg.config import RunConfig
from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.losses.means import normalised
from incseg.losses.sigmoid import binary_cross_entropy, binary_distillation, decompose, sure_background
from incseg.methods.base import StepContext, StepImages
from incseg.methods.dkd import DKD
from incseg.methods.ssul import SSUL
from incseg.models.segmenter import ModelConfig, Segmenter, fuse, fusion_share
from incseg.outputs.sigmoid import foreground_prediction
from incseg.presets import PRESETS, preset_for
from incseg.protocol import Protocol
from incseg.run import train
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Output, UserError

MODEL = ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1))
STEPS = Protocol(DatasetInfo("toy", ("ant", "bee", "cow", "doe")), "ant,bee/cow,doe", "overlapped").steps


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    return read_tensors(RunDir(folder).model(step))[0]


def config(folder: Path, **changes: Any) -> RunConfig:
    changes["train"] = {"epochs": 1, "epochs_later": 3, **changes.get("train", {})}
    return small_config(folder, **{"task": "6-4", **changes})


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


# --- fusion --------------------------------------------------------------------------------------------------


def two_models() -> tuple[Segmenter, Segmenter]:
    """Return the models after a step and before it, different in everything that they share."""
    torch.manual_seed(0)
    new = Segmenter(MODEL, True)
    new.grow(Increment(("ant",), (1,)))
    old = new.frozen_copy()
    new.grow(Increment(("bee",), (2,)))
    with torch.no_grad():
        for tensor in new.state_dict().values():
            tensor += 1
    return new, old


def test_the_ends_of_fusion() -> None:
    for share in (0.0, 1.0):
        new, old = two_models()
        before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
        fuse(new, old, share)
        for name, tensor in new.state_dict().items():
            kept = share == 1 or "num_batches" in name or name.startswith("classifiers.1")
            assert torch.equal(tensor, before[name] if kept else old.state_dict()[name]), name


def test_fusion_is_a_weighted_mean() -> None:
    new, old = two_models()
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    fuse(new, old, 0.3)
    for name, tensor in old.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(new.state_dict()[name], 0.7 * tensor + 0.3 * before[name])


def test_the_share_counts_classes() -> None:
    assert fusion_share(5, 20) == pytest.approx(0.5)
    assert fusion_share(7, 7) == 1


def test_a_run_fuses_after_training(tmp_path: Path) -> None:
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    train(config(plain, method={"name": "finetune"}))
    train(config(fused, method={"name": "finetune"}, train={"fusion": "ewf"}))
    old, new = saved(plain, 0), saved(plain, 1)
    assert all(torch.equal(tensor, old[name]) for name, tensor in saved(fused, 0).items())
    for name, tensor in saved(fused, 1).items():
        if name in old and tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.lerp(old[name], new[name], math.sqrt(4 / 10)), msg=name)
        else:
            assert torch.equal(tensor, new[name])
    assert rows_of(fused)[1]["losses"] == rows_of(plain)[1]["losses"]
    assert not torch.equal(saved(fused, 1)["aspp.mix.weight"], new["aspp.mix.weight"])


def test_fusion_leaves_the_base_shared(tmp_path: Path) -> None:
    def reused(name: str, **changes: Any) -> list[bool]:
        train(config(tmp_path / name, method={"name": "finetune"}, reuse=True, **changes))
        return [row["reused_from"] is not None for row in RunDir(tmp_path / name).rows()]

    assert reused("plain") == [False, False]
    assert reused("fused", train={"fusion": "ewf"}) == [True, False]
    assert reused("again", train={"fusion": "ewf"}) == [True, True]


# --- sigmoids ------------------------------------------------------------------------------------------------


def test_binary_cross_entropy_equals_a_loop() -> None:
    logits = 3 * draw(2, 3, 4, 5)
    labels = torch.tensor([0, 2, 3, 4, 9, IGNORE], dtype=torch.uint8)[
        torch.randint(6, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    ]
    got = binary_cross_entropy(logits, labels, first=2)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(5)).tolist():
        image, y, x = index
        label, wanted = int(labels[image, y, x]), 0.0
        for channel in range(3) if label != IGNORE else ():
            p = sigmoid(float(logits[image, channel, y, x]))
            wanted -= math.log(p if label == channel + 2 else 1 - p)
        assert float(got[image, y, x]) == pytest.approx(wanted)
    assert torch.autograd.gradcheck(lambda z: binary_cross_entropy(z, labels, 2), logits.requires_grad_())


def test_binary_distillation_equals_a_loop_and_is_least_at_the_teacher() -> None:
    logits, teacher = draw(1, 2, 3, 1), draw(1, 2, 3, 1, seed=1)
    wanted = [
        -sum(
            sigmoid(t) * math.log(sigmoid(z)) + (1 - sigmoid(t)) * math.log(1 - sigmoid(z))
            for z, t in zip(logits[0, :, y, 0].tolist(), teacher[0, :, y, 0].tolist(), strict=True)
        )
        for y in range(3)
    ]
    assert binary_distillation(logits, teacher).flatten().tolist() == pytest.approx(wanted)
    at_teacher = teacher.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(binary_distillation(at_teacher, teacher).sum(), at_teacher)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    assert torch.autograd.gradcheck(lambda z: binary_distillation(z, teacher), logits.requires_grad_())


# --- SSUL ----------------------------------------------------------------------------------------------------


def test_what_the_teacher_is_sure_of() -> None:
    """Pixels: certain background, certain class 1, uncertain, certain background with a new label, and void."""
    z = math.log(0.7 / 0.3)
    teacher = torch.tensor([[z, -1, z - 0.1, 9, 9], [-1, z, 0, 0, 0], [-2, -2, -2, -2, -2]]).view(1, 3, 1, 5)
    labels = torch.tensor([0, 0, 0, 3, IGNORE], dtype=torch.uint8).view(1, 1, 5)
    background, old = sure_background(labels, teacher, 0.7)
    assert background.flatten().tolist() == [True, False, False, False, False]
    assert old.flatten().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("unknown", ["ignore", "background"])
def test_ssul_equals_a_loop(unknown: Any) -> None:
    step = STEPS[1]
    logits, teacher = 2 * draw(2, 5, 4, 6), 2 * draw(2, 3, 4, 6, seed=1)
    labels = torch.tensor([0, 3, 4, IGNORE], dtype=torch.uint8)[
        torch.randint(4, (2, 4, 6), generator=torch.Generator().manual_seed(2))
    ]
    batch = Batch(torch.zeros(2, 3, 4, 6), labels, torch.bincount(labels.flatten(), minlength=256).double())
    new = background = 0.0
    asked = []
    for image, y, x in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(6)).tolist():
        label = int(labels[image, y, x])
        if label == IGNORE:
            continue
        p = [sigmoid(z) for z in logits[image, :, y, x].tolist()]
        q = [sigmoid(z) for z in teacher[image, :, y, x].tolist()]
        new -= sum(math.log(p[c] if label == c else 1 - p[c]) for c in (3, 4))
        answer: bool | None = None
        if label != 0 or (max(q) >= 0.7 and q.index(max(q)) > 0):
            answer = False
        elif max(q) >= 0.7 or unknown == "background":
            answer = True
        asked.append(answer)
        if answer is not None:
            background -= math.log(p[0] if answer else 1 - p[0])
    assert set(asked) == ({True, False, None} if unknown == "ignore" else {True, False})
    losses = SSUL(SSUL.Config(unknown)).losses(batch, Output(logits, logits), Output(teacher, teacher), step)
    assert float(losses["bce"]) == pytest.approx(new / len(asked))
    assert float(losses["background"]) == pytest.approx(background / len(asked))


def test_ssul_moves_nothing_but_the_new_classifier_and_background(tmp_path: Path) -> None:
    """Batch norm, weight decay and momentum are on, and two steps follow the first."""
    train(config(tmp_path / "run", task="6-2", method={"name": "ssul"}))
    base, middle, last = (saved(tmp_path / "run", step) for step in range(3))
    for name, tensor in base.items():
        rest = slice(1, None) if name.startswith("classifiers.0") else slice(None)
        for later in (middle, last):
            mine = later[name] if tensor.ndim == 0 else later[name][rest]
            assert torch.equal(mine, tensor if tensor.ndim == 0 else tensor[rest]), name
    for name in ("classifiers.0.weight", "classifiers.0.bias"):
        assert not torch.equal(middle[name][0], base[name][0])
        assert not torch.equal(last[name][0], middle[name][0])
    assert torch.equal(last["classifiers.1.weight"], middle["classifiers.1.weight"])
    assert last["classifiers.2.bias"].all(), "it began at zero"


def test_confidence_is_a_probability() -> None:
    for confidence in (0.0, 1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            SSUL.Config(confidence=confidence)


# --- DKD -----------------------------------------------------------------------------------------------------


def test_parts_of_a_logit() -> None:
    features, weight = draw(2, 4, 3, 2), draw(3, 4, 1, 1, seed=1)
    supports, opposes = decompose(features, weight)
    torch.testing.assert_close(supports + opposes, F.conv2d(features, weight))
    for c in range(3):
        wanted = sum(max(float(weight[c, k]), 0) * float(features[1, k, 2, 1]) for k in range(4))
        assert float(supports[1, c, 2, 1]) == pytest.approx(wanted)
    assert (decompose(features.abs(), weight)[0] >= 0).all()
    assert (decompose(features.abs(), weight)[1] <= 0).all()


def test_background_is_where_no_sigmoid_exceeds_a_half() -> None:
    logits = torch.tensor([[-0.1, 0.1, 3.0], [-5.0, 0.2, 1.0]]).view(1, 2, 1, 3)
    prediction = foreground_prediction(logits)
    assert prediction.labels.flatten().tolist() == [0, 2, 1]
    odds = [1, math.exp(0.1), math.exp(0.2)]  # of exactly one class, or none, being true
    assert prediction.probabilities[0, :, 0, 1].tolist() == pytest.approx([o / sum(odds) for o in odds])


class DKDScene:
    """DKD in step 1, with a student that differs from the teacher."""

    def __init__(self, **options: float) -> None:
        torch.manual_seed(0)
        self.method, self.model = DKD(DKD.Config(**options)), Segmenter(MODEL, True).double().eval()
        for step in STEPS:
            self.teacher = self.model.frozen_copy() if step.index else None
            self.model.grow(Increment(step.names, step.new, 4))
            if step.index == 0:
                torch.nn.init.normal_(self.model.classifiers[0].get_parameter("weight"), std=0.5)
            self.method.begin_step(StepContext(step, self.model, self.teacher, StepImages(lambda: iter(()))))

    def losses(self, labels: Tensor) -> tuple[dict[str, Tensor], Output, Output]:
        images = draw(2, 3, 16, 16, seed=7)
        counts = torch.bincount(labels.flatten(), minlength=256).double()
        assert self.teacher is not None
        out, teacher = self.model(images), self.teacher(images)
        batch = Batch(images, labels, counts)
        return normalised(self.method.losses(batch, out, teacher, STEPS[1]), batch), out, teacher


def test_new_classifiers_start_as_the_auxiliary_one() -> None:
    first, newest = DKDScene().model.classifiers
    for name, parameter in newest.named_parameters():
        assert parameter.shape[0] == 2
        assert torch.equal(parameter, first.get_parameter(name)[[0, 0]])
        assert first.get_parameter(name)[0].any() or name == "bias"


def test_dkd_is_made_of_its_five_terms() -> None:
    scene = DKDScene()
    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    labels = torch.tensor([0, 3, 4, IGNORE], dtype=torch.uint8)[
        torch.randint(4, (2, 16, 16), generator=torch.Generator().manual_seed(3))
    ]
    losses, out, teacher = scene.losses(labels)
    up, up_teacher = (F.interpolate(o.logits, (16, 16), mode="bilinear") for o in (out, teacher))
    valid = labels != IGNORE
    own = F.binary_cross_entropy_with_logits(
        up[:, 3:], torch.stack([labels == 3, labels == 4], 1).double(), reduction="none"
    )
    kd = F.binary_cross_entropy_with_logits(up[:, 1:3], up_teacher[:, 1:].sigmoid(), reduction="none")
    auxiliary = -torch.log(1 - up[:, 0].sigmoid())
    wanted = {
        "bce": own.sum(1)[valid].mean(),
        "kd": 5 * kd.sum(1).mean(),
        "auxiliary": auxiliary[valid].mean(),
    }
    assert scene.teacher is not None
    weights = [m.classifiers[0].get_parameter("weight")[1:] for m in (scene.model, scene.teacher)]
    for name, part in (("for", 0), ("against", 1)):
        mine, theirs = (decompose(o.embedding, w)[part] for o, w in zip((out, teacher), weights, strict=True))
        error = F.binary_cross_entropy_with_logits(mine, theirs.sigmoid(), reduction="none")
        wanted[name] = 5 * error.sum(1).mean()
    assert set(losses) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(losses[name], value, msg=name)


def test_the_auxiliary_classifier_does_not_shape_features() -> None:
    scene = DKDScene()
    losses, _, _ = scene.losses(torch.zeros(2, 16, 16, dtype=torch.uint8))
    losses["auxiliary"].backward()
    for name, parameter in scene.model.named_parameters():
        if name.startswith("classifiers.0"):
            assert parameter.grad is not None
            assert (parameter.grad[0] > 0).any()
            assert not parameter.grad[1:].any()
        else:
            assert parameter.grad is None, name


def test_positive_weight_against_a_loop_over_pixels() -> None:
    """It doubles the term of a pixel's own class and of no other. A weight of 1 is the plain loss, bit for bit."""
    logits, labels = draw(2, 3, 4, 5), torch.tensor([0, 2, 3, 4, IGNORE], dtype=torch.uint8).repeat(2, 4, 1)
    got = binary_cross_entropy(logits, labels, first=2, positive_weight=2.0)
    for place in ((b, y, x) for b in range(2) for y in range(4) for x in range(5)):
        b, y, x = place
        wanted = 0.0
        for c in range(3) if labels[place] != IGNORE else ():
            p = sigmoid(float(logits[b, c, y, x]))
            wanted -= 2 * math.log(p) if int(labels[place]) == c + 2 else math.log(1 - p)
        assert float(got[place]) == pytest.approx(wanted)
    assert torch.equal(binary_cross_entropy(logits, labels, 2, 1.0), binary_cross_entropy(logits, labels, 2))
    assert torch.autograd.gradcheck(lambda z: binary_cross_entropy(z, labels, 2, 2.0), logits.requires_grad_())


def test_dkd_weighs_positive_pixels_of_step_0_and_of_later_steps_apart() -> None:
    images = draw(2, 3, 16, 16, seed=7)
    labels = torch.tensor([0, 1, 2, IGNORE], dtype=torch.uint8).repeat(2, 16, 4)
    counts = torch.bincount(labels.flatten(), minlength=256).double()
    torch.manual_seed(0)
    model = Segmenter(MODEL, True).double().eval()
    model.grow(Increment(STEPS[0].names, STEPS[0].new, 4))
    torch.nn.init.normal_(model.classifiers[0].get_parameter("weight"), std=0.5)
    out = model(images)
    first: dict[float, Tensor] = {}
    for weight in (1.0, 2.0):
        method = DKD(DKD.Config(positive_weight=weight))
        method.begin_step(StepContext(STEPS[0], model, None, StepImages(lambda: iter(()))))
        losses = method.losses(Batch(images, labels, counts), out, None, STEPS[0])
        assert set(losses) == {"bce", "auxiliary"}
        first[weight] = losses["bce"]
        own = F.binary_cross_entropy_with_logits(
            F.interpolate(out.logits, (16, 16), mode="bilinear")[:, 1:],
            torch.stack([labels == 1, labels == 2], 1).double(),
            pos_weight=torch.full((2, 1, 1), weight, dtype=torch.float64),
            reduction="none",
        )
        torch.testing.assert_close(losses["bce"], own.sum(1)[labels != IGNORE].mean())
    assert first[2.0] > first[1.0]
    later = labels.where(labels != 1, 3)
    options: tuple[dict[str, float], ...] = ({}, {"positive_weight": 2.0}, {"positive_weight_later": 2.0})
    plain, first_weighted, later_weighted = (DKDScene(**of_scene).losses(later)[0] for of_scene in options)
    assert plain.keys() == first_weighted.keys() == later_weighted.keys()
    assert all(torch.equal(plain[name], first_weighted[name]) for name in plain)
    assert later_weighted.pop("bce") > plain.pop("bce")
    assert all(torch.equal(plain[name], later_weighted[name]) for name in plain)


def test_a_recipe_names_the_options_that_differ_from_their_defaults() -> None:
    name = {"method": "incseg.methods.dkd:DKD"}
    assert DKD().recipe(0) == DKD().recipe(1) == name
    assert DKD(DKD.Config(positive_weight=2.0)).recipe(0) == {**name, "positive_weight": 2.0}
    distilling = DKD(DKD.Config(lambda_dkd=1.0))
    assert distilling.recipe(0) == name
    assert distilling.recipe(1) == {**name, "lambda_dkd": 1.0}


def test_a_run_begun_before_positive_weight_is_resumed(tmp_path: Path) -> None:
    """Its config.yaml has no such setting."""
    whole, begun, weighed = (
        config(tmp_path / name, method={"name": "dkd", "positive_weight": weight})
        for name, weight in (("whole", 1.0), ("begun", 1.0), ("begun", 2.0))
    )
    train(whole)
    with pytest.raises(KeyboardInterrupt), showing(Interrupting("row 0")):
        train(config(begun.folder, method={"name": "dkd"}))
    assert "positive_weight" not in RunDir(begun.folder).config.read_text()
    with pytest.raises(UserError, match=r"positive_weight was 1\.0, now 2\.0"):
        train(weighed)
    train(begun)
    assert rows_of(whole.folder) == rows_of(begun.folder)
    mine, theirs = saved(begun.folder, 1), saved(whole.folder, 1)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_authors_positive_weights_are_in_the_presets_of_their_datasets() -> None:
    chosen = {name: preset_for(name, "dkd").get("method") for name in PRESETS}
    voc = {"positive_weight": 2.0}
    assert {name: options for name, options in chosen.items() if options} == {
        "paper-voc": voc,
        "paper-ade": {"positive_weight": 35.0, "positive_weight_later": 35.0},
        "voc-laptop": {**voc, "lambda_kd": 2.0, "lambda_dkd": 2.0},
        "voc-laptop-full": voc,
    }


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_positive_weights_that_are_refused(weight: float) -> None:
    with pytest.raises(UserError, match="above 0"):
        DKD.Config(positive_weight=weight)
