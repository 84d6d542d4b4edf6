"""pyproject.toml declares exactly what the code imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import incseg
from incseg.cli.doctor import _EXTRAS, _REQUIRED

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
"""Packages whose distribution has another name."""


def imported_packages() -> set[str]:
    """Return the packages of others that any file of incseg imports."""
    found: set[str] = set()
    for path in Path(incseg.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - {"incseg"}


def declared(section: str) -> set[str]:
    """Return the distributions that a list of pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(rf"^{section} = \[(.*?)\n?\]$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return {name.lower() for name in re.findall(r'"([\w-]+)', block[1])}


EXTRAS = ("imagenet", "tensorboard", "timm", "onnx", "hub", "wandb", "trackio", "ray", "slurm")


def test_imports_are_declared() -> None:
    imported = {DISTRIBUTIONS.get(name, name).lower() for name in imported_packages()}
    assert imported <= declared("dependencies").union(*map(declared, EXTRAS))


def test_the_doctor_looks_for_every_dependency() -> None:
    assert {DISTRIBUTIONS.get(name, name).lower() for name in _REQUIRED} == declared("dependencies")
    assert {extra: set(packages) for extra, packages in _EXTRAS.items()} == {e: declared(e) for e in EXTRAS}


def test_the_package_is_typed_and_its_version_is_the_same_everywhere() -> None:
    assert (Path(incseg.__file__).parent / "py.typed").is_file()
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {incseg.__version__}\n" in citation
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == incseg.__version__


def test_the_licence_of_every_dependency_is_listed() -> None:
    needed = declared("dependencies").union(*map(declared, EXTRAS))
    page = (ROOT / "docs/reference/licences.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (\w+) \|", page, re.MULTILINE)) - {"package"} == needed
