"""Load test of `incseg extend`: 1, 2 and 4 extensions of one model at a time on two cores.

    python tools/load_extend.py --ccp CCP --work runs/load

CCP is Clothing Co-Parsing as a folder dataset. A base of two classes is trained. Then 1, 2 or 4 processes at a time
extend it by `bag` from PHOTOGRAPHS other images. Each process has its own cache, as tenants would have, so the time
includes the features; one more run has its features cached. Each process is measured by processor seconds and peak
memory, which a busy machine hardly changes, and by seconds of the clock, which it does. All extensions must end with
the same model. Writes results/load.json and results/load.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from incseg.io import read_tensors, tensors_digest, write_compact_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
OLD, NEW = ("skin", "hair"), ("bag",)
SIZE = 224
AT_ONCE = ((1, False), (4, False), (1, True), (2, False))
"""How many at a time, and whether their features are cached."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ccp", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--photographs", type=int, default=40)
    args = parser.parse_args()
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    with_bag = [name for name in names(args.ccp) if NEW[0] in shown(args.ccp, name)]
    without = [name for name in names(args.ccp) if name not in set(with_bag[: args.photographs])]
    write_folder(args.ccp, work / "base-photographs", without[: args.photographs], OLD)
    write_folder(args.ccp, work / "new-photographs", with_bag[: args.photographs], NEW)
    size = [f"--train.crop={SIZE}", f"--eval.size={SIZE}"]
    train = ["train", "--data", "folder", "--root", "base-photographs", "--out", "base", "--train.epochs", "6", *size]
    at_once(work, [("base-cache", train)])
    measured: list[dict[str, Any]] = []
    digests = set()
    for number, cached in AT_ONCE:
        outs = [f"{number}-{tenant}-{'cached' if cached else 'first'}" for tenant in range(number)]
        extend = [
            "extend",
            "base",
            "--root",
            "new-photographs",
            "--classes",
            ",".join(NEW),
            "--size",
            str(SIZE),
            "--out",
        ]
        found = at_once(work, [(f"cache-{number}-{tenant}", [*extend, out]) for tenant, out in enumerate(outs)])
        digests |= {digest(work / out) for out in outs}
        measured.append({"at_once": number, "features_cached": cached, **found})
        print(measured[-1], flush=True)
        record = {
            "photographs": args.photographs,
            "size": SIZE,
            "same_model": len(digests) == 1,
            "model_bytes": model_file(work / outs[0]).stat().st_size,
            "cache_bytes": sum(file.stat().st_size for file in (work / "cache-1-0").rglob("*") if file.is_file()),
            "runs": measured,
        }
        write_compact_json(RESULTS / "load.json", record)
        (RESULTS / "load.md").write_text(page(record))
    if len(digests) != 1:
        sys.exit("error: the extensions differ")


def at_once(work: Path, commands: Sequence[tuple[str, list[str]]]) -> dict[str, Any]:
    """Run several `incseg WORDS` at the same time with one thread each. Return their time and memory."""
    began = time.monotonic()
    pids = []
    for cache, words in commands:
        environment = {**os.environ, "INCSEG_CACHE": str(work / cache), "OMP_NUM_THREADS": "1"}
        pid = os.fork()
        if pid == 0:
            os.chdir(work)
            log = os.open(f"{cache}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.execve(sys.executable, [sys.executable, "-m", "incseg", *words, "--threads", "1"], environment)
        pids.append(pid)
    cpu, memory = [], []
    for pid in pids:
        _, status, usage = os.wait4(pid, 0)
        if status:
            sys.exit(f"error: {commands[0][1]} ended with {status}; see the logs in {work}")
        cpu.append(round(usage.ru_utime + usage.ru_stime, 1))
        memory.append(usage.ru_maxrss // 1024)
    return {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": cpu, "megabytes": memory}


_PAGE = """# Extensions at the same time

Made by `tools/load_extend.py --photographs {photographs}`: a model of two classes is extended by one, from real
photographs at shorter side {size}, by several processes at once, one thread each, on two cores. The machine was busy
with other work. Processor seconds and memory are of the processes themselves; seconds of the clock are not those of a
quiet machine.

| at once | features cached | seconds | processor seconds each | alone = 1 | memory each, MB |
|---:|---|---:|---:|---:|---:|
{rows}

All ended with {same}. The model file has {model:.1f} MB with its sums; the features
of the photographs have {cache:.1f} MB.
"""


def page(record: dict[str, Any]) -> str:
    rows = []
    alone = {run["features_cached"]: run["cpu_seconds"][0] for run in record["runs"] if run["at_once"] == 1}
    for run in sorted(record["runs"], key=lambda run: (run["features_cached"], run["at_once"])):
        each = statistics.mean(run["cpu_seconds"])
        cells = [
            run["at_once"],
            "yes" if run["features_cached"] else "no",
            f"{run['seconds']:.0f}",
            f"{each:.1f}",
            f"{each / alone[run['features_cached']]:.2f}",
            max(run["megabytes"]),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return _PAGE.format(
        photographs=record["photographs"],
        size=record["size"],
        rows="\n".join(rows),
        same="the same model, bit for bit" if record["same_model"] else "DIFFERENT models",
        model=record["model_bytes"] / 1e6,
        cache=record["cache_bytes"] / 1e6,
    )


def model_file(run: Path) -> Path:
    """Return a run's last model."""
    return max((run / "steps").glob("*/model.safetensors"), key=lambda file: int(file.parent.name))


def digest(run: Path) -> str:
    """Return a digest of the tensors of a run's last model."""
    return tensors_digest(read_tensors(model_file(run))[0])


def names(ccp: Path) -> list[str]:
    return sorted(path.stem for path in (ccp / "images").iterdir())[:300]


def shown(ccp: Path, name: str) -> set[str]:
    classes = (ccp / "classes.txt").read_text().split()
    mask = np.asarray(Image.open(ccp / "masks" / f"{name}.png"))
    return {classes[i - 1] for i in np.unique(mask) if 0 < i <= len(classes)}


def write_folder(ccp: Path, folder: Path, photographs: Sequence[str], classes: Sequence[str]) -> None:
    """Write a dataset that labels only these classes; photographs are linked."""
    known = (ccp / "classes.txt").read_text().split()
    table = np.zeros(256, np.uint8)
    table[255] = 255
    for number, name in enumerate(classes, start=1):
        table[known.index(name) + 1] = number
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    (folder / "classes.txt").write_text("\n".join(classes) + "\n")
    for name in photographs:
        image = next((ccp / "images").glob(f"{name}.*"))
        (folder / "images" / image.name).symlink_to(image.resolve())
        mask = np.asarray(Image.open(ccp / "masks" / f"{name}.png"))
        Image.fromarray(table[mask]).save(folder / "masks" / f"{name}.png")


if __name__ == "__main__":
    main()
