"""Background as a union (MiB): loops over pixels, the limits where it is an ordinary class, and the initialisation from
it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.background import (
    background_cross_entropy_sum,
    background_distillation_sum,
    fold_new_into_background,
)
from incseg.losses.distillation import output_distillation_sum
from incseg.losses.means import PixelMean, PixelTerm
from incseg.losses.pixelwise import pixelwise
from incseg.losses.softmax import cross_entropy_sum
from incseg.models.classifiers import initialise_from_background
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.types import IGNORE, Batch, Increment

NUM_OLD, NUM_NEW = 3, 2  # background, two old classes; two new ones


def background_cross_entropy(logits: Tensor, labels: Tensor, num_old: int) -> Tensor:
    """Return the mean over the pixels that are not ignored."""
    return background_cross_entropy_sum(logits, labels, num_old) / (labels != IGNORE).sum().clamp(min=1)


def background_distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over all pixels."""
    return background_distillation_sum(logits, teacher) / teacher[:, 0].numel()


def output_distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over all pixels."""
    return output_distillation_sum(logits, teacher) / teacher[:, 0].numel()


def example(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels of every kind (also old foreground) and the teacher's logits."""
    generator = torch.Generator().manual_seed(len(shape))
    shape = shape or (2, 3, 4)
    batch, *rest = shape
    logits = 2 * torch.randn(batch, NUM_OLD + NUM_NEW, *rest, dtype=torch.float64, generator=generator)
    teacher = 2 * torch.randn(batch, NUM_OLD, *rest, dtype=torch.float64, generator=generator)
    kinds = torch.tensor([*range(NUM_OLD + NUM_NEW), IGNORE], dtype=torch.uint8)
    labels = kinds[torch.randint(len(kinds), shape, generator=generator)]
    return logits, labels, teacher


def pixels(logits: Tensor) -> list[list[float]]:
    """Yield the scores of one pixel after the other."""
    return logits.movedim(1, -1).flatten(0, -2).tolist()


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(z) for z in scores]
    return [w / sum(weights) for w in weights]


def naive_cross_entropy(logits: Tensor, labels: Tensor, num_old: int) -> float:
    costs = []
    for scores, label in zip(pixels(logits), labels.flatten().tolist(), strict=True):
        p = softmax(scores)
        if label == 0:
            costs.append(-math.log(sum(p[:num_old])))
        elif label != IGNORE:
            costs.append(-math.log(p[label]))
    return sum(costs) / len(costs)


def naive_distillation(logits: Tensor, teacher: Tensor) -> float:
    total, rows = 0.0, pixels(teacher)
    for scores, old_scores in zip(pixels(logits), rows, strict=True):
        p, q = softmax(scores), softmax(old_scores)
        background_or_new = p[0] + sum(p[len(q) :])
        kept = [background_or_new, *p[1 : len(q)]]
        total -= sum(q_c * math.log(p_c) for q_c, p_c in zip(q, kept, strict=True)) / len(q)
    return total / len(rows)


@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (2, 7)], ids=str)
@pytest.mark.parametrize("num_old", [1, 3, 5])
def test_cross_entropy_is_the_loop(shape: tuple[int, ...], num_old: int) -> None:
    logits, labels, _ = example(*shape)
    assert float(background_cross_entropy(logits, labels, num_old)) == pytest.approx(
        naive_cross_entropy(logits, labels, num_old), rel=1e-12
    )


@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (2, 7)], ids=str)
def test_distillation_is_the_loop(shape: tuple[int, ...]) -> None:
    logits, _, teacher = example(*shape)
    assert float(background_distillation(logits, teacher)) == pytest.approx(
        naive_distillation(logits, teacher), rel=1e-12
    )


def test_cross_entropy_where_only_background_is_old() -> None:
    """Values and gradients are bit-identical, so a base trained with either loss serves both."""
    logits, labels, _ = example()
    results = []
    for loss in (background_cross_entropy_sum(logits.requires_grad_(), labels, 1), cross_entropy_sum(logits, labels)):
        results.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-15)
    valid = labels != IGNORE
    expected = F.cross_entropy(logits.movedim(1, -1)[valid], labels[valid].long())
    torch.testing.assert_close(background_cross_entropy(logits, labels, 1), expected)


