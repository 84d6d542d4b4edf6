"""The folder of a sweep: its runs and their states.

ROOT/NAME/               the run folder
ROOT/.sweep/NAME/job.json     position in the list, and the base that the run shares
                 run.yaml     its configuration
                 log.txt      its output
                 failed.json  the reason if it failed
ROOT/.sweep/.token            shows a node of Ray whether it shares this disk
            .slurm.json       the SLURM job of each task; .slurm/ has the files of submitit

The state of a run follows from its run folder and the lock in it, so no second record is needed. This file imports
neither torch nor an engine, because processes that only watch runs use it too.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from incseg.engine.rundir import RunDir, read_config
from incseg.io import FolderLock, read_json, write_json, write_text

State = Literal["done", "running", "waiting", "failed"]


@dataclass(frozen=True)
class Job:
    """A run of a sweep: its name under the sweep's folder, its whole configuration, and a hash of its step 0.

    base: runs with the same value share a trained step 0; None for a run that shares nothing.
    """

    name: str
    config: dict[str, Any]
    base: str | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """Work for an engine: a whole job, or the step 0 that several jobs share.

    jobs:  the job, or those that share the step. The first of these trains it; if it fails, the next one does.
    after: the task that must have ended before, with success or not.
    """

    jobs: tuple[Job, ...]
    is_base: bool = False
    after: Task | None = None

    @property
    def name(self) -> str:
        return self.jobs[0].name + (" step 0" if self.is_base else "")


class Sweep:
    """The runs in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, jobs: Iterable[Job]) -> None:
        """Append jobs to the list. A job that is in the list already does not change."""
        known = {job.name for job in self.jobs()}
        for order, job in enumerate(jobs, start=len(known)):
            if job.name not in known:
                write_text(self.config(job.name), yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True))
                write_json(self.folder(job.name) / "job.json", {"order": order, "name": job.name, "base": job.base})

    def jobs(self) -> list[Job]:
        """Return all jobs, in the order in which they were added."""
        files = (self.root / ".sweep").rglob("job.json")
        known = sorted((read_json(file) for file in files), key=lambda about: (about["order"], about["name"]))
        return [Job(about["name"], read_config(self.config(about["name"])), about["base"]) for about in known]

    def tasks(self, jobs: Sequence[Job] = ()) -> list[Task]:
        """Return the remaining tasks of these jobs, by default of all: each shared step 0, then its runs."""
        left = [job for job in jobs or self.jobs() if self.state(job) not in ("done", "failed")]
        trained = self.trained()
        tasks: list[Task] = []
        bases: dict[str | None, Task] = {}
        for job in left:
            sharing = tuple(other for other in left if other.base == job.base)
            if job.base is not None and len(sharing) > 1 and job.base not in {*trained, *bases}:
                bases[job.base] = Task(sharing, is_base=True)
                tasks.append(bases[job.base])
            tasks.append(Task((job,), after=bases.get(job.base)))
        return tasks

    def trained(self) -> set[str | None]:
        """Return the bases of which a run has trained step 0."""
        return {job.base for job in self.jobs() if job.base is not None and self.step_0(job.name).exists()}

    def folder(self, name: str) -> Path:
        """Return the folder with the sweep's own files of a job."""
        return self.root / ".sweep" / name

    def config(self, name: str) -> Path:
        return self.folder(name) / "run.yaml"

    def log(self, name: str) -> Path:
        return self.folder(name) / "log.txt"

    def run(self, name: str) -> RunDir:
        return RunDir(self.root / name)

    def step_0(self, name: str) -> Path:
        """Return the file that exists once step 0 is done."""
        return self.run(name).row(0)

    def state(self, job: Job) -> State:
        if self.run(job.name).results.exists():
            return "done"
        if self.worker(job) is not None:
            return "running"
        return "failed" if self.failure(job) is not None else "waiting"

    def states(self) -> Counter[State]:
        """Return the number of runs in each state."""
        return Counter(self.state(job) for job in self.jobs())

    def worker(self, job: Job) -> str | None:
        """Return the process that works in the run folder, "process N on HOST"; None if there is none."""
        lock = FolderLock(self.run(job.name).root)
        holder = lock.holder()
        found = re.fullmatch(r"process (\d+) on (.+)", holder or "")
        if found is None or (found[2] == socket.gethostname() and not _is_process(int(found[1]))):
            return None  # do not check the lock: a check takes it for a moment
        return None if lock.is_free() else holder

    def failure(self, job: Job) -> str | None:
        """Return in one line why a job failed."""
        file = self.folder(job.name) / "failed.json"
        return read_json(file)["reason"] if file.exists() else None

    def fail(self, job: Job, reason: str) -> None:
        write_json(self.folder(job.name) / "failed.json", {"reason": reason, "time": time.time()})

    def retry_failed(self) -> None:
        for job in self.jobs():
            (self.folder(job.name) / "failed.json").unlink(missing_ok=True)


def _is_process(pid: int) -> bool:
    """Return whether a process of this machine exists; True if that is not known."""
    if os.name == "nt":
        return True  # os.kill would end the process there; the lock decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
