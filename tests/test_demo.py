"""The demo's server: its answers, and how it treats requests that clients should not send."""

from __future__ import annotations

import gc
import http.client
import io
import json
import re
import signal
import socket
import struct
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from browser import until
from demo_runs import SIZE, STEPS, demo_until_signal, random_run
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from incseg.cli import main
from incseg.demo import models as demo_models
from incseg.demo.models import LONGEST_SIDE, MOST_ANSWER_BYTES, Models, longest_side
from incseg.demo.server import DemoServer, Limits
from incseg.inference import load
from incseg.types import MAX_CLASSES, UserError

LAST = len(STEPS) - 1
_STATIC = ("/", "/app.js", "/teach.js", "/style.css", "/icon.svg", "/about.json")
PAGES = (*_STATIC, *(f"/samples/{i}.png" for i in range(6)))


@contextmanager
def serving(models: Models, host: str = "127.0.0.1", **limits: Any) -> Iterator[DemoServer]:
    server = DemoServer(models, host, 0, Limits(**limits))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_run(tmp_path_factory.mktemp("demo") / "run")


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_run(tmp_path_factory.mktemp("demo") / "rival", "finetune", "voc", seed=5)


@pytest.fixture(scope="module")
def models(run: Path, rival: Path) -> Models:
    return Models([run, rival], "cpu")


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[DemoServer]:
    with serving(models) as server:
        yield server


Answer = tuple[int, dict[str, str], bytes]


def ask(
    server: DemoServer, method: str, path: str, body: bytes | None = None, seconds: float = 60, **headers: str
) -> Answer:
    """Send a well-formed request. A _ in the name of a header means -."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=seconds)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def upload(server: DemoServer, body: bytes, model: int = 0, step: int = LAST, **headers: str) -> Answer:
    return ask(server, "POST", f"/predict?model={model}&step={step}", body, **{"Content_Type": "image/png", **headers})


def raw(server: DemoServer, request: bytes) -> bytes:
    """Send any bytes, and return what the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        with suppress(OSError):  # the server may have closed the connection
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        return received(connection)


def received(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(body: bytes) -> str:
    """Return the one line of a refusal."""
    message = json.loads(body)["error"]
    assert message
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def picture(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


PNG = encoded(picture())


def decoded(body: bytes) -> dict[str, Any]:
    """Return an answer, decoded as the page does it."""
    (length,) = struct.unpack("<I", body[:4])
    head = json.loads(body[4 : 4 + length])
    shape = head["height"], head["width"]
    stream = io.BytesIO(body[4 + length :])

    def plane(kind: str, *inner: int) -> np.ndarray:
        wanted = np.dtype(kind).itemsize * int(np.prod([*shape, *inner]))
        return np.frombuffer(stream.read(wanted), kind).reshape(*shape, *inner)

    head |= {"u": plane("<u2"), "image": plane("u1", 3), "labels": plane("u1"), "strongest": plane("u1")}
    head["probabilities"] = [plane("u1") for _ in head["classes"]]
    assert stream.read() == b""
    return head


# Pages


@pytest.mark.parametrize("path", PAGES)
def test_page_with_headers_that_isolate_it(server, path):
    status, headers, body = ask(server, "GET", path)
    assert status == 200
    assert len(body) == int(headers["Content-Length"]) > 0
    policy = dict(line.strip().split(" ", 1) for line in headers["Content-Security-Policy"].split(";"))
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        **dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'"),
        "img-src": "'self' blob:",
    }
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"].strip() == "incseg"
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, "HEAD", path) == (status, {**headers, "Date": ANYTHING}, b"")


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True


ANYTHING = _Anything()


def test_pages_take_nothing_from_outside_and_nothing_inline(server):
    for path in ("/", "/app.js", "/teach.js", "/style.css"):
        text = ask(server, "GET", path)[2].decode()
        assert not re.search(r"https?://|@import|\beval\(|new Function|innerHTML|document\.write", text)
    html = ask(server, "GET", "/")[2].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)


