"""The torture harness: what it counts as lost, and a quick run of every kind of fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.torture.case import Ended, Lost

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (1, "", "Traceback (most recent call last):\nValueError: no\n"),
        (70, "", "anything\n"),
        (-9, "", ""),
        (-11, "", ""),
        (2, "", ""),
        (2, "", "error: one\nerror: two\n"),
        (0, "", "error: yet it says that all is well\n"),
        (0, "", "UserWarning: Corrupt EXIF data\n"),
    ],
    ids=["traceback", "escaped", "hang", "crash", "silent", "two lines", "exit 0", "a library's warning"],
)
def test_what_is_lost(code: int, out: str, err: str) -> None:
    with pytest.raises(Lost):
        Ended(("predict",), code, out, err, 1.0).ended_clearly()


def test_what_survives() -> None:
    taken = Ended(("list",), 0, "fine\n", "warning: one run is left out\n", 1.0)
    refused = Ended(("list",), 2, "", "error: no such file 'x'; give another\n", 1.0)
    assert taken.succeeded() is taken
    assert refused.refused("no such file") is refused
    for wrong in (lambda: refused.succeeded(), lambda: taken.refused("no"), lambda: refused.refused("another reason")):
        with pytest.raises(Lost):
            wrong()


def test_the_short_form_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.torture", "--quick", "--out", tmp_path / "torture"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "torture.json").read_text())
    assert set(results["kinds"]) == {"kills", "disk", "files", "numbers", "inputs", "server"}
    counts = [group for kind in results["kinds"].values() for group in kind["groups"]]
    assert sum(group["cases"] for group in counts) == sum(group["survived"] for group in counts) > 25
    page = (tmp_path / "torture.md").read_text()
    assert f"**{sum(group['cases'] for group in counts)} cases" in page
    assert "Where the kills fell" in page
