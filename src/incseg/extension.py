"""Extend a model by new classes: try a few recipes, measure them on held-back photographs, choose the best.

The rule: of the recipes that leave the pixels of old classes unchanged where no new object is, take the one with the
best mean IoU of the new classes. Trained classes together may lose at most one pixel in a hundred there. A class that a
new class lies on, as a dress lies on a person, may lose one in ten. Recipes go from gentle to strong. Every try is an
ordinary run in OUT/tries, so an interrupted call loses nothing; the best one becomes OUT itself.
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
from incseg.metrics import MOST_LOST, agreement, best, mean_new_iou, unchanged
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.presets import preset_for
from incseg.run import open_source, read_meaning, train
from incseg.settings import require_types
from incseg.types import UserError

BATCH = 8
AUTO, ALL = "auto", "all"
_FULL = "folder-full"
"""Preset for a model whose file does not have its training settings."""
SIZES = frozenset({"train.crop", "eval.size"})
_OF_RECIPES = "evidential"
"""The method that can add classes by SGD to a frozen model."""


@dataclass(frozen=True)
class Recipe:
    """Settings with a name.

    what:    what is trained, in a few words.
    updates: number of optimiser updates.
    """

    name: str
    what: str
    settings: dict[str, dict[str, Any]] = field(repr=False)
    updates: int = 0
    method: str | None = None
    """The method of the recipe; None for the one that trained the model."""

    def epochs(self, images: int) -> int:
        """Return the epochs over this number of images that make about `updates` updates, at least four."""
        return max(4, min(100, round(self.updates / max(1, images // BATCH))))

    @property
    def sees_larger(self) -> bool:
        """Whether the new classes may see a larger input than the old ones."""
        return bool(self.settings.get("train", {}).get("own_head")) or self.method == "analytic"


def _frozen(own_head: bool) -> dict[str, dict[str, Any]]:
    """Return settings with the old model frozen. They were chosen on held-back photographs of CCP (docs/lab-log.md)."""
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
    "the new classes solved in closed form against all that was seen before, in seconds; the rest is frozen",
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
AS_TRAINED = Recipe("as-trained", "the settings of the model's own later steps", {})
LADDER = (
    Recipe("gentle", "a classifier for the new classes; the rest is frozen", _frozen(False), 160, "evidential"),
    Recipe("own-head", "a head of their own for the new classes; the rest is frozen", _frozen(True), 160, "evidential"),
    Recipe("strong", "like own-head, trained twice as long", _frozen(True), 320, "evidential"),
)
"""Recipes by SGD, from gentle to strong."""
RECIPES = {recipe.name: recipe for recipe in (CLOSED_FORM, *LADDER, AS_TRAINED)}


@dataclass(frozen=True)
class Try:
    """A recipe with the whole configuration of its run, whose folder is in OUT/tries."""

    recipe: Recipe
    config: RunConfig


@dataclass(frozen=True)
class Outcome:
    """The result of a try: the content of its forgetting.json, and its seconds."""

    recipe: Recipe
    config: RunConfig
    found: dict[str, Any]
    seconds: float

    @property
    def unchanged(self) -> float:
        """Return the percentage of old pixels that are unchanged, as the rule counts it."""
        return unchanged(self.found, protected=self.config.train.protect or ())

    @property
    def score(self) -> float:
        return mean_new_iou(self.found)

    def summary(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "agreement": round(100.0 if (same := agreement(self.found)) is None else same, 2),
            "allowed": 100 - self.unchanged <= MOST_LOST,
            "iou": {name: of_class["iou"] for name, of_class in self.found["new"].items()},
            "seconds": self.seconds,
        }


def choose(outcomes: Sequence[Outcome]) -> Outcome:
    """The best new classes among those that are allowed, the gentler of equals; where none is, the one that keeps
    most of the old."""
    return outcomes[best([(outcome.score, outcome.unchanged) for outcome in outcomes])]


def _screen() -> Screen:
    """Return a screen that drops the tables of runs, because an extension has its own, and repeated lines of tries."""
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
    """Run the unfinished tries, choose the best, and copy it to the run `out`. Return its forgetting.json.

    train_images: number of photographs to learn from for each new class; saved with the result.
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
    if not is_main_process():  # only the first process continues
        return {}
    chosen = choose(outcomes)
    report = {
        **chosen.found,
        "protected": list(chosen.config.train.protect or ()),
        "train_images": dict(train_images or {}),
        "recipe": chosen.recipe.name,
        "tries": [outcome.summary() for outcome in outcomes],
    }
    with contextlib.closing(RunDir(out)) as run:
        _adopt(RunDir(chosen.config.folder), run, replace(chosen.config, out=str(out)))
        write_json(run.forgetting, report)
    return report


def _require_same(tries: Sequence[Try], out: Path) -> None:
    """Refuse, before anything is learnt, a folder with a run of other settings."""
    run = RunDir(out)
    if not run.started:
        return
    differing = [differing_settings(read_config(run.config), one.config.as_dict()) for one in tries]
    if all(differing):
        raise UserError(f"{out} holds a run with other settings ({differing[0]}); choose another --out")


