"""Runs on this machine, several at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from types import FrameType

import torch

from incseg.engine.runtime import available_cores, handling
from incseg.sweep.attempt import PROGRAM, Attempts, Outcome
from incseg.sweep.folder import Job, Sweep, Task
from incseg.sweep.plan import Ended, Say

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0
"""Seconds between two looks at runs in progress elsewhere."""


@dataclass
class Local:
    """Up to `number` runs at a time. Ctrl-C or SIGTERM lets them save and end; a second one kills them.

    A run in progress elsewhere is resumed here if the other process ends before it is finished.
    """

    number: int = 1
    program: Sequence[str] = PROGRAM
    _left: list[Task] = field(default_factory=list)
    _begun: set[Task] = field(default_factory=set)
    _change: threading.Condition = field(default_factory=threading.Condition)

    def work(self, sweep: Sweep, tasks: Sequence[Task], say: Say, ended: Ended) -> None:
        attempts = Attempts(sweep, program=self.program)

        def interrupt(number: int, frame: FrameType | None) -> None:
            (attempts.kill if attempts.stop.is_set() else attempts.stop).set()

        with handling(interrupt, "SIGINT", "SIGTERM", "SIGHUP"):
            self.make_all(attempts, tasks, say, ended)
        if attempts.stop.is_set():
            raise KeyboardInterrupt

    def make_all(self, attempts: Attempts, tasks: Sequence[Task], say: Say, ended: Ended) -> None:
        """Do all tasks, or stop when `attempts` is stopped."""
        self._left = list(tasks)
        with ThreadPoolExecutor(self.number) as pool:
            slots = [pool.submit(self._serve, slot, attempts, say, ended) for slot in range(self.number)]
            while wait(slots, timeout=_POLL_SECONDS).not_done:  # with a timeout, so that signals are handled
                pass
            for slot in slots:
                slot.result()

    def _serve(self, slot: int, attempts: Attempts, say: Say, ended: Ended) -> None:
        own = replace(attempts, environment=lambda job: self.environment(job, slot))
        while not own.stop.is_set() and self._left:
            task = self._take(own.sweep)
            if task is None:
                with self._change:
                    self._change.wait(_LOOK_SECONDS)
                continue
            if not task.is_base:
                say(f"{task.name}: started")
            outcome: Outcome = "failed"
            try:
                outcome = own.perform(task)
            finally:
                with self._change:
                    self._begun.remove(task)
                    if outcome != "busy":  # busy if another command was faster
                        self._left.remove(task)
                    self._change.notify_all()
            if outcome != "busy":
                ended(task, outcome)

    def _take(self, sweep: Sweep) -> Task | None:
        """Return the first task that can start; None if there is none at the moment."""
        with self._change:
            for task in self._left:
                if task not in self._begun and task.after not in self._left and sweep.worker(task.jobs[0]) is None:
                    self._begun.add(task)
                    return task
        return None

    def environment(self, job: Job, slot: int) -> dict[str, str]:
        """Return variables that divide cores and GPUs among the runs, unless the settings or the environment do."""
        shared: dict[str, str] = {}
        if "OMP_NUM_THREADS" not in os.environ:
            shared["OMP_NUM_THREADS"] = str(job.config.get("threads") or max(1, available_cores() // self.number))
        if self.number > 1 and (gpus := visible_gpus()):
            shared["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        return shared


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if not torch.cuda.is_available():
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
