"""What README and docs tell people to type exists: every `incseg …` line parses, every link and file is there."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from incseg.cli.main import COMMANDS
from incseg.cli.settings import method_overrides, parse_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINES = sorted(
    {
        line.split("#")[0].strip().replace("…", "")
        for page in PAGES
        for line in re.findall(r"^(?:torchrun.* -m )?(incseg [a-z].*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
)


def test_the_pages_show_commands() -> None:
    assert {line.split()[1] for line in LINES} >= {"train", "eval", "predict", "protocol", "list"}


@pytest.mark.parametrize("line", LINES)
def test_command_parses(line: str) -> None:
    _, name, *rest = shlex.split(line)
    assert name in COMMANDS
    if name == "train":
        parse_run("incseg train", "", rest)
        return
    if name == "sweep":
        from incseg.cli.sweep import plan

        assert rest[0] == "status" or plan(rest)
        return
    command = importlib.import_module(f"incseg.cli.{name}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    _, unknown = parser.parse_known_args(rest)
    if unknown:
        assert all(token.startswith(command.PASS_UNKNOWN) for token in unknown if token.startswith("--"))
        if name == "extend":
            parse_run("incseg extend", "", unknown)
        else:
            method = "analytic" if any("sharpness" in token for token in unknown) else "evidential"
            assert method_overrides(name, method, unknown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_is_in_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    from incseg.cli import main

    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_the_example_method_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING's method, as printed, learns two steps through the command line with its own flag."""
    from incseg.cli import main

    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) <= 50
    (tmp_path / "guide_example.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--preset shapes-quick --task 6-4 --data.train_size 16 --data.val_size 4 --train.epochs 1 --threads 1"
    out = tmp_path / "run"
    method = ["--method", "guide_example:MyMethod", "--method.strength", "2"]
    assert main(["train", *flags.split(), *method, "--out", str(out)]) == 0
    assert (out / "steps/1/row.json").exists()
    assert "strength: 2.0" in (out / "config.yaml").read_text()
