"""The run folder: the contract between the engine that writes it and the code that reads it later.

config.yaml             the whole resolved configuration; `incseg train --config` runs it again
environment.json        versions, commit, device, threads
protocol.json           steps, classes, image counts, label rules
log.txt                 the printed lines
steps/K/model.safetensors, state.safetensors, confusion.npy, row.json (written last: the step is done)
checkpoint.safetensors  the step in progress
results.json            written at the end: final figures, every step's row, rules, seconds
forgetting.json         for a warm start: the changes of the classes that its model knew
photographs.png         for one's own photographs: a contact sheet of some of them with their masks
tries/NAME/             for incseg extend: the runs of all recipes; the best one is copied to the run itself
retests/NAME.json       a step tested again with other inference options (incseg eval --save)
tensorboard/            if tensorboard is installed
.lock, .lock-holder     the process that works in the folder; the lock is free when that process ends
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import incseg
from incseg import hub
from incseg.io import (
    FolderLock,
    is_hidden_own,
    read_record,
    read_yaml,
    remove_temporary,
    write_json,
    write_text,
)
from incseg.models.box import box_names, boxed_model
from incseg.types import UserError

_OWN_FILES = (
    "config.yaml", "environment.json", "protocol.json", "log.txt", "checkpoint.safetensors", "results.json",
    "forgetting.json", "changes.json", "photographs.png",
)  # fmt: skip
_OWN_FOLDERS = ("steps", "tries", "retests", "tensorboard", "report")
_OWN_OF_STEPS = ("model.safetensors", "state.safetensors", "confusion.npy", "row.json")

STATE_FILE = "state.safetensors"
"""File with the state of a method after a step, beside the step's model."""

SUMMARY_SUFFIXES = ("runs.jsonl", ".run.json")
"""Endings of files with summaries of runs (report/runs.py), which have figures but no models. A file of the first kind
has a run on each line. Version 0.1 wrote a file of the second kind for each run."""


class InUse(UserError):
    """Another process works in the run folder."""


class RunDir:
    """One run on disk."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._lock: FolderLock | None = None

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.safetensors"

    @property
    def results(self) -> Path:
        return self.root / "results.json"

    @property
    def protocol(self) -> Path:
        return self.root / "protocol.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def forgetting(self) -> Path:
        """The file with the forgetting of a warm start; runs before version 0.2 have another name for it."""
        old = self.root / "changes.json"
        return old if old.exists() else self.root / "forgetting.json"

    @property
    def retests(self) -> Path:
        return self.root / "retests"

    @property
    def sheet(self) -> Path:
        return self.root / "photographs.png"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    def model(self, step: int) -> Path:
        return self.root / "steps" / str(step) / "model.safetensors"

    def state(self, step: int) -> Path:
        return self.root / "steps" / str(step) / STATE_FILE

    def confusion(self, step: int) -> Path:
        return self.root / "steps" / str(step) / "confusion.npy"

    def row(self, step: int) -> Path:
        return self.root / "steps" / str(step) / "row.json"

    def steps_done(self) -> list[int]:
        """Return the finished steps from 0 on, without gaps."""
        done: list[int] = []
        while self.row(len(done)).exists():
            done.append(len(done))
        return done

    @property
    def started(self) -> bool:
        """Whether the run has learnt anything."""
        return self.config.exists() and (self.checkpoint.exists() or bool(self.steps_done()))

    def rows(self) -> list[dict[str, Any]]:
        return [read_record(self.row(step)) for step in self.steps_done()]

    def lock(self) -> None:
        """Create the folder if necessary, and lock it until `close`, so that only one process works in it."""
        self.require_own()
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            remove_temporary(self.root, *_OWN_FILES)
            for folder in self.root.glob("steps/*"):
                remove_temporary(folder, *_OWN_OF_STEPS)
            remove_temporary(self.retests, "step*.json")

    def require_own(self) -> None:
        """Refuse a folder with files that are not of a run: they could be overwritten or mistaken for ours."""
        begun = self.environment.exists() or self.started or (self.root / ".lock").exists()
        if self.config.exists() and begun:
            return
        with self._writing():
            found = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        own = {*_OWN_FILES, *_OWN_FOLDERS} - {self.config.name}
        if foreign := [name for name in found if name not in own and not is_hidden_own(name, _OWN_FILES)]:
            raise UserError(
                f"{self.root} holds '{foreign[0]}', which no run of incseg wrote; choose a new folder with --out"
            )

    def write_config(self, config: dict[str, Any]) -> None:
        with self._writing():
            write_text(self.config, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.root} ({error}); choose another with --out") from error

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def require_there(self) -> None:
        """Refuse to continue if the folder was deleted or replaced: a new one of its name would get half a run."""
        if self._lock is not None and not self._lock.is_in_place():
            raise UserError(
                f"{self.root} was deleted or moved while this run worked in it; the same command starts again"
            )

    def _take_lock(self) -> None:
        lock = FolderLock(self.root)
        if not lock.acquire():
            holder = lock.holder() or "another process"
            raise InUse(f"{self.root} is in use by {holder}; wait for it, stop it, or choose another --out")
        self._lock = lock

    def write_environment(self, runtime: dict[str, object]) -> None:
        write_json(self.environment, {**environment(), **runtime})

    def row_digest(self, step: int) -> str:
        """Return a digest of a step's row. It changes if the step is trained again, as the row has the seconds."""
        return hashlib.sha256(self.row(step).read_bytes()).hexdigest()

    def write_retest(self, options: dict[str, Any], row: dict[str, Any], seconds: float) -> Path:
        """Save the row of a step tested again with other inference options, and return the file."""
        name = "-".join([f"step{row['index']}", *(f"{key}-{value}" for key, value in sorted(options.items()))])
        file = self.retests / f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}.json"
        record = {
            "step": row["index"],
            "options": options,
            "row": row,
            "row_digest": self.row_digest(row["index"]),
            "seconds": round(seconds, 2),
            "commit": _commit(),
            "command": _command(),
        }
        try:
            write_json(file, record)
        except OSError as error:
            raise UserError(f"cannot write {file} ({error}); make the run folder writable") from error
        return file


