"""Compare two models at edges and in time: results/edges.md.

    incseg eval BEFORE --data voc --root VOC2012 --json > before.json
    incseg eval AFTER --data voc --root VOC2012 --json > after.json
    python -m tools.edges_evidence VOC BEFORE AFTER before.json after.json --photos VOC2012/JPEGImages

The models predict the same photographs in turn, so that a busy machine slows both down. Sections of other names in
results/edges.json do not change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import incseg
from incseg.inference import Predictor
from incseg.io import write_json, write_text
from incseg.models.files import load_segmenter

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
    as_before = unfolded(args.models[0], predictors[0])
    files = sorted(file for file in args.photos.iterdir() if file.suffix == ".jpg")[: args.count]
    found = {
        "models": {side: described(predictor) for side, predictor in zip(SIDES, predictors, strict=True)},
        "scores": {
            side: {key: json.loads(file.read_text())[key] for key in ("images", "mean", "boundary_mean")}
            for side, file in zip(SIDES, args.scores, strict=True)
        },
        "seconds": measured([as_before, *predictors], files),
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


def unfolded(model: str, predictor: Predictor) -> Predictor:
    """Return the predictor as version 0.1 ran it, with batch norms of their own."""
    network, _ = load_segmenter(predictor.info["file"])
    return replace(predictor, model=network)


def measured(predictors: list[Predictor], files: list[Path]) -> dict[str, Any]:
    """Return processor milliseconds of a prediction by each, in turn, and the ratios to the last: median, quartiles."""
    taken: list[list[float]] = [[] for _ in predictors]
    for round_ in range(3):
        for file in files:
            for own, predictor in zip(taken, predictors, strict=True):
                started = time.process_time()
                predictor.predict(file)
                if round_:  # the first round warms up
                    own.append(time.process_time() - started)
    ratios = [[after / other for other, after in zip(own, taken[-1], strict=True)] for own in taken[:-1]]
    return {
        "ms": [round(1000 * statistics.median(own), 1) for own in taken],
        "ratios": [[round(r, 2) for r in statistics.quantiles(own, n=4)] for own in ratios],
    }


def page(sections: dict[str, Any]) -> str:
    lines = [
        "# Edges: the network of 0.1 and that of the preset `laptop`",
        "",
        "Whole photographs at their own size (`incseg eval`), which nothing trained or chose on. Boundary IoU compares",
        "only pixels within 2 % of the diagonal from an edge. Time is that of one thread with reading the file, both",
        "models in turn; ratios are medians and quartiles. Made by `tools/edges_evidence.py`.",
    ]
    for name, found in sections.items():
        lines += [
            "",
            f"## {name}",
            "",
            "| | network | photographs | IoU | boundary IoU | ms each |",
            "|---|---|" + "---:|" * 4,
        ]
        scores, (as_before, *milliseconds) = found["scores"], found["seconds"]["ms"]
        for side, time_ in zip(SIDES, milliseconds, strict=True):
            cells = [*(scores[side][key] for key in ("images", "mean", "boundary_mean")), time_]
            lines.append(f"| {side} | {found['models'][side]} | {' | '.join(map(str, cells))} |")
        gain = scores["after"]["boundary_mean"] / scores["before"]["boundary_mean"]
        of_version, of_now = (f"{m:.2f} ({low:.2f} to {high:.2f})" for low, m, high in found["seconds"]["ratios"])
        lines += [
            "",
            f"Boundary IoU: {gain:.2f} times as much. Time: {of_version} of that of 0.1, which did not fold batch",
            f"norms ({as_before} ms), and {of_now} of that of the old network with folded ones.",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
