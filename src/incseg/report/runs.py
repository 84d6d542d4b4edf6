"""Runs as records, the source of every table: read from run folders or from summaries.

Run folders take gigabytes and are not moved. A summary has everything that tables need, but no models. It is small
enough to be committed, so a study can grow on several machines, and a new method can be compared with ours without
training ours again: `incseg compare runs/mine results/voc-laptop/runs.jsonl`.

Broken or foreign folders are reported and left out. Missing runs are never filled in.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from incseg.config import OWN, settings_affecting
from incseg.engine.rundir import SUMMARY_SUFFIXES, RunDir, flatten, is_summary, read_config
from incseg.io import read_json, read_record, with_checksum, without_checksum, write_text
from incseg.metrics import FIGURES
from incseg.report.class_statistics import ClassStatistics, class_statistics
from incseg.types import UserError

log = logging.getLogger("incseg")

ALL_FIGURES = (*FIGURES, "avg")
"""Base, New, All, Inc of the last model, and PLOP's average of All over the steps."""

Usual = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from a configuration to the default values of its preset and method."""

_RESTORE = "restore it (git checkout), or make it again from the run folder with make results"
_MOST_REASONS = 3
"""Most reasons in one line."""
_OPTION_GROUPS = ("method", "train", "model", "data", "eval")
_NO_OPTIONS = settings_affecting("machine") | {
    "data.name", "data.root", "data.presence", "data.classes_file", "method.name",
}  # fmt: skip
"""Settings that are part of a row's name, differ between machines, or change no figure."""
_PATHS = ("model.weights", "method.replay")
_DECIMALS = 7
"""Decimals of numbers in a summary. With fewer, some means over seeds would have another last digit."""
_NOT_IN_SUMMARY = {"folder", "finished", "is_summary"}
_ROW_IN_SUMMARY = ("index", "classes", "unseen")
BROKEN = (UserError, OSError, KeyError, TypeError, ValueError, AttributeError)
"""Errors that a broken or foreign file can raise."""


