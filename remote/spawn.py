"""The node server's side of the spawner: start a process in a sandbox or on the host, and know when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prorl_env.errors import InfraError, SandboxStartFailed

__all__ = ["Child", "Spawner"]

_PROGRAM = Path(__file__).with_name("spawner.py")
_MAX_MESSAGE = 1 << 20
_MAX_REQUEST_BYTES = 128 * 1024
"""Well below what a socket takes in one message by default."""
DEFAULT_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(slots=True, eq=False)
class Child:
    """A process that the spawner started."""

    pid: int
    """As the host sees it."""
    exit_code: asyncio.Future[int]
    """Done when the process has ended: its exit code, or minus the signal that killed it."""
    _spawner: Spawner = field(repr=False)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet, as far as has been reported."""
        return not self.exit_code.done()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; harmless after the end."""
        if self.alive:
            self._spawner.kill(self.pid, number)


class Spawner:
    """Handle of the spawner process. Create with ``start``, end with ``close``."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._sock = sock
        self._process = process
        self._ids = itertools.count(1)
        self._starting: dict[int, asyncio.Future[Child]] = {}
        self._running: dict[int, Child] = {}
        self._outbox: list[tuple[bytes, tuple[int, ...]]] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._receive)

    @classmethod
    def start(cls, run_dir: Path) -> Spawner:
        """Start the process. It removes ``run_dir`` when this process is gone.

        Must be called from a running event loop.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(theirs.fileno()), str(run_dir)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={},  # It has no use for ours, and must not be able to pass it on.
        )
        theirs.close()
        return cls(ours, process)

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        join: int | None = None,
        stage: Sequence[Sequence[str]] | None = None,
        terminal: int | None = None,
        cwd: str | None = None,
        limits: Mapping[str, int] | None = None,
        path: Sequence[str] = DEFAULT_PATH,
    ) -> Child:
        """Start a process.

        Args:
            argv: The program and its arguments.
            env: Its whole environment.
            fds: Descriptor number in the new process -> descriptor of ours. It gets these and no others; ours stay
                open.
            join: Pid of a process whose namespaces to enter, without any capability.
            stage: Mounts to make in a namespace of its own before; see ``spawner.set_stage``.
            terminal: The number in ``fds`` that becomes the controlling terminal.
            cwd: Where to start, seen from inside the namespaces.
            limits: Resource limits by name (``NPROC``, ``FSIZE``, …), hard and soft.
            path: Where to look for ``argv[0]`` if it has no slash.

        Raises:
            SandboxStartFailed: If the program cannot be started; the message says which step failed.
            InfraError: If the spawner is gone.
        """
        targets = sorted(fds)
        request_id = next(self._ids)
        future: asyncio.Future[Child] = self._loop.create_future()
        request = {
            "op": "spawn",
            "id": request_id,
            "argv": list(argv),
            "env": dict(env),
            "fds": targets,
            "join": join,
            "stage": None if stage is None else [list(step) for step in stage],
            "terminal": None if terminal is None else targets.index(terminal),
            "cwd": cwd,
            "limits": dict(limits or {}),
            "path": list(path),
        }
        data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(data) > _MAX_REQUEST_BYTES:
            raise SandboxStartFailed(f"{argv[0]}: arguments and environment have more than {_MAX_REQUEST_BYTES} bytes")
        self._starting[request_id] = future
        # Duplicates, so that the caller may close its own while the message still waits to be sent.
        self._send(data, tuple(os.dup(fds[target]) for target in targets))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_kill_unwanted)
            raise

    def kill(self, pid: int, number: int) -> None:
        """Signal a child that has not been reported as ended."""
        self._send(json.dumps({"op": "kill", "id": 0, "pid": pid, "signal": int(number)}).encode(), ())

    def close(self) -> None:
        """Let the spawner kill all, remove the run directory and end. Safe to call twice; blocks at most 10 s."""
        if self._sock.fileno() == -1:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._fail("the node server is stopping")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)

    def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        self._outbox.append((data, fds))
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                socket.send_fds(self._sock, [data], list(fds))
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except (BrokenPipeError, ConnectionResetError):
                self._fail("the spawner process is gone")
            except OSError as error:  # E.g. too many descriptors under way: a matter of this request alone.
                self._refuse(json.loads(data)["id"], error)
            for fd in fds:
                os.close(fd)
            self._outbox.pop(0)
        self._loop.remove_writer(self._sock)

    def _refuse(self, request_id: int, error: OSError) -> None:
        future = self._starting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(SandboxStartFailed(f"cannot ask for a process: {error.strerror}"))

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data = self._sock.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._sock)
                self._fail("the spawner process is gone")
                return
            self._handle(json.loads(data))

    def _handle(self, message: dict[str, Any]) -> None:
        request_id = message["id"]
        match message["event"]:
            case "started":
                child = Child(message["pid"], self._loop.create_future(), self)
                self._running[request_id] = child
                self._starting.pop(request_id).set_result(child)
            case "failed":
                self._starting.pop(request_id).set_exception(SandboxStartFailed(message["error"]))
            case "exited":
                if (ended := self._running.pop(request_id, None)) is not None:
                    ended.exit_code.set_result(message["status"])

    def _fail(self, why: str) -> None:
        for future in self._starting.values():
            future.set_exception(InfraError(f"cannot start a process: {why}"))
            future.exception()  # Retrieved here: nobody may be left to await it.
        self._starting.clear()
        for child in self._running.values():
            child.exit_code.set_result(-signal.SIGKILL)
        self._running.clear()


def _kill_unwanted(future: asyncio.Future[Child]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().kill()
