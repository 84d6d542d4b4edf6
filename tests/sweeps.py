"""Runs of sweeps for tests: a shell script instead of a run, and small real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from incseg.sweep.folder import Job

QUICK = {
    "preset": "shapes-quick", "data.train_size": 16, "data.val_size": 4, "train.epochs": 1,
    "train.crop": 32, "eval.size": 32, "train.workers": 0, "eval.workers": 0, "threads": 1, "seed": 1,
}  # fmt: skip
SCRIPT = """
root="$1"; name="$2$3"; config="$root/.sweep/$2/run.yaml"
mkdir -p "$root/$2/steps/0"; cd "$root/$2"
exec 9> .lock; flock -n 9 || exit 75
echo "process $$ on $(uname -n)" > .lock-holder
[ -e results.json ] && exit 0
trap 'echo "saved $name" >> "$root/notes"; exit 130' TERM
echo "began $name" >> "$root/notes"
grep -q "fails: true" "$config" && { echo "error: no such thing; give another"; exit 2; }
grep -q "dies: true" "$config" && kill -9 $$
while [ -e "$root/hold" ]; do sleep 0.05; done
touch steps/0/row.json
if [ "$3" != --base ]; then
  echo '{"final": {"base": 1.0, "new": 2.0, "all": 3.0, "inc": 4.0}, "seconds": 5}' > results.json
fi
echo "ended $name" >> "$root/notes"
"""
"""A run in place of `incseg sweep make ROOT NAME [--base]`. It takes the lock of its folder, notes when it begins and
ends, and does what its configuration asks for."""
FAKE = ("sh", "-c", SCRIPT, "make")


def jobs(*names: str, base: str | None = None, **config: Any) -> list[Job]:
    return [Job(name, {"threads": 1, "method": {"name": "mib"}, **config}, base) for name in names]


def notes(root: Path) -> list[str]:
    """Return the notes of the scripts, in order."""
    file = root / "notes"
    return file.read_text().splitlines() if file.exists() else []


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)
