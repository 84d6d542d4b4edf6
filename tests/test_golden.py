"""A refactor moves no number: every method's losses and final tensors on three steps of shapes, exact.

`pytest tests/test_golden.py --update-golden` writes golden.json again. Do so only if a change is meant to move a
number, and give the reason in the commit.

The last bits depend on the processor: golden.json has the results of a few kernels here. If they differ, losses are
compared to a millionth instead. Runs are in double precision, because training makes differences of the last bit grow,
in single precision to 4 % of a small loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, small_config

from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.io import read_tensors
from incseg.methods import METHODS
from incseg.run import train
from incseg.types import Inputs

FILE = Path(__file__).with_name("golden.json")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": {"name": name}} for name in METHODS},
    "recall": {"method": {"name": "recall", "generator": "small_runs:noise", "replay_images": 4}},
    "evidential weighted by class": {"method": {"name": "evidential", "class_weight": 0.5}},
    "evidential weighted by foreground": {"method": {"name": "evidential", "foreground_weight": True}},
    "evidential over all seen classes": {"method": {"name": "evidential", "scope": "seen", "pseudo_labels": 0.5}},
    "evidential with POD and pseudo-labels": {"method": {"name": "evidential", "pod": 0.01, "pseudo_labels": 0.5}},
    "evidential with replay": {"method": {"name": "evidential", "generator": "small_runs:noise", "replay_images": 4}},
    "evidential with its own head": {
        "method": {"name": "evidential"},
        "train": {"frozen_later": "model", "own_head": True, "calibrate": True},
    },
    "analytic, base solved": {"method": {"name": "analytic", "base": "solved"}},
    "mib with one bias and fusion": {
        "method": {"name": "mib", "background": "bias", "freeze_old": True},
        "train": {"fusion": "ewf"},
    },
    "mib in micro-batches": {"method": {"name": "mib"}, "train": {"accumulate": 2, "clip": 1.0}},
    "sdr": {"method": {"name": "sdr", "output": "kd"}},
    "sdr with mib's output": {"method": {"name": "sdr", "output": "mib"}},
    "sdr with mib's cross-entropy": {"method": {"name": "sdr", "output": "mib_ce"}},
    "sdr in micro-batches": {"method": {"name": "sdr", "output": "kd"}, "train": {"accumulate": 2}},
}


def arithmetic() -> str:
    """Return a hash of the results of convolutions, products and functions on this machine, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 8, 25, 25, generator=generator)
    kernel = torch.randn(16, 8, 3, 3, generator=generator)
    rows = torch.nn.functional.conv2d(image, kernel, padding=1).flatten(1)
    values = [rows, rows @ rows.T, rows.exp().log1p(), torch.linalg.inv((rows @ rows.T).double() + torch.eye(2))]
    return digest({str(index): value for index, value in enumerate(values)})


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def golden_of(folder: Path) -> dict[str, Any]:
    run = RunDir(folder)
    last = run.steps_done()[-1]
    tensors = {**read_tensors(run.model(last))[0]}
    tensors |= {f"state {name}": tensor for name, tensor in read_tensors(run.state(last))[0].items()}
    rows = rows_of(folder)
    return {
        "losses": [row["losses"] for row in rows],
        "iou": [[row[name] for name in ("base", "new", "all")] for row in rows],
        "tensors": digest(tensors),
    }


@pytest.fixture
def _double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    moved = Runtime.move

    def move(self: Runtime, inputs: Inputs) -> Inputs:
        inputs = moved(self, inputs)
        return inputs.double() if isinstance(inputs, torch.Tensor) else tuple(part.double() for part in inputs)

    monkeypatch.setattr(Runtime, "move", move)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double_precision")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_tensors_are_those_written_down(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    small = {"data": {"train_size": 32, "val_size": 8, "image_size": 32}, "eval": {"size": 32}}
    changes = {**CASES[case], "train": {"crop": 32, **CASES[case].get("train", {})}}
    train(small_config(tmp_path / "run", **{**small, **changes}))
    found = json.loads(json.dumps(golden_of(tmp_path / "run")))
    golden = json.loads(FILE.read_text()) if FILE.exists() else {"cases": {}}
    if request.config.getoption("--update-golden"):
        golden["arithmetic"] = arithmetic()
        golden["cases"][case] = found
        golden["cases"] = {name: golden["cases"][name] for name in CASES if name in golden["cases"]}
        FILE.write_text(json.dumps(golden, indent=1) + "\n")
    elif golden["arithmetic"] == arithmetic():
        assert found == golden["cases"][case]
    else:
        wanted = golden["cases"][case]["losses"]
        assert found["losses"] == [pytest.approx(step, rel=1e-6) for step in wanted]


def test_every_case_is_written_down() -> None:
    assert list(json.loads(FILE.read_text())["cases"]) == list(CASES)
