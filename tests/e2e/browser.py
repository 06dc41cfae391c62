"""A headless Chromium for tests, over its debugging pipe: no port, and no other package."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
_CODES = {"Tab": 9, "Escape": 27}  # of keys for which the browser itself does something
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Browser:
    """One tab. `problems` are errors that its page has thrown or logged, `asked` are its questions by `confirm`.

    `agrees` is the answer to these.
    """

    def __init__(self, to: int, come: int) -> None:
        self._to, self._from, self._last = os.fdopen(to, "wb", 0), os.fdopen(come, "rb", 0), 0
        self._buffer = b""
        self._session: str | None = None
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.agrees = True
        self._downloads: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        number = self._tell(method, **params)
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _tell(self, method: str, **params: Any) -> int:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        return self._last

    def _note(self, event: Any) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.problems.append(json.dumps(event["params"]["entry"]))
            case "Page.javascriptDialogOpening":
                self.asked.append(event["params"]["message"])
                self._tell("Page.handleJavaScriptDialog", accept=self.agrees)
            case "Browser.downloadProgress" if event["params"]["state"] != "inProgress":
                self._downloads.append(event["params"]["state"])

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            part = self._from.read(1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Return once a condition of the page is true. The test's time-out bounds it."""
        look = f"const look = async () => ({condition}) ? done() : setTimeout(looked, 20)"
        self.evaluate(f"new Promise((done, fail) => {{ {look}; const looked = () => look().catch(fail); looked() }})")

    def look(self, *, width: int, height: int, dark: bool) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is drawn

    def save_downloads(self, directory: Path) -> None:
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(directory), eventsEnabled=True)

    def downloaded(self) -> None:
        """Return once a download has ended, and fail if it was cut off. The test's time-out bounds it."""
        while not self._downloads:
            self._note(self._receive())
        assert self._downloads.pop() == "completed"

    def press(self, key: str) -> None:
        more: dict[str, Any] = {"text": "\r"} if key == "Enter" else {"windowsVirtualKeyCode": _CODES.get(key, 0)}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def hang_up(self) -> None:
        self._to.close()

    def close(self) -> None:
        self._from.close()

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def running_browser(chromium: str, directory: Path) -> Iterator[Browser]:
    (theirs_in, to), (come, theirs_out) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", _EXEC, str(theirs_in), str(theirs_out)]
    options = [chromium, *_OPTIONS, f"--user-data-dir={directory}"]
    process = subprocess.Popen([*command, *options], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    browser = Browser(to, come)
    try:
        yield browser
    finally:
        browser.hang_up()  # it ends by itself
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        browser.close()
