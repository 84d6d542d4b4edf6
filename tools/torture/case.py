"""A case, the process that it runs in, and the rules for passing."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from PIL import Image

from incseg.cli import main
from incseg.cli.main import COMMANDS

LIMIT_SECONDS = 300.0
"""A command that takes longer counts as hanging. The longest one takes seconds on an idle machine."""
MOST_RESIDENT = 1500 * 2**20
"""Limit on the resident memory of a command, in bytes; a decompression bomb takes more. It is measured, because a limit
set by the system would make a bomb look like a clean refusal."""
_ESCAPED = 70
_CLEAR = re.compile(
    r"(error|warning|note|skipped): \S|stopped; progress is saved"
    r"|TIFF\w+: |tempfile\.tif: |ERROR: Unexpected (segmentation fault|bus error) encountered in worker"
)
"""Allowed lines on stderr. Libtiff in Pillow and torch's loader processes print their own lines beside ours."""


def preload() -> None:
    """Import everything that a command needs before the first fork, so that forked processes start at once."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"PIL\.")
    for name in COMMANDS:
        importlib.import_module(f"incseg.cli.{name}")
    for module in ("docstring_parser", "shlex", "tensorboard.summary.writer.record_writer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # the first optimiser imports half of torch
    Image.init()


class Lost(Exception):
    """A case has failed; the message has the reason."""


@dataclass(frozen=True)
class Case:
    """One fault.

    group: row of the page in which it counts.
    name:  description of the fault.
    run:   function that injects it in an empty folder and raises Lost if the case fails.
    count: number of faults; a chain of kills is one case with several.
    """

    group: str
    name: str
    run: Callable[[Path], None]
    count: int = 1


@dataclass(frozen=True)
class Kind:
    """The cases of one file. `must` has the expected result of each group."""

    name: str
    must: dict[str, str]
    cases: Callable[[int, bool], Sequence[Case]]
    """(seed, quick) -> cases"""
    details: Callable[[], dict[str, Any]] = dict
    """Further results, called after all cases."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended by itself or was killed."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    resident: int = 0
    """Peak of its resident memory in bytes."""

    def succeeded(self) -> Ended:
        """Require exit code 0 and no unclear line on stderr."""
        self.ended_clearly()
        if self.code != 0:
            self._lost(f"exit {self.code}")
        return self

    def refused(self, pattern: str) -> Ended:
        """Require one line of error that matches a pattern, and a non-zero exit code."""
        self.ended_clearly()
        if self.code == 0:
            self._lost(f"accepted instead of refused by a line like '{pattern}'")
        if not re.search(pattern, self.err + self.out):
            self._lost(f"no line like '{pattern}'")
        return self

    def ended_clearly(self) -> Ended:
        """Require success, or one clear line with a non-zero exit code: no traceback, no signal, no hang."""
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error:")]
        if self.resident > MOST_RESIDENT:
            self._lost(f"{self.resident / 2**20:.0f} MB of memory after {self.seconds:.0f} s")
        if self.code == -signal.SIGKILL:
            self._lost(f"still running after {self.seconds:.0f} s")
        if self.code < 0:
            self._lost(f"ended by signal {-self.code}")
        if self.code == _ESCAPED or "Traceback" in self.err:
            self._lost("traceback")
        if unclear := [line for line in lines if not _CLEAR.match(line)]:
            self._lost(f"unclear line '{unclear[0]}'")
        if len(errors) > 1 or (self.code == 2 and not errors) or (self.code == 0 and errors):
            self._lost(f"exit {self.code} with {len(errors)} lines of error")
        return self

    def _lost(self, what: str) -> NoReturn:
        last = (self.err or self.out).strip().splitlines()[-1:]
        raise Lost(f"{what}; incseg {' '.join(self.argv)!r} printed {' '.join(last)[:300]!r}")


class Running:
    """`incseg ARGV` in its own process, forked from this one so that it starts at once."""

    def __init__(self, argv: Sequence[object], cache: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self.argv = tuple(map(str, argv))
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run_command(cache, prepare)

    def _run_command(self, cache: Path, prepare: Callable[[], None]) -> NoReturn:
        code = _ESCAPED
        try:
            os.setsid()
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            sys.argv = ["incseg", *self.argv]
            os.environ["INCSEG_CACHE"] = str(cache)
            prepare()
            code = main(self.argv)
        except SystemExit as leaving:  # --help
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def printed(self) -> str:
        """Return what is on stdout so far."""
        return os.pread(self._out.fileno(), 1 << 16, 0).decode("utf-8", "replace")

    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Wait until it ends. Kill it with all its processes if it takes too long or too much memory."""
        deadline, looks = time.monotonic() + seconds, 0
        while not self.ended():
            looks += 1
            too_large = looks % 20 == 0 and _resident(self.pid) > MOST_RESIDENT
            if too_large or time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        _, status, used = os.wait4(self.pid, 0)
        texts = []
        for stream in (self._out, self._err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace").replace("\0", ""))
            stream.close()
        code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - self.started
        return Ended(self.argv, code, *texts, seconds, used.ru_maxrss * 1024)


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has just ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def incseg(
    argv: Sequence[object], cache: Path, prepare: Callable[[], None] = lambda: None, seconds: float = LIMIT_SECONDS
) -> Ended:
    """Run a command to its end."""
    return Running(argv, cache, prepare).wait(seconds)


@contextlib.contextmanager
def own_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a folder that is deleted at the end of the case."""
    with tempfile.TemporaryDirectory(prefix="torture-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)
