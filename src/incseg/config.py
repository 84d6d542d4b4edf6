"""The settings of a run: their dataclasses, config.yaml, and the comparison of settings.

Each field declares what it affects (settings.py). Resuming, reusing a trained step, `eval`, `sweep` and the report use
that. Comparisons and hashes use only values that differ from their defaults, so older runs stay valid when an option
is added.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from incseg.data import OWN, SOURCES, detected
from incseg.engine.curves import logger_names
from incseg.engine.evaluator import EvalConfig
from incseg.engine.rundir import RunDir, flatten, read_config
from incseg.engine.runtime import Precision
from incseg.engine.trainer import TrainConfig
from incseg.io import require_named_by_user
from incseg.methods import METHODS, build_method, find_method
from incseg.methods.base import Method
from incseg.models.segmenter import ModelConfig
from incseg.presets import default_preset, preset_for
from incseg.settings import Affects, changed_values, names_affecting, require_types, setting
from incseg.types import UserError

_machine = partial(setting, affects="machine")


@dataclass
class DataConfig:
    """The dataset.

    Args:
        name: shapes, voc, ade20k, folder, coco, labelme, yolo, cvat, labelstudio, or package.module:Class; auto finds
            out which of those a folder is that people label themselves.
        root: folder of the dataset; shapes needs none.
        presence: file with the classes in each training image, instead of reading all masks once.
        classes_file: file of class names of a folder; empty for classes.txt in the root. For other formats that people
            label, new names of their classes, one per line.
        seed: seed of shapes.
        train_size: number of training scenes of shapes.
        val_size: number of test scenes of shapes.
        image_size: side of the scenes of shapes.
        train_limit: use at most N images in each step, evenly chosen; for a quick test, not for benchmarks.
        val_limit: test on at most N images, evenly chosen.
        holdout: leave every N-th training image out of every step and test on these images instead of the test set;
            use it to choose settings.
        cache: auto caches the features of a frozen backbone on disk if the input is deterministic up to a flip
            (train.scale empty); off computes them every time.
        fit: crop shows the centre of an image, as in benchmarks; whole shows all of it, in a frame that suits most
            images of the dataset.
        empty: use of images whose masks show no class: leave_out, as in benchmarks, or learn: they are negative
            examples in training, and all test images are tested on.
    """

    name: str = "shapes"
    root: str | None = None
    presence: str | None = None
    classes_file: str | None = None
    seed: int = 0
    train_size: int = 600
    val_size: int = setting(120, affects="inference")
    image_size: int = 96
    train_limit: int | None = None
    val_limit: int | None = setting(None, affects="inference")
    holdout: int | None = None
    cache: Literal["auto", "off"] = _machine("auto")
    fit: Literal["crop", "whole"] = "crop"
    empty: Literal["leave_out", "learn"] = "leave_out"

    def __post_init__(self) -> None:
        self.name = detected(self.name, self.root)

    @property
    def is_own(self) -> bool:
        """Whether people label such images themselves."""
        return self.name in OWN


@dataclass
class RunConfig:
    """Everything a run depends on; saved with it as config.yaml.

    Args:
        preset: named settings with defaults for the others; empty for that of the dataset.
        task: for example 15-1, joint, or groups of class names, cat,dog/bird.
        setting: which images a step gets: overlapped, disjoint, pseudo-disjoint (ade20k) or joint.
        rules: label rules, mib or plop; printed under every table.
        order: class order of ade20k, a or b.
        start: run folder or model file to start from. Its classes are step 0 and are not trained; the task names the
            classes of the dataset to add, joint for all others (incseg extend sets all this).
        seed: seed of all random numbers.
        out: run folder; empty for a folder in runs/ named by the settings.
        device: cpu, cuda, cuda:N, mps or auto.
        precision: auto, float32, bfloat16 or float16; auto is float32 on the CPU.
        threads: number of CPU threads of torch; empty for torch's own choice.
        reuse: load a step from the cache if it was trained before by the same recipe (data, model, method, schedule,
            seed), and add the steps of this run to the cache.
        log: where the curves of losses and scores go: tensorboard (if it is installed), wandb, trackio, several with
            commas, or none.
        table: classes prints one row per class, steps prints Base / New / All / Inc and the label rules; auto is
            classes for one's own photographs and steps for benchmarks.
        data: the dataset.
        method: how classes are learnt.
        model: the network.
        train: how a step is trained.
        eval: how models are tested.
    """

    preset: str | None = _machine(None)
    task: str = "joint"
    setting: str = "overlapped"
    rules: str = "plop"
    order: str = "a"
    start: str | None = None
    seed: int = 42
    out: str | None = _machine(None)
    device: str = "auto"
    precision: Precision = "auto"
    threads: int | None = _machine(None)
    reuse: bool = _machine(False)
    log: str = _machine("tensorboard")
    table: Literal["auto", "classes", "steps"] = _machine("auto")
    data: DataConfig = field(default_factory=DataConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "evidential"})
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; give a number from 0")
        logger_names(self.log)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as config.yaml holds them."""
        return _plain(dataclasses.asdict(self))

    @property
    def shows_classes(self) -> bool:
        return self.table == "classes" or (self.table == "auto" and self.data.is_own)

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or a folder named by the settings."""
        if self.out:
            return Path(self.out)
        method = str(self.method["name"]).replace(":", ".")
        task = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.task)[:60]
        return Path("runs") / f"{self.data.name.replace(':', '.')}-{task}-{self.setting}-{method}-s{self.seed}"


GROUPS: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig, "eval": EvalConfig}
"""The groups of settings in config.yaml besides the options of the method."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# --- what settings affect ------------------------------------------------------------------------------------