@dataclass(frozen=True)
class RunRecord:
    """A run, or a test of its last model with other inference options.

    folder:   the run folder; for a summary its file, or FILE/NAME in a file of several runs.
    options:  settings that differ from those of preset and method: {"balancing": "none", "train.lr": 0.1}, those of
              the method without prefix.
    settings: the whole configuration under dotted names; for a retest with its own options.
    base…avg: percent, of the last model; None for an unfinished run, avg also for a retest.
    seconds:  time of training and tests; a reused step counts with the time of its training. For a retest, of the test.
    rows:     one row per finished step; for a retest, that of the tested step; for a summary, parts of the rows.
    retest:   options that differ from those of the run; None for the run itself.
    classes:  for a summary, the statistics of each class.
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
    is_summary: bool = False
    classes: list[ClassStatistics] | None = None

    def figure(self, name: str) -> float | None:
        return getattr(self, name)

    @property
    def how_far(self) -> str:
        return f"{self.folder} is not finished ({len(self.rows)} of {self.num_steps} steps) and left out"

    @property
    def class_statistics(self) -> list[ClassStatistics]:
        """Return the statistics of each class of a finished run."""
        return class_statistics(self.folder, self.rows) if self.classes is None else self.classes

    def as_row(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = ("dataset", "task", "setting", "method", "seed", "options", *ALL_FIGURES, "seconds", "order", "preset")
        return {
            **{name: getattr(self, name) for name in names},
            "rules": self.rules["name"],
            **{name: getattr(self, name) for name in ("threads", "commit", "command")},
            "run": shown_path(self.folder),
            "retest": self.retest is not None,
        }


@contextlib.contextmanager
def collected_warnings(show: bool = False) -> Iterator[list[str]]:
    """Collect the warnings of this package instead of handling them, each once and on one line.

    With `show`, also print warnings and information to stderr at once.
    """
    lines: list[str] = []

    def take(record: logging.LogRecord) -> bool:
        line = " ".join(record.getMessage().split())
        if record.levelno < logging.WARNING:
            if show:
                print(line, file=sys.stderr, flush=True)
        elif line not in lines:
            lines.append(line)
            if show:
                print_warning(line)
        return False

    level = log.level
    log.addFilter(take)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeFilter(take)
        log.setLevel(level)


def print_warning(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def read_runs(folders: Iterable[str | Path], usual: Usual) -> list[RunRecord]:
    """Return the runs in these folders or below them, each followed by its retests, with unfinished runs and summaries.

    Broken, incomplete or foreign folders, retests and summaries are reported and left out.
    """
    records: list[RunRecord] = []
    for place in find_runs(folders):
        if not place.is_dir():
            known = {record.folder for record in records}
            records += [record for record in _read_summaries(place, usual) if record.folder not in known]
            continue
        with _left_out(place):
            run = _read_run(place, usual)
            records.append(run)
            for file in sorted(RunDir(place).retests.glob("*.json")) if run.finished else []:
                with _left_out(file):
                    records += _read_retest(file, run, usual)
    return records


@contextlib.contextmanager
def _left_out(place: object) -> Iterator[None]:
    """Report what cannot be read, and continue."""
    try:
        yield
    except BROKEN as error:
        log.warning(f"{place} is left out: {one_line(error)}")


def require_some(shown: Sequence[RunRecord], left_out: Sequence[str]) -> None:
    """Raise a UserError with the collected warnings if there is nothing to show."""
    if not shown:
        more = f"; and {len(left_out) - _MOST_REASONS} more" if len(left_out) > _MOST_REASONS else ""
        raise UserError(f"nothing to show: {'; '.join(left_out[:_MOST_REASONS])}{more}; incseg train makes runs")


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """Return every folder, among these or below them, with a config.yaml or results.json, and every file of summaries.

    Each is returned once, sorted below its parent.
    """
    found: dict[Path, Path] = {}
    for given in map(Path, folders):
        here = [given] if any(map(is_summary, (given, *given.parents))) else []
        if not given.is_dir() and not here:
            problem = "is a file" if given.exists() else "does not exist"
            endings = ", ".join(f"*{ending}" for ending in SUMMARY_SUFFIXES)
            allowed = f"give run folders, folders with run folders in them, or summaries ({endings})"
            raise UserError(f"{given} {problem}; {allowed}")
        for place, below, files in os.walk(given):
            below.sort()
            if "config.yaml" in files or "results.json" in files:
                here.append(Path(place))
                below.clear()
            else:
                below[:] = [name for name in below if not name.startswith(".")]
                here += [file for name in sorted(files) if is_summary(file := Path(place) / name)]
        if not here:
            log.warning(f"{given} holds no run folder")
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
    keys = ("dataset", "task", "setting", "order")
    names: dict[str, Any] = {key: _need(protocol, key, str, "protocol.json") for key in keys}
    names["dataset"] = _dataset(names["dataset"], config)
    method = _need(_need(config, "method", dict, "config.yaml"), "name", str, "config.yaml")
    rules = _need(protocol, "rules", dict, "protocol.json")
    _need(rules, "name", str, "protocol.json")
    settings, usually = flatten(config), flatten(usual(config))
    command = _need(environment, "command", list, "environment.json")
    from_file = command[1:3] == ["sweep", "make"] or any(str(word).split("=")[0] == "--config" for word in command)
    return RunRecord(
        folder=folder,
        **names,
        method=method,
        seed=_need(config, "seed", int, "config.yaml"),
        preset=_need(config, "preset", str | None, "config.yaml"),
        options=_options(settings, usually),
        settings=settings,
        rules=rules,
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
    """Return the name of a dataset. Each folder of one's own photographs is a dataset named by the folder."""
    root = (config.get("data") or {}).get("root")
    return f"{name} {Path(str(root)).name}".strip() if name in OWN and root else name


