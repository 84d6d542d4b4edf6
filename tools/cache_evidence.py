"""Measure the cost and the exactness of the feature cache: results/voc-laptop/cache.md and .json.

    incseg train --preset voc-laptop --data voc --root VOC2012 --task 15-1 --threads 2 --reuse false --out RUN
    python tools/cache_evidence.py RUN --root VOC2012

RUN is a finished run with cached features. The page has the time of the run, the time of computing the features (from
the dates of their files), the difference between cached and newly computed features, and the figures of the last model
with both. `python -m tools.bench cache` measures how fast training reads them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incseg.config import RunConfig, load_run_config
from incseg.data.features import StoredCache, stored_caches
from incseg.data.loaders import Loaders
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import started
from incseg.io import cache_path, read_json, write_compact_json, write_text
from incseg.methods import build_method
from incseg.metrics import FIGURES
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.report.writers import code_block, markdown_table
from incseg.run import Setup, evaluate
from incseg.types import UserError

BATCH = 16


def making(cache: StoredCache) -> float:
    """Return the seconds of computing a cache: from its first block to its last, plus one block."""
    times = sorted(file.stat().st_mtime for file in cache.files() if file.suffix == ".bin")
    return (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)


def features(loaders: Loaders, model: Segmenter, setup: Setup, images: int) -> Iterator[list[Tensor]]:
    """Yield the features of the first test images, then of the first images of step 0."""
    first, last = setup.protocol.steps[0], setup.protocol.steps[-1]
    batches = -(-images // BATCH)
    for inputs, _, _ in (
        *islice(loaders.testing(last, range(images), BATCH), batches),
        *islice(loaders.plain(first, BATCH), batches),
    ):
        yield list(model.features(inputs) if isinstance(inputs, Tensor) else inputs)


@torch.no_grad()
def agreement(config: RunConfig, run: Path, images: int) -> dict[str, float]:
    """Return the share of cached values that equal the new ones in half precision, and the largest difference."""
    method = build_method(config.method)
    equal = count = 0
    farthest = largest = 0.0
    with started("cpu", "float32", config.threads) as runtime:
        setup = Setup.of(config, method)
        model, _ = load_segmenter(RunDir(run).model(len(setup.protocol.steps) - 1))
        model.eval()
        fresh_config = replace(config, data=replace(config.data, cache="off"))
        cached_loaders, fresh_loaders = (setup.loaders(c, model, runtime, train=True) for c in (config, fresh_config))
        pairs = zip(
            features(cached_loaders, model, setup, images),
            features(fresh_loaders, model, setup, images),
            strict=True,
        )
        for pair in pairs:
            for cached, new in zip(*pair, strict=True):
                equal += int((cached.half() == new.half()).sum())
                count += cached.numel()
                farthest = max(farthest, float((cached.float() - new).abs().max()))
                largest = max(largest, float(new.abs().max()))
    return {"values": count, "equal_in_half": equal / count, "farthest": farthest, "largest": largest}


def tested(run: Path, config: RunConfig, cache: str) -> dict[str, Any]:
    overrides = {"data": replace(config.data, cache=cache), "threads": config.threads}
    return evaluate(run, None, {}, overrides)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of voc-laptop")
    parser.add_argument("--root", required=True, help="VOC2012 or the VOCdevkit around it")
    parser.add_argument("--images", type=int, default=64, help="images of each split whose features are computed again")
    parser.add_argument("--out", type=Path, default=Path("results/voc-laptop/cache"))
    args = parser.parse_args()
    try:
        config = load_run_config(args.run)
        config.data.root = args.root
        rows, environment = RunDir(args.run).rows(), read_json(RunDir(args.run).environment)
        caches = [c for c in stored_caches(cache_path("features")) if c.folder.name.startswith(config.data.name)]
        found = agreement(config, args.run, args.images)
        both = {name: tested(args.run, config, cache) for name, cache in (("kept", "auto"), ("made anew", "off"))}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = {name: sum(row["seconds"][name] for row in rows) for name in ("train", "eval")}
    data = {
        "making": {c.folder.name: {"images": c.images_done, "bytes": c.bytes, "seconds": making(c)} for c in caches},
        "run": {"seconds": seconds, "steps": len(rows), "threads": environment["threads"],
                "commit": environment["commit"], "reused": [row["reused_from"] is not None for row in rows]},
        "agreement": found,
        "figures": {name: {figure: row[figure] for figure in FIGURES} for name, row in both.items()},
    }  # fmt: skip
    write_compact_json(args.out.with_suffix(".json"), data)
    write_text(args.out.with_suffix(".md"), page(data, config, args))
    print(f"wrote {args.out}.md and .json")
    return 0


def page(data: dict[str, Any], config: RunConfig, args: argparse.Namespace) -> str:
    run, found, making_of = data["run"], data["agreement"], data["making"]
    made = [
        [
            name.rsplit("-", 1)[0].replace("-", " "),
            f"{one['images']}",
            f"{one['bytes'] / 1e9:.2f}",
            clock(one["seconds"]),
        ]
        for name, one in making_of.items()
    ]
    made.append(["together", "", "", clock(sum(one["seconds"] for one in making_of.values()))])
    reused = ", some of them taken from earlier runs with the time that they took there" if any(run["reused"]) else ""
    paragraphs = [
        "# The feature cache: what it takes, and whether it agrees",
        "\n".join(markdown_table(["features kept", "images", "GB", "min:s"], made)),
        f"The budget is 20 minutes. {config.task} {config.setting} from them, {run['steps']} steps with tests, "
        f"{run['threads']} threads{reused}: {clock(sum(run['seconds'].values()))}, of which tests "
        f"{clock(run['seconds']['eval'])}; the budget is 15 minutes. Commit {run['commit']}.",
        f"Of {found['values'] / 1e6:.1f} million values of {args.images} test and {args.images} training images "
        f"{100 * found['equal_in_half']:.3f} % are, in half precision, those that the backbone gives anew; the "
        f"farthest is off by {found['farthest']:.1e}, the largest value is {found['largest']:.1f}. The last model of "
        "the run, tested with either:",
        "\n".join(
            markdown_table(
                ["features", *(figure.capitalize() for figure in FIGURES)],
                [[name, *(f"{values[figure]:.2f}" for figure in FIGURES)] for name, values in data["figures"].items()],
            )
        ),
        "How fast training reads them: `python -m tools.bench cache`, [results/bench.md](../bench.md). That a cache "
        "survives `kill -9` while it is made: tests/test_features.py.",
        "Commands:",
        "\n".join(
            code_block(
                [
                    f"incseg train --preset voc-laptop --data voc --root VOC2012 --task {config.task} "
                    f"--threads {run['threads']} --reuse false --out {args.run.name}",
                    f"python tools/cache_evidence.py {args.run.name} --root VOC2012",
                ]
            )
        ),
    ]
    return "\n\n".join(paragraphs) + "\n"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    sys.exit(main())
