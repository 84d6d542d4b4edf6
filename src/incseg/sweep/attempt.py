"""Train one run in its own process, so that a crash ends only this run. All engines use this file.

The process is `incseg sweep make ROOT NAME`. When its parent ends, it saves the run and ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from incseg.engine.runtime import reason_of
from incseg.sweep.folder import Job, Sweep, Task

Outcome = Literal["done", "failed", "busy", "stopped"]
"""busy: another process works on it."""
IN_USE = 75
"""Exit code of a run whose folder is in use by another process."""
INTERRUPTED = 130
"""Exit code of a run that was asked to end and has saved its progress."""
PROGRAM = (sys.executable, "-m", "incseg", "sweep", "make")
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0
"""Seconds between two looks at a run in progress elsewhere."""
_SAVE_SECONDS = 60.0
"""Time for a run to save its progress."""
_PR_SET_PDEATHSIG = 1


@dataclass
class Attempts:
    """Train runs, one after the other. An engine has one of these for each run at a time.

    environment: function that returns variables for the run's process, beside those of this process.
    stop, kill:  events that let the run save and end, or end it at once.
    """

    sweep: Sweep
    environment: Callable[[Job], Mapping[str, str]] = lambda job: {}
    program: Sequence[str] = PROGRAM
    cwd: Path | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    kill: threading.Event = field(default_factory=threading.Event)
    _child: subprocess.Popen[bytes] | None = None

    def perform(self, task: Task) -> Outcome:
        """Do a task. If a job cannot train the shared base, the next job tries."""
        outcome: Outcome = "failed"
        for job in task.jobs:
            outcome = self._attempt(job, task.is_base)
            if outcome != "failed":
                break
        return outcome

    def perform_in_time(self, task: Task) -> Outcome:
        """Do a task. If another process works on it, wait, because its machine may be lost."""
        while (outcome := self.perform(task)) == "busy" and not self.stop.wait(_LOOK_SECONDS):
            pass
        return outcome

    def _attempt(self, job: Job, is_base: bool) -> Outcome:
        sweep, log = self.sweep, self.sweep.log(job.name)
        end = sweep.step_0(job.name) if is_base else sweep.run(job.name).results
        if end.exists():
            return "done"
        if sweep.worker(job) is not None:
            return "busy"
        if sweep.failure(job) is not None:
            return "failed"
        printed = log.stat().st_size if log.exists() else 0
        code = self._run([str(sweep.root), job.name, *["--base"] * is_base], job, log)
        if end.exists():
            return "done"
        if code == IN_USE:
            return "busy"
        if self.stop.is_set() or code in (INTERRUPTED, -signal.SIGTERM):
            return "stopped"
        sweep.fail(job, reason_of(code, log.read_bytes()[printed:].decode(errors="replace")))
        return "failed"

    def _run(self, words: Sequence[str], job: Job, log: Path) -> int:
        """Run a process and return its exit code. If this process is stopped or interrupted, let it save and end."""
        with log.open("ab") as stream:
            child = self._child = subprocess.Popen(
                [*self.program, *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment(job)},
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C in the terminal goes to this process, which passes it on
            )
        try:
            terminated = False
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
                if self.stop.is_set() and not terminated:
                    child.terminate()
                    terminated = True
                if self.kill.is_set():
                    child.kill()
            return child.returncode
        finally:
            if child.poll() is None:  # interrupted by an engine
                self.save()
                child.kill()
                child.wait()

    def save(self) -> None:
        """Let the current run save its progress and end. A signal handler may call this."""
        self.stop.set()
        if self._child is None or self._child.returncode is not None:
            return
        self._child.terminate()
        deadline = time.monotonic() + _SAVE_SECONDS
        while time.monotonic() < deadline and not _has_ended(self._child.pid):
            time.sleep(0.1)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, without Popen's lock, which the code that a signal interrupted may hold."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def end_with_parent() -> None:
    """On Linux, let this process get SIGTERM when its parent ends, so that it does not continue alone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
