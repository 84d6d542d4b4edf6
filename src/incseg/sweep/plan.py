"""Settings to the runs of a sweep, and the work of an engine on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from incseg.config import RunConfig, base_key, differing_settings, require_same_settings
from incseg.engine.progress import figures_line
from incseg.io import counted, read_record
from incseg.sweep.attempt import Outcome
from incseg.sweep.folder import Job, State, Sweep, Task
from incseg.types import UserError

Say = Callable[[str], None]
Ended = Callable[[Task, Outcome], None]


class Engine(Protocol):
    """A place where runs are trained: this machine, a Ray cluster, SLURM."""

    def work(self, sweep: Sweep, tasks: Sequence[Task], say: Say, ended: Ended) -> None:
        """Do all tasks, each after the one that it waits for, and report each that has ended.

        On an interruption, save all runs, then raise KeyboardInterrupt.
        """


def job_of(config: RunConfig, name: str) -> Job:
    """Return the job for a configuration, with the folder `name` in the sweep's folder."""
    return Job(name, {key: value for key, value in config.as_dict().items() if key != "out"}, base_key(config))


def add_jobs(sweep: Sweep, jobs: Iterable[Job]) -> None:
    """Add runs to a sweep. Refuse one that has the name of another run but other settings."""
    jobs, there = list(jobs), {job.name: job.config for job in sweep.jobs()}
    for job in jobs:
        require_same_settings(sweep.run(job.name), job.config)
        if job.name in there and (differing := differing_settings(there[job.name], job.config)):
            raise UserError(
                f"{job.name} is in the sweep with other settings ({differing}); choose another --out, or delete "
                f"{sweep.folder(job.name)}"
            )
    sweep.add(jobs)


def make_runs(root: Path, jobs: Sequence[Job], engine: Engine, say: Say = print) -> Counter[State]:
    """Train the unfinished runs of these jobs, or of the whole folder without jobs. Return the states of all runs."""
    sweep = Sweep(root)
    add_jobs(sweep, jobs)

    def ended(task: Task, outcome: Outcome) -> None:
        if outcome != "failed" or not task.is_base:  # each run of a failed base reports the reason itself
            say(report(sweep, task, outcome))

    engine.work(sweep, sweep.tasks(jobs), say, ended)
    return sweep.states()


def report(sweep: Sweep, task: Task, outcome: Outcome) -> str:
    """Return a line on a task that has ended."""
    name = task.jobs[0].name
    if outcome == "failed":
        reason = sweep.failure(task.jobs[0])
        return f"{name}: failed: {reason} (see {sweep.log(name)})" if reason else f"{name}: node lost; {_RESUMES}"
    if outcome != "done":
        return f"{name}: {'stopped' if outcome == 'stopped' else 'in progress elsewhere'}; {_RESUMES}"
    if task.is_base:
        return f"{name}: step 0 is trained, for {counted(len(task.jobs), 'run')}"
    results = read_record(sweep.run(name).results)
    return f"{name}: done in {results['seconds']:.0f} s, {figures_line(results['final'])}"


_RESUMES = "the same command resumes it"
