"""Sweeps on SLURM: submitit's local executor makes the runs; a stand-in for sbatch shows what SLURM would get."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from pathlib import Path

import pytest
from sweeps import FAKE, jobs, notes, until

from incseg.cli import sweep as command
from incseg.sweep import attempt
from incseg.sweep.folder import Sweep
from incseg.sweep.on_slurm import Slurm
from incseg.sweep.plan import make_runs
from incseg.types import UserError

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'incseg[slurm]'")

SBATCH = """#!/bin/sh
cp "$1" "$FAKE_SLURM/script-$(ls "$FAKE_SLURM" | wc -l)"
echo "Submitted batch job $(ls "$FAKE_SLURM" | wc -l)"
"""
SQUEUE = """#!/bin/sh
echo "$@" | grep -q -- "--array .*--format=%i" && for n in 1 2 3; do echo "$n"; echo "${n}_0"; echo "${n}_1"; done
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(attempt, "_LOOK_SECONDS", 0.05)
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


def test_jobs_make_the_runs_with_their_base_first(root: Path) -> None:
    """A failure, a base, and a run that dies, as on this machine."""
    Sweep(root).add([*jobs("a", "b", base="x"), *jobs("c", fails=True), *jobs("d", dies=True)])
    lines: list[str] = []
    states = make_runs(root, [], Slurm(parameters=["cluster=local"], program=FAKE), lines.append)
    assert states == {"done": 2, "failed": 2}
    at = notes(root).index
    assert at("ended a--base") < min(at("began a"), at("began b"))
    assert notes(root).count("began a--base") == 1
    assert any(line.startswith("c: failed: no such thing; give another") for line in lines)
    assert any(line.startswith("d: failed: killed by SIGKILL") for line in lines)


def test_a_job_that_is_preempted_saves_its_run_and_continues(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's signal saves the run, and the job that is queued again resumes it."""
    from submitit.local.local import LocalJob

    Sweep(root).add(jobs("a"))
    (root / "hold").touch()
    waits = LocalJob.result

    def interrupted(job: LocalJob) -> object:
        until(lambda: "began a" in notes(root))
        run = (root / "a" / ".lock-holder").read_text().split()[1]
        parent = subprocess.run(["ps", "-o", "ppid=", "-p", run], capture_output=True, check=True).stdout
        os.kill(int(parent), signal.SIGUSR2)
        until(lambda: "saved a" in notes(root))
        (root / "hold").unlink()
        return waits(job)

    monkeypatch.setattr(LocalJob, "result", interrupted)
    states = make_runs(root, [], Slurm(parameters=["cluster=local"], program=FAKE), lambda text: None)
    assert states == {"done": 1}
    assert notes(root) == ["began a", "saved a", "began a", "ended a"]


def test_a_run_is_not_killed_by_the_signal_for_its_job(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sends it to every process of the job, two minutes before the time limit."""
    Sweep(root).add(jobs("a"))
    at_work = []

    def train(config: object, only_step_0: bool) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        at_work.append(signal.getsignal(signal.SIGUSR1))

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(command, "end_with_parent", lambda: None)
    before = signal.getsignal(signal.SIGUSR2)
    assert command._make([str(root), "a"]) == 0
    assert at_work == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGUSR2) == before


def test_slurm_gets_arrays_that_wait_for_their_base_and_nothing_twice(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh\n"}.items():
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(given))
    Sweep(root).add([*jobs("a", "b", base="x"), *jobs("c", "d")])
    engine = Slurm(jobs=1, cpus=4, gpus=1, parameters=["partition=gpu", "time=90"])
    lines: list[str] = []
    assert make_runs(root, [], engine, lines.append) == {"waiting": 4}
    base, sharing, others = (file.read_text() for file in sorted(given.iterdir()))
    common = ("--partition=gpu", "--time=90", "--cpus-per-task=4", "--gpus-per-node=1", "--signal=USR2@120")
    assert all(f"#SBATCH {option}" in script for option in common for script in (base, sharing, others))
    assert "--dependency" not in base + others
    assert "#SBATCH --dependency=afterany:1\n" in sharing
    assert all("#SBATCH --array=0-1%1" in script for script in (sharing, others))
    assert make_runs(root, [], engine, lines.append) == {"waiting": 4}
    assert len(list(given.iterdir())) == 3
    assert lines[-1] == "already in SLURM's queue: 5 jobs"
    (commands / "squeue").write_text("#!/bin/sh\n")  # all have left the queue, unfinished
    assert make_runs(root, [], engine, lines.append) == {"waiting": 4}
    assert len(list(given.iterdir())) == 6


def test_no_slurm_and_unknown_parameters_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sweep(root).add(jobs("a"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="run this on a machine that has SLURM's commands"):
        make_runs(root, [], Slurm())
    with pytest.raises(UserError, match=r"SLURM refused the runs: .*partitionn"):
        make_runs(root, [], Slurm(parameters=["cluster=local", "partitionn=gpu"]))


def test_a_submitted_run_holds_settings_only() -> None:
    """submitit pickles it, so it must not contain a process or a lock."""
    from incseg.sweep.folder import Task
    from incseg.sweep.on_slurm import Make

    make = Make(Path("x"), Task(tuple(jobs("a"))), 1)
    assert pickle.loads(pickle.dumps(make)).task.name == "a"
