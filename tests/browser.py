"""A headless Chromium, controlled through chromedriver by the W3C WebDriver protocol: JSON over HTTP, nothing to
install."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import pytest

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name of a reference
_OPENER = build_opener(ProxyHandler({}))  # the driver is on this machine


class Browser:
    """A browser with one window."""

    def __init__(self, downloads: Path, width: int = 1280, height: int = 900, *flags: str) -> None:
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if chromium is None or driver is None:
            pytest.skip("no browser here: apt-get install chromium chromium-driver")
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._driver.stdout is not None
        port = next(line for line in self._driver.stdout if "started successfully" in line).split()[-1].rstrip(".")
        self._url = f"http://127.0.0.1:{port}"
        options = {
            "binary": chromium,
            "args": [
                "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                "--force-device-scale-factor=1", f"--window-size={width},{height}", *flags,
            ],
            "prefs": {"download.default_directory": str(downloads)},
        }  # fmt: skip
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._url += f"/session/{session}"

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.communicate(timeout=20)

    def _call(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with _OPENER.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"].splitlines()[0]) from None

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of a JavaScript `return …`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_command(self, command: str, **parameters: Any) -> Any:
        """Run one of Chromium's own development commands."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """Wait until the script returns a true value, and return it."""
        return until(lambda: self.run(script, *arguments), script, seconds)

    def element(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{found[_ELEMENT]}"

    def click(self, selector: str) -> None:
        self._call("POST", f"{self.element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type keys into an element, or the path of a file into a file input."""
        self._call("POST", f"{self.element(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return self._call("GET", f"{self.element(selector)}/text")

    def hover(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a place of an element, given as shares of its width and height."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = self.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        place = {"x": int(box["x"] + x * box["width"]), "y": int(box["y"] + y * box["height"])}
        move = {"type": "pointerMove", "duration": 0, "origin": "viewport", **place}
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("GET", "/screenshot"))

    def console(self) -> list[str]:
        """Return the errors and warnings of the page since the last call."""
        return [f"{entry['level']} {entry['message']}" for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that the page requested since the last call, without those inside the browser."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if urlsplit(url).scheme not in ("blob", "data")]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        return self._call("POST", "/se/log", {"type": kind})


def until(check: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Return the first true value of `check`."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)
    return value
