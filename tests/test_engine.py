"""The engine: seeds, interruptions, evaluation again, failures, and the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from small_runs import (
    PYTHON_PATH,
    TRUST,
    Interrupting,
    assert_same_run,
    listening,
    reevaluated_row,
    rows_of,
    small_config,
    write_config,
)

import incseg.engine.trainer as trainer_module
import incseg.io
from incseg.cli import main
from incseg.config import RunConfig, load_run_config, open_run
from incseg.data.loaders import EpochOrder
from incseg.engine.checkpoint import Progress
from incseg.engine.evaluator import EvalConfig
from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime, retain_freed_memory
from incseg.engine.trainer import TrainConfig
from incseg.io import read_tensors
from incseg.metrics import FIGURES
from incseg.models.files import load_segmenter
from incseg.run import evaluate, train
from incseg.types import UserError

HeldProcess = tuple[list[str], Path, subprocess.Popen[str]]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again() -> None:
    """Otherwise page faults would take longer than the arithmetic of a loss in strips."""
    script = (
        "import resource, torch\n"
        "from incseg.engine.runtime import retain_freed_memory\n"
        "assert retain_freed_memory()\n"
        "def work():\n"
        "    for _ in range(50): [torch.ones(2**20) for _ in range(4)]\n"
        "work()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "work()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment["PYTHONPATH"] = PYTHON_PATH
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # 200 tensors of 4 MB have 200,000 pages


def test_the_allocator_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not retain_freed_memory()


def run(config: RunConfig) -> Path:
    train(config)
    return config.folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three steps. Tests must not change it."""
    return run(small_config(tmp_path_factory.mktemp("runs") / "finished"))