def settings_affecting(*what: Affects) -> frozenset[str]:
    """Return the dotted names of the settings that affect one of `what`, without the options of methods."""
    own = {name for name in names_affecting(RunConfig, *what) if name not in (*GROUPS, "method")}
    return frozenset(own).union(
        *({f"{group}.{name}" for name in names_affecting(kind, *what)} for group, kind in GROUPS.items())
    )


def method_options(method: type[Method], *what: Affects) -> frozenset[str]:
    """Return the names of a method's options that affect one of `what`."""
    return names_affecting(method.Config, *what)


def differing_settings(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Return the first settings that differ between two configurations and affect results, as text; empty if none do.

    A setting that an older configuration does not have counts as its default.
    """
    method = find_method(here["method"]["name"])
    defaults = flatten({**RunConfig().as_dict(), "method": dataclasses.asdict(method.Config())})
    was, now = ({**defaults, **flatten(config)} for config in (there, here))
    machine = settings_affecting("machine") | {f"method.{name}" for name in method_options(method, "machine")}
    keys = sorted(key for key in was.keys() | now.keys() if key not in machine and was.get(key) != now.get(key))
    return ", ".join(f"{key} was {was.get(key)!r}, now {now.get(key)!r}" for key in keys[:3])


def require_same_settings(run: RunDir, config: dict[str, Any]) -> None:
    """Refuse to resume a run with settings that change results, if it has learnt anything."""
    if run.started and (differing := differing_settings(read_config(run.config), config)):
        raise UserError(
            f"{run.root} holds a run with other settings ({differing}); choose another --out, or delete the folder"
        )


def open_run(run: RunDir, config: RunConfig) -> None:
    """Start or resume a run: lock its folder and check that it has these settings."""
    run.lock()
    require_same_settings(run, config.as_dict())
    if not run.started:  # also if the folder exists but nothing was learnt: its name can still be used
        run.write_config(config.as_dict())


def training_recipe(config: RunConfig, method: Method, step: int) -> dict[str, Any]:
    """Return the model, training and method settings that affect the training of a step."""
    what: tuple[Affects, ...] = ("training", "later") if step else ("training",)
    model = changed_values(config.model, *what)
    model.pop("weights", None)  # the values of the weights count, not the name of their file
    return {"model": model, "train": changed_values(config.train, *what), "method": method.recipe(step)}


def base_key(config: RunConfig) -> str | None:
    """Return a hash of everything that step 0 of a run depends on; None for a run that shares nothing.

    It is made of the settings alone and does not read the data. If the images of two runs with equal hashes differ,
    one waits for the other without need, and both are right.
    """
    if not config.reuse:
        return None
    method = build_method(config.method)
    joint = method.single_step or config.setting == "joint"
    groups = (*GROUPS, "method")
    own = {name: value for name, value in changed_values(config, "training").items() if name not in groups}
    base = {
        **own,
        "data": changed_values(config.data, "training"),
        "weights": config.model.weights,
        **training_recipe(config, method, 0),
        "task": "all" if joint else config.task.split("/" if "/" in config.task else "-")[0],
        "setting": "joint" if joint else config.setting,
    }
    return hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest()[:16]


def usual_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the default settings of a run with this dataset, preset and method, in the form of config.yaml.

    A method from outside is not imported, so the defaults of its options are not known.
    """
    method, data = config["method"]["name"], config["data"]["name"]
    preset = config["preset"] or (default_preset(data) if data in SOURCES else "shapes")
    usual = {**RunConfig(preset=preset).as_dict(), "method": {"name": method}}
    if method in METHODS:
        usual["method"] |= dataclasses.asdict(METHODS[method].Config())
    from_outside = ":" in preset  # the preset of a dataset from outside, which is not imported either
    for key, value in ({} if from_outside else preset_for(preset, method)).items():
        usual[key] = {**usual[key], **value} if isinstance(value, dict) else value
    return usual


# --- config.yaml ---------------------------------------------------------------------------------------------


def named_code(values: dict[str, Any]) -> dict[str, object]:
    """Return the names in a configuration that may refer to code outside incseg, as {kind: name}."""
    return {
        "dataset": values["data"].get("name"),
        "method": values["method"].get("name"),
        "generator": values["method"].get("generator"),
        **{key: values["model"].get(key) for key in ("backbone", "classifier")},
    }


def load_run_config(folder: Path) -> RunConfig:
    """Return the configuration of a run."""
    values = read_config(RunDir(folder).config, "method", *GROUPS)
    if not isinstance(values["method"].get("name"), str):
        raise UserError(f"{folder}/config.yaml lacks 'method.name'; restore it or start a new run")
    require_named_by_user(f"{folder}/config.yaml", named_code(values))
    try:
        for name, kind in GROUPS.items():
            require_types(kind, values[name])
        require_types(RunConfig, {key: value for key, value in values.items() if key not in GROUPS})
        return RunConfig(**{**values, **{name: kind(**values[name]) for name, kind in GROUPS.items()}})
    except UserError as error:
        raise UserError(f"{folder}/config.yaml: {error}") from error
    except TypeError as error:
        raise UserError(f"{folder}/config.yaml does not fit this version of incseg ({error})") from error