def test_cross_entropy_where_everything_is_old() -> None:
    """A background pixel then has no effect."""
    logits, labels, _ = example()
    nothing = background_cross_entropy(logits, torch.zeros_like(labels), NUM_OLD + NUM_NEW)
    assert float(nothing) == pytest.approx(0, abs=1e-12)


def test_an_old_foreground_label_is_scored_by_its_own_class() -> None:
    """It counts neither as background nor as ignored: cross-entropy, whichever classes are old."""
    logits, labels, _ = example()
    old = torch.full_like(labels, 2)
    torch.testing.assert_close(background_cross_entropy(logits, old, NUM_OLD), F.cross_entropy(logits, old.long()))


def test_a_label_beyond_the_outputs_is_an_error() -> None:
    logits, labels, _ = example()
    with pytest.raises(IndexError, match="out of bounds"):
        background_cross_entropy(logits, torch.full_like(labels, NUM_OLD + NUM_NEW), NUM_OLD)


@pytest.mark.parametrize("num_old", [0, 6])
def test_more_old_outputs_than_there_are(num_old: int) -> None:
    logits, labels, _ = example()
    with pytest.raises(ValueError, match=f"num_old is {num_old}; .* 5 outputs"):
        background_cross_entropy(logits, labels, num_old)


def test_void_alone_has_loss_zero() -> None:
    logits, labels, _ = example()
    loss = background_cross_entropy(logits.requires_grad_(), torch.full_like(labels, IGNORE), NUM_OLD)
    assert float(loss.detach()) == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


def test_background_pixels_lower_new_classes_and_keep_the_old_in_proportion() -> None:
    logits, labels, _ = example()
    loss = background_cross_entropy(logits.requires_grad_(), torch.zeros_like(labels), NUM_OLD)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[:, NUM_OLD:] > 0).all()
    share = gradient[:, :NUM_OLD] / logits.detach()[:, :NUM_OLD].softmax(1)
    torch.testing.assert_close(share, share[:, :1].expand_as(share))


def test_distillation_where_nothing_is_new() -> None:
    logits, _, teacher = example()
    old = logits[:, :NUM_OLD]
    assert torch.equal(fold_new_into_background(old, NUM_OLD), old)
    assert torch.equal(background_distillation(old, teacher), output_distillation(old, teacher))


def test_distillation_does_not_care_how_background_is_shared_with_the_new() -> None:
    logits, _, teacher = example()
    moved = logits.clone()
    moved[:, 0], moved[:, NUM_OLD] = logits[:, NUM_OLD], logits[:, 0]
    torch.testing.assert_close(background_distillation(moved, teacher), background_distillation(logits, teacher))
    assert not torch.isclose(output_distillation(moved, teacher), output_distillation(logits, teacher))


def test_distillation_is_minimal_where_the_folded_student_is_the_teacher() -> None:
    _, _, teacher = example()
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    split = teacher[:, :1] + shares.view(1, 3, 1, 1)
    student = torch.cat([split[:, :1], teacher[:, 1:], split[:, 1:]], dim=1).requires_grad_()
    loss = background_distillation(student, teacher)
    q = teacher.softmax(1)
    torch.testing.assert_close(loss.detach(), -(q * q.log()).sum(1).mean() / NUM_OLD)
    assert torch.autograd.grad(loss, student)[0].abs().max() < 1e-12


def test_folded_scores_are_those_of_the_union() -> None:
    logits, _, _ = example()
    p, folded = logits.softmax(1), fold_new_into_background(logits, NUM_OLD).softmax(1)
    torch.testing.assert_close(folded[:, 0], p[:, 0] + p[:, NUM_OLD:].sum(1))
    torch.testing.assert_close(folded[:, 1:], p[:, 1:NUM_OLD])


def test_gradcheck() -> None:
    logits, labels, teacher = example(2, 2, 3)
    assert torch.autograd.gradcheck(
        lambda z: background_cross_entropy(z, labels, NUM_OLD), logits.clone().requires_grad_()
    )
    assert torch.autograd.gradcheck(lambda z: background_distillation(z, teacher), logits.clone().requires_grad_())


