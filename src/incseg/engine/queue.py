"""A queue of runs on disk, for any number of workers on machines that share it: no run twice, and none lost.

ROOT/NAME/                       the run folder
ROOT/.queue/runs/NAME/job.json   what is to be run, its place in the queue, and the base it shares
                      run.yaml   its configuration
                      log.txt    what it printed
                      failed.json
                      claim-N.json
ROOT/.queue/bases/KEY/claim-N.json   who trains a base that others wait for

The claim with the highest N counts. It is made by linking a finished file to its name, which only one of several can
do, and it is never deleted, so that nobody can take a claim by a look at an older one. Its owner touches it as long as
it works. A claim is stale when its process is gone, or, on another machine, when it was not touched for as long as
we have been looking: clocks are never compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from incseg.engine.rundir import RunDir, read_config
from incseg.io import FolderLock, read_json, write_json, write_text

BEAT_SECONDS = 15.0
STALE_SECONDS = 180.0  # network disks may show a file's time a minute late

State = Literal["done", "running", "waiting", "failed"]


@dataclass(frozen=True)
class Job:
    """A run to be made: its name under the queue's folder, its whole configuration, and what its step 0 depends on.

    base: runs with the same one share a trained step 0; None for a run that shares nothing.
    """

    name: str
    config: dict[str, Any]
    base: str | None = None


@dataclass(frozen=True)
class Claim:
    """Who works on something."""

    path: Path
    host: str
    pid: int
    worker: str
    since: float

    def touch(self) -> bool:
        """Tell that we are still there; False if another has taken over, because we were not for too long."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path)
        return not _claim_path(self.path.parent, _number(self.path) + 1).exists()

    def release(self) -> None:
        write_json(self.path, {**_owner(self.worker), "released": True})

    @property
    def owner(self) -> str:
        return f"{self.worker}, process {self.pid} on {self.host}"


@dataclass
class Held:
    """A job that is ours, and its base as long as we train it."""

    job: Job
    claim: Claim
    base: Claim | None

    def touch(self) -> bool:
        if self.base is not None:
            self.base.touch()
        return self.claim.touch()

    def release_base(self) -> None:
        if self.base is not None:
            self.base.release()
            self.base = None

    def release(self) -> None:
        self.release_base()
        self.claim.release()


