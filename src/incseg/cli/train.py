"""`incseg train`: an experiment through all its steps, or the rest of one that was interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from incseg.cli.settings import parse_run
from incseg.engine.progress import figures_line, percent
from incseg.engine.runtime import speaks
from incseg.experiment import train

HELP = "learn a task step by step; the same command goes on where a run was interrupted"


def main(argv: Sequence[str]) -> int:
    config = parse_run("incseg train", "Learn a task step by step.", argv)
    try:
        results = train(config)
    except KeyboardInterrupt:
        if speaks():
            print(f"stopped; everything so far is saved in {config.folder}, the same command goes on", file=sys.stderr)
        return 130
    if not speaks():
        return 0
    final = results["final"]
    print(f"{figures_line(final)}  Avg {percent(final['avg'])}  in {results['seconds']:.0f} s")
    print(f"run folder: {config.folder}   models: {config.folder}/steps/K/model.safetensors")
    print(f"next: incseg predict {config.folder} IMAGE… --out DIR   or   incseg eval {config.folder} --help")
    return 0
