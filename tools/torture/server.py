"""Attacks on the demo's server: paths, noise, hostile images, false headers, many and slow clients."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

import incseg.demo.server as demo
from tools.torture.case import Case, Kind, Lost, Running
from tools.torture.hostile import any_image, damaged, encoded, pickled, png_bomb, text_bomb_png, thin_png
from tools.torture.runs import copy_of_finished

MUST = {
    "paths": "a page of its own or 404; nothing of the folders around it is served",
    "noise": "refused or left, never answered as if it were a request",
    "uploads": "a prediction, or one line that says what is wrong with the image",
    "lies": "sizes, types, hosts, models and steps that are not so: refused before anything is kept of them",
    "crowds": "slow, deaf and vanishing clients among others: left, told to come again, or answered",
}
SECRET = b"nobody may read this"
MOST_GROWTH = 600 * 2**20
"""Limit on the growth of the server's peak memory over a batch. It has at most six uploads of 20 MB in memory, one of
them being predicted."""
TIMEOUT_SECONDS = 1.0
"""Timeout of the server for reading a request and for writing an answer, instead of 20."""
Attack = Callable[["Server", random.Random], None]


def cases(seed: int, quick: bool) -> list[Case]:
    """Return batches of attacks, each on its own server. Then it must answer a valid upload and end on SIGTERM."""
    plan: dict[str, tuple[Attack, int, int]] = {
        "paths": (_path, 8, 50), "noise": (_noise, 4, 50), "uploads": (_upload, 8, 25), "lies": (_lie, 4, 25),
        "crowds": (_crowd, 10, 12),
    }  # fmt: skip
    return [
        Case(group, f"batch {batch}", functools.partial(_run, attack, f"{seed} {group} {batch}", count), count)
        for group, (attack, batches, size) in plan.items()
        for batch in range(1 if quick else batches)
        for count in [6 if quick and attack is not _crowd else size]
    ]


class Server:
    """A client's view of a running `incseg demo`."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.folder = port, folder

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def raw(self, request: bytes) -> bytes:
        """Return everything that the server sends until it closes the connection."""
        with self.connected() as connection:
            with contextlib.suppress(OSError):  # it may have closed the connection
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
            return received(connection)

    def require_sound(self) -> None:
        answer = self.raw(post(encoded(Image.new("RGB", (40, 30)), "png")))
        if status(answer) != 200:
            raise Lost(f"a valid upload got {answer[:100]!r}")


