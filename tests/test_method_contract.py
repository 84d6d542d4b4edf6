"""The contract of every method, those of the package and one from outside: losses, prediction, state, whole runs."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_runs import (
    Interrupting,
    assert_same_run,
    reevaluated_row,
    rows_of,
    small_config,
    train_in_two_processes,
    write_config,
)
from torch import Tensor

from incseg.cli import main
from incseg.config import RunConfig
from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir
from incseg.io import TRUSTED, read_tensors
from incseg.losses.means import Term, normalised
from incseg.losses.pixelwise import row_strips
from incseg.methods import METHODS, build_method, find_method
from incseg.methods.base import Alone, Method, StepContext, StepImages
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol, Step
from incseg.run import train
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Output, Prediction, UserError

OUTSIDE = "outside.tempered:Tempered"
OUTSIDE_SOURCE = '''
"""Softmax with a temperature, from a package of one's own."""
from dataclasses import dataclass

import torch
from incseg.losses.means import PixelMean
from incseg.losses.softmax import cross_entropy_sum
from incseg.outputs.softmax import softmax_prediction
from incseg.methods.base import Method


class Tempered(Method):
    @dataclass
    class Config:
        """Options.

        Args:
            temperature: the logits are divided by it.
        """

        temperature: float = 1.0

    seen_batches = torch.zeros(())
    def pixel_losses(self, logits, labels, teacher, step):
        return {"tempered": PixelMean(cross_entropy_sum(logits / self.config.temperature, labels))}

    def predict(self, logits, increments):
        return softmax_prediction(logits / self.config.temperature)

    def end_step(self, context):
        self.seen_batches = self.seen_batches + len(list(context.images.batches()))

    def state(self):
        return {"seen_batches": self.seen_batches}

    def load_state(self, state):
        self.seen_batches = state["seen_batches"]
