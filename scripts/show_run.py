"""A finished run as a page: results/NAME.md and .json, read from the run folder; with --balancing also tested again.

python scripts/show_run.py runs/voc-15-1 voc-15-1 --balancing none paper ratio exact odds
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from incseg.engine.rundir import RunDir
from incseg.experiment import evaluate
from incseg.files import read_json, write_json, write_text

FIGURES = ("base", "new", "all", "inc")


def cells(row: dict[str, Any]) -> str:
    return " | ".join("–" if row[figure] is None else f"{row[figure]:.1f}" for figure in FIGURES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--balancing", nargs="*", default=[])
    parser.add_argument("--note", default="", help="a line for the page")
    args = parser.parse_args()
    run = RunDir(args.run)
    results, protocol = read_json(run.results), read_json(run.protocol)
    environment = read_json(run.root / "environment.json")
    command = list(environment["command"])
    if "--root" in command:
        command[command.index("--root") + 1] = "VOC2012"
    again = {mode: evaluate(args.run, None, {"balancing": mode}, {"threads": None}) for mode in args.balancing}
    lines = [
        f"# {protocol['dataset']} {protocol['task']}, {protocol['setting']}",
        "",
        "| step | learns | train images | test images | Base | New | All | Inc | AUROC unseen / background |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["steps"]:
        ranking = row["unseen"]["from_background"]
        learns = ", ".join(row["classes"]) if len(row["classes"]) < 6 else f"{len(row['classes'])} classes"
        auroc = f"{ranking['auroc']:.3f}" if ranking else "–"
        images = f"{row['train_images']} | {row['test_images']}"
        lines.append(f"| {row['index']} | {learns} | {images} | {cells(row)} | {auroc} |")
    if again:
        lines += [
            "",
            "The last model, tested again with other balancings (`incseg eval RUN --method.balancing X`):",
            "",
        ]
        lines += ["| balancing | Base | New | All | Inc |", "|---|---|---|---|---|"]
        lines += [f"| {mode} | {cells(row)} |" for mode, row in again.items()]
    lines += [
        "",
        *([args.note, ""] if args.note else []),
        "Label rules: " + ", ".join(f"{key} {value}" for key, value in results["rules"].items()) + ".",
        f"{results['seconds']:.0f} s of training and tests, {environment['threads']} thread; "
        f"incseg {environment['incseg']}, commit {environment['commit']}, torch {environment['torch']}.",
        "",
        f"Command: `{' '.join(command)}`",
    ]
    write_text(Path("results") / f"{args.name}.md", "\n".join(lines) + "\n")
    write_json(Path("results") / f"{args.name}.json", {"results": results, "balancing": again})


if __name__ == "__main__":
    main()
