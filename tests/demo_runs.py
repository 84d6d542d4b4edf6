"""Run folders of random models for the demo's tests, as training writes them but without the training; and the
command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import until
from small_runs import small_config

from incseg.cli import main
from incseg.data.shapes import Shapes
from incseg.engine.rundir import RunDir
from incseg.io import write_json, write_text
from incseg.models.files import save_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.run import train
from incseg.types import Increment

SIZE = 48
STEPS = (("disc", "square", "triangle"), ("ring",), ("star", "cross"))


def random_run(folder: Path, method: str = "evidential", dataset: str = "shapes", seed: int = 3) -> Path:
    """Write a run of three steps whose models predict several classes."""
    torch.manual_seed(seed)
    run = RunDir(folder)
    write_text(run.config, "task: 3-1-2\n")
    palette = Shapes().palette
    model = Segmenter(
        ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 2, 3)), background_output=method != "evidential"
    )
    known: list[int] = [0]
    for step, classes in enumerate(STEPS):
        ids = tuple(Shapes.info.classes.index(name) + 1 for name in classes)
        known += ids
        model.grow(Increment(classes, ids, 20))
        for classifier in model.classifiers:
            torch.nn.init.normal_(classifier.get_parameter("weight"), std=0.7)
        about = {
            "incseg": "0",
            "method": {"name": method},
            "protocol": {"dataset": dataset, "task": "3-1-2"},
            "palette": palette[known].tolist(),
            "test_size": SIZE,
        }
        run.model(step).parent.mkdir(parents=True)
        save_segmenter(run.model(step), model.eval(), about)
        write_json(run.row(step), {"index": step})
    return folder


def demo_until_signal(
    arguments: list[str], number: int, capsys: pytest.CaptureFixture[str], visit: Callable[[str], Any]
) -> tuple[int, str]:
    """Run the command, open its address, and send it a signal. Return its exit code and output."""
    shown: list[str] = []

    def address() -> str | None:
        shown.append(capsys.readouterr().out)
        found = re.search(r"http://\S+", "".join(shown))
        return found and found[0]

    def visit_and_stop() -> None:
        try:
            visit(until(address, "the address is printed"))
        finally:
            os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as pool:
        visitor = pool.submit(visit_and_stop)
        code = main(["demo", *arguments])
        visitor.result()
    return code, "".join(shown) + capsys.readouterr().out


def small_analytic_run(folder: Path) -> Path:
    """Train two steps in closed form, in about a second: a model that can be taught."""
    config = small_config(
        folder,
        task="disc,square/ring",
        method={"name": "analytic", "base": "solved", "columns": 256},
        data={"image_size": SIZE, "train_size": 24, "val_size": 4},
        train={"scale": None, "frozen_later": "model"},
    )
    train(config)
    return folder
