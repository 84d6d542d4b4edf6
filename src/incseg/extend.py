"""Extend a model by new classes: try a few recipes, measure them on held-back photographs, take the best.

The rule: of the recipes under which the old classes keep their pixels (at most a point of agreement is lost where no
new object is), the one with the best mean IoU of the new classes. Recipes go from gentle to strong. Every try is an
ordinary run in OUT/tries, so that an interrupted call loses nothing; the best one becomes OUT itself.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import LogRecord
from pathlib import Path
from typing import Any

from incseg.config import RunConfig, differing_settings, open_run
from incseg.engine.progress import Screen, log, showing
from incseg.engine.rundir import RunDir, read_config
from incseg.engine.runtime import speaks
from incseg.files import read_json, write_json
from incseg.metrics.forgetting import agreement, best, mean_new_iou
from incseg.run import train
from incseg.types import UserError

BATCH = 8


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
    """The whole model stays as it is; chosen on held-back photographs of CCP, see docs/LOG.md."""
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
            if speaks():
                found = read_json(RunDir(one.config.folder).forgetting)
                outcomes.append(Outcome(one.recipe, one.config, found, results["seconds"]))
    if not speaks():  # the first process alone goes on
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
