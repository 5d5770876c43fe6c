"""A headless Chromium, driven through its WebDriver: for pages that the package writes. No client library."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-color-profile=srgb", "--hide-scrollbars",
]  # fmt: skip
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Space": " ",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
}


class Page:
    """An open page."""

    def __init__(self, base: str) -> None:
        self._base = base

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """One command of WebDriver."""
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        """Loads a file; its scripts have run then."""
        self.call("/url", {"url": path.resolve().as_uri()})
        end = time.monotonic() + 60
        while self.run("return [document.readyState, location.href]") != ["complete", path.resolve().as_uri()]:
            assert time.monotonic() < end, f"{path} is not loaded"
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function's body returns in the page."""
        return self.call("/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Keys, one after the other, to what has the focus."""
        strokes = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": key} for key in strokes for kind in ("keyDown", "keyUp")]
        self.call("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def errors(self) -> list[str]:
        """What the console has said since the last call, warnings too."""
        return [line["message"] for line in self.call("/se/log", {"type": "browser"}) if line["level"] != "INFO"]

    def size(self, width: int, height: int) -> None:
        """The size of what is seen."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark: bool) -> None:
        """As if the user had dark colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def cdp(self, command: str, **given: Any) -> Any:
        """A command of Chromium's own."""
        return self.call("/goog/cdp/execute", {"cmd": command, "params": given})

    def picture(self, path: Path, whole: bool = False) -> None:
        """A screenshot, of the whole page if that is wanted."""
        made = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with a new profile; it ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        driver = subprocess.Popen([str(DRIVER), "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, text=True)
        try:
            port = _port(driver)
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder}/profile"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            top = Page(f"http://127.0.0.1:{port}")
            session = top.call("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            page = Page(f"http://127.0.0.1:{port}/session/{session}")
            try:
                yield page
            finally:
                page.call("", method="DELETE")
        finally:
            driver.terminate()
            with driver:  # its output is closed, and it is waited for
                pass


def _port(driver: subprocess.Popen[str]) -> int:
    begin = time.monotonic()
    assert driver.stdout is not None
    for line in driver.stdout:
        if "on port" in line and line.rstrip().endswith("."):
            return int(line.rstrip(".\n ").rpartition(" ")[2])
        if time.monotonic() - begin > 30:
            break
    raise RuntimeError("chromedriver does not say its port")
