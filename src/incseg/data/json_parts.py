"""Read a large JSON file entry by entry. Only one entry is in memory at a time, and each can be read again alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from incseg.data.files import FileError

MOST_BYTES = 16_000_000
"""Limit on one entry, and on the labels of one image. As Python objects they take up to thirty times the memory."""
_CHUNK = 1 << 20
_BLANK = " \t\n\r"
BROKEN = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading values of the wrong kind can raise."""


@dataclass(frozen=True)
class Part:
    """An entry of an array, or of the object that is the file.

    name:   name of the member of the file's object; empty if the file is an array.
    listed: whether it is an element of the member's array.
    """

    name: str
    listed: bool
    offset: int
    length: int
    value: Any


def parts(path: Path) -> Iterator[Part]:
    """Yield the entries of a JSON file: the elements of the top array, or of each array in the top object."""
    try:
        with path.open("rb") as stream:
            yield from _Reader(path, stream).parts()
    except FileNotFoundError:
        raise FileError(path, "no such file", "restore it or correct the path") from None
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", "correct the path or its permissions") from None
    except RecursionError:
        raise FileError(path, "its values are nested too deeply", "export it again") from None


def read_part(stream: IO[bytes], offset: int, length: int) -> Any:
    """Return the entry that `parts` found at this place."""
    stream.seek(offset)
    return json.loads(stream.read(length))


class _Reader:
    """A window on a JSON file. Bytes are read as Latin-1, so that positions are those of the file."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.stream = path, stream
        self.text, self.at, self.base, self.ended = "", 0, 0, False
        self.decoder = json.JSONDecoder()

    def parts(self) -> Iterator[Part]:
        self._more()
        if self.text.startswith("\xef\xbb\xbf"):
            self.at = 3
        first = self._take("[{")
        if first == "[":
            yield from self._array("")
            return
        while self._peek() != "}":
            _, _, name = self._value()
            self._take(":")
            if self._peek() == "[":
                self._take("[")
                yield from self._array(str(name))
            else:
                yield Part(str(name), False, *self._value())
            if self._peek() == ",":
                self._take(",")

    def _array(self, name: str) -> Iterator[Part]:
        while self._peek() != "]":
            yield Part(name, True, *self._value())
            if self._peek() == ",":
                self._take(",")
        self._take("]")

    def _value(self) -> tuple[int, int, Any]:
        """Return the offset of the next value, its length, and the value."""
        self._peek()
        wanted = _CHUNK
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # a number at the end may be incomplete
                    break
            except json.JSONDecodeError as error:
                if self.ended:
                    place = self.base + error.pos
                    raise FileError(self.path, f"is not valid JSON at byte {place}", "export it again") from None
            if len(self.text) - self.at > MOST_BYTES:
                raise FileError(
                    self.path,
                    f"the entry at byte {self.base + self.at} takes more than {MOST_BYTES // 1_000_000} MB",
                    "export it with fewer points",
                )
            self._more(wanted)
            wanted *= 2
        offset, length = self.base + self.at, end - self.at
        if not self.text[self.at : end].isascii():
            value = json.loads(self.text[self.at : end].encode("latin-1").decode("utf-8", "replace"))
        self.at = end
        return offset, length, value

    def _more(self, size: int = _CHUNK) -> None:
        chunk = self.stream.read(size)
        self.ended = len(chunk) < size
        self.base += self.at
        self.text, self.at = self.text[self.at :] + chunk.decode("latin-1"), 0

    def _peek(self) -> str:
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANK:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                raise FileError(self.path, "ends too early, so it is not valid JSON", "export or copy it again")
            self._more()

    def _take(self, allowed: str) -> str:
        found = self._peek()
        if found not in allowed:
            wanted = " or ".join(f"'{one}'" for one in allowed)
            raise FileError(
                self.path,
                f"is not valid JSON: at byte {self.base + self.at} is '{found}' instead of {wanted}",
                "export it again",
            )
        self.at += 1
        return found