def _adopt(source: RunDir, run: RunDir, config: RunConfig) -> None:
    """Copy steps, rows and results of the run `source` to `run`."""
    open_run(run, config)
    for file in (source.protocol, source.environment):
        shutil.copyfile(file, run.root / file.name)
    shutil.copytree(source.root / "steps", run.root / "steps", dirs_exist_ok=True)
    shutil.copyfile(source.results, run.results)  # last: the run is finished


SETTINGS = ("method.", "train.", "eval.", "data.", "model.freeze_backbone", "reuse", "precision")
"""Prefixes of the settings of a run that the user may give. They win over a recipe."""


@dataclass
class Request:
    """What to add to which model. All fields but two are options of `incseg extend`.

    resolve: function from defaults, nested as in config.yaml, to the configuration with the settings of the user.
    given:   dotted names of these settings, such as train.epochs.
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
    protect: str | None = None
    images: Path | None = None
    step: int | None = None
    method: str | None = None
    seed: int = 42
    device: str = "auto"
    threads: int | None = None


@dataclass
class Plan:
    """The recipes to try for a request, and their settings, which depend on the model and the images.

    train_images: number of photographs to learn from for each new class.
    further:      classes that the model knows and that are improved.
    lines:        lines for the user to read before the work begins.
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
        """Return a try for each recipe, or one for several whose configurations are equal under the given settings."""
        out, found = Path(self.request.out), list[Try]()
        for recipe in self.recipes:
            config = self.config(recipe)
            config.out = str(out / "tries" / recipe.name)
            if all(_without_out(config) != _without_out(other.config) for other in found):
                found.append(Try(recipe, config))
        return found

    def config(self, recipe: Recipe) -> RunConfig:
        """Return the configuration of a recipe: the model's own settings, then the recipe's, then those of the user."""
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
        if self.protected:
            defaults["train"]["protect"] = self.protected
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

    @property
    def protected(self) -> list[str]:
        """Return the old classes that must not give way to new ones that lie on them."""
        known = [name for increment in self.model.increments for name in increment.classes]
        if self.request.protect is None:
            return []
        if self.request.protect == ALL:
            return known
        names = [name.strip() for name in self.request.protect.split(",")]
        for name in names:
            require_known("class of the model", name, known)
        return names

    def _knows_options(self, recipe: Recipe) -> bool:
        """Return whether the recipe's method has all method options that the user gave."""
        method = find_method(recipe.method or str(self.method["name"]))
        known = {f"method.{option.name}" for option in fields(method.Config)}
        given = {name for name in self.request.given if name.startswith("method.")}
        return given <= known or recipe is AS_TRAINED

    def _size_of(self, recipe: Recipe) -> int | None:
        if self.size is None or recipe is AS_TRAINED:
            return None
        return self.size.size if recipe.sees_larger else self.own_size

    @property
    def own_size(self) -> int:
        """Shorter side of the input of the model."""
        return int(self.about.get("test_size", 0)) or int(self.about.get("train", {}).get("crop", 320))

    @property
    def allowed_sizes(self) -> list[int]:
        """The model's own size and its multiples. The input of the old classes keeps its size at each of them."""
        solved = any(increment.solved for increment in self.model.increments)
        if self.further or (solved and "method.sgd_share" in self.request.given):
            return [self.own_size]  # classes that are solved again use the input at its own size
        largest = max(Segmenter.SHRINKS) // max(self.model.shrinks)
        return [self.own_size * factor for factor in Segmenter.SHRINKS if factor <= min(4, largest)]

    def _look_at_photographs(self) -> None:
        """Check the mask values, count the photographs of new classes, and choose the input size by their objects."""
        warm_start = WarmStart(self.file, self.model, self.about)
        if self.recipes == (CLOSED_FORM,):
            self.further = warm_start.learn_further(self.request.classes or "")
            if self.further:
                self.lines.append(
                    f"the model knows {', '.join(self.further)} already; the new photographs are added to what it has "
                    "learnt"
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
                f"--size is {self.request.size}; the old classes were trained at {self.own_size} and still need that "
                f"size, so give one of {allowed}"
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
        before = f" (the old classes still use {own})" if self.size.size != own else ""
        self.lines.append(f"{self.size}{before}")


def _recipes_of(method: str, model: Segmenter) -> tuple[Recipe, ...]:
    """Return the recipes that can extend a model of this method."""
    if any(increment.solved for increment in model.increments):
        return (CLOSED_FORM,)
    if method == CLOSED_FORM.method:
        return (CLOSED_FORM, *LADDER)
    return (CLOSED_FORM, *LADDER, AS_TRAINED) if method == _OF_RECIPES else (AS_TRAINED,)


def _method_of(recipe: Recipe, trained_by: dict[str, Any]) -> dict[str, Any]:
    """Return the method of a try, with the model's own options that this method has too."""
    if recipe.method in (None, trained_by["name"]):
        return dict(trained_by)
    known = {option.name for option in fields(find_method(str(recipe.method)).Config)}
    return {**{key: value for key, value in trained_by.items() if key in known}, "name": recipe.method}


def _without_out(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in config.as_dict().items() if key != "out"}


def _as_trained(file: Path, about: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the settings of the model's training and test: from its file, else from its run folder, else a preset."""
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
