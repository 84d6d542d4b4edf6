"""Runs as records, from their folders or from what was kept of them: what every table is made of.

A folder that is broken or foreign is named and left out; nothing that was not run is ever filled in.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from incseg.config import settings_affecting
from incseg.engine.rundir import KEPT_SUFFIX, RunDir, flatten, is_kept_run, read_config
from incseg.files import read_json, read_record
from incseg.metrics.continual import FIGURES
from incseg.types import UserError

ALL_FIGURES = (*FIGURES, "avg")
"""Base, New, All, Inc of the last model, and PLOP's average of All over the steps."""

Usual = Callable[[dict[str, Any]], dict[str, Any]]
"""From a configuration to what its preset and method take where nothing else is said."""
Warn = Callable[[str], None]

_KEPT_AGAIN = "restore it (git checkout), or keep the run again with make results"
"""What to do with a file of a run that is damaged: it is committed, and no command of the run makes it."""
_MOST_REASONS = 3
"""That one line tells."""
_OPTION_GROUPS = ("method", "train", "model", "data", "eval")
_NO_OPTIONS = settings_affecting("machine") | {
    "data.name", "data.root", "data.presence", "data.classes_file", "method.name",
}  # fmt: skip
"""Settings that name a row, lie elsewhere on every machine, or change no figure."""
_PATHS = ("model.weights", "method.replay")


@dataclass(frozen=True)
class RunRecord:
    """A run, or a test of its last model with other inference options.

    options:  what differs from preset and method: {"balancing": "none", "train.lr": 0.1}, the method's without prefix.
    settings: the whole configuration under dotted names; of a retest, with its options put in.
    base…avg: percent, of the last model; None in a run that is not finished, avg also in a retest.
    seconds:  training and tests, reused steps included with what they took first; of a retest, the test.
    rows:     one for each step that is done; of a retest, the one that was tested.
    retest:   the options that differ from the run's own, None for the run itself.
    kept:     whether `folder` is a file that was kept of the run instead of its folder (kept.py).
    fates:    of a kept run, what became of its classes (fates.py).
    """

    folder: Path
    dataset: str
    task: str
    setting: str
    order: str
    method: str
    seed: int
    preset: str | None
    options: dict[str, Any]
    settings: dict[str, Any]
    rules: dict[str, str]
    rows: list[dict[str, Any]]
    num_steps: int
    finished: bool
    command: str
    commit: str
    threads: int
    machine: str
    base: float | None = None
    new: float | None = None
    all: float | None = None
    inc: float | None = None
    avg: float | None = None
    seconds: float = 0.0
    retest: dict[str, Any] | None = None
    kept: bool = False
    fates: list[dict[str, Any]] | None = None

    def figure(self, name: str) -> float | None:
        return getattr(self, name)

    @property
    def how_far(self) -> str:
        return f"{self.folder} is not finished ({len(self.rows)} of {self.num_steps} steps) and left out"

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dataset": self.dataset,
            "task": self.task,
            "setting": self.setting,
            "method": self.method,
            "seed": self.seed,
            "options": self.options,
            **{name: self.figure(name) for name in ALL_FIGURES},
            "seconds": self.seconds,
            "order": self.order,
            "preset": self.preset,
            "rules": self.rules["name"],
            "threads": self.threads,
            "commit": self.commit,
            "command": self.command,
            "run": shown_path(self.folder),
            "retest": self.retest is not None,
        }


def read_runs(folders: Iterable[str | Path], usual: Usual, warn: Warn) -> list[RunRecord]:
    """The runs in these folders or anywhere below them, each followed by its retests; unfinished and kept ones too.

    `warn` gets a line for every folder or retest that is broken, half-written or foreign, and so not among them.
    """
    records: list[RunRecord] = []
    for folder in find_runs(folders, warn):
        try:
            if folder.is_file():
                records += _read_kept(folder, usual)
                continue
            run = _read_run(folder, usual)
        except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            warn(f"{folder} is left out: {_one_line(error)}")
            continue
        records.append(run)
        files = sorted(RunDir(folder).retests.glob("*.json")) if run.finished else []
        for file in files:
            try:
                retest = _read_retest(file, run, usual)
            except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
                warn(f"{file} is left out: {_one_line(error)}")
                continue
            if retest is not None:
                records.append(retest)
    return records


