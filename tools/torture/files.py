"""Damaged files, truncated or with one flipped bit: each must be detected, named, and written again."""

from __future__ import annotations

import functools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tools.torture.case import Case, Kind, Lost, Running, incseg
from tools.torture.runs import CACHED, again, copy_of_finished, finished, require_same, settings

MUST = {
    "checkpoint": "named; the run goes on from the last good step, to the same end",
    "feature cache": "the block is named and made again; the run ends as over a sound cache",
    "kept steps (--reuse)": "trained again; the run ends as without the store",
    "model of a step": "named; once it is deleted as the line says, the same command makes it again, bit for bit",
    "state of a step": "named; once it is deleted as the line says, the same command makes it again, bit for bit",
    "row of a step": "named; once it is deleted as the line says, the same command makes it again, bit for bit",
    "results": "compare names it; the same command makes it again, bit for bit",
    "other files of a cache": "made again; nothing else changes",
}


def cases(seed: int, quick: bool) -> list[Case]:
    draw = random.Random(seed)
    checks: dict[str, Callable[..., None]] = {
        "checkpoint": _checkpoint,
        "feature cache": _block,
        "kept steps (--reuse)": _cached_step,
        "model of a step": functools.partial(_file_of_a_step, "model.safetensors"),
        "state of a step": functools.partial(_file_of_a_step, "state.safetensors"),
        "row of a step": functools.partial(_file_of_a_step, "row.json"),
        "results": _results,
        "other files of a cache": _descriptions,
    }
    found = []
    for group, check in checks.items():
        for what, damage in _DAMAGES.items():
            for number in range(1 if quick else 3 if "bit" in what else 1):
                damaged = functools.partial(damage, random.Random(draw.randrange(2**32)))
                found.append(Case(group, f"{what}, {number}", functools.partial(check, damaged)))
    return found[::17] if quick else found


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(1, len(content))]


def _flipped(draw: random.Random, content: bytes) -> bytes:
    bit = draw.randrange(len(content) * 8)
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _flipped_at_the_end(draw: random.Random, content: bytes) -> bytes:
    """Flip a bit of the second half, which has tensors and figures, not the header."""
    half = len(content) // 2
    return content[:half] + _flipped(draw, content[half:])


_DAMAGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "a flipped bit": _flipped,
    "a flipped bit in the second half": _flipped_at_the_end,
    "cut": _cut,
    "emptied": lambda draw, content: b"",
    "zeros": lambda draw, content: bytes(len(content)),
    "random bytes": lambda draw, content: draw.randbytes(len(content)),
}
Damage = Callable[[bytes], bytes]


def _damage(file: Path, damage: Damage) -> None:
    file.write_bytes(damage(file.read_bytes()))


def _checkpoint(damage: Damage, folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run", train={"checkpoint_seconds": 0.0})
    shutil.copytree(_interrupted(), folder / "run")
    _damage(folder / "run" / "checkpoint.safetensors", damage)
    ended = incseg(command, folder / "cache").succeeded()
    if "checkpoint.safetensors" not in ended.out:
        raise Lost("the damaged checkpoint was not named")
    require_same(finished(), folder / "run")


@functools.cache
def _interrupted() -> Path:
    """Return a run that was killed in step 1 and has a checkpoint of it."""
    folder = finished().parent / "interrupted"
    command = settings(folder.parent / "interrupted.yaml", folder, train={"checkpoint_seconds": 0.0})
    running = Running(command, folder.parent / "cache")
    while not ((folder / "steps/0/row.json").exists() and (folder / "checkpoint.safetensors").exists()):
        if running.ended():
            raise RuntimeError(running.wait().err)
    running.kill()
    running.wait()
    return folder if (folder / "checkpoint.safetensors").exists() else _interrupted()


def _block(damage: Damage, folder: Path) -> None:
    incseg(settings(folder / "plain.yaml", folder / "plain", **CACHED), folder / "cache").succeeded()
    block = max((folder / "cache/features").glob("shapes-train-*/block-*.bin"))
    _damage(block, damage)
    ended = incseg(settings(folder / "settings.yaml", folder / "run", **CACHED), folder / "cache").succeeded()
    if f"made again: {block}" not in ended.out:
        raise Lost("the damaged block was not named")
    require_same(folder / "plain", folder / "run")


def _cached_step(damage: Damage, folder: Path) -> None:
    incseg(settings(folder / "plain.yaml", folder / "plain", reuse=True), folder / "cache").succeeded()
    files = sorted((folder / "cache/steps").glob("*/*"))
    _damage(files[len(damage(b"which one?")) % len(files)], damage)
    incseg(settings(folder / "settings.yaml", folder / "run", reuse=True), folder / "cache").succeeded()
    require_same(finished(), folder / "run")


def _file_of_a_step(name: str, damage: Damage, folder: Path) -> None:
    """Damage the last of two finished steps of three. The error must name the file and a remedy that works."""
    run = copy_of_finished(folder)
    shutil.rmtree(run / "steps/2")
    (run / "results.json").unlink()
    file = run / "steps/1" / name
    _damage(file, damage)
    ended = incseg(again(folder), folder / "cache").ended_clearly()
    if ended.code:
        ended.refused(rf"{re.escape(str(file))}.*delete it")
        file.unlink()
        (run / "steps/1/row.json").unlink(missing_ok=True)
        incseg(again(folder), folder / "cache").succeeded()
    require_same(finished(), run)


def _results(damage: Damage, folder: Path) -> None:
    run = copy_of_finished(folder)
    sound = incseg(["compare", run], folder / "cache").succeeded()
    _damage(run / "results.json", damage)
    ended = incseg(["compare", run], folder / "cache").ended_clearly()
    if ended.code or ended.out != sound.out:  # a flipped bit may have no meaning
        ended.refused("results.json")
    incseg(again(folder), folder / "cache").succeeded()
    require_same(finished(), run)
    incseg(["compare", run], folder / "cache").succeeded()


def _descriptions(damage: Damage, folder: Path) -> None:
    """Damage the descriptions of caches, and cached lists."""
    root = folder / "shapes"
    export = ["data", "export", "--data", "shapes", "--limit", 12, "--out", root]
    incseg(export, folder / "cache").succeeded()
    flags = {"data": {"name": "folder", "root": str(root)}, "task": "joint"}
    incseg(settings(folder / "plain.yaml", folder / "plain", **flags, **CACHED), folder / "cache").succeeded()
    for file in (folder / "cache").rglob("*"):
        if file.is_file() and file.suffix != ".bin" and file.stat().st_size:
            _damage(file, damage)
    incseg(settings(folder / "settings.yaml", folder / "run", **flags, **CACHED), folder / "cache").succeeded()
    require_same(folder / "plain", folder / "run")
    incseg(["cache", "list"], folder / "cache").succeeded()


KIND = Kind("files", MUST, cases)
