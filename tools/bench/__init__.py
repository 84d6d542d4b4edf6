"""Benchmarks: speed and memory as ratios on one machine, each against a target. One file per benchmark."""

from __future__ import annotations

from collections.abc import Callable

from tools.bench import cache, data, ddp, growth, loss, metrics, step
from tools.bench.measure import Section, Settings

BENCHES: dict[str, Callable[[Settings], list[Section]]] = {
    "loss": loss.run,
    "step": step.run,
    "data": data.run,
    "metrics": metrics.run,
    "cache": cache.run,
    "growth": growth.run,
    "ddp": ddp.run,
}