def test_about_describes_models_but_not_this_machine(server, run):
    text = ask(server, "GET", "/about.json")[2].decode()
    about = json.loads(text)
    assert [model["name"] for model in about["models"]] == ["run", "rival"]
    assert [model["method"] for model in about["models"]] == ["evidential", "finetune"]
    steps = about["models"][0]["steps"]
    assert [(step["step"], step["new"]) for step in steps] == [(k, list(new)) for k, new in enumerate(STEPS)]
    assert about["upload_bytes"] == Limits().upload_bytes
    assert len(about["viridis"]) == 256
    assert str(run.parent) not in text


def test_samples_are_photographs_of_classes_that_a_model_knows(tmp_path):
    models = Models([random_run(tmp_path / "voc", dataset="voc")], "cpu")
    assert models.samples == {}
    del models.samples  # it is cached
    models._known[0].steps = {0: ("cat", "person"), 1: ("cup",)}
    assert list(models.samples) == ["coffee.jpg", "chelsea.jpg", "astronaut.jpg"]  # what was added last comes first
    with serving(models) as server, urlopen(f"{server.url}samples/coffee.jpg") as answer:
        assert answer.headers["Content-Type"] == "image/jpeg"
        with Image.open(io.BytesIO(answer.read())) as photograph:
            assert max(photograph.size) <= LONGEST_SIDE


# Predictions


@pytest.mark.parametrize("model", [0, 1])
def test_answer_is_the_models_prediction(server, models, model):
    status, headers, body = upload(server, PNG, model)
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    answer = decoded(body)
    result = load(models.paths[model], device="cpu").predict(picture(), probabilities=True)
    assert answer["classes"] == list(result.classes)
    assert answer["ids"] == list(result.class_ids)
    assert answer["colours"] == result.palette.tolist()
    assert answer["image_size"] == [64, 48]
    np.testing.assert_array_equal(answer["image"], np.asarray(picture()))
    np.testing.assert_array_equal(answer["labels"], result.labels)
    assert len(np.unique(result.labels)) > 2
    np.testing.assert_allclose(answer["u"] / 65535, result.uncertainty, atol=0.5 / 65535 + 1e-6)
    np.testing.assert_allclose(np.stack(answer["probabilities"]) / 255, result.probabilities, atol=0.5 / 255 + 1e-6)
    # Evidential: u is P(background), so below a threshold the strongest class; softmax scores background apart.
    assert answer["u_is_background"] == (model == 0)
    first = 1 if model == 0 else 0
    np.testing.assert_array_equal(answer["strongest"], result.probabilities[first:].argmax(0) + first)


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_every_step_of_a_run(server, step):
    answer = decoded(upload(server, PNG, step=step)[2])
    assert answer["classes"] == ["background", *(name for names in STEPS[: step + 1] for name in names)]


@pytest.mark.parametrize("part", ["steps/1", "steps/1/model.safetensors"])
def test_one_step_alone(run, part):
    alone = Models([run / part], "cpu")
    assert [step["step"] for step in alone.about()[0]["steps"]] == [1]
    assert decoded(alone.answer(PNG, 0, 1))["classes"][-1] == "ring"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_formats_whatever_they_are_declared_as(server, kind):
    body = encoded(picture(), kind)
    for declared in (f"image/{kind.lower()}", "image/png", "IMAGE/PNG; charset=binary"):
        assert upload(server, body, Content_Type=declared)[0] == 200


@pytest.mark.parametrize("image", [
    Image.new("L", (1, 1)), Image.new("1", (9, 7)), Image.new("P", (40, 8)), Image.new("LA", (16, 16)),
    Image.new("RGBA", (3000, 10)), Image.new("I;16", (24, 24)), Image.new("RGB", (10, 3000)),
], ids=lambda image: f"{image.mode}-{image.width}x{image.height}")  # fmt: skip
def test_modes_and_shapes(server, image):
    answer = decoded(upload(server, encoded(image))[2])
    assert answer["image_size"] == list(image.size)


