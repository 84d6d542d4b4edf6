"""Faults of a dataset: what is wrong with a file, and many faults of one kind as one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from incseg.data.files import COLOURS, MISSING, UNREADABLE, VALUES, FileError
from incseg.types import UserError

SIZES = "sizes"
"""A kind of fault: a photograph and its mask differ in size. The other kinds are in `files`."""
_MOST_VALUES = 8


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file, and what to do about it.

    Faults of one `kind` are reported together; `found` are the values or colours that are wrong.
    """

    file: str
    fault: str
    remedy: str
    kind: str = ""
    found: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}" + (f"; {self.remedy}" if self.remedy else "")


def fault_of(error: UserError, where: str) -> Fault:
    """The fault that an error reports; `where` names the image if the error names no file."""
    if isinstance(error, FileError):
        return Fault(error.file, error.fault, error.remedy, error.kind, error.found)
    return Fault(where, str(error), "")


def grouped(faults: Sequence[Fault]) -> list[str]:
    """One line per kind of fault, with the number of files and up to three of them; a single fault stays as it is."""
    kinds: dict[str, list[Fault]] = {}
    for number, fault in enumerate(faults):
        kinds.setdefault(fault.kind or f"{number}", []).append(fault)
    return [str(alike[0]) if len(alike) == 1 else _line(kind, alike) for kind, alike in kinds.items()]


def _line(kind: str, faults: Sequence[Fault]) -> str:
    number, files = len(faults), _some_files(faults)
    if kind == COLOURS:
        what = f"{number} masks hold colours instead of class numbers, {_some_found(faults)} ({files})"
    elif kind == VALUES:
        allowed = faults[0].fault.partition(", but ")[2]
        what = f"{number} masks hold {_some_found(faults)}, but {allowed} ({files})"
    elif kind == SIZES:
        what = f"{number} photographs differ in size from their masks ({files})"
    else:
        what = {
            MISSING: f"{number} files are missing ({files})",
            UNREADABLE: f"{number} files cannot be read as images ({files})",
        }[kind]
    remedy = {
        COLOURS: "save each mask as a single-channel or palette PNG whose pixels are class numbers",
        VALUES: faults[0].remedy,
        SIZES: "export both at one size",
        MISSING: "restore them, or take their names off the list",
        UNREADABLE: "export or copy them again",
    }[kind]
    return f"{what}; {remedy}"


def _some_files(faults: Sequence[Fault]) -> str:
    names = [fault.file if fault.kind == SIZES else "/".join(Path(fault.file).parts[-2:]) for fault in faults[:3]]
    return ", ".join(names) + (", …" if len(faults) > 3 else "")


def _some_found(faults: Sequence[Fault]) -> str:
    """The values or colours that the faults report: values in ascending order, colours most frequent first."""
    files: dict[int | str, int] = {}
    for fault in faults:
        for one in fault.found:
            files[one] = files.get(one, 0) + 1
    numbers = sorted(one for one in files if isinstance(one, int))
    found: Sequence[int | str] = numbers or sorted(files, key=lambda one: -files[one])
    shown = ", ".join(str(one) for one in found[:_MOST_VALUES])
    if len(found) <= _MOST_VALUES:
        return shown
    return f"{shown}, … {found[-1]}" if numbers else f"{shown}, …"
