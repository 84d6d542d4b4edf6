"""Runs of a second or two for the engine's tests, methods that fail on demand, and the comparison of run folders."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from rich.console import Console
from torch import Tensor

from incseg.cli import main
from incseg.config import DataConfig, RunConfig
from incseg.engine.evaluator import EvalConfig
from incseg.engine.progress import Screen, Task, showing
from incseg.engine.rundir import RunDir
from incseg.engine.trainer import TrainConfig
from incseg.io import TRUSTED, read_tensors
from incseg.losses.means import Term
from incseg.methods import METHODS
from incseg.methods.base import Method
from incseg.models.segmenter import ModelConfig
from incseg.presets import PRESETS
from incseg.protocol import Step
from incseg.run import evaluate
from incseg.types import Batch, Increment, Output, Prediction

PYTHON_PATH = os.pathsep.join(filter(None, sys.path))
"""For processes that a test starts: they see the package and the methods of tests that the test itself sees."""
GROUPS = ("data", "model", "train", "eval")
TRUST = {TRUSTED: "small_runs:Held,small_runs:Remembering,small_runs:Exploding,small_runs:noise"}
"""For processes that a test starts with a configuration that names these."""


def small_config(out: Path, **changes: Any) -> RunConfig:
    """Return the configuration of three steps of shapes, 6-2, which take about a second. Groups such as
    `train={"workers": 2}` change some settings."""
    config = RunConfig(
        task="6-2",
        seed=3,
        out=str(out),
        device="cpu",
        threads=1,
        data=DataConfig(train_size=32, val_size=8, image_size=48),
        model=ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 2, 3)),
        train=TrainConfig(epochs=2, batch_size=8, lr=0.1, lr_later=0.05, crop=48, scale=(0.7, 1.0), workers=0),
        eval=EvalConfig(size=48, batch_size=3, workers=0),
    )
    parts = {name: dataclasses.replace(getattr(config, name), **changes.pop(name, {})) for name in GROUPS}
    return dataclasses.replace(config, **parts, **changes)


def methods_that_differ(preset: str) -> list[str]:
    """Return the methods for which a preset has settings of their own, and one for which it has none. A parser takes a
    tenth of a second, and there are 160 pairs."""
    own = PRESETS[preset].get("for_method", {})
    return [*own, next(method for method in METHODS if method not in own)]


def write_config(config: RunConfig, path: Path) -> str:
    """Write a configuration to a file for --config, and return the file."""
    path.write_text(yaml.safe_dump(config.as_dict()))
    return str(path)


def noise(class_name: str, count: int, seed: int) -> list[Image.Image]:
    """Return photographs for methods with replay: `generator="small_runs:noise"`."""
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(count)]


def train_in_two_processes(*configs: RunConfig) -> None:
    """Train the runs one after the other in the same two processes, forked from one that imports torch for both."""
    folder = Path(configs[0].out).parent
    files = [write_config(config, folder / f"{config.folder.name}.yaml") for config in configs]
    script = "import sys, small_runs; small_runs._fork_two(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / "meeting"), *files],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", **TRUST},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def _fork_two(meeting: str, *files: str) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_one_of_two, args=(rank, meeting, *files)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


def _one_of_two(rank: int, meeting: str, *files: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for file in files:
        if code := main(["train", "--config", file]):
            sys.exit(code)


@contextlib.contextmanager
def listening() -> Iterator[io.StringIO]:
    """Yield the output of a screen that shows the block."""
    shown = io.StringIO()
    with showing(Screen(Console(file=shown, width=2000))):
        yield shown


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without the seconds, which differ between runs."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in RunDir(folder).rows()]


def reevaluated_row(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Return the row of a saved step that is evaluated again, with the values that only training knows."""
    row = evaluate(folder, step)
    trained = rows_of(folder)[row["index"]]
    return {**row, **{key: trained[key] for key in ("losses", "gradient", "reused_from")}}


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that rows, counts and all tensors of all steps are bit-identical."""
    assert rows_of(one) == rows_of(other)
    assert RunDir(one).steps_done() == RunDir(other).steps_done() != []
    for step in RunDir(one).steps_done():
        for file in (RunDir.model, RunDir.state):
            mine, my_metadata = read_tensors(file(RunDir(one), step))
            theirs, their_metadata = read_tensors(file(RunDir(other), step))
            assert my_metadata == their_metadata
            assert mine.keys() == theirs.keys()
            for name in mine:
                assert torch.equal(mine[name], theirs[name]), f"step {step}, {name}"
        counts = [np.load(RunDir(folder).confusion(step)) for folder in (one, other)]
        np.testing.assert_array_equal(*counts)
    finals = [json.loads(RunDir(folder).results.read_text())["final"] for folder in (one, other)]
    assert finals[0] == finals[1]


class Interrupting(Screen):
    """A screen that raises Ctrl-C when something has been shown `after` times: `with showing(Interrupting("step 0/2",
    3))`."""

    def __init__(self, what: str, after: int = 1) -> None:
        super().__init__(Console(file=io.StringIO()))
        self._awaited, self._left = what, after

    def _shown(self, what: str) -> None:
        if what == self._awaited or self._awaited == "anything":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt

    def begin(self, what: str, total: int, done: int = 0) -> Task:
        self._shown(f"begin {what}")
        return super().begin(what, total, done)

    def advance(self, task: Task, amount: int = 1, detail: str = "") -> None:
        self._shown(task.what)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "table", None) is not None:  # "step 0: Base …"
            self._shown(f"row {record.getMessage().split()[1].rstrip(':')}")


class _Wrapped(Method):
    """Fine-tuning with a change of its losses. It counts the updates of a step in its state."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._updates = torch.zeros((), dtype=torch.int64)

    def begin_step(self, context: Any) -> None:
        self._updates = torch.zeros((), dtype=torch.int64)

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        losses = super().losses(batch, out, teacher, step)
        losses["extra"] = self.extra(out.logits, step.index, int(self._updates))
        self._updates = self._updates + 1
        return losses

    def extra(self, logits: Tensor, step: int, iteration: int) -> Tensor:
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        return {"updates": self._updates}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._updates = state["updates"]


