"""`incseg bench`: speed and memory as ratios on one machine, each against an aim. One file per bench."""

from __future__ import annotations

from collections.abc import Callable

from incseg.bench import cache, data, ddp, growth, loss, metrics, step
from incseg.bench.measure import Section, Settings

BENCHES: dict[str, Callable[[Settings], list[Section]]] = {
    "loss": loss.run,
    "step": step.run,
    "data": data.run,
    "metrics": metrics.run,
    "cache": cache.run,
    "growth": growth.run,
    "ddp": ddp.run,
}