def require_some(shown: Sequence[RunRecord], left_out: Sequence[str]) -> None:
    """Where nothing is left to show, one line that says why: the warnings there would have been."""
    if not shown:
        more = f"; and {len(left_out) - _MOST_REASONS} more" if len(left_out) > _MOST_REASONS else ""
        raise UserError(f"nothing to show: {'; '.join(left_out[:_MOST_REASONS])}{more}; incseg train makes runs")


def find_runs(folders: Iterable[str | Path], warn: Warn) -> list[Path]:
    """Every folder, among these or below them, that has a config.yaml or results.json, and every file that was kept of
    a run; each once, sorted below its parent."""
    found: dict[Path, Path] = {}
    for given in map(Path, folders):
        here = [given] if is_kept_run(given) else []
        if not given.is_dir() and not here:
            problem = "is a file" if given.exists() else "does not exist"
            allowed = f"give run folders, folders with run folders in them, or kept runs (*{KEPT_SUFFIX})"
            raise UserError(f"{given} {problem}; {allowed}")
        for place, below, files in os.walk(given):
            below.sort()
            if "config.yaml" in files or "results.json" in files:
                here.append(Path(place))
                below.clear()
            else:
                below[:] = [name for name in below if not name.startswith(".")]
                here += [file for name in sorted(files) if is_kept_run(file := Path(place) / name)]
        if not here:
            warn(f"{given} holds no run folder")
        for folder in here:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _read_run(folder: Path, usual: Usual) -> RunRecord:
    run = RunDir(folder)
    config = read_config(run.config)
    protocol, environment = read_json(run.protocol), read_json(run.environment)
    finished = run.results.exists()
    results = read_record(run.results) if finished else {}
    rows = _need(results, "steps", list, "results.json") if finished else run.rows()
    num_steps = len(_need(protocol, "steps", list, "protocol.json"))
    learnt: set[str] = set()
    for index, row in enumerate(rows):
        _check_row(row, index)
        learnt |= set(row["classes"])
        if lacking := learnt - row["iou"].keys():
            raise UserError(f"the row of step {index} has no IoU of {min(lacking)}")
    if len(rows) > num_steps or (finished and len(rows) < num_steps):
        raise UserError(f"it has rows of {len(rows)} steps, and protocol.json has {num_steps}")
    final = _need(results, "final", dict, "results.json") if finished else {}
    figures: dict[str, Any] = {name: _number(final, name, "results.json") for name in ALL_FIGURES if finished}
    names: dict[str, Any] = {
        key: _need(protocol, key, str, "protocol.json") for key in ("dataset", "task", "setting", "order")
    }
    names["dataset"] = _dataset(names["dataset"], config)
    method = _need(_need(config, "method", dict, "config.yaml"), "name", str, "config.yaml")
    settings, usually = flatten(config), flatten(usual(config))
    command = _need(environment, "command", list, "environment.json")
    from_file = any(str(word).split("=")[0] == "--config" for word in command)
    return RunRecord(
        folder=folder,
        **names,
        method=method,
        seed=_need(config, "seed", int, "config.yaml"),
        preset=_need(config, "preset", str | None, "config.yaml"),
        options=_options(settings, usually),
        settings=settings,
        rules=_rules(protocol),
        rows=rows,
        num_steps=num_steps,
        finished=finished,
        command=shown_command(_as_flags(folder, settings, usually) if from_file else command),
        commit=str(_need(environment, "commit", str | None, "environment.json") or "unknown"),
        threads=_need(environment, "threads", int, "environment.json"),
        machine=_machine(environment),
        **figures,
        seconds=float(_need(results, "seconds", int | float, "results.json")) if finished else 0.0,
    )


