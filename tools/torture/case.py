"""A case, the process it runs in, and what counts as survived."""

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
"""A command that takes longer hangs; the longest here takes seconds on an idle machine."""
MOST_RESIDENT = 1500 * 2**20
"""Memory that a command may hold, in bytes: a bomb that went off holds more. What it holds is measured. A limit on
addresses would make a bomb look like a clean refusal."""
_ESCAPED = 70
_CLEAR = re.compile(
    r"(error|warning|note|skipped): \S|stopped; progress is saved"
    r"|TIFF\w+: |tempfile\.tif: |ERROR: Unexpected (segmentation fault|bus error) encountered in worker"
)
"""Libtiff inside Pillow and torch's loader processes talk to stderr themselves; our own line comes all the same."""


def preload() -> None:
    """Import what any command will, so that no forked process has to; done before the first fork."""
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
    """What came out of a case instead of what must."""


@dataclass(frozen=True)
class Case:
    """One fault.

    group: which row of the page it is counted in.
    name:  what is done.
    run:   does it in an empty folder of its own; raises Lost.
    count: how many faults this is (a chain of kills is one case and several kills).
    """

    group: str
    name: str
    run: Callable[[Path], None]
    count: int = 1


@dataclass(frozen=True)
class Kind:
    """The cases of one file: `must` says for each group what has to come out."""

    name: str
    must: dict[str, str]
    cases: Callable[[int, bool], Sequence[Case]]
    """(seed, quick) -> cases"""
    told: Callable[[], dict[str, Any]] = dict
    """What else the cases found out, once they have run."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended: by itself, or killed by us or by its time limit."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    resident: int = 0
    """The most memory that it held, in bytes."""

    def succeeded(self) -> Ended:
        """Exit 0 and nothing on stderr that a person has to ask about."""
        self.ended_clearly()
        if self.code != 0:
            self._lost(f"exit {self.code}")
        return self

    def refused(self, pattern: str) -> Ended:
        """One line of error that says this, and a non-zero exit."""
        self.ended_clearly()
        if self.code == 0:
            self._lost(f"taken, where a line like '{pattern}' must refuse it")
        if not re.search(pattern, self.err + self.out):
            self._lost(f"no line like '{pattern}'")
        return self

    def ended_clearly(self) -> Ended:
        """Success, or one clear line with a non-zero exit: no traceback, no signal, no hang."""
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error:")]
        if self.resident > MOST_RESIDENT:
            self._lost(f"held {self.resident / 2**20:.0f} MB of memory after {self.seconds:.0f} s")
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
        raise Lost(f"{what}; incseg {' '.join(self.argv)!r} said {' '.join(last)[:300]!r}")


class Running:
    """`incseg ARGV` in a process of its own, forked from this one, so that it starts at once."""

    def __init__(self, argv: Sequence[object], cache: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self.argv = tuple(map(str, argv))
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_command(cache, prepare)

    def _be_the_command(self, cache: Path, prepare: Callable[[], None]) -> NoReturn:
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

    def said(self) -> str:
        """On stdout, so far."""
        return os.pread(self._out.fileno(), 1 << 16, 0).decode("utf-8", "replace")

    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Until it ends, or is killed with all its processes because it does not, or takes too much memory."""
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
    """Bytes of memory that a process holds now; 0 where it has just ended."""
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
    """A folder that goes when the case ends."""
    with tempfile.TemporaryDirectory(prefix="torture-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)
