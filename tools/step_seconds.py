"""Compare the seconds of a later step in closed form and by SGD: a picture and a page from two run folders.

    incseg train --preset voc-laptop --data voc --root VOC2012 --task 15-1 --method analytic --out runs/seconds/analytic
    incseg train --preset voc-laptop --data voc --root VOC2012 --task 15-1 --out runs/seconds/evidential
    python tools/step_seconds.py runs/seconds/analytic runs/seconds/evidential

Run both on the same machine, one after the other, with nothing else running; the page has their number of threads. The
features must be cached already. Writes results/step-seconds.md, .json and .png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from incseg.engine.rundir import RunDir
from incseg.io import read_json, write_compact_json, write_text

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    found = [measured(RunDir(path)) for path in args.runs]
    write_compact_json(RESULTS / "step-seconds.json", found)
    write_text(RESULTS / "step-seconds.md", page(found))
    draw(found, RESULTS / "step-seconds.png")
    return 0


def measured(run: RunDir) -> dict[str, Any]:
    environment = read_json(run.environment)
    steps = [
        {"classes": row["classes"], "images": row["train_images"], "seconds": row["seconds"]["train"]}
        for row in run.rows()[1:]
    ]
    return {
        "method": run.root.name,
        "threads": environment.get("threads"),
        "cpus": environment["cpus"],
        "commit": environment["commit"],
        "steps": steps,
    }


def page(found: list[dict[str, Any]]) -> str:
    names = [one["method"] for one in found]
    lines = [
        "# Seconds to add a class",
        "",
        "Later steps of VOC 15-1, overlapped, preset `voc-laptop`, seed 42: training alone, without the test, with the",
        f"features computed before. {found[0]['cpus']} CPUs, {found[0]['threads']} threads, no GPU. Made by",
        "`tools/step_seconds.py`, whose first lines have the commands.",
        "",
        f"| class | images | {' | '.join(f'`{name}`' for name in names)} |",
        f"|---|---:|{'---:|' * len(names)}",
    ]
    for row in zip(*(one["steps"] for one in found), strict=True):
        seconds = " | ".join(f"{one['seconds']:.1f} s" for one in row)
        lines.append(f"| {', '.join(row[0]['classes'])} | {row[0]['images']} | {seconds} |")
    return "\n".join([*lines, "", "![Seconds per added class](step-seconds.png)", ""])


def draw(found: list[dict[str, Any]], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    width = 0.8 / len(found)
    for number, one in enumerate(found):
        places = [step + number * width for step in range(len(one["steps"]))]
        bars = axes.bar(places, [step["seconds"] for step in one["steps"]], width, label=one["method"])
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(
        [step + 0.4 - width / 2 for step in range(len(found[0]["steps"]))],
        [f"{', '.join(step['classes'])}\n{step['images']} images" for step in found[0]["steps"]],
        fontsize=8,
    )
    axes.set_ylabel("seconds to add the class")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
