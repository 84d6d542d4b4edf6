"""`incseg sweep`: all combinations of some settings, on this machine, a Ray cluster or SLURM."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
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
from incseg.engine.progress import figures_line, showing
from incseg.engine.rundir import InUse, flatten
from incseg.engine.runtime import handling
from incseg.io import counted, read_json, read_yaml
from incseg.run import train
from incseg.sweep.attempt import IN_USE, end_with_parent
from incseg.sweep.cost import estimate
from incseg.sweep.folder import Job, State, Sweep
from incseg.sweep.local import Local
from incseg.sweep.on_ray import Ray
from incseg.sweep.on_slurm import Slurm
from incseg.sweep.plan import Engine, job_of, make_runs
from incseg.types import UserError

HELP = "train every combination of methods, tasks, seeds and other settings; sweep status DIR shows the progress"
PASS_UNKNOWN = ("--",)  # every setting of incseg train
STATES: tuple[State, ...] = ("done", "running", "waiting", "failed")
_IN_THE_NAME = ("data.name", "task", "setting", "method.name", "seed")
_STYLES = {"done": "green", "running": "bold", "waiting": "dim", "failed": "red"}
_DESCRIPTION = """Train every combination of the given values, each run in its own folder under --out.

Every setting of incseg train takes several values, separated by commas: --method evidential,mib
--task 15-5,15-1 --seed 42,1337 --train.lr_later 0.01,0.02. Values in brackets, tasks of class names
(cat,dog/bird) and names of files are not split. A step that several runs share is trained once,
before them; --reuse false trains it in every run.

