"""The style of all figures, and their files: PNG and SVG in a folder, and an SVG in the page with the page's colours.

Curves have the colours of Okabe and Ito, which colour-blind people can distinguish, and different markers and lines.
"""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from incseg.io import replacing, write_text
from incseg.report.draw import palette_image

# Each of these colours has a role. In the page they are replaced by CSS colours, so use them for nothing else.
INK, FAINT, GRID, PAPER = "#1b1f24", "#6a737d", "#d8dee4", "#fffffe"
_IN_PAGE = {INK: "currentColor", FAINT: "var(--faint)", GRID: "var(--grid)", PAPER: "var(--paper)"}

BLUE, VERMILION = "#0072b2", "#d55e00"
_COLOURS = (BLUE, VERMILION, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", FAINT)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1.5, 1)))

WIDTH = 11.0
"""Inches of a figure as wide as the page."""
_DPI = 150
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 9,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.edgecolor": FAINT, "axes.facecolor": "none", "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 6, "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER, "svg.fonttype": "path", "svg.hashsalt": "incseg", "image.interpolation": "none",
    "text.parse_math": False,  # a class may be named $x$
}  # fmt: skip

Given = ParamSpec("Given")
Made = TypeVar("Made", Figure, Figure | None)


@dataclass(frozen=True)
class Drawn:
    """A saved figure, NAME.png and NAME.svg, with its caption.

    svg:    the SVG for the page, without glyphs.
    glyphs: the glyphs that it refers to, by id. All figures of a page share them.
    """

    name: str
    caption: str
    svg: str
    glyphs: dict[str, str]


def styled(draw: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorate a function that returns a figure, so that it draws in our style."""

    @functools.wraps(draw)
    def in_style(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with matplotlib.rc_context(_RC):
            return draw(*args, **kwargs)

    return in_style


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of a curve by its index. The first 63 curves differ."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.8,
    }


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without global state, always with the Agg backend."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Return axes with this frame, in inches from the upper left corner."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def text_on(colour: Any) -> str:
    """Return black or white, whichever is easier to read on a colour (0 to 1 each)."""
    red, green, blue = colour[:3]
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def save_figure(figure: Figure, folder: Path, name: str, caption: str) -> Drawn:
    """Write NAME.png and NAME.svg to the folder and return the figure for the page."""
    with matplotlib.rc_context(_RC):
        with replacing(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png", dpi=_DPI, metadata={"Software": None})
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = _lighter(text.getvalue())
    write_text(folder / f"{name}.svg", svg)
    return Drawn(name, caption, *_for_page(svg, name))


def _lighter(svg: str) -> str:
    """Encode photographs and smooth maps as JPEG and pictures of few colours as indexed PNG: a fifth of the size."""
    return re.sub(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", lambda found: _encoded(found[1]), svg)


def _encoded(data: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    written = {"jpeg": io.BytesIO(), "png": io.BytesIO()}
    image.save(written["jpeg"], "jpeg", quality=86, subsampling=0, optimize=True)
    if image.getcolors(256) is not None:
        colours, indices = np.unique(np.asarray(image).reshape(-1, 3), axis=0, return_inverse=True)
        indexed = palette_image(indices.reshape(image.height, image.width), colours)
        indexed.save(written["png"], "png", optimize=True)
    else:
        image.save(written["png"], "png", optimize=True)
    kind = min(written, key=lambda kind: len(written[kind].getvalue()))
    return f"data:image/{kind};base64,{base64.b64encode(written[kind].getvalue()).decode()}"


_GLYPH = re.compile(r'<path id="(DejaVu[^"]+)"[^>]*/>\s*')


def _for_page(svg: str, name: str) -> tuple[str, dict[str, str]]:
    """Return the <svg> with the page's colours, its width in print and unique ids, and its glyphs by id."""
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    glyphs = {found[1]: " ".join(found[0].split()) for found in _GLYPH.finditer(body)}
    body = re.sub(r"<defs>\s*</defs>|<!--.*?-->", "", _GLYPH.sub("", body))
    for colour, role in _IN_PAGE.items():
        body = body.replace(colour, role)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", body)
    body = re.sub(r'(id="|url\(#|href="#)(?!DejaVu)', rf"\g<1>{name}-", body)
    opening = body[: body.index(">") + 1]
    view, points = (re.search(pattern, opening) for pattern in (r'viewBox="[^"]+"', r'width="([\d.]+)pt"'))
    assert view is not None
    assert points is not None
    pixels = float(points[1]) * 96 / 72
    begin = f'<svg {view[0]} style="width:{pixels:.0f}px" role="img" aria-labelledby="{name}">'
    return begin + re.sub(r"\n\s*", "\n", body[len(opening) :]), glyphs
