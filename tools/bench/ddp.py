"""Two processes against one: time, and bytes sent."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from incseg.engine.runtime import Runtime
from incseg.models.segmenter import ModelConfig
from tools.bench.measure import Aim, Figures, Section, Settings, Spread, fresh, ratios
from tools.bench.stage import NETWORK, QUICK_NETWORK, fit_seconds, second_step

PROCESSES = {"one": 1, "two": 2}


class CountingRuntime(Runtime):
    """A runtime that counts the bytes that this process sends to be summed."""

    sent = 0

    def sum(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            self.sent += tensor.nbytes
        return super().sum(tensor)

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        if isinstance(wrapped, DistributedDataParallel):
            # torch checks annotations of a hook, and does not read those that are strings
            wrapped.register_comm_hook(dist.group.WORLD, lambda group, bucket: self._count(group, bucket))
        return wrapped

    def _count(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.sent += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)


def _amount(settings: Settings) -> tuple[tuple[int, int, int], ModelConfig]:
    """Return (images of an update, their side, updates), and the network."""
    return settings.pick(((16, 224, 4), NETWORK), ((4, 64, 2), QUICK_NETWORK))


def measure(case: str, settings: Settings) -> Figures:
    """Measure in this process, which may be one of several started by torchrun; all cases have the same updates."""
    (images, size, updates), network = _amount(settings)
    runtime = CountingRuntime("cpu", "float32", settings.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer, teacher = second_step(network, images, size, updates, runtime, Path(folder))
        fit_seconds(trainer, teacher)
        runtime.sent = 0
        best = min(fit_seconds(trainer, teacher) for _ in range(2))
        weights = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    runtime.close()
    return {"images_per_second": images * updates / best, "sent": runtime.sent / updates / 2, "weights": weights}


def run(settings: Settings) -> list[Section]:
    found = fresh("ddp", list(PROCESSES), settings, PROCESSES)
    rates = {case: [run["images_per_second"] for run in runs] for case, runs in found.items()}
    sent, weights = [run["sent"] for run in found["two"]], [run["weights"] for run in found["two"]]
    (images, size, _), network = _amount(settings)
    return [
        Section(
            title="DDP: two processes against one",
            heading=["processes", "images/s", "MB that each gives to be summed, an update"],
            rows=[
                ["1", Spread.of(rates["one"]).text(), "0"],
                ["2", Spread.of(rates["two"]).text(), Spread.of(sent).text(1e-6)],
            ],
            aims=[
                Aim("images/s of two, over those of one", "at least", 1.6, ratios(rates["two"], rates["one"])),
                Aim("bytes given an update, over those of the trained weights", "at most", 1.05, ratios(sent, weights)),
            ],
            notes=[
                f"Second step of 15-5 by the trainer's loop, {network.backbone} at {size}², batches of {images} in "
                "all, gloo. Beside the gradients go the label counts, the losses and two flags."
            ],
            figures=found,
        )
    ]
