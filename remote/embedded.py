"""Connections of this process, and the private node server that it starts when no address is given.

Local use takes the same path as remote use: the node server is a child process at an ``ipc://`` address in a 0700
directory. It watches this process through a pidfd and ends, with everything in it, when this process does, however
that comes about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

from prorl_env.errors import NodeUnreachable, SetupError
from prorl_env.remote.client import NodeClient
from prorl_env.remote.runtimes import RUNTIMES

__all__ = ["Nodes", "is_address"]

_START_TIMEOUT_S = 30.0


def is_address(runtime: str) -> bool:
    """Whether a ``runtime=`` value is the address of a node server instead of a runtime's name."""
    return "://" in runtime and runtime not in RUNTIMES


class Nodes:
    """The connections of one event loop: one to each address and one to a private node server, opened on demand."""

    def __init__(self) -> None:
        self._clients: dict[str, NodeClient] = {}
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def client(self, runtime: str) -> NodeClient:
        """The client for a ``runtime=`` value: the one at that address, or the private one.

        Raises:
            NodeUnreachable: If nobody answers at the address, or the private node server does not start.
            SetupError: If the private node server cannot run here.
        """
        key = runtime if is_address(runtime) else ""
        async with self._lock:
            client = self._clients.get(key)
            if client is None or client.lost:
                if client is not None:
                    await client.aclose()
                client = await NodeClient.connect(key) if key else await self._start_private()
                self._clients[key] = client
            return client

    async def aclose(self) -> None:
        """Close all connections and end the private node server, with every sandbox in it. Safe to call twice."""
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.aclose() for client in clients))
        process, self._process = self._process, None
        if self._watching is not None:
            self._watching.cancel()
        if process is not None:
            await _end(process)

    async def _start_private(self) -> NodeClient:
        if self._process is not None:
            await _end(self._process)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "prorl_env.remote.node", str(os.getpid())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for us to handle.
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            await _end(process)
            raise NodeUnreachable(f"the private node server did not start within {_START_TIMEOUT_S:g} s") from None
        word, _, rest = line.partition(" ")
        if word == "error":
            raise SetupError(f"the private node server did not start: {rest}")
        if word != "address":
            code = await process.wait()
            raise NodeUnreachable(f"the private node server ended with exit code {code} before it was ready")
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.ensure_future(_watch(process, gone))
        return await NodeClient.connect(rest, gone=gone)


async def _watch(process: asyncio.subprocess.Process, gone: asyncio.Future[str]) -> None:
    code = await process.wait()
    if not gone.done():
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        gone.set_result(f"the private node server ended with {how}")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(8.0):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # Its spawner cleans up.
        await process.wait()
