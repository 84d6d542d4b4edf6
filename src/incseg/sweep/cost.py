"""Estimate the time, memory and disk space of a sweep before it is run.

The estimate counts the images of the protocol, epochs and steps, and the operations, activations and parameters of the
network itself, on torch's meta device, which computes nothing. The rate of operations is given, or measured here by a
few updates. A backward pass counts as two forward passes, a teacher as one more, and replay doubles the images. The
time for starting, reading and writing is left out.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from incseg.config import GROUPS, RunConfig
from incseg.data import dataset_info
from incseg.data.presence import read_presence
from incseg.engine.runtime import started
from incseg.methods import build_method
from incseg.methods.base import Method
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol
from incseg.run import Setup
from incseg.sweep.folder import Job, Sweep, Task
from incseg.types import Increment

_BACKWARD = 2.0  # operations of a backward pass per forward pass
_MEASURED_IMAGES, _MEASURED_CLASSES = 4, 20
_MEASURED_SECONDS = 2.0


@dataclass(frozen=True)
class Network:
    """Operations of a forward pass and bytes of activations for one image, and the bytes of the parameters."""

    frozen_operations: float
    operations: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Images:
    """The number of images of each step, and of classes after the last step."""

    train: Sequence[int]
    test: Sequence[int]
    classes: int


@dataclass(frozen=True)
class Cost:
    """Cost of a run: operations of step 0, of later steps, and of the features that are computed once for all runs."""

    first: float
    rest: float
    features: float
    memory_bytes: float
    model_bytes: float
    steps: int


def config_of(job: Job) -> RunConfig:
    values = {key: value for key, value in job.config.items() if key not in GROUPS}
    return RunConfig(**values, **{name: kind(**job.config[name]) for name, kind in GROUPS.items()})


def network(config: ModelConfig, side: int, classes: int) -> Network:
    """Count the operations and bytes of a network, with activations in half precision."""
    return _counted(json.dumps(asdict(config)), side, classes)


@lru_cache
def _counted(config_as_json: str, side: int, classes: int) -> Network:
    config = ModelConfig(**json.loads(config_as_json))
    with torch.device("meta"):
        model = _grown(config, classes)
        image = torch.zeros(1, 3, side, side)
    frozen = set(model.backbone.modules()) if config.freeze_backbone else set()
    held = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal held
        held += output.numel() * 2

    for module in model.modules():
        if not list(module.children()) and module not in frozen:
            module.register_forward_hook(count)
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    whole = counter.get_total_flops()
    without = 0
    if frozen:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.features(image)
        without = counter.get_total_flops()
    return Network(without, whole - without, held, sum(p.numel() for p in model.parameters()) * 4)


def cost(config: RunConfig, images: Images) -> Cost:
    """Return the cost of a run."""
    method, settings = build_method(config.method), config.train
    net = network(config.model, settings.crop, images.classes)
    cached = config.data.cache == "auto" and config.model.freeze_backbone and settings.scale is None
    each = 0.0 if cached else net.frozen_operations
    replays = getattr(method.config, "replay", None) or config.method["name"] == "recall"
    solves = type(method).solve is not Method.solve

    def operations(step: int) -> float:
        epochs, _, frozen = settings.for_step(step)
        test = images.test[step] * (net.operations + each)
        if step and solves:
            return images.train[step] * (net.operations + each) + test
        teacher = net.operations + each if step and frozen != "model" else 0.0
        shown = epochs * images.train[step] * (2 if step and replays else 1)
        return shown * ((1 + _BACKWARD) * net.operations + each + teacher) + test

    steps = len(images.train)
    micro_batch = -(-settings.batch_size // (settings.accumulate or 1))
    return Cost(
        first=operations(0),
        rest=sum(operations(step) for step in range(1, steps)),
        features=(sum(images.train) + images.test[-1]) * net.frozen_operations if cached else 0.0,
        memory_bytes=4 * net.parameter_bytes + micro_batch * net.activation_bytes,
        model_bytes=net.parameter_bytes,
        steps=steps,
    )


def images_of(config: RunConfig) -> Images:
    """Return the images of each step, from the dataset, or from a presence list if the dataset is not here."""
    method = build_method(config.method)
    data = config.data
    if data.root is not None or data.presence is None:
        setup = Setup.of(config, method)
        rows = setup.summary["steps"]
        train, test = (tuple(row[f"{split}_images"] for row in rows) for split in ("train", "test"))
        return Images(train, test, sum(len(step.new) for step in setup.protocol.steps))
    info = dataset_info(data.name)
    setting = "joint" if method.single_step else config.setting
    protocol = Protocol(info, config.task, setting, config.rules, config.order)
    shown = read_presence(Path(data.presence), len(info.classes))
    train = tuple(len(images) for images in protocol.train_images(shown.classes))
    return Images(train, (0,) * len(train), sum(len(step.new) for step in protocol.steps))


def measured_rate(config: RunConfig) -> float:
    """Measure a few updates of this network on this machine, and return the operations per second."""
    with started(config.device, config.precision, config.threads) as runtime:
        side = config.train.crop
        model = _grown(config.model, _MEASURED_CLASSES).to(runtime.device).train()
        image = torch.rand(_MEASURED_IMAGES, 3, side, side, device=runtime.device)
        labels = torch.randint(_MEASURED_CLASSES, (_MEASURED_IMAGES, side, side), device=runtime.device)
        frozen = config.model.freeze_backbone
        with torch.no_grad():
            inputs = model.features(image) if frozen else image
        done, begun = 0, 0.0
        while done < 2 or time.monotonic() - begun < _MEASURED_SECONDS:
            if done == 1:  # the first update is a warm-up
                begun = time.monotonic()
            with runtime.autocast():
                logits = model(inputs).logits
            F.cross_entropy(F.interpolate(logits.float(), labels.shape[1:]), labels).backward()
            done += 1
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.monotonic() - begun) / (done - 1)
    return _MEASURED_IMAGES * (1 + _BACKWARD) * network(config.model, side, _MEASURED_CLASSES).operations / seconds


def _grown(config: ModelConfig, classes: int) -> Segmenter:
    model = Segmenter(config, background_output=True)
    model.grow(Increment(tuple(map(str, range(classes))), tuple(range(classes))))
    return model


def estimate(sweep: Sweep, jobs: Sequence[Job], slots: int, rate: float | None) -> Iterator[str]:
    """Yield lines on the remaining work of these runs: hours, memory and disk, with `slots` runs at a time.

    rate: operations per second of one run; None to measure it here.
    """
    tasks = sweep.tasks(jobs)
    left = [task.jobs[0] for task in tasks if not task.is_base]
    if not left:
        yield "nothing is left to do"
        return
    configs = {job.name: config_of(job) for job in left}
    known: dict[str, Images] = {}
    costs: dict[str, Cost] = {}
    for name, config in configs.items():
        about = config.as_dict()
        decides = [about[part] for part in ("data", "task", "setting", "rules", "order", "method")]
        key = json.dumps([*decides[:-1], build_method(config.method).single_step])
        known[key] = known.get(key) or images_of(config)
        costs[name] = cost(config, known[key])
    measured = rate is None
    rate = rate or measured_rate(next(iter(configs.values())))
    trained = sweep.trained()

    def seconds(task: Task) -> float:
        job = task.jobs[0]
        there = task.after is not None or job.base in trained or sweep.step_0(job.name).exists()
        first = 0.0 if there and not task.is_base else costs[job.name].first
        return (first + (0.0 if task.is_base else costs[job.name].rest)) / rate

    yield (
        f"an estimate, not a measurement: {rate / 1e12:.3g} TFLOP/s for a run, "
        + ("measured here by a few updates; --tflops gives another" if measured else "as given")
        + f"; {slots} at a time"
    )
    for data in dict.fromkeys(config.data.name for config in configs.values()):
        own = [job for job in left if configs[job.name].data.name == data]
        chosen = [costs[job.name] for job in own]
        bases = [task for task in tasks if task.is_base and configs[task.jobs[0].name].data.name == data]
        features = max(one.features for one in chosen)
        with_sharing = sum(seconds(task) for task in tasks if configs[task.jobs[0].name].data.name == data)
        alone = sum(one.first + one.rest for one in chosen) / rate
        models = sum(one.model_bytes * one.steps for one in chosen)
        models -= sum(costs[task.jobs[0].name].model_bytes * (len(task.jobs) - 1) for task in bases)
        yield (
            f"{data}: {len(own)} runs, {len(bases)} shared bases; {_hours(with_sharing + features / rate)}"
            f" of one run at a time ({_hours(alone + features / rate)} without shared bases"
            + (f", {_hours(features / rate)} of it features of the frozen backbone)" if features else ")")
            + f"; memory {_gigabytes(min(one.memory_bytes for one in chosen))} to "
            f"{_gigabytes(max(one.memory_bytes for one in chosen))} a run; models {_gigabytes(models)} on disk"
        )
    features = sum({config.data.name: costs[name].features for name, config in configs.items()}.values())
    yield f"from first to last: {_hours(played(tasks, seconds, slots) + features / rate)}"


def played(tasks: Sequence[Task], seconds: Callable[[Task], float], slots: int) -> float:
    """Simulate the engine of this machine: each slot takes the first task that can start. Return the end in seconds."""
    ends: dict[Task, float] = {}
    free = [0.0] * slots
    waiting = list(tasks)
    while waiting:
        now = heapq.heappop(free)
        ready = next((t for t in waiting if t.after is None or ends.get(t.after, math.inf) <= now), None)
        if ready is None:
            now, ready = min(((ends[t.after], t) for t in waiting if t.after in ends), key=lambda pair: pair[0])
        waiting.remove(ready)
        ends[ready] = now + seconds(ready)
        heapq.heappush(free, ends[ready])
    return max(ends.values())


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"
