"""`incseg sweep`: all combinations of some settings, in a queue on disk that several workers share."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from incseg.cli.settings import lengthen, parse_run
from incseg.engine.progress import figures_line
from incseg.engine.queue import Job, Queue, State
from incseg.engine.rundir import flatten
from incseg.engine.workers import Workers
from incseg.io import read_json, read_yaml
from incseg.run import add_jobs, job_of
from incseg.types import UserError

HELP = "train every combination of methods, tasks, seeds and other settings; sweep status DIR shows the progress"
PASS_UNKNOWN = ("--",)  # every setting of incseg train
STATES: tuple[State, ...] = ("done", "running", "waiting", "failed")
_IN_THE_NAME = ("data.name", "task", "setting", "method.name", "seed")
_STYLES = {"done": "green", "running": "bold", "waiting": "dim", "failed": "red"}
_DESCRIPTION = """Train every combination of the given values, each run in its own folder under --out.

Every setting of incseg train takes several values, separated by commas: --method evidential,mib
--task 15-5,15-1 --setting overlapped,disjoint --seed 42,1337 --train.lr_later 0.01,0.02. Values in
brackets, tasks of class names (cat,dog/bird) and names of files are not split. A step that several
runs share is trained once; --reuse false trains it in every run.

Repeat the command to resume after an interruption. Start it a second time, here or on a machine
that shares the disk, to add workers. With --out alone it resumes the runs in that folder.
incseg sweep status DIR prints a table of all runs and their progress."""


def run(args: argparse.Namespace) -> int:
    if args.unknown[:1] == ["status"]:
        return _status(args.unknown[1:])
    jobs = plan(args)
    if args.list:
        print("\n".join(job.name for job in jobs))
        return 0
    if args.print_slurm:
        print(slurm_script(args), end="")
        return 0
    queue = Queue(args.out)
    add_jobs(queue, jobs)
    if not queue.jobs():
        raise UserError(f"{args.out} has no runs to resume; describe some, such as --method evidential,mib --task 6-2")
    if args.retry:
        queue.retry_failed()
    try:
        states = Workers(args.out, args.workers).work()
    except KeyboardInterrupt:
        print("stopped; repeat the command to resume", file=sys.stderr)
        return 130
    print(f"{in_words(states)}; incseg sweep status {args.out} shows them")
    if states["failed"]:
        print("--retry starts failed runs again", file=sys.stderr)
    return 1 if states["failed"] else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "incseg sweep --out DIR [--workers N] [--KEY VALUE[,VALUE…] …]\n       incseg sweep status DIR"
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs and their queue (required)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument(
        "--spec", metavar="FILE", help="YAML file of settings, with a list for several values; or a list of such blocks"
    )
    parser.add_argument("--retry", action="store_true", help="start failed runs again")
    parser.add_argument("--list", action="store_true", help="print the names of the runs and exit")
    parser.add_argument(
        "--print-slurm", action="store_true", help="print a SLURM script, an array of --workers tasks, and exit"
    )


def plan(args: argparse.Namespace) -> list[Job]:
    """Return the runs that a command line describes. Write nothing."""
    if args.out is None:
        raise UserError("--out is missing; give the folder of the runs: incseg sweep --out DIR")
    given = dict(_values_of_flags(args.unknown))
    blocks = [{**block, **given} for block in (_blocks_of_file(args.spec) if args.spec else [{}])]
    return list(jobs_of(blocks)) if args.spec or given else []


def jobs_of(blocks: Sequence[dict[str, list[Any]]]) -> Iterator[Job]:
    """Yield a run for every combination of every block, named by the usual settings and by what else differs."""
    combinations = [
        dict(zip(block, values, strict=True)) for block in blocks for values in itertools.product(*block.values())
    ]
    keys = dict.fromkeys(key for combination in combinations for key in combination)
    telling = [
        key for key in keys if key not in _IN_THE_NAME and len({_text(one.get(key)) for one in combinations}) > 1
    ]
    known: dict[str, Job] = {}
    for combination in combinations:
        tokens = [f"--{key}={_text(value)}" for key, value in combination.items()]
        config = parse_run("incseg sweep", "", ["--reuse=true", *tokens])
        config.out = None
        suffixes = [f"{key.rpartition('.')[2]}-{_text(combination[key])}" for key in telling if key in combination]
        name = "-".join([config.folder.name, *suffixes])
        job = job_of(config, "".join(c if c.isalnum() or c in "-_." else "_" for c in name))
        if job.name not in known:
            known[job.name] = job
            yield job
        elif known[job.name] != job:
            raise UserError(f"two different runs would be called {job.name}; give them different settings or folders")


def _values_of_flags(tokens: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, [a, b]) for `--key a,b` and `--key=a,b`."""
    rest = list(tokens)
    while rest:
        flag, equals, value = lengthen(rest.pop(0)).partition("=")
        if not flag.startswith("--") or (not equals and not rest):
            raise UserError(f"'{flag}' is not a setting with a value; write --key value or --key value,value")
        value = value if equals else rest.pop(0)
        yield flag.removeprefix("--"), _split(flag.removeprefix("--"), value)


