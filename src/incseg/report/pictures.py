"""Sheets of pictures: images, ground truth, predictions and probability maps side by side, with a legend; and the rules
that choose the test images to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from incseg.report.figures import wrapped
from incseg.report.style import FAINT, WIDTH, axes_at, new_figure, styled
from incseg.types import BACKGROUND, IGNORE

_GAP, _MARGIN = 0.08, 0.1
_WIDEST, _BAR = 1.9, 1.2
_TILE_PIXELS = 300
"""Longer side of the picture in a tile: twice that on the page."""
_NAMED_SHARE = 0.02
"""Least share of a tile's pixels that a class must have to be named on it."""
_MAP = colormaps["viridis"]


@dataclass(frozen=True)
class Tile:
    """A picture with a title: a photograph (H, W, 3), labels (H, W) of dataset ids, or a map (H, W) from 0 to 1."""

    title: str
    picture: np.ndarray

    @property
    def is_map(self) -> bool:
        return self.picture.dtype.kind == "f"

    @property
    def is_labels(self) -> bool:
        return self.picture.ndim == 2 and not self.is_map


@dataclass(frozen=True)
class Row:
    """Tiles side by side, beginning at column `start`, after a label."""

    tiles: Sequence[Tile]
    label: str = ""
    start: int = 0


@dataclass(frozen=True)
class Classes:
    """Name and colour by dataset id."""

    names: dict[int, str]
    palette: np.ndarray = field(repr=False)

    def name(self, label: int) -> str:
        return "not counted" if label == IGNORE else self.names[label]


@styled
def sheet(rows: Sequence[Row], classes: Classes) -> Figure:
    """Draw rows of tiles with a legend of the classes and the scale of the maps, in a free place or below."""
    columns = max(row.start + len(row.tiles) for row in rows)
    side = 0.28 if any(row.label for row in rows) else 0.0
    width = min(_WIDEST, (WIDTH - 2 * _MARGIN - side) / columns - _GAP)
    letters = int(width * 15)
    heights = [width * max(_aspect(tile) for tile in row.tiles) for row in rows]
    titles = [max(_title_height(wrapped(tile.title, letters)) for tile in row.tiles) for row in rows]
    legend = _Legend(
        sorted({int(i) for row in rows for t in row.tiles if t.is_labels for i in np.unique(t.picture)}),
        any(t.is_map for row in rows for t in row.tiles),
    )
    across = max(width * columns + _GAP * (columns - 1), 4.0)
    free = next((index for index, row in enumerate(rows) if row.start >= 2), None)
    over = legend.height(2 * width) - heights[free] if free is not None else 0.0
    if over > 0 and free != len(rows) - 1:
        free = None
    below = 0.08 + legend.height(across) if free is None else max(0.0, over)
    figure = new_figure(across + side + 2 * _MARGIN, sum(heights) + sum(titles) + below + 2 * _MARGIN)
    top = _MARGIN
    for index, (row, height, title) in enumerate(zip(rows, heights, titles, strict=True)):
        top += title
        for column, tile in enumerate(row.tiles, start=row.start):
            axes = axes_at(figure, _MARGIN + side + column * (width + _GAP), top, width, height)
            _draw(axes, tile, classes)
            axes.set_title(wrapped(tile.title, letters), fontsize=8, pad=2.5)
        if row.label:
            place = ((_MARGIN + 0.06) / figure.get_figwidth(), 1 - (top + height / 2) / figure.get_figheight())
            figure.text(*place, wrapped(row.label, 26), rotation=90, ha="center", va="center", fontsize=8.5)
        if index == free:
            legend.draw(figure, classes, _MARGIN + side, top, 2 * width)
        top += height
    if free is None:
        legend.draw(figure, classes, _MARGIN + side, top + 0.08, across)
    return figure


def _title_height(title: str) -> float:
    return 0.1 + 0.14 * (title.count("\n") + 1) if title else _GAP


def _aspect(tile: Tile) -> float:
    return tile.picture.shape[0] / tile.picture.shape[1]


def _draw(axes: Axes, tile: Tile, classes: Classes) -> None:
    axes.grid(False)
    axes.set_anchor("N")
    if tile.is_labels:
        small = _resized(tile.picture, Image.Resampling.NEAREST)
        axes.imshow(classes.palette[small])
        _name_regions(axes, small, classes)
    elif tile.is_map:
        axes.imshow(_MAP(_resized(tile.picture.astype(np.float32), Image.Resampling.BILINEAR), bytes=True)[..., :3])
    else:
        axes.imshow(_resized(tile.picture, Image.Resampling.BILINEAR))
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT, linewidth=0.6)


def _resized(picture: np.ndarray, how: Image.Resampling) -> np.ndarray:
    height, width = picture.shape[:2]
    factor = min(1.0, _TILE_PIXELS / max(height, width))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    return np.asarray(Image.fromarray(picture).resize(size, how))


def _name_regions(axes: Axes, labels: np.ndarray, classes: Classes) -> None:
    """Write the names of larger classes on them, so that readers need not distinguish colours."""
    height, width = labels.shape
    taken: list[float] = []
    for label in np.unique(labels):
        if label in (BACKGROUND, IGNORE):
            continue
        rows, columns = np.nonzero(labels == label)
        if len(rows) < _NAMED_SHARE * labels.size:
            continue
        nearest = np.argmin((rows - np.median(rows)) ** 2 + (columns - np.median(columns)) ** 2)
        row = float(np.clip(rows[nearest], 0.08 * height, 0.92 * height))
        while any(abs(row - other) < 0.1 * height for other in taken) and row < 0.9 * height:
            row += 0.05 * height  # names must not overlap
        taken.append(row)
        axes.text(
            np.clip(columns[nearest], 0.22 * width, 0.78 * width), row, classes.name(int(label)),
            ha="center", va="center", fontsize=6.5, color="#ffffff",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "#000000", "alpha": 0.55, "linewidth": 0},
        )  # fmt: skip


