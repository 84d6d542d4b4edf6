"""Saved steps: the checkpoint of a step in progress, from which a run resumes to the same numbers, and finished steps
with their model and the state of their method."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from incseg.engine.progress import log
from incseg.engine.rundir import STATE_FILE
from incseg.engine.runtime import Runtime
from incseg.io import read_tensors, write_tensors
from incseg.methods.base import Method
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.types import UserError

_SETTLING = 10
"""The first updates of a step often have large gradients; these do not count as spikes."""
_OLD_NAMES = {"jolt": "spike", "jolt_at": "spike_at"}
"""Fields of `Progress` in checkpoints of version 0.1."""


@dataclass
class Progress:
    """The progress of a step.

    iteration, seconds:       updates done and time spent.
    loss_sums, losses_summed: sum of each loss term over the updates of the current epoch.
    norm_sum, norms_summed:   sum of the gradient norms over the updates of the step.
    spike, spike_at:          the worst gradient spike: a norm divided by the mean of those before it, and its update.
    """

    iteration: int = 0
    seconds: float = 0.0
    loss_sums: dict[str, float] = field(default_factory=dict)
    losses_summed: int = 0
    norm_sum: float = 0.0
    norms_summed: int = 0
    spike: float = 0.0
    spike_at: int | None = None

    def add(self, terms: dict[str, float], norm: float, starts_epoch: bool) -> None:
        """Count an update with a gradient of this norm. If it is not finite, float16 overflowed: the update was
        skipped."""
        if starts_epoch:
            self.loss_sums, self.losses_summed = {}, 0
        if math.isfinite(norm):
            if self.norms_summed >= _SETTLING and self.norm_sum > 0:
                ratio = norm * self.norms_summed / self.norm_sum
                if ratio > self.spike:
                    self.spike, self.spike_at = ratio, self.iteration
            self.norm_sum += norm
            self.norms_summed += 1
        self.iteration += 1
        self.losses_summed += 1
        for name, value in terms.items():
            self.loss_sums[name] = self.loss_sums.get(name, 0.0) + value

    @property
    def gradient(self) -> dict[str, float | int | None]:
        """Return the values for the field `gradient` of a step's row."""
        return {"mean_norm": self.norm_sum / max(self.norms_summed, 1), "spike": self.spike, "spike_at": self.spike_at}

    @property
    def mean_losses(self) -> dict[str, float]:
        return {name: value / self.losses_summed for name, value in self.loss_sums.items()}


def save_checkpoint(
    path: Path, step: int, progress: Progress, model: nn.Module, optimizer: torch.optim.SGD,
    scaler: torch.amp.GradScaler, method: Method,
) -> None:  # fmt: skip
    """Save the state of model, momentum, method and random generator at this progress of `step`."""
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in _trained(model):
        momentum = optimizer.state[parameter].get("momentum_buffer")
        if momentum is not None:
            tensors[f"momentum.{name}"] = momentum
    tensors |= {f"method.{name}": value for name, value in method.state().items()}
    tensors["generator"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["generator.cuda"] = torch.cuda.get_rng_state()
    about = {"step": step, "progress": asdict(progress), "scaler": scaler.state_dict()}
    write_tensors(path, tensors, {"checkpoint": json.dumps(about)})


def load_checkpoint(
    path: Path, step: int, model: nn.Module, optimizer: torch.optim.SGD, scaler: torch.amp.GradScaler, method: Method,
    runtime: Runtime,
) -> Progress:  # fmt: skip
    """Load the checkpoint of `step`, or return a new `Progress` if there is none.

    If the checkpoint is damaged, the step starts again and ends with the same model.
    """
    if not path.exists():
        return Progress()
    try:
        tensors, metadata = read_tensors(path)
    except UserError as error:
        if not isinstance(error.__cause__, SafetensorError):
            raise
        log.info(f"{path} is damaged ({error.__cause__}); step {step} starts again")
        return Progress()
    about = json.loads(metadata.get("checkpoint", "{}"))
    if about.get("step") != step:
        return Progress()  # of an earlier step, which is finished
    groups: dict[str, dict[str, Tensor]] = {"model": {}, "momentum": {}, "method": {}, "generator": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = tensor
    try:
        model.load_state_dict(groups["model"])
    except RuntimeError as error:
        raise UserError(f"{path} does not fit this model; delete it to start step {step} again") from error
    for name, parameter in _trained(model):
        if name in groups["momentum"]:
            optimizer.state[parameter]["momentum_buffer"] = groups["momentum"][name].to(parameter.device)
    if about["scaler"]:
        scaler.load_state_dict(about["scaler"])
    method.load_state(_moved(groups["method"], runtime.device))
    torch.set_rng_state(groups["generator"][""])
    if "cuda" in groups["generator"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(groups["generator"]["cuda"])
    return Progress(**{_OLD_NAMES.get(name, name): value for name, value in about["progress"].items()})


@dataclass
class SavedStep:
    """A finished step: its model, the state of its method, and its training progress.

    about:  metadata of the model file.
    origin: run folder or file that the step comes from.
    """

    model: Segmenter
    state: dict[str, Tensor]
    about: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    origin: str = ""

    def restore(self, method: Method, device: torch.device) -> Segmenter:
        """Load the state into the method and return the model on the device."""
        if self.state:
            method.load_state(_moved(self.state, device))
        return self.model.to(device)


def load_step(file: Path) -> SavedStep:
    """Load a finished step: a model file and, from the file beside it, the state of its method."""
    model, about = load_segmenter(file)
    return SavedStep(model, read_tensors(file.with_name(STATE_FILE))[0], about, origin=str(file))


def _moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
