"""A headless Chromium, driven over its DevTools protocol: one page, every wait with an end."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find_chromium() -> str | None:
    """Its program, or None where there is none."""
    found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name)
    return next((each for each in found if each), None)


class PageError(Exception):
    """What the page or the browser could not do."""


class Page:
    """One page; what it asked for and what it complained of is kept."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=ANSWER_SECONDS)
        self._number = 0
        self._session = ""
        self.requested: list[str] = []
        """Addresses that it asked."""
        self.complaints: list[str] = []
        """Errors of scripts, and what the policy of content forbade."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)
        raise PageError(f"{method}: no answer for {ANSWER_SECONDS:g} s")

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(str(details.get("exception", details).get("description")))
            case "Log.entryAdded":
                entry = params["entry"]
                if entry["level"] == "error":
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises PageError."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise PageError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30.0) -> Any:
        """Until the expression is true; its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.05)
        text = self.run("document.body.innerText")
        raise PageError(f"{script}: not so within {seconds:g} s; the page says {text[:2000]!r}")

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``, as a user's system says."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, selector: str = "") -> None:
        """A PNG of the window, or of what the selector finds."""
        params: dict[str, Any] = {"format": "png", "captureBeyondViewport": True}
        if selector:
            box = self.run(
                f"(() => {{ const r = document.querySelector({json.dumps(selector)})"
                ".getBoundingClientRect();"
                " return {x: r.x, y: r.y, width: r.width, height: r.height, scale: 1}; })()"
            )
            params["clip"] = box
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **params)["data"]))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def browser() -> Iterator[Page]:
    """A page in a Chromium of its own, which ends with the block."""
    program = find_chromium()
    assert program is not None, f"none of {', '.join(NAMES)} is here, and CHROMIUM names none"
    flags = [*_FLAGS, *(("--no-sandbox",) if os.geteuid() == 0 else ())]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            page = Page(_address(process))
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """Where the browser listens; what else it says is read by a thread, so that it never waits."""
    found: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as words:
            for line in words:
                if line.startswith("DevTools listening on "):
                    found.append(line.split()[-1])
                    known.set()
        known.set()

    threading.Thread(target=read, daemon=True).start()
    if not known.wait(START_SECONDS) or not found:
        raise PageError(f"Chromium did not begin to listen within {START_SECONDS:g} s")
    return found[0]
