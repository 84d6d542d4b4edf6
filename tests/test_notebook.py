"""The notebook runs unchanged, and is committed without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import PYTHON_PATH

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
# In a process of its own: Jupyter's libraries warn of themselves.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def test_it_is_committed_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert outputs(notebook) == []
    assert all(cell.get("execution_count") is None for cell in notebook["cells"])


def test_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="pip install incseg[dev] brings what runs notebooks")
    pytest.importorskip("ipykernel", reason="pip install incseg[dev] brings what runs notebooks")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), "run.ipynb"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    made = outputs(json.loads((tmp_path / "run.ipynb").read_text(encoding="utf-8")))
    said = "".join("".join(output.get("text", "")) for output in made)
    assert "('background', 'disc', 'square', 'ring')" in said
    assert "ring    new" in said
    assert "unknown setting 'train.epoch'; did you mean train.epochs?" in said
    assert sum("image/png" in output.get("data", {}) for output in made) == 2
    assert [output for output in made if output.get("name") == "stderr"] == []
