"""Processes that die: the group is restarted, resumes from the checkpoint, and ends with the same result.

The tests use torchrun's own agents (elastic launch with a c10d rendezvous over loopback, gloo). One process forks them,
so torch is imported once for all runs here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import PYTHON_PATH, TRUST, _Wrapped, assert_same_run, reevaluated_row, rows_of, small_config
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from incseg.engine.rundir import RunDir
from incseg.run import train

BATCH = 8  # of which three processes get 3, 3 and 2 images
TEST_IMAGES = 7
RUNS: dict[str, tuple[int, int, int | None]] = {
    "two": (1, 2, None),
    "three": (1, 3, None),
    "three-killed": (1, 3, 0),
    "nodes-killed": (2, 1, 1),  # compared with "two", which has as many processes
}
"""Nodes, processes in each, and the rank that is killed once."""


class Mortal(_Wrapped):
    """Fine-tuning. If the process is the victim, it kills itself once, in iteration 2 of step 1."""

    def extra(self, logits: Tensor, step: int, iteration: int) -> Tensor:
        marker = os.environ.get("INCSEG_TEST_KILLED")
        victim = os.environ["RANK"] == os.environ.get("INCSEG_TEST_VICTIM")
        if marker and victim and (step, iteration) == (1, 2) and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return logits.sum() * 0


def learn(out: str) -> None:
    """Run one process of a run."""
    torch.set_num_threads(1)
    settings = {"batch_size": BATCH, "epochs": 1, "epochs_later": 4, "checkpoint_seconds": 0.0}
    data = {"train_size": 16, "val_size": TEST_IMAGES}
    train(small_config(Path(out), task="6-4", method={"name": "test_elastic:Mortal"}, train=settings, data=data))


def agent(nodes: int, processes: int, out: str, port: int) -> None:
    """Do what torchrun does on one node."""
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id=Path(out).name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, learn)(out)


def launch_all(folder: str) -> None:
    for name, (nodes, processes, victim) in RUNS.items():
        out = str(Path(folder) / name)
        if victim is not None:
            os.environ |= {"INCSEG_TEST_KILLED": f"{out}.killed", "INCSEG_TEST_VICTIM": str(victim)}
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        agents = [context.Process(target=agent, args=(nodes, processes, out, port)) for _ in range(nodes)]
        for one in agents:
            one.start()
        for one in agents:
            one.join()
        assert all(one.exitcode == 0 for one in agents), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    done = subprocess.run(
        [sys.executable, "-c", f"import test_elastic; test_elastic.launch_all({str(folder)!r})"],
        env={
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            **TRUST,
            "OMP_NUM_THREADS": "1",
            "INCSEG_CACHE": str(folder / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("killed", "whole"), [("nodes", "two"), ("three", "three")])
def test_a_killed_process_costs_nothing(killed: str, whole: str, folder: Path) -> None:
    """Models, states, counts and rows are bit-identical to those of an undisturbed run with as many processes."""
    run = folder / f"{killed}-killed"
    assert Path(f"{run}.killed").exists()
    assert_same_run(folder / whole, run)
    said = (run / "log.txt").read_text()
    assert "resuming after step 0" in said
    assert said.count("step 0:") == 1


def test_every_test_image_counts_once(folder: Path) -> None:
    """2 and 3 processes share 7 images. Each true pixel counts once, and the row is that of one process."""
    for step in range(2):
        of_two, of_three = (np.load(RunDir(folder / name).confusion(step)).sum(axis=1) for name in ("two", "three"))
        np.testing.assert_array_equal(of_two, of_three)
        for name in ("two", "three"):
            row, again = rows_of(folder / name)[step], reevaluated_row(folder / name, step)
            ranked, ranked_again = (one.pop("unseen")["from_seen"] for one in (row, again))
            assert row == again
            assert row["test_images"] == TEST_IMAGES
            # scores are binned, and batches of another size may round one into the next bin
            assert ranked_again == (ranked and pytest.approx(ranked, rel=1e-3))


def test_the_environment_has_the_number_of_processes(folder: Path) -> None:
    kept: dict[str, Any] = {name: json.loads((folder / name / "environment.json").read_text()) for name in RUNS}
    assert {name: about["processes"] for name, about in kept.items()} == {
        name: nodes * processes for name, (nodes, processes, _) in RUNS.items()
    }
