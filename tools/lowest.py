"""Print the lowest declared version of every dependency but torch, as constraints of pip, for `make test-lowest`."""

from __future__ import annotations

import re
from pathlib import Path

text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
for name, version in re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)[^"]*"', text.split("\ndev = ")[0]):
    if name not in ("torch", "hatchling"):
        print(f"{name}=={version}")
