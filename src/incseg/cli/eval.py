"""`incseg eval`: test a saved step again, with other inference options or on other photographs if given."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from incseg import hub
from incseg.cli.main import add_common
from incseg.cli.settings import method_overrides
from incseg.config import RunConfig, load_run_config, method_options
from incseg.data import build_source
from incseg.data.source import SPLITS, Source, Split
from incseg.engine.progress import Screen, showing
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import is_main_process
from incseg.inference import load
from incseg.methods import build_method
from incseg.run import evaluate
from incseg.score import score, score_table
from incseg.types import UserError

HELP = "test a saved model again, with other inference options, or on other labelled photographs (--data, --root)"
PASS_UNKNOWN = ("--method.",)  # the method's options are known only when the run is read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder; with --data any model")
    parser.add_argument("--step", type=int, metavar="K", help="which step's model (default: the last)")
    parser.add_argument("--root", metavar="DIR", help="folder of the dataset, if it has moved since training")
    parser.add_argument(
        "--data", metavar="NAME",
        help="test on another dataset, folder, coco, voc, …, in --root: classes are matched by name, photographs are "
        "predicted whole",
    )  # fmt: skip
    parser.add_argument(
        "--split", choices=["train", "val", "all"],
        help="with --data: which of its photographs (default: val, or all if the dataset does not define val)",
    )  # fmt: skip
    add_common(parser, "--flip", "--scales")
    parser.add_argument(
        "--method", metavar="NAME", help="package.module:Class, for models trained by a method of your own"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:N, mps or auto (default: as in training)")
    parser.add_argument("--threads", type=int, help="of torch (default: as in training)")
    parser.add_argument("--json", action="store_true", help="print the row as JSON")
    parser.add_argument(
        "--save", action="store_true", help="save the row in RUN/retests, which incseg compare RUN shows"
    )
    parser.epilog = "Options of the run's method are given as --method.NAME VALUE."


def run(args: argparse.Namespace) -> int:
    if args.data is not None:
        return _on_other_photographs(args)
    views = (("--split", args.split is not None), ("--flip", args.flip), ("--scales", args.scales != (1.0,)))
    if wrong := [flag for flag, given in views if given]:
        raise UserError(f"{wrong[0]} is for --data NAME --root DIR; give both, or leave it out")
    if hub.is_address(args.run):
        raise UserError(f"'{args.run}' comes without its dataset; give photographs to test on: --data and --root")
    config = load_run_config(args.run)
    options = method_overrides("incseg eval", config.method["name"], args.unknown)
    changed = _changed(config, options) if args.save else {}
    overrides: dict[str, Any] = {
        name: getattr(args, name) for name in ("device", "threads") if getattr(args, name) is not None
    }
    if args.root:
        config.data.root = args.root
        overrides["data"] = config.data
    started = time.monotonic()
    with showing(Screen(Console(stderr=args.json, highlight=False))):
        row = evaluate(args.run, args.step, options, overrides)
    if args.save and is_main_process():
        file = RunDir(args.run).write_retest(changed, row, time.monotonic() - started)
        print(f"saved in {file}", file=sys.stderr)
    if args.json and is_main_process():
        print(json.dumps(row, indent=1, ensure_ascii=False))
    return 0


def _on_other_photographs(args: argparse.Namespace) -> int:
    if args.save:
        raise UserError("--save is for tests on a run's own dataset; leave it out with --data")
    source = build_source(args.data, root=args.root)
    predictor = load(args.run, args.step, args.device or "auto", args.threads, args.method)
    options = method_overrides("incseg eval", predictor.info["method"]["name"], args.unknown)
    if options:
        predictor = predictor.with_options(**options)
    predictor = predictor.averaging(args.flip, args.scales)
    splits = splits_to_test(source, args.split)
    console = Console(stderr=args.json, highlight=False)
    with showing(Screen(console)):
        found = score(predictor, source, splits)
    console.print(score_table(found))
    if unshown := [name for name, one in found["classes"].items() if not one["images"]]:
        console.print(f"no photograph shows: {', '.join(unshown)}", markup=False, soft_wrap=True)
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    return 0


def splits_to_test(source: Source, wanted: str | None) -> list[Split]:
    """Return the splits to test on. If the dataset does not define val, test all of it: its split is for training."""
    wanted = wanted or ("val" if source.val_given else "all")
    return [split for split in SPLITS if wanted in (split, "all")]


def _changed(config: RunConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Return the inference options that differ from those of the run, or refuse to save. Any other option would be
    shown in tables although it does not change the test."""
    method = build_method(config.method)
    of_inference = method_options(type(method), "inference")
    allowed = ", ".join(sorted(of_inference)) or f"{config.method['name']} has none"
    if wrong := sorted(options.keys() - of_inference):
        raise UserError(
            f"--save is for tests with other inference options, and {wrong[0]} is not one; allowed: {allowed}"
        )
    own = dataclasses.asdict(method.config)
    changed = {name: value for name, value in options.items() if value != own[name]}
    if not changed:
        raise UserError(f"--save is for tests with other inference options than the run's own; give one: {allowed}")
    return changed
