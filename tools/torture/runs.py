"""The tiny runs into which faults are injected, and the comparison of two runs."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_runs import rows_of, small_config, write_config

from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.types import UserError
from tools.torture.case import Lost, incseg

TINY: dict[str, dict[str, Any]] = {
    "data": {"train_size": 16, "val_size": 4, "image_size": 32},
    "model": {"width": 8},
    "train": {"crop": 32, "epochs": 2},
    "eval": {"size": 32},
}
"""Three steps of shapes, each of two iterations or more, in half a second."""
CACHED: dict[str, dict[str, Any]] = {"model": {"freeze_backbone": True}, "train": {"scale": None}}
"""Settings of a frozen backbone whose features are cached."""


def settings(file: Path, out: Path, **changes: Any) -> list[object]:
    """Return the `train` command of a tiny configuration, which is written to `file`."""
    parts = {key: {**TINY.get(key, {}), **changes.pop(key, {})} for key in ("data", "model", "train", "eval")}
    return ["train", "--config", write_config(small_config(out, **parts, **changes), file)]


@functools.cache
def finished() -> Path:
    """Return a finished run. Callers must not change it."""
    folder = Path(tempfile.mkdtemp(prefix="torture-base-"))
    incseg(settings(folder / "settings.yaml", folder / "run"), folder / "cache").succeeded()
    return folder / "run"


def copy_of_finished(folder: Path) -> Path:
    """Return a copy of the finished run, with its configuration in settings.yaml beside it."""
    shutil.copytree(finished(), folder / "run")
    settings(folder / "settings.yaml", folder / "run")
    return folder / "run"


def again(folder: Path) -> list[object]:
    """Return the command that resumes the run in a folder."""
    return ["train", "--config", folder / "settings.yaml"]


def largest_difference(one: Path, other: Path) -> dict[str, float]:
    """Return the largest differences of two runs: of weights and states, of losses, and the share of other pixels."""
    worst = {"weights": 0.0, "losses": 0.0, "pixels": 0.0}
    if RunDir(one).steps_done() != RunDir(other).steps_done():
        raise Lost(f"steps {RunDir(other).steps_done()} are done, not {RunDir(one).steps_done()}")
    for step, (mine, theirs) in enumerate(zip(rows_of(one), rows_of(other), strict=True)):
        for file in (RunDir.model, RunDir.state):
            left, right = (read_tensors(file(RunDir(folder), step))[0] for folder in (one, other))
            if left.keys() != right.keys():
                raise Lost(f"step {step} has other tensors")
            for name in left:
                if not torch.equal(left[name], right[name]):
                    difference = (left[name].double() - right[name].double()).abs().max()
                    worst["weights"] = max(worst["weights"], float(difference))
        for name, value in mine["losses"].items():
            worst["losses"] = max(worst["losses"], abs(value - theirs["losses"][name]))
        counts = [np.load(RunDir(folder).confusion(step)) for folder in (one, other)]
        worst["pixels"] = max(worst["pixels"], float(np.abs(counts[0] - counts[1]).sum() / 2 / counts[0].sum()))
    return worst


def require_same(one: Path, other: Path) -> None:
    """Require that all tensors, counts and figures of two runs are bit-identical."""
    try:
        difference = largest_difference(one, other)
        finals = [json.loads(RunDir(folder).results.read_text())["final"] for folder in (one, other)]
    except (UserError, OSError, ValueError) as error:
        raise Lost(f"the run cannot be read: {error}") from error
    if any(difference.values()) or finals[0] != finals[1]:
        raise Lost(f"the run differs from an undisturbed one: {difference}")
