"""A class taught in the demo's page: what is learnt, what is refused, and that only one lesson runs at a time."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import until
from demo_runs import random_run, small_analytic_run
from PIL import Image
from test_demo import PNG, ask, decoded, encoded, error_of, picture, serving, upload

from incseg.data.folder import Folder
from incseg.demo import teach as demo_teach
from incseg.demo.models import MOST_TAUGHT, Models
from incseg.demo.server import DemoServer
from incseg.demo.teach import MOST_PHOTOGRAPHS, Lesson, LessonError
from incseg.inference import load
from incseg.types import Increment

LAST = 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_analytic_run(tmp_path_factory.mktemp("teach") / "run")


@pytest.fixture
def server(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DemoServer]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with serving(Models([run], "cpu", 1), read_seconds=5) as server:
        yield server


def photograph(seed: int, size: tuple[int, int] = (64, 48)) -> tuple[bytes, bytes]:
    """Return a photograph with a red square, and its mask."""
    image, mask = picture(*size, seed), np.zeros((size[1], size[0]), dtype=np.uint8)
    mask[10 : size[1] - 10, 12 : size[0] - 20] = 255
    pixels = np.asarray(image).copy()
    pixels[mask > 0] = (230, 20, 20)
    return encoded(Image.fromarray(pixels)), encoded(Image.fromarray(mask))


def packed(pairs: list[tuple[bytes, bytes]], name: Any = "red", model: Any = 0, step: Any = LAST) -> bytes:
    """Return a lesson in the form that the page sends."""
    sizes = [[len(image), len(mask)] for image, mask in pairs]
    head = json.dumps({"model": model, "step": step, "name": name, "photographs": sizes}).encode()
    return struct.pack("<I", len(head)) + head + b"".join(image + mask for image, mask in pairs)


def teach(server: DemoServer, content: bytes, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a lesson. It starts Python and torch, which takes long on a busy machine."""
    return ask(
        server, "POST", "/teach", content, seconds=400, **{"Content_Type": "application/octet-stream", **headers}
    )