def test_a_photograph_is_turned_as_viewers_show_it(server):
    exif = Image.Exif()
    exif[0x0112] = 6
    answer = decoded(upload(server, encoded(picture(60, 40), "JPEG", exif=exif))[2])
    assert (answer["width"], answer["height"]) == (40, 60)


def test_a_large_image_comes_back_smaller_but_is_seen_whole(server, models):
    image = picture(1500, 1000)
    answer = decoded(upload(server, encoded(image, "JPEG"))[2])
    assert (answer["width"], answer["height"]) == (LONGEST_SIDE, round(LONGEST_SIDE * 1000 / 1500))
    assert answer["image_size"] == [1500, 1000]
    seen = load(models.paths[0], device="cpu").predict(Image.open(io.BytesIO(encoded(image, "JPEG"))))
    shrunk = Image.fromarray(seen.labels).resize((answer["width"], answer["height"]), Image.Resampling.NEAREST)
    assert np.mean(np.asarray(shrunk) == answer["labels"]) > 0.99


@given(st.integers(2, MAX_CLASSES + 1))
def test_answers_are_small_however_many_classes(num_labels):
    side = longest_side(num_labels)
    assert 256 <= side <= LONGEST_SIDE
    assert side * side * (7 + num_labels) <= MOST_ANSWER_BYTES


# Files that are no images, or too much of one


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header claims a huge image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    )


NO_IMAGES = {
    "text": b"hello",
    "truncated": PNG[:200],
    "no pixels": bomb(0, 5),
    "bomb": bomb(60000, 60000),
    "large": bomb(9000, 9000),
    "between Pillow's limits": bomb(11000, 11000),
    "wide": bomb(2**31 - 1, 1),
    "64 million pixels in one row": bomb(64_000_000, 1),
    "thinner than allowed": bomb(5, 60_000),
    "less data than it says": bomb(300, 300),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "tiff": encoded(picture(), "TIFF"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    "zip": b"PK\x03\x04" + bytes(40),
    "pickle": b"\x80\x04\x95" + bytes(40),
    "ppm": b"P6 2 2 255\n" + bytes(12),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_no_image(server, name):
    status, _, body = upload(server, NO_IMAGES[name])
    assert status == 422
    assert ("64,000,000" in error_of(body)) == (name in ("bomb", "large", "between Pillow's limits", "wide"))
    assert "0x" not in error_of(body), "an address in memory helps nobody"


def test_an_empty_file(server):
    assert upload(server, b"")[0] == 422


@given(st.binary(max_size=300), st.integers(0, len(PNG) - 1))
def test_damaged_images_are_answered(server, noise, place):
    status, _, body = upload(server, PNG[:place] + noise + PNG[place + len(noise) :])
    assert status == 200 or (status == 422 and error_of(body))


# Requests that are refused before their body is read


@pytest.mark.parametrize("kind", [
    "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "image/svg+xml",
    "image/tiff", "application/octet-stream", "image/png,image/jpeg", "", "é" * 80,
])  # fmt: skip
def test_wrong_content_type(server, kind):
    status, _, body = upload(server, PNG, Content_Type=kind.encode("latin-1").decode("latin-1"))
    assert status == 415
    assert "image/png" in error_of(body)


def post(server: DemoServer, *lines: str, body: bytes = b"") -> bytes:
    head = ["POST /predict?model=0&step=0 HTTP/1.1", "Host: localhost", "Content-Type: image/png", *lines]
    return raw(server, "\r\n".join([*head, "", ""]).encode() + body)


@pytest.mark.parametrize(("lines", "status"), [
    ([], 411),
    (["Transfer-Encoding: chunked"], 411),
    (["Transfer-Encoding: chunked", f"Content-Length: {len(PNG)}"], 411),
    (["Content-Length: -5"], 400),
    (["Content-Length: 1e3"], 400),
    (["Content-Length: ٣"], 400),
    (["Content-Length: " + "9" * 5000], 400),
    (["Content-Length: 10", f"Content-Length: {len(PNG)}"], 400),
    ([f"Content-Length: {len(PNG) + 1}"], 400),
    ([f"Content-Length: {Limits().upload_bytes + 1}"], 413),
    ([f"Content-Length: {10**17}"], 413),
])  # fmt: skip
def test_wrong_length(server, lines, status):
    answer = post(server, *lines, body=PNG)
    assert status_of(answer) == status
    error_of(answer.split(b"\r\n\r\n", 1)[1])


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(server):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(
            b"POST /predict?model=0&step=0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
            b"Content-Length: 999999999\r\n\r\n"
        )
        assert status_of(received(connection)) == 413


def test_whoever_sends_too_much_still_reads_why(models):
    with serving(models, upload_bytes=100_000) as server:
        status, _, body = upload(server, bytes(4_000_000))
        assert status == 413
        assert "the limit is 0.1 MB" in error_of(body)


@pytest.mark.parametrize("query", [
    "", "?model=0", "?step=0", "?model=2&step=0", "?model=-1&step=0", "?model=0&step=9", "?model=0&step=x",
    "?model=0&model=1&step=0", "?model=%D9%A0&step=0", "?model=0&step=../../etc", "?model=0&step=" + "9" * 999,
])  # fmt: skip
def test_unknown_model_or_step(server, query):
    status, _, body = ask(server, "POST", f"/predict{query}", PNG, Content_Type="image/png")
    assert status == 404
    error_of(body)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "PROPFIND"])
