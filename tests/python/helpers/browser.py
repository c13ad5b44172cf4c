"""Drives a headless Chromium over its debugging pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["Browser", "find_browser"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--mute-audio"),
    *("--hide-scrollbars", "--remote-debugging-pipe", "--force-color-profile=srgb"),
)
LIMIT = 60  # seconds that an answer may take


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page of a browser, to be used in a ``with`` block.

    Attributes:
        problems: errors and warnings of the console, and exceptions of scripts, so far.
        requests: addresses that pages asked for so far, those of the pages themselves included.
    """

    def __init__(self, path: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._buffer, self._number, self._session = b"", 0, None

        def place_pipes() -> None:  # the browser reads from descriptor 3 and writes to 4
            ours = os.dup(to_browser), os.dup(from_browser)
            for there, here in zip((3, 4), ours):
                os.dup2(here, there)

        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place_pipes,
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._read, self._write):
            os.close(pipe)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: object) -> dict:
        """Calls a method of the DevTools protocol, and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._see(answer)

    def _message(self) -> dict:
        end = time.monotonic() + LIMIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            found = os.read(self._read, 1 << 20) if ready else b""
            if not found:
                raise RuntimeError("the browser does not answer")
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _see(self, event: dict) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            said = details.get("exception", {}).get("description", "")
            self.problems.append(f"{details['text']} {said}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])

    # ---- what a reader does ---------------------------------------------------------------------

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window of this size, and waits until it is drawn."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")
        self.settle()

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def settle(self) -> None:
        """Waits until what is due has been drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def run(self, script: str) -> object:
        """Returns the value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + LIMIT
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Scrolls an element into view, and returns its left, top, width and height."""
        box = (
            "(() => { const e = document.querySelector(%s);"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()"
        )
        return tuple(self.run(box % json.dumps(selector)))

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        left = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **left)
        self.call(
            "Input.dispatchMouseEvent", type="mouseMoved", x=to_x, y=to_y, buttons=1, button="left"
        )
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=to_y, **left)
        self.settle()

    def click(self, selector: str) -> None:
        x, y, width, height = self.place(selector)
        self.drag(x + width / 2, y + height / 2, x + width / 2, y + height / 2)

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path, whole: bool = True) -> None:
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
