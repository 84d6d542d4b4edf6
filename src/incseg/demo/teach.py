"""Teach a class in the page: its photographs become a small dataset in a temporary folder, and `incseg extend` adds it
to a model in a process of its own. So the old model can predict meanwhile, a failure or a deadline ends only that
process, and the user's caches contain nothing of the photographs."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from incseg.data.extended import folded
from incseg.data.files import FileError, decode_image
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import reason_of
from incseg.io import read_json, write_text
from incseg.metrics import agreement, mean_new_iou
from incseg.types import Increment, UserError

MOST_PHOTOGRAPHS = 12
LONGEST_SIDE = 2048
"""Longest side of a photograph to learn from; larger ones are reduced."""
LONGEST_NAME = 40
ENOUGH_TO_HOLD_BACK = 3
"""With at least this number of marked photographs, one in five is held back to choose how readily the class is
predicted. Then the class is found much better on other photographs (docs/how-to/demo.md). With fewer, the photographs
to learn from are used to choose."""
_HELD_BACK_OF = 5
_LEAST_MARKED = 16
"""Fewest marked pixels in all photographs together; fewer are an accident."""
_SHAPE_TOLERANCE = 0.02
"""Largest difference between the aspect ratios of a photograph and its mask: both were rounded to whole pixels."""
_POLL_SECONDS = 0.1
MASK_FORMATS = ("PNG",)
PROGRAM = (sys.executable, "-m", "incseg")


class LessonError(UserError):
    """A lesson that cannot be taught, with the reason in a line for the page."""


class Interrupted(Exception):
    """The client has disconnected, or the server stops."""


@dataclass
class Lesson:
    """A class and encoded photographs of it, each with a mask: black pixels are not the class, all others are."""

    model: int
    step: int
    name: str
    photographs: list[tuple[memoryview, memoryview]]

    @staticmethod
    def read(content: bytes) -> Lesson:
        """Read a lesson from the page: the length of a head (uint32), the head (JSON), all files one after the other.

        The head has model, step, name, and in `photographs` the sizes in bytes of each image and of its mask.
        """
        try:
            (length,) = struct.unpack_from("<I", content)
            head = json.loads(content[4 : 4 + length])
            model, step, name, sizes = (head[key] for key in ("model", "step", "name", "photographs"))
            numbers = [model, step, *(size for pair in sizes for size in pair)]
            sound = all(type(n) is int and n >= 0 for n in numbers) and all(len(pair) == 2 for pair in sizes)
            sound &= isinstance(name, str) and 4 + length + sum(numbers[2:]) == len(content)
        except (struct.error, ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise LessonError("the lesson cannot be read; load the page again")
        if not 1 <= len(sizes) <= MOST_PHOTOGRAPHS:
            raise LessonError(f"there are {len(sizes)} photographs; give 1 to {MOST_PHOTOGRAPHS}")
        files, place = [], 4 + length
        for size in numbers[2:]:
            files.append(memoryview(content)[place : place + size])
            place += size
        return Lesson(model, step, _checked_name(name), list(zip(files[::2], files[1::2], strict=True)))

    def require_new_to(self, increments: Sequence[Increment]) -> None:
        """Refuse a name that the model knows, unless its class was solved: more photographs improve such a class."""
        for increment in increments:
            for known in increment.classes:
                if folded(known) == folded(self.name) and not (increment.solved and known == self.name):
                    remedy = "write it so to improve it" if increment.solved else "choose another name"
                    raise LessonError(f"the model knows the class '{known}' already; {remedy}")

    def write(self, root: Path, formats: tuple[str, ...], most_pixels: int) -> tuple[int, int]:
        """Write the photographs as a dataset of the kind `folder`; return how many are marked and held back."""
        marked, names, pixels = list[str](), list[str](), 0
        for folder in ("images", "masks"):
            (root / folder).mkdir(parents=True)
        for number, (content, drawn) in enumerate(self.photographs, start=1):
            image = _decoded(content, f"photograph {number}", formats, most_pixels)
            mask = _decoded(drawn, f"the mask of photograph {number}", MASK_FORMATS, most_pixels)
            _require_same_shape(number, image.size, mask.size)
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            of_class = Image.fromarray(np.asarray(mask).any(-1)).resize(image.size, Image.Resampling.NEAREST)
            names.append(f"{number:02}")
            if count := int(np.asarray(of_class).sum()):
                marked.append(names[-1])
                pixels += count
            image.save(root / "images" / f"{names[-1]}.png", compress_level=1)
            of_class.convert("1").save(root / "masks" / f"{names[-1]}.png")
        if pixels < _LEAST_MARKED:
            raise LessonError(f"nothing is marked as {self.name}; draw over it, or load a mask")
        held_back = marked[_HELD_BACK_OF // 2 :: _HELD_BACK_OF] if len(marked) >= ENOUGH_TO_HOLD_BACK else []
        write_text(root / "classes.txt", f"background\n{self.name}\n")
        write_text(root / "train.txt", "".join(f"{name}\n" for name in names if name not in held_back))
        write_text(root / "val.txt", "".join(f"{name}\n" for name in held_back or marked))
        return len(marked), len(held_back)


def _checked_name(name: str) -> str:
    name = unicodedata.normalize("NFC", " ".join(name.split()))
    if not name:
        raise LessonError("the class has no name; give it one")
    if len(name) > LONGEST_NAME or not name.isprintable() or "," in name or folded(name) in ("background", "joint", ""):
        raise LessonError(
            f"'{name[:LONGEST_NAME]}' cannot be the name of a class; give letters and digits, at most {LONGEST_NAME}"
        )
    return name


def _decoded(content: memoryview, what: str, formats: tuple[str, ...], most_pixels: int) -> Image.Image:
    try:
        return decode_image(bytes(content), what, formats, most_pixels)
    except FileError as error:
        raise LessonError(str(error)) from error


def _require_same_shape(number: int, image: tuple[int, int], mask: tuple[int, int]) -> None:
    ratios = [width / height for width, height in (image, mask)]
    if abs(ratios[0] / ratios[1] - 1) > _SHAPE_TOLERANCE + 1 / min(mask):
        shown, drawn = (f"{width}×{height}" for width, height in (image, mask))
        raise LessonError(f"photograph {number} is {shown} pixels and its mask {drawn}; give a mask of its shape")


def extend(
    file: Path, lesson: Lesson, root: Path, options: Sequence[str], seconds: float, stopped: Callable[[], bool]
) -> tuple[Path, dict[str, Any]]:
    """Add the class of the dataset in `root` to a model, and return the file of the new model and its `summary`.

    options: further options of `incseg extend`.
    seconds: time limit.
    stopped: function that is called repeatedly; the process is ended once it returns true.
    """
    out, log = root / "run", root / "extend.log"
    command = [
        *PROGRAM, "extend", str(file), "--root", str(root), f"--classes={lesson.name}",
        "--recipe", "closed-form", "--out", str(out), *options, "--train.workers", "0", "--eval.workers", "0",
    ]  # fmt: skip
    environment = {**os.environ, "INCSEG_CACHE": str(root / "cache")}
    until = time.monotonic() + seconds
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for the server, which then ends it
        )  # fmt: skip
    try:
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_SECONDS)
            if stopped():
                raise Interrupted
            if time.monotonic() > until:
                raise LessonError(f"it took longer than {seconds:.0f} s; give fewer or smaller photographs")
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise UserError(f"incseg extend: {reason_of(child.returncode, log.read_text(errors='replace'))}")
    run = RunDir(out)
    return run.model(1), summary(read_json(run.forgetting), lesson.name)


def summary(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the facts about a learnt class that the page shows: the percentage of old classes' pixels that are
    unchanged (None if there are none), and how well the class is found where it was marked."""
    of_class = found["new"][name]
    return {
        "name": name,
        "unchanged": agreement(found),
        "iou": None if of_class["iou"] is None else mean_new_iou(found),
        "predicted": of_class["predicted"] > 0,
        "improved": "iou_before" in of_class,
    }
