"""Per-pixel losses at full resolution, without the upsampled logits in memory.

The network's logits have a sixteenth of the image's size, the labels have its full size. The upsampled logits and
autograd's copies of them would take most of the memory: 3.6 GB for two images with 150 classes at 512². Bilinear
upsampling is two small matrix products, A_h · z · A_wᵀ, so a strip of rows can be computed alone. The loss is computed
strip by strip, and the gradient of each strip is added to the gradient of the small logits at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from incseg.losses.means import PixelTerm
from incseg.types import Batch

STRIP_ELEMENTS = 1 << 20
"""Upsampled values per strip: few enough for the processor's cache, and enough for efficient operations."""
_BLOCK = 512
"""Most rows or columns that are upsampled at once."""

PixelLoss = Callable[[Tensor, Tensor, "Tensor | None"], Mapping[str, PixelTerm]]
"""(logits, labels, teacher's logits) of a strip of rows → named terms of its pixels. Only the logits get a gradient,
not the parameters that the function uses."""


@lru_cache(maxsize=64)
def bilinear_matrix(size_in: int, size_out: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the (size_out, size_in) weights of bilinear interpolation along one axis, align_corners=False."""
    with torch.inference_mode(False):  # it is cached, and training cannot use tensors made in inference mode
        matrix = _interpolation(*_neighbours(size_in, size_out), slice(0, size_in))
        return matrix.to(device=device, dtype=dtype)


def _neighbours(size_in: int, size_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two inputs between which each output is, and its distance from the first, 0 to 1."""
    position = ((torch.arange(size_out, dtype=torch.float64) + 0.5) * (size_in / size_out) - 0.5).clamp(min=0)
    low = position.floor().long().clamp(max=size_in - 1)
    return low, (low + 1).clamp(max=size_in - 1), position - low


def _interpolation(low: Tensor, high: Tensor, fraction: Tensor, reach: slice) -> Tensor:
    matrix = torch.zeros(len(low), reach.stop - reach.start, dtype=torch.float64)
    rows = torch.arange(len(low))
    matrix[rows, low] += 1 - fraction
    matrix[rows, high] += fraction
    return matrix


class _Upsampler:
    """Bilinear upsampling of (B, C, h, w) to `size` by strips of rows, and its transpose for the gradient."""

    def __init__(self, logits: Tensor, size: tuple[int, int]) -> None:
        low_height, low_width = logits.shape[-2:]
        self.columns = bilinear_matrix(low_width, size[1], logits.device, logits.dtype)
        self.rows = bilinear_matrix(low_height, size[0], logits.device, logits.dtype)
        self.scale = low_height / size[0]
        self.wide = logits @ self.columns.T  # all columns of the result, but still few rows

    def _reach(self, start: int, stop: int) -> slice:
        """Return the low-resolution rows that the output rows from start to stop depend on."""
        first = max(0, int((start + 0.5) * self.scale - 0.5))
        last = int(max(0.0, (stop - 0.5) * self.scale - 0.5)) + 2
        return slice(first, min(last, self.rows.shape[1]))

    def strip(self, start: int, stop: int) -> Tensor:
        reach = self._reach(start, stop)
        return self.rows[start:stop, reach] @ self.wide[..., reach, :]

    def add_gradient(self, wide_gradient: Tensor, strip_gradient: Tensor, start: int, stop: int) -> None:
        reach = self._reach(start, stop)
        wide_gradient[..., reach, :] += self.rows[start:stop, reach].T @ strip_gradient

    def finish_gradient(self, wide_gradient: Tensor) -> Tensor:
        return wide_gradient @ self.columns


def _rows_per_strip(logits: Tensor, width: int) -> int:
    return max(1, STRIP_ELEMENTS // (logits.shape[0] * logits.shape[1] * width))


def row_strips(logits: Tensor, size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits upsampled to `size`, strip by strip: (rows, (B, C, rows, W)). For inference.

    The height of a strip depends on the number of channels. For several models side by side, use `row_strips_of_all`.
    """
    return _row_strips(logits, size, _rows_per_strip(logits, size[1]))


def row_strips_of_all(logits: Sequence[Tensor], size: tuple[int, int]) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the same strips of rows of several tensors: (rows, [(B, C, rows, W) of each])."""
    rows = min(_rows_per_strip(part, size[1]) for part in logits)
    for strips in zip(*(_row_strips(part, size, rows) for part in logits), strict=True):
        yield strips[0][0], [strip for _, strip in strips]


def _row_strips(logits: Tensor, size: tuple[int, int], rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield strips of at most `rows` rows.

    Columns are computed in blocks, so that time and memory are proportional to the area of the image, however wide it
    is. With many classes strips are thin, and several of them depend on the same rows of logits. The columns of these
    rows are computed only once.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    column_blocks = list(_bilinear_blocks(logits.shape[-1], size[1], _BLOCK, logits))
    rows = min(_BLOCK, rows)  # the same for the height
    made: slice | None = None
    for strip, reach, weights in _bilinear_blocks(logits.shape[-2], size[0], rows, logits):
        if reach != made:
            low, made = logits[..., reach, :], reach
            wide = torch.cat([low[..., columns] @ across.T for _, columns, across in column_blocks], dim=-1)
        yield strip, weights @ wide


def _bilinear_blocks(size_in: int, size_out: int, block: int, like: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield `bilinear_matrix` in blocks: (outputs, the inputs that they depend on, (outputs, inputs) weights)."""
    low, high, fraction = _neighbours(size_in, size_out)
    for start in range(0, size_out, block):
        outputs = slice(start, min(start + block, size_out))
        reach = slice(int(low[start]), int(high[outputs.stop - 1]) + 1)
        weights = _interpolation(low[outputs] - reach.start, high[outputs] - reach.start, fraction[outputs], reach)
        yield outputs, reach, weights.to(like)


class _StripwiseLoss(torch.autograd.Function):
    """The terms of a pixel loss as one vector. The forward pass also computes the gradient of their sum."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: Tensor | None,
        labels: Tensor,
        loss: PixelLoss,
        batch: Batch,
        names: list[str],
    ) -> Tensor:
        terms, gradient = _run_strips(logits, teacher, labels, loss, batch, names, None, ctx.needs_input_grad[0])
        ctx.save_for_backward(logits, teacher, labels, gradient)
        ctx.loss, ctx.batch = loss, batch
        return terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, labels, gradient = ctx.saved_tensors
        if bool((upstream == upstream[0]).all()):  # the terms were summed, as the trainer does
            return gradient * upstream[0], None, None, None, None, None
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            _, gradient = _run_strips(logits, teacher, labels, ctx.loss, ctx.batch, [], upstream, True)
        return gradient, None, None, None, None, None


def _run_strips(
    logits: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    loss: PixelLoss,
    batch: Batch,
    names: list[str],
    weights: Tensor | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the terms, summed over strips, and the gradient of their sum, or of their sum with these weights."""
    height, width = labels.shape[-2:]
    student_up = _Upsampler(logits, (height, width))
    teacher_up = _Upsampler(teacher, (height, width)) if teacher is not None else None
    wide_gradient = torch.zeros_like(student_up.wide) if with_gradient else None
    rows = _rows_per_strip(logits, width)

    last_gradient: list[Tensor] = []

    def terms_of(start: int, stop: int) -> Tensor:
        """Return the terms of a strip.

        Free all temporaries of the strip except its gradient, so that the next strip reuses their memory. If nothing
        stayed allocated, the allocator would return memory to the system and request it again for each strip.
        """
        teacher_strip = teacher_up.strip(start, stop) if teacher_up is not None else None
        strip = student_up.strip(start, stop).requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            named = loss(strip, labels[:, start:stop], teacher_strip)
            terms = torch.stack([term.scalar(batch, in_strips=True) for term in named.values()])
        names[:] = named
        if wide_gradient is not None and terms.requires_grad:
            (gradient,) = torch.autograd.grad(terms, strip, torch.ones_like(terms) if weights is None else weights)
            student_up.add_gradient(wide_gradient, gradient, start, stop)
            last_gradient[:] = [gradient]
        return terms.detach()

    sums = terms_of(0, min(rows, height))
    for start in range(rows, height, rows):
        sums = sums + terms_of(start, min(start + rows, height))
    return sums, student_up.finish_gradient(wide_gradient) if wide_gradient is not None else None


def pixelwise(
    loss: PixelLoss,
    batch: Batch,
    logits: Tensor,
    teacher_logits: Tensor | None = None,
    labels: Tensor | None = None,
) -> dict[str, Tensor]:
    """Upsample to the labels' size, apply `loss` to every pixel and normalise its terms, strip by strip.

    logits (B, C, h, w), teacher_logits (B, C', h, w) or None, labels (B, H, W), by default those of the batch. Return
    the named terms as scalars with gradient, equal to those of `loss` for `F.interpolate(logits, (H, W),
    mode="bilinear")`. Half precision is converted to float32 first. The teacher gets no gradient.
    """
    names: list[str] = []
    teacher = (
        teacher_logits.detach().to(torch.promote_types(teacher_logits.dtype, torch.float32))
        if teacher_logits is not None
        else None
    )
    with torch.autocast(logits.device.type, enabled=False):
        student = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not torch.is_grad_enabled():
            student = student.detach()  # else needs_input_grad is true even without a gradient
        terms = _StripwiseLoss.apply(student, teacher, batch.labels if labels is None else labels, loss, batch, names)
    return dict(zip(names, terms.unbind(), strict=True))
