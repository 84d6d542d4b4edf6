"""Sweeps: what a command asks for, and a queue that many workers share, that loses nothing and does nothing twice.

But for one real sweep the runs are a shell script that leaves what a run leaves, so that seconds are not spent on them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import small_config

from incseg.cli import main
from incseg.cli.main import parse
from incseg.cli.sweep import plan
from incseg.engine import workers as workers_module
from incseg.engine.queue import Claim, Job, Queue, _claim_path
from incseg.engine.rundir import RunDir
from incseg.engine.workers import Workers, reason_of
from incseg.run import add_jobs, job_of
from incseg.types import UserError

QUICK = {
    "preset": "shapes-quick", "task": "6-4,20-1", "data.train_size": 16, "data.val_size": 4, "train.epochs": 1,
    "train.crop": 32, "eval.size": 32, "train.workers": 0, "eval.workers": 0, "threads": 1, "seed": 1,
}  # fmt: skip
FIGURES = {"base": 1.0, "new": 2.0, "all": 3.0, "inc": 4.0}
# train --config FILE --out DIR: tells when it began and ended, and does what its configuration says
FAKE = """
mkdir -p "$4/steps/0"; name=$(basename "$4"); config="$2"
trap 'echo "saved $name" >> "$4/../told"; exit 130' TERM
echo "began $name" >> "$4/../told"
grep -q "fails: true" "$config" && { echo "error: no such thing; give another"; exit 2; }
grep -q "dies: true" "$config" && kill -9 $$
while [ -e "$4/../hold" ]; do sleep 0.05; done
touch "$4/steps/0/row.json"
while [ -e "$4/../hold-later" ]; do sleep 0.05; done
echo "ended $name" >> "$4/../told"
echo '{"final": FIGURES, "seconds": 5}' > "$4/results.json"
""".replace("FIGURES", json.dumps(FIGURES))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(workers_module, "_POLL_SECONDS", 0.02)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


def jobs(*names: str, base: str | None = None, **config: Any) -> list[Job]:
    return [Job(name, {"threads": 1, **config}, base) for name in names]


def workers(root: Path, number: int = 1) -> Workers:
    return Workers(root, number, lambda text: None, ("sh", "-c", FAKE))


def told(root: Path) -> list[str]:
    file = root / "told"
    return file.read_text().splitlines() if file.exists() else []


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def claim_of_another(queue: Queue, name: str, host: str, pid: int) -> Path:
    path = _claim_path(queue.folder(name), 0)
    path.write_text(json.dumps({"host": host, "pid": pid, "worker": "worker 1", "since": 0}))
    return path


def dead_process() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


# --- what a command asks for ---------------------------------------------------------------------------------


def names(*argv: str) -> list[str]:
    return [job.name for job in plan(parse("sweep", ["--out", "nowhere", *argv]))]


def test_every_combination_is_a_run() -> None:
    found = names("--data", "shapes", "--method", "evidential,mib", "--task", "6-2,6-1", "--seed", "1,2")
    assert found == [
        f"shapes-{task}-overlapped-{method}-s{seed}"
        for method in ("evidential", "mib")
        for task in ("6-2", "6-1")
        for seed in (1, 2)
    ]


def test_other_settings_that_differ_are_in_the_name_and_values_with_commas_stay_whole(tmp_path: Path) -> None:
    asked = ["--train.lr=0.1,0.2", "--train.scale", "[0.5,1.0]", "--task=circle,square/star", "--threads", "1"]
    args = parse("sweep", ["--out", "x", *asked])
    found = plan(args)
    assert [job.name.partition("-s42")[2] for job in found] == ["-lr-0.1", "-lr-0.2"]
    assert [job.config["train"]["lr"] for job in found] == [0.1, 0.2]
    assert all(job.config["train"]["scale"] == [0.5, 1.0] for job in found)
    assert {job.config["task"] for job in found} == {"circle,square/star"}
    assert all(job.config["reuse"] for job in found)
    assert (args.workers, args.out) == (1, Path("x"))


def test_a_file_gives_lists_and_several_blocks_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    blocks = [
        {"preset": "shapes-quick", "method": ["finetune", "mib"], "seed": [1, 2], "train": {"epochs": 3}},
        {"preset": "shapes-quick", "method": {"name": "mib", "lambda_kd": [1.0, 100]}, "seed": 1},
    ]
    file.write_text(yaml.safe_dump(blocks))
    found = plan(parse("sweep", ["--out", "x", "--spec", str(file), "--seed", "7"]))
    assert [job.name for job in found] == [
        "shapes-6-2-overlapped-finetune-s7-epochs-3",
        "shapes-6-2-overlapped-mib-s7-epochs-3",
        "shapes-6-2-overlapped-mib-s7-lambda_kd-1.0",
        "shapes-6-2-overlapped-mib-s7-lambda_kd-100",
    ]
    assert [job.config["train"]["epochs"] for job in found] == [3, 3, 2, 2]
    assert found[3].config["method"]["lambda_kd"] == 100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--method", "mib,plopp"], "unknown method 'plopp'; did you mean 'plop'"),
        (["--train.lrr", "1"], "unknown argument '--train.lrr'; did you mean --train.lr"),
        (["--seed"], "'--seed' is not a setting with a value"),
        (["mib"], "'mib' is not a setting with a value"),
        (["--seed", "1,x"], "seed is 'x'; it must be a whole number"),
        (["--spec", "absent.yaml"], "--spec absent.yaml cannot be read .*; give a YAML file"),
    ],
)
def test_wrong_values_are_told_before_anything_runs(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(parse("sweep", ["--out", "nowhere", *argv]))


def base(**changes: Any) -> str | None:
    return job_of(small_config(Path("x"), **{"reuse": True, **changes}), "x").base


def test_runs_that_train_the_same_step_0_share_a_base() -> None:
    shared = base(method={"name": "finetune"})
    assert shared is not None
    for name in ("mib", "plop", "lwf", "recall"):
        assert base(method={"name": name}, task="6-4", train={"lr_later": 0.3, "workers": 2}) == shared
    assert base(method={"name": "evidential", "balancing": "odds"}) == base()
    joint = {"method": {"name": "joint"}}
    assert base(**joint, task="4-2", setting="disjoint") == base(**joint)
    assert base(task="circle,square/star") == base(task="circle,square/star/ring")
    for apart in (
        {"method": {"name": "finetune"}},
        {"method": {"name": "evidential", "rectifier": "exp"}},
        {"task": "4-2"},
        {"setting": "disjoint"},
        {"rules": "mib"},
        {"seed": 9},
        {"train": {"lr": 0.2}},
        {"train": {"accumulate": 2}},
        {"model": {"width": 32}},
        {"data": {"seed": 1}},
    ):
        assert base(**apart) != base(), apart
    assert base(reuse=False) is None


def test_slurm_script_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--out", "runs/table", "--workers", "8", "--seed", "1,2", "--train.scale", "[0.5, 1.0]"]
    assert main(["sweep", *asked, "--print-slurm"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=1-8\n" in script
    assert "incseg sweep --out runs/table --seed 1,2 --train.scale '[0.5, 1.0]' --workers 1\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not Path("runs/table").exists()


# --- the queue -----------------------------------------------------------------------------------------------


def test_runs_are_made_once_in_order_and_failures_do_not_stop_the_rest(root: Path) -> None:
    queue = Queue(root)
    queue.add([*jobs("a"), *jobs("b", fails=True), *jobs("c", dies=True), *jobs("group/d")])
    assert workers(root).work() == {"done": 2, "failed": 2}
    assert told(root)[:4] == ["began a", "ended a", "began b", "began c"]
    assert (root / "group" / "d" / "results.json").exists()
    by_name = {job.name: job for job in queue.jobs()}
    assert queue.failure(by_name["b"]) == "no such thing; give another"
    assert queue.failure(by_name["c"]) == "killed by SIGKILL (out of memory?)"
    assert workers(root).work() == {"done": 2, "failed": 2}
    assert told(root).count("began a") == told(root).count("began b") == 1
    queue.retry_failed()
    workers(root).work()
    assert told(root).count("began b") == 2


def test_many_workers_make_no_run_twice(root: Path) -> None:
    Queue(root).add(jobs(*(f"run{i}" for i in range(12))))
    with ThreadPoolExecutor(3) as pool:  # three commands of two workers each
        served = [pool.submit(workers(root, 2)._serve, number) for number in (0, 1, 0, 1, 0, 1)]
        for one in served:
            one.result()
    assert sorted(told(root)) == sorted([f"{what} run{i}" for i in range(12) for what in ("began", "ended")])


def test_only_one_of_many_gets_a_claim(root: Path) -> None:
    Queue(root).add(jobs("a"))
    together = threading.Barrier(8)

    def grab(number: int) -> bool:
        queue = Queue(root)
        together.wait()
        return queue.take(f"worker {number}") is not None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(grab, range(8))) == 1


def test_a_run_waits_for_the_base_it_shares(root: Path) -> None:
    (root / "hold").touch()
    (root / "hold-later").touch()
    Queue(root).add([*jobs("first", "second", base="b"), *jobs("other", base="c")])
    with ThreadPoolExecutor(3) as pool:
        served = [pool.submit(workers(root, 3)._serve, number) for number in range(3)]
        until(lambda: {"began first", "began other"} <= set(told(root)))
        assert "began second" not in told(root)
        (root / "hold").unlink()  # step 0 is there, though the run goes on
        until(lambda: "began second" in told(root))
        assert "ended first" not in told(root)
        (root / "hold-later").unlink()
        for one in served:
            one.result()
    assert {job.name: Queue(root).state(job) for job in Queue(root).jobs()} == dict.fromkeys(
        ("first", "second", "other"), "done"
    )


def test_where_the_base_fails_the_next_run_trains_it(root: Path) -> None:
    Queue(root).add([*jobs("first", base="b", fails=True), *jobs("second", base="b")])
    assert workers(root, 2).work() == {"failed": 1, "done": 1}


def test_the_claim_of_a_dead_process_is_taken_over(root: Path) -> None:
    queue = Queue(root)
    queue.add(jobs("a"))
    claim_of_another(queue, "a", os.uname().nodename, dead_process())
    assert queue.state(queue.jobs()[0]) == "waiting"
    assert workers(root).work() == {"done": 1}


def test_the_claim_of_another_machine_is_left_alone_until_it_is_touched_no_more(root: Path) -> None:
    queue = Queue(root, stale_seconds=0.3)
    queue.add(jobs("a"))
    job = queue.jobs()[0]
    path = claim_of_another(queue, "a", "elsewhere", 1)
    os.utime(path, (0, 0))  # its clock may say what it likes
    assert queue.state(job) == "running"
    assert queue.take("me") is None
    assert not queue.is_settled(), "it may be dead: we cannot leave yet"
    for moment in range(3):
        time.sleep(0.15)
        os.utime(path, (moment, moment))
        assert queue.take("me") is None
    assert queue.is_settled()
    until(lambda: queue.state(job) == "waiting")
    held = queue.take("me")
    assert held is not None
    assert held.claim.path.name == "claim-1.json"
    assert not Claim(path, "elsewhere", 1, "worker 1", 0).touch(), "the first owner learns that it has lost the run"
    assert held.touch()


def test_a_run_that_was_started_by_hand_is_not_started_again(root: Path) -> None:
    queue = Queue(root)
    queue.add(jobs("a"))
    run = RunDir(root / "a")
    run.lock()
    assert queue.state(queue.jobs()[0]) == "running"
    assert queue.take("me") is None
    assert f"process {os.getpid()}" in (queue.worker(queue.jobs()[0]) or "")
    run.close()
    assert queue.take("me") is not None


def test_ctrl_c_lets_runs_save_and_the_same_command_goes_on(root: Path) -> None:
    (root / "hold").touch()
    Queue(root).add(jobs("a", "b"))
    made = workers(root, 1)
    with ThreadPoolExecutor(1) as pool:
        interrupt = pool.submit(lambda: (until(lambda: "began a" in told(root)), os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            made.work()
        interrupt.result()
    assert told(root) == ["began a", "saved a"]
    assert [Queue(root).state(job) for job in Queue(root).jobs()] == ["waiting", "waiting"]
    (root / "hold").unlink()
    assert workers(root).work() == {"done": 2}


def test_other_settings_under_the_same_name_are_refused(root: Path) -> None:
    queue = Queue(root)
    method = {"name": "mib"}
    add_jobs(queue, jobs("a", seed=1, method=method))
    add_jobs(queue, jobs("a", seed=1, method=method, threads=4))  # changes nothing in the result
    with pytest.raises(UserError, match=r"a is in the queue with other settings \(seed was 1, now 2\)"):
        add_jobs(queue, jobs("a", seed=2, method=method))
    run = RunDir(root / "b")
    run.write_config({"seed": 5, "method": method})
    run.checkpoint.touch()
    with pytest.raises(UserError, match=r"holds a run with other settings \(seed was 5, now 1\)"):
        add_jobs(queue, jobs("b", seed=1, method=method))


def test_why_a_run_failed() -> None:
    assert reason_of(2, "step 0\nerror: no GPU; use cpu\n") == "no GPU; use cpu"
    assert reason_of(1, "Traceback\n  File\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert reason_of(3, "") == "exit code 3"
    assert reason_of(-15, "whatever") == "killed by SIGTERM"


def test_cores_and_gpus_are_shared_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    shared = [Workers(root, 3)._environment(None, number) for number in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shared] == ["4", "6", "4"]
    assert {each["OMP_NUM_THREADS"] for each in shared} == {"2"}
    alone = Workers(root, 1)._environment(5, 0)
    assert (alone["CUDA_VISIBLE_DEVICES"], alone["OMP_NUM_THREADS"]) == ("4,6", "5")


# --- the command ---------------------------------------------------------------------------------------------


def test_a_real_sweep(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, one that cannot work, and the table of them."""
    flags = [f"--{key}={value}" for key, value in QUICK.items()]
    assert main(["sweep", "--out", str(root), "--method", "finetune", *flags]) == 1
    shown = capsys.readouterr()
    assert "shapes-6-4-overlapped-finetune-s1: done in" in shown.out
    assert "2 runs: 1 done, 1 failed" in shown.out
    assert "--retry" in shown.err
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["sweep", "status", str(root)]) == 0
    table = capsys.readouterr().out
    assert "Base" in next(line for line in table.splitlines() if "shapes-6-4" in line)
    assert "20-1" in next(line for line in table.splitlines() if "failed" in line)
    assert RunDir(root / "shapes-6-4-overlapped-finetune-s1").steps_done() == [0, 1]


def test_status_tells_who_is_at_work_and_nothing_is_no_sweep(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["sweep", "status", str(root)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert main(["sweep", "--out", str(root)]) == 2
    assert "has no runs to resume" in capsys.readouterr().err
    queue = Queue(root)
    queue.add(jobs("a", "b"))
    held = queue.take("worker 3")
    assert held is not None
    queue.log("a").write_text("step 1/5  120/400  ETA 0:01:00\n")
    assert main(["sweep", "status", str(root)]) == 0
    shown = capsys.readouterr().out
    assert f"worker 3, process {os.getpid()} on" in shown
    assert "step 1/5  120/400" in shown
    assert "2 runs: 1 running, 1 waiting" in shown
