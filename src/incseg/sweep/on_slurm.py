"""Runs as jobs of SLURM, submitted by submitit. The command ends when all jobs are submitted.

A shared step 0 is a job that others depend on. Before its time limit, and if it is preempted, a job saves its run and
is queued again. A job that is still in the queue is not submitted a second time.
"""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from incseg.io import counted, read_json, write_json
from incseg.sweep.attempt import PROGRAM, Attempts, Outcome
from incseg.sweep.folder import Sweep, Task
from incseg.types import UserError

if TYPE_CHECKING:
    from incseg.sweep.plan import Ended, Say

_REQUEUES = 100
_MINUTES = 24 * 60
"""Time limit of a job, after which it is queued again; --slurm time=MINUTES changes it."""
_SIGNAL_SECONDS = 120
"""Seconds before its time limit at which a job is asked to save."""
_PATIENCE = 60
"""Most seconds to wait for squeue."""


@dataclass(frozen=True)
class Make:
    """A task in the form that submitit runs."""

    root: Path
    task: Task
    cpus: int
    program: Sequence[str] = PROGRAM

    def __call__(self) -> Outcome:
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.cpus))}
        attempts = Attempts(Sweep(self.root), lambda job: variables, self.program)
        _running.append(attempts)
        return attempts.perform_in_time(self.task)

    def checkpoint(self) -> Any:
        """Save the run and return the job to queue again. The handler of SLURM's signal calls this."""
        from submitit.helpers import DelayedSubmission

        for attempts in _running:
            attempts.save()
        return DelayedSubmission(replace(self))


_running: list[Attempts] = []
"""The attempts of this process."""


@dataclass
class Slurm:
    """SLURM, or submitit's imitation of it on this machine with `cluster=local` among the parameters."""

    jobs: int | None = None
    cpus: int | None = None
    gpus: float | None = None
    parameters: Sequence[str] = ()
    program: Sequence[str] = PROGRAM

    def __post_init__(self) -> None:
        if wrong := [given for given in self.parameters if "=" not in given]:
            raise UserError(f"--slurm {wrong[0]} has no value; write --slurm KEY=VALUE, such as partition=gpu")

    def work(self, sweep: Sweep, tasks: Sequence[Task], say: Say, ended: Ended) -> None:
        try:
            import submitit
        except ImportError as error:
            raise UserError("--on slurm needs submitit; pip install 'incseg[slurm]'") from error
        words = (parameter.partition("=") for parameter in self.parameters)
        given: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, _, value in words}
        cluster, place = given.pop("cluster", "slurm"), sweep.root.resolve() / ".sweep" / ".slurm" / "%j"
        record = sweep.root / ".sweep" / ".slurm.json"
        ids: dict[str, str] = read_json(record) if record.exists() else {}
        queued = _queued() if cluster == "slurm" else set()
        left = [task for task in tasks if ids.get(task.name) not in queued]
        if len(left) < len(tasks):
            say(f"already in SLURM's queue: {counted(len(tasks) - len(left), 'job')}")
        for group in _groups(left):
            first, after = group[0].jobs[0], group[0].after
            cpus = self.cpus or first.config.get("threads") or 1
            slurm = {"array_parallelism": self.jobs or len(group), "signal_delay_s": _SIGNAL_SECONDS, **given}
            if after is not None:
                slurm["dependency"] = f"afterany:{ids[after.name]}"
            try:  # one executor per group, because its parameters apply to all its jobs
                executor = submitit.AutoExecutor(place, cluster=cluster, slurm_max_num_timeout=_REQUEUES)
                executor.update_parameters(
                    name=f"incseg-{sweep.root.name}",
                    timeout_min=_MINUTES,
                    cpus_per_task=cpus,
                    gpus_per_node=None if self.gpus is None else int(self.gpus),
                    **{f"slurm_{key}": value for key, value in slurm.items()},
                )
                with executor.batch():
                    made = [executor.submit(Make(sweep.root.resolve(), t, cpus, self.program)) for t in group]
            except RuntimeError as error:
                raise UserError(f"{error}; run this on a machine that has SLURM's commands") from error
            except (ValueError, NameError, AssertionError, submitit.core.utils.FailedJobError) as error:
                raise UserError(f"SLURM refused the runs: {' '.join(str(error).split())[:300]}") from error
            ids |= {task.name: job.job_id for task, job in zip(group, made, strict=True)}
            write_json(record, ids)
            what = counted(len(group), "shared base" if group[0].is_base else "run")
            say(f"{what}: submitted as {', '.join(sorted({job.job_id.split('_')[0] for job in made}))}")
            if cluster != "slurm":
                for task, job in zip(group, made, strict=True):
                    ended(task, job.result())


def _queued() -> set[str]:
    """Return the ids of this user's jobs in the queue, by squeue: sacct needs a cluster with accounting."""
    command = ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return set()  # submitting fails next, with the reason
    return set(done.stdout.split())


def _groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group the tasks by kind and by the task that they wait for. Each group is a job array. Bases come first."""
    groups: dict[tuple[bool, Task | None], list[Task]] = {}
    for task in sorted(tasks, key=lambda task: not task.is_base):
        groups.setdefault((task.is_base, task.after), []).append(task)
    return list(groups.values())
