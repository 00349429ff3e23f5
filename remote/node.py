"""The process of a node server: ``python -m prorl_env.remote.node`` or ``prorl-env node``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable

from prorl_env.config import Paths
from prorl_env.errors import ProrlError
from prorl_env.remote.server import NodeServer

__all__ = ["run_node"]


async def run_node(
    paths: Paths, *, address: str | None = None, parent: int | None = None, announce: Callable[[str], None] = print
) -> None:
    """Serve until SIGINT or SIGTERM, or until the process ``parent`` is no more.

    Args:
        paths: See ``NodeServer``.
        address: See ``NodeServer``.
        parent: Pid of the process that this one must not outlive.
        announce: Called with the address once it is bound.

    Raises:
        ConfigError: See ``NodeServer``.
        SetupError: If the run directory cannot be made.
    """
    # Each sandbox takes a handful of descriptors; the usual soft limit is far below the hard one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loop = asyncio.get_running_loop()
    async with NodeServer(paths, address=address) as server:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, server.stop)
        if parent is not None:
            try:
                loop.add_reader(os.pidfd_open(parent), server.stop)
            except ProcessLookupError:
                return
            if os.getppid() != parent:
                return
        announce(server.address)
        await server.serve()


def _main() -> int:
    """Started by ``embedded.py``: ``node.py PARENT_PID``. Says the address, or what is wrong, on standard output."""
    parent = int(sys.argv[1])
    # The client's terminal may be gone before we are; a log line must not be what ends us.
    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(run_node(Paths.from_env(), parent=parent, announce=_say_address))
        except ProrlError as error:
            _say(f"error {error}")
            return 2
    return 0


def _say_address(address: str) -> None:
    _say(f"address {address}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(_main())
