"""The embedded dataset: scenes of textured shapes among clutter, drawn from a seed.

A class is a shape AND a texture. Shapes come in pairs of like texture, so that a later class resembles an
earlier one: hexagon disc, arrow triangle, crescent ring, flower star (and cross square). A distractor has the
shape or the texture of a class, never both. Colours are random and carry no information.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from incseg.data.source import SPLITS, Source, Split, voc_palette
from incseg.types import IGNORE, DatasetInfo, UserError

Outline = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Distance to the border of a shape of radius about 1, negative inside, at the coordinates (u, v)."""
Texture = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Share of the second of two colours, 0 to 1, at the coordinates (u, v). One unit is about one period."""


def _regular(corners: int, inner: float, outer: float = 1.0) -> Outline:
    """Return a star with its tips at `outer` and its notches at `inner`; convex for inner = outer·cos(π/corners)."""
    half = math.pi / corners
    notch_u, notch_v = inner * math.cos(half), inner * math.sin(half)
    length = math.hypot(outer - notch_u, notch_v)
    normal_u, normal_v = notch_v / length, (outer - notch_u) / length

    def outline(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        radius, angle = np.hypot(u, v), np.arctan2(v, u)
        folded = np.abs(np.mod(angle + half, 2 * half) - half)
        return (radius * np.cos(folded) - outer) * normal_u + radius * np.sin(folded) * normal_v

    return outline


def _box(half_u: float, half_v: float, centre_u: float = 0.0) -> Outline:
    return lambda u, v: np.maximum(np.abs(u - centre_u) - half_u, np.abs(v) - half_v)


def _union(first: Outline, second: Outline) -> Outline:
    return lambda u, v: np.minimum(first(u, v), second(u, v))


def _disc(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.hypot(u, v) - 0.92


def _ring(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.abs(np.hypot(u, v) - 0.72) - 0.27


def _crescent(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(np.hypot(u, v) - 1.0, 0.72 - np.hypot(u - 0.6, v))


def _flower(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.hypot(u, v) - (0.78 + 0.2 * np.cos(5 * np.arctan2(v, u)))


def _arrow_head(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(-u, 0.72 * (u - 1.05) + 0.7 * np.abs(v))


def _half_disc(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(np.hypot(u, v) - 1.0, -u)


def _wave(value: np.ndarray) -> np.ndarray:
    """Return a soft-edged square wave of a value in [-1, 1]; hard edges would alias at a few pixels a period."""
    return np.clip(0.5 + 1.5 * value, 0, 1)


def _stripes(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _wave(np.sin(2 * np.pi * u))


def _bands(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _stripes(0.62 * u, v)


def _checker(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _wave(1.5 * np.sin(np.pi * u) * np.sin(np.pi * v))


def _dots(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _wave(np.cos(2 * np.pi * u) + np.cos(2 * np.pi * v) - 0.5)


def _circles(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _wave(np.cos(2 * np.pi * np.hypot(u, v)))


def _ramps(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.mod(0.45 * u, 1)


def _plain(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.zeros_like(u)


@dataclass(frozen=True)
class _Kind:
    """A class of objects: its shape, its texture, and its relative frequency."""

    name: str
    outline: Outline
    texture: Texture
    frequency: float


_KINDS = (
    _Kind("disc", _disc, _stripes, 1.5),
    _Kind("square", _box(0.82, 0.82), _checker, 1.2),
    _Kind("triangle", _regular(3, 0.625, 1.25), _dots, 1.2),
    _Kind("ring", _ring, _ramps, 1.2),
    _Kind("star", _regular(5, 0.5, 1.15), _circles, 0.8),
    _Kind("cross", _union(_box(1.0, 0.36), _box(0.36, 1.0)), _checker, 0.7),
    _Kind("hexagon", _regular(6, math.cos(math.pi / 6)), _bands, 1.0),
    _Kind("arrow", _union(_arrow_head, _box(0.55, 0.32, -0.5)), _dots, 1.0),
    _Kind("crescent", _crescent, _ramps, 1.0),
    _Kind("flower", _flower, _circles, 0.6),
)
_STRANGE_OUTLINES: tuple[Outline, ...] = (_half_disc, _box(1.1, 0.3), _regular(4, 0.45, 1.2))
_TEXTURES: tuple[Texture, ...] = (_stripes, _checker, _dots, _circles, _ramps)

SHAPES_INFO = DatasetInfo("shapes", tuple(kind.name for kind in _KINDS), True)

# Okabe and Ito's seven colours and three more, chosen for the largest least distance in CIELAB under
# simulated protanopia, deuteranopia and tritanopia.
_COLOURS = "0072B2 E69F00 009E73 CC79A7 F0E442 D55E00 56B4E9 B0F2B4 882255 6B4423"

_SMALLEST_IMAGE = 32
_OBJECTS = (0.12, 0.3, 0.33, 0.25)
"""Probabilities of one, two, … objects in a scene."""
_DISTRACTORS = (0.4, 0.4, 0.2)
"""Probabilities of none, one, … distractors in a scene."""
_RADIUS = (0.14, 0.24)
"""Range of the radius of an object, as a share of the image's side."""
_PERIOD = (0.062, 0.085)
"""Range of the period of a texture, as a share of the image's side."""
_NOISE = 0.1
"""Difference between the darkest and the lightest noise; the image itself ranges from 0 to 1."""


