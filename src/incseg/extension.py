"""Extend a model by new classes: try a few recipes, measure them on held-back photographs, take the best.

The rule: of the recipes under which the old classes keep their pixels (at most a point of agreement is lost where no
new object is), the one with the best mean IoU of the new classes. Recipes go from gentle to strong. Every try is an
ordinary run in OUT/tries, so that an interrupted call loses nothing; the best one becomes OUT itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from logging import LogRecord
from pathlib import Path
from typing import Any

from incseg.config import RunConfig, differing_settings, open_run
from incseg.data.extended import Extended
from incseg.data.presence import PixelCounts, as_seen_by
from incseg.data.sheet import write_sheet
from incseg.data.transforms import ChosenSize, choose_size, object_sides
from incseg.engine.progress import Screen, log, showing
from incseg.engine.rundir import RunDir, model_file, read_config
from incseg.engine.runtime import is_main_process
from incseg.engine.trainer import TrainConfig
from incseg.engine.warm_start import WarmStart
from incseg.inference import require_trusted
from incseg.io import read_json, require_known, write_json
from incseg.methods import find_method
from incseg.metrics import agreement, best, mean_new_iou
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.presets import preset_for
from incseg.run import open_source, read_meaning, train
from incseg.settings import require_types
from incseg.types import UserError

BATCH = 8
AUTO = "auto"
_FULL = "folder-full"
"""The preset that a model takes whose file does not tell how it was trained."""
SIZES = frozenset({"train.crop", "eval.size"})
_OF_RECIPES = "evidential"
"""The method that can add classes to a model that stays as it is."""


@dataclass(frozen=True)
class Recipe:
    """Settings by name; `what` says in a few words what they train, `updates` how long."""

    name: str
    what: str
    settings: dict[str, dict[str, Any]] = field(repr=False)
    updates: int = 0
    method: str | None = None
    """The method that learns so; None for the one that trained the model."""

    def epochs(self, images: int) -> int:
        """Passes over so many images that make about as many updates, and four at least."""
        return max(4, min(100, round(self.updates / max(1, images // BATCH))))

    @property
    def sees_larger(self) -> bool:
        """Whether the new classes may see a larger input than the old ones."""
        return bool(self.settings.get("train", {}).get("own_head")) or self.method == "analytic"


def _frozen(own_head: bool) -> dict[str, dict[str, Any]]:
    """The whole model stays as it is; chosen on held-back photographs of CCP, see docs/lab-log.md."""
    return {
        "model": {"freeze_backbone": True},
        "method": {"start_score": -2.0, "class_weight": 0.5, "foreground_weight": False},
        "train": {
            "frozen_later": "model", "own_head": own_head, "calibrate": True, "scale": None, "flip": False,
            "label_stride": 4, "batch_size": BATCH, "accumulate": None, "lr_later": 0.3, "clip_later": 1.0,
            "fusion": None,
        },
        "eval": {"batch_size": 8},
    }  # fmt: skip


CLOSED_FORM = Recipe(
    "closed-form",
    "the new classes solved in closed form against everything seen before, in seconds; all else stays as it is",
    {
        "model": {"freeze_backbone": True},
        "method": {"sgd_share": 1.0},
        "train": {
            "frozen_later": "model", "own_head": False, "calibrate": True, "scale": None, "flip": False,
            "batch_size": BATCH, "accumulate": None, "fusion": None,
        },
        "eval": {"batch_size": 8},
    },
    method="analytic",
)  # fmt: skip
AS_TRAINED = Recipe("as-trained", "the settings that the model's own later steps were trained by", {})
LADDER = (
    Recipe("gentle", "a classifier for the new classes; all else stays as it is", _frozen(False), 160, "evidential"),
    Recipe(
        "own-head", "a head of their own for the new classes; all else stays as it is", _frozen(True), 160, "evidential"
    ),
    Recipe("strong", "the same, trained twice as long", _frozen(True), 320, "evidential"),
)
"""From gentle to strong."""
RECIPES = {recipe.name: recipe for recipe in (CLOSED_FORM, *LADDER, AS_TRAINED)}


@dataclass(frozen=True)
class Try:
    """A recipe with the whole configuration that it gives; its run folder lies in OUT/tries."""

    recipe: Recipe
    config: RunConfig


@dataclass(frozen=True)
class Outcome:
    """What a try did to the classes: the content of its forgetting.json, and the seconds that it took."""

    recipe: Recipe
    config: RunConfig
    found: dict[str, Any]
    seconds: float

    @property
    def agreement(self) -> float:
        """Percent of the old classes' pixels that stayed; 100 where there were none."""
        kept = agreement(self.found)
        return 100.0 if kept is None else kept

    @property
    def score(self) -> float:
        return mean_new_iou(self.found)

    def summary(self) -> dict[str, Any]:
        ious = {name: of_class["iou"] for name, of_class in self.found["new"].items()}
        return {"recipe": self.recipe.name, "agreement": round(self.agreement, 2), "iou": ious, "seconds": self.seconds}