class Exploding(_Wrapped):
    """A method whose loss, or only its gradient, is not finite at iteration 2 of step 1."""

    @dataclasses.dataclass
    class Config:
        part: str = "loss"

    def extra(self, logits: Tensor, step: int, iteration: int) -> Tensor:
        if (step, iteration) != (1, 2):
            return logits.sum() * 0
        if self.config.part == "loss":
            return logits.sum() * torch.nan
        return (logits.sum() - logits.sum().detach()).sqrt()  # the root has an infinite slope at 0


class Held(_Wrapped):
    """A method that waits in iteration 1 of step 1 until the file named by the environment is deleted. Dropout draws
    numbers."""

    def extra(self, logits: Tensor, step: int, iteration: int) -> Tensor:
        hold = os.environ.get("INCSEG_TEST_HOLD")
        if hold and (step, iteration) == (1, 1):
            Path(hold).touch()
            deadline = time.monotonic() + 60
            while Path(hold).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return torch.nn.functional.dropout(logits, 0.5).square().mean()


class Remembering(_Wrapped):
    """A method whose prediction depends on its state from `end_step`: background except where the state says
    otherwise."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._favourite = torch.zeros((), dtype=torch.int64)

    def extra(self, logits: Tensor, step: int, iteration: int) -> Tensor:
        return logits.sum() * 0

    def end_step(self, context: Any) -> None:
        labelled = sum(batch.counts[1:255] for batch in context.images.batches())
        self._favourite = labelled.argmax() + 1  # type: ignore[union-attr]

    def predict(self, logits: Tensor, increments: list[Increment]) -> Prediction:
        prediction = super().predict(logits, increments)
        labels = torch.full_like(prediction.labels, int(self._favourite))
        return Prediction(labels, prediction.probabilities, prediction.uncertainty)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "favourite": self._favourite}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self._favourite = state["favourite"]
