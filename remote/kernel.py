"""A persistent IPython in a sandbox, driven by ``jupyter_client`` over Unix sockets that the kernel opens inside.

``SandboxProvisioner`` is what ``jupyter_client`` calls a kernel provisioner: it starts the kernel through the sandbox
instead of as a subprocess. The client library alone would wait out its whole timeout for a kernel that is dead; here
each wait also watches the process, so that a death is noticed when it happens and named by its signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from prorl_env.errors import InfraError, SessionDied
from prorl_env.remote.bash import SpawnInside
from prorl_env.remote.output import clip_text
from prorl_env.remote.pipes import Drain
from prorl_env.remote.sandbox import CellResult
from prorl_env.remote.spawn import Child
from prorl_env.remote.waiting import first_of

__all__ = ["KernelSession", "SandboxProvisioner"]

_ENTRY_POINT = EntryPoint(
    "prorl-sandbox", "prorl_env.remote.kernel:SandboxProvisioner", KernelProvisionerFactory.GROUP_NAME
)
_START_TIMEOUT_S = 30.0
_LOG_BYTES = 8192
_QUIET_S = 0.5
_MAX_OUTPUTS, _MAX_MIMES = 1000, 100
_MAX_MESSAGE_BYTES, _MAX_QUEUED = 8 * 1024 * 1024, 100
_INTERRUPT_GRACE_S = 2.0
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_SIGNAL_HINTS = {signal.SIGKILL: " (often: out of memory)", signal.SIGSEGV: " (segmentation fault)"}


class SandboxProvisioner(KernelProvisionerBase):
    """Lets a ``jupyter_client`` kernel manager start its kernel in a sandbox.

    It is given the sandbox's ``spawn`` through ``launch_kernel``'s keyword ``spawn_inside``; the connection files are
    written by ``KernelSession``.
    """

    child: Child | None = None

    @property
    def has_process(self) -> bool:
        """Whether a kernel has been started and not been cleaned up."""
        return self.child is not None

    async def poll(self) -> int | None:
        """``None`` while the kernel lives, else its exit code."""
        if self.child is None:
            return 0
        return self.child.exit_code.result() if self.child.exit_code.done() else None

    async def wait(self) -> int | None:
        """Wait for the kernel's end."""
        return None if self.child is None else await asyncio.shield(self.child.exit_code)

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel."""
        if self.child is not None:
            self.child.kill(signum)

    async def kill(self, restart: bool = False) -> None:
        """Kill the kernel."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """End the kernel; there is nothing to be gentle about."""
        await self.send_signal(signal.SIGKILL)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing to prepare: the connection files are there already, and the host's environment is not passed on."""
        return {**kwargs, "cmd": list(self.kernel_spec.argv)}

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel process inside."""
        self.child = await kwargs["spawn_inside"](cmd, kwargs["kernel_env"])
        connection: KernelConnectionInfo = kwargs["connection"]
        return connection

    async def cleanup(self, restart: bool = False) -> None:
        """Forget the process."""
        self.child = None


class KernelSession:
    """One persistent IPython in a sandbox. Cells queue up; ``close`` may come at any time.

    Args:
        spawn: Starts a process in the sandbox.
        env: The kernel's environment.
        cwd: Where it starts.
        write_file: Writes a file in the sandbox: ``write_file(path, data, mode)``.
        private: A folder that the sandbox cannot see.
        outside: A descriptor of the folder for sockets …
        inside: … and where the sandbox sees it. What is in there is the agent's to change.
        output_chars: Characters of text kept of one cell.
    """

    def __init__(
        self,
        spawn: SpawnInside,
        *,
        write_file: Callable[[str, bytes, int], Awaitable[None]],
        env: Mapping[str, str],
        cwd: str,
        private: Path,
        outside: int,
        inside: str,
        output_chars: int,
    ) -> None:
        self._write_file = write_file
        self._private = private
        self._spawn = spawn
        self._env = dict(env)
        self._cwd = cwd
        self._outside = outside
        self._inside = inside
        self._output_chars = output_chars
        self._lock = asyncio.Lock()
        self._generation = 0
        self._manager: AsyncKernelManager | None = None
        self._client: AsyncKernelClient | None = None
        self._child: Child | None = None
        self._log: Drain | None = None
        self._pinned: list[int] = []

    async def run(self, code: str, *, timeout_s: float) -> CellResult:
        """Run one cell; see ``Sandbox.run_cell``."""
        async with self._lock:
            restarted = self._child is not None and not self._child.alive
            if self._child is None or not self._child.alive:
                self.close()
                await self._start()
            cell = _Cell(self, code, timeout_s, self._output_chars, restarted_before=restarted)
            try:
                result = await cell.result()
            except BaseException:
                self.close()  # Cancelled in mid-cell: it must not run on into the next one.
                raise
            if result.restarted:
                self.close()
                await self._start()
            return result

    async def start(self) -> None:
        """Start the kernel now instead of at the first cell.

        Raises:
            SessionDied: If it does not start.
        """
        async with self._lock:
            if self._child is None:
                await self._start()

    def close(self) -> None:
        """Kill the kernel and close its sockets. Safe to call twice."""
        child, self._child = self._child, None
        client, self._client = self._client, None
        manager, self._manager = self._manager, None
        if child is not None:
            child.kill()
        if self._log is not None:
            self._log.close()
        if client is not None:
            client.stop_channels()
            client.context.destroy(linger=0)
        if manager is not None:
            manager.context.destroy(linger=0)
        while self._pinned:
            os.close(self._pinned.pop())

    async def _start(self) -> None:
        self._generation += 1
        name = f"k{self._generation}-{os.urandom(2).hex()}"
        spec = KernelSpec(
            argv=["python3", "-m", "ipykernel_launcher", "-f", f"{self._inside}/{name}.json"],
            language="python",
            metadata={"kernel_provisioner": {"provisioner_name": _ENTRY_POINT.name}},
        )
        manager = AsyncKernelManager(
            transport="ipc", ip=str(self._private / name), connection_file=str(self._private / f"{name}.json")
        )
        manager._kernel_spec = spec
        # Also where the package is not installed but on PYTHONPATH, so that nobody has read its entry points.
        KernelProvisionerFactory.instance().provisioners.setdefault(_ENTRY_POINT.name, _ENTRY_POINT)
        for number, channel in enumerate(("shell", "iopub", "stdin", "hb", "control"), 1):
            setattr(manager, f"{channel}_port", number)
        connection = manager.get_connection_info()
        manager.write_connection_file()
        seen_inside = {**connection, "ip": f"{self._inside}/{name}", "key": manager.session.key.decode()}
        await self._write_file(f"{self._inside}/{name}.json", json.dumps(seen_inside, default=str).encode(), 0o600)
        try:
            await manager.start_kernel(
                spawn_inside=self._spawn_kernel,
                connection=connection,
                kernel_env={**self._env, "JUPYTER_PLATFORM_DIRS": "1"},
            )
        except InfraError as error:
            raise SessionDied(f"the IPython kernel did not start: {error.message}") from None
        self._manager = manager
        assert isinstance(manager.provisioner, SandboxProvisioner)
        self._child = manager.provisioner.child
        await self._pin_sockets(name)
        self._client = client = manager.client()
        # A kernel that shows more than this, or when nobody listens, is cut off instead of filling the node server.
        client.context.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        client.context.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        client.start_channels()
        await self._until_ready(client)

    async def _pin_sockets(self, name: str) -> None:
        """Wait for the kernel's sockets and hold on to them, under names of our own.

        Opened without following links and used through the descriptors, they stay those of the kernel: a link that the
        agent puts in their place would be followed on the host, to a socket of somebody else's.
        """
        assert self._child is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        for channel in range(1, 6):
            while True:
                with contextlib.suppress(OSError):
                    fd = os.open(f"{name}-{channel}", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._outside)
                    self._pinned.append(fd)
                    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                        self.close()
                        raise SessionDied("the IPython kernel did not start: there is something else than its socket")
                    os.symlink(f"/proc/self/fd/{fd}", self._private / f"{name}-{channel}")
                    break
                if not self._child.alive or time.monotonic() > deadline:
                    self.close()
                    raise SessionDied(
                        f"the IPython kernel did not start: {self._last_words() or 'it opened no sockets'}"
                    )
                await asyncio.sleep(0.01)

    async def _spawn_kernel(self, argv: list[str], env: Mapping[str, str]) -> Child:
        log_out, log_in = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._log = Drain(log_out, _LOG_BYTES)
        try:
            return await self._spawn(argv, env=env, fds={0: null, 1: log_in, 2: log_in}, terminal=None, cwd=self._cwd)
        finally:
            os.close(log_in)
            os.close(null)

    async def _until_ready(self, client: AsyncKernelClient) -> None:
        assert self._child is not None
        ready = asyncio.ensure_future(client.wait_for_ready(timeout=_START_TIMEOUT_S))
        dead = asyncio.shield(self._child.exit_code)
        try:
            await first_of(ready, dead, timeout_s=_START_TIMEOUT_S + 5)
            if not ready.done() or ready.exception() is not None:
                raise SessionDied(f"the IPython kernel did not start: {self._last_words() or 'no answer from it'}")
        except BaseException:
            self.close()
            raise
        finally:
            ready.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await ready

    def _last_words(self) -> str:
        said = self._log.close()[0].decode("utf-8", "replace") if self._log is not None else ""
        lines = [line for line in said.splitlines() if line.strip() and "debugpy" not in line]
        return lines[-1] if lines else ""


class _Cell:
    """One cell from its start to its result."""

    def __init__(
        self, session: KernelSession, code: str, timeout_s: float, output_chars: int, *, restarted_before: bool
    ) -> None:
        assert session._client is not None
        assert session._child is not None
        self._client = session._client
        self._child = session._child
        self._code = code
        self._timeout_s = timeout_s
        self._output_chars = output_chars
        self._outputs: list[dict[str, str]] = []
        self._size = 0
        self._lost = 0
        self._status = "ok"
        self._restarted_before = restarted_before
        self._nonsense = ""
        self._seen = 0

    async def result(self) -> CellResult:
        began = time.monotonic()
        # Without stop_on_error=False a kernel skips what comes right after a cell that raised, and says nothing.
        message_id = self._client.execute(self._code, allow_stdin=False, stop_on_error=False)
        listening = asyncio.ensure_future(self._listen_warily(message_id))
        dead = asyncio.shield(self._child.exit_code)
        cause, restarted = "", False
        try:
            await first_of(listening, dead, timeout_s=self._timeout_s)
            if not listening.done() and self._child.alive:
                self._status = "timeout"
                cause = f"the cell was interrupted after {self._timeout_s:g} s"
                restarted = not await self._interrupt(listening, dead)
                if restarted:
                    cause += "; it ignored the interrupt, so the kernel was restarted and its variables are lost"
            if not restarted and not self._child.alive and not listening.done():
                # What it printed last may still be under way.
                await first_of(listening, timeout_s=0.05)
            if self._nonsense:
                # Only what runs inside can do that. It is the agent's doing and its loss.
                self._child.kill()
                self._status, restarted = "died", True
                cause = f"{self._nonsense}; it was restarted and its variables are lost"
            elif not restarted and not self._child.alive:
                self._status, restarted = "died", True
                cause = _death(self._child.exit_code.result()) + "; a new one was started and its variables are lost"
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
        text, omitted = clip_text(_as_text(self._outputs), self._output_chars)
        omitted += self._lost
        return CellResult(
            status=self._status,
            outputs=tuple(self._outputs),
            text=text,
            omitted_chars=omitted,
            cause=cause,
            restarted=restarted or self._restarted_before,
            seconds=time.monotonic() - began,
        )

    async def _interrupt(self, listening: asyncio.Future[None], dead: asyncio.Future[int]) -> bool:
        """True if the kernel came back to idle."""
        self._child.kill(signal.SIGINT)
        await first_of(listening, dead, timeout_s=_INTERRUPT_GRACE_S)
        if listening.done() or not self._child.alive:
            return True
        self._child.kill(signal.SIGKILL)
        await first_of(dead, timeout_s=2.0)
        return False

    async def _listen_warily(self, message_id: str) -> None:
        """Until the kernel is idle, or has replied and shows nothing more: it drops what is too much to send."""
        listening = asyncio.ensure_future(self._listen(message_id))
        replied = asyncio.ensure_future(self._reply(message_id))
        try:
            await first_of(listening, replied)
            seen = -1
            while not listening.done() and seen != self._seen:
                seen = self._seen
                await first_of(listening, timeout_s=_QUIET_S)
            for task in (listening, replied):
                if task.done():
                    task.result()
        except Exception as error:  # Anything at all can be wrong with a message that an agent has made.
            self._nonsense = f"the kernel sent something that is no message ({type(error).__name__})"
        finally:
            listening.cancel()
            replied.cancel()
            await asyncio.gather(listening, replied, return_exceptions=True)

    async def _reply(self, message_id: str) -> None:
        while True:
            message = await self._client.get_shell_msg(timeout=None)
            if message.get("parent_header", {}).get("msg_id") == message_id:
                if message["content"]["status"] == "error" and self._status == "ok":
                    self._status = "error"
                return

    async def _listen(self, message_id: str) -> None:
        """Collect what the cell shows until the kernel says that it is idle again."""
        while True:
            message = await self._client.get_iopub_msg(timeout=None)
            self._seen += 1
            if message.get("parent_header", {}).get("msg_id") != message_id:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    self._add({"type": "stream", "name": content["name"], "text": content["text"]})
                case "execute_result" | "display_data":
                    kind = "result" if message["msg_type"] == "execute_result" else "display"
                    self._add({"type": kind, **{mime: _plain(data) for mime, data in content["data"].items()}})
                case "error":
                    if self._status == "ok":
                        self._status = "error"
                    traceback = _COLOUR.sub("", "\n".join(content["traceback"]))
                    self._add(
                        {"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": traceback}
                    )
                case "status" if content["execution_state"] == "idle":
                    return
                case _:
                    pass

    def _add(self, output: dict[str, str]) -> None:
        output = {str(key): str(value) for key, value in output.items()}
        last = self._outputs[-1] if self._outputs else None
        if last is not None and output["type"] == last["type"] == "stream" and output["name"] == last["name"]:
            if len(last["text"]) < 4 * self._output_chars:
                last["text"] += output["text"]
            else:  # The tail is what is worth having, and the rest is counted.
                joined = last["text"] + output["text"]
                last["text"] = joined[: self._output_chars] + joined[-self._output_chars :]
                self._lost += len(joined) - len(last["text"])
            return
        # Bounded: a cell that shows things without end must not fill the node server.
        self._size += sum(map(len, output.values()))
        if len(self._outputs) < _MAX_OUTPUTS and len(output) <= _MAX_MIMES and self._size <= 64 * self._output_chars:
            self._outputs.append(output)


def _plain(data: object) -> str:
    return _COLOUR.sub("", data) if isinstance(data, str) else json.dumps(data)


def _as_text(outputs: list[dict[str, str]]) -> str:
    """As a terminal would show it: streams as they are, results and errors on lines of their own."""
    parts: list[str] = []
    for output in outputs:
        match output["type"]:
            case "stream":
                parts.append(output["text"])
                continue
            case "error":
                text = output["traceback"]
            case _:
                text = output.get("text/plain", f"<{', '.join(key for key in output if key != 'type')}>")
        if parts and not parts[-1].endswith("\n"):
            parts.append("\n")
        parts.append(text + "\n")
    return "".join(parts)


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the kernel exited with code {exit_code}"
    with contextlib.suppress(ValueError):
        number = signal.Signals(-exit_code)
        return f"the kernel was killed by {number.name}{_SIGNAL_HINTS.get(number, '')}"
    return f"the kernel was killed by signal {-exit_code}"
