"""Heads of later classes: the old scores do not change, each head has its own input size, files and ONNX support it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_runs import reevaluated_row, rows_of, small_config, train_in_two_processes
from torch import Tensor

from incseg.engine.calibration import SHIFTS, Calibration, best
from incseg.engine.runtime import Runtime
from incseg.export import to_onnx, with_onnx
from incseg.inference import load
from incseg.losses.evidential import evidential_cross_entropy, evidential_losses, inverse_frequency_weights
from incseg.methods.evidential import Evidential
from incseg.models.files import load_segmenter, save_segmenter
from incseg.models.segmenter import FINER, ModelConfig, Segmenter, shrunk
from incseg.run import train
from incseg.types import Increment, Output, UserError

CONFIG = ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 2, 3), freeze_backbone=True)
OLD, NEW = Increment(("a", "b"), (1, 2), 5), Increment(("c",), (3,), 5, head=1)


def two_heads(factor: int = 2) -> tuple[Segmenter, Segmenter]:
    """Return a model, and the same after an extension whose input is `factor` times larger, with random weights
    everywhere."""
    torch.manual_seed(0)
    before = Segmenter(dataclasses.replace(CONFIG), background_output=False)
    before.grow(OLD)
    after = before.frozen_copy()
    if factor > 1:
        after.enlarge(factor)
    after.grow(NEW)
    for parameter in after.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(after.classifiers[1].weight, std=1.0)
    return before.eval(), after.eval()


# --- the network -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 4])
@torch.no_grad()
def test_old_scores_are_those_of_the_small_image(factor: int) -> None:
    before, after = two_heads(factor)
    images = torch.randn(2, 3, 64 * factor, 48 * factor)
    old = before(shrunk(images, factor)).logits
    logits = after(images).logits
    finer = 1 if factor == 1 else FINER
    assert logits.shape == (2, 3, finer * 8 * factor, finer * 6 * factor)
    wanted = old if factor == 1 else F.interpolate(old, logits.shape[-2:], mode="bilinear", align_corners=False)
    assert torch.allclose(logits[:, :2], wanted, atol=1e-6)
    assert torch.allclose(after(after.features(images)).logits, logits, atol=1e-5)


@torch.no_grad()
def test_a_smaller_image_is_the_mean_of_its_pixels() -> None:
    image = torch.arange(30, dtype=torch.float64).view(1, 1, 5, 6)
    small = shrunk(image, 2)
    assert small[0, 0, 0, 0] == (0 + 1 + 6 + 7) / 4
    assert small[0, 0, 2, 0] == (24 + 25) / 2  # the last row of an odd number
    assert shrunk(image, 1) is image


def test_only_the_new_head_learns() -> None:
    _, model = two_heads()
    model.train()
    model.freeze("model")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(("heads.0.", "classifiers.1."))}
    assert model.heads[0].training
    assert not model.aspp.training
    assert not model.backbone.training


def test_a_head_starts_as_a_copy_and_sizes_are_limited() -> None:
    model = Segmenter(dataclasses.replace(CONFIG), background_output=False)
    model.grow(OLD)
    model.grow(NEW)
    for name, tensor in model.aspp.state_dict().items():
        assert torch.equal(tensor, model.heads[0].aspp.state_dict()[name])
    model.enlarge(4)
    assert (model.shrinks, model.sizes, model.unit, model.stride) == ([4, 4], [1, 4], 32, 32)
    with pytest.raises(UserError, match="8 is the most"):
        model.enlarge(4)


def test_files_hold_heads_and_sizes(tmp_path: Path) -> None:
    _, model = two_heads()
    save_segmenter(tmp_path / "m.safetensors", model, {"method": {"name": "evidential"}, "test_size": 64})
    again, _ = load_segmenter(tmp_path / "m.safetensors")
    assert (again.shrinks, again.sizes, [i.head for i in again.increments]) == ([2, 1], [1, 2], [0, 1])
    images = torch.randn(1, 3, 80, 96)
    with torch.no_grad():
        assert torch.equal(model(images).logits, again(images).logits)


def photograph(width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(1).integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    _, model = two_heads()
    save_segmenter(tmp_path / "m.safetensors", model, {"method": {"name": "evidential"}, "test_size": 64})
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("size", [(480, 640), (641, 481), (97, 403)])
def test_tiles_agree_with_the_whole_image(saved: Path, size: tuple[int, int]) -> None:
    """Also if a tile ends in the middle of a cell. The mean over a tile is not that over the image, so not to the last
    bit."""
    predictor = load(saved, device="cpu", threads=1)
    image = photograph(*size)
    whole = predictor.predict(image, size=0)
    tiled = predictor.predict(image, size=0, tile=192)
    assert tiled.labels.shape == size[::-1]
    assert np.abs(whole.uncertainty - tiled.uncertainty).mean() < 0.1


def test_onnx_has_the_same_heads(saved: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'incseg[onnx]'")
    pytest.importorskip("onnx", reason="needs pip install 'incseg[onnx]'")
    predictor = load(saved, device="cpu", threads=1)
    assert to_onnx(predictor) is not None
    other = with_onnx(predictor, 1)
    for size, tile in (((300, 211), 1536), ((481, 641), 256)):
        image = photograph(*size)
        mine, theirs = (one.predict(image, size=0, tile=tile) for one in (predictor, other))
        assert (mine.labels != theirs.labels).mean() < 0.002
        assert np.abs(mine.uncertainty - theirs.uncertainty).max() < 1e-3


# --- weights of rare classes -------------------------------------------------------------------------------------


def test_weights_by_frequency() -> None:
    counts = torch.zeros(256, dtype=torch.int64)
    counts[[0, 3, 4, 255]] = torch.tensor([9000, 900, 100, 777])
    assert torch.equal(inverse_frequency_weights(counts, 0.0)[[0, 3, 4]], torch.ones(3))
    for power in (0.25, 0.5, 1.0):
        weights = inverse_frequency_weights(counts, power)
        assert float((weights * counts)[:255].sum()) == pytest.approx(10000)
        assert float(weights[4] / weights[0]) == pytest.approx(90**power, rel=1e-5)
        assert weights[255] == weights[7] == 0
    equal = inverse_frequency_weights(counts, 1.0) * counts
    assert equal[[0, 3, 4]].tolist() == pytest.approx([10000 / 3] * 3, rel=1e-5)
    assert inverse_frequency_weights(torch.zeros(256), 0.5).sum() == 0


def test_a_weight_for_every_pixel_has_its_gradient_in_closed_form() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 4, (2, 5, 4), dtype=torch.uint8)
    labels[0, 0] = 255
    weights = torch.rand(256, dtype=torch.float64)
    (loss,) = evidential_losses(logits, labels, (weights[labels.long()], weights[0]))
    (gradient,) = torch.autograd.grad(loss, logits)
    foreground, background = evidential_cross_entropy(logits, labels)
    wanted = (weights[labels.long()] * foreground).sum() + weights[0] * background.sum()
    assert torch.allclose(loss, wanted)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, logits)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"class_weight": 2.0}, "from 0 to 1"), ({"class_weight": 0.5, "foreground_weight": True}, "set only one")],
)
def test_weights_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Evidential.Config(**options)  # type: ignore[arg-type]


# --- runs --------------------------------------------------------------------------------------------------------

OWN = {"frozen_later": "model", "own_head": True, "scale": None, "clip_later": 1.0}
WEIGHED = {"name": "evidential", "class_weight": 0.5}


@pytest.mark.parametrize("cache", ["auto", "off"])
def test_a_run_whose_steps_have_heads_of_their_own(tmp_path: Path, cache: str) -> None:
    """It is the same when resumed and tested again. The earlier steps do not change, bit for bit."""
    frozen = {"freeze_backbone": True}
    config = small_config(tmp_path / "run", method=WEIGHED, train=OWN, model=frozen, data={"cache": cache})
    train(config)
    assert reevaluated_row(tmp_path / "run") == rows_of(tmp_path / "run")[2]
    models = [load_segmenter(tmp_path / "run" / "steps" / str(step) / "model.safetensors")[0] for step in range(3)]
    assert [len(model.heads) for model in models] == [0, 1, 2]
    for earlier, later in itertools.pairwise(models):
        for name, tensor in earlier.state_dict().items():
            assert torch.equal(tensor, later.state_dict()[name]), name


def test_two_processes_learn_the_same_head(tmp_path: Path) -> None:
    frozen = {"freeze_backbone": True, "norm": "frozen-group"}  # no statistics of batches, which processes do not share
    one, two = (
        small_config(tmp_path / name, method=WEIGHED, train=OWN, model=frozen, task="8-2") for name in ("one", "two")
    )
    train(one)
    train_in_two_processes(two)
    for mine, theirs in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert mine["all"] == pytest.approx(theirs["all"], abs=0.5)


def test_methods_that_share_a_background_cannot_leave_the_model_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot add classes to a frozen model"):
        train(small_config(tmp_path / "run", method={"name": "mib"}, train={"frozen_later": "model"}))
    with pytest.raises(UserError, match=r"train\.own_head needs train\.frozen_later model"):
        small_config(tmp_path / "run", train={"own_head": True})


# --- calibration -------------------------------------------------------------------------------------------------


def test_the_rule() -> None:
    assert best([(10, 100), (30, 99.0), (40, 98.9)]) == 1
    assert best([(10, 100), (10, 100)]) == 0
    assert best([(50, 90), (20, 95)]) == 1


class Scores(Segmenter):
    """A model whose logits are its input, with the bias of the newest class added."""

    def forward(self, inputs: Tensor) -> object:  # type: ignore[override]
        bias = torch.cat([classifier.get_parameter("bias") for classifier in self.classifiers])
        return Output(inputs + bias.view(1, -1, 1, 1), inputs)


@pytest.mark.parametrize(("score", "wanted"), [(-0.1, 1.0), (3.5, 0.0)])
def test_new_classes_are_shifted_as_much_as_is_best(score: float, wanted: float) -> None:
    """A new object whose score is below the background is found with a positive shift; one that is found is not
    shifted."""
    model = Scores(dataclasses.replace(CONFIG), background_output=False)
    model.grow(Increment(("old",), (1,)))
    model.grow(Increment(("new",), (2,)))
    labels = torch.zeros(1, 32, 32, dtype=torch.uint8)
    labels[:, :, 16:] = 2
    logits = torch.full((1, 2, 32, 32), -9.0)
    logits[:, 1, :, 16:] = score
    logits[:, 0, :8, :16] = 9.0  # an old object
    before = Evidential().predict(logits[:, :1], model.increments[:1]).labels

    (shift,) = Calibration(Evidential(), lambda: [(logits, labels, [0])], Runtime("cpu")).score(model).shifts
    model.shift_newest([shift])
    assert shift in SHIFTS
    assert shift == wanted
    after = Evidential().predict(model(logits).logits, model.increments).labels  # type: ignore[attr-defined]
    assert (after[:, :, 16:] == 2).all()
    assert torch.equal(after[:, :, :16], before[:, :, :16])
    assert float(model.classifiers[1].get_parameter("bias").detach()) == shift


@pytest.mark.parametrize(("protected", "found"), [((), True), (("person",), False)])
def test_an_old_class_gives_way_to_a_new_one_that_lies_on_it(protected: tuple[str, ...], found: bool) -> None:
    """A dress on a person, found only with a shift that costs other persons 6 % of their pixels."""
    model = Scores(dataclasses.replace(CONFIG), background_output=False)
    model.grow(Increment(("person",), (1,)))
    model.grow(Increment(("dress",), (2,)))
    labels = torch.zeros(1, 64, 64, dtype=torch.uint8)
    labels[:, :, :16] = 2
    logits = torch.full((1, 2, 64, 64), -9.0)
    logits[:, 0] = 2.0  # a person everywhere
    logits[:, 1, :, :16] = 1.5
    logits[:, 1, :4, 28:] = 1.4
    calibration = Calibration(Evidential(), lambda: [(logits, labels, [0])], Runtime("cpu"), protected)
    model.shift_newest(calibration.score(model).shifts)
    after = Evidential().predict(model(logits).logits, model.increments).labels  # type: ignore[attr-defined]
    assert bool((after[:, :, :16] == 2).all()) == found
    assert bool((after[:, :, 28:] == 2).any()) == found


def test_each_new_class_can_have_a_shift_of_its_own() -> None:
    """One class must be predicted less readily, the other more: no common shift finds both."""
    model = Scores(dataclasses.replace(CONFIG), background_output=False)
    model.grow(Increment(("old",), (1,)))
    model.grow(Increment(("loud", "faint"), (2, 3)))
    labels = torch.zeros(1, 64, 64, dtype=torch.uint8)
    labels[:, :16], labels[:, 48:] = 2, 3
    logits = torch.full((1, 3, 64, 64), -9.0)
    logits[:, 1, :40] = 1.6
    logits[:, 1, :16] = 3.5
    logits[:, 2, 48:] = 0.8
    calibration = Calibration(Evidential(), lambda: [(logits, labels, [0])], Runtime("cpu"))
    common, apart = calibration.score(model), calibration.score(model, apart=True)
    assert common.iou == 70  # the loud one on 40 rows instead of 16
    assert apart.iou > 95
    assert apart.shifts[0] < 0 < apart.shifts[1]
    model.shift_newest(apart.shifts)
    after = Evidential().predict(model(logits).logits, model.increments).labels  # type: ignore[attr-defined]
    assert (after == labels).float().mean() > 0.98


def test_without_the_class_of_a_head_the_head_is_gone_too(saved: Path, tmp_path: Path) -> None:
    """Else the file would describe a head that nothing reads, and could not be loaded."""
    model, about = load_segmenter(saved)
    model.remove("c")
    save_segmenter(tmp_path / "less.safetensors", model, about)
    less, _ = load_segmenter(tmp_path / "less.safetensors")
    assert (len(less.heads), len(less.shrinks)) == (0, 1)
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(less.scores(images), model.eval().scores(images))
