"""The contract of a sandbox, and what its calls give back.

Two classes keep it: ``LocalSandbox`` in the node server, which owns the processes, and ``RemoteSandbox`` in the client,
which asks the first over the wire. ``prorl_env.testing.check_sandbox`` is the contract as a function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from prorl_env.config import SandboxSpec

__all__ = ["BashResult", "CellResult", "ExecResult", "Sandbox"]


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    exit_code: int
    """Its exit code, or minus the number of the signal that killed it."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_omitted_bytes: int = 0
    """Bytes left out in the middle of ``stdout`` because of the output limit."""
    stderr_omitted_bytes: int = 0
    timed_out: bool = False
    """Whether it was killed at its deadline; the output is then what there was."""
    seconds: float = 0.0
    """How long it ran."""


class BashResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command in a bash session ended."""

    exit_code: int | None
    """``None`` if the command was stopped at its deadline and no code came back."""
    output: bytes = b""
    """What the terminal shows: standard output and error together, in order."""
    omitted_bytes: int = 0
    """Bytes left out in the middle of ``output`` because of the output limit."""
    timed_out: bool = False
    restarted: bool = False
    """Whether the shell ended (``exit``, ``exec``, a signal) and a new one stands in its place."""
    cwd: str = ""
    """The session's directory afterwards."""
    seconds: float = 0.0


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a cell in an IPython session ended."""

    status: str
    """``ok``, ``error`` (it raised), ``timeout`` (interrupted at its deadline) or ``died`` (the kernel is gone)."""
    outputs: tuple[dict[str, str], ...] = ()
    """In order: ``{"type": "stream", "name", "text"}``, ``{"type": "result"|"display", mime: data, …}``,
    ``{"type": "error", "name", "value", "traceback"}``."""
    text: str = ""
    """The same as text, as a person would read it in a terminal; without colour codes."""
    omitted_chars: int = 0
    """Characters left out in the middle of ``text`` because of the output limit."""
    cause: str = ""
    """For ``died`` and ``timeout``: what happened, in words."""
    restarted: bool = False
    """Whether a new kernel without the old state stands in its place."""
    seconds: float = 0.0


class Sandbox(Protocol):
    """An isolated place to run things: no network, no host files, no host environment, its own processes and files.

    All calls may be made at the same time, except that calls to one session queue up. After ``stop``, or once the
    sandbox has died, every call raises ``SandboxDied``, also one that was in flight.
    """

    @property
    def sandbox_id(self) -> str:
        """Unique on its node server."""
        ...

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        ...

    @property
    def runtime(self) -> str:
        """Name of the runtime, e.g. ``apptainer``."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30.0,
    ) -> ExecResult:
        """Run one program to its end, outside of any session.

        A program that is missing inside is an ordinary result with exit code 127. At the deadline the program's process
        tree is killed. Processes that it leaves behind do not hold the call open.

        Raises:
            SandboxDied: If the sandbox is or comes to be gone.
            DeadlineExceeded: If the node server does not answer; not at ``timeout_s``, which gives a result.
        """
        ...

    async def run_bash(self, command: str, *, session: str = "main", timeout_s: float = 30.0) -> BashResult:
        """Run a command in the named persistent bash, which is started if need be.

        Directory, variables, functions and options are kept from call to call. A syntax error gives an exit code at
        once.

        Raises:
            UsageError: If the command holds a NUL character, which no shell command can.
            SandboxDied: If the sandbox is or comes to be gone.
            SessionDied: If the shell is gone and a new one does not start.
            DeadlineExceeded: If the node server does not answer; not at ``timeout_s``, which gives a result.
        """
        ...

    async def run_cell(self, code: str, *, session: str = "main", timeout_s: float = 30.0) -> CellResult:
        """Run a cell in the named persistent IPython, which is started if need be.

        Raises:
            SandboxDied: If the sandbox is or comes to be gone.
            SessionDied: If the kernel does not start, e.g. since the image has no ``ipykernel``.
            DeadlineExceeded: If the node server does not answer; not at ``timeout_s``, which gives a result.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The content of a file, read with the sandbox's own eyes: a link leads nowhere outside.

        Raises:
            UsageError: If there is no such file, it cannot be read or has more than ``max_bytes``.
            SandboxDied: If the sandbox is or comes to be gone.
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file whole, making its folders.

        Raises:
            UsageError: If it cannot be written.
            SandboxDied: If the sandbox is or comes to be gone.
        """
        ...

    async def stop(self) -> None:
        """Kill everything in the sandbox and remove what it left. When it returns, both are done. Safe to call twice.

        Raises:
            InfraError: If something of it is still there after ten seconds.
        """
        ...
