"""The page of a bench: NAME.json holds all figures; NAME.md and the plot are made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from incseg.bench.measure import Section, Settings, Spread
from incseg.engine.rundir import environment
from incseg.files import read_json, replacing, write_json, write_text
from incseg.report.writers import markdown_table

_UNITS = {"milliseconds": "ms an image", "megabytes": "extra MB an image"}
_INK = {"update": "#1f5a96", "prediction": "#b4521e"}


def keep(out: Path, bench: str, sections: Sequence[Section], settings: Settings, order: Sequence[str]) -> None:
    """Put a bench's sections into OUT.json, where those of other benches stay, and make the page anew."""
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
    write_json(file, benches)
    pictures = _draw(benches["growth"]["sections"], out) if "growth" in benches else []
    write_text(out.with_name(out.name + ".md"), _page(benches, pictures))


def _page(benches: Mapping[str, Any], pictures: Sequence[str]) -> str:
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
                lines += ["", f"![Time and memory of an image]({pictures[0]})"]
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
    """What makes this bench again, wherever its dataset lies."""
    flags = ["--quick"] * settings.quick + ["--root VOC2012"] * bool(settings.root and bench == "cache")
    return " ".join(["incseg bench", bench, *flags, f"--threads {settings.threads} --repeats {settings.repeats}"])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def _load() -> float:
    """What other work there was: the mean number of running processes, the bench's own among them."""
    return round(os.getloadavg()[0], 2)


def _draw(sections: Sequence[Mapping[str, Any]], out: Path) -> list[str]:
    """Time above and memory below against each axis, all logarithmic; returns the names of the files."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "bench"}
    count = len(sections)
    with plt.rc_context(style):
        figure, grid = plt.subplots(
            2, count, figsize=(3.1 * count, 5), layout="constrained", squeeze=False, sharex="col", sharey="row"
        )
        for column, section in enumerate(sections):
            for row, unit in enumerate(_UNITS):
                _panel(grid[row, column], section["figures"], unit)
            grid[1, column].set_xlabel(section["figures"]["title"])
        for row, words in enumerate(_UNITS.values()):
            grid[row, 0].set_ylabel(words)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
        files = []
        for suffix in ("png", "svg"):
            file = out.with_name(f"{out.name}-growth.{suffix}")
            with replacing(file) as temporary:
                figure.savefig(temporary, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            files.append(file.name)
        plt.close(figure)
    return files


def _panel(axes: Axes, figures: Mapping[str, Any], unit: str) -> None:
    for work, points in figures["per_image"].items():
        x = [int(value) for value in points]
        spreads = [Spread(**point[unit]) for point in points.values()]
        middle = [spread.median for spread in spreads]
        axes.plot(x, middle, "o-", color=_INK[work], label=work, markersize=4)
        ends = [spread.low for spread in spreads], [spread.high for spread in spreads]
        axes.fill_between(x, *ends, color=_INK[work], alpha=0.15, linewidth=0)
        # through the last point: constant costs lift the first ones above it
        must = [middle[-1] * (value / x[-1]) ** figures["exponent"] for value in x]
        axes.plot(x, must, ":", color=_INK[work], linewidth=1, label="growth of the work itself" * (work == "update"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(x, [str(value) for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
