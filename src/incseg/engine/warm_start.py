"""A warm start: a run begins with an existing model, and the classes that it knows are step 0."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from incseg.data.extended import Extended
from incseg.data.source import Source, voc_palette
from incseg.engine.checkpoint import SavedStep
from incseg.engine.progress import log
from incseg.engine.rundir import STATE_FILE, model_file
from incseg.io import read_tensors
from incseg.methods import METHODS
from incseg.methods.base import CROSS_ENTROPY, Method
from incseg.models.files import load_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.types import BACKGROUND, UserError


@dataclass
class WarmStart:
    """A model ready to be extended by a method.

    about:    what its file tells of its origin.
    improved: classes that it knows and that the run improves, with their ids and colours; `model` has them no more.
    """

    file: Path
    model: Segmenter
    about: dict[str, Any]
    improved: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def open(path: str, method: Method, method_name: str) -> WarmStart:
        """Read a model, and convert it where the method needs that; a UserError where the method cannot extend it."""
        file = model_file(Path(path).expanduser())
        model, about = load_segmenter(file)
        trained_by = str((about.get("method") or {}).get("name"))
        if not model.increments:
            raise UserError(f"model file '{file}' has learnt no class yet; give the model of a finished step")
        if method.single_step:
            raise UserError(f"method '{method_name}' learns all classes at once; add some with evidential, mib or plop")
        own_outputs = method.own_outputs or getattr(METHODS.get(trained_by), "own_outputs", False)
        if own_outputs and trained_by != method_name:
            own = method_name if method.own_outputs else trained_by
            raise UserError(
                f"the model '{file}' is of {trained_by}; {own} extends only models of {own}, and only {own} does"
            )
        if method.background_output and not model.background_output:
            raise UserError(
                f"method '{method_name}' needs a background output, and the model '{file}' has none; use {trained_by}"
            )
        if model.background_output and not method.background_output:
            converted = method.without_background_output(model)
            if converted is None:
                raise UserError(
                    f"method '{method_name}' has no use for the background output of the model '{file}'; use "
                    f"evidential, for which it is converted, or {trained_by}"
                )
            model = converted
        return WarmStart(file, model, about)

    def learn_further(self, task: str) -> list[str]:
        """Make the classes of a task new again that were solved in closed form: their sums wait for more images.

        Returns their names. All other classes stay; one that was trained is not learnt further.
        """
        solved = {name for increment in self.model.increments if increment.solved for name in increment.classes}
        named = [task] if task in solved else [name.strip() for name in task.split(",")]
        again = [name for name in dict.fromkeys(named) if name in solved]
        if again and len(again) == len(self.classes):
            raise UserError(f"'{task}' names all classes of the model '{self.file}'; leave one that it keeps")
        for name in again:
            ids = [BACKGROUND, *(i for increment in self.model.increments for i in increment.ids)]
            colours = self.colours.tolist()
            label = self.model.remove(name, to_learn_further=True)
            self.improved[name] = ids[label], colours[label]
            if label < len(self.about.get("palette", [])):
                del self.about["palette"][label]
        return again

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for increment in self.model.increments for name in increment.classes)

    @property
    def colours(self) -> np.ndarray:
        """(N+1, 3) of background and the classes; Pascal VOC's where the file has none."""
        ids = [BACKGROUND, *(i for increment in self.model.increments for i in increment.ids)]
        kept = np.array(self.about.get("palette", []), dtype=np.uint8)[: len(ids)]
        return kept if kept.shape == (len(ids), 3) else voc_palette()[ids]

    def extended(self, source: Source, task: str) -> Extended:
        """A dataset in this model's ids, with the new classes of `task` behind them, but for those it knew before."""
        return Extended(source, self.model.increments, task, self.colours, self.improved)

    def network(self, config: ModelConfig, size: int = 0) -> Segmenter:
        """The model; `config` must be its own, but for the backbone, which may be frozen or not from now on.

        With a `size` that is a multiple of the one it was tested at, it takes images so much larger, and what it has
        learnt sees them at its own size.
        """
        own = self.model.config
        for field in dataclasses.fields(ModelConfig):
            asked, there = (_comparable(getattr(c, field.name)) for c in (config, own))
            if asked != there and field.name not in ("weights", "freeze_backbone"):
                raise UserError(
                    f"model.{field.name} is {asked}, but the model '{self.file}' has {there}; leave it out: only "
                    "model.freeze_backbone may differ"
                )
        own.freeze_backbone = config.freeze_backbone
        self.model.backbone.requires_grad_(not config.freeze_backbone)
        own_size = int(self.about.get("test_size", 0))
        if size and own_size and size > own_size and size % own_size == 0:
            self.model.enlarge(size // own_size)
        return self.model

    def as_step(self, method: Method, method_name: str) -> SavedStep:
        """Return step 0 for the trainer, with what its method remembers, where that lies beside the model."""
        own = (self.about.get("method") or {}).get("name") == method_name
        beside = self.file.with_name(STATE_FILE)
        state: dict[str, Tensor] = {}
        if own and beside.is_file():
            state, _ = read_tensors(beside)
        elif method.first_step not in (None, CROSS_ENTROPY) and type(method).state is not Method.state:
            log.info(f"note: what {method_name} remembers of old classes is not beside the model; it begins without")
        return SavedStep(self.model, state, self.about, origin=str(self.file))


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
