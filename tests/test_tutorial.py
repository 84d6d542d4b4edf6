"""docs/tutorial.md can be followed: all its commands run, in order, with the small sizes that the page names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import incseg
from incseg.cli import main

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in re.sub(r"\\\n\s*", "", block).splitlines()]
SMALLER = {"--limit": "12", "--train.epochs": "1"}
"""As the page says; the test also uses one thread and loads images in its own process."""


def smaller(command: str) -> list[str]:
    words = shlex.split(command)
    words = [SMALLER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if words[1] in ("train", "extend"):
        words += ["--train.workers", "0", "--eval.workers", "0"]
    return words if words[1] in ("data", "export", "remove") else [*words, "--threads", "1"]


def test_the_page_shows_the_whole_way() -> None:
    assert [line.split()[1] for line in COMMANDS] == [
        "data", "data", "train", "predict", "extend", "predict", "eval", "extend", "extend", "remove",
        "export", "predict",
    ]  # fmt: skip
    assert all(f"{flag} {value}" in PAGE for flag, value in SMALLER.items())


def test_every_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'incseg[onnx]'")
    pytest.importorskip("onnx", reason="needs pip install 'incseg[onnx]'")
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        program, *arguments = smaller(command)
        assert program == "incseg"
        assert main(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
    said = capsys.readouterr().out
    assert "knows 7 classes: disc, square, triangle, ring, star, cross, flower" in said
    assert incseg.load("tutorial/third").classes[-1] == "flower"
    assert incseg.load("tutorial/more-stars").classes[-1] == "star"
    assert "star" not in incseg.load("tutorial/no-star.safetensors").classes
    seen = json.loads(Path("tutorial/second-seen/predictions.json").read_text())
    assert len(seen["images"]) == 24
    for file in re.findall(r"`(tutorial/[\w/.*-]+)`", PAGE):
        assert list(tmp_path.glob(file)), f"the page names {file}"
