"""A contact sheet: some photographs of a dataset with their masks in colour and the names of what they show."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from incseg.data.extended import Extended
from incseg.data.presence import PixelCounts, Presence
from incseg.data.source import Source, Split
from incseg.io import replacing
from incseg.types import BACKGROUND, IGNORE, UserError

_SIDE, _NARROWEST, _THINNEST = 320, 212, 24
"""Longer side of a photograph, smallest width of a cell, smallest side of a photograph: thinner ones are widened."""
_SHEET_WIDTH = 1480
_TEXT, _SMALL, _LINE, _GAP, _MARGIN = 14, 12, 19, 14, 20
_MOST_LINES = 10
"""Most lines of names under a photograph."""
_MOST_MISSING = 30
"""Most names in the list of classes that are not on the sheet."""
_OPACITY = 0.55
_VISIBLE = 0.01
"""A class with this share of a photograph is well visible."""
_ATTEMPTS = 5
"""Most photographs to try for each one shown, as some may be unreadable."""
_PAPER, _INK, _FAINT = (255, 255, 255), (32, 32, 32), (110, 110, 110)
_STRIPES = ((250, 250, 250), (150, 150, 150))
_KEY, _MARK = "Software", "incseg contact sheet"

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_Shown = Presence | PixelCounts


def contact_sheet(
    source: Source, shown: Mapping[Split, _Shown], most: int = 12, title: str | None = None
) -> Image.Image:
    """Draw up to `most` images, chosen so that as many classes as possible are on the sheet.

    shown: the classes that each image shows, of the splits to choose from. With pixel counts instead of a presence
           index, photographs are chosen that show their classes well.
    title: heading of the sheet; by default the name of the dataset.

    The choice is deterministic. One photograph is in memory at a time, and unreadable ones are skipped.
    """
    cells: list[_Cell] = []
    choice = _choice(shown, most)
    try:
        split, index = next(choice)
        while True:
            cell = _cell(source, split, index)
            if cell is not None:
                cells.append(cell)
            split, index = choice.send(cell is not None)
    except StopIteration:
        pass
    return _laid_out(source, shown, cells, title or source.info.name)


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write a contact sheet as PNG, marked as ours, replacing an older one; any other file is refused."""
    require_own_sheet(path)
    mark = PngInfo()
    mark.add_text(_KEY, _MARK)
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG", pnginfo=mark, optimize=False)


def write_sheet(source: Source, pixels: Mapping[Split, PixelCounts], file: Path) -> list[str]:
    """Write a contact sheet of own images unless it exists, and return the lines to print about it."""
    if not pixels or file.exists():
        return []
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_sheet(contact_sheet(source, pixels), file)
    except (UserError, OSError) as error:  # the sheet is optional
        return [f"no contact sheet was written ({error})"]
    return [f"{file}: some photographs with their masks; check that names and colours are right"]


def require_own_sheet(path: Path) -> None:
    """Refuse to replace a file that is not a contact sheet of ours."""
    if not path.is_file():
        return
    try:
        with Image.open(path) as image:
            ours = image.info.get(_KEY) == _MARK
    except Exception:  # not an image, or a damaged one
        ours = False
    if not ours:
        raise UserError(
            f"'{path}' exists and was not written as a contact sheet; move it, give another file with --sheet FILE, "
            "or --sheet none"
        )


# --- which photographs -----------------------------------------------------------------------------------------


def _choice(shown: Mapping[Split, _Shown], most: int) -> Generator[tuple[Split, int], bool, None]:
    """Yield images to show. The caller sends back whether the image could be shown.

    The choice is greedy: a class weighs more if few images show it, and less each time it is on the sheet.
    """
    keys: list[tuple[Split, int]] = []
    visible: list[dict[int, float]] = []
    for split, one in shown.items():
        weights = _visibility(one)
        keys += [(split, index) for index in range(len(weights))]
        visible += weights
    images: dict[int, int] = {}
    for weights_of_image in visible:
        for i in weights_of_image:
            images[i] = images.get(i, 0) + 1
    on_sheet = dict.fromkeys(images, 0.0)
    left = set(range(len(keys)))
    shown_so_far = 0
    for _ in range(_ATTEMPTS * most):
        if not left or shown_so_far == most:
            return
        # A rare class that is not on the sheet yet outweighs all classes that are.
        worth = {i: (1 + 1 / images[i]) * (0.02 ** on_sheet[i]) for i in images}
        best = max(left, key=lambda at: (sum(worth[i] * weight for i, weight in visible[at].items()), -at))
        left.remove(best)
        if (yield keys[best]):
            shown_so_far += 1
            for i, weight in visible[best].items():
                on_sheet[i] += weight


def _visibility(shown: _Shown) -> list[dict[int, float]]:
    """Return the classes of each image with their visibility, up to 1."""
    if isinstance(shown, Presence):
        return [dict.fromkeys(ids, 1.0) for ids in shown.classes]
    weights: list[dict[int, float]] = [{} for _ in shown.names]
    sizes = shown.sizes
    for index, value, pixels in shown.rows.tolist():
        if value not in (BACKGROUND, IGNORE):
            weights[index][value] = min(1.0, 0.1 + pixels / sizes[index] / _VISIBLE)
    return weights


