"""`incseg train`: train all steps of a run, or the rest of an interrupted one."""

from __future__ import annotations

import argparse
import sys

from incseg.cli.settings import parse_run
from incseg.engine.progress import figures_line
from incseg.engine.runtime import is_main_process
from incseg.metrics import percent
from incseg.presets import FITS_OBJECTS
from incseg.run import fit_size, train

HELP = "train a model step by step; repeat the command to resume an interrupted run"
PASS_UNKNOWN = ("-",)  # defaults and flags depend on the preset and the method, so jsonargparse reads all of them

_SIZE_FLAGS = ("--train.crop", "--eval.size", "--config")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `parse_run` has all flags, also --help."""


def run(args: argparse.Namespace) -> int:
    config = parse_run("incseg train", "Train a model step by step.", args.unknown)
    if config.preset in FITS_OBJECTS and not any(token.split("=")[0] in _SIZE_FLAGS for token in args.unknown):
        size = fit_size(config)
        if is_main_process():
            print(size)
    try:
        results = train(config)
    except KeyboardInterrupt:
        if is_main_process():
            print(f"stopped; progress is saved in {config.folder}; repeat the command to resume", file=sys.stderr)
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
