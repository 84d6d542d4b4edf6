"""`python -m incseg.bench BENCH CASE SETTINGS`: one case in this process, its figures as JSON."""

from __future__ import annotations

import importlib
import json
import sys

import torch

from incseg.bench.measure import Settings
from incseg.engine.runtime import speaks


def main(bench: str, case: str, settings: str) -> None:
    chosen = Settings(**json.loads(settings))
    torch.set_num_threads(chosen.threads)
    figures = importlib.import_module(f"incseg.bench.{bench}").measure(case, chosen)
    if speaks():
        print(json.dumps(figures))


main(*sys.argv[1:])
