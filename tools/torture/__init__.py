"""Fault injection: one file per kind of fault, with its cases as data. Run with `python -m tools.torture`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # for the small runs that the tests use, too
