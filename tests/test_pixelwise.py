"""Losses in strips equal losses at once: values and gradients of `pixelwise`, and its low memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses import pixelwise as module
from incseg.losses.evidential import distill_foreground, distill_uncertainty, evidential_cross_entropy
from incseg.losses.means import PixelMean, PixelSum, PixelTerm, normalised
from incseg.losses.pixelwise import PixelLoss, bilinear_matrix, pixelwise, row_strips, row_strips_of_all
from incseg.outputs.evidential import dirichlet
from incseg.types import Batch

# low height, low width, height, width
SIZES = [
    (4, 5, 16, 20),  # a whole factor
    (7, 3, 29, 13),  # odd, no whole factor
    (33, 33, 65, 65),
    (1, 1, 8, 9),
    (1, 6, 7, 6),
    (5, 5, 5, 5),  # nothing to do
    (6, 4, 6, 11),
    (9, 8, 4, 3),  # down
    (9, 2, 4, 31),  # down and up
    (3, 3, 1, 1),
]
NUM_OLD, NUM_CLASSES = 2, 5


def evidential_terms(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> dict[str, PixelTerm]:
    """Return a real loss of three terms with different sizes and different pixels to average over; the first is scaled
    already."""
    foreground, background = evidential_cross_entropy(logits, labels)
    terms: dict[str, PixelTerm] = {"new": PixelSum(0.01 * foreground.sum() + 0.02 * background.sum())}
    if teacher is not None:
        student, old = dirichlet(logits[:, :NUM_OLD]), dirichlet(teacher)
        terms["kd_fg"] = PixelMean(distill_foreground(student, old), 7.0, over="all")
        terms["kd_u"] = PixelMean(distill_uncertainty(student, old), each=0.5 + labels.to(logits) / 255)
    return terms


def batch_of(labels: Tensor) -> Batch:
    return Batch(labels, labels, torch.bincount(labels.flatten().long(), minlength=256).float())


def direct(loss: PixelLoss, logits: Tensor, labels: Tensor, teacher: Tensor | None = None) -> dict[str, Tensor]:
    def up(x: Tensor) -> Tensor:
        return F.interpolate(x, labels.shape[-2:], mode="bilinear", align_corners=False)

    return normalised(loss(up(logits), labels, None if teacher is None else up(teacher)), batch_of(labels))


def in_strips(loss: PixelLoss, logits: Tensor, labels: Tensor, teacher: Tensor | None = None) -> dict[str, Tensor]:
    return pixelwise(loss, batch_of(labels), logits, teacher)


def example(size: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits with gradient, labels, and the teacher's logits with fewer channels."""
    low_height, low_width, height, width = size
    generator = torch.Generator().manual_seed(sum(size))
    logits = 3 * torch.randn(2, NUM_CLASSES, low_height, low_width, dtype=dtype, generator=generator)
    teacher = 3 * torch.randn(2, NUM_OLD, low_height, low_width, dtype=dtype, generator=generator)
    labels = torch.randint(0, NUM_CLASSES + 2, (2, height, width), generator=generator).to(torch.uint8)
    labels[labels == NUM_CLASSES + 1] = 255
    return logits.requires_grad_(), labels, teacher


def gradient_of(terms: dict[str, Tensor], logits: Tensor, weights: dict[str, float] | None = None) -> Tensor:
    chosen = weights or dict.fromkeys(terms, 1.0)
    total = torch.stack([weight * terms[name] for name, weight in chosen.items()]).sum()
    return torch.autograd.grad(total, logits)[0]