class Queue:
    """The queue in a folder, as one worker sees it."""

    def __init__(self, root: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self.root = root
        self._stale_seconds = stale_seconds
        self._known: dict[Path, tuple[int, Job]] = {}
        self._seen: dict[Path, tuple[int, float, bool]] = {}

    def add(self, jobs: Iterable[Job]) -> None:
        """Put jobs behind those that are there; one that is there already stays as it is."""
        known = {job.name for job in self.jobs()}
        for order, job in enumerate(jobs, start=len(known)):
            if job.name not in known:
                write_text(self.config(job.name), yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True))
                about = {"order": order, "name": job.name, "base": job.base}
                write_json(self.folder(job.name) / "job.json", about)

    def jobs(self) -> list[Job]:
        """All of them, in the order in which they were added."""
        for file in self._runs.rglob("job.json") if self._runs.is_dir() else ():
            if file not in self._known:
                about = read_json(file)
                self._known[file] = (
                    about["order"],
                    Job(about["name"], read_config(self.config(about["name"])), about["base"]),
                )
        return [job for _, job in sorted(self._known.values(), key=lambda one: (one[0], one[1].name))]

    def folder(self, name: str) -> Path:
        """What the queue itself knows of a job."""
        return self._runs / name

    def config(self, name: str) -> Path:
        return self.folder(name) / "run.yaml"

    def log(self, name: str) -> Path:
        return self.folder(name) / "log.txt"

    def run(self, name: str) -> RunDir:
        return RunDir(self.root / name)

    def state(self, job: Job) -> State:
        if self.run(job.name).results.exists():
            return "done"
        if self.worker(job) is not None:
            return "running"
        return "failed" if self.failure(job) is not None else "waiting"

    def worker(self, job: Job) -> str | None:
        """Who works on a job; also a process that no queue started, or that outlived its worker."""
        claim = _current(self.folder(job.name))
        if claim is not None and self._lives(claim) is not False:
            return claim.owner
        return in_use_by(self.run(job.name))

    def failure(self, job: Job) -> str | None:
        """In one line, why a job failed."""
        file = self.folder(job.name) / "failed.json"
        return read_json(file)["reason"] if file.exists() else None

    def take(self, worker: str, only: Sequence[str] = ()) -> Held | None:
        """The first job that is ready, claimed for `worker`; None if there is none now. `only` names some, in order."""
        jobs = self.jobs()
        for job in chosen(jobs, only):
            if self.state(job) != "waiting":
                continue
            base = None
            if job.base is not None and not self._is_trained(job.base, jobs):
                if any(other.base == job.base and self.state(other) == "running" for other in jobs):
                    continue
                base = self._claim(self.root / ".queue" / "bases" / job.base, worker)
                if base is None:
                    continue  # another was faster
            claim = self._claim(self.folder(job.name), worker)
            held = Held(job, claim, base) if claim is not None else None
            if held is not None and not self.run(job.name).results.exists() and self.failure(job) is None:
                return held
            if held is not None:
                held.release()
            elif base is not None:
                base.release()
        return None

    def is_settled(self, only: Sequence[str] = ()) -> bool:
        """Whether nothing is left to wait for: every job has ended, or is in the hands of one who is seen to live."""
        for job in chosen(self.jobs(), only):
            state = self.state(job)
            claim = _current(self.folder(job.name))
            if state == "waiting" or (state == "running" and claim is not None and self._lives(claim) is None):
                return False
        return True

    def fail(self, job: Job, reason: str) -> None:
        write_json(self.folder(job.name) / "failed.json", {"reason": reason, "time": time.time()})

    def retry_failed(self) -> None:
        for job in self.jobs():
            (self.folder(job.name) / "failed.json").unlink(missing_ok=True)

    @property
    def _runs(self) -> Path:
        return self.root / ".queue" / "runs"

    def _is_trained(self, base: str, jobs: list[Job]) -> bool:
        return any(job.base == base and self.run(job.name).row(0).exists() for job in jobs)

    def _claim(self, folder: Path, worker: str) -> Claim | None:
        """Take what nobody has, or whose owner is gone; None if it is taken, by someone who may have been faster."""
        last = _last_claim(folder)
        if last is not None and (held := _read(last)) is not None and self._lives(held) is not False:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = _claim_path(folder, 0 if last is None else _number(last) + 1)
        written = folder / f".{path.name}.{socket.gethostname()}.{os.getpid()}.{worker.replace(' ', '-')}"
        try:
            written.write_text(json.dumps(_owner(worker)), encoding="utf-8")
            os.link(written, path)
        except FileExistsError:
            return None
        finally:
            written.unlink(missing_ok=True)
        return _read(path)

    def _lives(self, claim: Claim) -> bool | None:
        """Whether the owner of a claim is there: by its process if that is on this machine, and by its touching the
        claim; None as long as neither tells."""
        here = claim.host == socket.gethostname()
        if here and not _is_process(claim.pid):
            return False
        with claim.path.open("rb") as file:  # to open it makes a network disk look
            touched = os.fstat(file.fileno()).st_mtime_ns
        now = time.monotonic()
        before, since, moved = self._seen.get(claim.path, (touched, now, False))
        if touched != before:
            since, moved = now, True
        self._seen[claim.path] = (touched, since, moved)
        if now - since > self._stale_seconds:
            return False
        return True if moved or here else None


def chosen(jobs: list[Job], only: Sequence[str]) -> list[Job]:
    """The jobs of these names, in their order; all where none is named."""
    by_name = {job.name: job for job in jobs}
    return [by_name[name] for name in only] if only else jobs


def in_use_by(run: RunDir) -> str | None:
    """The process of this machine that works in a run folder, as its lock tells."""
    lock = FolderLock(run.root)
    holder = lock.holder()
    found = re.fullmatch(r"process (\d+) on (.+)", holder or "")
    if found is None or found[2] != socket.gethostname() or not _is_process(int(found[1])):
        return None
    return None if lock.is_free() else holder  # the number may belong to another process by now


def _owner(worker: str) -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "worker": worker, "since": time.time()}


def _current(folder: Path) -> Claim | None:
    """The claim that counts, if its owner has not given it back."""
    last = _last_claim(folder)
    return None if last is None else _read(last)


def _last_claim(folder: Path) -> Path | None:
    return max(folder.glob("claim-*.json"), key=_number, default=None)


def _claim_path(folder: Path, number: int) -> Path:
    return folder / f"claim-{number}.json"


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _read(path: Path) -> Claim | None:
    about = read_json(path)
    if about.get("released"):
        return None
    return Claim(path, about["host"], about["pid"], about["worker"], about["since"])


def _is_process(pid: int) -> bool:
    """Return whether a process of this machine lives, as far as the system tells."""
    if os.name == "nt":
        return True  # os.kill would end it there; a claim that nobody touches is given up after a while
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