def _read_retest(file: Path, run: RunRecord, usual: Usual) -> list[RunRecord]:
    """Return a retest as a separate record; an empty list if it is of an earlier step, which no table shows."""
    saved = read_json(file)
    step, row = _need(saved, "step", int, "it"), _need(saved, "row", dict, "it")
    changed = _need(saved, "options", dict, "it")
    if step != run.num_steps - 1:
        return []
    _check_row({"seconds": {"train": 0, "eval": 0}, **row}, step)
    if _need(saved, "row_digest", str, "it") != RunDir(run.folder).row_digest(step):
        raise UserError("its run was trained again since; test again with incseg eval --save")
    figures: dict[str, Any] = {name: _number(row, name, "its row") for name in FIGURES}
    settings = {**run.settings, **{f"method.{name}": value for name, value in changed.items()}}
    return [
        replace(
            run,
            options=_options(settings, flatten(usual(read_config(RunDir(run.folder).config)))),
            settings=settings,
            rows=[row],
            command=shown_command(_need(saved, "command", list, "it")),
            commit=str(_need(saved, "commit", str | None, "it") or "unknown"),
            **figures,
            avg=None,
            seconds=float(_need(saved, "seconds", int | float, "it")),
            retest=changed,
        )
    ]


# --- summaries -----------------------------------------------------------------------------------------------


def write_summaries(records: Sequence[RunRecord], runs: Path, file: Path) -> int:
    """Add the finished runs among these, each with its retests, to a file of summaries, and return their number.

    A run is named by its folder below `runs`. Summaries of other runs in the file do not change.
    """
    lines = {_need(_parsed(line, where), "name", str, where): line for where, line in _lines(file)}
    finished = [record for record in records if record.finished and record.retest is None]
    for run in finished:
        name = run.folder.relative_to(runs).as_posix()
        values = _summary(replace(run, classes=run.class_statistics))
        retests = [one for one in records if one.folder == run.folder and one.retest is not None]
        of_tests = [_summary(replace(one, rows=[], classes=[])) for one in retests]
        differing = [{key: value for key, value in of_test.items() if value != values[key]} for of_test in of_tests]
        lines[name] = json.dumps(
            with_checksum({"name": name, "run": values, "retests": differing}), separators=(",", ":")
        )
    write_text(file, "".join(f"{line}\n" for _, line in sorted(lines.items())))
    return len(finished)


