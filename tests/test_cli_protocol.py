"""The command `incseg protocol`, from a presence file: no image is needed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from incseg.cli import protocol as command
from incseg.types import UserError


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a terminal so wide that the table wraps nothing."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def presence(tmp_path: Path) -> str:
    """Write four images with zero-based classes: aeroplane; aeroplane and pottedplant; none; tvmonitor."""
    path = tmp_path / "presence.txt"
    path.write_text("first 0\nsecond 0 15\nthird\nfourth 19\n")
    return str(path)


def test_json(presence, capsys):
    assert run("--data", "voc", "--task", "15-1", "--setting", "disjoint", "--presence", presence, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert [step["train_images"] for step in summary["steps"]] == [1, 1, 0, 0, 0, 1]
    assert [step["index"] for step in summary["steps"]] == list(range(6))
    assert summary["steps"][0]["ids"] == list(range(1, 16))
    assert summary["steps"][0]["classes"][0] == "aeroplane"
    assert summary["steps"][5]["classes"] == ["tvmonitor"]
    assert summary["rules"]["name"] == "plop"


def test_table_shows_steps_and_rules(presence, capsys):
    assert run("--data", "voc", "--task", "19-1", "--rules", "mib", "--presence", presence) == 0
    text = capsys.readouterr().out
    for expected in ("voc 19-1, overlapped", "aeroplane", "tvmonitor", "1-19", "training images in the dataset: 4"):
        assert expected in text
    assert "label rules: mib" in text
    assert "void pixels (255) count as background" in text


def test_a_hundred_names_are_shortened(presence, capsys):
    assert run("--data", "ade20k", "--task", "100-10", "--order", "b", "--presence", presence) == 0
    text = capsys.readouterr().out
    assert "ade20k 100-10, overlapped, order b" in text
    assert "and 92 more" in text
    assert "unlabelled pixels (0)" in text


def test_unknown_task(presence):
    with pytest.raises(UserError, match=r"did you mean '15-1'\?"):
        run("--data", "voc", "--task", "15_1", "--presence", presence)


def test_counts_of_the_real_masks(shared, capsys):
    """All 10582 masks of VOC are read once; the second task finds the index in the cache."""
    root = str(shared / "voc224" / "VOC2012")
    for task, setting, counts in (
        ("15-1", "overlapped", [9568, 487, 299, 491, 500, 548]),
        ("5-3", "disjoint", [1753, 1517, 624, 1296, 3924, 1468]),
    ):
        assert run("--data", "voc", "--root", root, "--task", task, "--setting", setting, "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert [step["train_images"] for step in summary["steps"]] == counts
        assert summary["steps"][-1]["test_images"] == 1449
