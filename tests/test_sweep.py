"""Sweeps: the runs that a command describes, and that none is lost, none is made twice, none stops others.

Except for one real sweep, the runs are a shell script that leaves the same files as a run, to save time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import small_config
from sweeps import FAKE, QUICK, jobs, notes, until

from incseg.cli import main
from incseg.cli.main import parse
from incseg.cli.sweep import plan
from incseg.engine.rundir import RunDir
from incseg.io import read_json, write_json
from incseg.sweep import attempt, local
from incseg.sweep.attempt import Attempts, reason_of
from incseg.sweep.folder import Sweep, Task
from incseg.sweep.local import Local
from incseg.sweep.on_ray import Made, Place, make_on_node, unpack
from incseg.sweep.plan import add_jobs, job_of, make_runs
from incseg.types import UserError


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attempt, local):
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


def states(root: Path) -> dict[str, str]:
    return {job.name: Sweep(root).state(job) for job in Sweep(root).jobs()}


def made(root: Path, number: int = 1) -> dict[str, int]:
    """Make all runs of a folder and return the number in each state."""
    return dict(make_runs(root, [], Local(number, FAKE), say=lambda text: None))


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
    assert args.out == Path("x")


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--jobs 0", "--jobs is 0; give at least 1"),
        ("--on ray --gpus -1", "--gpus is -1.0; give at least 0"),
        ("--dry-run --tflops nan", "--tflops is nan; give at least 1e-06"),
        ("--gpus 1", "--gpus does nothing on this machine; allowed for this machine: --jobs"),
        ("--on ray --jobs 2", "--jobs does nothing on ray; allowed for --on ray: --address, --cpus, --gpus"),
        ("--on slurm --slurm gpu", "--slurm gpu has no value; write --slurm KEY=VALUE"),
        ("--on kubernetes", "invalid choice: 'kubernetes'"),
        ("make", "sweep make is an internal command of sweeps"),
    ],
)
def test_flags_that_an_engine_does_not_have_are_refused(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *argv.split(), *([] if argv == "make" else ["--out", "nowhere"])]) == 2
    assert message in capsys.readouterr().err
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(("engine", "package", "extra"), [("ray", "ray", "ray"), ("slurm", "submitit", "slurm")])
def test_an_engine_that_is_not_installed_names_its_extra(
    root: Path,
    engine: str,
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    Sweep(root).add(jobs("a"))
    assert main(["sweep", "--out", str(root), "--on", engine]) == 2
    assert f"pip install 'incseg[{extra}]'" in capsys.readouterr().err


# --- the runs ------------------------------------------------------------------------------------------------


def test_runs_are_made_once_in_order_and_failures_do_not_stop_the_rest(root: Path) -> None:
    sweep = Sweep(root)
    sweep.add([*jobs("a"), *jobs("b", fails=True), *jobs("c", dies=True), *jobs("group/d")])
    lines: list[str] = []
    assert make_runs(root, [], Local(1, FAKE), lines.append) == {"done": 2, "failed": 2}
    assert notes(root)[:4] == ["began a", "ended a", "began b", "began c"]
    assert (root / "group" / "d" / "results.json").exists()
    by_name = {job.name: job for job in sweep.jobs()}
    assert sweep.failure(by_name["b"]) == "no such thing; give another"
    assert sweep.failure(by_name["c"]) == "killed by SIGKILL (out of memory?)"
    assert f"b: failed: no such thing; give another (see {sweep.log('b')})" in lines
    assert made(root) == {"done": 2, "failed": 2}
    assert notes(root).count("began a") == notes(root).count("began b") == 1
    sweep.retry_failed()
    made(root)
    assert notes(root).count("began b") == 2


def test_several_commands_make_no_run_twice(root: Path) -> None:
    """They choose the same runs at the same time, and the lock of the run folder decides."""
    sweep = Sweep(root)
    sweep.add(jobs(*(f"run{i}" for i in range(8))))
    tasks = [sweep.tasks() for _ in range(3)]

    def command(left: list[Task]) -> None:
        Local(2).make_all(Attempts(sweep, program=FAKE), left, lambda text: None, lambda task, outcome: None)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(command, tasks))
    assert sorted(notes(root)) == sorted([f"{what} run{i}" for i in range(8) for what in ("began", "ended")])


def test_a_shared_base_is_trained_first_by_one(root: Path) -> None:
    Sweep(root).add([*jobs("first", "second", base="b"), *jobs("other", base="c")])
    (root / "hold").touch()
    with ThreadPoolExecutor(1) as pool:
        until_both_wait = pool.submit(
            lambda: (until(lambda: {"began first--base", "began other"} <= set(notes(root))), (root / "hold").unlink())
        )
        assert made(root, 3) == {"done": 3}
        until_both_wait.result()
    at = notes(root).index
    assert at("began first--base") < at("ended first--base") < min(at("began first"), at("began second"))
    assert at("began other") < at("ended first--base"), "what does not share it does not wait"
    assert notes(root).count("began first--base") == 1
    assert "began other--base" not in notes(root), "nobody shares it"


def test_where_the_base_fails_the_next_run_trains_it(root: Path) -> None:
    Sweep(root).add([*jobs("first", base="b", fails=True), *jobs("second", "third", base="b")])
    assert made(root, 2) == {"failed": 1, "done": 2}
    assert notes(root)[:3] == ["began first--base", "began second--base", "ended second--base"]


def test_a_run_that_was_started_by_hand_is_left_alone_and_waited_for(root: Path) -> None:
    sweep = Sweep(root)
    sweep.add(jobs("a", "b"))
    run = RunDir(root / "a")
    run.lock()
    assert states(root) == {"a": "running", "b": "waiting"}
    assert f"process {os.getpid()}" in (sweep.worker(sweep.jobs()[0]) or "")

    def finish() -> None:
        until(lambda: "ended b" in notes(root))
        write_json(run.results, {"final": {}, "seconds": 1.0})
        run.close()

    with ThreadPoolExecutor(1) as pool:
        by_hand = pool.submit(finish)
        engine = Local(1, FAKE)
        engine.work(sweep, sweep.tasks(), lambda text: None, lambda task, outcome: None)
        by_hand.result()
    assert notes(root) == ["began b", "ended b"]


def test_ctrl_c_lets_runs_save_and_the_same_command_continues(root: Path) -> None:
    (root / "hold").touch()
    Sweep(root).add(jobs("a", "b"))
    with ThreadPoolExecutor(1) as pool:
        interrupt = pool.submit(lambda: (until(lambda: "began a" in notes(root)), os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            made(root)
        interrupt.result()
    assert notes(root) == ["began a", "saved a"]
    assert states(root) == {"a": "waiting", "b": "waiting"}
    (root / "hold").unlink()
    assert made(root) == {"done": 2}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_killed_command_leaves_no_run_behind_and_is_repeated(root: Path) -> None:
    """After kill -9 its runs are asked to end as by Ctrl-C, and the same command makes them again."""
    Sweep(root).add(jobs("a"))
    (root / "hold").touch()
    run = (
        "import os, sys; from incseg.sweep.attempt import end_with_parent; end_with_parent(); "
        "os.execvp('sh', sys.argv[1:])"
    )
    script = (
        "import sys; from pathlib import Path; from incseg.sweep.attempt import Attempts; "
        "from incseg.sweep.folder import Sweep; sweep = Sweep(Path(sys.argv[1])); "
        "Attempts(sweep, program=sys.argv[2:]).perform(sweep.tasks()[0])"
    )
    command = subprocess.Popen([sys.executable, "-c", script, str(root), sys.executable, "-c", run, *FAKE])
    until(lambda: "began a" in notes(root))
    command.kill()
    command.wait()
    until(lambda: notes(root) == ["began a", "saved a"])
    (root / "hold").unlink()
    until(lambda: states(root) == {"a": "waiting"})
    assert made(root) == {"done": 1}


def test_other_settings_under_the_same_name_are_refused(root: Path) -> None:
    sweep = Sweep(root)
    method = {"name": "mib"}
    add_jobs(sweep, jobs("a", seed=1, method=method))
    add_jobs(sweep, jobs("a", seed=1, method=method, threads=4))  # changes nothing in the result
    with pytest.raises(UserError, match=r"a is in the sweep with other settings \(seed was 1, now 2\)"):
        add_jobs(sweep, jobs("a", seed=2, method=method))
    run = RunDir(root / "b")
    run.write_config({"seed": 5, "method": method})
    run.checkpoint.touch()
    with pytest.raises(UserError, match=r"holds a run with other settings \(seed was 5, now 1\)"):
        add_jobs(sweep, jobs("b", seed=1, method=method))


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
    (job,), (threaded,) = jobs("a", threads=None), jobs("b", threads=5)
    shared = [Local(3).environment(job, slot) for slot in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shared] == ["4", "6", "4"]
    assert {each["OMP_NUM_THREADS"] for each in shared} == {"2"}
    assert Local(1).environment(threaded, 0) == {"OMP_NUM_THREADS": "5"}


# --- the command ---------------------------------------------------------------------------------------------


def test_a_real_sweep(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs with one base, one that fails, and the table of them."""
    flags = [f"--{key}={value}" for key, value in QUICK.items()]
    assert main(["sweep", "--out", str(root), "--method", "finetune,mib", "--task", "6-4,20-1", *flags]) == 1
    shown = capsys.readouterr()
    assert "shapes-6-4-overlapped-finetune-s1: step 0 is trained, for 2 runs" in shown.out
    assert "shapes-6-4-overlapped-mib-s1: done in" in shown.out
    assert "4 runs: 2 done, 2 failed" in shown.out
    assert "--retry" in shown.err
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["sweep", "status", str(root)]) == 0
    table = capsys.readouterr().out
    assert "Base" in next(line for line in table.splitlines() if "shapes-6-4" in line)
    assert "20-1" in next(line for line in table.splitlines() if "failed" in line)
    first, second = (RunDir(root / f"shapes-6-4-overlapped-{method}-s1") for method in ("finetune", "mib"))
    assert first.steps_done() == second.steps_done() == [0, 1]
    reused = [read_json(run.row(0))["reused_from"] for run in (first, second)]
    assert reused == [None, str(first.root)]