'''

INFO = DatasetInfo("toy", ("ant", "bee", "cow", "doe"))
TASK = "ant,bee/cow/doe"  # two classes, then one, then one
SIZE = 24
DISTILS_NEW_OUTPUTS = (
    "mib",
    "plop",
    "sdr",
)  # background or new is what the teacher calls background, at void pixels too

OPTIONS: dict[str, dict[str, Any]] = {"sdr": {"lambda_kd": 1.0}}  # with its 100, distillation outweighs any one batch


def steps_of(name: str) -> tuple[Step, ...]:
    setting = "joint" if name != OUTSIDE and METHODS[name].single_step else "overlapped"
    return Protocol(INFO, TASK, setting).steps


CASES = [(name, index) for name in (*METHODS, OUTSIDE) for index in range(len(steps_of(name)))]


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of the user's own on the path."""
    monkeypatch.setenv(TRUSTED, OUTSIDE)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "__init__.py").write_text("")
    (tmp_path / "outside" / "tempered.py").write_text(OUTSIDE_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("outside", "outside.tempered"):
        monkeypatch.delitem(sys.modules, module, raising=False)


class Averaging(Alone):
    """A process with its own average."""

    def __init__(self, mean: Callable[[Tensor], Tensor]) -> None:
        self.mean = mean  # type: ignore[method-assign]


class Scene:
    """A method in the middle of a step: the grown model, its teacher, and batches with any labels."""

    def __init__(self, name: str, index: int, mean: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        torch.manual_seed(0)
        self.name = name
        self.method = build_method({"name": name, **OPTIONS.get(name, {})})
        config = ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1), norm="group")
        self.model = Segmenter(config, self.method.background_output)
        self.teacher: Segmenter | None = None
        for step in steps_of(name)[: index + 1]:
            self.step = step
            self.new = [len(step.old) + number for number in range(1, len(step.new) + 1)]
            self.teacher = self.model.frozen_copy() if step.index else None
            self.model.grow(Increment(step.names, step.new, 10 + step.index))
            torch.nn.init.normal_(self.model.classifiers[-1].get_parameter("weight"), std=0.3)
            images = StepImages(lambda: iter([self.mixed()]))
            self.context = StepContext(step, self.model, self.teacher, images, Averaging(mean))
            self.method.begin_step(self.context)
            if step.index < index:
                self.method.end_step(self.context)

    def move(self) -> None:
        """Away from the teacher: where both agree, a norm of their difference has no gradient to speak of."""
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)

    def batch(self, labels: Tensor) -> Batch:
        images = torch.randn(len(labels), 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
        return Batch(images, labels, torch.bincount(labels.flatten(), minlength=256).float())

    def mixed(self) -> Batch:
        choices = torch.tensor([0, *self.new, IGNORE], dtype=torch.uint8)
        drawn = torch.randint(len(choices), (2, SIZE, SIZE), generator=torch.Generator().manual_seed(2))
        return self.batch(choices[drawn])

    def filled(self, label: int) -> Batch:
        return self.batch(torch.full((2, SIZE, SIZE), label, dtype=torch.uint8))

    def forward(self, batch: Batch) -> tuple[Output, Output | None]:
        with torch.no_grad():
            teacher = self.teacher(batch.inputs) if self.teacher else None
        return self.model(batch.inputs), teacher

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.losses_of(self.method, batch, *self.forward(batch))

    def losses_of(self, method: Method, batch: Batch, out: Output, teacher: Output | None) -> dict[str, Tensor]:
        """Return the losses as the trainer requests them."""
        method.before_update(lambda of: self.context.processes.mean(of(batch, out, teacher)), self.step)
        return normalised(method.losses(batch, out, teacher, self.step), batch)

    def backward(self, losses: dict[str, Tensor]) -> None:
        self.model.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name

    def predict(self, logits: Tensor) -> Prediction:
        return self.method.predict(logits, self.model.increments)


@pytest.fixture(params=CASES, ids=[f"{name.split(':')[-1]}-{index}" for name, index in CASES])
def scene(request: pytest.FixtureRequest, outside: None) -> Scene:
    return Scene(*request.param)


def assert_losses(losses: dict[str, Tensor]) -> None:
    assert losses
    for name, value in losses.items():
        assert isinstance(name, str)
        assert value.shape == (), name
        assert value.dtype == torch.float32, name
        assert value.isfinite(), name
        assert value.requires_grad, name


def test_losses_are_finite_scalars_whose_gradient_reaches_the_new_classifier(scene: Scene) -> None:
    losses = scene.losses(scene.mixed())
    assert_losses(losses)
    assert all(value.item() >= 0 for value in losses.values())
    scene.backward(losses)
    for parameter in scene.model.classifiers[-1].parameters():
        assert parameter.grad is not None
        assert (parameter.grad.flatten(1).abs().sum(-1) if parameter.ndim > 1 else parameter.grad.abs()).all()


def test_each_new_class_learns_from_its_pixels(scene: Scene) -> None:
    for position, label in enumerate(scene.new):
        scene.backward(scene.losses(scene.filled(label)))
        bias = scene.model.classifiers[-1].get_parameter("bias").grad
        assert bias is not None
        first = len(bias) - len(scene.new)  # a background output may stand before the classes
        assert bias[first + position] < 0, "descent raises the score of the class that is shown"


def test_a_batch_without_new_pixels(scene: Scene) -> None:
    losses = scene.losses(scene.filled(0))
    assert_losses(losses)
    scene.backward(losses)
    bias = scene.model.classifiers[-1].get_parameter("bias").grad
    assert bias is not None
    assert (bias[-len(scene.new) :] > 0).all(), "descent lowers the score of classes that are not there"


def test_a_batch_of_void_teaches_no_class(scene: Scene) -> None:
    losses = scene.losses(scene.filled(IGNORE))
    assert_losses(losses)
    scene.backward(losses)
    newest = scene.model.classifiers[-1].get_parameter("weight").grad
    assert newest is not None
    if scene.name in DISTILS_NEW_OUTPUTS and scene.teacher is not None:
        assert losses["ce"].item() == 0
    else:
        assert (newest == 0).all()


class Meeting:
    """Two processes of a run, as threads. Each gets the mean of both values or, before both run, its own."""

    def __init__(self) -> None:
        self.is_open = False
        self._barrier = threading.Barrier(2, timeout=30)
        self._brought = [torch.zeros(()), torch.zeros(())]

    def mean(self, rank: int, tensor: Tensor) -> Tensor:
        if not self.is_open:
            return tensor
        self._brought[rank] = tensor
        self._barrier.wait()
        result = (self._brought[0] + self._brought[1]) / 2
        self._barrier.wait()
        return result


def test_the_loss_is_a_mean_over_the_global_batch(scene: Scene, request: pytest.FixtureRequest) -> None:
    """Two halves of a batch, each with the mean counts of both halves, average to the whole batch, and so do their
    gradients. DDP relies on this."""
    name, index = request.node.callspec.params["scene"]
    whole, meeting = scene.mixed(), Meeting()
    processes = [Scene(name, index, partial(meeting.mean, rank)) for rank in range(2)]
    meeting.is_open = True
    for process in (scene, *processes):
        process.move()

    def losses_of_half(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        process = processes[rank]
        half = process.batch(whole.labels[rank : rank + 1])
        half.inputs, half.counts = whole.inputs[rank : rank + 1], whole.counts / 2
        losses = process.losses(half)
        process.backward(losses)
        return losses, gradients(process.model)

    together = scene.losses(whole)
    scene.backward(together)
    with ThreadPoolExecutor(2) as pool:
        apart = list(pool.map(losses_of_half, range(2)))
    for part in range(2):
        wanted = (together, gradients(scene.model))[part]
        for term, value in wanted.items():
            got = (apart[0][part][term] + apart[1][part][term]) / 2
            torch.testing.assert_close(got, value, rtol=1e-3, atol=1e-5 + 1e-4 * float(value.detach().abs().max()))


def gradients(model: Segmenter) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_half_precision_gives_finite_float32_losses(scene: Scene) -> None:
    batch = scene.mixed()
    exact = scene.losses(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, teacher = scene.forward(batch)
    assert out.logits.dtype == torch.bfloat16
    losses = scene.losses_of(scene.method, batch, out, teacher)
    assert_losses(losses)
    scene.backward(losses)
    for name, value in losses.items():
        torch.testing.assert_close(value, exact[name], rtol=0.05, atol=0.02)


def test_channels_fit_the_background_output(scene: Scene) -> None:
    out, _ = scene.forward(scene.mixed())
    known = len(scene.step.seen)
    assert scene.model.num_classes == known
    assert out.logits.shape[1] == scene.model.num_outputs == known + scene.method.background_output
    assert scene.predict(out.logits).probabilities.shape[1] == known + 1


@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
def test_predictions_are_probabilities(scene: Scene, scale: float) -> None:
    logits = scale * torch.randn(2, scene.model.num_outputs, 9, 7, generator=torch.Generator().manual_seed(3))
    prediction = scene.predict(logits)
    known = len(scene.step.seen)
    assert prediction.probabilities.shape == (2, known + 1, 9, 7)
    assert prediction.probabilities.isfinite().all()
    assert (prediction.probabilities >= 0).all()
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(2, 9, 7))
    assert prediction.labels.shape == prediction.uncertainty.shape == (2, 9, 7)
    assert prediction.labels.dtype == torch.uint8
    assert prediction.labels.max() <= known
    assert prediction.uncertainty.min() >= 0
    assert prediction.uncertainty.max() <= 1


def test_the_strongest_class_wins(scene: Scene) -> None:
    known = len(scene.step.seen)
    logits = torch.full((1, scene.model.num_outputs, 1, known), -5.0)
    for label in range(1, known + 1):
        logits[0, label - 1 + scene.method.background_output, 0, label - 1] = 9.0
    assert scene.predict(logits).labels.flatten().tolist() == list(range(1, known + 1))


def test_prediction_is_pixelwise(scene: Scene) -> None:
    low = 3 * torch.randn(2, scene.model.num_outputs, 6, 5, generator=torch.Generator().manual_seed(4))
    ((_, logits),) = row_strips(low, (12, 10))
    whole = scene.predict(logits)
    parts = [scene.predict(logits[:, :, rows]) for rows in (slice(0, 1), slice(1, 8), slice(8, 12))]
    for name in ("labels", "probabilities", "uncertainty"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=-2)
        torch.testing.assert_close(joined, getattr(whole, name))
    mirrored = scene.predict(logits.flip(-1))
    torch.testing.assert_close(mirrored.labels.flip(-1), whole.labels)


def test_the_state_survives(scene: Scene) -> None:
    scene.method.end_step(scene.context)
    state = {name: tensor.clone() for name, tensor in scene.method.state().items()}
    fresh = type(scene.method)(scene.method.config)
    fresh.begin_step(scene.context)  # as a resumed step does before it takes up its checkpoint
    fresh.load_state(state)
    assert fresh.state().keys() == state.keys()
    for name, tensor in fresh.state().items():
        assert torch.equal(tensor, state[name]), name
    out, teacher = scene.forward(scene.mixed())
    mine, theirs = (m.predict(out.logits, scene.model.increments) for m in (scene.method, fresh))
    assert torch.equal(mine.probabilities, theirs.probabilities)
    mine_losses, their_losses = (scene.losses_of(m, scene.mixed(), out, teacher) for m in (scene.method, fresh))
    assert mine_losses == their_losses


# --- whole runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*METHODS, OUTSIDE])
def test_a_whole_run(name: str, tmp_path: Path) -> None:
    """One class per step, to the end, then evaluated again with the same row."""
    config = small_config(tmp_path / "run", task="8-1", method={"name": name}, train={"epochs": 1})
    train(config)
    rows = rows_of(config.folder)
    assert [len(row["classes"]) for row in rows] == ([10] if find_method(name).single_step else [8, 1, 1])
    assert len(rows[-1]["iou"]) == 11
    assert rows[-1]["new"] is not None
    assert reevaluated_row(config.folder) == rows[-1]


REPLAY = {"generator": "small_runs:noise", "replay_images": 2}
RUNS: dict[str, dict[str, Any]] = {name: {"method": {"name": name}} for name in METHODS} | {
    "analytic": {"method": {"name": "analytic", "columns": 24}},  # fewer than there are cells
    **{f"{name}-ewf": {"method": {"name": name}, "train": {"fusion": "ewf"}} for name in ("mib", "rw", "evidential")},
    **{f"sdr-{output}": {"method": {"name": "sdr", "output": output}} for output in ("mib_ce", "kd")},
    "recall-replay": {"method": {"name": "recall", "helper_epochs": 1, **REPLAY}},
    "evidential-all": {"method": {"name": "evidential", "pseudo_labels": 0.9, "pod": 0.01, **REPLAY}},
}
HALF = {"evidential-bfloat16": {"method": {"name": "evidential"}, "precision": "bfloat16"}}


def tiny_config(folder: Path, case: dict[str, Any], **changes: Any) -> RunConfig:
    """Return a configuration of six classes in two updates, then four in three, with batches that two processes cannot
    halve."""
    own: dict[str, Any] = {
        "task": "6-4",
        "data": {"train_size": 16, "val_size": 4, "image_size": 32},
        "train": {"epochs": 1, "epochs_later": 3, "batch_size": 7, "crop": 32, "lr_later": 0.001},
        "eval": {"size": 32},
    }
    for given in (case, changes):
        for key, value in given.items():
            own[key] = {**own.get(key, {}), **value} if isinstance(value, dict) else value
    return small_config(folder, **own)


@pytest.mark.parametrize("case", [*RUNS, *HALF])
def test_a_resumed_run_equals_an_uninterrupted_one(case: str, tmp_path: Path) -> None:
    """Stopped in the middle of every step, and once more between training and test of the last step."""
    whole, parts = whole_and_parts(tmp_path, (RUNS | HALF)[case])
    last = len(rows_of(whole.folder)) - 1
    for step in range(last + 1):
        if step and case == "analytic":  # solved in one pass, which begins again
            interrupt(parts, f"reading step {step}", 1)
            continue
        interrupt(parts, f"step {step}/{last}", 2)
        about = checkpoint_of(parts)
        assert (about["step"], about["progress"]["iteration"]) == (step, 1)
    interrupt(parts, f"begin test {last}/{last}")
    train(parts)
    assert_same_run(whole.folder, parts.folder)


def whole_and_parts(folder: Path, case: dict[str, Any]) -> tuple[RunConfig, RunConfig]:
    """Return a finished run, and the same run before its start, with a checkpoint after every update."""
    whole = tiny_config(folder / "whole", case)
    train(whole)
    return whole, tiny_config(folder / "parts", case, train={"checkpoint_seconds": 0.0})


def interrupt(config: RunConfig, moment: str, after: int = 1) -> None:
    with pytest.raises(KeyboardInterrupt), showing(Interrupting(moment, after)):
        train(config)


def checkpoint_of(config: RunConfig) -> Any:
    return json.loads(read_tensors(RunDir(config.folder).checkpoint)[1]["checkpoint"])


@pytest.mark.parametrize("name", METHODS)
def test_a_run_in_bfloat16(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and teacher return bfloat16, and training gives finite float32 weights."""
    given = set()
    losses = METHODS[name].losses

    def watched(self: Method, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        given.update(one.logits.dtype for one in (out, teacher) if one is not None)
        return losses(self, batch, out, teacher, step)

    monkeypatch.setattr(METHODS[name], "losses", watched)
    config = tiny_config(tmp_path / "run", RUNS[name], precision="bfloat16")
    train(config)
    assert given == {torch.bfloat16}
    rows = rows_of(config.folder)
    assert len(rows) == (1 if METHODS[name].single_step else 2)
    for step, row in enumerate(rows):
        assert all(math.isfinite(value) for value in row["losses"].values())
        assert row["gradient"]["mean_norm"] < math.inf
        assert row["gradient"]["mean_norm"] > 0 or (name == "analytic" and row["index"])  # which is solved
        for key, tensor in read_tensors(RunDir(config.folder).model(step))[0].items():
            assert tensor.isfinite().all(), key
            assert tensor.dtype in (torch.float32, torch.int64), key
    assert reevaluated_row(config.folder) == rows[-1]


def test_float16_resumes_with_its_scale(tmp_path: Path) -> None:
    """ILT's gradients overflow at first. A run that forgot the lowered scale would lose updates again."""
    case = {"method": {"name": "ilt"}, "precision": "float16", "train": {"epochs_later": 6}}
    whole, parts = whole_and_parts(tmp_path, case)
    assert rows_of(whole.folder)[1]["gradient"]["mean_norm"] > 0, "in the end an update did not overflow"
    interrupt(parts, "step 1/1", 4)
    assert checkpoint_of(parts)["scaler"]["scale"] < 2**16
    train(parts)
    assert_same_run(whole.folder, parts.folder)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Losses, models and states agree. With group norm, because the statistics of a batch norm are of each process
    alone."""
    alone, both = (
        {case: tiny_config(tmp_path / f"{case}-{who}", RUNS[case], model={"norm": "group"}) for case in RUNS}
        for who in ("alone", "both")
    )
    train_in_two_processes(*both.values())
    for config in alone.values():
        train(config)
    for config in both.values():
        assert json.loads(RunDir(config.folder).environment.read_text())["processes"] == 2
    assert {case: found for case in RUNS if (found := differences(alone[case].folder, both[case].folder))} == {}


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs between two runs beyond rounding."""
    found = []
    for step, (row, other_row) in enumerate(zip(rows_of(one), rows_of(other), strict=True)):
        # POD starts at the teacher, where rounding decides the direction of its norm's gradient
        limit = 2e-2 if "pod" in row["losses"] else 1e-4
        if other_row["losses"] != pytest.approx(row["losses"], rel=limit, abs=1e-6):
            found.append(f"step {step}: losses")
        for file in (RunDir.model, RunDir.state):
            mine, theirs = (read_tensors(file(RunDir(folder), step))[0] for folder in (one, other))
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - {"seen"}:  # SDR counts positions per process
                tensor, other_tensor = mine[name].double(), theirs[name].double()
                scale = float(tensor.abs().max()) if tensor.numel() else 0.0
                if not torch.allclose(tensor, other_tensor, rtol=limit, atol=limit * scale):
                    found.append(f"step {step}: {name}")
    return found


def test_a_method_from_outside_has_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(OUTSIDE_SOURCE.strip().splitlines()) <= 40
    with pytest.raises(SystemExit) as ended:
        main(["train", "--method", OUTSIDE, "--help-all"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--method.temperature" in shown
    assert "the logits are divided by it" in shown
    assert "--method.balancing" not in shown
    settings = small_config(tmp_path / "run", task="joint", train={"epochs": 1})
    base = ["train", "--config", write_config(settings, tmp_path / "c.yaml"), "--method", OUTSIDE]
    assert main([*base, "--method.temperature", "2"]) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["method"] == {"name": OUTSIDE, "temperature": 2.0}
    assert OUTSIDE in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "--method.temperature", "5"]) == 0
    capsys.readouterr()
    assert main([*base, "--method.temprature", "2"]) == 2
    assert "did you mean --method.temperature?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("finetun", "unknown method 'finetun'; did you mean 'finetune'"),
        ("absent.module:Class", "cannot be imported .*No module named 'absent'"),
        ("outside.tempered:Absent", "cannot be imported .*Absent"),
        ("outside.tempered:torch", "is not a subclass"),
        ("pathlib:Path", "is not a subclass of incseg.methods.base.Method"),
        (":", "cannot be imported"),
    ],
)
def test_methods_that_are_not_there(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUSTED, name)
    with pytest.raises(UserError, match=message):
        find_method(name)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"method 'finetune': .*unexpected keyword argument 'x'"):
        build_method({"name": "finetune", "x": 1})


def test_every_method_is_described() -> None:
    for name, kind in METHODS.items():
        assert issubclass(kind, Method)
        assert (sys.modules[kind.__module__].__doc__ or "").strip(), name
        assert isinstance(kind.background_output, bool)
        options: Any = kind.Config()
        assert kind(options).config is options