def choose(outcomes: Sequence[Outcome]) -> Outcome:
    """The best new classes among those that are allowed, the gentler of equals; where none is, the one that keeps
    most of the old."""
    return outcomes[best([(outcome.score, outcome.agreement) for outcome in outcomes])]


def _screen() -> Screen:
    """Return a screen without the tables of protocols: an extension has its own. Tries print the same line once."""
    screen, printed = Screen(), set[str]()

    def wanted(record: LogRecord) -> bool:
        line = record.getMessage()
        if hasattr(record, "table") or line in printed:
            return False
        printed.add(line)
        return True

    screen.addFilter(wanted)
    return screen


def extend(tries: Sequence[Try], out: Path, train_images: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Run the tries that are not finished, choose, and leave the best as the run `out`; returns its forgetting.json.

    train_images: how many photographs to learn from show each new class; saved with what was found.
    """
    _require_same(tries, out)
    outcomes = []
    with showing(_screen()):
        for number, one in enumerate(tries, start=1):
            if len(tries) > 1:
                log.info(f"try {number} of {len(tries)}, {one.recipe.name}: {one.recipe.what}")
            results = train(one.config)
            if is_main_process():
                found = read_json(RunDir(one.config.folder).forgetting)
                outcomes.append(Outcome(one.recipe, one.config, found, results["seconds"]))
    if not is_main_process():  # the first process alone goes on
        return {}
    chosen = choose(outcomes)
    report = {
        **chosen.found,
        "train_images": dict(train_images or {}),
        "recipe": chosen.recipe.name,
        "tries": [outcome.summary() for outcome in outcomes],
    }
    with contextlib.closing(RunDir(out)) as run:
        _adopt(RunDir(chosen.config.folder), run, replace(chosen.config, out=str(out)))
        write_json(run.forgetting, report)
    return report


def _require_same(tries: Sequence[Try], out: Path) -> None:
    """Before anything is learnt: a folder that holds something else is not written over."""
    run = RunDir(out)
    if not run.started:
        return
    differing = [differing_settings(read_config(run.config), one.config.as_dict()) for one in tries]
    if all(differing):
        raise UserError(f"{out} holds a run with other settings ({differing[0]}); choose another --out")


def _adopt(source: RunDir, run: RunDir, config: RunConfig) -> None:
    """Make `run` what `source` is: the same steps, rows and results, by copies of its files."""
    open_run(run, config)
    for file in (source.protocol, source.environment):
        shutil.copyfile(file, run.root / file.name)
    shutil.copytree(source.root / "steps", run.root / "steps", dirs_exist_ok=True)
    shutil.copyfile(source.results, run.results)  # last: the run is finished


SETTINGS = ("method.", "train.", "eval.", "data.", "model.freeze_backbone", "reuse", "precision")
"""What the names of those settings of a run begin with that may be given; they win over a recipe."""


@dataclass
class Request:
    """What to add to which model. The fields are the options of `incseg extend`, but for the last two.

    resolve: makes the whole configuration of defaults, nested as in config.yaml, and the settings that were given.
    given:   the dotted names of these settings, such as train.epochs.
    """

    model: str | os.PathLike[str]
    out: str
    resolve: Callable[[dict[str, Any]], RunConfig]
    given: frozenset[str] = frozenset()
    data: str = "folder"
    root: str | None = None
    classes: str | None = None
    recipe: str = AUTO
    size: int | None = None
    images: Path | None = None
    step: int | None = None
    method: str | None = None
    seed: int = 42
    device: str = "auto"
    threads: int | None = None


@dataclass
class Plan:
    """A request with what the model and the images say to it: which recipes to try, with which settings.

    train_images: how many photographs to learn from show each new class.
    further:      classes that the model knows and that are improved.
    lines:        what a person should read before the work begins.
    """

    request: Request
    file: Path
    model: Segmenter
    about: dict[str, Any]
    method: dict[str, Any]
    train_images: dict[str, int] = field(default_factory=dict)
    num_images: int = 0
    size: ChosenSize | None = None
    further: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @staticmethod
    def read(request: Request) -> Plan:
        require_known("recipe", request.recipe, [AUTO, *RECIPES])
        RunDir(request.out).require_own()
        file = model_file(Path(request.model).expanduser(), request.step)
        model, about = load_segmenter(file)
        trained_by = about.get("method")
        if not (isinstance(trained_by, dict) and "name" in trained_by):
            raise UserError(
                f"model file '{file}' does not name its method; give the model of a step that incseg trained"
            )
        method = trained_by if request.method in (None, trained_by["name"]) else {"name": request.method}
        require_trusted(file, method["name"], request.method)
        allowed = _recipes_of(method["name"], model)
        if request.recipe != AUTO and RECIPES[request.recipe] not in allowed:
            raise UserError(
                f"--recipe {request.recipe} is not for models of {method['name']}; give one of "
                f"{', '.join(recipe.name for recipe in allowed)}"
            )
        plan = Plan(request, file, model, about, method)
        plan._look_at_photographs()
        return plan

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        if self.request.recipe != AUTO:
            return (RECIPES[self.request.recipe],)
        allowed = [recipe for recipe in _recipes_of(self.method["name"], self.model) if self._knows_options(recipe)]
        if CLOSED_FORM in allowed and self.model.closed_form is not None:
            return (CLOSED_FORM,)
        return tuple(recipe for recipe in allowed if recipe is not AS_TRAINED) or (AS_TRAINED,)

    def tries(self) -> list[Try]:
        """One for each recipe; recipes that the given settings make alike are tried once."""
        out, found = Path(self.request.out), list[Try]()
        for recipe in self.recipes:
            config = self.config(recipe)
            config.out = str(out / "tries" / recipe.name)
            if all(_without_out(config) != _without_out(other.config) for other in found):
                found.append(Try(recipe, config))
        return found

    def config(self, recipe: Recipe) -> RunConfig:
        """The model's own settings, then those of the recipe, then those that were given."""
        request = self.request
        defaults: dict[str, Any] = {
            "task": request.classes or "joint",
            "rules": ((self.about.get("protocol") or {}).get("rules") or {}).get("name", "plop"),
            "start": str(self.file),
            "seed": request.seed,
            "out": request.out,
            "device": request.device,
            "threads": request.threads,
            "data": {"name": request.data, "root": request.root},
            "method": _method_of(recipe, self.method),
            "model": dict(vars(self.model.config)),
            **_as_trained(self.file, self.about, self.method["name"]),
        }
        if recipe is CLOSED_FORM and request.images is not None:
            defaults["method"]["images"] = str(request.images)
        if recipe is not AS_TRAINED:
            defaults["data"] |= {"fit": "whole", "empty": "learn"}
            defaults["train"]["epochs_later"] = (
                None if "train.epochs" in request.given else recipe.epochs(self.num_images)
            )
        if size := request.size or self._size_of(recipe):
            defaults["train"]["crop"] = defaults["eval"]["size"] = size
        for group, values in recipe.settings.items():
            defaults[group] = {**defaults[group], **values}
        return request.resolve(defaults)

    def _knows_options(self, recipe: Recipe) -> bool:
        """Whether the recipe's method has all options of a method that were given."""
        known = {f"method.{option.name}" for option in fields(find_method(self._name_of(recipe)).Config)}
        given = {name for name in self.request.given if name.startswith("method.")}
        return given <= known or recipe is AS_TRAINED

    def _name_of(self, recipe: Recipe) -> str:
        return recipe.method or str(self.method["name"])

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
        solved = any(increment.solved for increment in self.model.increments)
        if self.further or (solved and "method.sgd_share" in self.request.given):
            return [self.own_size]  # what is solved anew sees the input as it is
        largest = max(Segmenter.SHRINKS) // max(self.model.shrinks)
        return [self.own_size * factor for factor in Segmenter.SHRINKS if factor <= min(4, largest)]

    def _look_at_photographs(self) -> None:
        """See what the masks mean, count the new classes' photographs, and choose the input size by their objects."""
        warm_start = WarmStart(self.file, self.model, self.about)
        if self.recipes == (CLOSED_FORM,):
            self.further = warm_start.learn_further(self.request.classes or "")
            if self.further:
                self.lines.append(
                    f"the model knows {', '.join(self.further)} already: what it has learnt counts, and the new "
                    "photographs improve it"
                )
        inner = open_source(self.config(AS_TRAINED).data)
        source = warm_start.extended(inner, self.request.classes or "joint")
        with showing():
            meaning = read_meaning(inner)
        pixels = as_seen_by(source, meaning.pixels)
        ids = {source.info.classes.index(name) + 1: name for name in source.new}
        shown = pixels["train"].presence.classes
        self.train_images = {name: sum(i in classes for classes in shown) for i, name in ids.items()}
        for name, count in self.train_images.items():
            if count == 0:
                raise UserError(f"no training image shows '{name}'; add some, or leave it out")
        self.num_images = sum(not classes or bool(set(ids) & set(classes)) for classes in shown)
        self.lines += [note for note in source.notes if note.startswith("warning")]
        self.lines += write_sheet(inner, meaning.pixels, RunDir(self.request.out).sheet) if is_main_process() else []
        given = self.request.size is not None or bool(self.request.given & SIZES)
        if (
            self.request.size is not None
            and self.recipes != (AS_TRAINED,)
            and self.request.size not in self.allowed_sizes
        ):
            allowed = ", ".join(map(str, self.allowed_sizes))
            raise UserError(
                f"--size is {self.request.size}; the old classes were trained at {self.own_size} and go on to see "
                f"that, so give one of {allowed}"
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
    known = {option.name for option in fields(find_method(str(recipe.method)).Config)}
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
    known = {option.name for option in fields(TrainConfig)}
    trained = {key: value for key, value in trained.items() if key in known}
    try:
        require_types(TrainConfig, trained)
    except TypeError as error:
        raise UserError(f"model file '{file}': among its training settings {error}; save or copy it again") from error
    return {"train": trained, "eval": {"size": size}}
