"""`incseg train`: an experiment through all its steps, or the rest of one that was interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from incseg.cli.settings import parse_run
from incseg.config import OWN_PHOTOGRAPHS
from incseg.engine.progress import figures_line, percent
from incseg.engine.runtime import is_main_process
from incseg.run import fit_size, train

HELP = "learn a task step by step; the same command goes on where a run was interrupted"


_SIZE_FLAGS = ("--train.crop", "--eval.size", "--config")


def main(argv: Sequence[str]) -> int:
    config = parse_run("incseg train", "Learn a task step by step.", argv)
    if config.preset == OWN_PHOTOGRAPHS and not any(token.split("=")[0] in _SIZE_FLAGS for token in argv):
        size = fit_size(config)
        if is_main_process():
            print(size)
    try:
        results = train(config)
    except KeyboardInterrupt:
        if is_main_process():
            print(f"stopped; everything so far is saved in {config.folder}, the same command goes on", file=sys.stderr)
        return 130
    if not is_main_process():
        return 0
    final = results["final"]
    if config.shows_classes:
        print(f"mean IoU {percent(final['all'])}, background included; training took {results['seconds']:.0f} s")
    else:
        print(f"{figures_line(final)}  Avg {percent(final['avg'])}  in {results['seconds']:.0f} s")
    print(f"run folder: {config.folder}   models: {config.folder}/steps/K/model.safetensors")
    print(f"next: incseg predict {config.folder} IMAGE… --out DIR   or   incseg extend {config.folder} --help")
    return 0
