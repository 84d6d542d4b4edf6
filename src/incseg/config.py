"""The settings of a run: their dataclasses, config.yaml, and the comparison of settings.

Each field says what it affects (settings.py). Resuming, reusing a trained step, `eval`, `sweep` and the report all ask
that. Comparisons and hashes look only at values that differ from their defaults, so that a new option leaves older
runs valid.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from incseg.data import SOURCES
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
OWN_PHOTOGRAPHS = "folder"
"""The kind of dataset that people make themselves: its masks are checked, and its tables are for people."""


@dataclass
class DataConfig:
    """Where images come from.

    Args:
        name: shapes, voc, ade20k, folder, or package.module:Class.
        root: folder of the dataset; shapes needs none.
        presence: file of the classes in each training image, instead of reading all masks once.
        classes_file: of folder, where it is not classes.txt in the root.
        seed: of shapes.
        train_size: number of training scenes of shapes.
        val_size: number of test scenes of shapes.
        image_size: side of the scenes of shapes.
        train_limit: use at most so many images in each step, evenly chosen; a try-out, not the protocol.
        val_limit: test on at most so many images, evenly chosen.
        holdout: keep every N-th training image out of every step and test on these instead of the test set;
            settings are chosen so, never on the test set.
        cache: auto keeps the features of a frozen backbone on disk where the input is deterministic up to a flip
            (train.scale empty); off computes them every time.
        fit: crop shows the centre of an image, as the benchmarks do; whole shows all of it, on a frame that suits most
            images of the dataset.
        empty: leave_out, as the benchmarks do, or learn: images whose masks show no class at all are learnt from too,
            as examples of what the classes are not, and all test images are tested on.
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


@dataclass
class RunConfig:
    """Everything a run depends on; saved with it as config.yaml.

    Args:
        preset: named settings the others start from; empty for the dataset's own.
        task: such as 15-1, joint, or own groups of class names, cat,dog/bird.
        setting: which images a step gets: overlapped, disjoint, pseudo-disjoint (ade20k) or joint.
        rules: label rules, mib or plop; printed under every table.
        order: class order of ade20k, a or b.
        start: run folder or model file to begin with: what it knows is step 0, taken as learnt, and the task names the
            classes of this dataset that come to it, joint for all others (incseg extend sets all this).
        seed: of everything random.
        out: run folder; empty for runs/ and a name made of the settings.
        device: cpu, cuda, cuda:N or auto.
        precision: auto, float32, bfloat16 or float16; auto is float32 on the CPU.
        threads: of torch on the CPU; empty for its own choice.
        reuse: take a step that was trained before by the same recipe (data, model, method, schedule, seed) from the
            cache instead of training it again, and keep the steps of this run for others.
        table: classes prints one row per class, steps Base / New / All / Inc and the label rules; auto takes classes
            for one's own photographs and steps for benchmarks.
        data: where images come from.
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
    table: Literal["auto", "classes", "steps"] = _machine("auto")
    data: DataConfig = field(default_factory=DataConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "evidential"})
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; give a number from 0")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as config.yaml holds them."""
        return _plain(dataclasses.asdict(self))

    @property
    def shows_classes(self) -> bool:
        return self.table == "classes" or (self.table == "auto" and self.data.name == OWN_PHOTOGRAPHS)

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or a name made of the settings."""
        if self.out:
            return Path(self.out)
        method = str(self.method["name"]).replace(":", ".")
        task = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.task)[:60]
        return Path("runs") / f"{self.data.name.replace(':', '.')}-{task}-{self.setting}-{method}-s{self.seed}"


GROUPS: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig, "eval": EvalConfig}
"""The groups of settings in config.yaml, beside the options of the method."""


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
    """Return in words the first settings of two configurations that differ and matter to a result; else nothing.

    A setting that a configuration does not have, as it is older, counts as its default.
    """
    method = find_method(here["method"]["name"])
    defaults = flatten({**RunConfig().as_dict(), "method": dataclasses.asdict(method.Config())})
    was, now = ({**defaults, **flatten(config)} for config in (there, here))
    machine = settings_affecting("machine") | {f"method.{name}" for name in method_options(method, "machine")}
    keys = sorted(key for key in was.keys() | now.keys() if key not in machine and was.get(key) != now.get(key))
    return ", ".join(f"{key} was {was.get(key)!r}, now {now.get(key)!r}" for key in keys[:3])


def require_same_settings(run: RunDir, config: dict[str, Any]) -> None:
    """Refuse to go on, where something was learnt, with settings that would have given another result."""
    if run.started and (differing := differing_settings(read_config(run.config), config)):
        raise UserError(
            f"{run.root} holds a run with other settings ({differing}); choose another --out, or delete the folder"
        )


def open_run(run: RunDir, config: RunConfig) -> None:
    """Begin a run or go on with it: lock its folder, and check that it belongs to these settings."""
    run.lock()
    require_same_settings(run, config.as_dict())
    if not run.started:  # also where nothing was learnt yet: a first try must not spoil the name
        run.write_config(config.as_dict())


def training_recipe(config: RunConfig, method: Method, step: int) -> dict[str, Any]:
    """Return what model, training and method settings decide about how a step is trained."""
    what: tuple[Affects, ...] = ("training", "later") if step else ("training",)
    model = changed_values(config.model, *what)
    model.pop("weights", None)  # their values count, not the name of their file
    return {"model": model, "train": changed_values(config.train, *what), "method": method.recipe(step)}


def base_key(config: RunConfig) -> str | None:
    """Return what step 0 of a run depends on, as a hash; None for a run that shares nothing.

    It is made of the settings alone, without a look at the data: where two runs agree but their images differ, one
    waits for the other in vain, no more.
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
    """Return the settings that a run of this dataset, preset and method has by default, as config.yaml holds them.

    A method from outside is not imported for it, so that none of its options counts as usual.
    """
    method, data = config["method"]["name"], config["data"]["name"]
    preset = config["preset"] or (default_preset(data) if data in SOURCES else "shapes")
    usual = {**RunConfig(preset=preset).as_dict(), "method": {"name": method}}
    if method in METHODS:
        usual["method"] |= dataclasses.asdict(METHODS[method].Config())
    from_outside = ":" in preset  # the settings that a dataset from outside brings, which is not imported either
    for key, value in ({} if from_outside else preset_for(preset, method)).items():
        usual[key] = {**usual[key], **value} if isinstance(value, dict) else value
    return usual


# --- config.yaml ---------------------------------------------------------------------------------------------


def named_code(values: dict[str, Any]) -> dict[str, object]:
    """Return the names in a configuration that may stand for code outside incseg, by what they name."""
    return {
        "dataset": values["data"].get("name"),
        "method": values["method"].get("name"),
        "generator": values["method"].get("generator"),
        **{key: values["model"].get(key) for key in ("backbone", "classifier")},
    }


def load_run_config(folder: Path) -> RunConfig:
    """Return the configuration that a run was made with."""
    values = read_config(RunDir(folder).config, "method", *GROUPS)
    if not isinstance(values["method"].get("name"), str):
        raise UserError(f"{folder}/config.yaml lacks 'method.name', which every run has; restore it or start a new run")
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
