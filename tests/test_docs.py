"""README and docs are correct: every `incseg …` line parses, every link, anchor and image exists."""

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
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*PROSE, *sorted((ROOT / "results").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Return the `incseg …` lines in the code blocks of a page, continued lines joined and comments removed."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(FENCE.findall(text)))
    found = re.findall(r"^(?:torchrun.* -m )?(incseg [a-z].*)$", joined, re.MULTILINE)
    return [line.split("#")[0].strip().replace("…", "") for line in found]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        if seen[slug]:
            seen[f"{slug}-{seen[slug]}"] = 0
    return set(seen)


def broken_links(page: Path) -> list[str]:
    """Return the links and images of a page that lead nowhere, anchors included."""
    text = FENCE.sub("", text_of(page))
    broken = []
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    for target in targets:
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(text_of(file))):
            broken.append(target)
    return broken


LINES = sorted({line for page in GUIDES for line in commands(text_of(page))})


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
        from incseg.cli.main import parse
        from incseg.cli.sweep import plan

        assert rest[0] == "status" or plan(parse("sweep", rest))
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


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_sentences_exist(page: Path) -> None:
    assert set(re.findall(r"`incseg\s+([a-z]+)", text_of(page))) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_anchor_or_image_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words, and `code`\n```\n# a comment\n```\n", encoding="utf-8")
    page = tmp_path / "page.md"
    right = "[a](other.md) [b](other.md#two-words-and-code) [c](#here) [d](https://example.org/x)"
    wrong = "[e](gone.md) [f](other.md#a-comment) [g](#there) ![h](gone.png)"
    page.write_text(f"# Here\n{right}\n{wrong}\n", encoding="utf-8")
    assert broken_links(page) == ["gone.md", "other.md#a-comment", "#there", "gone.png"]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page: Path) -> None:
    """At most 120 characters; only rows of tables may be longer."""
    long = [line for line in text_of(page).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_the_index_names_every_page(page: Path) -> None:
    index = ROOT / "docs/README.md"
    name = page.relative_to(ROOT / "docs").as_posix()
    assert page == index or f"({name})" in text_of(index)


def test_every_command_is_in_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    from incseg.cli import main

    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
