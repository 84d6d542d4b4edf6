"""Writing files: whole or not at all, and never in place of something that is not a file."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_runs import write_run

from incseg import io
from incseg.cli import main
from incseg.io import FolderLock, NoFileName, no_folder, remove_temporary, replacing, write_text
from incseg.types import UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder of the test: names of sockets must be short, so they are relative."""
    monkeypatch.chdir(tmp_path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def link_to_pipe(path: Path) -> None:
    os.mkfifo("pipe")
    path.symlink_to("pipe")


TAKES_THE_PLACE = "which would be replaced; give the name of a regular file"
OTHER_KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, f"'out' is a pipe, {TAKES_THE_PLACE}"),
    "a socket": (make_socket, f"'out' is a socket, {TAKES_THE_PLACE}"),
    "a link to a pipe": (link_to_pipe, f"'out' is a pipe, {TAKES_THE_PLACE}"),
    "a folder": (os.mkdir, "'out' is a folder; give the name of a file, in it or elsewhere"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_what_is_not_a_file_is_not_replaced(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = OTHER_KINDS[kind]
    write_run(Path("runs/a"))
    make(Path("out"))
    before = os.lstat("out")
    assert main(["compare", "runs", "--out", "out"]) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")
    assert stat.S_IFMT(os.lstat("out").st_mode) == stat.S_IFMT(before.st_mode)
    assert os.path.samestat(os.lstat("out"), before)
    assert not list(Path().glob(".*.tmp"))


def test_nothing_is_written_among_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/stdout is a link, and if the output goes to a file, it leads to a regular file."""
    monkeypatch.setattr(io, "_DEVICES", tmp_path / "dev")
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "printed").write_text("so far")
    (tmp_path / "dev/stdout").symlink_to(tmp_path / "printed")
    for name in ("stdout", "nul"):
        with pytest.raises(NoFileName, match=f"{name}' is a device, which would be replaced"):
            write_text(tmp_path / "dev" / name, "text")
    assert (tmp_path / "dev/stdout").is_symlink()
    assert (tmp_path / "printed").read_text() == "so far"
    write_text(tmp_path / "dev/shm/x", "text")


def test_a_file_in_the_way_of_a_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/a"))
    Path("file").touch()
    assert main(["compare", "runs", "--out", "file/new/table.md"]) == 2
    assert capsys.readouterr().err == (
        "error: 'file/new/table.md' cannot be written: file is not a folder; choose another place\n"
    )
    assert no_folder(Path("file/new")) == Path("file")
    assert no_folder(Path("not/there/yet")) is None


def test_a_link_to_a_file_is_replaced_and_the_file_does_not_change(tmp_path: Path) -> None:
    (tmp_path / "anothers").write_text("precious")
    (tmp_path / "mine").symlink_to("anothers")
    write_text(tmp_path / "mine", "new")
    assert (tmp_path / "anothers").read_text() == "precious"
    assert not (tmp_path / "mine").is_symlink()
    assert (tmp_path / "mine").read_text() == "new"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    name = "x" * 300
    with pytest.raises(OSError, match="name too long") as refused:
        write_text(tmp_path / name, "text")
    assert refused.value.filename == str(tmp_path / name)
    with pytest.raises(OSError, match="No such file") as refused, replacing(tmp_path / "a") as temporary:
        temporary.unlink()
    assert refused.value.filename == str(tmp_path / "a")


def test_who_does_without_a_file_does_without_this_one_too(tmp_path: Path) -> None:
    assert issubclass(NoFileName, OSError)
    assert issubclass(NoFileName, UserError)
    with pytest.raises(OSError, match="is a folder") as refused:
        write_text(tmp_path, "text")
    assert str(refused.value) == f"'{tmp_path}' is a folder; give the name of a file, in it or elsewhere"


def test_a_name_that_cannot_be_written_is_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.onnx").mkdir()
    assert main(["export", "nowhere", "--out", "out.onnx"]) == 2
    assert "is a folder; give the name of a file" in capsys.readouterr().err


_HOLDS_AND_FORKS = """
import os, sys, time
from pathlib import Path
from incseg.io import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.acquire()
child = os.fork()
print(child, flush=True) if child else None
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process inherits a handle without fork")
def test_a_killed_process_frees_its_lock_though_its_children_live(tmp_path: Path) -> None:
    """Loader processes outlive a killed parent by seconds."""
    lock = FolderLock(tmp_path)
    command = [sys.executable, "-c", _HOLDS_AND_FORKS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(io.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert not lock.acquire()
            assert not lock.is_free()
            assert lock.holder() == f"process {parent.pid} on {socket.gethostname()}"
            parent.kill()
            parent.wait(timeout=60)
            deadline = time.monotonic() + 20  # a busy machine may not have started the child yet
            while not lock.acquire() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(child, 0)  # it is alive
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()
    assert lock.holder() == f"process {os.getpid()} on {socket.gethostname()}"
    assert lock.is_in_place()
    (tmp_path / ".lock").unlink()
    assert not lock.is_in_place()
    lock.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process inherits a handle without fork")
def test_a_child_that_ends_does_not_free_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    if (child := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert not FolderLock(tmp_path).acquire()
    lock.release()
    assert FolderLock(tmp_path).is_free()


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsync, a power cut could leave an empty file in place of the old one."""
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), sync(number)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replace"), replace(*names)))
    write_text(tmp_path / "a.txt", "whole")
    assert done == ["fsync", "replace"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_new_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a.txt", "whole")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_only_temporary_files_of_these_names_are_removed(tmp_path: Path) -> None:
    ours, others = [".a.json.0a1b2c3d.tmp", ".a.json.x.tmp"], [".x.tmp", ".b.json.0a1b2c3d.tmp", "a.json.tmp", "a.json"]
    for name in ours + others:
        (tmp_path / name).touch()
    remove_temporary(tmp_path, "a.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
