"""The harness: each round runs all candidates in turn, ratios are within a round, memory is of new processes."""

from __future__ import annotations

import ctypes
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from incseg.types import UserError

Figures = dict[str, float]
_REPOSITORY = Path(__file__).resolve().parents[2]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Settings:
    """quick: tiny sizes that only test the bench; threads: of torch; root: folder of VOC, for benches that use it."""

    quick: bool = False
    threads: int = 1
    repeats: int = 5
    root: str | None = None

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some figures."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, scale: float = 1.0) -> str:
        """Return 12.3 (11.9–13.0)."""
        middle, low, high = (_short(value * scale) for value in (self.median, self.low, self.high))
        return f"{middle} ({low}–{high})"


def _short(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Aim:
    """A target for a ratio, compared with its median over the rounds."""

    what: str
    kind: Literal["at least", "at most"]
    limit: float
    measured: Spread

    @property
    def met(self) -> bool:
        value = self.measured.median
        return value >= self.limit if self.kind == "at least" else value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Section:
    """One table of the page. `figures` has all its measurements, for the JSON file and the plots."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    aims: Sequence[Aim]
    notes: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "aims": [aim.as_dict() for aim in self.aims]}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the ratios round by round, so that a temporary slowdown of the machine affects both sides."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(work: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the figures of each of `work`, called once per round. The first round is a warm-up and left out."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, once in work.items():
            figure = once()
            if number:
                found[name].append(figure)
    return found


def fresh(
    bench: str, cases: Sequence[str], settings: Settings, processes: Mapping[str, int] | None = None
) -> dict[str, list[Figures]]:
    """Return the figures of every case, in turn, each from a new process (or `processes`, by torchrun)."""
    found: dict[str, list[Figures]] = {case: [] for case in cases}
    for _ in range(settings.repeats):
        for case in cases:
            found[case].append(_one_process(bench, case, settings, (processes or {}).get(case, 1)))
    return found


def _one_process(bench: str, case: str, settings: Settings, processes: int) -> Figures:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    module = ["-m", "tools.bench.case", bench, case, json.dumps(asdict(settings))]
    command = [sys.executable, *(torchrun if processes > 1 else []), *module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]  # torchrun prints more after it
        reason = errors[-1] if errors else f"exit code {done.returncode}"
        raise UserError(f"bench {bench}, case {case} failed ({reason}); run it alone: python -m tools.bench {bench}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def cost(prepare: Callable[[Settings], Callable[[], object]], settings: Settings, calls: int = 2) -> Figures:
    """Return the seconds of the fastest call, and the highest peak of memory above the level before a call.

    A call at the quick size comes first, so that the first use of a library is not counted. Memory that the allocator
    retains from an earlier call is not counted either.
    """
    prepare(replace(settings, quick=True))()
    work = prepare(settings)
    taken, extra = [], [1]
    for _ in range(calls):
        _give_back_free_memory()
        before = _restart_peak()
        taken.append(seconds(work))
        extra.append(_peak() - before)
    return {"seconds": min(taken), "extra_bytes": max(extra)}


def _give_back_free_memory() -> None:
    with suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _restart_peak() -> int:
    """Restart the peak of memory and return the bytes in use.

    Without /proc, getrusage is used. Its peak is that of the parent after fork and exec, and never falls.
    """
    with suppress(OSError):
        _CLEAR.write_text("5")
    return _peak()


def _peak() -> int:
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
