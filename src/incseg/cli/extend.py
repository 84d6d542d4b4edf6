"""`incseg extend`: add classes of one's own to a model that knows others, without the data it learnt those from."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from incseg.cli.settings import parse_extension
from incseg.engine.rundir import RunDir, model_file, read_config
from incseg.engine.runtime import speaks
from incseg.engine.trainer import TrainConfig
from incseg.experiment import RunConfig, train
from incseg.inference import require_trusted
from incseg.models.files import load_segmenter
from incseg.presets import preset_for
from incseg.types import UserError

HELP = "add classes of a dataset of yours to a model; its old data is not needed"
PASS_UNKNOWN = ("--method.", "--train.", "--eval.", "--data.", "--model.freeze_backbone", "--reuse", "--precision")
_RECIPE = "folder"
"""The preset that a model takes whose file does not tell how it was trained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="run folder, a folder of its steps/, or a .safetensors model")
    parser.add_argument("--data", default="folder", metavar="NAME", help="kind of dataset (default: folder)")
    parser.add_argument("--root", metavar="DIR", help="its folder: images/, masks/, classes.txt")
    parser.add_argument(
        "--classes", metavar="NAMES", help='such as "helmet,vest" (default: all that the model does not know)'
    )
    parser.add_argument("--out", required=True, metavar="RUN", help="run folder to write; the same command goes on")
    parser.add_argument("--step", type=int, metavar="K", help="which step of the run to begin with (default: the last)")
    parser.add_argument("--method", metavar="NAME", help="how to learn (default: the method that trained the model)")
    parser.add_argument("--seed", type=int, default=42, help="of everything random (default: 42)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: auto)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.epilog = (
        "Other classes in the masks count as background. Training goes by the settings of the later steps of the "
        "model's own run; --train.NAME VALUE and the other flags of incseg train with a dot change them, such as "
        "--train.epochs 10 --train.lr_later 0.01 --data.holdout 5. Put MODEL before them."
    )


def run(args: argparse.Namespace) -> int:
    config = extension(args)
    try:
        train(config)
    except KeyboardInterrupt:
        if speaks():
            print(f"stopped; everything so far is saved in {config.folder}, the same command goes on", file=sys.stderr)
        return 130
    if speaks():
        print(f"run folder: {config.folder}   try: incseg predict {config.folder} IMAGE --out DIR")
    return 0


def extension(args: argparse.Namespace) -> RunConfig:
    """The configuration of a run that begins with a model: the model's own settings, and the flags, which win."""
    file = model_file(Path(args.model).expanduser(), args.step)
    model, about = load_segmenter(file)
    trained_by = about.get("method")
    if not (isinstance(trained_by, dict) and "name" in trained_by):
        raise UserError(f"model file '{file}' does not name its method; give the model of a step that incseg trained")
    method = trained_by if args.method in (None, trained_by["name"]) else {"name": args.method}
    require_trusted(file, method["name"], args.method)
    defaults: dict[str, Any] = {
        "task": args.classes or "joint",
        "rules": ((about.get("protocol") or {}).get("rules") or {}).get("name", "plop"),
        "start": str(file),
        "seed": args.seed,
        "out": args.out,
        "device": args.device,
        "threads": args.threads,
        "data": {"name": args.data, "root": args.root},
        "method": method,
        "model": vars(model.config),
        **_recipe(file, about, method["name"]),
    }
    return parse_extension("incseg extend", defaults, args.unknown)


def _recipe(file: Path, about: dict[str, Any], method: str) -> dict[str, Any]:
    """How the model was trained and tested: by its file, else by the run folder it lies in, else a small recipe."""
    size = int(about.get("test_size", 0))
    run = RunDir(file.parent.parent.parent)
    if "train" in about:
        trained = about["train"]
    elif run.config.is_file() and run.root / "steps" == file.parent.parent:
        trained = read_config(run.config, "train")["train"]
    else:
        trained = preset_for(_RECIPE, method)["train"] | ({"crop": size} if size else {})
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    return {"train": {key: value for key, value in trained.items() if key in known}, "eval": {"size": size}}
