"""Faults of the disk and the clock: full, read-only, deleted, in use by another process, a clock that jumps."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.torture.case import Case, Ended, Kind, Lost, Running, incseg
from tools.torture.runs import CACHED, again, copy_of_finished, finished, require_same, settings

MUST = {
    "disk full": "one line that names the file; with space again, the same command ends as if nothing had been",
    "no writing": "one line; a cache that cannot be written is done without",
    "folder vanishing": "one line, or the run begins anew; never half a run that looks like a whole one",
    "clock jumping": "nothing depends on it",
    "two processes": "the second is refused by the name of the first, which ends as if alone",
}


def cases(seed: int, quick: bool) -> list[Case]:
    draw = random.Random(seed)
    sizes = [1 << 12, 1 << 13, 1 << 14, 1 << 15, 60_000, 90_000, 120_000]
    full = [
        Case("disk full", f"no file above {size} bytes", functools.partial(_no_large_files, size)) for size in sizes
    ]
    if _can_mount():
        blocks = [*range(0, 200, 20), *range(200, 1000, 100)]
        full += [
            Case("disk full", f"a disk of {size + 4} KB", functools.partial(_small_disk, size + 4)) for size in blocks
        ]
        full += [
            Case("disk full", f"a disk of {size} KB for the cache", functools.partial(_small_cache, size))
            for size in (4, 100, 300, 600, 900)
        ]
        full.append(Case("disk full", "results of predict on a disk of 8 KB", _small_disk_for_predictions))
    unwritable = {
        "the run folder cannot be made": _unwritable_parent,
        "the run folder may not be written": _unwritable_run,
        "the cache may not be written": _unwritable_cache,
        "the results of predict may not be written": _unwritable_results,
        "the run may not be read": _unreadable_run,
        "the table of compare may not be written": _unwritable_table,
    }
    vanishing = [
        Case("folder vanishing", f"{what}, moment {moment}", functools.partial(_vanishing, what, draw.random()))
        for moment in range(8)
        for what in ("the run", "the cache", "a finished step")
    ]
    clocks = {
        "files from the year 2100": functools.partial(_touched, 4102444800.0),
        "files from 1970": functools.partial(_touched, 0.0),
        "files from 1901": functools.partial(_touched, -(2.0**31)),
        "the clock goes back an hour at every look": functools.partial(_clock, -3600.0),
        "the clock goes on a year at every look": functools.partial(_clock, 3600.0 * 24 * 365),
        "the clock stops": functools.partial(_clock, None),
    }
    others = {
        "train beside train": _two_runs,
        "twelve at once, one of them works": _many_at_once,
        "eval and predict beside train": _readers_beside,
    }
    found = [*full, *vanishing]
    for group, some in (("no writing", unwritable), ("clock jumping", clocks), ("two processes", others)):
        found += [Case(group, name, run) for name, run in some.items()]
    return full[2:3] if quick else found


# --- full ----------------------------------------------------------------------------------------------------


def _no_large_files(size: int, folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run", train={"checkpoint_seconds": 0.0})

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    ended = _to_a_file(command, folder, limit)
    if ended.code == 0:
        raise Lost("it reports success although files could not be written")
    _resumes(command, folder)


def _to_a_file(command: list[object], folder: Path, limit: Callable[[], None]) -> Ended:
    return incseg(command, folder / "cache", limit).refused(
        r"cannot write|File too large|No space left|too small|needs"
    )


def _resumes(command: list[object], folder: Path) -> None:
    incseg(command, folder / "cache").succeeded()
    require_same(finished(), folder / "run")


def _small_disk(kilobytes: int, folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "disk" / "run", train={"checkpoint_seconds": 0.0})
    with _mounted(folder / "disk", kilobytes):
        ended = incseg(command, folder / "cache")
        if ended.code:
            ended.refused(r"cannot write|No space left")
        else:
            ended.succeeded()
        _enlarge(folder / "disk")
        incseg(command, folder / "cache").succeeded()
        require_same(finished(), folder / "disk" / "run")


def _small_cache(kilobytes: int, folder: Path) -> None:
    """Fill the disk of the cache: the run continues without the cache."""
    plain = settings(folder / "plain.yaml", folder / "plain", **CACHED)
    incseg(plain, folder / "cache").succeeded()
    command = settings(folder / "settings.yaml", folder / "run", **CACHED)
    with _mounted(folder / "disk", kilobytes):
        ended = incseg(command, folder / "disk" / "cache").ended_clearly()
        if ended.code:
            ended.refused("the feature cache needs .* GB and .* has .* GB free; set INCSEG_CACHE")
    incseg(command, folder / "cache").succeeded()
    if not ended.code and "feature cache cannot be written" in ended.out:
        return  # computed from pixels in full precision, so the last digits differ
    require_same(folder / "plain", folder / "run")


def _small_disk_for_predictions(folder: Path) -> None:
    images = _some_images(folder, 6)
    with _mounted(folder / "disk", 8):
        argv = ["predict", finished(), images, "--out", folder / "disk" / "out"]
        incseg(argv, folder / "cache").refused("No space left")
        if left := [file for file in (folder / "disk").rglob("*") if file.is_file() and file.stat().st_size == 0]:
            raise Lost(f"an empty file is left: {left[0].name}")


def _some_images(folder: Path, count: int) -> Path:
    argv = ["data", "export", "--data", "shapes", "--split", "val", "--limit", count, "--out", folder / "shapes"]
    incseg(argv, folder / "cache").succeeded()
    return folder / "shapes" / "images"


@functools.cache
def _can_mount() -> bool:
    place = Path(f"/tmp/torture-mount-{os.getpid()}")
    try:
        with _mounted(place, 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        with contextlib.suppress(OSError):
            place.rmdir()


@contextlib.contextmanager
def _mounted(place: Path, kilobytes: int) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(place)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


def _enlarge(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True, capture_output=True)


# --- not writable --------------------------------------------------------------------------------------------


def _drop_root() -> None:
    """Become an ordinary user: permissions do not apply to root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def _open_to_all(folder: Path) -> None:
    """Make `folder` and everything in it accessible to all users."""
    folder.chmod(0o755)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)


