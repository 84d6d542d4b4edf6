"""Workers of a queue: each starts one run after the other as a process of its own, so that a run that dies takes
nothing with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from incseg.engine.progress import figures_line
from incseg.engine.queue import BEAT_SECONDS, Held, Queue, State, in_use_by
from incseg.engine.runtime import available_cores
from incseg.io import read_record
from incseg.types import UserError

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0
"""How often a worker without work looks for some."""


@dataclass
class Workers:
    """Several workers of this process on one queue; Ctrl-C or SIGTERM lets their runs save and end, a second kills."""

    root: Path
    number: int
    say: Callable[[str], None] = print
    program: Sequence[str] = (sys.executable, "-m", "incseg")
    only: Sequence[str] = ()
    """The names of jobs, in the order in which they are wanted; empty for all of the queue."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _kill: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.number < 1:
            raise UserError(f"workers is {self.number}; give at least 1")

    def work(self) -> Counter[State]:
        """Until nothing is left to do; returns how many jobs are in which state, and raises KeyboardInterrupt if told
        to stop."""
        with self._interruptible(), ThreadPoolExecutor(self.number) as pool:
            ends = [pool.submit(self._serve, number) for number in range(self.number)]
            while wait(ends, timeout=_POLL_SECONDS).not_done:
                pass
            for end in ends:
                end.result()
        if self._stop.is_set():
            raise KeyboardInterrupt
        queue = Queue(self.root)
        return Counter(queue.state(job) for job in queue.jobs())

    def _serve(self, number: int) -> None:
        queue, name = Queue(self.root), f"worker {number + 1}"
        while not self._stop.is_set():
            held = queue.take(name, self.only)
            if held is not None:
                self._run(queue, held, number)
            elif queue.is_settled(self.only):
                return
            else:
                self._stop.wait(_LOOK_SECONDS)

    def _run(self, queue: Queue, held: Held, number: int) -> None:
        """One run, to its end or until we are told to stop or find that another has taken over."""
        job, folder = held.job, queue.root / held.job.name
        log = queue.log(job.name)
        began, printed = time.monotonic(), log.stat().st_size if log.exists() else 0
        self.say(f"{job.name}: started")
        command = ["train", "--config", str(queue.config(job.name)), "--out", str(folder)]
        try:
            with log.open("ab") as stream:
                child = subprocess.Popen(
                    [*self.program, *command],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=self._environment(job.config.get("threads"), number),
                    start_new_session=True,  # Ctrl-C in the terminal is for us; we tell it
                )
            code = self._watch(queue, held, child)
            if code == 0 and queue.run(job.name).results.exists():
                final = read_record(queue.run(job.name).results)["final"]
                self.say(f"{job.name}: done in {time.monotonic() - began:.0f} s, {figures_line(final)}")
            elif self._stop.is_set():
                self.say(f"{job.name}: stopped, goes on later")
            elif (other := in_use_by(queue.run(job.name))) is not None:
                self.say(f"{job.name}: {other} is at it")
            else:
                reason = reason_of(code, log.read_bytes()[printed:].decode(errors="replace"))
                queue.fail(job, reason)
                self.say(f"{job.name}: failed: {reason} (see {log})")
        finally:
            held.release()

    def _watch(self, queue: Queue, held: Held, child: subprocess.Popen[bytes]) -> int:
        """Until the process ends; meanwhile tell that we live, and let others in when the base is there."""
        touched, told = time.monotonic(), False
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
                if held.base is not None and queue.run(held.job.name).row(0).exists():
                    held.release_base()
                taken_over = False
                if time.monotonic() - touched > BEAT_SECONDS:
                    touched, taken_over = time.monotonic(), not held.touch()
                if (self._stop.is_set() or taken_over) and not told:
                    child.terminate()
                    told = True
                if self._kill.is_set():
                    child.kill()
            return child.returncode
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()

    def _environment(self, threads: int | None, number: int) -> dict[str, str]:
        """Cores and GPUs are shared out to the workers, where the settings do not say otherwise."""
        environment = dict(os.environ)
        threads = threads or max(1, available_cores() // self.number)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        if self.number > 1 and (gpus := visible_gpus()):
            environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        return environment

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        def request(number: int, frame: FrameType | None) -> None:
            (self._kill if self._stop.is_set() else self._stop).set()

        names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
        previous = {n: signal.signal(n, request) for name in names if (n := getattr(signal, name, None))}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if not torch.cuda.is_available():
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]


def reason_of(code: int, printed: str) -> str:
    """Why a run ended badly, in one line: its own error, the last line of a traceback, or the signal."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"exit code {code}"])[-1]
