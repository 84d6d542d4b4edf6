"""Inject faults into incseg and count the cases that end badly: results/torture.md and .json.

python -m tools.torture                 all kinds, some minutes
python -m tools.torture inputs --quick  a few cases of one kind
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from incseg.io import write_compact_json, write_text
from tools.torture import determinism, disk, files, inputs, kills, numbers, server
from tools.torture.case import Kind, Lost, own_folder, preload

RESULTS = Path(__file__).resolve().parents[2] / "results"
KINDS = {kind.name: kind for kind in (kills.KIND, disk.KIND, files.KIND, numbers.KIND, inputs.KIND, server.KIND)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join([*KINDS, 'determinism'])} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few cases of each, as in the tests")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default: 0)")
    parser.add_argument("--out", type=Path, default=RESULTS / "torture", metavar="FILE", help="without suffix")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their group or name")
    args = parser.parse_args()
    preload()
    chosen = args.kinds or [*KINDS, *([] if args.quick else ["determinism"])]
    for name in chosen:
        if name not in (*KINDS, "determinism"):
            parser.error(f"unknown kind '{name}'; choose from {', '.join([*KINDS, 'determinism'])}")
    found: dict[str, Any] = {}
    for name in chosen:
        found[name] = (
            determinism.matrix() if name == "determinism" else run(KINDS[name], args.seed, args.quick, args.only)
        )
    results = _read(args.out)
    if "determinism" in found:
        results["determinism"] = found.pop("determinism")
    kinds = {**results["kinds"], **found}
    results["kinds"] = {name: kinds[name] for name in KINDS if name in kinds}
    results["command"] = " ".join(["python -m tools.torture", *(["--quick"] if args.quick else [])])
    results["seed"] = args.seed
    write_compact_json(args.out.with_suffix(".json"), results)
    write_text(args.out.with_suffix(".md"), page(results))
    return 1 if any(kind["lost"] for kind in results["kinds"].values()) else 0


def run(kind: Kind, seed: int, quick: bool, only: str) -> dict[str, Any]:
    """Run every case of a kind in its own folder. Return counts by group, and the lost cases with the reason."""
    began = time.monotonic()
    cases, survived, lost = Counter[str](), Counter[str](), []
    for number, case in enumerate(kind.cases(seed, quick)):
        if number % 100 == 99:
            print(f"{kind.name}: {cases.total()} cases, {len(lost)} lost", flush=True)
        if only not in f"{case.group} {case.name}":
            continue
        cases[case.group] += case.count
        with own_folder() as folder:
            try:
                case.run(folder)
                survived[case.group] += case.count
            except Lost as reason:
                text = str(reason).replace(str(folder), "…")
                lost.append({"group": case.group, "case": case.name, "count": case.count, "reason": text})
                print(f"LOST {kind.name}, {case.group}: {case.name}: {text}", file=sys.stderr, flush=True)
    groups = [
        {"group": group, "must": kind.must[group], "cases": cases[group], "survived": survived[group]}
        for group in kind.must
        if cases[group]
    ]
    seconds = round(time.monotonic() - began, 1)
    print(f"{kind.name}: {cases.total()} cases, {survived.total()} survived, in {seconds} s", flush=True)
    return {"groups": groups, "lost": lost, "seconds": seconds, **kind.details()}


def _read(out: Path) -> dict[str, Any]:
    """Return the results of earlier runs, for the kinds that are not run now."""
    file = out.with_suffix(".json")
    return json.loads(file.read_text()) if file.exists() else {"kinds": {}}


def page(results: dict[str, Any]) -> str:
    groups = [(name, group) for name, kind in results["kinds"].items() for group in kind["groups"]]
    cases, survived = (sum(group[key] for _, group in groups) for key in ("cases", "survived"))
    lines = [
        "# What is broken on purpose, and what is lost",
        "",
        f"Written by `make torture` ({results['command']}, seed {results['seed']}). A case survives when it ends in "
        "success or in one clear line on stderr with a non-zero exit; a traceback, a hang or a wrong answer is a loss.",
        "",
        f"**{cases} cases, {survived} survived, {cases - survived} lost.**",
        "",
        "| kind | fault | what must come out | cases | survived | lost |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, group in groups:
        counts = (group["cases"], group["survived"], group["cases"] - group["survived"])
        lines.append(f"| {name} | {group['group']} | {group['must']} | " + " | ".join(map(str, counts)) + " |")
    for name, kind in results["kinds"].items():
        for fault in kind["lost"]:
            lines += ["", f"Lost, {name}, {fault['group']}: {fault['case']}: {fault['reason']}"]
    if moments := results["kinds"].get("kills", {}).get("moments"):
        counted = ", ".join(f"{what} {count}" for what, count in moments.items())
        lines += ["", f"Where the kills fell: {counted}."]
    if "determinism" in results:
        lines += ["", "## What is the same", "", *determinism.table(results["determinism"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
