"""`incseg extend`: add classes of one's own to a model that knows others, without the data it learnt those from."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from incseg.cli.settings import parse_extension
from incseg.config import RunConfig
from incseg.data.extended import Extended
from incseg.data.pixels import PixelCounts, as_seen_by
from incseg.data.sheet import write_sheet
from incseg.data.sizing import ChosenSize, choose_size, object_sides
from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir, model_file, read_config
from incseg.engine.runtime import speaks
from incseg.engine.trainer import TrainConfig
from incseg.engine.warm_start import WarmStart
from incseg.extend import AS_TRAINED, CLOSED_FORM, LADDER, RECIPES, Recipe, Try, extend
from incseg.inference import require_trusted
from incseg.methods import find_method
from incseg.methods.analytic import Analytic
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.presets import preset_for
from incseg.report.extension import CLASS_HEADS, class_rows, in_words, try_heads, try_rows, where
from incseg.run import open_source, read_meaning
from incseg.types import UserError

HELP = "add classes of your own photographs to a model; its old data is not needed"
PASS_UNKNOWN = ("--method.", "--train.", "--eval.", "--data.", "--model.freeze_backbone", "--reuse", "--precision")
_FULL = "folder-full"
"""The preset that a model takes whose file does not tell how it was trained."""
_SIZE_FLAGS = ("--train.crop", "--eval.size")
AUTO = "auto"
_OF_RECIPES = "evidential"
"""The method that can add classes to a model that stays as it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="run folder, a folder of its steps/, or a .safetensors model")
    parser.add_argument("--data", default="folder", metavar="NAME", help="kind of dataset (default: folder)")
    parser.add_argument("--root", metavar="DIR", help="its folder: images/, masks/, classes.txt")
    parser.add_argument(
        "--classes", metavar="NAMES", help='such as "helmet,vest" (default: all that the model does not know)'
    )
    parser.add_argument("--out", required=True, metavar="RUN", help="run folder to write; the same command goes on")
    parser.add_argument(
        "--recipe", choices=[AUTO, *RECIPES], default=AUTO,
        help="how to learn: auto tries a few, from gentle to strong, and takes the best (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=int, metavar="PIXELS", help="shorter side of the input (default: by the size of the new objects)"
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR",
        help="for a model without sums of what it learnt from: any images that show its classes, without masks",
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="K", help="which step of the run to begin with (default: the last)")
    parser.add_argument("--method", metavar="NAME", help="how to learn (default: the method that trained the model)")
    parser.add_argument("--seed", type=int, default=42, help="of everything random (default: 42)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: auto)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    recipes = "; ".join(f"{recipe.name}: {recipe.what}" for recipe in RECIPES.values())
    parser.epilog = (
        "Other classes in the masks count as background. One photograph in five is held back to choose by, or those of "
        f"val.txt. Recipes: {recipes}. The flags of incseg train with a dot win over a recipe, such as "
        "--train.epochs 10 --train.lr_later 0.01 --data.holdout 5. Put MODEL before them."
    )


def run(args: argparse.Namespace) -> int:
    asked = Asked.read(args)
    tries, out = asked.tries(), Path(args.out)
    if speaks():
        for line in asked.lines:
            print(line)
    try:
        report = extend(tries, out, train_images=asked.train_images)
    except KeyboardInterrupt:
        if speaks():
            print(f"stopped; everything so far is saved in {out}, the same command goes on", file=sys.stderr)
        return 130
    if not speaks():
        return 0
    console = Console(highlight=False)
    if len(report["tries"]) > 1:
        console.print(_table("What was tried", try_heads(report), try_rows(report)))
    console.print(_table(f"On {where(report)}", CLASS_HEADS, class_rows(report)))
    for line in in_words(report):
        console.print(line, markup=False, soft_wrap=True)
    known = [*report["classes"], *report["new"]]
    for line in (
        f"{RunDir(out).model(1)} knows {len(known)} classes: {', '.join(known)}",
        f"next: incseg predict {out} IMAGE… --out DIR   or   incseg demo {out} --open",
    ):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    for head in heads:
        table.add_column(Text(head), justify="right" if head.startswith(("IoU", "old", "un", "sec", "ph")) else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


@dataclasses.dataclass
class Asked:
    """What a command line asks for, with what the model and the photographs say to it.

    train_images: how many photographs to learn from show each new class.
    further:      classes that the model knows and learns further.
    lines:        what a person should read before the work begins.
    """

    args: argparse.Namespace
    file: Path
    model: Segmenter
    about: dict[str, Any]
    method: dict[str, Any]
    train_images: dict[str, int] = dataclasses.field(default_factory=dict)
    num_images: int = 0
    size: ChosenSize | None = None
    further: list[str] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)

    @staticmethod
    def read(args: argparse.Namespace) -> Asked:
        file = model_file(Path(args.model).expanduser(), args.step)
        model, about = load_segmenter(file)
        trained_by = about.get("method")
        if not (isinstance(trained_by, dict) and "name" in trained_by):
            raise UserError(
                f"model file '{file}' does not name its method; give the model of a step that incseg trained"
            )
        method = trained_by if args.method in (None, trained_by["name"]) else {"name": args.method}
        require_trusted(file, method["name"], args.method)
        allowed = _recipes_of(method["name"], model)
        if args.recipe != AUTO and RECIPES[args.recipe] not in allowed:
            raise UserError(
                f"--recipe {args.recipe} is not for models of {method['name']}; give one of "
                f"{', '.join(recipe.name for recipe in allowed)}"
            )
        asked = Asked(args, file, model, about, method)
        asked._look_at_photographs()
        return asked

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        if self.args.recipe != AUTO:
            return (RECIPES[self.args.recipe],)
        allowed = [recipe for recipe in _recipes_of(self.method["name"], self.model) if self._knows_flags(recipe)]
        if CLOSED_FORM in allowed and self.model.closed_form is not None:
            return (CLOSED_FORM,)
        return tuple(recipe for recipe in allowed if recipe is not AS_TRAINED) or (AS_TRAINED,)

    def tries(self) -> list[Try]:
        """One for each recipe; recipes that the given flags make alike are tried once."""
        out, found = Path(self.args.out), list[Try]()
        for recipe in self.recipes:
            config = self.config(recipe)
            config.out = str(out / "tries" / recipe.name)
            if all(_without_out(config) != _without_out(other.config) for other in found):
                found.append(Try(recipe, config))
        return found

    def config(self, recipe: Recipe) -> RunConfig:
        """The model's own settings, then those of the recipe, then the flags."""
        args = self.args
        defaults: dict[str, Any] = {
            "task": args.classes or "joint",
            "rules": ((self.about.get("protocol") or {}).get("rules") or {}).get("name", "plop"),
            "start": str(self.file),
            "seed": args.seed,
            "out": args.out,
            "device": args.device,
            "threads": args.threads,
            "data": {"name": args.data, "root": args.root},
            "method": _method_of(recipe, self.method),
            "model": dict(vars(self.model.config)),
            **_as_trained(self.file, self.about, self.method["name"]),
        }
        if recipe is CLOSED_FORM and args.images is not None:
            defaults["method"]["images"] = str(args.images)
        if recipe is not AS_TRAINED:
            defaults["data"] |= {"fit": "whole", "empty": "learn"}
            defaults["train"]["epochs_later"] = (
                None if self._given("--train.epochs") else recipe.epochs(self.num_images)
            )
        if size := args.size or self._size_of(recipe):
            defaults["train"]["crop"] = defaults["eval"]["size"] = size
        for group, values in recipe.settings.items():
            defaults[group] = {**defaults[group], **values}
        if recipe is CLOSED_FORM and any(increment.solved for increment in self.model.increments):
            # what is solved goes on as it is
            defaults["method"]["sgd_share"] = self.method.get("sgd_share", Analytic.Config.sgd_share)
        return parse_extension("incseg extend", defaults, args.unknown)

    def _knows_flags(self, recipe: Recipe) -> bool:
        """Whether the options of a method that are on the command line are those of the recipe's method."""
        known = {f"--method.{field.name}" for field in dataclasses.fields(find_method(self._name_of(recipe)).Config)}
        given = {token.split("=")[0] for token in self.args.unknown if token.startswith("--method.")}
        return given <= known or recipe is AS_TRAINED

    def _name_of(self, recipe: Recipe) -> str:
        return recipe.method or str(self.method["name"])

    def _given(self, *flags: str) -> bool:
        """Whether one of these flags is on the command line."""
        return any(token.split("=")[0] in flags for token in self.args.unknown)

    def _size_of(self, recipe: Recipe) -> int | None:
        if self.size is None or recipe is AS_TRAINED:
            return None
        return self.size.size if recipe.sees_larger else self.own_size

    @property
    def own_size(self) -> int:
        """Shorter side of the input of the model as it is."""
        return int(self.about.get("test_size", 0)) or int(self.about.get("train", {}).get("crop", 320))

    @property
    def allowed_sizes(self) -> list[int]:
        """The model's own size and its multiples, at which the old classes can go on to see their own."""
        if self.further or any(increment.solved for increment in self.model.increments):
            return [self.own_size]  # solved classes see the input as it is
        largest = max(Segmenter.SHRINKS) // max(self.model.shrinks)
        return [self.own_size * factor for factor in Segmenter.SHRINKS if factor <= min(4, largest)]

    def _look_at_photographs(self) -> None:
        """See what the masks mean, count the new classes' photographs, and choose the input size by their objects."""
        warm_start = WarmStart(self.file, self.model, self.about)
        if self.recipes == (CLOSED_FORM,):
            self.further = warm_start.learn_further(self.args.classes or "", Analytic.Config.ridge)
            if self.further:
                self.lines.append(
                    f"{', '.join(self.further)}: known, so learnt further; what was seen of it before counts, too"
                )
        inner = open_source(self.config(AS_TRAINED).data)
        source = warm_start.extended(inner, self.args.classes or "joint")
        with showing():
            meaning = read_meaning(inner)
        pixels = as_seen_by(source, meaning.pixels)
        ids = {source.info.classes.index(name) + 1: name for name in source.new}
        shown = pixels["train"].presence.classes
        self.train_images = {name: sum(i in classes for classes in shown) for i, name in ids.items()}
        for name, count in self.train_images.items():
            if count == 0:
                raise UserError(f"no training image shows the new class '{name}'; add some, or leave it out")
        self.num_images = sum(not classes or bool(set(ids) & set(classes)) for classes in shown)
        self.lines += [note for note in source.notes if note.startswith("warning")]
        self.lines += write_sheet(inner, meaning.pixels, RunDir(self.args.out).sheet) if speaks() else []
        given = self.args.size is not None or self._given(*_SIZE_FLAGS)
        if self.args.size is not None and self.recipes != (AS_TRAINED,) and self.args.size not in self.allowed_sizes:
            allowed = ", ".join(map(str, self.allowed_sizes))
            raise UserError(
                f"--size is {self.args.size}; the old classes were trained at {self.own_size} and go on to see that, "
                f"so give one of {allowed}"
            )
        if not given and self.recipes != (AS_TRAINED,):
            self._choose_size(source, pixels["train"], ids)

    def _choose_size(self, source: Extended, pixels: PixelCounts, ids: dict[int, str]) -> None:
        own = self.own_size
        sizes = source.sizes("train")
        sides = object_sides(pixels, sizes, ids)
        self.size = choose_size(
            sides, self.allowed_sizes, [*sizes, *source.sizes("val")], self.model.backbone.strides[-1]
        )
        before = f" (the old classes go on to see {own})" if self.size.size != own else ""
        self.lines.append(f"{self.size}{before}")


def _recipes_of(method: str, model: Segmenter) -> tuple[Recipe, ...]:
    """Those that go on with a model, by the method that it is of."""
    if any(increment.solved for increment in model.increments):
        return (CLOSED_FORM,)
    if method == CLOSED_FORM.method:
        return (CLOSED_FORM, *LADDER)
    return (CLOSED_FORM, *LADDER, AS_TRAINED) if method == _OF_RECIPES else (AS_TRAINED,)


def _method_of(recipe: Recipe, trained_by: dict[str, Any]) -> dict[str, Any]:
    """The method of a try, with the options of the model's own that it has, too."""
    if recipe.method in (None, trained_by["name"]):
        return dict(trained_by)
    known = {field.name for field in dataclasses.fields(find_method(str(recipe.method)).Config)}
    return {**{key: value for key, value in trained_by.items() if key in known}, "name": recipe.method}


def _without_out(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in config.as_dict().items() if key != "out"}


def _as_trained(file: Path, about: dict[str, Any], method: str) -> dict[str, Any]:
    """How the model was trained and tested: by its file, else by the run folder it lies in, else a small recipe."""
    size = int(about.get("test_size", 0))
    run = RunDir(file.parent.parent.parent)
    if "train" in about:
        trained = about["train"]
    elif run.config.is_file() and run.root / "steps" == file.parent.parent:
        trained = read_config(run.config, "train")["train"]
    else:
        trained = preset_for(_FULL, method)["train"] | ({"crop": size} if size else {})
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    return {"train": {key: value for key, value in trained.items() if key in known}, "eval": {"size": size}}
