"""Runs on a Ray cluster: each is a task with its CPUs and GPUs, and a shared step 0 is a task that others depend on.

A node that sees the sweep's folder works in it, so what a lost node leaves is taken up by another. A node that does not
see it works in a folder of its own; the run comes back as bytes when it has ended, and with a shared step 0 the trained
step, which Ray hands to the runs that wait for it.
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

from incseg.io import cache_path, read_json, read_record, replacing, write_text
from incseg.sweep.attempt import PROGRAM, Attempts, Outcome
from incseg.sweep.folder import Job, Sweep, Task
from incseg.types import UserError

if TYPE_CHECKING:
    from incseg.sweep.plan import Ended, Say

_RETRIES = 10
"""How often a run is begun again because its node was lost. A run that fails, or is killed, is not."""
_SAVE_SECONDS = 90.0


@dataclass(frozen=True)
class Place:
    """What a node must know of the command.

    token: the content of ROOT/.sweep/.token: a node that reads the same sees the same disk.
    """

    root: Path
    token: str
    cwd: Path
    variables: dict[str, str]
    program: Sequence[str] = PROGRAM


@dataclass(frozen=True)
class Made:
    """What came of a task; `files` and `step` (of the cache) are tar files from a node that does not share the disk."""

    outcome: Outcome
    files: bytes | None = None
    step: bytes | None = None


@dataclass
class Ray:
    """A Ray cluster; where none is running, one of this machine, which nobody else can reach."""

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
        with _connected(ray, self.address), _interruptible():
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
        except ray.exceptions.RayError:  # lost with its node again and again, or what it waits for was
            ended(task, "failed")
            return
        if made.files is not None:
            unpack(made.files, sweep.root)
        ended(task, made.outcome)


def make_on_node(place: Place, task: Task, before: Made | None) -> Made:
    """Do a task on a node of the cluster."""
    os.environ.update(place.variables)  # the caches too must be those of the command
    shared = _read(place.root / ".sweep" / ".token") == place.token
    sweep = Sweep(place.root if shared else _own_folder(place, task))
    if not shared:
        sweep.add(task.jobs)
        sweep.retry_failed()  # what the command sends is to be tried
    if before is not None and before.step is not None:
        unpack(before.step, cache_path("steps"))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # Ray sets it
    cwd = place.cwd if place.cwd.is_dir() else None
    outcome = Attempts(sweep, lambda job: threads, place.program, cwd).perform_in_time(task)
    if outcome == "stopped":  # not by us: the node is going down
        raise InterruptedError(f"{task.name} was stopped on its node")
    if shared:
        return Made(outcome)
    step = _trained_step(sweep, task) if task.is_base else None
    sent = [job.name for job in task.jobs if not task.is_base or sweep.failure(job)]
    files = _pack(sweep.root, [folder for name in sent for folder in (sweep.root / name, sweep.folder(name))])
    shutil.rmtree(sweep.root, ignore_errors=True)
    return Made(outcome, files, step)


def _own_folder(place: Place, task: Task) -> Path:
    """Return where a node that does not share the disk works: a folder for these settings alone."""
    about = json.dumps([place.token, task.is_base, [[job.name, job.config] for job in task.jobs]], sort_keys=True)
    return cache_path("sweeps") / hashlib.sha256(about.encode()).hexdigest()[:16]


def _trained_step(sweep: Sweep, task: Task) -> bytes | None:
    """Return the step 0 that was just trained, as it lies in the step cache."""
    for job in task.jobs:
        if sweep.step_0(job.name).exists():
            origin = read_record(sweep.step_0(job.name))["reused_from"] or str(sweep.run(job.name).root)
            entries = [file.parent for file in cache_path("steps").glob("*/step.json")]
            found = [entry for entry in entries if read_json(entry / "step.json")["origin"] == origin]
            return _pack(cache_path("steps"), found[:1])
    return None


def _pack(root: Path, folders: Sequence[Path]) -> bytes:
    """Return a tar file of what lies in these folders under `root`; locks stay behind."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for file in (file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()):
            if not file.name.startswith(".") and file.name not in _OWN:
                tar.add(file, file.relative_to(root), recursive=False)
    return written.getvalue()


def unpack(packed: bytes, root: Path) -> None:
    """Write files below `root`, each whole or not at all; what says that a run or a step is finished comes last."""
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
"""What each side has of its own."""


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


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does."""
    names = ("SIGTERM", "SIGHUP")
    handler = signal.getsignal(signal.SIGINT)
    previous = {n: signal.signal(n, handler) for name in names if (n := getattr(signal, name, None))}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