def received(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def post(body: bytes, target: str = "/predict?model=0&step=0", kind: str = "image/png", *more: str) -> bytes:
    lines = [f"POST {target} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *more, "", ""]).encode("latin-1") + body


def status(answer: bytes) -> int | None:
    """Return the status of an answer; None if the server closed the connection without one."""
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    return int(found[1]) if found else None


def require_refused(answer: bytes, *allowed: int | None) -> None:
    """Require one of the allowed statuses, with the reason in one line."""
    if status(answer) not in allowed or SECRET in answer:
        raise Lost(f"answered {answer[:120]!r} instead of one of {allowed}")
    head, _, body = answer.partition(b"\r\n\r\n")
    if not body or b"application/json" not in head:
        return
    message = json.loads(body)["error"]
    if not message or "\n" in message or "Traceback" in message:
        raise Lost(f"unclear line {message!r}")


def _run(attack: Attack, seed: str, count: int, folder: Path) -> None:
    with _served(folder) as server:
        draw = random.Random(seed)
        for _ in range(1 if attack is _crowd else count):
            attack(server, draw)


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[Server]:
    run = copy_of_finished(folder)
    for file in (folder / "secret.txt", run / "secret.txt"):
        file.write_bytes(SECRET)
    running = Running(
        ["demo", run, "--port", 0, "--device", "cpu", "--threads", 1], folder / "cache", _shorten_timeouts
    )
    try:
        server = Server(_port(running), folder)
        server.require_sound()
        before = _peak_bytes(running.pid)
        yield server
        server.require_sound()
        if (growth := _peak_bytes(running.pid) - before) > MOST_GROWTH:
            raise Lost(f"the server took {growth / 2**20:.0f} MB more")
    except BaseException:
        running.kill()
        running.wait()
        raise
    os.kill(running.pid, signal.SIGTERM)
    running.wait(60).succeeded()


def _shorten_timeouts() -> None:
    limits = functools.partial(demo.Limits, read_seconds=TIMEOUT_SECONDS, write_seconds=TIMEOUT_SECONDS)
    demo.Limits = limits  # type: ignore[misc, assignment]


def _port(running: Running) -> int:
    deadline = time.monotonic() + 60
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/", running.printed())):
        if running.ended() or time.monotonic() > deadline:
            raise Lost("the server does not start")
        time.sleep(0.01)
    return int(found[1])


def _peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _path(server: Server, draw: random.Random) -> None:
    up = draw.choice(["..", "%2e%2e", ".%2e", "..%00", "%252e%252e", "..;", "\u00c0\u00ae."])
    slash = draw.choice(["/", "%2f", "\\", "%5c", "//", "%c0%af"])
    start = draw.choice(["/", "/samples/", "/page/", "//", "/app.js/", "file:///", "http://localhost/", ""])
    named = draw.choice(["secret.txt", "run/secret.txt", "run/config.yaml", "settings.yaml", "etc/passwd", "server.py"])
    climb = slash.join([up] * draw.randrange(12))
    target = draw.choice([f"{start}{climb}{slash}{named}", f"{start}{server.folder}/{named}", f"{start}{named}"])
    method = draw.choice(["GET", "GET", "HEAD", "get", "PUT", "DELETE"])
    answer = server.raw(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    require_refused(answer, 400, 404, 405, 501)


def _noise(server: Server, draw: random.Random) -> None:
    line = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    request = draw.choice([
        draw.randbytes(draw.randint(1, 2000)),
        damaged(line, draw) + b"\x00\r\n\r\n",
        line + b"A: " + draw.randbytes(draw.randint(1, 9)).hex().encode() * 9000 + b"\r\n\r\n",
        line + b"A: b\r\n" * draw.randint(150, 4000) + b"\r\n",
        b"GET /" + b"a" * draw.randint(66000, 200000),
        b"GET / HTTP/%d.%d\r\n\r\n" % (draw.randint(2, 99), draw.randint(0, 9)),
        b"\x16\x03\x01" + draw.randbytes(300),
    ])  # fmt: skip
    answer = server.raw(request)
    if b"Traceback" in answer or SECRET in answer:
        raise Lost(f"answered {answer[:120]!r}")
    if status(answer) == 200 and not request.startswith(b"GET / HTTP/1"):  # damage may leave the line valid
        raise Lost(f"noise was answered as a request: {request[:60]!r}")


def _upload(server: Server, draw: random.Random) -> None:
    suffix, sound = any_image(draw)
    pickle_made = server.folder / "unpickled"
    body = draw.choice([
        lambda: sound, lambda: damaged(sound, draw), lambda: damaged(sound, draw), lambda: draw.randbytes(500),
        lambda: png_bomb(draw.choice([30000, 100000, 2**31 - 1])), text_bomb_png, lambda: b"",
        lambda: pickled(pickle_made), lambda: b"<svg><image href='/etc/passwd'/></svg>",
        lambda: thin_png(*draw.choice([(30000, 10), (10, 30000), (1, 1), (100_000, 20)])),
        lambda: thin_png(*draw.choice([(10**7, 1), (1, 10**7), (64 * 10**6, 1), (1, 60_000)])),
    ])()  # fmt: skip
    answer = server.raw(post(body, kind=draw.choice(["image/png", "image/jpeg", f"image/{suffix}"])))
    if status(answer) != 200:
        require_refused(answer, 400, 411, 413, 415, 422)
    if pickle_made.exists():
        raise Lost("a pickle was opened")


def _lie(server: Server, draw: random.Random) -> None:
    png = encoded(Image.new("RGB", (20, 20)), "png")
    kinds = ["text/html", "application/x-python", "multipart/form-data; boundary=x", "image/svg+xml", "", "a" * 3000]
    targets = ["model=9&step=0", "model=-1&step=0", "model=0&step=99", "model=0&step=1e9", "step=0", "model=%00&step=0",
               f"model={'9' * 5000}&step=0", "model=../run&step=0"]  # fmt: skip
    lengths = ["-1", "1e3", "99999999999999999999", "+5", "0x10", "20971521", "5, 6", ""]
    lie = draw.choice(["kind", "target", "length", "host", "origin", "encoding"])
    if lie == "kind":
        request = post(png, kind=draw.choice(kinds))
    elif lie == "target":
        request = post(png, f"/predict?{draw.choice(targets)}")
    elif lie == "length":
        head = "POST /predict?model=0&step=0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
        request = f"{head}Content-Length: {draw.choice(lengths)}\r\n\r\n".encode() + png
    elif lie == "host":
        request = post(png).replace(b"Host: localhost", b"Host: " + draw.choice([b"evil.example", b"", b"a b", b"[::"]))
    elif lie == "origin":
        request = post(
            png, "/predict?model=0&step=0", "image/png", "Origin: " + draw.choice(["http://evil.example", "null"])
        )
    else:
        request = post(png, "/predict?model=0&step=0", "image/png", "Transfer-Encoding: chunked")
    require_refused(server.raw(request), 400, 403, 404, 411, 413, 414, 415, 421, 431, 501)


def _crowd(server: Server, draw: random.Random) -> None:
    """Run twelve clients at once."""
    seeds = [draw.randrange(2**32) for _ in range(12)]
    with ThreadPoolExecutor(len(seeds)) as pool:
        for job in [pool.submit(_client, server, random.Random(seed)) for seed in seeds]:
            job.result()


def _client(server: Server, draw: random.Random) -> None:
    request = post(
        encoded(Image.effect_noise((draw.randint(50, 900), draw.randint(50, 900)), 90).convert("RGB"), "png")
    )
    manner = draw.choice(["whole", "whole", "dripping", "vanishing", "deaf", "large"])
    if manner == "large":  # as large as allowed, and not an image
        request = post(bytes(20 << 20))
    if manner in ("whole", "large"):
        answer = server.raw(request)
        if status(answer) != 200:
            require_refused(answer, 400, 415, 422, 503)
        return
    with server.connected() as connection, contextlib.suppress(OSError):
        if manner == "deaf":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
            time.sleep(2 * TIMEOUT_SECONDS)
        elif manner == "vanishing":
            connection.sendall(request[: draw.randrange(len(request))])
        else:
            for at in range(0, 40 * 20, 20):
                connection.sendall(request[at : at + 20])
                time.sleep(TIMEOUT_SECONDS / 15)
            require_refused(received(connection), 408, 503, None)


KIND = Kind("server", MUST, cases)
