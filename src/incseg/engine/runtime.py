"""Device, precision, processes and seeds. Only this file uses ranks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from incseg.types import Inputs, UserError

Precision = Literal["auto", "float32", "bfloat16", "float16"]
_Made = TypeVar("_Made")
_RENDEZVOUS_SECONDS = 1800.0
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's mallopt."""


class Runtime:
    """One process of a run: the only one, or one of several started by torchrun."""

    def __init__(self, device: str = "auto", precision: Precision = "auto", threads: int | None = None) -> None:
        self.rank = _rank()
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _pick_device(device)
        if threads is not None:
            if threads < 1:
                raise UserError(f"threads is {threads}; give a positive number, or leave it out for torch's own choice")
            torch.set_num_threads(threads)
        self.precision = _pick_precision(precision, self.device)
        if self.world > 1 and self.device.type == "mps":
            raise UserError("device mps has one GPU, so several processes cannot share it; start one, or use cpu")
        self._owns_group = False
        if self.world > 1 and not dist.is_initialized():
            store = dist.PrefixStore(*_rendezvous())
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
            self._owns_group = True

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            # The group's threads end with the last reference to it. If a wrapped model is still in a reference cycle,
            # they would run while the interpreter ends, which can abort the process.
            gc.collect()
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
        """Return whether the flag is true in any process."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def main_first(self, make: Callable[[], _Made]) -> _Made:
        """Call `make` in the main process first, which fills caches, then in the others. If it fails, all stop."""
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
        """Copy the main process's buffers to all: each process has running statistics of its own images."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def share(self, rows: Sequence[int]) -> list[int]:
        """Return this process's part of a list. The parts of all processes together are the list."""
        return list(rows[self.rank :: self.world])

    def move(self, inputs: Inputs) -> Inputs:
        """Return model inputs on the device."""
        if isinstance(inputs, Tensor):
            return inputs.to(self.device, non_blocking=True)
        return tuple(part.to(self.device, non_blocking=True) for part in inputs)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to call in training, which averages gradients over processes."""
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
        """Return a context for a forward and backward pass. If `now`, gradients are averaged over processes at its end,
        otherwise only added up."""
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
        """Return the fields of the environment file."""
        return {
            "device": str(self.device),
            "processes": self.world,
            "precision": str(self.precision).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }


@contextlib.contextmanager
def handling(handler: Any, *names: str) -> Iterator[None]:
    """Handle signals, given by name, with this handler in the block. Windows does not have all of them."""
    previous = {n: signal.signal(n, handler) for name in names if (n := getattr(signal, name, None))}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def available_cores() -> int:
    """Return the number of cores that this process may use; on macOS and Windows, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_main_process() -> bool:
    """Return whether this is the only process or the first one started by torchrun."""
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
    """Let glibc's allocator retain up to 256 MB of freed memory; return whether it does.

    A loss in strips frees and allocates the same few megabytes hundreds of times. By default the allocator may return
    them to the system each time, and page faults take half of the time of the loss. MALLOC_* variables win.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20) and mallopt(_TRIM_THRESHOLD, 256 << 20))


def _mean_in_double(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean of gradients over processes, summed in double, so that the order of the sum does not matter.

    DDP rearranges gradients after its first update, and so changes the order of the sum. A run resumed from a
    checkpoint has its first update elsewhere, and would differ in the last digits.
    """
    gradients = bucket.buffer()
    sent = dist.all_reduce(gradients.double(), async_op=True)
    assert sent is not None
    return sent.get_future().then(lambda done: (done.value()[0] / dist.get_world_size()).to(gradients.dtype))


def _rendezvous() -> tuple[str, dist.Store]:
    """Return a prefix for keys in the store that is new at every start and the same in all processes, and the store.

    If a process dies, torchrun restarts all of them with the same store, which still has the addresses of the dead
    ones; a process that reads one waits forever. Each node counts its restarts on its own, so the count cannot serve
    as a prefix. Instead the first process chooses the prefix and sends it to each other process under a random token
    that the other chose at this start.
    """
    store, rank, world = next(rendezvous("env://"))
    token = uuid.uuid4().hex
    store.set(f"here/{rank}", token)
    if rank > 0:
        prefix = store.get(f"name/{token}").decode()
        store.set(f"{prefix}/{rank}", "")
        return prefix, store
    missing, deadline = set(range(1, world)), time.monotonic() + _RENDEZVOUS_SECONDS
    while missing:
        for other in tuple(missing):
            if store.check([f"{token}/{other}"]):
                missing.remove(other)
            elif store.check([f"here/{other}"]):
                store.set(f"name/{store.get(f'here/{other}').decode()}", token)
        if time.monotonic() > deadline:
            raise UserError(f"{len(missing)} of {world} processes did not connect; check that all nodes were started")
        time.sleep(0.02)
    return token, store


def _pick_device(name: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"device '{name}' is unknown; write cpu, cuda, cuda:N, mps or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps was requested, but torch finds no Apple GPU (Metal) here; use --device cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                "device cuda was requested, but torch finds no GPU; use --device cpu or a CUDA build of torch"
            )
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise UserError(
                f"device {device} was requested, but torch finds {torch.cuda.device_count()} GPUs; count from cuda:0, "
                "and start at most one process per GPU"
            )
        torch.cuda.set_device(device)
    return device


def _pick_precision(precision: Precision, device: torch.device) -> torch.dtype:
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32  # lower precision gains nothing on the CPUs we measured
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps" and precision != "float32":
        raise UserError(f"precision is {precision}, but on mps only float32 is supported; leave it out")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def reason_of(code: int, printed: str) -> str:
    """Return in one line why a run failed: its own error, the last line of a traceback, or the signal."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"exit code {code}"])[-1]
