"""The study of real VOC on a laptop: every run of results/voc-laptop, in the order of their worth; then the rivals.

Runs that are finished are passed over, interrupted ones go on, and a base step is trained once: a run waits for the
first that trains the base it shares. Two at a time with one thread each by default, which on two cores that others
use too is faster than one with two. `make results` writes the tables from the run folders, at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEEDS = (42, 1337, 2001)
RETESTED = tuple(f"{task}-overlapped-evidential-s42" for task in ("15-1", "15-5", "10-1"))
RETESTS: tuple[dict[str, str | float], ...] = (
    *({"balancing": mode} for mode in ("none", "paper", "exact", "odds")),  # beside ratio, the default
    *({"balancing": "odds", "prior": share} for share in (0.1, 0.2, 0.3, 0.5)),
    {"decision": "hierarchical"},
)
"""Options of inference, tried on the last models of some runs: no training."""


@dataclass(frozen=True)
class Run:
    """One `incseg train`; `base` names what step 0 depends on."""

    name: str
    base: str
    options: tuple[str, ...]


def run(task: str, setting: str = "overlapped", method: str = "evidential", seed: int = 42) -> Run:
    classes = "all" if "joint" in (setting, method) else task.split("-", maxsplit=1)[0]
    family = "evidential" if method == "evidential" else "softmax"
    return Run(
        f"{task}-{setting}-{method}-s{seed}",
        f"{family} {classes} {setting} {seed}",
        ("--task", task, "--setting", setting, "--method", method, "--seed", str(seed)),
    )


def ablation(task: str, option: str, value: str, new_base: bool = False) -> Run:
    plain = run(task)
    return Run(
        f"ablations/{task}-{option.split('.')[-1]}-{value}",
        f"{plain.base} {option} {value}" if new_base else plain.base,
        (*plain.options, f"--{option}", value),
    )


RIVALS = ("mib", "plop", "sdr", "ilt", "lwf", "dkd", "ssul", "lwf_mc", "recall", "ewc", "pi", "rw")
COMBINED = {
    "sdr+mib": ("sdr", "--method.output", "mib"),
    "evidential+pseudo": ("evidential", "--method.pseudo_labels", "0.5"),
    "evidential+pod": ("evidential", "--method.pod", "0.01"),
    "evidential+replay": ("evidential", "--method.replay", "WEB"),
    "evidential+ewf": ("evidential", "--train.fusion", "ewf"),
    "mib+ewf": ("mib", "--train.fusion", "ewf"),
}
"""Methods with a piece of another."""
STEP_0_OF = {name: name for name in ("dkd", "ssul", "lwf_mc", "sdr")} | dict.fromkeys(("ewc", "pi", "rw"), "importance")
"""Whose step 0 is not plain cross-entropy."""


def rival(name: str, task: str, setting: str = "overlapped", seed: int = 42) -> Run:
    """A method of the comparison; WEB stands for the folders of photographs, which `prepare` makes."""
    method, *flags = COMBINED.get(name, (name, "--method.replay", "WEB") if name == "recall" else (name,))
    family = "evidential" if method == "evidential" else STEP_0_OF.get(method, "softmax")
    return Run(
        f"{task}-{setting}-{name}-s{seed}",
        f"{family} {task.split('-', maxsplit=1)[0]} {setting} {seed}",
        ("--task", task, "--setting", setting, "--method", method, "--seed", str(seed), *flags),
    )


def comparison() -> Iterator[Run]:
    names = (*RIVALS, *COMBINED)
    yield from (rival(name, task) for name in names for task in ("15-1", "15-5"))
    yield from (rival(name, task, "disjoint") for name in names for task in ("15-1", "15-5"))
    yield from (rival(name, "15-1", seed=seed) for seed in SEEDS[1:] for name in names)
    yield from (rival(name, "10-1") for name in names)


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
        yield ablation(task, "method.scope", "seen")
        yield ablation(task, "method.kd_reduction", "sum")
        yield from (ablation(task, "method.lambda_kd", value) for value in ("1", "3"))
    yield ablation("10-1", "train.frozen_later", "nothing")
    yield from (ablation("15-5", "method.rectifier", value, new_base=True) for value in ("relu", "exp"))
    yield ablation("15-1", "train.frozen_later", "head")
    yield run("10-1", "disjoint")
    yield run("10-1", method="finetune")
    yield from (run(task, "disjoint", "finetune") for task in ("15-5", "15-1"))
    for seed in SEEDS:
        if seed != first:
            yield run("10-1", seed=seed)
            yield from (run(task, "disjoint", seed=seed) for task in ("15-5", "15-1"))
            yield run("15-1", "joint", seed=seed)
            yield run("15-1", method="joint", seed=seed)


class Queue:
    """Which run is next; shared by the workers."""

    def __init__(self, runs: list[Run], out: Path) -> None:
        self.waiting, self.out = runs, out
        self.first_of = {r.base: r for r in reversed(runs)}
        self.changed = threading.Condition()

    def take(self) -> Run | None:
        with self.changed:
            while self.waiting:
                for candidate in self.waiting:
                    if self._has_base(candidate):
                        self.waiting.remove(candidate)
                        return candidate
                self.changed.wait(timeout=5)
        return None

    def _has_base(self, candidate: Run) -> bool:
        first = self.first_of[candidate.base]
        return candidate is first or (self.out / first.name / "steps" / "0" / "row.json").exists()


def work(queue: Queue, root: str, threads: int) -> None:
    while (job := queue.take()) is not None:
        folder = queue.out / job.name
        common = ["--root", root, "--threads", str(threads)]
        if not (folder / "results.json").exists():
            options = prepare(job, root, queue.out)
            train = ["train", "--preset", "voc-laptop", "--data", "voc", *common, *options, "--out", str(folder)]
            incseg(train, folder.with_name(f"{folder.name}.log"), threads)
        if job.name in RETESTED and (folder / "results.json").exists():
            for options in missing_retests(folder):
                flags = [word for name, value in options.items() for word in (f"--method.{name}", str(value))]
                log = folder.with_name(f"{folder.name}.retests.log")
                incseg(["eval", str(folder), "--save", *common, *flags], log, threads)


def prepare(job: Run, root: str, out: Path) -> list[str]:
    """The options of a run, with the photographs that it replays in their place."""
    if "WEB" not in job.options:
        return list(job.options)
    task, setting = (job.options[job.options.index(flag) + 1] for flag in ("--task", "--setting"))
    web = out / "photographs" / f"{task}-{setting}" / "web"
    if not web.exists():
        script = Path(__file__).with_name("web_images.py")
        chosen = ["--preset", "voc-laptop", "--data", "voc", "--root", root, "--task", task, "--setting", setting]
        making = web.with_name(f"web-{threading.get_ident()}")
        subprocess.check_call([sys.executable, str(script), str(making), *chosen], stdout=subprocess.DEVNULL)
        making.rename(web)
    return [option.replace("WEB", str(web)) for option in job.options]


def missing_retests(folder: Path) -> list[dict[str, str | float]]:
    kept = [json.loads(file.read_text())["options"] for file in (folder / "retests").glob("*.json")]
    return [options for options in RETESTS if options not in kept]


def incseg(command: list[str], log: Path, threads: int) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as stream:
        code = subprocess.call(
            [sys.executable, "-m", "incseg", *command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
    print(f"{' '.join(command)}: {'done' if code == 0 else f'failed ({code}), see {log}'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="VOC2012 or the VOCdevkit around it")
    parser.add_argument("--out", type=Path, default=Path("runs/voc-laptop"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--only", default=[""], nargs="+", help="runs whose name contains one of these, in that order")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    args = parser.parse_args()
    runs = [*dict.fromkeys(r for part in args.only for r in (*study(), *comparison()) if part in r.name)]
    if args.list:
        print("\n".join(f"{r.name}  ({r.base})" for r in runs))
        return
    if args.root is None:
        parser.error("--root is missing: the folder of VOC2012")
    queue = Queue(runs, args.out)
    workers = [threading.Thread(target=work, args=(queue, args.root, args.threads)) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