def test_methods_that_do_not_exist(server, method):
    status, headers, _ = ask(server, method, "/")
    assert (status, headers["Allow"]) == (405, "GET, HEAD, POST")


def test_routes_do_not_take_each_others_methods(server):
    assert ask(server, "GET", "/predict")[0] == 404
    assert ask(server, "POST", "/", PNG, Content_Type="image/png")[0] == 404


# Who asks


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.1:8008", "[::1]:8008"])
def test_hosts_of_this_machine(server, host):
    assert status_of(raw(server, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())) == 200


@pytest.mark.parametrize("lines", [
    "", "Host: evil.example", "Host: localhost.evil.example", "Host: 127.0.0.1.evil.example:8008", "Host:",
    "Host: [::1", "Host: 192.168.1.7", "Host: evil.example@localhost.evil", "Host: localhost\r\nHost: localhost",
    "Host: localhost, evil.example", "Host: //localhost",
])  # fmt: skip
@pytest.mark.parametrize("request_line", ["GET /about.json HTTP/1.1", "POST /predict?model=0&step=0 HTTP/1.0"])
def test_a_name_that_was_made_to_lead_here_is_refused(server, lines, request_line):
    answer = raw(server, f"{request_line}\r\n{lines}\r\n\r\n".replace("\r\n\r\n\r\n", "\r\n\r\n").encode())
    assert status_of(answer) == 421
    assert b"viridis" not in answer


def test_hosts_of_a_server_that_others_may_reach(models):
    with serving(models, "0.0.0.0") as server:
        assert not server.is_local
        assert server.url.startswith("http://localhost:")
        assert server.knows_host("192.168.1.7:8008")
        assert server.knows_host(socket.gethostname())
        assert not server.knows_host("evil.example")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost", "http://localhost.evil", ""])
def test_pages_of_elsewhere_may_not_send(server, origin):
    status, headers, _ = upload(server, PNG, Host="localhost", Origin=origin)
    assert status == 403
    assert not any(name.startswith("Access-Control") for name in headers)


def test_the_own_page_may_send(server):
    host = f"localhost:{server.server_port}"
    assert upload(server, PNG, Host=host, Origin=f"http://{host}")[0] == 200


# Nothing but the table


