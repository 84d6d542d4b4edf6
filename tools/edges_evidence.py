"""Compare two models at edges and in time: results/edges.md.

    incseg eval BEFORE --data voc --root VOC2012 --json > before.json
    incseg eval AFTER --data voc --root VOC2012 --json > after.json
    python -m tools.edges_evidence VOC BEFORE AFTER before.json after.json --photos VOC2012/JPEGImages

The models predict the same photographs in turn, so that a busy machine slows both down. Sections of other names in
results/edges.json stay as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import incseg
from incseg.inference import Predictor
from incseg.io import write_json, write_text

SIDES = ("before", "after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="title of the section")
    parser.add_argument("models", nargs=2, metavar="MODEL")
    parser.add_argument("scores", nargs=2, metavar="JSON", type=Path, help="what incseg eval printed for each model")
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs to measure the time on")
    parser.add_argument("--count", type=int, default=40, help="photographs")
    parser.add_argument("--out", type=Path, default=Path("results/edges"), help="for OUT.json and OUT.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    predictors = [incseg.load(model, device="cpu", threads=1) for model in args.models]
    files = sorted(file for file in args.photos.iterdir() if file.suffix == ".jpg")[: args.count]
    found = {
        "models": {side: described(predictor) for side, predictor in zip(SIDES, predictors, strict=True)},
        "scores": {
            side: {key: json.loads(file.read_text())[key] for key in ("images", "mean", "boundary_mean")}
            for side, file in zip(SIDES, args.scores, strict=True)
        },
        "seconds": measured(predictors, files),
    }
    file = args.out.with_suffix(".json")
    sections = json.loads(file.read_text()) if file.exists() else {}
    sections[args.name] = found
    write_json(file, sections)
    write_text(args.out.with_suffix(".md"), page(sections))
    print(f"written: {file}, {args.out.with_suffix('.md')}")


def described(predictor: Predictor) -> str:
    model = predictor.info["model"]
    sharpened = f", sharpened in {model['sharpen']} rounds" if model.get("sharpen") else ""
    return f"{model['backbone']}, head of {model['width']} channels, input {predictor.test_size}{sharpened}"


def measured(predictors: list[Predictor], files: list[Path]) -> dict[str, Any]:
    """Return processor seconds of a prediction by both, in turn, and the ratio: median and quartiles."""
    taken: list[list[float]] = [[], []]
    for round_ in range(3):
        for file in files:
            for own, predictor in zip(taken, predictors, strict=True):
                started = time.process_time()
                predictor.predict(file)
                if round_:  # the first round warms up
                    own.append(time.process_time() - started)
    ratios = [after / before for before, after in zip(*taken, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    before, after = (round(1000 * statistics.median(own), 1) for own in taken)
    return {"before_ms": before, "after_ms": after, "ratio": [round(r, 2) for r in (lower, median, upper)]}


def page(sections: dict[str, Any]) -> str:
    lines = [
        "# Edges: the network of 0.1 and that of the preset `laptop`",
        "",
        "Whole photographs at their own size (`incseg eval`), which nothing trained or chose on. Boundary IoU compares",
        "only pixels within 2 % of the diagonal from an edge. Time is that of one thread with reading the file, both",
        "models in turn; the ratio is after / before, median and quartiles. Made by `tools/edges_evidence.py`.",
    ]
    for name, found in sections.items():
        lines += [
            "",
            f"## {name}",
            "",
            "| | network | photographs | IoU | boundary IoU | ms each |",
            "|---|---|" + "---:|" * 4,
        ]
        for side in SIDES:
            scores, seconds = found["scores"][side], found["seconds"]
            cells = [scores["images"], scores["mean"], scores["boundary_mean"], seconds[f"{side}_ms"]]
            lines.append(f"| {side} | {found['models'][side]} | {' | '.join(map(str, cells))} |")
        lower, median, upper = found["seconds"]["ratio"]
        gain = found["scores"]["after"]["boundary_mean"] / found["scores"]["before"]["boundary_mean"]
        lines += ["", f"Boundary IoU {gain:.2f} times, time {median:.2f} times ({lower:.2f} to {upper:.2f}) as much."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