def test_far_scores_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 5e3, -5e3], [-1e4, -1e4, -1e4, 1e4, 0.0]]).requires_grad_()
    teacher = torch.tensor([[-1e4, 1e4, 0.0], [1e4, 0.0, -1e4]])
    for loss in (
        background_cross_entropy(logits, torch.tensor([0, 0]), NUM_OLD),
        background_distillation(logits, teacher),
    ):
        assert loss.isfinite()
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_strips_make_the_mean() -> None:
    """The sums, strip by strip at the labels' resolution, equal the means over the upsampled logits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, NUM_OLD + NUM_NEW, 3, 3, dtype=torch.float64, generator=generator)
    teacher = torch.randn(2, NUM_OLD, 3, 3, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 3, 4, IGNORE])[torch.randint(4, (2, 7, 8), generator=generator)]

    def strip(z: Tensor, y: Tensor, old: Tensor | None) -> dict[str, PixelTerm]:
        assert old is not None
        return {
            "ce": PixelMean(background_cross_entropy_sum(z, y, NUM_OLD)),
            "kd": PixelMean(background_distillation_sum(z, old), over="all"),
        }

    batch = Batch(logits, labels, torch.bincount(labels.flatten(), minlength=256).double())
    terms = pixelwise(strip, batch, logits, teacher)
    wide, wide_teacher = (F.interpolate(x, (7, 8), mode="bilinear") for x in (logits, teacher))
    torch.testing.assert_close(terms["ce"], background_cross_entropy(wide, labels, NUM_OLD))
    torch.testing.assert_close(terms["kd"], background_distillation(wide, wide_teacher))


# --- the start from background -------------------------------------------------------------------------------


def grown_model(num_new: int) -> tuple[Segmenter, Tensor, Tensor]:
    """Return a model of two classes that has just grown, and its outputs before and after the initialisation."""
    torch.manual_seed(0)
    model = Segmenter(
        ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 1, 1), norm="group"), background_output=True
    ).double()
    model.grow(Increment(("ant", "bee"), (1, 2)))
    torch.nn.init.normal_(model.classifiers[0].get_parameter("weight"))
    torch.nn.init.normal_(model.classifiers[0].get_parameter("bias"))
    image = torch.randn(1, 3, 24, 24, dtype=torch.float64)
    with torch.no_grad():
        before = model(image).logits.softmax(1)
    model.grow(Increment(tuple("cdefg"[:num_new]), tuple(range(3, 3 + num_new))))
    initialise_from_background(model)
    with torch.no_grad():
        return model, before, model(image).logits.softmax(1)


@pytest.mark.parametrize("num_new", [1, 5])
def test_the_start_splits_background_evenly_and_leaves_the_old(num_new: int) -> None:
    _, before, after = grown_model(num_new)
    assert after.shape[1] == 3 + num_new
    torch.testing.assert_close(after[:, 1:3], before[:, 1:3])
    for channel in (0, *range(3, 3 + num_new)):
        torch.testing.assert_close(after[:, channel], before[:, 0] / (num_new + 1))


def test_the_start_leaves_a_background_alone_that_may_not_move() -> None:
    model, _, _ = grown_model(2)
    first = model.classifiers[0]
    kept = first.get_parameter("bias").detach().clone()
    model.grow(Increment(("h", "i", "j"), (6, 7, 8)))
    initialise_from_background(model, move_background=False)
    assert torch.equal(first.get_parameter("bias"), kept)
    torch.testing.assert_close(model.classifiers[-1].get_parameter("bias"), (kept[0] - math.log(4)).expand(3))
    assert torch.equal(
        model.classifiers[-1].get_parameter("weight"), first.get_parameter("weight")[:1].expand(3, 8, 1, 1)
    )


def test_the_start_can_still_be_trained() -> None:
    model, _, _ = grown_model(2)
    logits = model(torch.randn(1, 3, 24, 24, dtype=torch.float64)).logits
    background_cross_entropy(logits, torch.full(logits[:, 0].shape, 3), 3).backward()
    shown, absent = model.classifiers[-1].get_parameter("bias").grad.tolist()
    assert shown < 0 < absent, "equal at the start, the two new classes part at the first update"