TRAVERSALS = (
    "/../../../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page/app.js",
    "/./app.js", "/app.js/", "/app.js%00.html", "/APP.JS", "/samples/../about.json", "/samples/6.png", "/samples/",
    "/config.yaml", "/steps/0/model.safetensors", "/server.py", "/__init__.py", "/.git/config", "/favicon.ico",
    "http://localhost/etc/passwd", "*", "..", "\\..\\..\\etc\\passwd", "/%", "/" + "a" * 30000,
)  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS, ids=lambda path: path[:30])
def test_paths_lead_nowhere(server, path):
    answer = raw(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert status_of(answer) == 404
    assert answer.split(b"\r\n\r\n", 1)[1] == ask(server, "GET", "/nothing")[2]


@given(st.lists(st.sampled_from(["/", "..", ".", "%2e", "%2f", "app.js", "etc", "passwd", "steps", "0", "\\", "page"])))
def test_made_up_paths_lead_to_the_table_or_nowhere(server, parts):
    path = "/" + "".join(parts)
    status, _, body = ask(server, "GET", path)
    if status == 200:
        assert server.pages["/" + path.lstrip("/") if path.lstrip("/") in ("", "app.js") else path][1] == body
    else:
        assert status == 404


@given(st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=60))
def test_any_path_leads_to_the_table_or_nowhere(server, text):
    answer = raw(server, f"GET /{text} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    assert status_of(answer) in (200, 400, 404)
    if status_of(answer) == 200:
        assert answer.split(b"\r\n\r\n", 1)[1] in [page for _, page in server.pages.values()]


@given(st.binary(min_size=1, max_size=200))
def test_noise_is_not_a_request(server, noise):
    answer = raw(server, noise)
    assert answer == b"" or b" 200 " not in answer.split(b"\n")[0]


@pytest.mark.parametrize("request_bytes", [
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"GET /\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 70000 + b"\r\n\r\n", b"GET /" + b"a" * 70000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
], ids=lambda request: str(request[:20]))  # fmt: skip
def test_broken_requests(server, request_bytes):
    answer = raw(server, request_bytes)
    assert b" 200 " not in answer
    assert b"<!doctype" not in answer
    assert ask(server, "GET", "/")[0] == 200


# Slow and many clients


def test_a_client_that_drips_its_headers_is_disconnected(models):
    ended = threading.Event()

    def drip(slow: socket.socket) -> None:  # each byte well within the deadline, all of them never
        with suppress(OSError):
            while not ended.wait(0.02):
                slow.sendall(b"G")

    with (
        ThreadPoolExecutor(1) as pool,
        serving(models, read_seconds=0.2) as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as slow,
    ):
        pool.submit(drip, slow)
        assert ask(server, "GET", "/")[0] == 200
        received(slow)  # returns when the server hangs up
        ended.set()


def test_a_client_that_drips_its_image_gets_a_timeout(models):
    with serving(models, read_seconds=0.2, uploads=1) as server:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as slow:
            slow.sendall(
                b"POST /predict?model=0&step=0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
                b"Content-Length: 500\r\n\r\n123"
            )
            assert status_of(received(slow)) == 408
        assert upload(server, PNG)[0] == 200  # its place is free again


def test_a_client_that_does_not_read_gives_up_its_place(models, monkeypatch):
    monkeypatch.setattr(models, "answer", lambda content, *_: bytes(64 << 20) if content == b"1" else b"short")
    with serving(models, write_seconds=0.2, uploads=1) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.server_port))
        deaf.sendall(
            b"POST /predict?model=0&step=0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
            b"Content-Length: 1\r\n\r\n1"
        )
        assert deaf.recv(1) == b"H"  # its answer is under way
        until(lambda: upload(server, PNG)[0] == 200, "its place is free")


def test_many_at_once_are_predicted_one_by_one(models, monkeypatch):
    answer, at_once, most = models.answer, [0], [0]

    def counted(*arguments: Any) -> bytes:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        try:
            return answer(*arguments)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(models, "answer", counted)
    images = [encoded(picture(seed=seed)) for seed in range(8)]
    expected = [decoded(answer(image, i % 2, i % 3))["labels"] for i, image in enumerate(images)]
    with serving(models, uploads=8) as server, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(upload, server, image, i % 2, i % 3) for i, image in enumerate(images)]
        for job, labels in zip(jobs, expected, strict=True):
            status, _, body = job.result()
            assert status == 200
            np.testing.assert_array_equal(decoded(body)["labels"], labels)
    assert most == [1]


