"""Micro-batches give the update of the whole batch: every method, unequal parts, two processes; and the norms that
allow it.

Updates are those of the trainer in float64, so values that are equal in theory agree to eight digits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_runs import PYTHON_PATH, TRUST, rows_of, small_config
from torch import Tensor, nn

from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.engine.trainer import TrainConfig, Trainer
from incseg.io import read_tensors, write_tensors
from incseg.methods import METHODS, build_method
from incseg.methods.base import StepContext, StepImages
from incseg.models.norms import FrozenBatchNorm2d
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol
from incseg.run import train
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, UserError

CASES: dict[str, dict[str, Any]] = {name: {"name": name} for name in METHODS} | {
    "evidential-combined": {"name": "evidential", "foreground_weight": True, "pseudo_labels": 0.9, "pod": 0.01},
    "sdr-kd": {"name": "sdr", "output": "kd"},
    "mib-bias": {"name": "mib", "background": "bias"},
    "recall-replay": {"name": "recall", "generator": "small_runs:noise", "replay_images": 5, "helper_epochs": 1},
}
PER_PART = {"seen"}  # counts positions of a mean part; only ratios of it are used
IMAGES, SIZE = 7, 16  # neither 2 nor 4 parts are equal
INFO = DatasetInfo("toy", ("ant", "bee", "cow"))


def as_inputs(images: Any) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).double().movedim(-1, 0) / 255 for image in images])


def drawn(labels: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Return images with blocks of labels. One image is all void, and parts differ in what they show."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.tensor(labels, dtype=torch.uint8)[torch.randint(len(labels), (IMAGES, 4, 4), generator=generator)]
    blocks[0] = IGNORE
    images = torch.randn(IMAGES, 3, SIZE, SIZE, dtype=torch.float64, generator=generator)
    return images, blocks.repeat_interleave(4, 1).repeat_interleave(4, 2)


def learnt(method: dict[str, Any], parts: int, runtime: Runtime, norm: Any = "group") -> dict[str, Tensor]:
    """Return parameters, buffers and the method's state after an update in step 0 and two in step 1."""
    torch.manual_seed(0)
    learner = build_method(method)
    config = ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1), norm=norm)
    model = Segmenter(config, learner.background_output).double()
    settings = TrainConfig(accumulate=parts, batch_size=IMAGES)
    absent = cast(Any, None)
    trainer = Trainer(
        absent, absent, absent, learner, model, settings, 0, runtime, RunDir("nowhere"), absent, absent, absent, {}
    )
    task = "joint" if learner.single_step else "ant,bee/cow"
    for step in Protocol(INFO, task, "overlapped").steps:
        teacher = model.frozen_copy() if step.index else None
        model.grow(Increment(step.names, step.new, IMAGES))
        model.train()
        shown = [0, *range(len(step.old) + 1, len(step.seen) + 1), IGNORE]

        def plain(shown: list[int] = shown) -> Any:
            images, labels = drawn(shown, 9)
            yield Batch(images, labels, torch.bincount(labels.flatten(), minlength=256).float())

        context = StepContext(step, model, teacher, StepImages(plain, inputs=as_inputs), runtime)
        learner.begin_step(context)
        with torch.no_grad():  # away from the teacher, where distances have no gradient to speak of
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
        wrapped = runtime.wrap(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3, 0.9, nesterov=True)
        for iteration in range(1 + min(1, step.index)):
            images, labels = (part[runtime.rank :: runtime.world] for part in drawn(shown, iteration))
            batch = trainer._to_batch(images, labels, range(len(images)))
            trainer._update(wrapped, teacher, optimizer, runtime.grad_scaler(), batch, step, iteration)
        runtime.share_buffers(model)
        learner.end_step(context)
    state = {f"state.{name}": tensor for name, tensor in learner.state().items() if name not in PER_PART}
    return {**model.state_dict(), **state}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        limit = 1e-9 + 1e-7 * float(tensor.double().abs().max()) if tensor.numel() else 0.0
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-6, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Tensor]]:
    """Return the values that one process learns from whole batches."""
    return {case: learnt(method, 1, Runtime("cpu")) for case, method in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_learn_what_the_batch_does(case: str, whole: dict[str, dict[str, Tensor]]) -> None:
    for parts in (2, 4):
        assert_close(learnt(CASES[case], parts, Runtime("cpu")), whole[case])


def process(rank: int, folder: str) -> None:
    """Run one of two processes that learn all cases together. Rank 0 writes the result."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    runtime = Runtime("cpu")
    for case, method in CASES.items():
        tensors = learnt(method, 2, runtime)
        if runtime.is_main:
            write_tensors(Path(folder) / f"{case}.safetensors", tensors, {})
    torch.distributed.destroy_process_group()


def test_two_processes_of_two_micro_batches(tmp_path: Path, whole: dict[str, dict[str, Tensor]]) -> None:
    """Processes have 4 and 3 images, divided into 2, 2 and 2, 1. Only the last micro-batch synchronises with the other
    process."""
    fork = f"import test_accumulate as t; t.torch.multiprocessing.start_processes(t.process, ({str(tmp_path)!r},), 2, "
    done = subprocess.run(
        [sys.executable, "-c", f"{fork} start_method='fork')"],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", **TRUST},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for case, wanted in whole.items():
        assert_close(read_tensors(tmp_path / f"{case}.safetensors")[0], wanted)


def test_gradients_are_sent_once_in_an_update() -> None:
    sent: list[bool] = []

    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            pass

        def no_sync(self) -> Any:
            sent.append(False)
            return contextlib.nullcontext()

    runtime = Runtime("cpu")
    for now in (False, False, True):
        with runtime.synced(Wrapped(), now):
            pass
    assert sent == [False, False]


def test_a_whole_run_by_micro_batches(tmp_path: Path) -> None:
    """Train three steps with the flag and replay. The flag does not change the size of the replayed batch."""
    for name, parts in (("whole", None), ("parts", 3)):
        settings = {"epochs": 1, "accumulate": parts}
        train(small_config(tmp_path / name, model={"norm": "frozen-group"}, train=settings))
    for one, other in zip(rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts"), strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert other["train_images"] == one["train_images"]


@pytest.mark.parametrize(("norm", "same"), [("frozen-group", True), ("batch", False)])
def test_norms(norm: str, same: bool) -> None:
    """Batch norm depends on the micro-batches, so the result differs; with the other norms it is equal."""
    one, other = (learnt({"name": "finetune"}, parts, Runtime("cpu"), norm) for parts in (1, 2))
    close = [torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-9) for name in one]
    assert all(close) is same


def test_frozen_group_has_no_batch_statistics() -> None:
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1), norm="frozen-group"), True)
    kinds = {type(module) for module in model.modules()}
    assert {nn.GroupNorm, FrozenBatchNorm2d} <= kinds
    assert nn.BatchNorm2d not in kinds
    assert any(isinstance(module, FrozenBatchNorm2d) for module in model.backbone.modules())
    assert not any(isinstance(module, nn.GroupNorm) for module in model.backbone.modules())


def test_parts_hold_every_image_once_and_share_the_counts() -> None:
    labels = torch.arange(5, dtype=torch.uint8).view(5, 1, 1).expand(5, 2, 2)
    counts = torch.bincount(labels.flatten(), minlength=256).float()
    stages = (torch.arange(5.0).view(5, 1), torch.arange(5.0, 10).view(5, 1))
    parts = Batch(stages, labels, counts, images=[7, 8, 9, 5, 6]).parts(2)
    assert [part.labels[:, 0, 0].tolist() for part in parts] == [[0, 2, 4], [1, 3]]
    assert [part.inputs[1].flatten().tolist() for part in parts] == [[5, 7, 9], [6, 8]]
    assert [part.images for part in parts] == [[7, 9, 6], [8, 5]]
    assert all(torch.equal(part.counts, counts / 2) for part in parts)
    assert [float(part.share) for part in parts] == pytest.approx([6 / 5, 4 / 5])
    whole = Batch(stages, labels, counts)
    assert whole.parts(1) == [whole]
    assert float(whole.share) == 1


def test_more_micro_batches_than_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.batch_size is 8, less than the 1 processes of 9 micro-batches each"):
        train(small_config(tmp_path / "run", train={"accumulate": 9}))
    with pytest.raises(UserError, match=r"train\.accumulate is 0; it must be at least 1"):
        TrainConfig(accumulate=0)