def model_file(path: Path, step: int | None = None) -> Path:
    """Return the model file for a path from the user, for a model that comes with incseg, or for one on the hub."""
    if hub.is_address(path):
        if step is not None:
            raise UserError(f"step {step} was asked for, but '{path}' is one model; leave --step out")
        return hub.download(path)
    if not path.exists():
        if str(path) in box_names():
            return boxed_model(str(path))
        ready = ", ".join(box_names())
        raise UserError(
            f"'{path}' does not exist; give a run folder, one of its steps, a model file, hf://owner/name, or a ready "
            f"model ({ready})"
        )
    _require_models(path)
    run = RunDir(path)
    own = path / "model.safetensors"
    if path.is_file() or own.is_file():
        if step is not None:
            raise UserError(f"step {step} was asked for, but '{path}' is one step already; give its run folder")
        return path if path.is_file() else own
    if not run.config.exists() and (path / "tries").is_dir():
        raise UserError(f"'{path}' is an extension that is not finished; run its incseg extend command again")
    if not run.config.exists() and not (path / "steps").is_dir():
        raise UserError(
            f"'{path}' is not a run folder: it has no config.yaml; give the folder that incseg train wrote, "
            "one of its steps, or a .safetensors model file"
        )
    done = run.steps_done()
    if not done:
        raise UserError(f"'{path}' has no finished step yet; resume it with incseg train")
    if step is not None and step not in done:
        raise UserError(f"'{path}' has no finished step {step}; choose from {done[0]} to {done[-1]}")
    return run.model(done[-1] if step is None else step)


def is_summary(path: Path) -> bool:
    """Return whether a path is a file with summaries of runs."""
    return path.name.endswith(SUMMARY_SUFFIXES) and path.is_file()


def _require_models(path: Path) -> None:
    if is_summary(path):
        raise UserError(
            f"'{path}' is a summary, which has figures but no models; give a run folder, or train the run again with "
            "the command that the summary holds"
        )


def environment() -> dict[str, Any]:
    """Return versions, commit, machine and command, which every published figure needs."""
    import numpy as np  # imported here, because processes that only watch runs need neither
    import torch

    return {
        "incseg": incseg.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": _command(),
    }


def read_config(path: Path, *groups: str) -> dict[str, Any]:
    """Return a config.yaml as plain values. It must have settings in these groups."""
    try:
        value = read_yaml(path)
    except FileNotFoundError as error:
        problem = f"is not a run folder: it has no {path.name}" if path.parent.exists() else "does not exist"
        raise UserError(f"{path.parent} {problem}; give the folder that incseg train wrote") from error
    except NotADirectoryError as error:
        _require_models(path.parent)
        raise UserError(
            f"{path.parent} is a file, not a run folder; give the folder that incseg train wrote"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(
            f"{path} is not valid YAML ({str(error).splitlines()[0]}); restore it or start a new run"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, not settings; restore it or start a new run")
    for group in groups:
        if group not in value:
            raise UserError(f"{path} lacks '{group}', which every run has; restore it or start a new run")
        if not isinstance(value[group], dict):
            raise UserError(f"{path} holds {value[group]!r} in place of the settings of '{group}'; restore it")
    return value


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names: {"train": {"lr": 1}} as {"train.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(item) if isinstance(item, Sequence) and not isinstance(item, str) else item
    return flat


def _command() -> list[str]:
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def _commit() -> str | None:
    """Return the commit of the source tree that incseg runs from; None if it is not one."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
