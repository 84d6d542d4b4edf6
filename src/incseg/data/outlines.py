"""Outlines and run lengths: polygons to pixels, pixels to polygons, the run lengths of COCO.

Coordinates count pixel edges from the upper left corner: the pixel in column x covers x to x + 1. A pixel belongs to a
polygon if its centre is inside. So outlines along pixel edges, as `outlines` traces them, give back the same pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

FEWEST_POINTS = 3
_MOST_CROSSINGS = 1 << 20
"""Most crossings of edges and rows that are computed at once, to bound the memory."""
_FARTHEST = float(1 << 24)
"""Largest coordinate; larger ones are clipped. No image is as wide, and arithmetic is still exact enough there."""

Ring = np.ndarray
"""(N, 2) float64, the points (x, y) of a closed polygon."""
Patch = tuple[int, int, np.ndarray]
"""Left, top, and (h, w) bool: a part of an image."""


def fill(ring: Ring, width: int, height: int) -> Patch:
    """Return the pixels inside a polygon by the even-odd rule, cut to the image.

    A line that is drawn there and back cancels exactly, so holes can be joined to the polygon around them.
    """
    points = np.clip(ring, -_FARTHEST, _FARTHEST)
    (left, top), (right, bottom) = np.floor(points.min(0)).astype(int), np.ceil(points.max(0)).astype(int)
    left, right = max(0, min(left, width)), max(0, min(right, width))
    top, bottom = max(0, min(top, height)), max(0, min(bottom, height))
    if left >= right or top >= bottom:
        return 0, 0, np.zeros((0, 0), dtype=bool)
    toggles = np.zeros((bottom - top, right - left + 1), dtype=np.uint8)
    for rows, columns in _crossings(points - (left, top), bottom - top):
        np.bitwise_xor.at(toggles, (rows, np.clip(columns, 0, right - left)), 1)
    return left, top, np.bitwise_xor.accumulate(toggles, axis=1)[:, :-1].astype(bool)


def _crossings(points: Ring, height: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows whose centre an edge crosses, and the first columns whose centre is to the right of it."""
    first, second = points, np.roll(points, -1, axis=0)
    down = (first[:, 1] < second[:, 1])[:, None]
    # From above to below, so that an edge gives the same numbers in both directions.
    upper, lower = np.where(down, first, second), np.where(down, second, first)
    start = np.clip(np.ceil(upper[:, 1] - 0.5), 0, height).astype(np.int64)
    stop = np.clip(np.ceil(lower[:, 1] - 0.5), 0, height).astype(np.int64)
    edges = np.flatnonzero(stop > start)
    ends = np.cumsum(stop[edges] - start[edges])
    while len(edges):
        # At least one edge, which has at most as many crossings as the image has rows.
        number = max(1, int(np.searchsorted(ends, _MOST_CROSSINGS, side="right")))
        chosen, edges = edges[:number], edges[number:]
        ends = ends[number:] - ends[number - 1]
        counts = stop[chosen] - start[chosen]
        edge = np.repeat(chosen, counts)
        rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + start[edge]
        (x, y), (x_end, y_end) = upper[edge].T, lower[edge].T
        crossing = x + (rows + 0.5 - y) * ((x_end - x) / (y_end - y))
        yield rows, np.ceil(crossing - 0.5).astype(np.int64)


def fill_all(rings: Sequence[Ring], width: int, height: int) -> Patch:
    """Return the union of the polygons of an object. A polygon inside the others is a hole."""
    if len(rings) == 1:
        return fill(rings[0], width, height)
    patches = [fill(ring, width, height) for ring in sorted(rings, key=_box_area, reverse=True)]
    patches = [patch for patch in patches if patch[2].size]
    if not patches:
        return 0, 0, np.zeros((0, 0), dtype=bool)
    left, top = min(patch[0] for patch in patches), min(patch[1] for patch in patches)
    right = max(patch[0] + patch[2].shape[1] for patch in patches)
    bottom = max(patch[1] + patch[2].shape[0] for patch in patches)
    together = np.zeros((bottom - top, right - left), dtype=bool)
    for x, y, pixels in patches:
        there = together[y - top : y - top + pixels.shape[0], x - left : x - left + pixels.shape[1]]
        inside = not (pixels & ~there).any()
        same = inside and pixels.sum() == together.sum()  # the same polygon twice is not a hole
        there ^= (pixels & there) if inside and not same else (pixels & ~there)
    return left, top, together


def _box_area(ring: Ring) -> float:
    return float(np.prod(np.ptp(ring, axis=0)))


def area(ring: Ring) -> float:
    """Return the area of a polygon."""
    x, y = np.clip(ring, -_FARTHEST, _FARTHEST).T
    return 0.5 * abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1)))


def ellipse(x: float, y: float, radius_x: float, radius_y: float, degrees: float = 0.0) -> Ring:
    """Return an ellipse about (x, y), turned clockwise about it."""
    angle = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    return turned(np.stack([x + radius_x * np.cos(angle), y + radius_y * np.sin(angle)], axis=1), (x, y), degrees)


def rectangle(left: float, top: float, right: float, bottom: float, degrees: float = 0.0) -> Ring:
    """Return a rectangle, turned clockwise about its upper left corner."""
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)], dtype=np.float64)
    return turned(corners, (left, top), degrees)


def turned(ring: Ring, centre: tuple[float, float], degrees: float) -> Ring:
    """Return a polygon turned clockwise, as seen, about a point."""
    if not degrees:
        return ring
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return (ring - centre) @ np.array([[cos, sin], [-sin, cos]]) + centre


# --- pixels to polygons ----------------------------------------------------------------------------------------


