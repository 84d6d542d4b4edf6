"""Compare evidential with lower and upper bound on the embedded dataset, three seeds: results/shapes.md and .json.

    python tools/compare_shapes.py [--jobs 2] [--runs runs/shapes]

Finished runs are not run again; all figures of the tables are read from the run folders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from incseg.io import write_compact_json

SEEDS = (42, 1337, 2001)
FIGURES = ("base", "new", "all", "inc")
ROWS = {
    "finetune": ["--method", "finetune"],
    "evidential": ["--method", "evidential"],
    # 21 epochs over all images are as many updates as the 12 of each of the three steps together.
    "joint": ["--method", "joint", "--train.epochs", "21"],
}


def command(name: str, seed: int, runs: Path) -> list[str]:
    out = runs / f"{name}-{seed}"
    return ["train", "--data", "shapes", "--task", "6-2", *ROWS[name], "--seed", str(seed), "--out", str(out)]


def run(arguments: list[str]) -> None:
    out = Path(arguments[-1])
    if not (out / "results.json").exists():
        print("incseg", *arguments, flush=True)
        done = subprocess.run([sys.executable, "-m", "incseg", *arguments, "--threads", "1"], stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"incseg {' '.join(arguments)} failed")


def spread(values: list[float | None]) -> dict[str, float] | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return {
        "mean": statistics.fmean(numbers),
        "standard_deviation": statistics.stdev(numbers) if len(numbers) > 1 else 0.0,
        "variance": statistics.variance(numbers) if len(numbers) > 1 else 0.0,
        "runs": len(numbers),
    }


def shown(value: dict[str, float] | None) -> str:
    return "–" if value is None else f"{value['mean']:.1f} ± {value['standard_deviation']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    commands = {(name, seed): command(name, seed, args.runs) for name in ROWS for seed in SEEDS}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, commands.values()))
    rows, table = [], {}
    environment, commits, rules = {}, set(), {}
    for (name, seed), arguments in commands.items():
        folder = Path(arguments[-1])
        results = json.loads((folder / "results.json").read_text())
        environment = json.loads((folder / "environment.json").read_text())
        commits.add(str(environment["commit"]))
        rules = results["rules"]
        unseen = [row["unseen"]["from_background"] for row in results["steps"] if row["unseen"]["from_background"]]
        rows.append(
            {
                "method": name,
                "seed": seed,
                **{figure: results["final"][figure] for figure in FIGURES},
                "unseen_auroc": statistics.fmean(u["auroc"] for u in unseen) if unseen else None,
                "seconds": results["seconds"],
                "command": "incseg " + " ".join(arguments),
            }
        )
    for name in ROWS:
        mine = [row for row in rows if row["method"] == name]
        table[name] = {figure: spread([row[figure] for row in mine]) for figure in (*FIGURES, "unseen_auroc")}
    lines = [
        "# shapes 6-2, overlapped, three seeds",
        "",
        "Percent mIoU at the end, mean ± standard deviation over seeds 42, 1337, 2001; variances in shapes.json.",
        "",
        "| method | Base | New | All | Inc |",
        "|---|---|---|---|---|",
        *(f"| {name} | " + " | ".join(shown(table[name][figure]) for figure in FIGURES) + " |" for name in ROWS),
        "",
        "joint (softmax) learns all classes at once, with as many updates as the three steps together.",
        "Base: background and the six classes of step 0; New: the four added later; Inc: mean over the three steps.",
        "AUROC of 1 − P(background) for classes not learnt yet against true background, mean over such steps: "
        + ", ".join(f"{name} {table[name]['unseen_auroc']['mean']:.3f}" for name in ROWS if table[name]["unseen_auroc"])
        + ".",
        "",
        "Label rules: " + ", ".join(f"{key} {value}" for key, value in rules.items()) + ".",
        f"incseg {environment['incseg']}, commits {', '.join(sorted(commits))}, torch {environment['torch']}, "
        f"{environment['cpus']} CPUs, one thread a run.",
        "",
        "Command: `make results-shapes`, which runs",
        "",
        "```",
        *(row["command"] for row in rows if row["seed"] == SEEDS[0]),
        "```",
        "and the same with seeds 1337 and 2001.",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "shapes.md").write_text("\n".join(lines) + "\n")
    write_compact_json(args.out / "shapes.json", {"rows": rows, "summary": table})
    print("\n".join(lines[4 : 6 + len(ROWS)]))


if __name__ == "__main__":
    main()
