"""A real Chromium for tests, driven over its debugging pipe: no port, no driver, no further package."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 20
"""How long one answer of the browser may take before the test fails."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def _moved_up(fd: int) -> int:
    moved = fcntl(fd, F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return moved


class Browser:
    """One Chromium and one tab of it, driven over a pair of pipes with its debugging protocol."""

    def __init__(self, profile: Path) -> None:
        named = os.environ.get("PRORL_ENV_CHROMIUM")
        found = next(filter(None, map(shutil.which, [named] if named else NAMES)), None)
        if found is None:
            pytest.fail("no Chromium here: run scripts/install-chromium as root, or set PRORL_ENV_CHROMIUM")
        # The browser wants its ends at descriptors 3 and 4; ours must not lie there already.
        its_in, self._out, self._in, its_out = map(_moved_up, (*os.pipe(), *os.pipe()))
        command = ["bash", "-c", f'exec "$@" 3<&{its_in} 4>&{its_out}', "-", found, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(its_in, its_out),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it and everything it started."""
        self._session = None
        with suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("Browser.close")
            self._process.wait(10)
        os.close(self._out)
        os.close(self._in)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return cast("dict[str, Any]", answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], PATIENCE_S)[0], f"Chromium said nothing for {PATIENCE_S} s"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium ended: its sandbox flags or shared libraries may be wrong here"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return cast("dict[str, Any]", json.loads(line))

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file anew and wait for its load event."""
        for url in ("about:blank", f"file://{path}{fragment}"):
            self.events.clear()
            self.call("Page.navigate", url=url)
            while not self.seen("Page.loadEventFired"):
                self.events.append(self._read())

    def run(self, script: str) -> Any:
        """The JSON value of an expression; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for a condition to become true in the page."""
        look = f"const look = () => ({condition}) ? done() : setTimeout(look, 10);"
        self.run(f"new Promise((done) => {{ {look} look(); }})")

    def press(self, *keys: str) -> None:
        """Press keys as a keyboard does."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def seen(self, event: str) -> list[dict[str, Any]]:
        """The parameters of the events of one kind since the page was opened."""
        return [message["params"] for message in self.events if message.get("method") == event]

    def assert_calm(self, path: Path) -> None:
        """The script ran to its end, nothing failed, and nothing was asked of anybody."""
        assert self.run("document.documentElement.dataset.ready") == "true"
        assert self.run("document.documentElement.dataset.error ?? null") is None
        assert self.seen("Runtime.exceptionThrown") == []
        assert [entry for entry in self.seen("Log.entryAdded") if entry["entry"]["level"] == "error"] == []
        assert {request["documentURL"] for request in self.seen("Network.requestWillBeSent")} == {f"file://{path}"}
        assert len(self.seen("Network.requestWillBeSent")) == 1

    @contextmanager
    def screen(self, width: int, height: int = 900, scheme: str = "light") -> Iterator[None]:
        """A window of this size and colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        try:
            yield
        finally:
            self.call("Emulation.clearDeviceMetricsOverride")
            self.call("Emulation.setEmulatedMedia", features=[])
