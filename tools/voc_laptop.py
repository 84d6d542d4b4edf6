"""The study of VOC on a laptop: every run of results/voc-laptop, the most important first.

The method of the paper comes first, then the other methods, then `analytic`.

The runs are a list for `incseg sweep`: finished runs are skipped, interrupted ones resume, a base step is trained once,
and `incseg sweep status` shows the progress. By default two runs with one thread each work at a time, which is faster
on two shared cores than one run with two threads. `make results` adds finished runs to results/ and writes the tables;
--missing leaves out runs that results/ has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from incseg.cli.settings import parse_run
from incseg.config import require_same_settings, usual_settings
from incseg.engine.rundir import RunDir, flatten
from incseg.report.runs import optional_settings, read_runs
from incseg.sweep.local import Local
from incseg.sweep.plan import job_of, make_runs
from incseg.types import UserError

SEEDS = (42, 1337, 2001)
TASKS = ("15-1", "15-5", "10-1")
Options = dict[str, str | float]
REMEDY: Options = {"balancing": "odds", "prior": 0.2}
"""Remedy for new classes that are predicted too often, chosen on held-out images."""
INFERENCE: tuple[Options, ...] = (
    *({"balancing": mode} for mode in ("none", "paper", "exact", "odds")),  # ratio is the default
    *({"balancing": "odds", "prior": share} for share in (0.1, 0.2, 0.3, 0.5)),
    {"decision": "hierarchical"},
)
RETESTS: dict[str, tuple[Options, ...]] = {
    **{f"{task}-overlapped-evidential-s42": INFERENCE for task in TASKS},
    **{f"{task}-overlapped-evidential-s{seed}": (REMEDY,) for task in TASKS[:2] for seed in SEEDS[1:]},
    **{f"{task}-disjoint-evidential-s42": (REMEDY,) for task in TASKS},
}
"""Inference options to test on the last models of some runs, without training."""


@dataclass(frozen=True)
class Run:
    """One `incseg train`."""

    name: str
    options: tuple[str, ...]


def run(task: str, setting: str = "overlapped", method: str = "evidential", seed: int = 42) -> Run:
    options = ("--task", task, "--setting", setting, "--method", method, "--seed", str(seed))
    return Run(f"{task}-{setting}-{method}-s{seed}", options)


def ablation(task: str, option: str, value: str, seed: int | None = None) -> Run:
    name = f"ablations/{task}-{option.split('.')[-1]}-{value}" + (f"-s{seed}" if seed else "")
    return Run(name, (*run(task, seed=seed or SEEDS[0]).options, f"--{option}", value))


RIVALS = ("mib", "plop", "sdr", "ilt", "lwf", "dkd", "ssul", "lwf_mc", "recall", "ewc", "pi", "rw")
REPLAY = ("--method.replay", "WEB")
"""WEB stands for the folder of replay images, which `prepared` makes."""
COMBINED = {
    "sdr+mib": ("sdr", "--method.start_from_background", "true"),
    "sdr+ce": ("sdr", "--method.output", "mib_ce", "--method.lambda_kd", "100"),
    "sdr+kd": ("sdr", "--method.output", "kd", "--method.lambda_kd", "100"),
    "evidential+pseudo": ("evidential", "--method.pseudo_labels", "0.5"),
    "evidential+pod": ("evidential", "--method.pod", "0.0001"),
    "evidential+replay": ("evidential", *REPLAY, "--method.lambda_kd", "1", "--train.lr_later", "0.15"),
    "evidential+ewf": ("evidential", "--train.fusion", "ewf"),
    "mib+ewf": ("mib", "--train.fusion", "ewf"),
}
"""Methods with a part of another, and SDR with other losses on the outputs. Learning rate and weight of distillation
were chosen on held-out images."""
OTHERWISE = {
    "dkd+published": ("dkd", "--method.lambda_kd", "5", "--method.lambda_dkd", "5"),
    "dkd+plain": ("dkd", "--method.lambda_kd", "5", "--method.lambda_dkd", "5", "--method.positive_weight", "1"),
    "recall+new": ("recall", *REPLAY, "--method.fill", "new"),
    "evidential+printed": (
        "evidential", "--method.balancing", "none", "--method.start_score", "0", "--train.frozen_later", "nothing",
        "--train.clip_later", "null",
    ),
}  # fmt: skip
"""Methods otherwise than in the preset: DKD with its published weights, also without that of positive pixels; RECALL as
in its authors' code; and evidential as its paper prints it for VOC: no balancing, undecided start, free batch norms, no
limit of gradients."""
ENDS = ("19-1", "5-1")
"""Tasks of one and of fifteen increments, for the figure of the score against the number of increments."""


def rival(name: str, task: str, setting: str = "overlapped", seed: int = 42) -> Run:
    """Return a run of a method of the comparison."""
    usual = (name, *REPLAY) if name == "recall" else (name,)
    method, *flags = {**COMBINED, **OTHERWISE}.get(name, usual)
    return Run(f"{task}-{setting}-{name}-s{seed}", (*run(task, setting, method, seed).options, *flags))


def comparison() -> Iterator[Run]:
    names = (*RIVALS, *COMBINED)
    yield from (rival(name, task) for name in names for task in ("15-1", "15-5"))
    yield from (rival(name, task, "disjoint") for name in names for task in ("15-1", "15-5"))
    yield from (rival(name, "15-1", seed=seed) for seed in SEEDS[1:] for name in ("finetune", *names))
    yield from (rival(name, "10-1") for name in names)
    yield from (rival(name, task) for name in OTHERWISE for task in ("15-1", "15-5"))
    yield from (run(task, method=name) for task in ENDS for name in ("evidential", "mib", "dkd", "finetune"))


def analytic() -> Iterator[Run]:
    for setting in ("overlapped", "disjoint"):
        yield from (run(task, setting, "analytic", seed) for seed in SEEDS for task in TASKS)
    yield from (run(task, method="analytic") for task in ("5-1", "5-15", "19-1"))


def study() -> Iterator[Run]:
    first = SEEDS[0]
    yield run("15-1")
    yield run("10-1")
    yield run("15-5")
    yield run("15-1", method="finetune")
    yield run("15-1", "joint")
    yield from (run("15-1", seed=seed) for seed in SEEDS[1:])
    yield from (run("15-5", seed=seed) for seed in SEEDS[1:])
    yield run("15-1", method="joint")
    yield run("15-5", method="finetune")
    yield from (run(task, "disjoint") for task in ("15-1", "15-5"))
    for task in ("15-1", "15-5"):
        yield ablation(task, "train.frozen_later", "nothing")
        yield from (ablation(task, "method.start_score", "0", seed) for seed in SEEDS)
        yield ablation(task, "method.scope", "seen")
        yield ablation(task, "method.kd_reduction", "sum")
        yield from (ablation(task, "method.lambda_kd", value) for value in ("0", "1", "3", "30"))
    yield ablation("10-1", "method.start_score", "0", first)
    yield ablation("10-1", "train.frozen_later", "nothing")
    yield from (ablation("15-5", "method.rectifier", value) for value in ("relu", "exp"))
    undecided = ablation("15-5", "method.rectifier", "relu")  # relu has no gradient below zero
    yield Run(f"{undecided.name}-start_score-0", (*undecided.options, "--method.start_score", "0"))
    # part b of the paper's ablations: MiB's background as one bias, then that bias and the old classifiers frozen
    bias = (*run("15-5", method="mib").options, "--method.background", "bias")
    yield Run("ablations/15-5-mib-background-bias", bias)
    yield Run("ablations/15-5-mib-background-bias-freeze_old-true", (*bias, "--method.freeze_old", "true"))
    yield ablation("15-1", "train.frozen_later", "head")
    yield run("10-1", "disjoint")
    yield run("10-1", method="finetune")
    yield from (run(task, "disjoint", "finetune") for task in ("15-5", "15-1", "10-1"))
    for seed in SEEDS:
        if seed != first:
            yield run("10-1", seed=seed)
            yield from (run(task, "disjoint", seed=seed) for task in ("15-5", "15-1"))
            yield run("15-1", "joint", seed=seed)
            yield run("15-1", method="joint", seed=seed)
            yield run("15-5", method="finetune", seed=seed)


def all_runs() -> Iterator[Run]:
    yield from study()
    yield from comparison()
    yield from analytic()


def prepared(one: Run, root: str, out: Path) -> tuple[str, ...]:
    """Return the options of a run, with the folder of its replay images."""
    if "WEB" not in one.options:
        return one.options
    task, setting = (one.options[one.options.index(flag) + 1] for flag in ("--task", "--setting"))
    web = replay_images(out / "photographs" / f"{task}-{setting}", root, ("--task", task, "--setting", setting))
    return tuple(option.replace("WEB", str(web)) for option in one.options)


def replay_images(folder: Path, root: str, chosen: tuple[str, ...]) -> Path:
    """Return FOLDER/web, with one folder of images per class. Make it if it does not exist."""
    web = folder / "web"
    if not web.exists():
        script = Path(__file__).with_name("web_images.py")
        making = web.with_name(f"web-{os.getpid()}")
        flags = ["--preset", "voc-laptop", "--data", "voc", "--root", root, *chosen]
        subprocess.check_call([sys.executable, str(script), str(making), *flags], stdout=subprocess.DEVNULL)
        making.rename(web)
    return web


def is_known(one: Run, known: dict[str, dict[str, Any]]) -> bool:
    """Return whether results/ has this run with its current settings."""
    saved = known.get(one.name)
    if saved is None:
        return False
    options = (option.replace("WEB", "web") for option in one.options)
    config = parse_run("voc_laptop", "", ["--preset", "voc-laptop", "--data", "voc", "--root", ".", *options])
    current = optional_settings(flatten(config.as_dict()))
    return all(saved[key] == value for key, value in current.items() if key in saved)


def missing_retests(folder: Path) -> list[Options]:
    done = [json.loads(file.read_text())["options"] for file in (folder / "retests").glob("*.json")]
    return [options for options in RETESTS[folder.name] if options not in done]


def retest(folder: Path, root: str, threads: int) -> None:
    log = folder.with_name(f"{folder.name}.retests.log")
    for options in missing_retests(folder):
        flags = [word for name, value in options.items() for word in (f"--method.{name}", str(value))]
        command = ["eval", str(folder), "--save", "--root", root, "--threads", str(threads), *flags]
        with log.open("a") as stream:
            code = subprocess.call([sys.executable, "-m", "incseg", *command], stdout=stream, stderr=subprocess.STDOUT)
        print(f"{' '.join(command)}: {'done' if code == 0 else f'failed ({code}), see {log}'}", flush=True)


def learn(runs: list[Run], root: str, out: Path, workers: int, threads: int) -> list[str]:
    """Make the runs that are not finished, in this order, and return the names of those that failed."""
    common = ["--preset", "voc-laptop", "--data", "voc", "--root", root, "--threads", str(threads)]
    jobs = []
    for one in runs:
        job = job_of(parse_run("voc_laptop", "", [*common, *prepared(one, root, out)]), one.name)
        if not RunDir(out / one.name).results.exists():
            jobs.append(job)
            continue
        try:
            require_same_settings(RunDir(out / one.name), job.config)
        except UserError as error:
            print(f"{one.name}: not run, {error}")
    if jobs:
        make_runs(out, jobs, Local(workers))
    return [job.name for job in jobs if not RunDir(out / job.name).results.exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="VOC2012 or the VOCdevkit around it")
    parser.add_argument("--out", type=Path, default=Path("runs/voc-laptop"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--only", default=[""], nargs="+", help="runs whose name contains one of these, in that order")
    parser.add_argument("--missing", action="store_true", help="only runs that results/ does not have")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    args = parser.parse_args()
    runs = [*dict.fromkeys(r for part in args.only for r in all_runs() if part in r.name)]
    if args.missing:
        file = Path("results") / args.out.name / "runs.jsonl"
        found = [r for r in read_runs([file], usual_settings) if r.retest is None] if file.exists() else []
        known = {r.folder.relative_to(file).as_posix(): r.settings for r in found}
        runs = [r for r in runs if not is_known(r, known)]
    if args.list:
        print("\n".join(r.name for r in runs))
        return
    if args.root is None:
        parser.error("--root is missing: the folder of VOC2012")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            failed = learn(runs, args.root, args.out, args.workers, args.threads)
        except UserError as error:
            sys.exit(f"error: {error}")
        for r in runs:
            if r.name in RETESTS and RunDir(args.out / r.name).results.exists():
                retest(args.out / r.name, args.root, args.threads)
        if failed:
            sys.exit(f"error: {len(failed)} of {len(runs)} runs did not finish: {', '.join(failed)}")


if __name__ == "__main__":
    main()
