"""The estimate of a sweep: what is counted, and how the time follows from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sweeps import QUICK, jobs

from incseg.cli import main
from incseg.cli.main import parse
from incseg.cli.sweep import plan
from incseg.sweep import cost
from incseg.sweep.folder import Job, Sweep, Task


def described(*argv: str) -> list[Job]:
    flags = [f"--{key}={value}" for key, value in QUICK.items()]
    return plan(parse("sweep", ["--out", "nowhere", *flags, *argv]))


def minutes(line: str) -> float:
    found = re.search(r"([\d.]+) (h|min)", line)
    assert found is not None
    return float(found[1]) * (60 if found[2] == "h" else 1)


def test_slots_take_what_is_ready() -> None:
    """A base of 2 s, two runs of 3 s that wait for it, and one of 4 s: in two slots, 7 s."""
    first, second, alone = jobs("first", "second", "alone")
    base = Task((first, second), is_base=True)
    tasks = [base, Task((first,), after=base), Task((second,), after=base), Task((alone,))]
    seconds = dict(zip(tasks, (2.0, 3.0, 3.0, 4.0), strict=True))
    assert [cost.played(tasks, seconds.__getitem__, slots) for slots in (1, 2, 3)] == [12.0, 7.0, 5.0]


def test_an_estimate_counts_runs_bases_and_operations(tmp_path: Path) -> None:
    wanted = described("--method", "finetune,mib,evidential", "--task", "6-4")
    lines = list(cost.estimate(Sweep(tmp_path), wanted, 1, 1e6))
    assert "shapes: 3 runs, 1 shared bases" in lines[1]
    twice = list(cost.estimate(Sweep(tmp_path), wanted, 1, 2e6))
    assert minutes(lines[2]) == pytest.approx(2 * minutes(twice[2]), rel=0.1)
    assert minutes(list(cost.estimate(Sweep(tmp_path), wanted, 3, 1e6))[2]) < minutes(lines[2])
    config = cost.config_of(wanted[0])
    images = cost.images_of(config)
    assert images.classes == 10
    assert len(images.train) == len(images.test) == 2
    one, shared = cost.cost(config, images), cost.cost(cost.config_of(wanted[1]), images)
    assert one.first == shared.first
    net = cost.network(config.model, 32, 10)
    assert one.first == images.train[0] * 3 * net.operations + images.test[0] * net.operations
    assert one.rest == images.train[1] * 4 * net.operations + images.test[1] * net.operations


def test_a_frozen_backbone_is_counted_once_an_image() -> None:
    (job,) = described(
        "--method", "finetune", "--task", "6-4", "--model.freeze_backbone", "true", "--train.scale", "null"
    )
    config = cost.config_of(job)
    images = cost.images_of(config)
    found, net = cost.cost(config, images), cost.network(config.model, 32, 10)
    assert 0 < net.frozen_operations < cost.network(cost.config_of(described()[0]).model, 32, 10).operations
    assert found.features == (sum(images.train) + images.test[-1]) * net.frozen_operations
    assert found.first == images.train[0] * 3 * net.operations + images.test[0] * net.operations


def test_a_presence_list_stands_in_for_a_dataset(tmp_path: Path) -> None:
    file = tmp_path / "voc.txt"
    file.write_text("".join(f"image{i} {i % 20}\n" for i in range(40)))
    flags = ["--data", "voc", "--preset", "paper-voc", "--presence", str(file), "--task", "15-1"]
    (job,) = plan(parse("sweep", ["--out", "nowhere", *flags]))
    images = cost.images_of(cost.config_of(job))
    assert list(images.train) == [30, 2, 2, 2, 2, 2]
    assert images.classes == 20


def test_the_command_measures_this_machine_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "_MEASURED_SECONDS", 0.0)
    flags = [f"--{key}={value}" for key, value in QUICK.items()]
    assert main(["sweep", "--out", str(tmp_path / "x"), "--dry-run", *flags]) == 0
    shown = capsys.readouterr().out
    assert "an estimate, not a measurement" in shown
    assert "measured here" in shown
    assert not (tmp_path / "x").exists()
