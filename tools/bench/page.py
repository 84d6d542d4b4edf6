"""The page of a bench: NAME.json has all figures; NAME.md and the plot are made from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from incseg.engine.rundir import environment
from incseg.io import read_json, write_compact_json, write_text
from incseg.report import style
from incseg.report.style import BLUE, VERMILION, WIDTH, new_figure, styled
from incseg.report.writers import markdown_table
from tools.bench.measure import Section, Settings, Spread

_UNITS = {"milliseconds": "ms an image", "megabytes": "extra MB an image"}
_COLOURS = {"update": BLUE, "prediction": VERMILION}


def save_sections(out: Path, bench: str, sections: Sequence[Section], settings: Settings, order: Sequence[str]) -> None:
    """Replace a bench's sections in OUT.json and write the page again. Other benches do not change."""
    file = out.with_name(out.name + ".json")
    benches: dict[str, Any] = read_json(file) if file.exists() else {}
    benches[bench] = {
        "made": {
            **environment(),
            "command": _command(bench, settings),
            "cpu": _cpu(),
            "load": _load(),
            "quick": settings.quick,
            "threads": settings.threads,
            "repeats": settings.repeats,
        },
        "sections": [section.as_dict() for section in sections],
    }
    benches = {name: benches[name] for name in order if name in benches}
    write_compact_json(file, benches)
    plot = f"{out.name}-growth"
    if "growth" in benches:
        style.save_figure(_growth(benches["growth"]["sections"]), out.parent, plot, "Time and memory of an image")
    write_text(out.with_name(out.name + ".md"), _page(benches, plot))


def _page(benches: Mapping[str, Any], plot: str) -> str:
    aims = [(s, aim) for bench in benches.values() for s in bench["sections"] for aim in s["aims"]]
    missed = [f"- {s['title']}: {', '.join(_aim(aim)[:3])} measured" for s, aim in aims if not aim["met"]]
    lines = [
        "# Speed and memory",
        "",
        f"{len(aims) - len(missed)} of {len(aims)} aims met." + (" Not met:" if missed else ""),
        *([""] if missed else []),
        *missed,
        "",
        "Figures are medians over the rounds, with the lowest and the highest; all candidates take their turn in every "
        "round, ratios are taken within a round.",
    ]
    for name, bench in benches.items():
        for section in bench["sections"]:
            lines += ["", *_section(section)]
            if name == "growth" and section is bench["sections"][-1]:
                lines += ["", f"![Time and memory of an image]({plot}.png)"]
            lines += ["", _made(bench["made"])]
    return "\n".join(lines) + "\n"


def _section(section: Mapping[str, Any]) -> list[str]:
    lines = [f"## {section['title']}", "", *markdown_table(section["heading"], section["rows"])]
    if section["aims"]:
        lines += ["", *markdown_table(["aim", "", "measured", "met"], [_aim(aim) for aim in section["aims"]], left=1)]
    return [*lines, *(line for note in section["notes"] for line in ("", note))]


def _aim(aim: Mapping[str, Any]) -> list[str]:
    limit = f"{aim['kind']} {aim['limit']:.3g}"
    return [aim["what"], limit, Spread(**aim["measured"]).text(), "yes" if aim["met"] else "**no**"]


def _made(made: Mapping[str, Any]) -> str:
    quick = "QUICK SIZES, which show only that the bench works. " if made["quick"] else ""
    return (
        f"{quick}Command: `{made['command']}`; commit {made['commit']}; {made['cpu']}, {made['cpus']} cores, "
        f"load {made['load']:.1f}, torch {made['torch']}, {made['threads']} thread(s), {made['repeats']} rounds."
    )


def _command(bench: str, settings: Settings) -> str:
    """Return the command that repeats this bench, without the folder of its dataset."""
    flags = ["--quick"] * settings.quick + ["--root VOC2012"] * bool(settings.root and bench == "cache")
    flags += [f"--threads {settings.threads}", f"--repeats {settings.repeats}"]
    return " ".join(["python -m tools.bench", bench, *flags])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def _load() -> float:
    """Return the load of the machine: the mean number of running processes, including the bench."""
    return round(os.getloadavg()[0], 2)


@styled
def _growth(sections: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw time (above) and memory (below) against each axis, all logarithmic."""
    figure = new_figure(WIDTH, 5.5)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(2, len(sections), squeeze=False, sharex="col", sharey="row")
    for column, section in enumerate(sections):
        for row, unit in enumerate(_UNITS):
            _panel(grid[row, column], section["figures"], unit)
        grid[1, column].set_xlabel(section["figures"]["title"])
    for row, words in enumerate(_UNITS.values()):
        grid[row, 0].set_ylabel(words)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _panel(axes: Axes, figures: Mapping[str, Any], unit: str) -> None:
    for work, points in figures["per_image"].items():
        x = [int(value) for value in points]
        spreads = [Spread(**point[unit]) for point in points.values()]
        middle = [spread.median for spread in spreads]
        axes.plot(x, middle, "o-", color=_COLOURS[work], label=work, markersize=4)
        ends = [spread.low for spread in spreads], [spread.high for spread in spreads]
        axes.fill_between(x, *ends, color=_COLOURS[work], alpha=0.15, linewidth=0)
        # through the last point: constant costs lift the first ones above it
        must = [middle[-1] * (value / x[-1]) ** figures["exponent"] for value in x]
        axes.plot(x, must, ":", color=_COLOURS[work], linewidth=1, label=f"what {work} must grow by")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(x, [str(value) for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
