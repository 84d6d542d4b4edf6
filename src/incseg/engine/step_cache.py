"""The step cache: a step that was trained before by the same recipe is taken from it, not trained again."""

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


@dataclass
class StepCache:
    """A folder of trained steps, each under the digest of its recipe and of every step before it.

    root:   None: nothing is cached and nothing is found.
    recipe: what the training of step k depends on beside its classes and images: data, model, method, schedule, seed.
    """

    root: Path | None
    recipe: Callable[[int], dict[str, Any]]

    def find(self, steps: Sequence[Step], images: Sequence[Sequence[int]]) -> SavedStep | None:
        """The model of the last of `steps`, if these were learnt before from these images by this recipe."""
        folder = self._folder(steps, images)
        if folder is None or not (folder / "kept.json").exists():
            return None
        try:
            about = read_json(folder / "kept.json")
            progress = Progress(**about["progress"])
            return replace(load_step(folder / "model.safetensors"), progress=progress, origin=about["origin"])
        except (UserError, KeyError, TypeError):
            shutil.rmtree(folder, ignore_errors=True)  # damaged: it is trained again, and kept anew
            return None

    def keep(self, steps: Sequence[Step], images: Sequence[Sequence[int]], run: RunDir, progress: Progress) -> None:
        """Remember a step that `run` has just written; a disk that will not have it is no failure of the run."""
        folder = self._folder(steps, images)
        if folder is None:
            return
        index = steps[-1].index
        try:
            _link(run.model(index), folder / "model.safetensors")
            _link(run.state(index), folder / STATE_FILE)
            write_json(folder / "kept.json", {"progress": asdict(progress), "origin": str(run.root)})
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
    """The same file under another name, without its bytes twice where the disk allows it."""
    with replacing(name) as temporary:
        temporary.unlink()
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)
