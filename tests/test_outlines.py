"""Polygons to pixels and back: exact, against a naive test of every pixel's centre, and for hostile polygons."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from incseg.data.outlines import Ring, area, fill, fill_all, outlines, pixels_of_runs, runs_of_text


def filled(rings: list[Ring], size: tuple[int, int]) -> np.ndarray:
    """Return the number of polygons that cover each pixel."""
    found = np.zeros(size[::-1], dtype=int)
    for ring in rings:
        left, top, pixels = fill(ring, *size)
        found[top : top + pixels.shape[0], left : left + pixels.shape[1]] += pixels
    return found


def naive(ring: Ring, size: tuple[int, int]) -> np.ndarray:
    """Test every pixel alone: a ray from its centre to the left crosses the outline an odd number of times."""
    found = np.zeros(size[::-1], dtype=bool)
    for row, column in np.ndindex(found.shape):
        x, y = column + 0.5, row + 0.5
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            if min(y0, y1) <= y < max(y0, y1) and x0 + (y - y0) * (x1 - x0) / (y1 - y0) <= x:
                found[row, column] ^= True
    return found


@given(arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_outlines_give_back_exactly_the_same_pixels(pixels: np.ndarray) -> None:
    """Parts that touch at corners, holes, parts in holes: each pixel is in one polygon or in none."""
    rings = outlines(pixels)
    assert np.array_equal(filled(rings, pixels.shape[::-1]), pixels.astype(int))
    assert sum(area(ring) for ring in rings) == pixels.sum()


@given(arrays(np.float64, st.tuples(st.integers(3, 8), st.just(2)), elements=st.integers(-8, 40).map(lambda i: i / 4)))
def test_fill_is_the_even_odd_rule_at_centres(ring: Ring) -> None:
    assert np.array_equal(filled([ring], (8, 7)) > 0, naive(ring, (8, 7)))


def test_a_line_there_and_back_cancels_in_any_direction() -> None:
    """Ultralytics joins the parts of an object with such a line, and it must not be visible."""
    generator = np.random.default_rng(0)
    square, hole = np.array([[2, 2], [38, 2], [38, 38], [2, 38.0]]), np.array([[9, 9], [9, 30], [30, 30], [30, 9.0]])
    for _ in range(50):
        start = generator.uniform(0, 40, 2)
        there = np.concatenate([square, square[:1], [start], hole, hole[:1], [start], square[:1]])
        plain = filled([square], (40, 40)) - filled([hole], (40, 40))
        assert np.array_equal(filled([there], (40, 40)), plain)


def test_polygons_of_one_object() -> None:
    big, inner = np.array([[0, 0], [8, 0], [8, 8], [0, 8.0]]), np.array([[2, 2], [4, 2], [4, 4], [2, 4.0]])

    def pixels(*rings: Ring) -> int:
        return int(fill_all(rings, 20, 20)[2].sum())

    assert pixels(big, inner) == 60, "a hole"
    assert pixels(inner, big) == 60, "in any order"
    assert pixels(big, big) == 64, "twice the same"
    assert pixels(big, big + np.array((4, 0))) == 96, "overlap"
    assert pixels(big, big + np.array((10, 0))) == 128, "two parts"
    assert pixels(big, inner, np.array([[2, 2], [3, 2], [3, 3], [2, 3.0]])) == 61, "an island in the hole"
    assert pixels(big + 100, inner + 100) == 0, "outside"


def test_a_tolerance_takes_points_and_little_else() -> None:
    y, x = np.mgrid[:200, :200]
    ring = (np.hypot(x - 100, y - 100) < 80) & (np.hypot(x - 90, y - 100) > 30)
    ring[5:7, 5] = True  # a speck of two pixels
    exact, near = outlines(ring), outlines(ring, 1.5)
    assert len(exact) == 2
    assert len(near) == 1
    assert len(near[0]) < len(exact[1]) / 5
    covered = filled(near, (200, 200)) > 0
    assert (covered & ring).sum() / (covered | ring).sum() > 0.98


def test_hostile_polygons_take_neither_time_nor_memory() -> None:
    far = np.array([[-1e300, -1e300], [1e300, -1e300], [1e300, 1e300], [-1e300, 1e300]])
    assert filled([far], (30, 20)).all()
    assert area(far) > 0
    zigzag = np.stack([np.arange(20_000) % 2 * 1e9, np.arange(20_000) % 3 * 1e9], axis=1)
    assert filled([zigzag], (300, 300)).max() <= 1


# --- run lengths -----------------------------------------------------------------------------------------------


def text_of(runs: list[int]) -> str:
    """Pack runs like COCO, written from its description: differences, five bits per character, the sign in the last
    one."""
    text = ""
    for i, run in enumerate(runs):
        value = run - runs[i - 2] if i > 2 else run
        more = True
        while more:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            text += chr(48 + (bits | 32 * more))
    return text


@given(st.lists(st.integers(0, 1 << 40), max_size=30))
def test_packed_run_lengths(runs: list[int]) -> None:
    assert runs_of_text(text_of(runs)).tolist() == runs


def test_run_lengths_are_those_of_pycocotools() -> None:
    masks = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    generator = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 0.98, 1.0):
        pixels = np.asfortranarray(generator.random((37, 53)) < share)
        packed = masks.encode(pixels.astype(np.uint8, order="F"))
        assert np.array_equal(pixels_of_runs(runs_of_text(packed["counts"].decode()), 53, 37), pixels)


def test_run_lengths_go_down_the_columns() -> None:
    assert pixels_of_runs(np.array([1, 2, 3]), 2, 3).tolist() == [[False, False], [True, False], [True, False]]


@pytest.mark.parametrize("text", ["é", "~~~", "ooooooooooooooooo", "P"])
def test_damaged_run_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        runs_of_text(text)