def _dataset(name: str, config: dict[str, Any]) -> str:
    """The name of a dataset; folders of one's own are different datasets, told apart by their names."""
    root = (config.get("data") or {}).get("root")
    return f"{name} {Path(str(root)).name}".strip() if name == "folder" and root else name


def _read_retest(file: Path, run: RunRecord, usual: Usual) -> RunRecord | None:
    """A retest as a record of its own; None where it is of an earlier step, which no table shows."""
    kept = read_json(file)
    step, row = _need(kept, "step", int, "it"), _need(kept, "row", dict, "it")
    changed = _need(kept, "options", dict, "it")
    if step != run.num_steps - 1:
        return None
    _check_row({"seconds": {"train": 0, "eval": 0}, **row}, step)
    if _need(kept, "row_digest", str, "it") != RunDir(run.folder).row_digest(step):
        raise UserError("its run was trained anew since; test again with incseg eval --save")
    figures: dict[str, Any] = {name: _number(row, name, "its row") for name in FIGURES}
    settings = {**run.settings, **{f"method.{name}": value for name, value in changed.items()}}
    return replace(
        run,
        options=_options(settings, flatten(usual(read_config(RunDir(run.folder).config)))),
        settings=settings,
        rows=[row],
        command=shown_command(_need(kept, "command", list, "it")),
        commit=str(_need(kept, "commit", str | None, "it") or "unknown"),
        **figures,
        avg=None,
        seconds=float(_need(kept, "seconds", int | float, "it")),
        retest=changed,
    )


def _read_kept(file: Path, usual: Usual) -> list[RunRecord]:
    """The run in a file that was kept of it, then its retests.

    What was an option is told by the presets of today: the same settings have one name, whenever they were kept.
    """
    kept = read_record(file, _KEPT_AGAIN)
    try:
        every = [_need(kept, "run", dict, "it"), *_need(kept, "retests", list, "it")]
        found = [_kept_record(file, values) for values in every]
    except (UserError, TypeError) as error:  # a TypeError where it has a field that is none
        raise UserError(f"{_one_line(error)}; {_KEPT_AGAIN}") from error
    first = found[0]
    config = {
        "preset": first.preset,
        "method": {"name": first.method},
        "data": {"name": first.settings.get("data.name", first.dataset)},
    }
    usually = flatten(usual(config))
    return [replace(record, options=_options(record.settings, usually)) for record in found]


def _kept_record(file: Path, values: dict[str, Any]) -> RunRecord:
    kinds = {"rows": list, "rules": dict, "settings": dict, "options": dict, "num_steps": int, "seed": int,
             "threads": int, "seconds": int | float, "retest": dict | None,
             "fates": list | None, "preset": str | None}  # fmt: skip
    for key, kind in kinds.items():
        _need(values, key, kind, "it")
    for key in ("dataset", "task", "setting", "order", "method", "command", "commit", "machine"):
        _need(values, key, str, "it")
    for name in ALL_FIGURES:
        _number(values, name, "it")
    _need(values["rules"], "name", str, "it")
    return RunRecord(folder=file, finished=True, kept=True, **values)


def _need(values: Any, key: str, kind: Any, where: str) -> Any:
    """A value of the expected kind; what lacks it was not written by incseg, or not to its end."""
    if not isinstance(values, dict) or key not in values:
        raise UserError(f"{where} lacks '{key}'")
    if not isinstance(values[key], kind):
        raise UserError(f"{where} holds {values[key]!r} as '{key}'")
    return values[key]


def _number(values: dict[str, Any], key: str, where: str) -> float | None:
    value = _need(values, key, int | float | None, where)
    if value is not None and not math.isfinite(value):
        raise UserError(f"{where} holds {value} as '{key}'")
    return value