def set_rows(monkeypatch: pytest.MonkeyPatch, rows: int, labels: Tensor) -> None:
    monkeypatch.setattr(module, "STRIP_ELEMENTS", rows * 2 * NUM_CLASSES * labels.shape[-1])


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_direct_form(size: tuple[int, int, int, int], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, teacher = example(size)
    set_rows(monkeypatch, rows, labels)
    got, wanted = (f(evidential_terms, logits, labels, teacher) for f in (in_strips, direct))
    assert list(got) == list(wanted)
    for name in wanted:
        assert got[name].shape == ()
        assert torch.allclose(got[name], wanted[name], rtol=1e-10)
    assert torch.allclose(gradient_of(got, logits), gradient_of(wanted, logits), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_direct_form_in_float32(size: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, teacher = example(size, torch.float32)
    set_rows(monkeypatch, 2, labels)
    got, wanted = (f(evidential_terms, logits, labels, teacher) for f in (in_strips, direct))
    for name in wanted:
        assert torch.allclose(got[name], wanted[name], rtol=1e-5)
    expected = gradient_of(wanted, logits)
    assert torch.allclose(gradient_of(got, logits), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "weights",
    [{"new": 2.0, "kd_fg": 0.3, "kd_u": -1.0}, {"new": 1.0}, {"kd_u": 1.0}, {"new": 0.0, "kd_fg": 1.0, "kd_u": 1.0}],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_terms_may_be_weighted_or_dropped(
    weights: dict[str, float], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels, teacher = example((7, 3, 29, 13))
    set_rows(monkeypatch, rows, labels)
    got, wanted = (f(evidential_terms, logits, labels, teacher) for f in (in_strips, direct))
    assert torch.allclose(
        gradient_of(got, logits, weights), gradient_of(wanted, logits, weights), rtol=1e-9, atol=1e-12
    )


def test_a_common_factor_scales_the_gradient() -> None:
    """A gradient scaler applies such a factor."""
    logits, labels, teacher = example((4, 5, 16, 20))
    terms = in_strips(evidential_terms, logits, labels, teacher)
    (gradient,) = torch.autograd.grad(torch.stack(list(terms.values())).sum() * 1024, logits)
    assert torch.allclose(gradient, 1024 * gradient_of(direct(evidential_terms, logits, labels, teacher), logits))


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, teacher = example((2, 3, 5, 4))
    set_rows(monkeypatch, 2, labels)

    def terms(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(in_strips(evidential_terms, x, labels, teacher).values())

    assert torch.autograd.gradcheck(terms, logits)


def test_the_gradient_reaches_the_network() -> None:
    logits, labels, _ = example((3, 4, 9, 10))
    weight = torch.randn(NUM_CLASSES, NUM_CLASSES, 1, 1, dtype=torch.float64, requires_grad=True)
    through = [
        torch.autograd.grad(f(evidential_terms, F.conv2d(logits, weight), labels)["new"], weight)[0]
        for f in (in_strips, direct)
    ]
    assert torch.allclose(*through)


def test_teacher_gets_no_gradient() -> None:
    logits, labels, teacher = example((4, 5, 16, 20))
    teacher.requires_grad_()
    sum(in_strips(evidential_terms, logits, labels, teacher).values()).backward()
    assert teacher.grad is None
    assert logits.grad is not None
    alone = in_strips(evidential_terms, logits.detach(), labels, teacher)
    assert not any(term.requires_grad for term in alone.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised(dtype: torch.dtype) -> None:
    logits, labels, teacher = example((7, 3, 29, 13), torch.float32)
    half = logits.detach().to(dtype).requires_grad_()
    got = in_strips(evidential_terms, half, labels, teacher.to(dtype))
    wanted = direct(evidential_terms, half.float(), labels, teacher.to(dtype).float())
    for name in wanted:
        assert got[name].dtype == torch.float32
        assert torch.allclose(got[name], wanted[name], rtol=1e-5)
    gradient = gradient_of(got, half)
    assert gradient.dtype == dtype
    assert torch.allclose(gradient, gradient_of(wanted, half), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("weights", [None, {"new": 2.0, "kd_fg": 0.5, "kd_u": 1.0}])
def test_autocast_changes_nothing(weights: dict[str, float] | None) -> None:
    logits, labels, teacher = example((4, 5, 16, 20), torch.float32)

    def scaled(x: Tensor, y: Tensor, t: Tensor | None) -> dict[str, PixelTerm]:
        mixed = torch.einsum("bchw,cd->bdhw", x, torch.eye(NUM_CLASSES))  # would run in bfloat16
        return evidential_terms(mixed, y, t)

    plain = in_strips(scaled, logits, labels, teacher)
    plain_gradient = gradient_of(plain, logits, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = in_strips(scaled, logits, labels, teacher)
        mixed_gradient = gradient_of(mixed, logits, weights)
    assert all(torch.equal(mixed[name], plain[name]) for name in plain)
    assert torch.equal(mixed_gradient, plain_gradient)


def test_without_gradient_no_graph_is_built() -> None:
    logits, labels, teacher = example((4, 5, 16, 20))
    graphs = []

    def watched(x: Tensor, y: Tensor, t: Tensor | None) -> dict[str, PixelTerm]:
        terms = evidential_terms(x, y, t)
        graphs.append(terms["new"].value.requires_grad)  # type: ignore[union-attr]
        return terms

    with torch.no_grad():
        got = in_strips(watched, logits, labels, teacher)
    detached = in_strips(watched, logits.detach(), labels, teacher)
    wanted = direct(evidential_terms, logits, labels, teacher)
    assert not any(graphs)
    for terms in (got, detached):
        assert all(torch.allclose(terms[name], wanted[name]) and not terms[name].requires_grad for name in wanted)


def test_a_term_that_does_not_depend_on_the_logits_has_no_gradient() -> None:
    logits, labels, _ = example((3, 3, 6, 6))
    terms = in_strips(lambda x, y, t: {"count": PixelMean(y.double(), over="all")}, logits, labels)
    assert float(terms["count"].detach()) == pytest.approx(float(labels.double().mean()))
    assert not gradient_of(terms, logits).any()


@pytest.mark.parametrize("limit", [1, 300, 1000, 5000, 10**9])
def test_no_strip_is_larger_than_allowed(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips cover every row once, in order, and have at most STRIP_ELEMENTS values, or one row."""
    monkeypatch.setattr(module, "STRIP_ELEMENTS", limit)
    logits, _, teacher = example((4, 5, 23, 19))
    labels = torch.arange(23).view(1, 23, 1).expand(2, 23, 19)  # each label tells its row
    seen: list[tuple[list[int], int]] = []

    def watched(x: Tensor, y: Tensor, t: Tensor | None) -> dict[str, PixelTerm]:
        assert t is not None
        assert t.shape == (2, NUM_OLD, *x.shape[2:])
        assert y.shape[1:] == x.shape[2:]
        seen.append((y[0, :, 0].tolist(), x.numel()))
        return {"sum": PixelMean(x.sum())}

    in_strips(watched, logits, labels, teacher)["sum"].backward()
    assert [row for rows, _ in seen for row in rows] == list(range(23))
    assert max(numel for _, numel in seen) <= max(limit, 2 * NUM_CLASSES * 19)
    if limit >= logits.shape[0] * NUM_CLASSES * 19 * 23:
        assert len(seen) == 1


@pytest.mark.parametrize(("factor", "passes"), [(1.0, 1), (0.5, 2)])
def test_the_usual_sum_needs_one_pass_and_unequal_weights_two(factor: float, passes: int) -> None:
    logits, labels, teacher = example((4, 5, 16, 20))
    calls = []

    def watched(x: Tensor, y: Tensor, t: Tensor | None) -> dict[str, PixelTerm]:
        calls.append(1)
        return evidential_terms(x, y, t)

    terms = in_strips(watched, logits, labels, teacher)
    (terms["new"] + terms["kd_fg"] + factor * terms["kd_u"]).backward()
    assert len(calls) == passes


# ---------------------------------------------------------------------------------------------- upsampling


@pytest.mark.parametrize(
    ("size_in", "size_out"), [(1, 1), (1, 7), (4, 16), (7, 29), (33, 513), (5, 5), (9, 4), (3, 1), (32, 512)]
)
def test_bilinear_matrix(size_in: int, size_out: int) -> None:
    matrix = bilinear_matrix(size_in, size_out, torch.device("cpu"), torch.float64)
    assert matrix.shape == (size_out, size_in)
    assert bool((matrix >= 0).all())
    assert torch.allclose(matrix.sum(1), torch.ones(size_out, dtype=torch.float64))
    # A unit vector per column: interpolating the identity along one axis gives the matrix itself.
    identity = torch.eye(size_in, dtype=torch.float64).unsqueeze(1)
    wanted = F.interpolate(identity, size_out, mode="linear", align_corners=False).squeeze(1).T
    assert torch.allclose(matrix, wanted, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("size", SIZES)
def test_row_strips_make_up_the_upsampled_map(
    size: tuple[int, int, int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels, _ = example(size)
    set_rows(monkeypatch, rows, labels)
    strips = list(row_strips(logits.detach(), size[2:]))
    assert [s.start for s, _ in strips] == list(range(0, size[2], rows))
    assert all(strip.shape[2] == s.stop - s.start for s, strip in strips)
    wanted = F.interpolate(logits.detach(), size[2:], mode="bilinear", align_corners=False)
    assert torch.allclose(torch.cat([strip for _, strip in strips], 2), wanted, atol=1e-12)


def test_wide_maps_are_made_in_blocks_of_columns() -> None:
    logits = torch.randn(1, 2, 3, 40, dtype=torch.float64)
    strips = torch.cat([strip for _, strip in row_strips(logits, (7, 1500))], 2)
    assert torch.allclose(strips, F.interpolate(logits, (7, 1500), mode="bilinear"), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_row_strips_are_at_least_single_precision(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 2, 3, 3).to(dtype)
    strip = torch.cat([s for _, s in row_strips(logits, (7, 7))], 2)
    assert strip.dtype == torch.float32
    assert torch.allclose(strip, F.interpolate(logits.float(), (7, 7), mode="bilinear"), atol=1e-6)


def test_matrices_made_in_inference_mode_serve_training_too() -> None:
    """They are cached: training after a prediction of the same size gets the same tensors."""
    size: tuple[int, int, int, int] = (3, 5, 17, 11)
    logits, labels, teacher = example(size)
    bilinear_matrix.cache_clear()
    with torch.inference_mode():
        list(row_strips(logits, size[2:]))
    differentiable: list[Callable[[], Tensor]] = [
        lambda: gradient_of(in_strips(evidential_terms, logits, labels, teacher), logits),
        lambda: torch.autograd.grad(sum(s.sum() for _, s in row_strips(logits, size[2:])), logits)[0],
    ]
    for gradient in differentiable:
        assert bool(gradient().isfinite().all())


@pytest.mark.parametrize("size", [(360, 480), (481, 641), (97, 1203)])
def test_strips_of_two_models_are_the_same_rows(size: tuple[int, int]) -> None:
    """A model with more classes has thinner strips. Side by side both have these, with the values of their own."""
    few, many = torch.randn(4, 6, 23, 30), torch.randn(4, 8, 23, 30)
    assert [rows for rows, _ in row_strips(few, size)] != [rows for rows, _ in row_strips(many, size)]
    together = list(row_strips_of_all([few, many], size))
    assert together[-1][0].stop == size[0]
    for index, logits in enumerate((few, many)):
        joined = torch.cat([strips[index] for _, strips in together], 2)
        assert torch.allclose(joined, F.interpolate(logits, size, mode="bilinear"), atol=1e-5)
