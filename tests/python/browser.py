"""A headless Chromium, controlled by its DevTools protocol over pipes."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
    "--remote-debugging-pipe",
]
PATIENCE = 90  # seconds


class Unusable(Exception):
    """No browser is installed, or the browser does not run on this machine."""


class Browser:
    """A browser with one page. `errors` are the messages that the page's scripts have raised or logged."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise Unusable("no Chromium is installed")
        from_us, self._out = os.pipe()
        self._in, to_us = os.pipe()
        # The browser uses file descriptors 3 and 4 for the protocol.
        shell = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        command = [
            "bash",
            "-c",
            shell,
            program,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(from_us, to_us),
            env=os.environ | {"HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self._loaded: set[str] = set()  # documents
        self.errors: list[str] = []
        self._file = folder / "page.html"
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, page: str, address: str = "") -> None:
        """Shows a page, at an address within the page, and waits until the page's scripts have ended."""
        self._file.write_text(page)
        self.call("Page.navigate", url="about:blank")  # a new fragment alone would not reload the page
        self.errors.clear()
        document = self.call("Page.navigate", url=f"file://{self._file}{address}")["loaderId"]
        while document not in self._loaded:
            self._receive()
        assert not self.errors, self.errors
        assert self.run("document.documentElement.dataset.ready !== undefined")

    def show_as(self, scheme: str, width: int) -> None:
        """Shows pages in a color scheme ("light" or "dark"), in a window of a width in pixels."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """Returns the value of an expression, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of the elements that match a selector."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def click(self, selector: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """Clicks at a point in an element, given by fractions of the element's width and height."""
        x, y, width, height = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({ block: 'center', behavior: 'instant' });"
            "const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )
        place = {"x": x + at[0] * width, "y": y + at[1] * height}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, button=button, clickCount=1, **place)
        self.drawn()

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.drawn()

    def drawn(self) -> None:
        """Waits until the browser has drawn all changes."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
            while True:
                answer = self._receive()
                if answer.get("id") == self._number:
                    break
        except OSError as error:
            raise Unusable(f"Chromium does not run here: {error}") from None
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._read:
            if not select.select([self._in], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("no answer")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise Unusable("Chromium ended")
            self._read += part
        text, _, self._read = self._read.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Page.lifecycleEvent" and parameters["name"] == "load":
            self._loaded.add(parameters["loaderId"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