def outlines(pixels: np.ndarray, tolerance: float = 0.0) -> list[Ring]:
    """Return a polygon around each connected part of (H, W) bool pixels; `fill` gives back exactly these pixels.

    A hole is joined to the polygon around it by a line there and back.

    tolerance: largest error of a polygon in pixels. A larger one gives fewer points; 0 is exact. Parts and holes whose
               area is below its square are left out.
    """
    rows, columns = np.flatnonzero(pixels.any(1)), np.flatnonzero(pixels.any(0))
    if not len(rows):
        return []
    left, top = int(columns[0]), int(rows[0])
    part = pixels[top : rows[-1] + 1, left : columns[-1] + 1]
    loops = list(_loops(part))
    starts = [loop[0].astype(int) for loop in loops]  # the first in reading order
    outer = [i for i, (x, y) in enumerate(starts) if part[y, x]]
    holes: dict[int, list[int]] = {i: [] for i in outer}
    if len(outer) < len(loops):
        part_of = np.zeros(part.shape, dtype=np.int32)
        for i in sorted(outer, key=lambda i: _box_area(loops[i]), reverse=True):  # parts inside a hole come later
            x, y, inside = fill(loops[i], part.shape[1], part.shape[0])
            part_of[y : y + inside.shape[0], x : x + inside.shape[1]][inside] = i
        for i in sorted(set(range(len(loops))) - set(outer)):
            x, y = starts[i]
            holes[int(part_of[y, x - 1])].append(i)
    found = []
    for i in outer:
        ring = _simplified(loops[i], tolerance)
        if ring is None:
            continue
        for hole in holes[i]:
            inner = _simplified(loops[hole], tolerance)
            ring = ring if inner is None else _joined(ring, inner[::-1])
        found.append(ring + np.array((left, top)))
    return found


def _loops(pixels: np.ndarray) -> Iterator[Ring]:
    """Yield the closed outlines of the pixels and of their holes, by their corners.

    A corner is where an odd number of the four pixels around it is set. If two pixels touch only at a corner, there are
    two corners in one place. In each row, and in each column, a line runs from every odd corner to the next one.
    """
    padded = np.pad(pixels, 1)
    before, above, beside, own = padded[:-1, :-1], padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    crossing = (before == own) & (above == beside) & (before != above)
    y, x = np.nonzero((before ^ above ^ beside ^ own) | crossing)
    corner = np.repeat(np.arange(len(y)), 1 + crossing[y, x])
    second = np.concatenate([[False], corner[1:] == corner[:-1]])
    y, x = y[corner], x[corner]
    # Of two corners in one place the first ends the line from the left. It continues upwards if the pixel there is set.
    downwards = second == before[y, x]
    by_column = np.lexsort((downwards, y, x))
    other = np.empty_like(by_column)
    other[by_column[0::2]], other[by_column[1::2]] = by_column[1::2], by_column[0::2]
    points = np.stack([x, y], axis=1).astype(np.float64)
    along_column, seen = other.tolist(), bytearray(len(corner))
    for start in range(0, len(corner), 2):
        loop, at = [], start
        while not seen[at]:
            seen[at] = seen[at ^ 1] = True
            loop += [at, at ^ 1]
            at = along_column[at ^ 1]
        if loop:
            yield points[loop]


def _joined(ring: Ring, hole: Ring) -> Ring:
    """Return a polygon and its hole as one polygon, joined by a line from the hole to the nearest point and back."""
    at = int(((ring - hole[-1]) ** 2).sum(1).argmin())
    return np.concatenate([ring[: at + 1], hole[-1:], hole, ring[at:]])


def _simplified(ring: Ring, tolerance: float) -> Ring | None:
    """Return the polygon with fewer points (Douglas and Peucker); None if too little of it is left."""
    if not tolerance:
        return ring
    if area(ring) < tolerance**2:
        return None
    far = int(((ring - ring[0]) ** 2).sum(1).argmax())
    closed = np.concatenate([ring, ring[:1]])
    keep = np.zeros(len(closed), dtype=bool)
    keep[[0, far]] = True
    parts = [(0, far), (far, len(ring))]
    while parts:
        first, last = parts.pop()
        if last - first < 2:
            continue
        start, along = closed[first], closed[last] - closed[first]
        offset = closed[first + 1 : last] - start
        share = np.clip(offset @ along / max(float(along @ along), 1e-12), 0, 1)
        distance = ((offset - share[:, None] * along) ** 2).sum(1)
        farthest = int(distance.argmax())
        if distance[farthest] > tolerance**2:
            at = first + 1 + farthest
            keep[at] = True
            parts += [(first, at), (at, last)]
    found = ring[keep[:-1]]
    return found if len(found) >= FEWEST_POINTS else None


# --- run lengths -----------------------------------------------------------------------------------------------


def runs_of_text(text: str) -> np.ndarray:
    """Return the run lengths that COCO packs into text.

    A number is a few characters, each "0" plus six bits: five bits of the number, the lowest first, and one bit that is
    set if more characters follow. The last character has the sign. From the fourth number on, the value is the
    difference from the number two before.
    """
    runs: list[int] = []
    value, shift = 0, 0
    for code in text.encode("ascii"):
        bits = code - 48
        if not 0 <= bits < 64:
            raise ValueError(f"the character {chr(code)!r}")
        value |= (bits & 31) << shift
        shift += 5
        if shift > 60:
            raise ValueError("a run of more than 60 bits")
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value, shift = 0, 0
    if shift:
        raise ValueError("an unfinished run")
    return np.array(runs, dtype=np.int64)


def pixels_of_runs(runs: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return (height, width) bool of the run lengths of COCO: column by column, the first run is not set.

    The caller must have checked that no run is negative and that the runs fill the image.
    """
    is_set = np.arange(len(runs)) % 2 == 1
    return np.repeat(is_set, runs).reshape(width, height).T