class _Dice:
    """Random numbers, all derived from `Generator.random`, the part of numpy least likely to change its stream."""

    def __init__(self, seed: int, *key: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(self._generator.random())

    def below(self, count: int) -> int:
        return int(self._generator.random() * count)

    def outcome(self, probabilities: Sequence[float]) -> int:
        return int(np.searchsorted(np.cumsum(probabilities[:-1]), self._generator.random(), side="right"))

    def array(self, *shape: int) -> np.ndarray:
        return self._generator.random(shape).astype(np.float32)

    def distinct(self, weights: Sequence[float], count: int) -> list[int]:
        """Draw without replacement by weight: the first arrivals of exponential clocks."""
        clocks = -np.log1p(-self._generator.random(len(weights))) / np.asarray(weights)
        return [int(i) for i in np.argsort(clocks, kind="stable")[:count]]

    def colour(self, lightness: float) -> np.ndarray:
        """Return an RGB colour of random hue around a lightness."""
        hue, chroma = self.uniform(0, 1), self.uniform(0.08, 0.28)
        thirds = np.arange(3) / 3
        return (lightness + chroma * np.cos(2 * np.pi * (hue + thirds))).astype(np.float32)

    def colours(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two colours of clearly different lightness, in either order."""
        light, dark = self.colour(self.uniform(0.65, 0.85)), self.colour(self.uniform(0.12, 0.32))
        return (light, dark) if self.below(2) else (dark, light)


@dataclass(frozen=True)
class _Place:
    """Position of an item: centre (x, y) and radius in pixels."""

    x: float
    y: float
    radius: float


class _Canvas:
    """A scene, drawn from back to front."""

    def __init__(self, dice: _Dice, size: int) -> None:
        self._dice = dice
        self._size = size
        self._centre = _Place(size / 2, size / 2, size / 2)
        self._places: list[_Place] = []
        self.image = 0.32 * self._smooth_field(4, 3) + dice.colour(dice.uniform(0.25, 0.5))
        self.mask = np.zeros((size, size), dtype=np.uint8)

    def _smooth_field(self, knots: int, channels: int) -> np.ndarray:
        """Return (size, size, channels) in [0, 1]: random values on a knots × knots grid, interpolated."""
        position = np.linspace(0, knots - 1, self._size, dtype=np.float32)[:, None]
        distance = np.clip(np.abs(position - np.arange(knots, dtype=np.float32)), 0, 1)
        weights = 1 - distance**2 * (3 - 2 * distance)
        grid = self._dice.array(channels, knots, knots)
        return np.moveaxis(weights @ grid @ weights.T, 0, -1)

    def _blend(self, rows: slice, columns: slice, cover: np.ndarray, colour: np.ndarray) -> None:
        area = self.image[rows, columns]
        area += cover[..., None] * (colour - area)

    def _frame(self, place: _Place, reach: float) -> tuple[slice, slice, np.ndarray, np.ndarray]:
        """Return the window `reach` pixels around a place, and its pixel coordinates turned by a random angle."""
        rows = slice(max(0, int(place.y - reach)), max(0, min(self._size, int(place.y + reach) + 1)))
        columns = slice(max(0, int(place.x - reach)), max(0, min(self._size, int(place.x + reach) + 1)))
        y = (np.arange(rows.start, rows.stop) - place.y).astype(np.float32)[:, None]
        x = (np.arange(columns.start, columns.stop) - place.x).astype(np.float32)[None]
        angle = self._dice.uniform(0, 2 * math.pi)
        sine, cosine = math.sin(angle), math.cos(angle)
        return rows, columns, x * cosine + y * sine, y * cosine - x * sine

    def _textured(self, texture: Texture, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Return two colours mixed by a texture, (h, w, 3)."""
        first, second = self._dice.colours()
        frequency = 1 / (self._size * self._dice.uniform(*_PERIOD))
        amount = texture(u * frequency, v * frequency)
        return first + amount[..., None] * (second - first)

    def patch(self, texture: Texture) -> None:
        """Draw a texture over an irregular region of the background."""
        everything = slice(0, self._size)
        cover = np.clip((self._smooth_field(5, 1)[..., 0] - 0.62) * 12, 0, 1) * self._dice.uniform(0.15, 0.4)
        _, _, u, v = self._frame(self._centre, self._size)
        self._blend(everything, everything, cover, self._textured(texture, u, v))

    def line(self) -> None:
        """Draw a straight line across the whole image."""
        point = _Place(self._dice.uniform(0, self._size), self._dice.uniform(0, self._size), 0)
        rows, columns, _, v = self._frame(point, 2 * self._size)
        half_width = self._size * self._dice.uniform(0.004, 0.016)
        cover = np.clip(half_width + 0.5 - np.abs(v), 0, 1) * self._dice.uniform(0.5, 1)
        self._blend(rows, columns, cover, self._dice.colour(self._dice.uniform(0.1, 0.9)))

    def _free_place(self) -> _Place:
        """Return the first of some random places that hardly overlaps the others, else the least covered of them."""
        radius = self._size * self._dice.uniform(*_RADIUS)
        best, best_gap = _Place(0, 0, radius), -math.inf
        for x, y in (self._size * (0.1 + 0.8 * self._dice.array(12, 2))).tolist():
            gap = min((math.hypot(x - p.x, y - p.y) / (radius + p.radius) for p in self._places), default=math.inf)
            if gap > best_gap:
                best, best_gap = _Place(x, y, radius), gap
            if gap > 0.8:
                break
        self._places.append(best)
        return best

    def item(self, outline: Outline, texture: Texture, label: int = 0, hollow: bool = False) -> None:
        """Draw a shape with a texture: an object if it has a label, else a distractor.

        An object has a void border one pixel wide, as in Pascal VOC.
        """
        place = self._free_place()
        rows, columns, u, v = self._frame(place, 1.3 * place.radius + 2)
        distance = outline(u / place.radius, v / place.radius) * place.radius
        if hollow:
            distance = np.abs(distance) - self._size * 0.012
        colour = self._textured(texture, u, v)
        self._blend(rows, columns, np.clip(0.5 - distance, 0, 1), colour)
        if label:
            inside = distance < 0
            mask = self.mask[rows, columns]
            mask[_grown(inside)] = IGNORE
            mask[inside] = label

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Add light from one side and noise, and return image and mask as bytes."""
        _, _, u, _ = self._frame(self._centre, self._size)
        light = self._dice.uniform(0.75, 1.15) + u * (self._dice.uniform(0, 0.5) / self._size)
        image = self.image * light[..., None] + _NOISE * (self._dice.array(self._size, self._size, 3) - 0.5)
        return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8), self.mask


def _grown(region: np.ndarray) -> np.ndarray:
    """Return the region and its neighbours above, below, left and right."""
    grown = region.copy()
    grown[1:] |= region[:-1]
    grown[:-1] |= region[1:]
    grown[:, 1:] |= region[:, :-1]
    grown[:, :-1] |= region[:, 1:]
    return grown


def _distract(canvas: _Canvas, dice: _Dice) -> None:
    """Draw a distractor: something that resembles an object but is not one."""
    kind = _KINDS[dice.below(len(_KINDS))]
    form = dice.below(4)
    if form == 0:
        canvas.item(kind.outline, _plain, hollow=True)
    elif form == 1:
        canvas.item(kind.outline, _plain)
    elif form == 2:
        foreign = [texture for texture in _TEXTURES if texture is not kind.texture]
        canvas.item(kind.outline, foreign[dice.below(len(foreign))])
    else:
        canvas.item(_STRANGE_OUTLINES[dice.below(len(_STRANGE_OUTLINES))], kind.texture)


def _draw(dice: _Dice, size: int, surely: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return a scene: image (size, size, 3) and mask (size, size), bytes. It shows at least the kind `surely`."""
    canvas = _Canvas(dice, size)
    if dice.below(3) == 0:
        canvas.patch(_TEXTURES[dice.below(len(_TEXTURES))])
    for _ in range(dice.below(4)):
        canvas.line()
    for _ in range(dice.outcome(_DISTRACTORS)):
        _distract(canvas, dice)
    chosen = dice.distinct([kind.frequency for kind in _KINDS], 1 + dice.outcome(_OBJECTS))
    if surely is not None and surely not in chosen:
        chosen[-1] = surely
    for index in chosen:
        canvas.item(_KINDS[index].outline, _KINDS[index].texture, label=index + 1)
    return canvas.finish()


class Shapes(Source):
    """Scenes drawn on first access, then cached in memory.

    A scene depends only on (seed, split, index, image_size), so a larger split begins with the scenes of a smaller one.
    Each of the first ten scenes is certain to show another class, so ten scenes show all classes.
    """

    info = SHAPES_INFO
    preset = "shapes"

    def __init__(self, seed: int = 0, train_size: int = 600, val_size: int = 120, image_size: int = 96) -> None:
        self.seed = _at_least(0, "seed", seed)
        self.image_size = _at_least(_SMALLEST_IMAGE, "image_size", image_size)
        sizes = {"train": _at_least(1, "train_size", train_size), "val": _at_least(1, "val_size", val_size)}
        self._names = {split: [f"{split}_{i:05d}" for i in range(size)] for split, size in sizes.items()}
        self._scenes: dict[tuple[Split, int], tuple[np.ndarray, np.ndarray]] = {}

    def names(self, split: Split) -> Sequence[str]:
        if split not in self._names:
            raise UserError(f"shapes has no split {split!r}; use one of {', '.join(SPLITS)}")
        return self._names[split]

    def image(self, split: Split, index: int) -> Image.Image:
        return Image.fromarray(self._scene(split, index)[0])

    def mask(self, split: Split, index: int) -> np.ndarray:
        return self._scene(split, index)[1].copy()

    def default_workers(self, processes: int) -> int:
        """Return 0: scenes are cached in memory, and every worker would draw them again."""
        return 0

    def known_presence(self, split: Split) -> Sequence[tuple[int, ...]] | None:
        """Return the classes of each image, ascending."""
        return [self._classes(split, index) for index in range(len(self.names(split)))]

    def fingerprint(self, split: Split) -> str:
        """Return a hash of the first ten scenes, which show every class. It changes with the drawing code."""
        count = len(self.names(split))
        digest = hashlib.sha256(f"shapes {self.seed} {split} {count} {self.image_size}".encode())
        for index in range(min(count, len(_KINDS))):
            for pixels in self._scene(split, index):
                digest.update(pixels.tobytes())
        return digest.hexdigest()

    @property
    def palette(self) -> np.ndarray:
        colours = voc_palette()
        colours[1 : len(_KINDS) + 1] = [list(bytes.fromhex(code)) for code in _COLOURS.split()]
        return colours

    def _classes(self, split: Split, index: int) -> tuple[int, ...]:
        seen = np.bincount(self._scene(split, index)[1].ravel(), minlength=len(_KINDS) + 1)
        return tuple(int(i) for i in np.flatnonzero(seen[1 : len(_KINDS) + 1]) + 1)

    def _scene(self, split: Split, index: int) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.names(split))
        if not 0 <= index < count:
            raise IndexError(f"shapes {split} has the scenes 0 to {count - 1}, not {index}")
        if (split, index) not in self._scenes:
            dice = _Dice(self.seed, SPLITS.index(split), index)
            surely = index if index < len(_KINDS) else None
            self._scenes[split, index] = _draw(dice, self.image_size, surely)
        return self._scenes[split, index]


def _at_least(smallest: int, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise UserError(f"shapes: {name} is {value!r}; give a whole number of at least {smallest}")
    return value
