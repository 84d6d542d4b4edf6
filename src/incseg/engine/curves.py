"""Curves of losses and metrics for TensorBoard, wandb or trackio. They are a convenience and not part of the results.

A logger that fails never ends a run.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from incseg.engine.progress import log
from incseg.io import require_known
from incseg.metrics import FIGURES
from incseg.types import UserError

TENSORBOARD = "tensorboard"
TRACKERS = ("wandb", "trackio")
"""Packages that have init, log and finish with the same arguments."""


def logger_names(setting: str) -> list[str]:
    """Return the loggers of a setting such as "tensorboard,wandb"; "none" is none."""
    names = [] if setting == "none" else [name.strip() for name in setting.split(",")]
    for name in names:
        require_known("log", name, (TENSORBOARD, *TRACKERS, "none"))
    return list(dict.fromkeys(names))


def open_curves(setting: str, folder: Path | None, config: dict[str, Any]) -> Curves:
    """Return the loggers of a run. `folder` is the run folder, or None in processes that do not write.

    wandb and trackio must be installed if they are asked for. TensorBoard is the default, so it may be missing.
    """
    events = None if folder is None else folder / TENSORBOARD
    names = logger_names(setting)
    return Several([TensorBoard(events) if name == TENSORBOARD else Tracker(name, folder, config) for name in names])


class Curves:
    """Losses by epoch, and the metrics of each step at its last epoch; epochs count over all steps."""

    def losses(self, terms: Mapping[str, float], epoch: int) -> None:
        self.scalars({f"losses/{name}": value for name, value in terms.items()}, epoch)

    def row(self, row: Mapping[str, Any], epoch: int) -> None:
        self.scalars({f"figures/{name}": row[name] for name in FIGURES if row[name] is not None}, epoch)

    def scalars(self, values: Mapping[str, float], epoch: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Several(Curves):
    """All loggers of a run."""

    def __init__(self, loggers: Sequence[Curves]) -> None:
        self._loggers = loggers

    def scalars(self, values: Mapping[str, float], epoch: int) -> None:
        for logger in self._loggers:
            logger.scalars(values, epoch)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


class Tracker(Curves):
    """A run of wandb or trackio in the project incseg. It is opened by the first values. A resumed run opens another
    of the same name."""

    def __init__(self, package: str, folder: Path | None, config: dict[str, Any]) -> None:
        try:
            self._module = importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"--log {package} needs the package {package}; pip install 'incseg[{package}]'") from error
        self._package, self._folder, self._config = package, folder, config
        self._is_open = False

    def scalars(self, values: Mapping[str, float], epoch: int) -> None:
        if self._folder is None:
            return
        try:
            if not self._is_open:
                os.environ.setdefault("WANDB_DIR", str(self._folder))  # else it creates a folder in the current one
                self._module.init(project="incseg", name=self._folder.name, config=self._config)
                self._is_open = True
            self._module.log(dict(values), step=epoch)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._module.finish()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._folder = None
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        log.info(f"warning: {self._package} failed ({cause}); the run continues without it")


class TensorBoard(Curves):
    """Event files of TensorBoard, if it is installed.

    Epochs that an interrupted run repeats are drawn twice, with the same numbers. A full disk ends the curves but not
    the run. That is why torch's SummaryWriter is not used: it writes from a thread, which prints a traceback if the
    disk is full (measured with tensorboard 2.21), and kill -9 loses up to two minutes of its buffer.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder` is None in processes that do not write."""
        self._folder = folder
        self._stream: Any = None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def scalars(self, values: Mapping[str, float], epoch: int) -> None:
        if self._folder is None:
            return
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._stream is None:  # opened late, so that a run with nothing left to learn adds no file
                self._folder.mkdir(exist_ok=True)
                name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
                self._stream = (self._folder / name).open("ab", buffering=0)
                self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(Event(wall_time=time.time(), step=epoch, summary=Summary(value=shown)))
        except (ImportError, OSError):
            self._folder = None

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._stream).write(event.SerializeToString())
