"""Training from kept features against the head's pure arithmetic: results/voc-laptop/speed.md and .json.

    python scripts/cache_speed.py --root VOC2012

Both do the same updates of the evidential head of voc-laptop, in turn, a few rounds: once with batches read from the
cache by the run's own feed, once with batches that lie in memory already. The ratio says what reading costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from incseg.cli.settings import parse_run
from incseg.data.feeds import Loaded
from incseg.data.views import EpochOrder
from incseg.engine.progress import Silent
from incseg.engine.runtime import started
from incseg.experiment import Setup
from incseg.methods import build_method
from incseg.models.segmenter import build_segmenter
from incseg.types import Batch, Increment

ROUNDS, UPDATES = 7, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/voc-laptop"))
    args = parser.parse_args()
    config = parse_run(
        "cache_speed",
        "",
        ["--preset", "voc-laptop", "--data", "voc", "--root", args.root, "--threads", str(args.threads)],
    )
    method = build_method(config.method)
    with started(config.device, config.precision, config.threads) as runtime:
        setup = Setup.of(config, method, Silent())
        model = build_segmenter(config.model, method.background_output, lambda line: None)
        feed = setup.feed(config, model, runtime, Silent(), train=True)
        step = setup.protocol.steps[0]
        images = len(setup.train_images[0])
        model.grow(Increment(step.names, step.new, images))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01, 0.9, nesterov=True)

        def update(batches: Iterable[Loaded]) -> int:
            model.train()
            seen = 0
            for inputs, labels, indices in batches:
                batch = Batch(inputs, labels, torch.bincount(labels.flatten(), minlength=256).float())
                total = torch.stack(list(method.losses(batch, model(inputs), None, step).values())).sum()
                optimizer.zero_grad(set_to_none=True)
                total.backward()
                optimizer.step()
                seen += len(indices)
            return seen

        def from_cache(first: int) -> Iterator[Loaded]:
            order = EpochOrder(images, config.train.batch_size, 100, (config.seed, 0), first)
            return islice(feed.training(step, order), UPDATES)

        in_memory = list(islice(from_cache(0), 4)) * (UPDATES // 4)
        update(in_memory)
        rates: dict[str, list[float]] = {"cache": [], "arithmetic": []}
        for round_ in range(ROUNDS):
            for name, batches in (("cache", from_cache((round_ + 1) * UPDATES)), ("arithmetic", in_memory)):
                began = time.perf_counter()
                seen = update(batches)
                rates[name].append(seen / (time.perf_counter() - began))
    ratios = [cache / pure for cache, pure in zip(rates["cache"], rates["arithmetic"], strict=True)]
    figures = {name: {"median": statistics.median(r), "all": r} for name, r in {**rates, "ratio": ratios}.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "speed.json").write_text(json.dumps(figures, indent=1) + "\n")
    lines = [
        "# Training from the feature cache",
        "",
        "| | images/s, median | lowest | highest |",
        "|---|---|---|---|",
        *(f"| {n} | {statistics.median(r):.1f} | {min(r):.1f} | {max(r):.1f} |" for n, r in rates.items()),
        f"| ratio | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |",
        "",
        f"{ROUNDS} rounds of {UPDATES} updates of {config.train.batch_size} images in turn, {args.threads} threads, "
        "base step of 15-1 overlapped. `cache` reads, converts and relabels by the run's own feed; `arithmetic` has "
        "its batches in memory.",
        "",
        "Command: `python scripts/cache_speed.py --root VOC2012`",
        "",
    ]
    (args.out / "speed.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