def _summary(record: RunRecord) -> dict[str, Any]:
    """Return plain values without paths of this machine, and only with settings that change figures."""
    values = {one.name: getattr(record, one.name) for one in fields(record) if one.name not in _NOT_IN_SUMMARY}
    rows = [{key: row[key] for key in _ROW_IN_SUMMARY} for row in record.rows]
    measured = {key: _rounded(values[key]) for key in (*ALL_FIGURES, "seconds", "classes")}
    return {**values, **measured, "rows": _rounded(rows), "settings": optional_settings(record.settings)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line of a file of summaries, if there is one."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    yield from ((f"{file} line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        return without_checksum(json.loads(line), where, _RESTORE)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is damaged ({error}); {_RESTORE}") from error


def _read_summaries(place: Path, usual: Usual) -> list[RunRecord]:
    """Return the runs of a file of summaries, or one of them (FILE/NAME), each followed by its retests."""
    file = next(path for path in (place, *place.parents) if is_summary(path))
    found: list[RunRecord] = []
    with _left_out(file):
        if not file.name.endswith(SUMMARY_SUFFIXES[0]):
            return _read_summary(file, read_record(file, _RESTORE), usual)
        for where, line in _lines(file):
            with _left_out(where):
                saved = _parsed(line, "it")
                folder = file / str(saved.get("name"))
                if place in (folder, *folder.parents):
                    found += _read_summary(folder, saved, usual)
        if not found and place != file:
            log.warning(f"{file} holds no run {place.relative_to(file)}")
    return found


def _read_summary(folder: Path, saved: dict[str, Any], usual: Usual) -> list[RunRecord]:
    """Return a run and its retests. Options are found with the current presets, so that runs with the same settings
    have the same name, whenever they were saved."""
    try:
        run = _need(saved, "run", dict, "it")
        retests = [{**run, **values} for values in _need(saved, "retests", list, "it")]
        records = [_record(folder, values) for values in (run, *retests)]
    except (UserError, TypeError) as error:  # a TypeError for an unknown field
        raise UserError(f"{one_line(error)}; {_RESTORE}") from error
    data = {"name": records[0].settings.get("data.name", records[0].dataset)}
    usually = flatten(usual({"preset": records[0].preset, "method": {"name": records[0].method}, "data": data}))
    return [replace(record, options=_options(record.settings, usually)) for record in records]


def _record(folder: Path, values: dict[str, Any]) -> RunRecord:
    texts = ("dataset", "task", "setting", "order", "method", "command", "commit", "machine")
    kinds = {"rows": list, "rules": dict, "settings": dict, "options": dict, "num_steps": int, "seed": int,
             "threads": int, "seconds": int | float, "retest": dict | None, "preset": str | None,
             **dict.fromkeys(texts, str)}  # fmt: skip
    for key, kind in kinds.items():
        _need(values, key, kind, "it")
    for name in ALL_FIGURES:
        _number(values, name, "it")
    _need(values["rules"], "name", str, "it")
    classes = [ClassStatistics(*one) for one in values.get("classes") or ()]
    if "fates" in values:  # their name in version 0.1
        classes = [ClassStatistics(**one) for one in values["fates"] or ()]
    rest = {key: value for key, value in values.items() if key not in ("classes", "fates")}
    return RunRecord(folder=folder, finished=True, is_summary=True, classes=classes, **rest)


def _need(values: Any, key: str, kind: Any, where: str) -> Any:
    """Return a value of the expected type. A file without it is incomplete or not from incseg."""
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


def _options(settings: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    optional = optional_settings(settings).items()
    return {key.removeprefix("method."): value for key, value in optional if key not in usual or value != usual[key]}


def optional_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that can be options. Paths of weights and replay images are shortened to their names."""
    return {
        key: os.path.basename(value) if key in _PATHS and isinstance(value, str) else value
        for key, value in settings.items()
        if key.split(".")[0] in _OPTION_GROUPS and key not in _NO_OPTIONS
    }


def changes(record: RunRecord, default: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from another run: {"scope": (there, here)}. Settings that only one of the two
    versions of incseg has are left out."""
    here = {**optional_settings(record.settings), "rules": record.rules["name"]}
    there = {**optional_settings(default.settings), "rules": default.rules["name"]}
    differing = {key: (there[key], here[key]) for key in here if key in there and there[key] != here[key]}
    return {key.removeprefix("method."): pair for key, pair in differing.items()}


# --- paths, commands and options as text ---------------------------------------------------------------------


def shown_path(path: Path) -> str:
    """Return a path for a file that others read: relative to the current folder, or only its last part."""
    given = Path(os.path.abspath(path))  # a link to another disk has its own name
    try:
        return given.relative_to(Path.cwd()).as_posix() or "."
    except ValueError:
        return given.name


def shown_command(tokens: Sequence[Any]) -> str:
    """Return a command for another machine: paths outside the current folder are shortened to their names."""
    return shlex.join(["incseg", *(_without_place(str(token)) for token in tokens[1:])])


def _as_flags(folder: Path, settings: dict[str, Any], usual: dict[str, Any]) -> list[Any]:
    """Return the command with flags for a run whose settings came from a file, as in a queue: readers do not have that
    file."""
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
    """Return options as text: balancing odds, train.lr 0.1."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in sorted(options.items()))


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _machine(environment: dict[str, Any]) -> str:
    known = {key: environment.get(key) for key in ("incseg", "torch", "python", "platform", "cpus", "device")}
    return "incseg {incseg}, torch {torch}, Python {python}, {platform}, {cpus} CPUs, device {device}".format(**known)


def one_line(error: BaseException) -> str:
    text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())
