"""A real browser for tests: Chromium without a window, spoken to over two pipes in its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
OPTIONS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-background-networking",
    "disable-extensions",
    "no-first-run",
    "hide-scrollbars",
    "remote-debugging-pipe",
)
KEYS = {"ArrowLeft": 37, "ArrowRight": 39}
PATIENCE = 60.0  # seconds for an answer; the machine may be busy


class Browser:
    """One page in one browser. Everything it logs, throws or is refused is kept in `complaints`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = [f"--{option}" for option in OPTIONS]
        # The browser reads from its third file and writes to its fourth.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *options, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End the browser, which is a child of ours."""
        self._session = ""
        try:
            self.ask("Browser.close")
            self._process.wait(20)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its answer; what happens meanwhile is taken note of."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, file: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Show a file at a width; returns when it has loaded."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while self.run("location.protocol + document.readyState") != "file:complete":
            assert time.monotonic() < end, f"{file} did not load"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element, as a person would."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point_at(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def middle(self, selector: str) -> tuple[float, float]:
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """A screenshot, of all that can be scrolled to unless told otherwise."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, file: Path) -> None:
        answer = self.ask("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, f"the browser does not answer {method}"
            part = os.read(self._from, 1 << 20)
            assert part, f"the browser has gone away at {method}"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        kind, parameters = event.get("method"), event.get("params", {})
        logged = kind == "Runtime.consoleAPICalled" and parameters.get("type") in ("error", "warning", "assert")
        if logged or kind in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(parameters))
        elif kind == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
