"""Numerical and process faults: NaN in loss, gradient or input, no memory, a loader process that dies."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import incseg.data.transforms as transforms
from incseg.data.shapes import Shapes
from incseg.engine.evaluator import Evaluator
from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.methods.evidential import Evidential
from tools.torture.case import Case, Kind, Lost, incseg
from tools.torture.runs import finished, require_same, settings

MUST = {
    "not a number": "the run stops before it does harm, with step, iteration and terms; the last good state is kept",
    "out of memory": "one line; with memory again, the same command ends as if nothing had been",
    "a process dies": "one line; the same command ends as if nothing had been",
}
Break = Callable[[], None]


def cases(seed: int, quick: bool) -> list[Case]:
    places = [(0, 0), (0, 1), (1, 1), (2, 0)]
    bad = {"NaN": float("nan"), "infinity": float("inf"), "minus infinity": float("-inf")}
    found = [
        Case("not a number", f"{name} in the {part}, step {step}, iteration {iteration}",
             functools.partial(_stops, functools.partial(_poison, part, value, step, iteration)))
        for part in ("loss", "gradient", "input")
        for name, value in bad.items()
        for step, iteration in (places[:1] if quick else places)
    ]  # fmt: skip
    memory = {
        "MemoryError in the loader": (functools.partial(_image_raises, MemoryError), 0),
        "MemoryError in a loader process": (functools.partial(_image_raises, MemoryError), 2),
        "torch has no memory, in the loader": (functools.partial(_image_raises, _no_torch_memory), 0),
        "torch has no memory, in a loader process": (functools.partial(_image_raises, _no_torch_memory), 2),
        "no memory in the loss": (_loss_without_memory, 0),
        "no memory in the test": (_test_without_memory, 0),
    }
    deaths = {
        "a loader process killed": (functools.partial(_image_kills, signal.SIGKILL), 2),
        "a loader process with a segmentation fault": (functools.partial(_image_kills, signal.SIGSEGV), 2),
        "a loader process that leaves": (_image_leaves, 2),
        "a bus error for want of shared memory": (functools.partial(_image_kills, signal.SIGBUS), 2),
        "a loader process of the test killed": (_test_loader_killed, 2),
    }
    for group, some in (("out of memory", memory), ("a process dies", deaths)):
        found += [Case(group, name, functools.partial(_recovers, *how)) for name, how in some.items()]
    return found[5::20] if quick else found


def _stops(poison: Break, folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run", train={"checkpoint_seconds": 0.0})
    incseg(command, folder / "cache", poison).refused(r"step \d, iteration \d+: the loss or its gradient is not finite")
    run = RunDir(folder / "run")
    for file in [run.checkpoint, *map(run.model, run.steps_done())]:
        if file.exists() and not all(tensor.isfinite().all() for tensor in read_tensors(file)[0].values()):
            raise Lost(f"{file.name} has values that are not finite")
    incseg(command, folder / "cache").succeeded()
    require_same(finished(), folder / "run")


def _poison(part: str, value: float, step: int, iteration: int) -> None:
    """Put the value into the loss, its gradient or the images of one iteration."""
    losses = Evidential.losses
    seen = [0]

    def poisoned(self: Evidential, batch: Any, out: Any, teacher: Any, of: Any) -> dict[str, torch.Tensor]:
        now = of.index == step and seen[0] == iteration
        seen[0] += of.index == step
        terms = losses(self, batch, out, teacher, of)
        if now and part == "loss":
            terms["bad"] = out.logits.sum() * 0 + value
        if now and part == "gradient":
            out.logits.register_hook(lambda gradient: gradient * value)
        return terms

    Evidential.losses = poisoned  # type: ignore[method-assign]
    if part == "input":
        _poison_inputs(value, step, iteration)


def _poison_inputs(value: float, step: int, iteration: int) -> None:
    from incseg.engine.trainer import Trainer

    update = Trainer._update

    def poisoned(self: Trainer, wrapped: Any, teacher: Any, optimizer: Any, scaler: Any, batch: Any, of: Any,
                 at: int) -> Any:  # fmt: skip
        if (of.index, at) == (step, iteration):
            batch.inputs = batch.inputs.clone()
            batch.inputs[0, 0, :3, :3] = value
        return update(self, wrapped, teacher, optimizer, scaler, batch, of, at)

    Trainer._update = poisoned  # type: ignore[method-assign]


def _recovers(break_it: Break, workers: int, folder: Path) -> None:
    command = settings(
        folder / "settings.yaml", folder / "run",
        train={"checkpoint_seconds": 0.0, "workers": workers}, eval={"workers": workers},
    )  # fmt: skip
    incseg(command, folder / "cache", break_it).refused(r"out of memory|memory|loader process|loader")
    incseg(command, folder / "cache").succeeded()
    require_same(finished(), folder / "run")


def _no_torch_memory() -> RuntimeError:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                        "tried to allocate 99999999999 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip


def _at_image(number: int, do: Callable[[], None]) -> None:
    image = Shapes.image

    def broken(self: Shapes, split: str, index: int) -> Any:
        if index == number and split == "train":
            do()
        return image(self, split, index)  # type: ignore[arg-type]

    Shapes.image = broken  # type: ignore[method-assign]


def _image_raises(error: Callable[[], BaseException]) -> None:
    def do() -> None:
        raise error()

    _at_image(5, do)


def _image_kills(number: int) -> None:
    _at_image(5, lambda: os.kill(os.getpid(), number))


def _image_leaves() -> None:
    _at_image(5, lambda: os._exit(3))


def _test_loader_killed() -> None:
    call = transforms.TestTransform.__call__

    def broken(self: Any, *things: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return call(self, *things)

    transforms.TestTransform.__call__ = broken  # type: ignore[method-assign]


def _loss_without_memory() -> None:
    def losses(self: Evidential, batch: Any, out: Any, teacher: Any, of: Any) -> dict[str, torch.Tensor]:
        torch.empty(2**62, dtype=torch.uint8)
        raise AssertionError("there was memory")

    Evidential.losses = losses  # type: ignore[method-assign]


def _test_without_memory() -> None:
    def count(self: Evaluator, *things: Any) -> Any:
        np.empty(2**61, dtype=np.uint8)
        raise AssertionError("there was memory")

    Evaluator.count = count  # type: ignore[method-assign]


KIND = Kind("numbers", MUST, cases)
