"""The server of the page: a fixed table of routes, and limits on everything that a client can send.

It is based on http.server of the standard library, not on starlette and uvicorn. The page needs a few routes and one
prediction at a time, so an event loop would gain nothing. The rest (a limit on the body before it is read, a deadline
for slow clients, a bounded queue, checks of Host and Origin) must be written in any case. So there is nothing to
install, and all rules are in this file. http.server only parses the request line and the headers. Its file handler is
not used, and no path of a request becomes a path on disk.

Every connection has one request. At most `connections` of them are open, and at most `uploads` of these have a body or
an answer in memory. One prediction runs at a time, and one class is taught at a time. Images to predict are never
written to disk. Photographs that teach a class are in a temporary folder until it is learnt, the new model until the
server ends.
"""

from __future__ import annotations

import io
import ipaddress
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import torch

from incseg.data.files import FileError
from incseg.demo.models import FORMATS, Models
from incseg.demo.teach import LONGEST_NAME, LONGEST_SIDE, MOST_PHOTOGRAPHS, Interrupted, Lesson, LessonError
from incseg.report.draw import viridis
from incseg.types import UserError

DEFAULT_PORT = 8008
_PREDICT, _TEACH, _TAUGHT, _ABOUT = "/predict", "/teach", "/taught.safetensors", "/about.json"
_LESSON = "application/octet-stream"
_CHUNK = 1 << 20
_KINDS = {".png": "png", ".jpg": "jpeg"}
"""Content types of sample images."""
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/teach.js": ("teach.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """Limits on clients.

    upload_bytes:    size of an image file.
    lesson_bytes:    size of all photographs and masks that teach a class.
    read_seconds:    time until a whole request has arrived.
    predict_seconds: time for a prediction, and time to wait for those before it.
    teach_seconds:   time to learn a class.
    write_seconds:   time to send an answer; for a model file, to send each MB.
    connections:     open connections; more are refused.
    uploads:         images in memory, one of them being predicted; more are refused and may be sent again.
    """

    upload_bytes: int = 20 << 20
    lesson_bytes: int = 64 << 20
    read_seconds: float = 20.0
    predict_seconds: float = 60.0
    teach_seconds: float = 300.0
    write_seconds: float = 20.0
    connections: int = 32
    uploads: int = 6


