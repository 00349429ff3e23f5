"""One background event loop for the whole process, and the way from plain calls into it.

The library is asynchronous inside. ``gymnasium.Env`` is not, and a notebook already runs a loop of its own; so
synchronous calls hand their coroutine to this loop, which runs in a daemon thread, and wait. After a fork the child
has a portal of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Portal", "portal"]

T = TypeVar("T")


class Portal:
    """A running event loop in a thread. Use ``portal()`` instead of making one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self.shared: dict[str, object] = {}
        """Things that live as long as the loop, by name."""
        self.lock = threading.RLock()
        """Held while looking into ``shared``; never on the loop."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="prorl-env portal", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result; an interrupt (Ctrl-C) cancels it.

        Raises:
            RuntimeError: If called from the loop itself, which would wait for ever.
            BaseException: What the coroutine raises.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a synchronous call from the library's own event loop would wait for ever")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def at_exit(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Run ``closer`` on the loop when the interpreter ends; the last one added is the first to run."""
        self._closers.append(closer)

    def close(self) -> None:
        """Run the closers, for at most ten seconds, and stop the loop."""

        async def run() -> None:
            while self._closers:
                await self._closers.pop()()

        if not self._loop.is_running():
            return
        try:
            asyncio.run_coroutine_threadsafe(run(), self._loop).result(10.0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)


_portal: Portal | None = None
_lock = threading.Lock()


def portal() -> Portal:
    """The process's portal, started at the first call."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal


def _close() -> None:
    if _portal is not None:
        _portal.close()


def _forget() -> None:
    global _portal, _lock
    _portal, _lock = None, threading.Lock()


atexit.register(_close)
os.register_at_fork(after_in_child=_forget)
