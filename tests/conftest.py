"""One torch thread per test process, no caches outside the test's own folder, one hypothesis profile."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# Deadlines judge the machine, not the code; the same examples every time, so that a change alone turns a test red.
# INCSEG_EXPLORE=1 looks for new ones.
explore = bool(os.environ.get("INCSEG_EXPLORE"))
hypothesis.settings.register_profile("incseg", deadline=None, max_examples=50, derandomize=not explore)
hypothesis.settings.load_profile("incseg")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the data folder beside the project, which only its developers have."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no {folder.parent.name}/data beside the project: the real VOC and presence lists are not here")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden.json again (without -n)")
