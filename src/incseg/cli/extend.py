"""`incseg extend`: add one's own classes to a model, without the data that the model was trained on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from incseg.cli.main import add_common
from incseg.cli.settings import parse_extension
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import is_main_process
from incseg.extension import AUTO, RECIPES, SETTINGS, Plan, Request, extend
from incseg.io import counted
from incseg.report.extension import CLASS_HEADS, class_rows, in_words, try_heads, try_rows, where

HELP = "add classes of your own photographs to a model; its old data is not needed"
PASS_UNKNOWN = tuple(f"--{name}" for name in SETTINGS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "model")
    parser.add_argument(
        "--data", default="folder", metavar="NAME", help="kind of dataset, auto to find out (default: folder)"
    )
    parser.add_argument("--root", metavar="DIR", help="folder of the dataset: images/, masks/, classes.txt")
    parser.add_argument(
        "--classes", metavar="NAMES", help='for example "helmet,vest" (default: all that the model does not know)'
    )
    parser.add_argument("--out", required=True, metavar="RUN", help="run folder to write; repeat the command to resume")
    parser.add_argument(
        "--recipe", choices=[AUTO, *RECIPES], default=AUTO,
        help="how to learn: auto tries several recipes, from gentle to strong, and chooses the best (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=int, metavar="PIXELS", help="shorter side of the input (default: by the size of the new objects)"
    )
    parser.add_argument(
        "--protect", metavar="NAMES",
        help="old classes that must not give way to a new class that lies on them, as a dress lies on a person, or all",
    )  # fmt: skip
    parser.add_argument(
        "--images", type=Path, metavar="DIR",
        help="for a model that was saved without sums: any images that show its classes, without masks",
    )  # fmt: skip
    parser.add_argument("--method", metavar="NAME", help="how to learn (default: the method that trained the model)")
    parser.add_argument("--seed", type=int, default=42, help="seed of all random numbers (default: 42)")
    add_common(parser, "--step", "--device", "--threads")
    recipes = "; ".join(f"{recipe.name}: {recipe.what}" for recipe in RECIPES.values())
    parser.epilog = (
        "Other classes in the masks count as background. One photograph in five, or those of val.txt, are held back to "
        f"choose by. Recipes: {recipes}. Flags of incseg train with a dot win over a recipe, for example "
        "--train.epochs 10 --train.lr_later 0.01 --data.holdout 5. Put MODEL before them."
    )


def run(args: argparse.Namespace) -> int:
    plan = Plan.read(request(args))
    tries, out = plan.tries(), Path(args.out)
    if is_main_process():
        for line in plan.lines:
            print(line)
    try:
        report = extend(tries, out, train_images=plan.train_images)
    except KeyboardInterrupt:
        if is_main_process():
            print(f"stopped; progress is saved in {out}; repeat the command to resume", file=sys.stderr)
        return 130
    if not is_main_process():
        return 0
    console = Console(highlight=False)
    if len(report["tries"]) > 1:
        console.print(_table("What was tried", try_heads(report), try_rows(report)))
    console.print(_table(f"On {where(report)}", CLASS_HEADS, class_rows(report)))
    for line in in_words(report):
        console.print(line, markup=False, soft_wrap=True)
    known = [*report["classes"], *report["new"]]
    for line in (
        f"{RunDir(out).model(1)} knows {counted(len(known), 'class')}: {', '.join(known)}",
        f"next: incseg predict {out} IMAGE… --out DIR   or   incseg demo {out} --open",
    ):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def request(args: argparse.Namespace) -> Request:
    """Return the request of a command line. `args.unknown` has the flags of `incseg train`."""
    options = {name: value for name, value in vars(args).items() if name != "unknown"}
    given = frozenset(token.split("=")[0].removeprefix("--") for token in args.unknown if token.startswith("--"))
    return Request(
        **options, given=given, resolve=lambda defaults: parse_extension("incseg extend", defaults, args.unknown)
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    for head in heads:
        table.add_column(Text(head), justify="right" if head.startswith(("IoU", "old", "un", "sec", "ph")) else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
