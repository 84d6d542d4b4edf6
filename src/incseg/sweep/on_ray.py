"""Runs on a Ray cluster: each is a task with its CPUs and GPUs, and a shared step 0 is a task that others depend on.

A node with access to the sweep's folder works in it, so another node can resume the runs of a lost one. A node without
access works in its own folder and sends the run back as bytes at the end. For a shared step 0 it sends the trained
step, which Ray passes to the runs that wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from incseg.engine.runtime import handling
from incseg.io import cache_path, read_json, read_record, replacing, write_text
from incseg.sweep.attempt import PROGRAM, Attempts, Outcome
from incseg.sweep.folder import Job, Sweep, Task
from incseg.types import UserError

if TYPE_CHECKING:
    from incseg.sweep.plan import Ended, Say

_RETRIES = 10
"""How often a run is started again if its node is lost. A run that fails or is killed is not."""
_SAVE_SECONDS = 90.0


@dataclass(frozen=True)
class Place:
    """Facts about the command for the nodes.

    token: content of ROOT/.sweep/.token. A node that reads the same content shares the disk.
    """

    root: Path
    token: str
    cwd: Path
    variables: dict[str, str]
    program: Sequence[str] = PROGRAM


@dataclass(frozen=True)
class Made:
    """The result of a task. A node that does not share the disk adds tar files: `files`, and `step` for the cache."""

    outcome: Outcome
    files: bytes | None = None
    step: bytes | None = None


@dataclass
class Ray:
    """A Ray cluster. If none is running, it is started on this machine, and no other machine can reach it."""

    address: str | None = None
    cpus: int | None = None
    gpus: float | None = None
    program: Sequence[str] = PROGRAM

    def work(self, sweep: Sweep, tasks: Sequence[Task], say: Say, ended: Ended) -> None:
        try:
            import ray
        except ImportError as error:
            raise UserError("--on ray needs Ray; pip install 'incseg[ray]'") from error
        if not tasks:
            return
        token, place = uuid.uuid4().hex, sweep.root / ".sweep" / ".token"
        if place.exists():
            token = place.read_text(encoding="utf-8")
        else:
            write_text(place, token)
        names = [name for name in os.environ if name.startswith("INCSEG_") or name == "PYTHONPATH"]
        variables = {"OMP_WAIT_POLICY": "PASSIVE", **{name: os.environ[name] for name in names}}
        here = Place(sweep.root.resolve(), token, Path.cwd(), variables, self.program)
        # Like Ctrl-C; Ray is connected first, because it may change the handlers.
        with _connected(ray, self.address), handling(signal.getsignal(signal.SIGINT), "SIGTERM", "SIGHUP"):
            resources = ray.cluster_resources()
            say(f"Ray: {len([n for n in ray.nodes() if n['Alive']])} nodes, {resources.get('CPU', 0):g} CPUs, "
                f"{resources.get('GPU', 0):g} GPUs")  # fmt: skip
            make = ray.remote(max_retries=_RETRIES, retry_exceptions=[InterruptedError])(make_on_node)
            made: dict[Task, Any] = {}
            for task in tasks:
                needs = self._needs(task.jobs[0], resources)
                if needs["num_cpus"] > resources.get("CPU", 0) or needs["num_gpus"] > resources.get("GPU", 0):
                    say(f"{task.name}: waits for a node with {needs['num_cpus']:g} CPUs and {needs['num_gpus']:g} GPUs")
                options = {"name": task.name, **needs}
                made[task] = make.options(**options).remote(here, task, made.get(task.after))  # type: ignore[arg-type]
            waiting = {reference: task for task, reference in made.items()}
            try:
                while waiting:
                    for reference in ray.wait(list(waiting), timeout=1.0)[0]:
                        self._end(ray, sweep, reference, waiting.pop(reference), ended)
            except KeyboardInterrupt:
                for reference in waiting:
                    ray.cancel(reference)
                ray.wait(list(waiting), num_returns=len(waiting), timeout=_SAVE_SECONDS)
                raise

    def _needs(self, job: Job, resources: dict[str, float]) -> dict[str, float]:
        wants_gpu = job.config.get("device") != "cpu" and resources.get("GPU", 0) > 0
        return {
            "num_cpus": self.cpus if self.cpus is not None else job.config.get("threads") or 1,
            "num_gpus": self.gpus if self.gpus is not None else float(wants_gpu),
        }

    def _end(self, ray: Any, sweep: Sweep, reference: Any, task: Task, ended: Ended) -> None:
        try:
            made: Made = ray.get(reference)
        except ray.exceptions.RayError:  # its node, or that of the task it waits for, was lost too often
            ended(task, "failed")
            return
        if made.files is not None:
            unpack(made.files, sweep.root)
        ended(task, made.outcome)


def make_on_node(place: Place, task: Task, before: Made | None) -> Made:
    """Do a task on a node of the cluster."""
    os.environ.update(place.variables)  # among others, the caches of the command
    shared = _read(place.root / ".sweep" / ".token") == place.token
    sweep = Sweep(place.root if shared else _own_folder(place, task))
    if not shared:
        sweep.add(task.jobs)
        sweep.retry_failed()  # the command wants these jobs to be tried
    if before is not None and before.step is not None:
        unpack(before.step, cache_path("steps"))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # Ray sets it
    cwd = place.cwd if place.cwd.is_dir() else None
    outcome = Attempts(sweep, lambda job: threads, place.program, cwd).perform_in_time(task)
    if outcome == "stopped":  # not by the user: the node is shutting down
        raise InterruptedError(f"{task.name} was stopped on its node")
    if shared:
        return Made(outcome)
    step = _trained_step(sweep, task) if task.is_base else None
    sent = [job.name for job in task.jobs if not task.is_base or sweep.failure(job)]
    files = _pack(sweep.root, [folder for name in sent for folder in (sweep.root / name, sweep.folder(name))])
    shutil.rmtree(sweep.root, ignore_errors=True)
    return Made(outcome, files, step)


def _own_folder(place: Place, task: Task) -> Path:
    """Return the folder of a node that does not share the disk, one for each task and its settings."""
    about = json.dumps([place.token, task.is_base, [[job.name, job.config] for job in task.jobs]], sort_keys=True)
    return cache_path("sweeps") / hashlib.sha256(about.encode()).hexdigest()[:16]


def _trained_step(sweep: Sweep, task: Task) -> bytes | None:
    """Return the step 0 that was just trained, as a tar file of its entry in the step cache."""
    for job in task.jobs:
        if sweep.step_0(job.name).exists():
            origin = read_record(sweep.step_0(job.name))["reused_from"] or str(sweep.run(job.name).root)
            entries = [file.parent for file in cache_path("steps").glob("*/step.json")]
            found = [entry for entry in entries if read_json(entry / "step.json")["origin"] == origin]
            return _pack(cache_path("steps"), found[:1])
    return None


def _pack(root: Path, folders: Sequence[Path]) -> bytes:
    """Return a tar file of these folders under `root`, without locks."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for file in (file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()):
            if not file.name.startswith(".") and file.name not in _OWN:
                tar.add(file, file.relative_to(root), recursive=False)
    return written.getvalue()


def unpack(packed: bytes, root: Path) -> None:
    """Write files below `root`, each whole or not at all. Files that mark a run or a step as finished come last."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        order = {name: place for place, name in enumerate(_LAST, start=1)}
        for member in sorted(tar.getmembers(), key=lambda member: order.get(Path(member.name).name, 0)):
            place, content = root / member.name, tar.extractfile(member)
            if content is None or not place.resolve().is_relative_to(root.resolve()):
                raise UserError(f"a node sent '{member.name}', which is not a file of a run; check the cluster")
            with replacing(place) as temporary, temporary.open("wb") as written:
                shutil.copyfileobj(content, written)


_LAST = ("row.json", "step.json", "results.json")
_OWN = ("job.json", "run.yaml")
"""Files that each side writes itself."""


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster. If none was named and none is found, start one that only this machine can reach."""
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError) as error:
            if address is not None or "RAY_ADDRESS" in os.environ:
                reason = " ".join(str(error).split())
                where = address or os.environ["RAY_ADDRESS"]
                raise UserError(
                    f"no Ray cluster at {where} ({reason}); start one with ray start, or leave --address out"
                ) from error
            ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        if ours:
            ray.shutdown()