def _unwritable_parent(folder: Path) -> None:
    (folder / "closed").mkdir()
    command = settings(folder / "settings.yaml", folder / "closed" / "run")
    _open_to_all(folder)
    (folder / "closed").chmod(0o555)
    incseg(command, folder / "cache", _drop_root).refused(r"cannot write the run folder .*; choose another with --out")


def _unwritable_run(folder: Path) -> None:
    run = copy_of_finished(folder)
    (run / "steps/2/row.json").unlink()
    (run / "results.json").unlink()
    _open_to_all(folder)
    for path in [run, *run.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    incseg(again(folder), folder / "cache", _drop_root).refused("cannot write the run folder")
    _open_to_all(folder)
    incseg(again(folder), folder / "cache", _drop_root).succeeded()
    require_same(finished(), run)


def _unwritable_cache(folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run", **CACHED)
    (folder / "cache").mkdir()
    _open_to_all(folder)
    (folder / "cache").chmod(0o555)
    ended = incseg(command, folder / "cache", _drop_root).succeeded()
    if "continuing without it" not in ended.out:
        raise Lost("it did not report that the cache cannot be written")


def _unwritable_results(folder: Path) -> None:
    images = _some_images(folder, 2)
    (folder / "out").mkdir()
    run = copy_of_finished(folder)
    _open_to_all(folder)
    (folder / "out").chmod(0o555)
    incseg(["predict", run, images, "--out", folder / "out"], folder / "cache", _drop_root).refused("Permission denied")


def _unreadable_run(folder: Path) -> None:
    run = copy_of_finished(folder)
    _open_to_all(folder)
    for name in ("config.yaml", "steps/2/model.safetensors", "results.json"):
        (run / name).chmod(0)
        ended = [incseg([c, run], folder / "cache", _drop_root).ended_clearly() for c in ("eval", "compare")]
        if not any(one.code for one in ended):
            raise Lost(f"{name} cannot be read, and no command reports it")
        (run / name).chmod(0o666)


def _unwritable_table(folder: Path) -> None:
    run = copy_of_finished(folder)
    (folder / "closed").mkdir()
    _open_to_all(folder)
    (folder / "closed").chmod(0o555)
    incseg(["compare", run, "--out", folder / "closed" / "table.md"], folder / "cache", _drop_root).refused(
        "Permission denied"
    )


# --- deleted -------------------------------------------------------------------------------------------------


def _vanishing(what: str, moment: float, folder: Path) -> None:
    """Delete something during the run. Afterwards the same command must give the same result."""
    command = settings(folder / "settings.yaml", folder / "run", **CACHED, task="6-2")
    plain = incseg(settings(folder / "plain.yaml", folder / "plain", **CACHED), folder / "cache2").succeeded()
    running = Running(command, folder / "cache")
    wait = moment * plain.seconds
    while not running.ended() and time.monotonic() - running.started < wait:
        time.sleep(0.001)
    if what == "a finished step":
        while not (folder / "run/steps/0/row.json").exists() and not running.ended():
            time.sleep(0.001)
    place = {"the run": folder / "run", "the cache": folder / "cache", "a finished step": folder / "run/steps/0"}[what]
    shutil.rmtree(place, ignore_errors=True)
    running.wait().ended_clearly()
    incseg(command, folder / "cache").succeeded()
    require_same(folder / "plain", folder / "run")


# --- the clock -----------------------------------------------------------------------------------------------


def _touched(when: float, folder: Path) -> None:
    """Give files absurd dates. The run must still resume and be evaluated, and caches be listed and cleared."""
    command = settings(folder / "settings.yaml", folder / "run", **CACHED, reuse=True)
    incseg(command, folder / "cache").succeeded()
    shutil.copytree(folder / "run", folder / "copy")
    (folder / "run/steps/2/row.json").unlink()
    for path in folder.rglob("*"):
        os.utime(path, (when, when))
    incseg(command, folder / "cache").succeeded()
    require_same(folder / "copy", folder / "run")
    for argv in (["cache", "list"], ["eval", folder / "run"], ["compare", folder / "run"], ["cache", "clear", "--all"]):
        incseg(argv, folder / "cache").succeeded()


def _clock(jump: float | None, folder: Path) -> None:
    def fake() -> None:
        now = [1.7e9]

        def fake_time() -> float:
            now[0] += jump or 0.0
            return now[0]

        time.time = fake_time  # type: ignore[assignment]

    command = settings(folder / "settings.yaml", folder / "run", train={"checkpoint_seconds": 0.0})
    incseg(command, folder / "cache", fake).succeeded()
    require_same(finished(), folder / "run")


# --- two processes -------------------------------------------------------------------------------------------


def _two_runs(folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run", train={"epochs": 6})
    first = Running(command, folder / "cache")
    while not (folder / "run" / "log.txt").exists() and not first.ended():
        time.sleep(0.001)
    incseg(command, folder / "cache").refused(rf"in use by process {first.pid} on .*; wait for it")
    first.wait().succeeded()
    incseg(settings(folder / "alone.yaml", folder / "alone", train={"epochs": 6}), folder / "cache").succeeded()
    require_same(folder / "alone", folder / "run")


def _many_at_once(folder: Path) -> None:
    command = settings(folder / "settings.yaml", folder / "run")
    running = [Running(command, folder / "cache") for _ in range(12)]
    ended = [one.wait() for one in running]
    for one in ended:
        one.succeeded() if one.code == 0 else one.refused("is in use by process|in use by another process")
    if not any(one.code == 0 for one in ended):
        raise Lost("none of them worked")
    require_same(finished(), folder / "run")


def _readers_beside(folder: Path) -> None:
    """Read a run while it trains: commands must see finished steps only."""
    command = settings(folder / "settings.yaml", folder / "run", train={"checkpoint_seconds": 0.0})
    images = _some_images(folder, 1)
    writer = Running(command, folder / "cache")
    while not writer.ended():
        for argv in (["eval", folder / "run"], ["predict", folder / "run", images, "--out", folder / "out"]):
            ended = incseg(argv, folder / "cache")
            if ended.code:
                ended.refused("no finished step yet|does not exist|is not a run folder")
            else:
                ended.succeeded()
    writer.wait().succeeded()
    require_same(finished(), folder / "run")


KIND = Kind("disk", MUST, cases)
