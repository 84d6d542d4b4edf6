"""Two processes do the work of one: same data, same loss, same counts; and they end together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import PYTHON_PATH, TRUST, reevaluated_row, rows_of, small_config, write_config

from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.io import read_tensors
from incseg.run import train
from incseg.types import UserError


def test_two_processes_equal_one(tmp_path: Path) -> None:
    # Group norm, because the statistics of a batch norm on the CPU are those of each process's half of the batch.
    alone, both = (
        small_config(tmp_path / name, model={"norm": "group"}, data={"val_size": 7}, train={"epochs": 1})
        for name in ("alone", "both")
    )
    train(alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "incseg", "train", "--config", write_config(both, tmp_path / "both.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder:") == 1, "only one process speaks"
    assert len((both.folder / "log.txt").read_text().splitlines()) == 3
    assert len(list((both.folder / "tensorboard").glob("*"))) in (0, 1)
    for step, (one, two) in enumerate(zip(rows_of(alone.folder), rows_of(both.folder), strict=True)):
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
        mine, theirs = (read_tensors(RunDir(config.folder).model(step))[0] for config in (alone, both))
        for name in mine:
            torch.testing.assert_close(theirs[name], mine[name], rtol=1e-4, atol=1e-5)
        counted, recounted = (np.load(RunDir(config.folder).confusion(step)) for config in (alone, both))
        np.testing.assert_array_equal(counted.sum(axis=1), recounted.sum(axis=1), "each true pixel once")
        assert np.abs(counted - recounted).sum() <= 1e-3 * counted.sum()
        assert two["test_images"] == one["test_images"]


def test_two_processes_agree_on_batch_statistics_and_end_together(tmp_path: Path) -> None:
    """The same two processes train a run with batch norm, then one that fails in the main process."""
    config = small_config(tmp_path / "run", task="8-2", train={"epochs": 1}, method={"name": "small_runs:Remembering"})
    script = f"""
import os, sys, torch.distributed as dist
from incseg.cli import main
dist.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=int(sys.argv[1]), world_size=2)
assert main(["train", "--config", {write_config(config, tmp_path / "settings.yaml")!r}]) == 0
code = main(["train", "--data", "voc", "--root", {str(tmp_path / "absent")!r}])
sys.stdout.flush()
os._exit(code)  # gloo's threads may abort at the end of a process whose peer has gone
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": PYTHON_PATH,
                **TRUST,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (main_out, main_errors), (other_out, other_errors) = (process.communicate(timeout=90) for process in processes)
    assert [process.returncode for process in processes] == [2, 2], main_errors + other_errors
    assert main_errors.startswith("error: no VOC2012")
    assert main_errors.count("\n") == 1
    assert other_errors == "error: the main process of this run has stopped; see its own error\n"
    assert "run folder:" in main_out
    assert other_out == ""
    for step, row in enumerate(rows_of(config.folder)):
        assert reevaluated_row(config.folder, step) == row


def test_fewer_images_in_a_batch_than_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path / "run", train={"batch_size": 1})
    monkeypatch.setattr(Runtime, "__init__", _second_of_two)
    monkeypatch.setattr(Runtime, "main_first", lambda self, make: make())
    monkeypatch.setattr(Runtime, "wrap", lambda self, model: model)
    with pytest.raises(UserError, match=r"train\.batch_size is 1, less than the 2 processes"):
        train(config)


def _second_of_two(self: Runtime, *settings: object) -> None:
    self.rank, self.world, self.device, self.precision = 1, 2, torch.device("cpu"), torch.float32
    self._owns_group = False
