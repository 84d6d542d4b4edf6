"""The step cache: a step that was trained before by the same recipe is loaded, not trained again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from incseg.engine.checkpoint import Progress, SavedStep, load_step
from incseg.engine.rundir import STATE_FILE, RunDir
from incseg.io import read_json, replacing, write_json
from incseg.protocol import Step
from incseg.types import UserError

STEP_FILE = "step.json"
"""File with the training progress of a cached step. It is written last, so an entry without it is incomplete."""


@dataclass
class StepCache:
    """A folder of trained steps, each under a digest of its recipe and those of all earlier steps.

    root:   folder of the cache; None turns the cache off.
    recipe: step → everything its training depends on besides classes and images: data, model, method, schedule, seed.
    """

    root: Path | None
    recipe: Callable[[int], dict[str, Any]]

    def find(self, steps: Sequence[Step], images: Sequence[Sequence[int]]) -> SavedStep | None:
        """Return the last of `steps` if it is cached for these images and this recipe."""
        folder = self._folder(steps, images)
        if folder is None or not (folder / STEP_FILE).exists():
            return None
        try:
            about = read_json(folder / STEP_FILE)
            progress = Progress(**about["progress"])
            return replace(load_step(folder / "model.safetensors"), progress=progress, origin=about["origin"])
        except (UserError, KeyError, TypeError):
            shutil.rmtree(folder, ignore_errors=True)  # damaged: the step is trained and cached again
            return None

    def add(self, steps: Sequence[Step], images: Sequence[Sequence[int]], run: RunDir, progress: Progress) -> None:
        """Add a step that `run` has just written. A full disk does not stop the run."""
        folder = self._folder(steps, images)
        if folder is None:
            return
        index = steps[-1].index
        try:
            _link(run.model(index), folder / "model.safetensors")
            _link(run.state(index), folder / STATE_FILE)
            write_json(folder / STEP_FILE, {"progress": asdict(progress), "origin": str(run.root)})
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, steps: Sequence[Step], images: Sequence[Sequence[int]]) -> Path | None:
        if self.root is None:
            return None
        digest = hashlib.sha256()
        for step in steps:
            digest.update(json.dumps(self.recipe(step.index), sort_keys=True).encode())
            digest.update(json.dumps([step.new, step.names, list(images[step.index])]).encode())
            digest.update(step.train_table.tobytes())
        return self.root / digest.hexdigest()[:32]


def _link(file: Path, name: Path) -> None:
    """Make a hard link to a file, or a copy if the disk does not support links."""
    with replacing(name) as temporary:
        temporary.unlink()
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)