def test_status_shows_who_is_at_work_and_nothing_is_no_sweep(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["sweep", "status", str(root)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert main(["sweep", "--out", str(root)]) == 2
    assert "has no runs to resume" in capsys.readouterr().err
    sweep = Sweep(root)
    sweep.add(jobs("a", "b"))
    run = RunDir(root / "a")
    run.lock()
    sweep.log("a").write_text("step 1/5  120/400  ETA 0:01:00\n")
    assert main(["sweep", "status", str(root)]) == 0
    run.close()
    shown = capsys.readouterr().out
    assert f"process {os.getpid()} on" in shown
    assert "step 1/5  120/400" in shown
    assert "2 runs: 1 running, 1 waiting" in shown


def test_a_node_without_the_shared_disk_sends_its_run_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes with a disk each: the base that one trains reaches the other, and the runs come back."""
    flags = [f"--{key}={value}" for key, value in QUICK.items()]
    wanted = plan(parse("sweep", ["--out", str(root), "--method", "finetune,mib", "--task", "6-4", *flags]))
    sweep = Sweep(root)
    sweep.add(wanted)
    base, first, second = sweep.tasks()

    def on_node(name: str, task: Task, before: Made | None = None) -> Made:
        cache = str(tmp_path / name)
        monkeypatch.setenv("INCSEG_CACHE", cache)
        variables = {"INCSEG_CACHE": cache}
        return make_on_node(Place(Path("/nowhere/to/be/seen"), "token", Path("/nowhere"), variables), task, before)

    trained = on_node("one", base)
    assert trained.outcome == "done"
    for made in (on_node("two", first, trained), on_node("one", second, trained)):
        assert made.outcome == "done"
        assert made.files is not None
        unpack(made.files, root)
    assert sweep.states() == {"done": 2}
    reused = [read_json(sweep.step_0(job.name))["reused_from"] for job in wanted]
    assert all(origin.startswith(str(tmp_path / "one")) for origin in reused if origin)
    assert reused[0] is not None, "it was made on the node that had not trained the base"
    assert all(sweep.run(job.name).model(1).exists() and sweep.log(job.name).exists() for job in wanted)
