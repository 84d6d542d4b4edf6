"""Transforms: image and mask agree, randomness comes from the generator, and the usual conventions."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from incseg.data.transforms import (
    ASPECT_RATIOS,
    TestTransform,
    TrainTransform,
    Transform,
    WholeTransform,
    frame_for,
    normalise,
)
from incseg.types import UserError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def scene(seed: int, width: int, height: int) -> np.ndarray:
    """Draw a binary mask of a few rectangles in cells of eight pixels, so that nearest neighbour skips nothing."""
    rng = generator(seed)
    rows, columns = height // 8 + 1, width // 8 + 1
    cells = np.zeros((rows, columns), dtype=np.uint8)
    for _ in range(4):
        x, y = rng.integers(columns), rng.integers(rows)
        cells[y : y + 1 + rng.integers(rows // 2), x : x + 1 + rng.integers(columns // 2)] ^= 1
    return np.kron(cells, np.ones((8, 8), dtype=np.uint8))[:height, :width]


def picture(mask: np.ndarray) -> Image.Image:
    """Return an image that shows its own mask."""
    return Image.fromarray(np.repeat(mask[..., None] * 255, 3, axis=2).astype(np.uint8))


def away_from_edges(labels: np.ndarray, reach: int) -> np.ndarray:
    """Return the pixels whose neighbours up to `reach` all have the same label."""
    padded = np.pad(labels, reach, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * reach + 1, 2 * reach + 1))
    return windows.max(axis=(2, 3)) == windows.min(axis=(2, 3))


def assert_aligned(image: torch.Tensor, labels: torch.Tensor) -> None:
    """Assert that image and mask agree. The mask changes in the middle between two labels, so one pixel of tolerance
    suffices."""
    decoded = (image[0] >= 0.5).numpy()
    inner = away_from_edges(labels.numpy(), reach=1)
    assert inner.mean() > 0.2
    # Where four cells meet crosswise, bilinear may differ at a pixel; a shift differs along every edge.
    wrong = (decoded[inner] != labels.numpy().astype(bool)[inner]).mean()
    assert wrong < 0.003, f"{wrong:.2%} of the pixels away from edges disagree"


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(40, 120),
    height=st.integers(40, 120),
    crop=st.integers(32, 140),
)
def test_train_keeps_image_and_mask_together(seed: int, width: int, height: int, crop: int) -> None:
    mask = scene(seed, width, height)
    image, labels = TrainTransform(crop, **PLAIN)(picture(mask), mask, generator(seed))
    assert image.shape == (3, crop, crop)
    assert labels.shape == (crop, crop)
    assert (image.dtype, labels.dtype) == (torch.float32, torch.uint8)
    assert_aligned(image, labels)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(40, 120),
    height=st.integers(40, 120),
    size=st.integers(32, 140),
)
def test_test_keeps_image_and_mask_together(seed: int, width: int, height: int, size: int) -> None:
    mask = scene(seed, width, height)
    image, labels = TestTransform(size, **PLAIN)(picture(mask), mask)
    assert image.shape == (3, size, size)
    assert_aligned(image, labels)


def test_a_shift_by_two_pixels_would_be_noticed() -> None:
    mask = scene(3, 90, 70)
    image, labels = TestTransform(None, **PLAIN)(picture(mask), mask)
    assert_aligned(image, labels)
    with pytest.raises(AssertionError):
        assert_aligned(image, torch.roll(labels, 2, dims=1))


@pytest.mark.parametrize("flip", [False, True])
def test_without_scaling_pixels_are_exact(flip: bool) -> None:
    mask = generator().integers(0, 2, (48, 48), dtype=np.uint8)
    transform = TrainTransform(48, **PLAIN, scale=(1.0, 1.0), flip=flip)
    seen = set()
    for seed in range(60):
        # A share of exactly one fits only as a square; every other draw ends in the whole, centred image.
        image, labels = transform(picture(mask), mask, generator(seed))
        np.testing.assert_array_equal(image[0].numpy(), labels.numpy())
        upright = np.array_equal(labels, mask)
        assert upright or np.array_equal(labels, mask[:, ::-1])
        seen.add(upright)
    assert seen == ({True, False} if flip else {True})


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_flip_mirrors_both(seed: int) -> None:
    mask = scene(seed, 60, 50)
    flipped = TrainTransform(40, **PLAIN)(picture(mask), mask, generator(seed))
    upright = TrainTransform(40, **PLAIN, flip=False)(picture(mask), mask, generator(seed))
    same = [torch.equal(a, b) for a, b in zip(flipped, upright, strict=True)]
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, upright, strict=True)]
    assert all(same) or all(mirrored)


def test_flip_is_as_likely_as_not() -> None:
    mask = np.zeros((8, 8), dtype=np.uint8)
    mask[:, 0] = 1
    transform, rng = TrainTransform(8, **PLAIN, scale=(1.0, 1.0)), generator()
    flips = sum(int(transform(picture(mask), mask, rng)[1][0, 7]) for _ in range(400))
    assert 150 < flips < 250


def test_the_same_generator_gives_the_same_sample() -> None:
    mask = scene(1, 100, 80)
    transform = TrainTransform(64)
    first, again, other = (transform(picture(mask), mask, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (400, 400), (900, 100), (100, 900)])
@pytest.mark.parametrize("scale", [(0.5, 2.0), (0.8, 1.0), (0.1, 0.3)])
def test_crops_fit_with_the_asked_area_and_ratio(width: int, height: int, scale: tuple[float, float]) -> None:
    transform, rng = TrainTransform(8, scale=scale), generator()
    whole = 0
    for _ in range(300):
        left, top, w, h = transform._draw_crop(width, height, rng)
        assert 0 <= left <= left + w <= width
        assert 0 <= top <= top + h <= height
        ratio = min(max(width / height, ASPECT_RATIOS[0]), ASPECT_RATIOS[1])
        fallback = (w, h) == (min(width, round(height * ratio)), min(height, round(width / ratio)))
        whole += fallback
        if not fallback:
            assert ASPECT_RATIOS[0] * 0.97 <= w / h <= ASPECT_RATIOS[1] * 1.03
            assert scale[0] * 0.97 <= w * h / (width * height) <= min(1, scale[1] * 1.03)
    assert (whole < 60) or width / height in (9, 1 / 9)


def test_the_field_s_scale_covers_half_to_all() -> None:
    transform, rng = TrainTransform(8), generator()
    areas = [math.prod(transform._draw_crop(500, 375, rng)[2:]) / (500 * 375) for _ in range(1000)]
    assert 0.49 < min(areas) < 0.52
    assert 0.9 < max(areas) <= 1


def test_tiny_images_can_be_cropped() -> None:
    for size in ((1, 1), (1, 50), (50, 1)):
        mask = np.ones(size[::-1], dtype=np.uint8)
        image, labels = TrainTransform(16, **PLAIN)(picture(mask), mask, generator())
        assert image.shape == (3, 16, 16)
        assert bool((labels == 1).all())


def test_test_resizes_the_shorter_side_and_cuts_the_centre() -> None:
    mask = np.zeros((40, 100), dtype=np.uint8)
    mask[:, 30:70] = 1
    image, labels = TestTransform(80, **PLAIN)(picture(mask), mask)
    assert labels.shape == (80, 80)
    assert bool(labels.bool().all())  # 40×100 became 80×200, of which columns 60 to 140 are left
    _, wider = TestTransform(20, **PLAIN)(picture(mask), mask)
    assert bool(wider.bool().all())
    # Outside the crop is black: bilinear halves let a quarter of it into the outermost columns.
    torch.testing.assert_close(image[..., [0, -1]], torch.full((3, 80, 2), 0.75), atol=2e-3, rtol=0)
    assert bool((image[..., 1:-1] == 1).all())


def test_test_without_size_changes_nothing() -> None:
    mask = generator().integers(0, 2, (31, 47), dtype=np.uint8)
    image, labels = TestTransform(None, **PLAIN)(picture(mask), mask)
    np.testing.assert_array_equal(labels, mask)
    np.testing.assert_array_equal(image[2], mask)


@pytest.mark.parametrize("transform", [TrainTransform(16), TestTransform(16), TestTransform(None)])
def test_without_a_mask_all_is_void(transform: Transform) -> None:
    image, labels = transform(Image.new("RGB", (40, 30)), None, generator())
    assert labels.shape == image.shape[1:]
    assert bool((labels == 255).all())


def test_labels_are_never_mixed() -> None:
    mask = generator().choice(np.array([0, 7, 200, 255], dtype=np.uint8), (50, 70))
    for transform in (TrainTransform(64), TestTransform(33), TestTransform(100)):
        _, labels = transform(Image.new("RGB", (70, 50)), mask, generator())
        assert set(labels.unique().tolist()) == {0, 7, 200, 255}


def test_normalise_is_the_written_formula() -> None:
    pixels = generator().integers(0, 256, (5, 4, 3), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    expected = (pixels / 255 - np.array(mean)) / np.array(std)
    result = normalise(Image.fromarray(pixels), mean, std)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), torch.from_numpy(expected).permute(2, 0, 1), atol=1e-6, rtol=0)


def test_impossible_sizes_and_scales_are_refused() -> None:
    for build in (lambda: TrainTransform(0), lambda: TestTransform(-1)):
        with pytest.raises(UserError, match="is not a size"):
            build()
    for scale in ((0.0, 1.0), (0.9, 0.5), (1.5, 2.0), (float("nan"), 1.0)):
        with pytest.raises(UserError, match="not a range of area shares"):
            TrainTransform(8, scale=scale)


def test_a_long_strip_is_not_enlarged_before_it_is_cut() -> None:
    """20000 × 10 at size 320 would be an image of 614 MB; its middle is the same."""
    columns = np.arange(20000, dtype=np.uint32) // 100 % 250
    strip = np.broadcast_to(columns.astype(np.uint8), (10, 20000))
    image = Image.fromarray(np.stack([strip] * 3, axis=-1))
    tracemalloc.start()
    pixels, labels = TestTransform(320)(image, np.ascontiguousarray(strip))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pixels.shape == (3, 320, 320)
    assert set(labels.unique().tolist()) == {int(columns[9995]), int(columns[10000])}
    assert peak < 50e6


@pytest.mark.parametrize("size", [(480, 640), (641, 481), (97, 1203), (1203, 97), (37, 53), (1, 1), (5, 300)])
def test_whole_images_lose_nothing(size: tuple[int, int]) -> None:
    """Every corner of the image is in the frame, in its place; the rest is void and has the mean colour."""
    width, height = size
    mask = np.full((height, width), 5, dtype=np.uint8)
    mask[0, 0] = mask[-1, 0] = mask[0, -1] = mask[-1, -1] = 7
    image = Image.new("RGB", size, (200, 100, 50))
    pixels, labels = WholeTransform(64, (96, 128), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0))(image, mask)
    assert pixels.shape == (3, 96, 128)
    assert labels.shape == (96, 128)
    shown = labels != 255
    rows, columns = shown.any(1).nonzero().flatten(), shown.any(0).nonzero().flatten()
    assert shown[: rows[-1] + 1, : columns[-1] + 1].all()
    assert len(rows) <= 96
    assert len(columns) <= 128
    assert min(len(rows), len(columns)) <= 64
    if min(size) >= 64:  # each corner survives nearest neighbour where nothing is enlarged
        assert len(columns) / len(rows) == pytest.approx(width / height, rel=0.1)
    assert (pixels[:, ~shown] == 0).all()
    assert pixels[:, 0, 0].tolist() == pytest.approx([200 / 255 - 0.5, 100 / 255 - 0.5, 50 / 255 - 0.5], abs=0.01)


def test_the_frame_suits_most_images() -> None:
    assert frame_for([(256, 384)] * 10, 256) == (384, 256)
    assert frame_for([(400, 300)] * 10, 224) == (224, 320)  # 298.7 up to a multiple of 32
    assert frame_for([(256, 384), (384, 256)] * 10, 256) == (384, 384)
    assert frame_for([(300, 300)] * 99 + [(9000, 10)], 64) == (64, 64)  # one panorama is shrunk
    assert frame_for([(9000, 10)] * 9, 64) == (64, 160)
    assert frame_for([], 96) == (96, 96)
