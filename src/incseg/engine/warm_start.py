"""Warm start: a run starts from an existing model, and the classes that the model knows are step 0."""

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
from incseg.settings import listed
from incseg.types import BACKGROUND, UserError


@dataclass
class WarmStart:
    """A model ready to be extended by a method.

    about:    metadata of the model file.
    improved: classes that the file knows and that the run learns further, with their ids and colours; they are removed
              from `model`.
    """

    file: Path
    model: Segmenter
    about: dict[str, Any]
    improved: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def open(path: str, method: Method, method_name: str) -> WarmStart:
        """Read a model, and convert it if the method needs that. Raise a UserError if the method cannot extend it."""
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
                f"the model '{file}' was trained by {trained_by}; only {own} extends models of {own}, and no others"
            )
        if method.background_output and not model.background_output:
            raise UserError(
                f"method '{method_name}' needs a background output, and the model '{file}' has none; use {trained_by}"
            )
        if model.background_output and not method.background_output:
            converted = method.without_background_output(model)
            if converted is None:
                raise UserError(
                    f"method '{method_name}' cannot use the background output of the model '{file}'; use evidential, "
                    f"for which the model is converted, or {trained_by}"
                )
            model = converted
        return WarmStart(file, model, about)

    def learn_further(self, task: str) -> list[str]:
        """Remove the classes of a task that were solved in closed form, so that the run learns them from their sums and
        more images. Return their names.

        Classes that were trained by SGD are not learnt further.
        """
        solved = {name for increment in self.model.increments if increment.solved for name in increment.classes}
        named = [task] if task in solved else [name.strip() for name in task.split(",")]
        again = [name for name in dict.fromkeys(named) if name in solved]
        if again and len(again) == len(self.classes):
            raise UserError(f"'{task}' names all classes of the model '{self.file}'; leave out at least one")
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
        """(N+1, 3) of background and the classes; those of Pascal VOC if the file has none."""
        ids = [BACKGROUND, *(i for increment in self.model.increments for i in increment.ids)]
        saved = np.array(self.about.get("palette", []), dtype=np.uint8)[: len(ids)]
        return saved if saved.shape == (len(ids), 3) else voc_palette()[ids]

    def extended(self, source: Source, task: str) -> Extended:
        """Return a dataset in this model's ids, then the new classes of `task`; improved ones have their own."""
        return Extended(source, self.model.increments, task, self.colours, self.improved)

    def network(self, config: ModelConfig, size: int = 0) -> Segmenter:
        """Return the model. `config` must be that of the model, except that it may freeze the backbone or not.

        If `size` is a multiple of the model's test size, the model gets larger images. The parts that it has learnt
        already still get them at their own size.
        """
        own = self.model.config
        for field in dataclasses.fields(ModelConfig):
            given, saved = (listed(getattr(c, field.name)) for c in (config, own))
            if given != saved and field.name not in ("weights", "freeze_backbone"):
                raise UserError(
                    f"model.{field.name} is {given}, but the model '{self.file}' has {saved}; leave it out, because "
                    "only model.freeze_backbone may differ"
                )
        own.freeze_backbone = config.freeze_backbone
        self.model.backbone.requires_grad_(not config.freeze_backbone)
        own_size = int(self.about.get("test_size", 0))
        if size and own_size and size > own_size and size % own_size == 0:
            self.model.enlarge(size // own_size)
        return self.model

    def as_step(self, method: Method, method_name: str) -> SavedStep:
        """Return step 0 for the trainer, with the state of its method if that file is beside the model."""
        own = (self.about.get("method") or {}).get("name") == method_name
        beside = self.file.with_name(STATE_FILE)
        state: dict[str, Tensor] = {}
        if own and beside.is_file():
            state, _ = read_tensors(beside)
        elif method.first_step not in (None, CROSS_ENTROPY) and type(method).state is not Method.state:
            log.info(f"note: the state of {method_name} ({STATE_FILE}) is not beside the model; it starts without it")
        return SavedStep(self.model, state, self.about, origin=str(self.file))