@pytest.fixture(scope="module")
def finished_held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same with a method that has a state and draws random numbers. Tests must not change it."""
    return run(small_config(tmp_path_factory.mktemp("runs") / "held", method={"name": "small_runs:Held"}))


# --- the same run again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_seed_gives_the_same_bits_with_any_number_of_workers(
    finished: Path, tmp_path: Path, workers: int
) -> None:
    again = run(small_config(tmp_path / "again", train={"workers": workers}, eval={"workers": workers}))
    assert_same_run(finished, again)


def test_another_seed_gives_another_model(finished: Path, tmp_path: Path) -> None:
    other = run(small_config(tmp_path / "other", seed=4, task="joint"))
    mine, theirs = (read_tensors(RunDir(folder).model(0))[0] for folder in (finished, other))
    assert not torch.equal(mine["aspp.mix.weight"], theirs["aspp.mix.weight"])


# --- interruptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "after", "checkpoint_seconds"),
    [
        ("step 0/2", 3, 1e6),  # nothing is saved yet
        ("step 0/2", 3, 0.0),
        ("step 1/2", 2, 1e6),
        ("step 1/2", 2, 0.0),
        ("begin test 1/2", 1, 1e6),
        ("test 1/2", 2, 0.0),
        ("row 0", 1, 1e6),
        ("row 2", 1, 0.0),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    finished: Path, tmp_path: Path, moment: str, after: int, checkpoint_seconds: float
) -> None:
    config = small_config(tmp_path / "run", train={"checkpoint_seconds": checkpoint_seconds})
    with pytest.raises(KeyboardInterrupt), showing(Interrupting(moment, after)):
        run(config)
    assert_same_run(finished, run(config))


def test_a_run_may_be_interrupted_again_and_again(finished_held: Path, tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run", method={"name": "small_runs:Held"}, train={"checkpoint_seconds": 0.0, "epochs": 2}
    )
    interruptions = 0
    while True:
        try:
            with showing(Interrupting("anything", 6)):
                run(config)
            break
        except KeyboardInterrupt:
            interruptions += 1
            assert interruptions < 40
    assert interruptions > 4
    assert_same_run(finished_held, config.folder)


@pytest.mark.parametrize(("step", "before"), [(0, True), (2, True), (0, False)])
def test_killed_beside_the_row_of_a_step(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, before: bool
) -> None:
    """Between the model and its row; or after the row, while there is a checkpoint of the finished step."""
    config = small_config(tmp_path / "run", train={"checkpoint_seconds": 0.0})
    write = trainer_module.write_record

    def killed(path: Path, value: Any) -> None:
        its_row = path == RunDir(config.folder).row(step)
        if its_row and before:
            raise KeyboardInterrupt
        write(path, value)
        if its_row:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "write_record", killed)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert RunDir(config.folder).model(step).exists()
    assert RunDir(config.folder).checkpoint.exists()
    assert_same_run(finished, run(config))


def test_killed_while_a_checkpoint_is_written(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path / "run", train={"checkpoint_seconds": 0.0})
    save, saved = safetensors.torch.save_file, Counter[str]()

    def killed(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save(tensors, path, metadata)
        saved["files"] += 1
        if saved["files"] == 4:
            path.write_bytes(path.read_bytes()[:1000])
            (path.parent / f"{path.name}.tmp").write_bytes(b"what kill -9 leaves, for nothing takes it away")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    progress = json.loads(read_tensors(RunDir(config.folder).checkpoint)[1]["checkpoint"])["progress"]
    assert progress["iteration"] == 3
    assert_same_run(finished, run(config))
    assert not list(config.folder.rglob("*.tmp"))


@pytest.fixture
def held_process(tmp_path: Path) -> Iterator[HeldProcess]:
    """Start `incseg train` in its own process, which waits in iteration 1 of step 1. Yield its flags, the file that
    holds it, and the process."""
    config = small_config(
        tmp_path / "run",
        method={"name": "small_runs:Held"},
        train={"workers": 2, "checkpoint_seconds": 0.0},
        eval={"workers": 2},
    )
    argv = ["train", "--config", write_config(config, tmp_path / "settings.yaml")]
    hold = tmp_path / "hold"
    with subprocess.Popen(
        [sys.executable, "-m", "incseg", *argv],
        env={**os.environ, **TRUST, "PYTHONPATH": PYTHON_PATH, "INCSEG_TEST_HOLD": str(hold)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the signal of a terminal, which goes to the whole group, can be sent
    ) as process:
        deadline = time.monotonic() + 60
        while not hold.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            assert hold.exists()
            yield argv, hold, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_saves_and_the_same_command_resumes(
    finished_held: Path, held_process: HeldProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, hold, process = held_process
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.1)
    hold.unlink()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    folder = hold.parent / "run"
    assert errors.splitlines() == [f"stopped; progress is saved in {folder}; repeat the command to resume"]
    progress = json.loads(read_tensors(RunDir(folder).checkpoint)[1]["checkpoint"])["progress"]
    assert progress["iteration"] == 2
    assert main(argv) == 0
    assert f"resuming after step 0 in {folder}" in capsys.readouterr().out
    assert_same_run(finished_held, folder)


def test_after_kill_9_the_same_command_resumes(finished_held: Path, held_process: HeldProcess) -> None:
    argv, hold, process = held_process
    with pytest.raises(UserError, match=rf"in use by process {process.pid} on .*; wait for it"):
        run(small_config(hold.parent / "run"))
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert main(argv) == 0
    assert_same_run(finished_held, hold.parent / "run")


def test_a_finished_run_does_not_change(finished_held: Path, tmp_path: Path) -> None:
    before = RunDir(finished_held).results.read_bytes()
    changed = small_config(
        finished_held,
        method={"name": "small_runs:Held"},
        preset="whatever",
        threads=1,
        train={"workers": 1, "checkpoint_seconds": 3.0},
        eval={"workers": 1},
    )
    with listening() as shown:
        assert train(changed)["final"] == json.loads(before)["final"]
    assert RunDir(finished_held).results.read_bytes() == before
    assert "is finished; nothing is left to learn" in shown.getvalue()


# --- evaluation again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, None])
def test_evaluation_after_reload_gives_the_row_of_training(finished: Path, step: int | None) -> None:
    assert reevaluated_row(finished, step) == rows_of(finished)[-1 if step is None else step]


def test_the_batch_size_of_the_test_changes_nothing(finished: Path) -> None:
    row = rows_of(finished)[-1]
    again = evaluate(finished, overrides={"eval": EvalConfig(size=48, batch_size=8, workers=2)})
    assert again["iou"] == row["iou"]


def test_other_inference_options_change_the_figures_and_nothing_on_disk(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    row = rows_of(finished)[-1]
    eager = evaluate(finished, None, {"decision": "hierarchical", "threshold": 0.999})
    assert eager["iou"] != row["iou"]
    balanced = evaluate(finished, 1, {"balancing": "none"})
    assert balanced["unseen"] != rows_of(finished)[1]["unseen"]
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_quality_at_edges_is_measured_where_it_is_asked_for(finished: Path) -> None:
    assert all("boundary" not in row for row in rows_of(finished))
    row = evaluate(finished, overrides={"eval": EvalConfig(size=48, batch_size=3, workers=0, boundary=True)})
    at_edges = row.pop("boundary")
    assert row.items() <= rows_of(finished)[-1].items()
    assert at_edges.keys() == {"iou", "within_3", "within_8"}
    in_other_batches = EvalConfig(size=48, batch_size=8, workers=0, boundary=True)
    assert evaluate(finished, overrides={"eval": in_other_batches})["boundary"] == at_edges


def test_a_method_predicts_by_the_state_it_was_saved_with(tmp_path: Path) -> None:
    folder = run(small_config(tmp_path / "run", method={"name": "small_runs:Remembering"}, train={"epochs": 1}))
    assert evaluate(folder)["iou"] == rows_of(folder)[-1]["iou"]
    assert evaluate(folder, 0)["iou"] == rows_of(folder)[0]["iou"]


def test_what_cannot_be_evaluated_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no step 7; its finished steps are 0 to 2"):
        evaluate(finished, 7)
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.yaml"):
        evaluate(tmp_path)
    with pytest.raises(UserError, match=r"method 'evidential': .*unexpected keyword argument 'blancing'"):
        evaluate(finished, None, {"blancing": "odds"})
    (tmp_path / "config.yaml").write_text(RunDir(finished).config.read_text())
    with pytest.raises(UserError, match="no finished step yet"):
        evaluate(tmp_path)


# --- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "shown"), [("loss", "extra nan"), ("gradient", "extra 0, gradient norm (inf|nan)")])
def test_a_loss_that_is_not_finite_stops_the_run_and_saves_the_last_good_state(
    tmp_path: Path, part: str, shown: str
) -> None:
    method = {"name": "small_runs:Exploding", "part": part}
    config = small_config(tmp_path / "run", method=method, train={"checkpoint_seconds": 0.0, "epochs_later": 3})
    with pytest.raises(UserError, match=rf"step 1, iteration 2: .*not finite \(ce [\d.]+, {shown}") as raised:
        run(config)
    assert str(tmp_path / "run") in str(raised.value)
    tensors, metadata = read_tensors(RunDir(config.folder).checkpoint)
    about = json.loads(metadata["checkpoint"])
    assert (about["step"], about["progress"]["iteration"]) == (1, 2)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert evaluate(config.folder)["index"] == 0
    with pytest.raises(UserError, match="step 1, iteration 2"):  # resumes there and ends alike
        run(config)


def test_a_run_folder_belongs_to_its_settings(finished: Path) -> None:
    with pytest.raises(UserError, match=r"other settings \(seed was 3, now 5\); choose another --out"):
        run(small_config(finished, seed=5))
    with pytest.raises(UserError, match=r"method\.lambda_kd was 10\.0, now 1\.0, train\.lr was 0\.1, now 0\.2"):
        run(small_config(finished, method={"name": "evidential", "lambda_kd": 1.0}, train={"lr": 0.2}))


def test_a_folder_in_which_nothing_was_learnt_accepts_other_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch of one image"):
        run(small_config(tmp_path / "run", train={"batch_size": 1}))
    assert RunDir(tmp_path / "run").config.exists()
    config = small_config(tmp_path / "run", task="joint", train={"epochs": 1})
    assert load_run_config(run(config)).train.batch_size == 8


def test_a_run_from_random_weights_warns_once(tmp_path: Path) -> None:
    """Hardly anybody trains a large backbone from scratch on purpose; paper-voc without --model.weights does."""
    config = small_config(tmp_path / "run", model={"backbone": "resnet18"}, train={"batch_size": 1})
    with pytest.raises(UserError, match="batch of one image"):  # soon enough
        run(config)
    log = RunDir(config.folder).log.read_text()
    assert log.count("note: resnet18 has no pretrained weights and learns from random ones; give --model.weights") == 1


def test_one_process_at_a_time_works_in_a_run_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    first = RunDir(config.folder)
    open_run(first, config)
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
        run(config)
    first.close()
    second = RunDir(config.folder)
    open_run(second, config)
    second.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the run folder .*choose another with --out"):
        run(small_config(tmp_path / "file" / "run"))


@pytest.mark.parametrize("damage", [lambda content: b"torn", lambda content: content[:-9] + b"one weight"[-9:]])
def test_a_damaged_checkpoint_is_named_and_the_step_begins_again(
    finished: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    config = small_config(tmp_path / "run", train={"checkpoint_seconds": 0.0})
    with pytest.raises(KeyboardInterrupt), showing(Interrupting("step 0/2", 3)):
        run(config)
    checkpoint = RunDir(config.folder).checkpoint
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with listening() as shown:
        run(config)
    assert re.search(r"checkpoint\.safetensors is damaged \(.*\); step 0 starts again", shown.getvalue())
    assert_same_run(finished, config.folder)


def test_a_faulty_image_stops_with_its_name_from_any_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: object, split: str, index: int) -> None:
        raise UserError(f"image {index} is broken; export it again")

    monkeypatch.setattr("incseg.data.shapes.Shapes.image", faulty)
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"^image \d+ is broken; export it again$"):
            run(small_config(tmp_path / str(workers), train={"workers": workers}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("epochs", 0), ("epochs_later", 0), ("batch_size", 0), ("crop", 0), ("workers", -1), ("lr", -0.1),
        ("lr_later", math.inf), ("momentum", 1.0), ("momentum", -0.1), ("weight_decay", -1.0), ("power", math.nan),
        ("clip", 0.0), ("clip_later", -1.0), ("checkpoint_seconds", math.nan),
    ],
)  # fmt: skip
def test_impossible_training_settings_are_refused(setting: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"train\.{setting} is {value}; it must be "):
        TrainConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["size", "batch_size", "workers"])
def test_impossible_test_settings_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=rf"eval\.{setting} is -1; it must be at least"):
        EvalConfig(**{setting: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device 'gpu' is unknown; write cpu, cuda, cuda:N, mps or auto"),
        ({"device": "meta"}, "device 'meta' is unknown"),
        ({"device": "mps"}, "torch finds no Apple GPU"),
        ({"threads": 0}, "threads is 0; give a positive number"),
    ],
)
def test_impossible_devices_are_refused(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        Runtime(**options)


def test_an_apple_gpu_computes_in_float32_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    runtime = Runtime("mps")
    assert (runtime.device.type, runtime.precision) == ("mps", torch.float32)
    for precision in ("bfloat16", "float16"):
        with pytest.raises(UserError, match="on mps only float32 is supported"):
            Runtime("mps", precision)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes cannot share it"):
        Runtime("mps")


def test_training_without_momentum_and_with_clipping(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", task="joint", train={"momentum": 0.0, "clip": 1e-9, "epochs": 1})
    start = small_config(tmp_path / "start", task="joint", train={"lr": 0.0, "epochs": 1})
    clipped, untouched = (read_tensors(RunDir(run(c)).model(0))[0] for c in (config, start))
    # A gradient this short moves nothing by more than lr·clip, and weight decay by lr·1e-4 of the weight.
    for name, tensor in clipped.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(tensor, untouched[name], rtol=1e-3, atol=1e-6)


# --- the folder ----------------------------------------------------------------------------------------------


def test_the_run_folder_has_the_documented_files(finished: Path) -> None:
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    boards = {name for name in names if name.startswith("tensorboard/")}
    in_step = ("model.safetensors", "state.safetensors", "confusion.npy", "row.json")
    assert names - boards == {
        "config.yaml", "environment.json", "protocol.json", "log.txt", "results.json", ".lock", ".lock-holder",
        *(f"steps/{step}/{name}" for step in range(3) for name in in_step),
    }  # fmt: skip
    assert load_run_config(finished).as_dict() == small_config(finished).as_dict()
    environment = json.loads((finished / "environment.json").read_text())
    assert {"incseg", "commit", "python", "torch", "numpy", "platform", "cpus", "command"} <= environment.keys()
    assert (environment["device"], environment["processes"], environment["threads"]) == ("cpu", 1, 1)
    log = (finished / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1].split(":")[0] for line in log] == ["step 0", "step 1", "step 2"]


def test_results_and_protocol(finished: Path) -> None:
    results = json.loads(RunDir(finished).results.read_text())
    rows = RunDir(finished).rows()
    assert results.keys() == {"final", "steps", "rules", "seconds", "checksum"}
    assert results["final"].keys() == {"base", "new", "all", "inc", "avg", "iou"}
    assert results["steps"] == rows
    assert results["final"]["iou"] == rows[-1]["iou"]
    assert len(results["final"]["iou"]) == 11
    assert results["final"]["avg"] == pytest.approx(sum(row["all"] for row in rows) / 3)
    assert results["rules"]["name"] == "plop"
    assert results["seconds"] > 0
    protocol = json.loads(RunDir(finished).protocol.read_text())
    for step, row in zip(protocol["steps"], rows, strict=True):
        assert {key: row[key] for key in step} == step
        assert set(step) == {"index", "classes", "ids", "train_images", "test_images"}
    assert rows[0]["classes"][0] == "disc"
    assert rows[0]["new"] is None
    assert rows[0]["losses"].keys() == {"new"}
    assert rows[1]["losses"].keys() == {"new", "kd_fg", "kd_u"}


def test_figures_follow_from_the_confusion_matrix(finished: Path) -> None:
    for step, row in enumerate(rows_of(finished)):
        confusion = np.load(RunDir(finished).confusion(step))
        known = 7 + 2 * step
        assert confusion.shape == (known, known)
        assert confusion.dtype == np.int64
        shares = []
        for label in range(known):
            hits = confusion[label, label]
            union = sum(confusion[label, :]) + sum(confusion[:, label]) - hits
            shares.append(100 * hits / union if union else None)
        assert list(row["iou"].values()) == pytest.approx(shares)
        assert next(iter(row["iou"])) == "background"

        def mean(labels: range, shares: list[float | None] = shares) -> float:
            defined = [share for label in labels if (share := shares[label]) is not None]
            return sum(defined) / len(defined)

        assert row["base"] == pytest.approx(mean(range(7)))
        assert row["all"] == pytest.approx(mean(range(known)))
        increments = [mean(range(7)), *(mean(range(first, first + 2)) for first in range(7, known, 2))]
        assert row["inc"] == pytest.approx(sum(increments) / len(increments))
        assert row["new"] == (pytest.approx(mean(range(7, known))) if step else None)


def test_model_files_name_their_origin(finished: Path) -> None:
    model, about = load_segmenter(RunDir(finished).model(1))
    assert [increment.classes for increment in model.increments] == [
        ("disc", "square", "triangle", "ring", "star", "cross"),
        ("hexagon", "arrow"),
    ]
    assert model.increments[1].ids == (7, 8)
    assert model.increments[1].train_images == rows_of(finished)[1]["train_images"] > 0
    assert about["method"] == {"name": "evidential"}
    assert about["protocol"]["task"] == "6-2"
    assert about["protocol"]["rules"]["name"] == "plop"
    assert about["test_size"] == 48
    assert len(about["palette"]) == 11


def test_curves_are_drawn_where_tensorboard_is_installed(finished: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curves = accumulators.EventAccumulator(str(finished / "tensorboard"))
    curves.Reload()
    losses = curves.Scalars("losses/new")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5, 6]
    assert losses[-1].value == pytest.approx(rows_of(finished)[-1]["losses"]["new"])
    assert [(event.step, event.value) for event in curves.Scalars("figures/all")] == [
        (2 * step + 2, pytest.approx(row["all"])) for step, row in enumerate(rows_of(finished))
    ]


def test_the_saved_configuration_is_the_whole_one(finished: Path) -> None:
    saved = yaml.safe_load(RunDir(finished).config.read_text())
    for part in ("data", "model", "train", "eval"):
        kind = {field.name for field in dataclasses.fields(getattr(small_config(finished), part))}
        assert saved[part].keys() == kind


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [{}, {"a": torch.arange(6).reshape(2, 3).T}])
@pytest.mark.parametrize("metadata", [{}, {"b": "c"}])
def test_tensor_files_round_trip(tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    incseg.io.write_tensors(tmp_path / "new" / "t.safetensors", tensors, metadata)
    read, about = read_tensors(tmp_path / "new" / "t.safetensors")
    assert about == metadata
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.safetensors"
    incseg.io.write_tensors(path, {"a": torch.ones(1)}, {})

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match=r"cannot write .*t\.safetensors .*No space left"):
            incseg.io.write_tensors(path, {"a": torch.zeros(1)}, {})
    assert read_tensors(path)[0]["a"].item() == 1
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text('{"index": 0, ')
    with pytest.raises(UserError, match=r"row\.json is damaged .*; delete it"):
        incseg.io.read_json(tmp_path / "row.json")


# --- the order of samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch_size", "world"), [(10, 3, 1), (12, 4, 2), (7, 5, 3), (9, 9, 2)])
def test_every_epoch_is_a_permutation_in_full_batches(size: int, batch_size: int, world: int) -> None:
    shards = [list(EpochOrder(size, batch_size, 3, (1, 2), rank=rank, world=world)) for rank in range(world)]
    whole = list(EpochOrder(size, batch_size, 3, (1, 2)))
    assert len(whole) == 3 * (size // batch_size) == len(EpochOrder(size, batch_size, 3, (1, 2)))
    for number, batch in enumerate(whole):
        assert len(batch) == batch_size
        assert sorted(batch) == sorted(key for shard in shards for key in shard[number]), "shards make up the batch"
    for epoch in range(3):
        drawn = [position for batch in whole for (e, position) in batch if e == epoch]
        assert len(drawn) == len(set(drawn)) == size // batch_size * batch_size
        assert set(drawn) <= set(range(size))
    assert [p for _, p in whole[0]] != [p for _, p in whole[size // batch_size]], "each epoch its own order"


def test_a_set_smaller_than_a_batch_is_repeated() -> None:
    order = EpochOrder(3, 8, 2, (0,))
    assert order.batches_per_epoch == 1
    for epoch, batch in enumerate(order):
        assert [e for e, _ in batch] == [epoch] * 8
        counts = Counter(position for _, position in batch)
        assert sorted(counts) == [0, 1, 2]
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("first", [0, 1, 4, 5, 8])
def test_an_order_resumes_where_it_stopped(first: int) -> None:
    whole = list(EpochOrder(9, 2, 2, (5, 0)))
    rest = EpochOrder(9, 2, 2, (5, 0), first=first)
    assert list(rest) == whole[first:]
    assert len(rest) == len(whole) - first


def test_mean_losses_are_those_of_the_epoch() -> None:
    progress = Progress()
    assert progress.mean_losses == {}
    for number, loss in enumerate([1.0, 3.0, 10.0, 20.0]):
        progress.add({"a": loss}, 1.0, starts_epoch=number % 2 == 0)
    assert (progress.iteration, progress.mean_losses) == (4, {"a": 15.0})


def test_figures_have_their_names() -> None:
    assert FIGURES == ("base", "new", "all", "inc")


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """Newer settings count as their defaults, and as nothing else."""
    config = small_config(tmp_path / "run", train={"epochs": 1})
    train(config)
    saved = yaml.safe_load(RunDir(config.folder).config.read_text())
    for group, names in (("data", ("fit", "empty")), ("train", ("own_head", "calibrate"))):
        for name in names:
            del saved[group][name]
    RunDir(config.folder).config.write_text(yaml.safe_dump(saved))
    train(config)
    other = small_config(tmp_path / "run", train={"epochs": 1}, data={"fit": "whole"})
    with pytest.raises(UserError, match=r"data\.fit was 'crop', now 'whole'"):
        train(other)
