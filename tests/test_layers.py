"""Imports go downward only, read from the syntax tree of every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import incseg

ROOT = Path(incseg.__file__).parent

# From the top down: a room imports itself and any room of a row below, no other of its own row.
ROWS = (
    ("__main__",),
    ("api",),
    ("cli",),
    ("demo", "export", "extension", "gallery", "score", "sweep"),
    ("run", "inference"),
    ("report",),
    ("config",),
    ("engine", "presets"),
    ("methods",),
    ("data", "models"),
    ("protocol", "losses", "metrics", "hub"),
    ("outputs",),
    ("io",),
    ("types", "settings"),
    ("__init__",),
)
RANK = {room: len(ROWS) - row for row, rooms in enumerate(ROWS) for room in rooms}

# A report reads run folders, never a model.
REPORT_MAY_IMPORT = (
    "incseg.io", "incseg.types", "incseg.metrics", "incseg.engine.rundir", "incseg.config",
)  # fmt: skip

FILES = sorted(ROOT.rglob("*.py"))


def room_of(module: str) -> str:
    """Return the room of a module: incseg.data.voc → data. The package itself, which has the version, is __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    return ".".join(("incseg", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import of our own, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                package = package if path.name == "__init__.py" else package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if base.startswith("incseg") and is_module(name) else base for name in inner]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "incseg")


def faults(path: Path) -> list[str]:
    own = room_of(module_name(path))
    found = []
    for line, module in imported(path):
        room = room_of(module)
        if own == "report" and room != "report":
            allowed = module == "incseg" or any((module + ".").startswith(m + ".") for m in REPORT_MAY_IMPORT)
        elif own == "__init__":
            allowed = room in ("api", "inference", "methods", "protocol", "types")  # for type checkers alone
        else:
            allowed = room == own or RANK[room] < RANK[own]
        if not allowed:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return found


def test_every_file_has_a_room() -> None:
    assert {room_of(module_name(path)) for path in FILES} <= set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    assert faults(path) == []


def test_the_package_itself_imports_nothing_at_once() -> None:
    """Reading the version must not wait for torch."""
    body = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8")).body
    at_once = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {getattr(node, "module", None) for node in at_once} <= {"__future__", "typing"}


def test_the_rule_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "losses/a.py": "from incseg.methods.base import Method",
        "models/a.py": "def f():\n    import incseg.data.voc",
        "data/a.py": "from incseg import models",
        "data/b.py": "from ..engine import trainer",
        "report/a.py": "from incseg.engine.trainer import Trainer",
        "report/b.py": "from incseg.methods import METHODS",
        "types.py": "from incseg.io import unknown",
        "__init__.py": "import incseg.engine",
    }
    right = {
        "cli/a.py": "from incseg.run import train\nimport incseg",
        "data/c.py": "from . import source\nimport torch",
        "report/c.py": "from incseg.engine.rundir import RunDir\nfrom incseg.metrics import confusion",
    }
    for name, text in (wrong | right).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert [name for name in wrong if not faults(tmp_path / name)] == []
    assert [name for name in right if faults(tmp_path / name)] == []


REPOSITORY = Path(__file__).parents[1]


def files_on_the_map(text: str) -> list[str]:
    """Return the paths of all files on the map of the code in CONTRIBUTING.md."""
    block = text.partition("## The map of the code")[2].split("```")[1]
    found, root, room = [], "", ""
    for indent, name in re.findall(r"^( *)(\S+)", block, re.MULTILINE):
        if not indent:
            root, room = name, ""
        elif name.endswith("/"):
            room = name
        else:
            found.append(root + (room if len(indent) > 2 else "") + name)
    return found


def test_the_map_of_the_code_is_complete() -> None:
    shown = files_on_the_map((REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    there = [path for folder in (REPOSITORY / "src/incseg", REPOSITORY / "tools") for path in folder.rglob("*.py")]
    assert sorted(shown) == sorted(path.relative_to(REPOSITORY).as_posix() for path in there)
