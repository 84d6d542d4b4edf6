"""Completion in the shells, and a command line that starts without heavy imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from incseg.cli import main
from incseg.cli.completion import script
from incseg.cli.main import COMMANDS
from incseg.data import AUTO, SOURCES
from incseg.methods import METHODS
from incseg.presets import PRESETS

Complete = Callable[..., list[str]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("completion")

    def write(shell: str) -> Path:
        (folder / shell).write_text(script(shell), encoding="utf-8")
        return folder / shell

    return write


@pytest.fixture(scope="module")
def bash(written: Callable[[str], Path]) -> Complete:
    program = shutil.which("bash")
    if program is None:
        pytest.skip("no bash on this machine")
    file = written("bash")

    def complete(*words: str) -> list[str]:
        """Return what bash offers for the last word. No Python is started."""
        code = f'. {file}; COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _incseg; printf "%s\\n" "${{COMPREPLY[@]}}"'
        command = [program, "-c", code, "bash", *words]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=True, env={"PATH": ""}, cwd=file.parent, timeout=60
        )
        assert ran.stderr == ""
        return ran.stdout.split()

    return complete


def test_commands(bash: Complete) -> None:
    assert bash("incseg", "") == list(COMMANDS)
    assert bash("incseg", "--") == ["--help", "--version"]
    assert bash("incseg", "pre") == ["predict"]
    assert bash("incseg", "data", "") == ["check", "convert", "export"]


def test_choices(bash: Complete) -> None:
    assert bash("incseg", "train", "--method", "") == list(METHODS)
    assert bash("incseg", "train", "--preset", "") == list(PRESETS)
    assert bash("incseg", "protocol", "--data", "") == [*SOURCES, AUTO]
    assert bash("incseg", "train", "--data", "=", "v") == ["voc"]
    assert bash("incseg", "train", "--reuse", "=") == ["true", "false"]
    assert bash("incseg", "predict", "run", "--backend", "o") == ["onnx"]
    assert bash("incseg", "predict", "run", "--method.balancing", "o") == ["odds"]
    assert "15-1" in bash("incseg", "train", "--task", "15")


def test_flags(bash: Complete) -> None:
    assert bash("incseg", "train", "--train.lr") == ["--train.lr", "--train.lr_later"]
    assert "--no-check" in bash("incseg", "export", "run", "--")
    assert bash("incseg", "eval", "run", "--save", "--js") == ["--json"]
    assert bash("incseg", "train", "--help") == ["--help", "--help-all"]
    assert bash("incseg", "sweep", "--job") == ["--jobs"]
    assert bash("incseg", "sweep", "--on", "s") == ["slurm"]
    assert bash("incseg", "sweep", "--method", "evi") == ["evidential"]
    assert "--train.lr" in bash("incseg", "extend", "run", "--train.")
    assert bash("incseg", "predict", "run", "--out", "") == ["bash"], "the file that is there"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, written: Callable[[str], Path]) -> None:
    file = written(shell)
    text = file.read_text(encoding="utf-8")
    assert all(name in text for name in (*COMMANDS, *METHODS, *PRESETS, "method.balancing"))
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine: its script was written but not run")
    subprocess.run([shell, "--no-execute" if shell == "fish" else "-n", str(file)], check=True)


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.endswith("complete -o default -F _incseg incseg\n")


def test_help_starts_without_torch() -> None:
    """Nothing else that is slow is imported either: two seconds for one screen are too long."""
    code = (
        "import sys, incseg.cli; incseg.cli.main(['--help']); incseg.cli.main(['--version']); "
        "print(sorted({'torch', 'numpy', 'PIL', 'rich', 'jsonargparse', 'matplotlib'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    if command:
        with pytest.raises(SystemExit):
            main([command, "--help"])
    else:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_short_help_shows_the_defaults_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--preset", "voc-laptop", "--method", "mib", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: efficientnet-lite0)" in shown
    assert "learning rate of step 0 (default: 0.15)" in shown
    assert "(default: mib)" in shown
