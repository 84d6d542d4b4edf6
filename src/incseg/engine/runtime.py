"""Device, precision, processes and seeds: the only file that knows of ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from incseg.types import Inputs, UserError

Precision = Literal["auto", "float32", "bfloat16", "float16"]
_Made = TypeVar("_Made")
_MEETING_SECONDS = 1800.0
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's mallopt."""


class Runtime:
    """One process of a run; alone or one of several started by torchrun."""

    def __init__(self, device: str = "auto", precision: Precision = "auto", threads: int | None = None) -> None:
        self.rank = _rank()
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _pick_device(device)
        if threads is not None:
            if threads < 1:
                raise UserError(f"threads is {threads}; give a positive number, or leave it out for torch's own choice")
            torch.set_num_threads(threads)
        self.precision = _pick_precision(precision, self.device)
        self._owns_group = False
        if self.world > 1 and not dist.is_initialized():
            store = dist.PrefixStore(*_meeting())
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
            self._owns_group = True

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.world == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes."""
        return self.sum(tensor) / self.world

    def any(self, flag: bool) -> bool:
        """Return whether any process raises the flag."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def main_first(self, make: Callable[[], _Made]) -> _Made:
        """Let the main process make it, and fill caches, before the others do; where it fails, all of them end."""
        made, error = None, None
        if self.is_main:
            try:
                made = make()
            except UserError as raised:
                error = raised
        if self.any(error is not None):
            raise error or UserError("the main process of this run has stopped; see its own error")
        return made if made is not None else make()

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the main one's buffers: each counted running statistics of its own images."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def share(self, rows: Sequence[int]) -> list[int]:
        """This process's part of a list; the parts of all processes make up the whole, each item once."""
        return list(rows[self.rank :: self.world])

    def move(self, inputs: Inputs) -> Inputs:
        """Return model inputs on the device."""
        if isinstance(inputs, Tensor):
            return inputs.to(self.device, non_blocking=True)
        return tuple(part.to(self.device, non_blocking=True) for part in inputs)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it is called in training: gradients are averaged over processes."""
        if self.world == 1:
            return model
        if self.device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            return DistributedDataParallel(model, device_ids=[self.device.index])
        wrapped = DistributedDataParallel(model)
        if self.world > 2:
            wrapped.register_comm_hook(None, lambda _, bucket: _mean_in_double(bucket))
        return wrapped

    def synced(self, wrapped: nn.Module, now: bool) -> AbstractContextManager[object]:
        """Around a forward and backward pass: gradients are averaged over processes at its end, or only added up."""
        if now or not isinstance(wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return wrapped.no_sync()

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    def grad_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)

    def describe(self) -> dict[str, object]:
        """Return what the environment file records."""
        return {
            "device": str(self.device),
            "processes": self.world,
            "precision": str(self.precision).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }


def available_cores() -> int:
    """Return the cores that this process may use; macOS and Windows tell only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_main_process() -> bool:
    """Return whether this is the only process, or the first of those that torchrun started."""
    return _rank() == 0


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def seed_everything(*key: int) -> None:
    """Seed all global generators from a tuple of numbers: (run seed, step, purpose)."""
    state = seed_of(*key)
    random.seed(state)
    np.random.seed(state % 2**32)  # noqa: NPY002 - libraries beneath us may read the global generator
    torch.manual_seed(state)


def seed_of(*key: int) -> int:
    """Return a well mixed 63-bit seed from a tuple of numbers."""
    return int(np.random.SeedSequence([k & 0xFFFFFFFF for k in key]).generate_state(1, np.uint64)[0]) >> 1


@contextlib.contextmanager
def started(device: str, precision: Precision, threads: int | None) -> Iterator[Runtime]:
    """Yield a runtime, and close it in any case."""
    retain_freed_memory()
    runtime = Runtime(device, precision, threads)
    try:
        yield runtime
    finally:
        runtime.close()


def retain_freed_memory() -> bool:
    """Let glibc's allocator hold on to up to 256 MB of freed memory; return whether it does.

    A loss in strips frees and takes the same few megabytes hundreds of times. By default the allocator may give them
    back to the system each time, and half of the loss's time goes into page faults. MALLOC_* of the environment wins.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, 256 << 20))


def _mean_in_double(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of gradients over processes, whatever the order of the sum: three floats add up exactly in double.

    DDP arranges gradients anew after its first update, and with them the order in which they are added. A run that
    goes on from a checkpoint has its first update elsewhere, and would end with other last digits.
    """
    gradients = bucket.buffer()
    sent = dist.all_reduce(gradients.double(), async_op=True)
    assert sent is not None
    return sent.get_future().then(lambda done: (done.value()[0] / dist.get_world_size()).to(gradients.dtype))


def _meeting() -> tuple[str, dist.Store]:
    """A name that no earlier start of these processes had, the same in all of them, and the store it is meant for.

    Where a process dies, torchrun starts all of them again, but its store goes on, and in it the addresses of those who
    are gone: whoever reads one waits in vain. Its count of restarts is each node's own. So the first process gives the
    name, and the others prove by a word of their own that they are of today.
    """
    store, rank, world = next(rendezvous("env://"))
    word = uuid.uuid4().hex
    store.set(f"here/{rank}", word)
    if rank > 0:
        name = store.get(f"name/{word}").decode()
        store.set(f"{name}/{rank}", "")
        return name, store
    missing, deadline = set(range(1, world)), time.monotonic() + _MEETING_SECONDS
    while missing:
        for other in tuple(missing):
            if store.check([f"{word}/{other}"]):
                missing.remove(other)
            elif store.check([f"here/{other}"]):
                store.set(f"name/{store.get(f'here/{other}').decode()}", word)
        if time.monotonic() > deadline:
            raise UserError(f"{len(missing)} of {world} processes have not come; see that all nodes were started")
        time.sleep(0.02)
    return word, store


def _pick_device(name: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is unknown; write cpu, cuda, cuda:N or auto")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                "device cuda was asked for, but torch sees no GPU; use --device cpu or a CUDA build of torch"
            )
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise UserError(
                f"device {device} was asked for, but torch sees {torch.cuda.device_count()} GPUs; count from cuda:0, "
                "and start no more processes than there are GPUs"
            )
        torch.cuda.set_device(device)
    return device


def _pick_precision(precision: Precision, device: torch.device) -> torch.dtype:
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32  # lower precision gains nothing on the CPUs we measured
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