@dataclass(frozen=True)
class _Legend:
    """Swatches of the labels, and below or beside them the scale of the maps."""

    shown: Sequence[int]
    has_map: bool

    def _columns(self, width: float) -> int:
        """Return the number of swatches per row. On a wide sheet the scale is beside them."""
        return max(1, int((width - (_BAR + 0.3 if self._beside(width) else 0)) // 1.2))

    def _beside(self, width: float) -> bool:
        return self.has_map and width > 4

    def height(self, width: float) -> float:
        swatches = 0.175 * -(-len(self.shown) // self._columns(width))
        scale = 0.42 if self.has_map else 0.0
        return max(swatches, scale) if self._beside(width) else swatches + scale

    def draw(self, figure: Figure, classes: Classes, left: float, top: float, width: float) -> None:
        """Draw with this upper left corner and width, in inches."""
        across, down = figure.get_size_inches()
        if self.shown:
            handles = [
                Patch(facecolor=classes.palette[i] / 255, edgecolor=FAINT, linewidth=0.6, label=classes.name(i))
                for i in self.shown
            ]
            figure.legend(
                handles=handles, ncols=self._columns(width), loc="upper left", fontsize=8, borderaxespad=0, borderpad=0,
                bbox_to_anchor=(left / across, 1 - top / down), handlelength=1.2, columnspacing=1.0, labelspacing=0.45,
            )  # fmt: skip
        if not self.has_map:
            return
        if self._beside(width):
            left, top = left + width - _BAR, top + 0.14
        else:
            top += self.height(width) - 0.26
        bar = axes_at(figure, left, top, _BAR, 0.1)
        bar.grid(False)
        bar.imshow(_MAP(np.linspace(0, 1, 128)[None], bytes=True)[..., :3], aspect="auto", extent=(0, 1, 0, 1))
        bar.set_yticks([])
        bar.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        bar.tick_params(labelsize=7, length=2, pad=1)
        bar.set_title("probability", fontsize=7.5, pad=2)
        bar.spines[:].set_visible(False)


# --- which images --------------------------------------------------------------------------------------------

LEAST_SHARE = 0.01
"""Least share of an image's pixels that a label must have to count: a few stray pixels must not halve a score."""


def image_score(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean IoU over the labels in either map, in percent; ignored pixels do not count."""
    counted = truth != IGNORE
    predicted, truth = predicted[counted], truth[counted]
    shares = []
    for label in np.union1d(predicted, truth):
        hit, shown = predicted == label, truth == label
        if max(hit.sum(), shown.sum()) < LEAST_SHARE * truth.size:
            continue
        shares.append((hit & shown).sum() / (hit | shown).sum())
    return 100 * float(np.mean(shares)) if shares else 100.0


def shown_classes(truth: np.ndarray, learnt: Sequence[int]) -> list[int]:
    """Return the learnt classes that an image shows, largest first."""
    counts = np.bincount(truth.ravel(), minlength=256)
    least = LEAST_SHARE * truth.size
    return sorted((i for i in learnt if counts[i] >= max(1, least)), key=lambda i: (-counts[i], i))


def extremes(scores: dict[int, float]) -> dict[str, int]:
    """Return the hardest, the median and the best of these images; they may be the same."""
    ranked = sorted(scores, key=lambda image: (scores[image], image))
    if not ranked:
        return {}
    return {"hardest": ranked[0], "median": ranked[(len(ranked) - 1) // 2], "best": ranked[-1]}


def largest_fall(over_steps: Sequence[dict[int, float]]) -> dict[str, int]:
    """Return the image whose score has fallen most from the best of the earlier steps, if any has fallen. Images
    without a score after some step are skipped."""
    images = set.intersection(*map(set, over_steps)) if len(over_steps) > 1 else set()
    falls = {i: max(scores[i] for scores in over_steps[:-1]) - over_steps[-1][i] for i in images}
    return _largest("largest fall", falls)


def leads(mine: dict[int, float], theirs: dict[int, float]) -> dict[str, int]:
    """Return the images where one method is furthest ahead of another, and furthest behind."""
    ahead = {i: mine[i] - theirs[i] for i in mine if i in theirs}
    return _largest("largest lead", ahead) | _largest("largest lag", {i: -gap for i, gap in ahead.items()})


def _largest(name: str, values: dict[int, float]) -> dict[str, int]:
    image = max(values, key=lambda i: (values[i], -i), default=None)
    return {name: image} if image is not None and values[image] > 0 else {}


def with_two_classes(scores: dict[int, float], classes: dict[int, list[int]]) -> int | None:
    """Return the median of the images that show at least two classes, or of all images if there are none."""
    several = {i: score for i, score in scores.items() if len(classes[i]) > 1} or scores
    return extremes(several).get("median")


def each_once(chosen: dict[str, int]) -> dict[str, int]:
    """Return each image once, under all its names: {"hardest, largest fall": 3}."""
    names: dict[int, list[str]] = {}
    for name, image in chosen.items():
        names.setdefault(image, []).append(name)
    return {", ".join(of_image): image for image, of_image in names.items()}
