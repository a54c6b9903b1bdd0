"""A headless Chromium with one page, driven through its own debugging protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from testkit.patience import PATIENCE_SECONDS, until

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
    "--window-size=900,1000",
    "--remote-debugging-port=0",
]


class Page:
    """Page of the browser. `errors` are uncaught exceptions of its scripts."""

    def __init__(self, socket: Connection) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._call("Runtime.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self._call(
            "Runtime.evaluate", expression=expression, userGesture=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, element: str) -> str:
        return str(self.evaluate(f"document.getElementById({element!r}).textContent"))

    def wait_for(self, condition: str) -> None:
        until(lambda: self.evaluate(condition), pause_s=0.1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(
                    message["params"]["exceptionDetails"]["exception"]["description"]
                )
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Starts a browser with a fresh profile; skips the test where there is none."""
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with connect(_debugger(profile), max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)
            process.kill()


def _debugger(profile: Path) -> str:
    """Returns the URL of the page, after the browser has written its port into its profile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            port = int((profile / "DevToolsActivePort").read_text().splitlines()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                return str(
                    next(page for page in json.load(answer) if page["type"] == "page")[
                        "webSocketDebuggerUrl"
                    ]
                )
        assert time.monotonic() < deadline, "chromium does not start"
        time.sleep(0.1)
