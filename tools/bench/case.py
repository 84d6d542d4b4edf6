"""Run one case in this process and print its figures as JSON: `python -m tools.bench.case BENCH CASE SETTINGS`."""

from __future__ import annotations

import importlib
import json
import sys

import torch

from incseg.engine.runtime import is_main_process
from tools.bench.measure import Settings


def main(bench: str, case: str, settings: str) -> None:
    chosen = Settings(**json.loads(settings))
    torch.set_num_threads(chosen.threads)
    figures = importlib.import_module(f"tools.bench.{bench}").measure(case, chosen)
    if is_main_process():
        print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
