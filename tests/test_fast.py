"""Options that save time on a GPU give the same values on a CPU, except for the last digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import rows_of, small_config
from torch import nn

from incseg.cli.settings import parse_run
from incseg.config import RunConfig
from incseg.engine.rundir import RunDir
from incseg.engine.trainer import Fast
from incseg.io import read_tensors
from incseg.run import train
from incseg.types import UserError


def assert_alike(one: RunConfig, other: RunConfig) -> None:
    for step, (row, found_row) in enumerate(zip(rows_of(one.folder), rows_of(other.folder), strict=True)):
        assert found_row["losses"] == pytest.approx(row["losses"], rel=1e-4)
        usual, found = (read_tensors(RunDir(config.folder).model(step))[0] for config in (one, other))
        assert usual.keys() == found.keys()
        for name, tensor in usual.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_channels_last_and_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool | None]] = []
    step = torch.optim.SGD.step

    def spied(self: torch.optim.SGD, *arguments: object) -> object:
        group = self.param_groups[0]
        kernels = [p for p in group["params"] if p.ndim == 4 and p.shape[-1] > 1]
        seen.append((all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels), group["fused"]))
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.SGD, "step", spied)
    ways: tuple[Fast, ...] = ("channels_last", "fused")
    plain, fast = (
        small_config(tmp_path / name, task="8-2", train={"epochs": 1, "fast": chosen})
        for name, chosen in (("plain", None), ("fast", ways))
    )
    train(plain)
    assert set(seen) == {(False, None)}
    seen.clear()
    train(fast)
    assert set(seen) == {(True, True)}
    assert_alike(plain, fast)


def test_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own kernels; compiling them for this processor would take a minute."""
    compiled: list[nn.Module] = []
    by_torch = torch.compile

    def spied(model: nn.Module) -> object:
        compiled.append(model)
        return by_torch(model, backend="eager")

    monkeypatch.setattr(torch, "compile", spied)
    plain, fast = (
        small_config(tmp_path / name, setting="joint", data={"train_size": 8}, train={"epochs": 1, "fast": chosen})
        for name, chosen in (("plain", None), ("fast", ("compile",)))
    )
    train(plain)
    assert compiled == []
    train(fast)
    assert len(compiled) == 1
    assert_alike(plain, fast)


def test_fast_is_a_flag() -> None:
    assert parse_run("incseg train", "", ["--train.fast", "[fused,compile]"]).train.fast == ("fused", "compile")
    assert parse_run("incseg train", "", []).train.fast is None
    with pytest.raises(UserError, match=r"train\.fast"):
        parse_run("incseg train", "", ["--train.fast", "[quick]"])
