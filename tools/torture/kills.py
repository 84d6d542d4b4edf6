"""kill -9 at random moments: the same command resumes and ends bit-identical to an undisturbed run."""

from __future__ import annotations

import functools
import mmap
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from logging import LogRecord
from pathlib import Path
from typing import Any

from incseg import io
from incseg.data import features as feature_store
from incseg.engine import step_cache
from incseg.engine.progress import Screen, Task
from tools.torture.case import Case, Kind, Lost, Running, incseg
from tools.torture.runs import CACHED, require_same, settings

RUNS: dict[str, dict[str, Any]] = {
    "from pixels": {},
    "from pixels, two loader processes": {"train": {"workers": 2}, "eval": {"workers": 2}},
    "frozen backbone with its feature cache": CACHED,
    "trained steps kept for others (--reuse)": {"reuse": True},
}
MUST = dict.fromkeys(RUNS, "the same command goes on, and every tensor of every step is that of an undisturbed run")
MUST["while several runs fill one cache"] = "the others go on and end as they would alone"
_KILLS = 50
_moments: Counter[str] = Counter()


def cases(seed: int, quick: bool) -> list[Case]:
    draw = random.Random(seed)
    chains = 1 if quick else 3
    kills = 2 if quick else -(-_KILLS // (chains * len(RUNS)))
    names = list(RUNS)[2:3] if quick else list(RUNS)
    found = [
        Case(
            name,
            f"chain {chain} of {kills} kills",
            functools.partial(_chain, name, kills, draw.randrange(2**32)),
            kills,
        )
        for name in names
        for chain in range(chains)
    ]
    if not quick:
        found.append(Case("while several runs fill one cache", "three runs, one killed", _killed_beside_others))
    return found


def _chain(name: str, kills: int, seed: int, folder: Path) -> None:
    """Kill and resume a run again and again, then let it end. Start a new one if it ends before all kills are done."""
    draw = random.Random(seed)
    undisturbed, seconds = _undisturbed(name)
    done, attempt = 0, 0
    while done < kills:
        out, cache = folder / f"run{attempt}", folder / f"cache{attempt}"
        attempt += 1
        command = settings(folder / "settings.yaml", out, **_every_update(RUNS[name]))
        while done < kills:
            if not _killed(command, cache, draw.uniform(0, 0.8 * seconds)):
                break
            done += 1
        incseg(command, cache).succeeded()
        require_same(undisturbed, out)
        if left := [file for place in (out, cache) for file in place.rglob(".*.tmp")]:
            raise Lost(f"a half-written file is still there: {left[0].name}")


def _every_update(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a checkpoint after every update, so that many kills happen while one is written."""
    return {**changes, "train": {**changes.get("train", {}), "checkpoint_seconds": 0.0}}


@functools.cache
def _undisturbed(name: str) -> tuple[Path, float]:
    """Return an undisturbed run, and the seconds that it takes."""
    folder = Path(tempfile.mkdtemp(prefix="torture-undisturbed-"))
    command = settings(folder / "settings.yaml", folder / "run", **_every_update(RUNS[name]))
    ended = incseg(command, folder / "cache").succeeded()
    return folder / "run", ended.seconds


def _killed(command: list[object], cache: Path, seconds: float) -> bool:
    """Run a command and kill -9 it after this time. Count what it was doing. Return False if it had ended before."""
    shared = mmap.mmap(-1, 256)
    running = Running(command, cache, functools.partial(_report_activity, shared))
    while not running.ended() and time.monotonic() - running.started < seconds:
        time.sleep(0.0005)
    if running.ended():
        running.wait().succeeded()
        return False
    running.kill()
    running.wait()
    _moments[shared[:].rstrip(b"\0").decode() or "starting"] += 1
    return True


def _report_activity(shared: mmap.mmap) -> None:
    """Patch this process to write what it is doing to shared memory, for the process that kills it."""

    def report(text: str) -> None:
        shared[:] = text.encode()[:256].ljust(256, b"\0")

    begin, emit, replacing = Screen.begin, Screen.emit, io.replacing
    phase = ["starting"]

    def began(self: Screen, what: str, *more: Any, **named: Any) -> Task:
        phase[0] = "evaluation" if what.startswith("test") else "training" if what.startswith("step") else "features"
        report(phase[0])
        return begin(self, what, *more, **named)

    def shown(self: Screen, record: LogRecord) -> None:
        if getattr(record, "table", None) is not None:
            phase[0] = "between steps"
            report(phase[0])
        emit(self, record)

    @contextmanager
    def writing(path: Path) -> Iterator[Path]:
        kind = {"checkpoint.safetensors": "checkpoint", "model.safetensors": "model", "row.json": "row"}.get(path.name)
        kind = kind or ("cache" if path.name.startswith("block-") else "other file")
        report(f"writing: {kind}")
        with replacing(path) as temporary:
            yield temporary
        report(phase[0])

    Screen.begin, Screen.emit = began, shown  # type: ignore[method-assign]
    patched: Callable[[Path], AbstractContextManager[Path]] = writing
    for module in (io, step_cache, feature_store):
        module.replacing = patched  # type: ignore[attr-defined]


def _killed_beside_others(folder: Path) -> None:
    """Start three runs with different seeds and an empty shared cache, and kill one of them."""

    def command(place: str, seed: int) -> list[object]:
        return settings(folder / f"{place}{seed}.yaml", folder / f"{place}{seed}", seed=seed, **CACHED)

    running = [Running(command("beside", seed), folder / "cache") for seed in range(3)]
    while not list(folder.glob("cache/features/*/about.json")) and not running[0].ended():
        time.sleep(0.0005)
    running[0].kill()
    for one in running:
        one.wait()
    for seed in range(3):
        incseg(command("beside", seed), folder / "cache").succeeded()
        incseg(command("alone", seed), folder / f"cache{seed}").succeeded()
        require_same(folder / f"alone{seed}", folder / f"beside{seed}")


KIND = Kind("kills", MUST, cases, lambda: {"moments": dict(_moments.most_common())})
