"""Curves for TensorBoard, where it is installed; a convenience, no part of the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incseg.metrics.continual import FIGURES


class Board:
    """Losses by epoch, and the figures of each step at its last epoch; epochs count over all steps.

    What an interrupted run learns twice is drawn twice: the numbers are the same.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder` is None in the processes that do not write."""
        self._folder = folder
        self._writer: Any = None

    def losses(self, terms: Mapping[str, float], epoch: int) -> None:
        self._scalars({f"losses/{name}": value for name, value in terms.items()}, epoch)

    def row(self, row: Mapping[str, Any], epoch: int) -> None:
        self._scalars({f"figures/{name}": row[name] for name in FIGURES if row[name] is not None}, epoch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, values: Mapping[str, float], epoch: int) -> None:
        if self._folder is None:
            return
        if self._writer is None:  # opened late, so that a run with nothing left to learn adds no file
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._folder = None
                return
            self._writer = SummaryWriter(str(self._folder))
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