def _check_row(row: Any, index: int) -> None:
    where = f"the row of step {index}"
    if _need(row, "index", int, where) != index:
        raise UserError(f"{where} is that of step {row['index']}")
    for name in FIGURES:
        _number(row, name, where)
    shares = _need(row, "iou", dict, where)
    for name in shares:
        _number(shares, name, where)
    _need(row, "classes", list, where)
    _need(row, "unseen", dict, where)
    for name in ("train", "eval"):
        _need(_need(row, "seconds", dict, where), name, int | float, where)


def _rules(protocol: dict[str, Any]) -> dict[str, str]:
    rules = _need(protocol, "rules", dict, "protocol.json")
    _need(rules, "name", str, "protocol.json")
    return rules


def _options(settings: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    differing = {
        key: value for key, value in optional_settings(settings).items() if key not in usual or value != usual[key]
    }
    return {key.removeprefix("method."): value for key, value in differing.items()}


def optional_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that can be options; a file of weights or a folder of photographs by its name alone."""
    return {
        key: os.path.basename(value) if key in _PATHS and isinstance(value, str) else value
        for key, value in settings.items()
        if key.split(".")[0] in _OPTION_GROUPS and key not in _NO_OPTIONS
    }


def changes(record: RunRecord, default: RunRecord) -> dict[str, tuple[Any, Any]]:
    """What was set otherwise than in another run: {"scope": (there, here)}. A setting that one of the two versions of
    incseg did not have is none."""
    here = {**optional_settings(record.settings), "rules": record.rules["name"]}
    there = {**optional_settings(default.settings), "rules": default.rules["name"]}
    differing = {key: (there[key], here[key]) for key in here if key in there and there[key] != here[key]}
    return {key.removeprefix("method."): pair for key, pair in differing.items()}


# --- how things are written ----------------------------------------------------------------------------------


def shown_path(path: Path) -> str:
    """A path as it may stand in a file that others read: from here, or where it lies elsewhere its end."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix() or "."
    except ValueError:
        return path.resolve().name


def shown_command(tokens: Sequence[Any]) -> str:
    """A command as another machine would type it: files that lie elsewhere by their names."""
    words = [str(token) for token in tokens]
    words = ["incseg" if i == 0 else _without_place(word) for i, word in enumerate(words)]
    return shlex.join(words)


def _as_flags(folder: Path, settings: dict[str, Any], usual: dict[str, Any]) -> list[Any]:
    """The command of a run that took its settings from a file, as of a queue: a reader does not have that file."""
    always = {"preset": "preset", "data": "data.name", "root": "data.root", "task": "task", "setting": "setting",
              "method": "method.name", "seed": "seed"}  # fmt: skip
    words = ["incseg", "train"]
    for flag, key in always.items():
        if settings.get(key) is not None:
            words += [f"--{flag}", str(settings[key])]
    for key, value in settings.items():
        if key not in (*always.values(), "out", "reuse") and value != usual.get(key):
            words += [f"--{key}", value_text(value)]
    return [*words, "--out", folder.name]


def _without_place(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("/", "../", "~")):
        value = os.path.basename(value.rstrip("/")) or value
    return flag + equals + value


def options_text(options: dict[str, Any]) -> str:
    """balancing odds, train.lr 0.1"""
    return ", ".join(f"{name} {value_text(value)}" for name, value in sorted(options.items()))


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _machine(environment: dict[str, Any]) -> str:
    parts = [
        f"incseg {environment.get('incseg')}",
        f"torch {environment.get('torch')}",
        f"Python {environment.get('python')}",
        str(environment.get("platform")),
        f"{environment.get('cpus')} CPUs",
        f"device {environment.get('device')}",
    ]
    return ", ".join(parts)


def _one_line(error: BaseException) -> str:
    text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())
