"""A headless Chromium, spoken to over a pipe in its own DevTools protocol: no package and no port."""

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

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Chromium reads commands from its descriptor 3 and writes answers to 4.
_START = 'exec "$@" 3<&{read} 4>&{write}'
_FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
_FLAGS += " --disable-component-update --disable-extensions --disable-dev-shm-usage --remote-debugging-pipe"
_TIMEOUT_S = 60.0


def find() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `events`: what the browser has told unasked, in order. Use it as a context manager."""

    def __init__(self, profile: Path) -> None:
        path = find()
        assert path is not None
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        command = [path, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        start = ["bash", "-c", _START.format(read=read, write=write), "bash", *command]
        self._process = subprocess.Popen(start, pass_fds=(read, write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self.events: list[dict[str, Any]] = []
        self._received = b""
        self._last = 0
        self._session: str | None = None

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Load a file in a window of this size; returns after the page's `load` event."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, width: int, height: int) -> bytes:
        """PNG of the page's upper left."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of all events of these names."""
        return [event["params"] for event in self.events if event["method"] in methods]

    def call(self, method: str, **params: Any) -> Any:
        """A command's result. Raises RuntimeError for what the browser refuses, TimeoutError when it says nothing."""
        self._last += 1
        number = self._last
        session = {} if self._session is None else {"sessionId": self._session}
        os.write(self._commands, json.dumps({"id": number, "method": method, "params": params} | session).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; an event is kept as well."""
        limit = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, limit - time.monotonic()))
            data = os.read(self._answers, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError(f"the browser said nothing; exit status {self._process.poll()}")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found