Repeat the command to resume after an interruption. With --out alone it resumes the runs in that
folder. incseg sweep status DIR prints a table of all runs and their progress."""


def run(args: argparse.Namespace) -> int:
    if args.unknown[:1] == ["status"]:
        return _status(args.unknown[1:])
    if args.unknown[:1] == ["make"]:
        return _make(args.unknown[1:])
    _require_numbers(args)
    jobs = plan(args)
    if args.list:
        print("\n".join(job.name for job in jobs))
        return 0
    if args.dry_run:
        rate = None if args.tflops is None else args.tflops * 1e12
        with showing():
            print("\n".join(estimate(Sweep(args.out), jobs, args.jobs or 1, rate)))
        return 0
    engine, sweep = engine_of(args), Sweep(args.out)
    if not jobs and not sweep.jobs():
        raise UserError(f"{args.out} has no runs to resume; describe some, such as --method evidential,mib --task 6-2")
    if args.retry:
        sweep.retry_failed()
    try:
        states = make_runs(args.out, jobs, engine)
    except KeyboardInterrupt:
        print("stopped; repeat the command to resume", file=sys.stderr)
        return 130
    print(f"{in_words(states)}; incseg sweep status {args.out} shows them")
    if states["failed"]:
        print("--retry starts failed runs again", file=sys.stderr)
    return 1 if states["failed"] or (states["waiting"] and args.on != "slurm") else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "incseg sweep --out DIR [--jobs N] [--KEY VALUE[,VALUE…] …]\n       incseg sweep status DIR"
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (required)")
    parser.add_argument("--jobs", "--workers", type=int, metavar="N", help="runs at a time (default: 1; on SLURM, all)")
    parser.add_argument(
        "--spec", metavar="FILE", help="YAML file of settings, with a list for several values; or a list of such blocks"
    )
    parser.add_argument("--retry", action="store_true", help="start failed runs again")
    parser.add_argument("--list", action="store_true", help="print the names of the runs and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="estimate hours, memory and disk, --jobs runs at a time, and exit"
    )
    parser.add_argument(
        "--tflops", type=float, metavar="X", help="for --dry-run: what a run reaches (default: measured here)"
    )
    parser.add_argument("--on", choices=("ray", "slurm"), help="make the runs on a cluster instead of this machine")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster (default: RAY_ADDRESS, else the one of this machine)"
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="cores of a run on a cluster (default: --threads, or 1)")
    parser.add_argument(
        "--gpus", type=float, metavar="N", help="GPUs of a run on a cluster (default: on Ray 1 if it has any)"
    )
    parser.add_argument(
        "--slurm", action="append", default=[], metavar="KEY=VALUE",
        help="a parameter of sbatch, such as partition=gpu or time=1440 (minutes); may be given again",
    )  # fmt: skip


def engine_of(args: argparse.Namespace) -> Engine:
    """Return the engine that a command line asks for."""
    given = {"ray": ("address", "cpus", "gpus"), "slurm": ("jobs", "cpus", "gpus", "slurm"), None: ("jobs",)}[args.on]
    for name in ("jobs", "address", "cpus", "gpus", "slurm"):
        if getattr(args, name) not in (None, []) and name not in given:
            where = f"--on {args.on}" if args.on else "this machine"
            allowed = ", ".join(f"--{flag}" for flag in given)
            raise UserError(f"--{name} does nothing on {where.removeprefix('--on ')}; allowed for {where}: {allowed}")
    if args.on == "ray":
        return Ray(args.address, args.cpus, args.gpus)
    if args.on == "slurm":
        return Slurm(args.jobs, args.cpus, args.gpus, args.slurm)
    return Local(1 if args.jobs is None else args.jobs)


def _require_numbers(args: argparse.Namespace) -> None:
    for name, least in (("jobs", 1), ("cpus", 1), ("gpus", 0), ("tflops", 1e-6)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise UserError(f"--{name} is {value}; give at least {least:g}")


def _make(argv: Sequence[str]) -> int:
    """Train one run of a sweep, in a process that `incseg.sweep.attempt` has started."""
    if len(argv) < 2:
        raise UserError("sweep make is an internal command of sweeps; to train, give --out and settings")
    root, name, *flags = argv
    end_with_parent()
    sweep = Sweep(Path(root))
    config = parse_run("incseg sweep", "", ["--config", str(sweep.config(name)), "--out", str(sweep.run(name).root)])
    try:
        # SLURM signals every process of a job. The job's own process handles it and lets this one save, by SIGTERM.
        with handling(signal.SIG_IGN, "SIGUSR1", "SIGUSR2"):
            train(config, only_step_0="--base" in flags)
    except InUse as error:
        print(error, file=sys.stderr)
        return IN_USE
    return 0


def plan(args: argparse.Namespace) -> list[Job]:
    """Return the runs that a command line describes. Write nothing."""
    if args.out is None:
        raise UserError("--out is missing; give the folder of the runs: incseg sweep --out DIR")
    given = dict(_values_of_flags(args.unknown))
    blocks = [{**block, **given} for block in (_blocks_of_file(args.spec) if args.spec else [{}])]
    return list(jobs_of(blocks)) if args.spec or given else []


def jobs_of(blocks: Sequence[dict[str, list[Any]]]) -> Iterator[Job]:
    """Yield a run for every combination of every block, named by the usual settings and by others that differ."""
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


def _status(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        raise UserError(f"status takes one folder, got {len(argv)}; give the --out of a sweep: incseg sweep status DIR")
    sweep = Sweep(Path(argv[0]))
    jobs = sweep.jobs()
    if not jobs:
        raise UserError(f"{sweep.root} holds no sweep; start one with incseg sweep --out {sweep.root} …")
    states = {job.name: sweep.state(job) for job in jobs}
    table = Table(header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("progress", overflow="fold")
    for job in jobs:
        state = states[job.name]
        table.add_row(Text(job.name), Text(state, style=_STYLES[state]), Text(how_far(sweep, job, state)))
    Console(highlight=False).print(table)
    print(in_words(Counter(states.values())))
    return 0


def how_far(sweep: Sweep, job: Job, state: State) -> str:
    """Return a line on a run: its figures, its process and progress, what it waits for, or why it failed."""
    run = sweep.run(job.name)
    if state == "done":
        results = read_json(run.results)
        return f"{figures_line(results['final'])}  in {timedelta(seconds=round(results['seconds']))}"
    if state == "failed":
        return sweep.failure(job) or ""
    done = len(run.steps_done())
    steps = f"{done} of {len(read_json(run.protocol)['steps'])} steps" if run.protocol.exists() else "no step yet"
    if state == "running":
        last = _last_line(sweep.log(job.name)) if sweep.log(job.name).exists() else ""
        return f"{steps}, {sweep.worker(job) or 'ending'}" + (
            f"\n{last}" if last.startswith(("step ", "test ")) else ""
        )
    return steps if run.started else "not started, or its base is being trained"


def _last_line(file: Path) -> str:
    lines = file.read_bytes()[-2000:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def in_words(states: Counter[State]) -> str:
    runs = sum(states.values())
    return f"{counted(runs, 'run')}: " + ", ".join(f"{states[s]} {s}" for s in STATES if states[s])