@contextmanager
def held(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Make predictions wait. Yield two events: one has begun, let them continue."""
    answer, begun, go_on = models.answer, threading.Event(), threading.Event()

    def waiting(*arguments: Any) -> bytes:
        begun.set()
        assert go_on.wait(60)
        return answer(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(models, "answer", waiting)
        try:
            yield begun, go_on
        finally:
            go_on.set()


def test_a_full_queue_answers_when_to_try_again(models, monkeypatch):
    with serving(models, uploads=2) as server, ThreadPoolExecutor(2) as pool:
        with held(models, monkeypatch) as (begun, go_on):
            jobs = [pool.submit(upload, server, PNG) for _ in range(2)]
            assert begun.wait(60)
            until(lambda: server.uploads._value == 0, "the queue is full")
            status, headers, body = upload(server, PNG)
            assert (status, headers["Retry-After"]) == (503, "2")
            error_of(body)
            assert ask(server, "GET", "/")[0] == 200  # pages do not queue
            go_on.set()
            assert [job.result()[0] for job in jobs] == [200, 200]
        assert upload(server, PNG)[0] == 200


def test_a_prediction_that_takes_too_long_is_aborted(models):
    with serving(models, predict_seconds=0.0) as server:
        status, _, body = upload(server, PNG)
        assert (status, "takes too long" in error_of(body)) == (422, True)
    with serving(models) as server:
        assert upload(server, PNG)[0] == 200


def test_whoever_waits_too_long_for_the_others_is_asked_to_come_again(models, monkeypatch):
    with (
        serving(models, predict_seconds=0.2) as server,
        ThreadPoolExecutor(1) as pool,
        held(models, monkeypatch) as (begun, go_on),
    ):
        first = pool.submit(upload, server, PNG)
        assert begun.wait(60)
        status, headers, _ = upload(server, PNG)
        assert (status, headers["Retry-After"]) == (503, "2")
        go_on.set()
        first.result()


def test_samples_are_small_whatever_size_a_model_was_tested_at(tmp_path):
    models = Models([random_run(tmp_path / "run")], "cpu")
    for model in models._known:
        model.test_size = 10**6
    assert all(max(Image.open(io.BytesIO(png)).size) <= LONGEST_SIDE for png in models.samples.values())


def test_too_many_connections_are_turned_away(models):
    with serving(models, connections=3, read_seconds=60) as server:
        idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3)]
        try:
            until(lambda: len(server._open) == 3, "they are open")
            assert status_of(raw(server, b"")) == 503
        finally:
            for connection in idle:
                connection.close()
        until(lambda: not server._open, "they are closed")
        assert ask(server, "GET", "/")[0] == 200


# What is stored


def test_nothing_of_an_upload_stays_in_memory(models):
    body = encoded(picture(300, 200), "JPEG")
    with serving(models) as server:

        def traced_after(count: int) -> int:
            for _ in range(count):
                assert upload(server, body)[0] == 200
            until(lambda: not server._open, "all are closed")
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = traced_after(3)
            assert traced_after(5) - before < 300 * 200  # less than one plane of one answer
        finally:
            tracemalloc.stop()


def test_few_steps_are_in_memory(models):
    for model in range(2):
        for step in range(len(STEPS)):
            models.answer(PNG, model, step)
    assert len(models._loaded) == demo_models._MOST_LOADED < 2 * len(STEPS)


def test_nothing_of_an_upload_is_written(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert upload(server, encoded(picture(1500, 1000), "BMP"))[0] == 200
    assert list(tmp_path.iterdir()) == []


# Failures inside


@pytest.mark.parametrize(("error", "status"), [
    (RuntimeError("of the /secret/place"), 500), (UserError("model file '/secret/place' is damaged"), 500),
    (MemoryError(), 507), (torch.OutOfMemoryError(), 507),
])  # fmt: skip
def test_a_failure_is_one_line_without_paths(server, models, monkeypatch, capsys, error, status):
    def fail(*_: Any) -> bytes:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(models, "answer", fail)
        found, _, body = upload(server, PNG)
    assert found == status
    assert "secret" not in error_of(body)
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == ("secret" in str(error))
    assert upload(server, PNG)[0] == 200


def test_a_step_that_vanished(tmp_path, capsys):
    run = random_run(tmp_path / "run")
    with serving(Models([run], "cpu")) as server:
        (run / "steps/0/model.safetensors").unlink()
        status, _, body = upload(server, PNG, step=0)
        assert status == 500
        assert str(tmp_path) not in error_of(body)
        assert str(tmp_path) in capsys.readouterr().err
        assert upload(server, PNG)[0] == 200


def test_closing_ends_what_is_under_way(models, monkeypatch):
    with (
        ThreadPoolExecutor(4) as pool,
        serving(models, read_seconds=60) as server,
        held(models, monkeypatch) as (
            begun,
            go_on,
        ),
    ):
        first = pool.submit(upload, server, PNG)
        assert begun.wait(60)
        second = pool.submit(upload, server, PNG)
        with socket.create_connection(("127.0.0.1", server.server_port)) as idle:
            until(lambda: len(server._open) == 3, "all are there")
            closed = pool.submit(lambda: (server.shutdown(), server.server_close()))
            until(lambda: server.closing, "it closes")
            received(idle)  # hung up at once, long before its deadline
            go_on.set()
            assert first.result()[0] == 200
            assert second.result()[0] in (400, 503)
            closed.result()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.server_port)).close()


# The command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_it_gets_a_signal(rival, capsys, number):
    visited = []

    def visit(url: str) -> None:
        with urlopen(url, timeout=60) as answer:
            visited.append(answer.status)

    before = signal.getsignal(signal.SIGTERM)
    code, out = demo_until_signal([str(rival), "--port", "0", "--device", "cpu"], number, capsys, visit)
    assert (code, visited) == (0, [200])
    assert out.startswith("http://127.0.0.1:")
    assert out.endswith("stopped\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_command_opens_a_browser(rival, capsys, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    arguments = [str(rival), str(rival), "--port", "0", "--open"]
    _, out = demo_until_signal(arguments, signal.SIGINT, capsys, lambda _: until(lambda: opened, "it is opened"))
    assert opened[0] in out


def test_warning_line(rival, capsys, monkeypatch):
    monkeypatch.setattr(DemoServer, "serve_forever", lambda self: None)
    assert main(["demo", str(rival), "--port", "0", "--host", "0.0.0.0"]) == 0
    assert capsys.readouterr().err.startswith("warning: everyone who can connect to port ")
    assert main(["demo", str(rival), "--port", "0"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("arguments", "part"), [
    (["--port", "70000"], "--port is 70000"), (["--port", "x"], "--port"), (["--host", "no such host"], "--host"),
    (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"), (["--step", "1"], "unknown argument"),
])  # fmt: skip
def test_command_refuses_in_one_line(rival, capsys, arguments, part):
    assert main(["demo", str(rival), *arguments]) == 2
    shown = capsys.readouterr().err
    assert part in shown
    assert len(shown.splitlines()) == 1


def test_a_busy_port_is_one_line(server, rival, capsys):
    assert main(["demo", str(rival), "--port", str(server.server_port)]) == 2
    shown = capsys.readouterr().err
    assert f"port {server.server_port} (Address already in use); choose another --port" in shown
    assert len(shown.splitlines()) == 1


def test_no_model_is_one_line(tmp_path, capsys):
    assert main(["demo", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_size_of_the_tests_models(models):
    """The network gets images of its test size, as the tests above assume."""
    assert models._known[0].test_size == SIZE
