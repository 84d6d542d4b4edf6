"""Sweeps on Ray: two nodes on this machine, both at 127.0.0.1. It takes a minute, so it runs only if Ray is installed.

`make test-ray` and CI run it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run
from sweeps import FAKE, QUICK, jobs, notes, until

from incseg.cli.main import parse
from incseg.cli.sweep import plan
from incseg.sweep.folder import Sweep
from incseg.sweep.local import Local
from incseg.sweep.on_ray import Ray
from incseg.sweep.plan import make_runs
from incseg.types import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'incseg[ray]', or make test-ray")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 80_000_000, "num_gpus": 0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # Ray replaces 127.0.0.1 in an address by the address of the machine, at which nothing of ours may listen.
        patch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: host)
        patch.setenv("RAY_worker_niceness", "0")  # else its tasks get nothing where others are busy
        head = {**NODE, "num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**NODE, num_cpus=1)
        with contextlib.closing(_Closing(cluster)):
            yield cluster


class _Closing:
    def __init__(self, cluster: Any) -> None:
        self.close = cluster.shutdown


def test_failures_and_ctrl_c(cluster: Any, root: Path) -> None:
    """As on this machine: a failure stops nothing else, Ctrl-C saves, and the same command resumes."""
    engine = Ray(cluster.address, program=FAKE)
    Sweep(root).add([*jobs("a", "b", base="x"), *jobs("c", fails=True), *jobs("d", dies=True)])
    lines: list[str] = []
    assert make_runs(root, [], engine, lines.append) == {"done": 2, "failed": 2}
    assert lines[0] == "Ray: 2 nodes, 2 CPUs, 0 GPUs"
    assert notes(root).count("began a--base") == 1
    assert any(line.startswith("c: failed: no such thing; give another") for line in lines)
    assert any(line.startswith("d: failed: killed by SIGKILL") for line in lines)

    (root / "hold").touch()
    Sweep(root).add(jobs("e"))
    with ThreadPoolExecutor(1) as pool:
        interrupt = pool.submit(lambda: (until(lambda: "began e" in notes(root)), os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            make_runs(root, [], engine, lines.append)
        interrupt.result()
    assert notes(root)[-1] == "saved e"
    (root / "hold").unlink()
    assert make_runs(root, [], engine, lines.append) == {"done": 3, "failed": 2}


def test_a_node_is_killed_and_all_runs_finish_as_on_this_machine(
    cluster: Any, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """kill -9 of a node and its run in the middle of a step: another node resumes it. No step is trained twice."""
    flags = [f"--{key}={value}" for key, value in {**QUICK, "train.epochs": 4, "train.checkpoint_seconds": 0.0}.items()]
    argv = ["--out", str(root), "--method", "finetune,mib,lwf", "--task", "6-2", *flags]
    wanted, sweep = plan(parse("sweep", argv)), Sweep(root)
    killed: list[str] = []

    def kill() -> None:
        raylet = next(iter(cluster.worker_nodes)).all_processes["raylet"][0].process.pid

        def victim() -> tuple[str, int, int] | None:
            for job in wanted:
                holder = sweep.worker(job)
                run = int(holder.split()[1]) if holder else 0
                if run and sweep.run(job.name).checkpoint.exists() and _parent(_parent(run)) == raylet:
                    return job.name, _parent(run), run
            return None

        found: list[tuple[str, int, int]] = []
        until(lambda: bool(found.extend(filter(None, [victim()])) or found), 600.0)
        name, *processes = found[0]
        for process in (processes[0], raylet, processes[1]):  # the one that watches the run first, as if all at once
            os.kill(process, signal.SIGKILL)
        killed.append(name)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert make_runs(root, wanted, Ray(cluster.address), print) == {"done": 3}
    thread.join()
    assert len(killed) == 1
    for job in wanted:
        log = sweep.run(job.name).log.read_text()
        assert [log.count(f"  step {step}: Base") for step in range(3)] == [1, 1, 1]
    print(killed)

    on_ray = tmp_path / "on-ray"
    root.rename(on_ray)
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "another-cache"))
    assert make_runs(root, wanted, Local(2), lambda text: None) == {"done": 3}
    for job in wanted:
        assert_same_run(root / job.name, on_ray / job.name)


def test_no_cluster_at_an_address_is_one_line(root: Path) -> None:
    Sweep(root).add(jobs("a"))
    with pytest.raises(UserError, match="no Ray cluster at nowhere"):
        make_runs(root, [], Ray("nowhere"))


def _parent(pid: int) -> int:
    found = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True).stdout
    return int(found or 0)