def program(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run this program instead of `incseg extend`."""
    monkeypatch.setattr(demo_teach, "PROGRAM", (sys.executable, "-S", "-c", code))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_class_is_learnt_beside_the_old_model(server, run, tmp_path):
    before, files = upload(server, PNG, step=LAST)[2], files_in(run)
    status, _, body = teach(server, packed([photograph(seed) for seed in range(2)]))
    assert status == 200, body
    found = json.loads(body)
    assert {**found, "seconds": 0, "iou": 0, "unchanged": 0} == {
        "name": "red", "marked": 2, "held_back": 0, "predicted": True, "improved": False, "model": 0, "step": LAST + 1,
        "seconds": 0, "iou": 0, "unchanged": 0,
    }  # fmt: skip
    assert found["iou"] > 50
    step = json.loads(ask(server, "GET", "/about.json")[2])["models"][0]["steps"][-1]
    assert step == {"step": LAST + 1, "new": ["red"], "taught": True, "cannot_learn": ""}

    image = photograph(9)[0]
    after = decoded(upload(server, image, step=LAST + 1)[2])
    assert after["classes"][-1] == "red"
    old, new = (decoded(answer) for answer in (before, upload(server, PNG, step=LAST)[2]))
    np.testing.assert_array_equal(old["labels"], new["labels"])
    assert old["classes"] == new["classes"]
    assert files_in(run) == files

    status, _, saved = ask(server, "GET", f"/taught.safetensors?model=0&step={LAST + 1}")
    (tmp_path / "saved.safetensors").write_bytes(saved)
    result = load(tmp_path / "saved.safetensors", device="cpu").predict(Image.open(io.BytesIO(image)))
    np.testing.assert_array_equal(result.labels, after["labels"])
    left = files_in(tmp_path / "temporary")
    assert len(left) == 1  # no photograph, no mask, no cache
    assert left[0].endswith(f"0-{LAST + 1}.safetensors")
    assert files_in(Path(os.environ["INCSEG_CACHE"])) == []


def test_what_was_taught_goes_with_the_server(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program(monkeypatch, "raise SystemExit('error: no')")
    with serving(Models([run], "cpu", 1)) as server:
        teach(server, packed([photograph(0)]))
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


GOOD = photograph(0)
LESSONS = {
    "nothing": (b"", "the lesson cannot be read"),
    "a head that ends": (struct.pack("<I", 1000) + b"{}", "the lesson cannot be read"),
    "no JSON": (struct.pack("<I", 4) + b"\xff\xff\xff\xff", "the lesson cannot be read"),
    "deep JSON": (struct.pack("<I", 40000) + b"[" * 40000, "the lesson cannot be read"),
    "more than it says": (packed([GOOD]) + b"x", "the lesson cannot be read"),
    "a negative size": (packed([GOOD]).replace(f"[[{len(GOOD[0])},".encode(), b"[[-1," + b" " * 1), "cannot be read"),
    "a name of another type": (packed([GOOD], name=["red"]), "the lesson cannot be read"),
    "no photograph": (packed([]), f"there are 0 photographs; give 1 to {MOST_PHOTOGRAPHS}"),
    "too many": (packed([(b"", b"")] * (MOST_PHOTOGRAPHS + 1)), f"there are {MOST_PHOTOGRAPHS + 1} photographs"),
    "no name": (packed([GOOD], name="  "), "the class has no name"),
    "a long name": (packed([GOOD], name="x" * 41), "cannot be the name of a class"),
    "two names": (packed([GOOD], name="red,green"), "cannot be the name of a class"),
    "a bell": (packed([GOOD], name="re\ad"), "cannot be the name of a class"),
    "background": (packed([GOOD], name="Background"), "cannot be the name of a class"),
    "a known name": (packed([GOOD], name="Disc"), "the model knows the class 'disc' already; write it so"),
    "an unknown step": (packed([GOOD], step=9), "there is no such model or step"),
    "an unknown model": (packed([GOOD], model=3), "there is no such model or step"),
    "no image": (packed([GOOD, (b"GIF89a", GOOD[1])]), "photograph 2: cannot be read as an image"),
    "no mask": (packed([(GOOD[0], b"")]), "the mask of photograph 1: cannot be read as an image"),
    "a mask of another kind": (packed([(GOOD[0], encoded(picture(), "JPEG"))]), "the mask of photograph 1: cannot be"),
    "a mask of another shape": (
        packed([(GOOD[0], encoded(Image.new("L", (64, 64), 255)))]),
        "photograph 1 is 64×48 pixels and its mask 64×64",
    ),
    "nothing marked": (packed([(GOOD[0], encoded(Image.new("L", (64, 48))))]), "nothing is marked as red"),
}  # fmt: skip


def test_lessons_that_cannot_be_taught(server, monkeypatch, tmp_path):
    program(monkeypatch, "raise SystemExit('error: it began')")
    for name, (content, part) in LESSONS.items():
        status, _, body = teach(server, content)
        assert (status, part in error_of(body)) == (422, True), (name, body)
    assert files_in(tmp_path / "temporary") == []


@pytest.mark.parametrize(("marked", "train", "val"), [(1, 3, 1), (2, 4, 2), (3, 4, 1), (9, 9, 2)])
def test_some_of_three_or_more_are_held_back(tmp_path, marked, train, val):
    """With fewer, the photographs to learn from are also tested on. Photographs without the class are always learnt
    from."""
    empty = encoded(Image.new("L", (64, 48)))
    pairs = [photograph(seed) for seed in range(marked)] + [(GOOD[0], empty)] * 2
    assert Lesson.read(packed(pairs)).write(tmp_path, ("PNG",), 10**6) == (marked, val if marked >= 3 else 0)
    source = Folder(tmp_path)
    assert [len(source.names(split)) for split in ("train", "val")] == [train, val]
    shown = [bool(source.mask("val", i).any()) for i in range(val)]
    assert all(shown)


def test_only_solved_classes_are_improved():
    lesson = Lesson(0, 0, "red", [])
    lesson.require_new_to([Increment(("blue",), (1,), 1), Increment(("red",), (2,), 1, 1, solved=True)])
    with pytest.raises(LessonError, match="knows the class 'red' already; choose another"):
        lesson.require_new_to([Increment(("red",), (1,), 1)])
    with pytest.raises(LessonError, match="knows the class 'Red' already; write it so to improve it"):
        lesson.require_new_to([Increment(("Red",), (1,), 1, 1, solved=True)])


def test_a_model_without_sums_cannot_be_taught(tmp_path):
    models = Models([random_run(tmp_path / "run")], "cpu", 1)
    assert all("has no sums" in step["cannot_learn"] for step in models.about()[0]["steps"])
    with serving(models) as server:
        status, _, body = teach(server, packed([GOOD], step=0))
    assert status == 422
    assert "has no sums" in error_of(body)


@pytest.mark.parametrize(("headers", "status"), [
    ({"Content_Type": "text/plain"}, 415),
    ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
    ({"Origin": "https://elsewhere.org"}, 403),
    ({"Host": "elsewhere.org"}, 421),
])  # fmt: skip
def test_foreign_lessons_are_refused(server, headers, status):
    assert teach(server, packed([GOOD]), **headers)[0] == status


def test_lessons_have_a_largest_size(run):
    with serving(Models([run], "cpu", 1), lesson_bytes=1000) as server:
        status, _, body = teach(server, b"x" * 1001)
    assert status == 413
    assert "the photographs have 0.0 MB; the limit is" in error_of(body)


def test_taught_models_alone_can_be_fetched(server):
    for query in ("", "?model=0&step=0", f"?model=0&step={LAST}", "?model=0&step=2", "?model=9&step=0"):
        assert ask(server, "GET", f"/taught.safetensors{query}")[0] == 404


def test_one_class_at_a_time_while_predictions_continue(server, monkeypatch, tmp_path):
    began, go = tmp_path / "began", tmp_path / "go"
    program(
        monkeypatch,
        f"import os, time\nopen({str(began)!r}, 'w')\nwhile not os.path.exists({str(go)!r}): time.sleep(.01)\n"
        "raise SystemExit('error: enough')",
    )
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(teach, server, packed([GOOD]))
        try:
            until(began.exists, "the lesson runs")
            status, _, body = teach(server, packed([GOOD]))
            assert status == 409
            assert "another class is being taught" in error_of(body)
            assert upload(server, PNG, step=LAST)[0] == 200
        finally:
            go.touch()
        assert first.result()[0] == 500


def test_a_failure_leaves_the_model_and_names_no_path(server, monkeypatch, tmp_path, capsys):
    program(monkeypatch, f"raise SystemExit('error: no space left in {tmp_path}')")
    about = ask(server, "GET", "/about.json")[2]
    status, _, body = teach(server, packed([GOOD]))
    assert status == 500
    assert error_of(body) == "the class could not be learnt; see the server's terminal"
    assert f"no space left in {tmp_path}" in capsys.readouterr().err
    assert ask(server, "GET", "/about.json")[2] == about
    assert upload(server, PNG, step=LAST)[0] == 200


def sleeping(monkeypatch: pytest.MonkeyPatch, pid: Path) -> None:
    program(monkeypatch, f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")


def is_alive(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_lesson_that_takes_too_long_is_aborted(run, monkeypatch, tmp_path):
    sleeping(monkeypatch, tmp_path / "pid")
    with serving(Models([run], "cpu", 1), teach_seconds=2) as server:
        status, _, body = teach(server, packed([GOOD]))
    assert status == 422
    assert "longer than 2 s" in error_of(body)
    assert not is_alive(tmp_path / "pid")


@pytest.mark.parametrize("left", [True, False])
def test_a_lesson_ends_with_who_asked_and_with_the_server(run, monkeypatch, tmp_path, left):
    pid = tmp_path / "pid"
    sleeping(monkeypatch, pid)
    content = packed([GOOD])
    with serving(Models([run], "cpu", 1)) as server:
        head = f"POST /teach HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(content)}\r\n\r\n"  # noqa: E501
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(head.encode() + content)
            until(lambda: pid.exists() and pid.read_text(), "the lesson runs")
            if not left:
                closing = threading.Thread(target=server.server_close)
                closing.start()
                closing.join(20)
        until(lambda: not is_alive(pid), "the process has ended", seconds=20)


def test_so_many_classes_and_no_more(server):
    server.models._known[0].taught |= {100 + k: Path("x") for k in range(MOST_TAUGHT)}
    status, _, body = teach(server, packed([GOOD]))
    assert status == 422
    assert f"{MOST_TAUGHT} classes were taught" in error_of(body)