def _split(key: str, value: str) -> list[Any]:
    """Split at commas outside brackets, but not a task of class names or the name of a file."""
    if (key == "task" and "/" in value) or Path(value).exists():
        return [value]
    depth, parts = 0, [""]
    for character in value:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _blocks_of_file(file: str) -> list[dict[str, list[Any]]]:
    try:
        read = read_yaml(Path(file))
    except OSError as error:
        raise UserError(f"--spec {file} cannot be read ({error.strerror}); give a YAML file") from error
    except yaml.YAMLError as error:
        raise UserError(f"--spec {file} is not valid YAML ({str(error).splitlines()[0]})") from error
    blocks = read if isinstance(read, list) else [read]
    if not blocks or not all(isinstance(block, dict) for block in blocks):
        raise UserError(f"--spec {file} holds no settings; write lines such as 'method: [evidential, mib]'")
    return [
        {lengthen(f"--{key}").removeprefix("--"): value if isinstance(value, list) else [value] for key, value in pairs}
        for pairs in (flatten(block).items() for block in blocks)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def slurm_script(args: argparse.Namespace) -> str:
    """Return a job script in which every task of an array is one worker of the same queue."""
    words = ["--out", str(args.out), *(["--spec", args.spec] if args.spec else []), *["--retry"] * args.retry]
    words += args.unknown
    return f"""#!/bin/bash
#SBATCH --job-name=incseg-{args.out.name}
#SBATCH --array=1-{args.workers}
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=slurm-%A_%a.txt
# Each task is a worker. Two minutes before its time limit it gets SIGTERM, saves the run, and is queued again.
# INCSEG_CACHE must name a folder that all nodes share, so that a base is trained once.
srun incseg sweep {shlex.join(words)} --workers 1
code=$?
if [ "$code" -eq 130 ]; then scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"; fi
exit "$code"
"""


def _status(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        raise UserError(f"status takes one folder, got {len(argv)}; give the --out of a sweep: incseg sweep status DIR")
    queue = Queue(Path(argv[0]))
    jobs = queue.jobs()
    if not jobs:
        raise UserError(f"{queue.root} holds no sweep; start one with incseg sweep --out {queue.root} …")
    states = {job.name: queue.state(job) for job in jobs}
    table = Table(header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("progress", overflow="fold")
    for job in jobs:
        state = states[job.name]
        table.add_row(Text(job.name), Text(state, style=_STYLES[state]), Text(how_far(queue, job, state)))
    Console(highlight=False).print(table)
    print(in_words(Counter(states.values())))
    return 0


def how_far(queue: Queue, job: Job, state: State) -> str:
    """Return a line on a run: its figures, its worker and progress, what it waits for, or why it failed."""
    run = queue.run(job.name)
    if state == "done":
        results = read_json(run.results)
        return f"{figures_line(results['final'])}  in {timedelta(seconds=round(results['seconds']))}"
    if state == "failed":
        return queue.failure(job) or ""
    done = len(run.steps_done())
    steps = f"{done} of {len(read_json(run.protocol)['steps'])} steps" if run.protocol.exists() else "no step yet"
    if state == "running":
        last = _last_line(queue.log(job.name)) if queue.log(job.name).exists() else ""
        return f"{steps}, {queue.worker(job)}" + (f"\n{last}" if last.startswith(("step ", "test ")) else "")
    return steps if done else "not started, or its base is being trained"


def _last_line(file: Path) -> str:
    lines = file.read_bytes()[-2000:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def in_words(states: Counter[State]) -> str:
    runs = sum(states.values())
    return f"{runs} run{'s' if runs != 1 else ''}: " + ", ".join(f"{states[s]} {s}" for s in STATES if states[s])
