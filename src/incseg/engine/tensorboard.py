"""Curves for TensorBoard, if it is installed. They are a convenience and not part of the results."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incseg.metrics import FIGURES


class TensorBoard:
    """Write losses by epoch and the metrics of each step at its last epoch; epochs count over all steps.

    Epochs that an interrupted run repeats are drawn twice, with the same numbers. A full disk ends the curves but not
    the run. That is why torch's SummaryWriter is not used: it writes from a thread, which prints a traceback if the
    disk is full (measured with tensorboard 2.21), and kill -9 loses up to two minutes of its buffer.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder` is None in processes that do not write."""
        self._folder = folder
        self._stream: Any = None

    def losses(self, terms: Mapping[str, float], epoch: int) -> None:
        self._scalars({f"losses/{name}": value for name, value in terms.items()}, epoch)

    def row(self, row: Mapping[str, Any], epoch: int) -> None:
        self._scalars({f"figures/{name}": row[name] for name in FIGURES if row[name] is not None}, epoch)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _scalars(self, values: Mapping[str, float], epoch: int) -> None:
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
