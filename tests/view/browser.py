"""A real, headless Chromium, driven over its DevTools protocol.

`websockets` is here anyway, for vLLM; Playwright or Selenium would be 100 MB more for the few
commands that the page's tests need.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 20.0  # seconds until something awaited counts as missing


class BrowserMissing(RuntimeError):
    pass


def find_browser() -> str:
    """The Chromium of this machine, or that of TORCHTITAN_RL_BROWSER."""
    for name in filter(None, (os.environ.get("TORCHTITAN_RL_BROWSER"), *NAMES)):
        if found := shutil.which(name):
            return found
    raise BrowserMissing(
        "no Chromium found, in which the page is tested. Debian/Ubuntu: apt-get install chromium; "
        "elsewhere, name its executable in TORCHTITAN_RL_BROWSER"
    )


class Page:
    """A tab.

    Example:
        page.open("http://127.0.0.1:8765/")
        page.wait("document.querySelector('canvas')")
        page.click("a[href='#/rollouts']")
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.problems: list[str] = []
        """What the browser complained about: exceptions, and what the CSP has stopped."""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self.resize(1280, 720)

    def resize(
        self, width: int, height: int, *, dark: bool = False, phone: bool = False, sharp: int = 1
    ) -> None:
        """The size of the window; a phone widens a page that does not fit, as real ones do."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": sharp, "mobile": phone},
        )
        self._send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._send("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON."""
        answer = self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until the expression is true in the page; its value."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # a page that is only now being loaded
                if value := self.js(f"(v => v instanceof Node ? true : v)({expression})"):
                    return value
            time.sleep(0.02)
        shown = self.js("document.body.innerText")[:2000]
        raise AssertionError(f"never true: {expression}\nproblems: {self.problems}\n{shown}")

    def text(self, selector: str) -> str:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        return self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    def count(self, selector: str) -> int:
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def each(self, selector: str, expression: str = "e.textContent") -> list[Any]:
        """A value of each element `e` that a selector finds."""
        return self.js(f"{_all(selector)}.map(e => {expression})")

    def wait_for(self, selector: str, count: int | None = None, *, every: str = "true") -> None:
        """Until there are so many elements (None: any), and something is true of each `e`."""
        enough = "length > 0" if count is None else f"length == {count}"
        self.wait(f"(all => all.{enough} && all.every(e => {every}))({_all(selector)})")

    def hover(self, selector: str) -> tuple[float, float]:
        """The pointer to the middle of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.wait(element)
        self.js(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.js(f"{element}.getClientRects()[0].toJSON()")
        at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self._mouse("mouseMoved", at)
        return at

    def click(self, selector: str) -> None:
        at = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, at, button="left", clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        """An option of a select, or the text of an input."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.js(
            f"(e => {{ e.value = {json.dumps(value)};"
            " e.dispatchEvent(new Event('change', {bubbles: true})); })"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self._send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        clip: dict[str, Any] = {}
        if whole:
            size = self._send("Page.getLayoutMetrics")["cssContentSize"]
            area = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            clip = {"clip": area, "captureBeyondViewport": True}
        data = self._send("Page.captureScreenshot", format="png", **clip)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def _mouse(self, kind: str, at: tuple[float, float], **more: Any) -> None:
        self._send("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")


def _all(selector: str) -> str:
    return f"[...document.querySelectorAll({json.dumps(selector)})]"


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """A browser with one tab and a profile of its own; both end with the context."""
    command = [
        find_browser(),
        *("--headless", "--remote-debugging-port=0", "--no-first-run", "--hide-scrollbars"),
        *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--mute-audio"),
        # Chromium's sandbox refuses to run as root, as in a container.
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], stderr=subprocess.PIPE, text=True
        )
        try:
            with connect(_address(process), max_size=None) as socket:
                page = Page(socket)
                yield page
                with contextlib.suppress(Exception):  # it may hang up before it answers
                    page._session = None
                    page._send("Browser.close")
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.communicate()


def _address(process: subprocess.Popen) -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("DevTools listening on "):
            return line.removeprefix("DevTools listening on ").strip()
    raise RuntimeError("Chromium did not start:\n" + "".join(said))
