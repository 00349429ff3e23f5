"""What several test modules use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from prorl_env.remote.client import NodeClient
from prorl_env.remote.embedded import Nodes

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, but not for ever."""
    return asyncio.run(asyncio.wait_for(work, 120))


@contextlib.asynccontextmanager
async def private_client() -> AsyncIterator[NodeClient]:
    """A client of a private node server that ends with the block."""
    nodes = Nodes()
    try:
        yield await nodes.client("auto")
    finally:
        await nodes.aclose()


def wait_until(fact: Callable[[], bool], *, within_s: float) -> bool:
    """Poll until ``fact`` holds; False if it did not within the time."""
    deadline = time.monotonic() + within_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_with(text: str) -> list[int]:
    """Pids of all living processes whose command line or environment holds ``text``, except this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) == os.getpid():
                continue
            haystack = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if text.encode() in haystack and "Z (zombie)" not in (entry / "status").read_text():
                found.append(int(entry.name))
    return found