class _Refused(Exception):
    """A refused request: status and message of the answer."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class DemoServer(ThreadingHTTPServer):
    """A server that listens at once. `serve_forever` answers requests; `server_close` waits for those in progress."""

    daemon_threads = False  # a thread inside torch must not be cut off when the interpreter ends

    def __init__(
        self, models: Models, host: str = "127.0.0.1", port: int = DEFAULT_PORT, limits: Limits | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise UserError(f"--port is {port}; give one from 1 to 65535, or 0 for any free one")
        self.limits = limits or Limits()
        self.models = models
        self.pages = _pages(models, self.limits)
        self.uploads = threading.BoundedSemaphore(self.limits.uploads)
        self.predicting = threading.Lock()
        self.teaching = threading.Lock()
        self.closing = False
        self._host = host
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = found[0]
            super().__init__(found[4][:2], _Handler)  # type: ignore[arg-type]
        except socket.gaierror as error:
            raise UserError(f"--host '{host}' is not an address of this machine ({error.strerror})") from error
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"cannot listen on {host} port {port} ({reason}); choose another --port, or 0 for any free one"
            ) from error

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # that of HTTPServer asks the network for the machine's name
        self.server_name, self.server_port = self._host, self.server_address[1]

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        if ipaddress.ip_address(host).is_unspecified:
            host = "localhost"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def knows_host(self, header: str) -> bool:
        """Return whether a Host header means this server, at any port (it may be forwarded).

        If the name of a foreign page is made to resolve to this machine (DNS rebinding), the header has that name. It
        can never have an address.
        """
        try:
            host = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        try:
            return ipaddress.ip_address(host).is_loopback or not self.is_local
        except ValueError:
            return host in {"localhost", self._host.lower()} or (
                not self.is_local and host == socket.gethostname().lower()
            )

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            full = len(self._open) >= self.limits.connections
            if not full:
                self._open.add(request)
        if full:
            with suppress(OSError):
                request.settimeout(0)
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n")
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        self.closing = True
        with self._open_lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)  # stops requests, not answers in progress
        super().server_close()
        self.models.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # clients may disconnect at any time
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: DemoServer
    server_version, sys_version = "incseg", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection, self.server.limits.read_seconds)
        self.rfile = io.BufferedReader(self._incoming)

    def do_GET(self) -> None:
        self._answer(self._page)

    def do_HEAD(self) -> None:
        self._answer(self._page)

    def do_POST(self) -> None:
        self._answer(self._posted)

    def _posted(self) -> None:
        if self._target().path == _TEACH:
            self._lesson()
        else:
            self._prediction()

    def _page(self) -> None:
        target = self._target()
        page = self.server.pages.get(target.path)
        if target.path == _TAUGHT:
            self._model_file(*_model_and_step(target))
        elif page is not None:
            self._reply(HTTPStatus.OK, *page)
        else:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page; the only one is /")

    def _model_file(self, model: int, step: int) -> None:
        """Send a model that was taught in the page. No other file is ever sent."""
        path = self.server.models.taught(model, step)
        if path is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such model; load the page again")
        with path.open("rb") as file, suppress(OSError):  # an answer that has begun cannot become an error
            self._begin(HTTPStatus.OK, _LESSON, path.stat().st_size)
            while self.command != "HEAD" and (chunk := file.read(_CHUNK)):
                self.wfile.write(chunk)

    def _lesson(self) -> None:
        length = self._checked_length("photographs", (_LESSON,), self.server.limits.lesson_bytes)
        if not self.server.teaching.acquire(blocking=False):
            raise _Refused(HTTPStatus.CONFLICT, "another class is being taught; wait until it is learnt")
        try:
            found = self._teach(self._body(length))
        finally:
            self.server.teaching.release()
        self._reply(HTTPStatus.OK, "application/json", json.dumps(found).encode())

    def _teach(self, content: bytes) -> dict[str, Any]:
        try:
            found = self.server.models.teach(Lesson.read(content), self.server.limits.teach_seconds, self._is_gone)
        except Interrupted:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the teaching was stopped") from None
        except LessonError as error:
            raise _Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        except UserError as error:  # may name files of this machine
            print(f"error: {error}", file=sys.stderr)
            raise _Refused(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the class could not be learnt; see the server's terminal"
            ) from error
        self.server.pages[_ABOUT] = _about(self.server.models, self.server.limits)
        return found

    def _is_gone(self) -> bool:
        """Return whether the client has disconnected, or the server stops."""
        if self.server.closing:
            return True
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

    def _prediction(self) -> None:
        model, step, length = self._checked()
        if not self.server.uploads.acquire(blocking=False):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many images at once; try again", Retry_After="2")
        try:
            answer = self._predict(self._body(length), model, step)
            self._reply(HTTPStatus.OK, "application/octet-stream", answer)
        finally:
            self.server.uploads.release()

    def _target(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the address cannot be read") from None

    def _checked(self) -> tuple[int, int, int]:
        """Return model, step and length of an upload. Check everything before its body is read."""
        target = self._target()
        if target.path != _PREDICT:
            raise _Refused(HTTPStatus.NOT_FOUND, f"images are sent to {_PREDICT} only")
        length = self._checked_length("file", tuple(FORMATS), self.server.limits.upload_bytes)
        model, step = _model_and_step(target)
        if not self.server.models.has(model, step):
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such model or step; load the page again")
        return model, step, length

    def _checked_length(self, what: str, kinds: tuple[str, ...], most: int) -> int:
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers['Host']}":
            raise _Refused(HTTPStatus.FORBIDDEN, "images are taken from this server's own page only")
        kind = self.headers.get("Content-Type", "nothing").split(";")[0].strip().lower()
        if kind not in kinds:
            raise _Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the file is {kind[:60]}; allowed are {', '.join(kinds)}"
            )
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or not lengths:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "the length of the image is missing; send Content-Length")
        if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()) or len(lengths[0]) > 18:
            raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length must be one whole number")
        length = int(lengths[0])
        if length > most:
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the {what} {'has' if what == 'file' else 'have'} {length / 2**20:.1f} MB; the limit is "
                f"{most / 2**20:.1f} MB",
            )
        return length

    def _body(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if len(body) < length:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the image is incomplete; send it again")
        return body

    def _predict(self, content: bytes, model: int, step: int) -> bytes:
        seconds = self.server.limits.predict_seconds
        if not self.server.predicting.acquire(timeout=seconds):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many images at once; try again", Retry_After="2")
        try:
            if self.server.closing:
                raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
            try:
                return self.server.models.answer(content, model, step, seconds)
            except FileError as error:
                raise _Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error.fault}; {error.remedy}") from error
            except UserError as error:  # may name files of this machine
                print(f"error: {error}", file=sys.stderr)
                raise _Refused(
                    HTTPStatus.INTERNAL_SERVER_ERROR, "this step cannot be used; see the server's terminal"
                ) from error
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise _Refused(
                    HTTPStatus.INSUFFICIENT_STORAGE, "not enough memory for this image; shrink it"
                ) from error
        finally:
            self.server.predicting.release()

    def _answer(self, answer: Callable[[], None]) -> None:
        """Check the Host header, then answer. Every error becomes one line for the client."""
        try:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not self.server.knows_host(hosts[0]):
                raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, f"this server is {self.server.url} and no other")
            answer()
        except _Refused as refusal:
            self._refuse(refusal.status, str(refusal), refusal.headers)
        except TimeoutError:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the image took too long; send it again")
        except OSError:  # the client has disconnected
            self.close_connection = True
        except Exception as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; see its terminal")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that http.server cannot parse or whose method is unknown, in our form."""
        allowed = {"Allow": "GET, HEAD, POST"} if code == HTTPStatus.NOT_IMPLEMENTED else {}
        status = HTTPStatus.METHOD_NOT_ALLOWED if allowed else HTTPStatus(code)
        self._refuse(status, status.phrase.lower(), allowed)

    def _refuse(self, status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps({"error": message}, ensure_ascii=False).encode()
        with suppress(OSError):
            self._reply(status, "application/json; charset=utf-8", body, headers)
            # A client that is still sending would get a reset and never read the answer.
            self.connection.shutdown(socket.SHUT_WR)
            self._incoming.allow(min(2.0, self.server.limits.read_seconds))
            while self.rfile.read1(1 << 16):  # type: ignore[attr-defined]
                pass
        self.close_connection = True

    def _reply(self, status: HTTPStatus, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._begin(status, kind, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, length: int, headers: Mapping[str, str] | None = None) -> None:
        self.connection.settimeout(self.server.limits.write_seconds)
        self.send_response(status)
        lines = {"Content-Type": kind, "Content-Length": str(length), "Connection": "close", **_HEADERS}
        for name, value in (lines | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: users look at the page, not at the terminal."""


class _Incoming(io.RawIOBase):
    """The data that a socket receives before a deadline. A plain timeout would start again with every byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _pages(models: Models, limits: Limits) -> dict[str, tuple[str, bytes]]:
    """Return all pages: address → content type and bytes. They are read once, so no request opens a file."""
    folder = resources.files(__package__) / "page"
    pages = {address: (kind, (folder / name).read_bytes()) for address, (name, kind) in _FILES.items()}
    samples = {_address(name): (f"image/{_KINDS[Path(name).suffix]}", data) for name, data in models.samples.items()}
    return pages | samples | {_ABOUT: _about(models, limits)}


def _address(sample: str) -> str:
    return f"/samples/{sample}"


def _about(models: Models, limits: Limits) -> tuple[str, bytes]:
    about = {
        "models": models.about(),
        "samples": [_address(name) for name in models.samples],
        "types": list(FORMATS),
        "upload_bytes": limits.upload_bytes,
        "lesson": {"bytes": limits.lesson_bytes, "photographs": MOST_PHOTOGRAPHS, "side": LONGEST_SIDE,
                   "name": LONGEST_NAME},
        "viridis": viridis().tolist(),
    }  # fmt: skip
    return "application/json", json.dumps(about).encode()


def _model_and_step(target: SplitResult) -> tuple[int, int]:
    """Return the model and the step in an address; −1 if there is none."""
    wanted = parse_qs(target.query[:200])
    return _number(wanted.get("model")), _number(wanted.get("step"))


def _number(values: list[str] | None) -> int:
    """Return the whole number in a query; −1 if there is none."""
    value = values[0] if values and len(values) == 1 else ""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1