# --- one photograph --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    picture: Image.Image
    title: str
    labels: Sequence[int]
    """The ids in the mask without background, the largest area first, void last."""


def _cell(source: Source, split: Split, index: int) -> _Cell | None:
    """Return the photograph with its mask; None if they cannot be read or differ in size."""
    try:
        image, (width, height) = source.preview(split, index, _SIDE)
        mask = source.mask(split, index)
    except (UserError, MemoryError):
        return None
    if mask.shape != (height, width):
        return None
    counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)
    present = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i] and i not in (BACKGROUND, IGNORE)]
    size = _drawn_size(width, height)
    labels = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    picture = _blended(image.resize(size, Image.Resampling.BICUBIC), labels, source.palette)
    title = f"{split}: {source.names(split)[index]}"
    return _Cell(picture, title, [*present, IGNORE] if counts[IGNORE] else present)


def _drawn_size(width: int, height: int) -> tuple[int, int]:
    factor = _SIDE / max(width, height)
    if factor > 1:
        factor = max(1.0, math.floor(factor))  # an integer, so that all pixels have the same size
    return max(_THINNEST, round(width * factor)), max(_THINNEST, round(height * factor))


def _blended(picture: Image.Image, labels: np.ndarray, palette: np.ndarray) -> Image.Image:
    """Return the picture with classes coloured and outlined, void striped, and background unchanged."""
    colours = palette[labels]
    void = labels == IGNORE
    colours[void] = _stripes(*labels.shape)[void]
    photograph = np.asarray(picture)
    mixed = np.rint(photograph * (1 - _OPACITY) + colours * _OPACITY).astype(np.uint8)
    edge = _edges(labels) & ~void
    drawn = np.where((labels != BACKGROUND)[..., None], mixed, photograph)
    drawn[edge] = colours[edge]
    drawn[_edges(labels == BACKGROUND)] = _PAPER  # a class can have the colour of what is beside it
    return Image.fromarray(drawn)


def _stripes(height: int, width: int) -> np.ndarray:
    bright = (np.arange(height)[:, None] + np.arange(width)) // 4 % 2 == 0
    return np.array(_STRIPES, dtype=np.uint8)[bright.astype(int)]


def _edges(labels: np.ndarray) -> np.ndarray:
    """Return (H, W) bool, the pixels beside another label, without those of label 0."""
    edge = np.zeros(labels.shape, dtype=bool)
    across, down = labels[:, 1:] != labels[:, :-1], labels[1:] != labels[:-1]
    edge[:, 1:] |= across
    edge[:, :-1] |= across
    edge[1:] |= down
    edge[:-1] |= down
    return edge & (labels != BACKGROUND)


# --- the sheet -------------------------------------------------------------------------------------------------


@cache
def _font(size: int) -> _Font:
    """Return DejaVu Sans, which comes with matplotlib and has more than Latin letters. Do not import matplotlib."""
    package = find_spec("matplotlib")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if file.is_file():
            return ImageFont.truetype(str(file), size)
    return ImageFont.load_default(size)


