"""Pictures of predictions: indexed masks, uncertainty in colour, and the image overlaid with classes and legend."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from incseg.types import BACKGROUND

# Eleven evenly spaced colours of viridis, which is almost linear between them. Drawing must not need matplotlib.
_VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140), (34, 168, 132),
    (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip

OVERLAY_SIDES = (480, 2400)
"""Smaller images are enlarged, larger ones reduced, so that the longer side of an overlay lies between these."""
_THINNEST = 24  # narrower pictures show nothing, so they are drawn wider than in proportion
_OPACITY = 0.5
_AT_ONCE = 1 << 20  # pixels that are made floats of at once
_PAPER, _INK, _FAINT = (255, 255, 255), (32, 32, 32), (120, 120, 120)


def palette_image(values: np.ndarray, palette: np.ndarray) -> Image.Image:
    """Return an indexed image with (H, W) uint8 values as pixels and (≤ 256, 3) colours as palette."""
    image = Image.fromarray(np.ascontiguousarray(values, dtype=np.uint8))
    image.putpalette(np.ascontiguousarray(palette, dtype=np.uint8).tobytes())
    return image


def viridis() -> np.ndarray:
    """Return (256, 3) uint8 colours, dark to bright."""
    anchors = np.array(_VIRIDIS, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    colours = np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    return np.rint(colours).astype(np.uint8)


def uncertainty_image(uncertainty: np.ndarray) -> Image.Image:
    """Return (H, W) values u in [0, 1] as an indexed image in viridis (0 dark, 1 bright) with pixels round(255 u)."""
    levels = np.empty(uncertainty.shape, dtype=np.uint8)
    rows = max(1, _AT_ONCE // max(1, uncertainty.shape[1]))
    for start in range(0, len(levels), rows):
        levels[start : start + rows] = np.rint(np.clip(uncertainty[start : start + rows], 0, 1) * 255)
    return palette_image(levels, viridis())


def label_counts(labels: np.ndarray, number: int) -> list[int]:
    """Return the number of pixels of each label in (H, W) uint8, without the int64 copy that np.bincount makes."""
    return Image.fromarray(labels).histogram()[:number]


def overlay(image: Image.Image, labels: np.ndarray, palette: np.ndarray, names: Sequence[str]) -> Image.Image:
    """Return the image with each class but background coloured and outlined, above a legend of its classes.

    image: RGB; labels: (H, W) of the same size; palette and names: colour and name of each label.
    """
    size = _drawn_size(image.width, image.height)
    shown = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
    picture = image.resize(size, Image.Resampling.BICUBIC)
    colours = palette_image(shown, palette).convert("RGB")
    inside, outline = shown != BACKGROUND, _outlines(shown, max(2, max(size) // 500))
    picture.paste(Image.blend(picture, colours, _OPACITY), mask=Image.fromarray(inside))
    picture.paste(colours, mask=Image.fromarray(outline))
    legend = _legend(_entries(labels, palette, names), max(picture.width, OVERLAY_SIDES[0]))
    sheet = Image.new("RGB", (legend.width, picture.height + legend.height), _PAPER)
    sheet.paste(picture, ((sheet.width - picture.width) // 2, 0))
    sheet.paste(legend, (0, picture.height))
    return sheet


def _drawn_size(width: int, height: int) -> tuple[int, int]:
    least, most = OVERLAY_SIDES
    long = max(width, height)
    if long < least:
        factor: float = math.ceil(least / long)  # an integer, so that all pixels have the same size
    else:
        factor = min(1.0, most / long)
    return max(_THINNEST, round(width * factor)), max(_THINNEST, round(height * factor))


def _outlines(labels: np.ndarray, thickness: int) -> np.ndarray:
    """Return (H, W) bool: the pixels of a class within `thickness` of another label."""
    edge = np.zeros(labels.shape, dtype=bool)
    across, down = labels[:, 1:] != labels[:, :-1], labels[1:] != labels[:-1]
    edge[:, 1:] |= across
    edge[:, :-1] |= across
    edge[1:] |= down
    edge[:-1] |= down
    for _ in range(thickness - 1):
        edge = _grown(_grown(edge).T).T
    return edge & (labels != BACKGROUND)


def _grown(edge: np.ndarray) -> np.ndarray:
    """Grow the edge by one row up and down; many times faster than Pillow's filters."""
    grown = edge.copy()
    grown[1:] |= edge[:-1]
    grown[:-1] |= edge[1:]
    return grown


@dataclass(frozen=True)
class _Entry:
    name: str
    share: str
    colour: tuple[int, int, int]


def _entries(labels: np.ndarray, palette: np.ndarray, names: Sequence[str]) -> list[_Entry]:
    """Return the labels present, largest first; the background, which is not coloured, last."""
    counts = label_counts(labels, len(names))
    present = [label for label, count in enumerate(counts) if count]
    entries = []
    for label in sorted(present, key=lambda label: (label == BACKGROUND, -counts[label])):
        red, green, blue = (int(value) for value in palette[label])
        colour = _PAPER if label == BACKGROUND else (red, green, blue)
        entries.append(_Entry(" ".join(names[label].split()), _percent(counts[label] / labels.size), colour))
    return entries


def _percent(share: float) -> str:
    if share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _legend(entries: Sequence[_Entry], width: int) -> Image.Image:
    """Draw swatch, name and share of each entry in columns, row by row."""
    text = max(16, width // 44)
    font = ImageFont.load_default(size=text)
    gap, line = text // 2, round(text * 1.75)
    room = width - 2 * gap
    most = max(font.getlength(entry.name) + font.getlength(entry.share) for entry in entries)
    columns = max(1, min(len(entries), int(room // (text + 2 * gap + most + 2 * gap))))
    cell = room // columns
    legend = Image.new("RGB", (width, math.ceil(len(entries) / columns) * line + 2 * gap), _PAPER)
    draw = ImageDraw.Draw(legend)
    for index, entry in enumerate(entries):
        left, middle = gap + index % columns * cell, gap + index // columns * line + line // 2
        swatch = (left, middle - text // 2, left + text, middle + text // 2)
        draw.rectangle(swatch, fill=entry.colour, outline=_FAINT, width=max(1, text // 16))
        start = left + text + gap
        name = _shortened(entry.name, left + cell - gap - font.getlength(entry.share) - gap - start, font)
        draw.text((start, middle), name, _INK, font, anchor="lm")
        draw.text((start + font.getlength(name) + gap, middle), entry.share, _FAINT, font, anchor="lm")
    return legend


def _shortened(name: str, width: float, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return as much of the name as fits."""
    if font.getlength(name) <= width:
        return name
    # the smallest number of characters before the ellipsis that is too long
    too_long = bisect_right(range(len(name)), width, key=lambda length: font.getlength(name[:length] + "…"))
    return name[: max(0, too_long - 1)] + "…"
