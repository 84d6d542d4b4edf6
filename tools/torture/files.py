"""Files that rot on disk: truncated or with one bit turned, each is found out, named, and made again."""

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
        "kept steps (--reuse)": _kept_step,
        "model of a step": functools.partial(_file_of_a_step, "model.safetensors"),
        "state of a step": functools.partial(_file_of_a_step, "state.safetensors"),
        "row of a step": functools.partial(_file_of_a_step, "row.json"),
        "results": _results,
        "other files of a cache": _notes,
    }
    found = []
    for group, check in checks.items():
        for accident, wound in _ACCIDENTS.items():
            for number in range(1 if quick else 3 if accident.endswith("bit turned") else 1):
                wounded = functools.partial(wound, random.Random(draw.randrange(2**32)))
                found.append(Case(group, f"{accident}, {number}", functools.partial(check, wounded)))
    return found[::17] if quick else found


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(1, len(content))]


def _turned(draw: random.Random, content: bytes) -> bytes:
    bit = draw.randrange(len(content) * 8)
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _turned_at_the_end(draw: random.Random, content: bytes) -> bytes:
    """Where tensors and figures are, not the header."""
    half = len(content) // 2
    return content[:half] + _turned(draw, content[half:])


_ACCIDENTS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "a bit turned": _turned,
    "in the second half a bit turned": _turned_at_the_end,
    "cut": _cut,
    "emptied": lambda draw, content: b"",
    "zeros": lambda draw, content: bytes(len(content)),
    "random bytes": lambda draw, content: draw.randbytes(len(content)),
}
Wound = Callable[[bytes], bytes]


def _wound(file: Path, wound: Wound) -> None:
    file.write_bytes(wound(file.read_bytes()))


def _checkpoint(wound: Wound, folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run", train={"checkpoint_seconds": 0.0})
    shutil.copytree(_interrupted(), folder / "run")
    _wound(folder / "run" / "checkpoint.safetensors", wound)
    ended = incseg(command, folder / "cache").succeeded()
    if "checkpoint.safetensors" not in ended.out:
        raise Lost("the damaged checkpoint was not named")
    require_same(finished(), folder / "run")


@functools.cache
def _interrupted() -> Path:
    """A run that was killed in step 1 with a checkpoint of it."""
    folder = finished().parent / "interrupted"
    command = settings(folder.parent / "interrupted.yaml", folder, train={"checkpoint_seconds": 0.0})
    running = Running(command, folder.parent / "cache")
    while not ((folder / "steps/0/row.json").exists() and (folder / "checkpoint.safetensors").exists()):
        if running.ended():
            raise RuntimeError(running.wait().err)
    running.kill()
    running.wait()
    return folder if (folder / "checkpoint.safetensors").exists() else _interrupted()


def _block(wound: Wound, folder: Path) -> None:
    incseg(settings(folder / "plain.yaml", folder / "plain", **CACHED), folder / "cache").succeeded()
    block = max((folder / "cache/features").glob("shapes-train-*/block-*.bin"))
    _wound(block, wound)
    ended = incseg(settings(folder / "settings.yaml", folder / "run", **CACHED), folder / "cache").succeeded()
    if f"made again: {block}" not in ended.out:
        raise Lost("the damaged block was not named")
    require_same(folder / "plain", folder / "run")


def _kept_step(wound: Wound, folder: Path) -> None:
    incseg(settings(folder / "plain.yaml", folder / "plain", reuse=True), folder / "cache").succeeded()
    kept = sorted((folder / "cache/steps").glob("*/*"))
    _wound(kept[len(wound(b"which one?")) % len(kept)], wound)
    incseg(settings(folder / "settings.yaml", folder / "run", reuse=True), folder / "cache").succeeded()
    require_same(finished(), folder / "run")


def _file_of_a_step(name: str, wound: Wound, folder: Path) -> None:
    """The last of two finished steps of three is damaged: the line names the file, and what it says to do helps."""
    run = copy_of_finished(folder)
    shutil.rmtree(run / "steps/2")
    (run / "results.json").unlink()
    file = run / "steps/1" / name
    _wound(file, wound)
    ended = incseg(again(folder), folder / "cache").ended_clearly()
    if ended.code:
        ended.refused(rf"{re.escape(str(file))}.*delete it")
        file.unlink()
        (run / "steps/1/row.json").unlink(missing_ok=True)
        incseg(again(folder), folder / "cache").succeeded()
    require_same(finished(), run)


def _results(wound: Wound, folder: Path) -> None:
    run = copy_of_finished(folder)
    sound = incseg(["compare", run], folder / "cache").succeeded()
    _wound(run / "results.json", wound)
    ended = incseg(["compare", run], folder / "cache").ended_clearly()
    if ended.code or ended.out != sound.out:  # a bit can turn where it means nothing
        ended.refused("results.json")
    incseg(again(folder), folder / "cache").succeeded()
    require_same(finished(), run)
    incseg(["compare", run], folder / "cache").succeeded()


def _notes(wound: Wound, folder: Path) -> None:
    """What a cache says of itself, and lists that are made once."""
    root = folder / "shapes"
    export = ["data", "export", "--data", "shapes", "--limit", 12, "--out", root]
    incseg(export, folder / "cache").succeeded()
    flags = {"data": {"name": "folder", "root": str(root)}, "task": "joint"}
    incseg(settings(folder / "plain.yaml", folder / "plain", **flags, **CACHED), folder / "cache").succeeded()
    for file in (folder / "cache").rglob("*"):
        if file.is_file() and file.suffix != ".bin" and file.stat().st_size:
            _wound(file, wound)
    incseg(settings(folder / "settings.yaml", folder / "run", **flags, **CACHED), folder / "cache").succeeded()
    require_same(folder / "plain", folder / "run")
    incseg(["cache", "list"], folder / "cache").succeeded()


KIND = Kind("files", MUST, cases)
