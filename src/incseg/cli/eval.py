"""`incseg eval`: test a saved step again, with other inference options if given."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from incseg.cli.settings import method_overrides
from incseg.engine.progress import Screen
from incseg.engine.runtime import speaks
from incseg.experiment import evaluate, load_run_config

HELP = "test a saved model again, with other inference options if given (--method.balancing odds)"
PASS_UNKNOWN = True  # the method's own options are known only when the run is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, metavar="K", help="which step's model (default: the last)")
    parser.add_argument("--root", metavar="DIR", help="folder of the dataset, where it has moved since training")
    parser.add_argument("--device", help="cpu, cuda or auto (default: as in training)")
    parser.add_argument("--threads", type=int, help="of torch (default: as in training)")
    parser.add_argument("--json", action="store_true", help="print the row as JSON")
    parser.epilog = "Options of the run's method are given as --method.NAME VALUE."


def run(args: argparse.Namespace) -> int:
    config = load_run_config(args.run)
    options = method_overrides("incseg eval", config.method["name"], args.unknown)
    overrides: dict[str, Any] = {
        name: getattr(args, name) for name in ("device", "threads") if getattr(args, name) is not None
    }
    if args.root:
        config.data.root = args.root
        overrides["data"] = config.data
    row = evaluate(args.run, args.step, options, overrides, lambda: Screen(Console(stderr=args.json, highlight=False)))
    if args.json and speaks():
        print(json.dumps(row, indent=1, ensure_ascii=False))
    return 0