def _laid_out(source: Source, shown: Mapping[Split, _Shown], cells: Sequence[_Cell], title: str) -> Image.Image:
    cells = sorted(cells, key=lambda cell: -cell.picture.height)  # so that rows are of even height
    width = max([_NARROWEST, *(cell.picture.width for cell in cells)])
    fitting = (_SHEET_WIDTH - 2 * _MARGIN + _GAP) // (width + _GAP)
    rows_needed = math.ceil(len(cells) / fitting) or 1
    columns = max(1, math.ceil(len(cells) / rows_needed))  # rows of even length
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    entries = {id(cell): _entries(source, cell, width) for cell in cells}
    room = max(columns * (width + _GAP) - _GAP, 2 * _NARROWEST)
    head, foot = _wrapped(_heading(source, shown, title), room), _wrapped(_missing(source, shown, cells), room)
    heights = [
        _LINE + max(cell.picture.height + 6 + len(entries[id(cell)]) * _LINE for cell in row) + _GAP for row in rows
    ]
    total = 2 * _MARGIN + (len(head) + len(foot)) * _LINE + _GAP + sum(heights)
    sheet = Image.new("RGB", (room + 2 * _MARGIN, total), _PAPER)
    draw = ImageDraw.Draw(sheet)
    top = _lines(draw, head, _MARGIN, _INK) + _GAP
    for row, height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            left = _MARGIN + column * (width + _GAP)
            title = _shortened(cell.title, width, _font(_SMALL))
            draw.text((left, top + _LINE // 2 - 1), title, _FAINT, _font(_SMALL), anchor="lm")
            sheet.paste(cell.picture, (left, top + _LINE))
            _draw_entries(draw, entries[id(cell)], left, top + _LINE + cell.picture.height + 6)
        top += height
    _lines(draw, foot, top, _FAINT)
    return sheet


@dataclass(frozen=True)
class _Entry:
    text: str
    colour: tuple[int, int, int] | None
    """None for void, which is striped."""
    left: int


def _entries(source: Source, cell: _Cell, width: int) -> list[list[_Entry]]:
    """Return swatches and names in lines that fit the width. If there are too many, the last line has their number."""
    lines: list[list[_Entry]] = [[]]
    font, swatch, gap = _font(_TEXT), _TEXT, 6
    at = 0
    for number, label in enumerate(cell.labels):
        text = _shortened(_label(source, label), width - swatch - gap, font)
        needed = swatch + gap + math.ceil(font.getlength(text))
        if lines[-1] and at + needed > width:
            if len(lines) == _MOST_LINES:
                return [*lines[:-1], [_Entry(f"… and {len(cell.labels) - number + len(lines[-1])} more", None, -1)]]
            lines.append([])
            at = 0
        red, green, blue = (int(one) for one in source.palette[label])
        lines[-1].append(_Entry(text, None if label == IGNORE else (red, green, blue), at))
        at += needed + 2 * gap
    if not cell.labels:
        lines[-1].append(_Entry("background only", None, -1))
    return lines


def _draw_entries(draw: ImageDraw.ImageDraw, lines: Sequence[Sequence[_Entry]], left: int, top: int) -> None:
    for number, line in enumerate(lines):
        middle = top + number * _LINE + _LINE // 2
        for entry in line:
            if entry.left < 0:
                draw.text((left, middle), entry.text, _FAINT, _font(_TEXT), anchor="lm")
                continue
            at, half = left + entry.left, _TEXT // 2
            box = (at, middle - half, at + _TEXT, middle + half)
            if entry.colour is None:
                draw.rectangle(box, fill=_STRIPES[0])
                for offset in (0, _TEXT // 2, _TEXT):
                    ends = (at, middle - half + offset), (at + offset, middle - half)
                    draw.line(ends, fill=_STRIPES[1], width=2)
            draw.rectangle(box, fill=entry.colour, outline=_FAINT)
            draw.text((at + _TEXT + 6, middle), entry.text, _INK, _font(_TEXT), anchor="lm")


def _label(source: Source, label: int) -> str:
    """Return number and name: the number helps where the font lacks the letters of the name."""
    return "not annotated" if label == IGNORE else f"{label} {_name(source, label)}"


def _name(source: Source, label: int) -> str:
    return " ".join("".join(c if c.isprintable() else "?" for c in source.info.classes[label - 1][:200]).split())


def _heading(source: Source, shown: Mapping[Split, _Shown], title: str) -> str:
    images = ", ".join(f"{len(one.names)} {split}" for split, one in shown.items())
    zero = "background" if source.info.has_background else "unlabelled"
    return (
        f"{title}: classes: {len(_own_ids(source))}; photographs: {images}. Colours are what the masks hold; "
        f"without colour is 0, {zero}."
    )


def _own_ids(source: Source) -> list[int]:
    """Return the ids of the dataset's own classes, without those of an extended model."""
    if isinstance(source, Extended):
        return sorted({int(source.table[i]) for i in _own_ids(source.inner)})
    return list(range(1, len(source.info.classes) + 1))


def _missing(source: Source, shown: Mapping[Split, _Shown], cells: Sequence[_Cell]) -> str:
    """Return which classes are not on the sheet, and which no photograph shows."""
    if not cells:
        return "No photograph could be read together with its mask."
    anywhere = {i for one in shown.values() for weights in _visibility(one) for i in weights}
    here = {i for cell in cells for i in cell.labels}
    elsewhere = [_label(source, i) for i in sorted(anywhere - here)]
    nowhere = [_label(source, i) for i in _own_ids(source) if i not in anywhere]
    found = ((elsewhere, "Shown by photographs that are not on this sheet: "), (nowhere, "No photograph shows: "))
    return " ".join(f"{text}{_some(names)}." for names, text in found if names)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_MISSING
    return ", ".join(names[:_MOST_MISSING]) + (f" and {more} more" if more > 0 else "")


def _wrapped(text: str, width: int) -> list[str]:
    font = _font(_TEXT)
    lines: list[str] = []
    for word in text.split():
        word = _shortened(word, width, font)
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _lines(draw: ImageDraw.ImageDraw, lines: Sequence[str], top: int, colour: tuple[int, int, int]) -> int:
    for number, line in enumerate(lines):
        draw.text((_MARGIN, top + number * _LINE + _LINE // 2), line, colour, _font(_TEXT), anchor="lm")
    return top + len(lines) * _LINE


def _shortened(name: str, width: float, font: _Font) -> str:
    """Return as much of the name as fits."""
    if font.getlength(name) <= width:
        return name
    too_long = bisect_right(range(len(name)), width, key=lambda length: font.getlength(name[:length] + "…"))
    return name[: max(0, too_long - 1)] + "…"
