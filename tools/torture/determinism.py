"""Compare two runs with the same settings: bit-identical, or the size of the difference."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.torture.case import Lost, Running, incseg, own_folder
from tools.torture.runs import CACHED, largest_difference, settings

GROUP_NORM: dict[str, dict[str, Any]] = {"model": {"norm": "group"}}
Runner = Callable[[Path, dict[str, Any]], Path]


def matrix() -> list[dict[str, Any]]:
    """Return a row per pair of runs: how they were made, the settings, and the largest differences."""
    plain = functools.partial(_run, name="plain")
    compared: list[tuple[str, str, dict[str, Any], Runner, Runner]] = [
        ("the same seed twice", "", {}, plain, functools.partial(_run, name="again")),
        ("the same seed twice", "feature cache", CACHED, plain, functools.partial(_run, name="again")),
        ("killed and resumed", "", {}, plain, _resumed),
        ("killed and resumed", "feature cache", CACHED, plain, _resumed),
        ("0 or 2 loader processes", "", {}, plain, _two_workers),
        (
            "a cache made before or for the run",
            "feature cache",
            CACHED,
            plain,
            functools.partial(_run, name="again", cache="plain"),
        ),
        ("from the cache or from pixels", "feature cache", CACHED, plain, _from_pixels),
        ("1 or 2 threads", "", {}, plain, functools.partial(_run, name="threads", threads=2)),
        (
            "two processes twice",
            "group norm",
            GROUP_NORM,
            functools.partial(_two_processes, name="both"),
            _two_processes,
        ),
        ("1 or 2 processes", "group norm", GROUP_NORM, plain, _two_processes),
        ("1 or 2 processes", "batch norm: each process has statistics of its half", {}, plain, _two_processes),
        ("test batches of 3 or of 1", "", {}, plain, functools.partial(_run, name="batches", eval={"batch_size": 1})),
    ]
    rows = []
    for what, where, changes, one, other in compared:
        with own_folder() as folder:
            difference = largest_difference(one(folder, changes), other(folder, changes))
            rows.append({"runs": what, "settings": where, "identical": not any(difference.values()), **difference})
            print(f"determinism: {rows[-1]}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Two tiny runs of three steps on a CPU; the largest difference of any weight, of any mean loss of an epoch, "
        "and the share of test pixels that changed their class.",
        "",
        "| runs | settings | weights | losses | pixels |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        shown = [f"{row[name]:.1e}" if row[name] else "0" for name in ("weights", "losses", "pixels")]
        cells = ["bit-identical", "", ""] if row["identical"] else shown
        lines.append(f"| {row['runs']} | {row['settings']} | " + " | ".join(cells) + " |")
    return lines


def _changed(changes: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    joined = {key: {**value} if isinstance(value, dict) else value for key, value in changes.items()}
    for key, value in more.items():
        joined[key] = {**joined.get(key, {}), **value} if isinstance(value, dict) else value
    return joined


def _run(folder: Path, changes: dict[str, Any], name: str, cache: str = "", **more: Any) -> Path:
    command = settings(folder / f"{name}.yaml", folder / name, **_changed(changes, more))
    incseg(command, folder / f"cache-{cache or name}").succeeded()
    return folder / name


def _two_workers(folder: Path, changes: dict[str, Any]) -> Path:
    return _run(folder, changes, "workers", train={"workers": 2}, eval={"workers": 2})


def _from_pixels(folder: Path, changes: dict[str, Any]) -> Path:
    return _run(folder, changes, "pixels", data={"cache": "off"})


def _resumed(folder: Path, changes: dict[str, Any]) -> Path:
    changes = _changed(changes, {"train": {"checkpoint_seconds": 0.0}})
    command = settings(folder / "resumed.yaml", folder / "resumed", **changes)
    for file in ("checkpoint.safetensors", "steps/0/row.json", "steps/1/model.safetensors"):
        running = Running(command, folder / "cache-resumed")
        while not (folder / "resumed" / file).exists() and not running.ended():
            pass
        running.kill()
        running.wait()
    incseg(command, folder / "cache-resumed").succeeded()
    return folder / "resumed"


def _two_processes(folder: Path, changes: dict[str, Any], name: str = "two") -> Path:
    argv = settings(folder / f"{name}.yaml", folder / name, **changes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "incseg", *map(str, argv)],
        env={**os.environ, "INCSEG_CACHE": str(folder / f"cache-{name}"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode:
        raise Lost(f"two processes failed: {ended.stderr[-500:]}")
    return folder / name
