"""A persistent bash whose commands, results and terminal are three separate channels.

* **Commands** go in over a pipe that is bash's script: each one arrives as a single line ``eval $'…' <&terminal``,
  with every byte outside of plain ASCII escaped. So nothing is typed, nothing echoed, quoting cannot go wrong, an
  unfinished quote is a syntax error at once, and the command runs at top level, where ``break`` and ``return`` mean
  what they mean in a script.
* **Results** come back over a second pipe: id, exit code, option flags and directory, written by the same line after
  the command. The id is random for each command. Programs do not inherit either pipe.
* **The terminal** is a pty and carries only what the programs themselves print and read. When a result has come, the
  *server* writes a random mark into the terminal's inner end; as a tty keeps order, all output of the command stands
  before the mark. Waiting for silence, or looking for a prompt, is never needed.

Known gap: an ``ERR`` trap runs twice for a failing command, once for itself and once for the ``eval`` around it.

The shell's own death (``exit 3``, ``exec true``, ``kill -9 $$``) shows as the end of the process; a new shell then
takes its place in the last known directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pty
import secrets
import signal
import termios
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from ptyprocess import PtyProcess

from prorl_env.errors import InfraError, SandboxStartFailed, SessionDied, UsageError
from prorl_env.remote.output import HeadTail
from prorl_env.remote.processes import descendants, kill_tree, now_ticks, send_signal
from prorl_env.remote.sandbox import BashResult
from prorl_env.remote.spawn import Child
from prorl_env.remote.waiting import first_of

__all__ = ["BashSession", "SpawnInside"]

STATUS_FD, TERMINAL_FD = 241, 242
_LADDER = ((signal.SIGINT, 0.05), (signal.SIGTERM, 0.05))
_LAST_GRACE_S = 0.1
_REAP_S = 0.01
_MAX_REPORT_BYTES = 8192
"""More than a path can be long."""
_ROWS, _COLUMNS = 50, 160

SpawnInside = Callable[..., Awaitable[Child]]
"""``spawn(argv, *, env, fds, terminal, cwd) -> Child`` in the sandbox."""

_REPORT = (
    b" <&242 241>&- 242>&-; "
    b'{ \\builtin printf \'%%s %%s %%s %%s\\0\' %s "$?" "$-" "${PWD-}" >&241; \\builtin set +xv; } >/dev/null 2>&1\n'
)


@dataclass(slots=True)
class _Shell:
    """One bash process and our ends of its three channels."""

    child: Child
    commands: int
    status: int
    master: int
    slave: int
    """A description of our own: what those inside do to theirs, e.g. make writing wait, does not reach us."""
    terminal_settings: list[object]
    terminal: PtyProcess
    closed: bool = False

    def detach(self) -> None:
        """Stop watching the channels. Before they are closed, or the loop would go on with somebody else's numbers."""
        if not self.closed:
            loop = asyncio.get_running_loop()
            for fd in (self.master, self.status):
                loop.remove_reader(fd)
            loop.remove_writer(self.commands)

    def close(self) -> None:
        if not self.closed:
            self.detach()
            self.closed = True
            for fd in (self.commands, self.status, self.slave, self.master):
                os.close(fd)
            self.terminal.fileobj.close()
            self.terminal.closed = True  # Or its destructor would wait for a process that is not its child.


class BashSession:
    """One persistent shell in a sandbox. Commands queue up; ``close`` may come at any time.

    Args:
        spawn: Starts a process in the sandbox.
        env: The shell's environment.
        cwd: Where it starts.
        output_bytes: Output kept of one command.
    """

    def __init__(self, spawn: SpawnInside, *, env: Mapping[str, str], cwd: str, output_bytes: int) -> None:
        self._spawn = spawn
        self._env = {**env, "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "COLUMNS": str(_COLUMNS)}
        self._cwd = cwd
        self._output_bytes = output_bytes
        self._lock = asyncio.Lock()
        self._shell: _Shell | None = None
        self._flags = ""
        self._last = 0

    async def run(self, command: bytes, *, timeout_s: float) -> BashResult:
        """Run one command; see ``Sandbox.run_bash``."""
        if b"\0" in command:
            raise UsageError("a shell command cannot hold a NUL character; write it to a file or use printf '\\0'")
        async with self._lock:
            shell = self._shell or await self._start()
            if not shell.child.alive:  # It died between two commands, e.g. killed by a background job.
                shell = await self._replace()
            result = await _Run(self, shell, command, timeout_s).result()
            if result.timed_out and not result.restarted:
                result = await self._settle(result)
            return result

    async def start(self) -> None:
        """Start the shell now instead of at the first command.

        Raises:
            SessionDied: If it does not start.
        """
        async with self._lock:
            if self._shell is None:
                await self._start()

    def close(self) -> None:
        """Kill the shell and close its channels. Safe to call twice."""
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.child.kill()
            shell.close()

    async def _settle(self, result: BashResult) -> BashResult:
        """After a command was stopped: bash tells of killed jobs at the next command, which must not be the agent's."""
        assert self._shell is not None
        await asyncio.sleep(_REAP_S)
        code = self._last
        after = await _Run(self, self._shell, b":", 1.0).result()
        self._last = code
        return msgspec.structs.replace(result, output=result.output + after.output, restarted=after.restarted)

    async def _start(self) -> _Shell:
        master, slave = pty.openpty()
        settings = _plain_terminal(slave)
        command_out, command_in = os.pipe()
        status_out, status_in = os.pipe()
        fds = {0: command_out, 1: slave, 2: slave, STATUS_FD: status_in, TERMINAL_FD: slave}
        argv = ["bash", "--noprofile", "--norc", "-s"]
        try:
            try:
                child = await self._spawn(argv, env=self._env, fds=fds, terminal=1, cwd=self._cwd)
            except SandboxStartFailed:  # The directory may have been removed.
                child = await self._spawn(argv, env=self._env, fds=fds, terminal=1, cwd="/")
        except InfraError as error:
            for fd in (master, slave, command_in, status_out):
                os.close(fd)
            raise SessionDied(f"bash did not start: {error.message}") from None
        finally:
            os.close(command_out)
            os.close(status_in)
        own = os.open(os.ttyname(slave), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(slave)
        for fd in (master, status_out, command_in):
            os.set_blocking(fd, False)
        terminal = PtyProcess(child.pid, os.dup(master))
        terminal.setwinsize(_ROWS, _COLUMNS)
        shell = _Shell(child, command_in, status_out, master, own, settings, terminal)
        self._flags, self._last = "", 0
        self._shell = shell
        return shell

    async def _replace(self) -> _Shell:
        self.close()
        return await self._start()


class _Run:
    """One command from its start to its result."""

    def __init__(self, session: BashSession, shell: _Shell, command: bytes, timeout_s: float) -> None:
        self._session = session
        self._shell = shell
        self._command = command
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._output = HeadTail(session._output_bytes)
        self._id = secrets.token_hex(8).encode()
        self._mark = b"\x1e" + secrets.token_hex(16).encode() + b"\x1e"
        self._held = b""  # The end of the output so far, which may be the beginning of the mark.
        self._marked: asyncio.Future[None] = self._loop.create_future()
        self._reported: asyncio.Future[list[bytes]] = self._loop.create_future()
        self._status = b""
        self._to_send = self._line()
        self._began_ticks = 0

    async def result(self) -> BashResult:
        shell, loop = self._shell, self._loop
        began = time.monotonic()
        self._began_ticks = now_ticks()
        termios.tcsetattr(shell.slave, termios.TCSANOW, shell.terminal_settings)  # type: ignore[arg-type]
        loop.add_reader(shell.master, self._read_terminal)
        loop.add_reader(shell.status, self._read_status)
        self._send_command()
        try:
            timed_out = not await self._ended(self._timeout_s)
            if timed_out:
                await self._climb_ladder()
            if not shell.closed:
                await self._drain()
        except BaseException:
            # Cancelled in mid-command: what is running must not run on into the next one.
            self._session.close()
            raise
        if shell.closed:
            raise SessionDied("the bash session was closed while a command ran")
        shell.detach()
        self._output.add(self._held)
        return await self._finish(timed_out, time.monotonic() - began)

    async def _finish(self, timed_out: bool, seconds: float) -> BashResult:
        session, exit_code, restarted = self._session, None, False
        if self._reported.done():
            _, code, flags, cwd = self._reported.result()
            session._last = exit_code = int(code)
            session._cwd = os.fsdecode(cwd)
            session._flags = "".join(flag for flag in "xv" if flag in flags.decode("ascii", "replace"))
        elif not self._shell.child.alive:
            status = self._shell.child.exit_code.result()
            exit_code, restarted = status if status >= 0 else 128 - status, True
            await session._replace()
        else:
            restarted = True
            await session._replace()
        kept, omitted = self._output.result()
        return BashResult(
            exit_code=None if timed_out and restarted else exit_code,
            output=kept,
            omitted_bytes=omitted,
            timed_out=timed_out,
            restarted=restarted,
            cwd=session._cwd,
            seconds=seconds,
        )

    def _line(self) -> bytes:
        # What our own line has changed is put back: the options x and v, and $?. In a list before && a failure counts
        # for neither errexit nor an ERR trap.
        session = self._session
        before = f"(exit {session._last})&&:;" if session._last else ""
        before += f"set -{session._flags};" if session._flags else ""
        return b"\\builtin eval " + _quoted(before.encode() + self._command) + _REPORT % self._id

    def _send_command(self) -> None:
        # A command may be longer than the pipe holds; bash reads as fast as it parses.
        try:
            while self._to_send:
                self._to_send = self._to_send[os.write(self._shell.commands, self._to_send) :]
        except BlockingIOError:
            self._loop.add_writer(self._shell.commands, self._send_command)
            return
        except BrokenPipeError:
            self._to_send = b""
        self._loop.remove_writer(self._shell.commands)

    def _read_status(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._shell.status, 65536)
            self._status += data
            *reports, self._status = self._status.split(b"\0")
            for report in reports:
                parts = report.split(b" ", 3)
                if _is_report(parts, self._id) and not self._reported.done():
                    self._reported.set_result(parts)
            if len(self._status) > _MAX_REPORT_BYTES:  # Not from our line: somebody inside floods the pipe.
                self._status = b""
                self._shell.child.kill()
            if not data:
                self._loop.remove_reader(self._shell.status)

    def _read_terminal(self) -> None:
        try:
            data = os.read(self._shell.master, 65536)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self._loop.remove_reader(self._shell.master)
            return
        data = self._held + data
        at = data.find(self._mark)
        if at >= 0:
            self._output.add(data[:at])
            self._held = b""
            if not self._marked.done():
                self._marked.set_result(None)
            return
        hold = _overlap(data, self._mark)
        self._held = data[len(data) - hold :]
        self._output.add(data[: len(data) - hold])

    async def _ended(self, timeout_s: float) -> bool:
        """Wait for the report or the shell's death; False at the timeout."""
        done = await first_of(self._reported, self._shell.child.exit_code, timeout_s=timeout_s)
        if done and not self._reported.done():
            self._read_status()  # The report may have been written just before the death.
        return done

    async def _climb_ladder(self) -> None:
        """Stop what this command has started, gently first; not earlier background jobs, nor the shell if need be."""
        shell_pid = self._shell.child.pid
        for number, grace_s in _LADDER:
            for pid in descendants(shell_pid, since=self._began_ticks):
                send_signal(pid, number)
            if await self._ended(grace_s):
                break
        kill_tree(shell_pid, root=False, since=self._began_ticks)  # What ignored that, in the background too.
        if await self._ended(_LAST_GRACE_S):
            return
        self._shell.child.kill()
        await self._ended(5.0)

    async def _drain(self) -> None:
        """Take in all output that came before the end: write the mark after it and read up to there."""
        with contextlib.suppress(OSError, termios.error):
            termios.tcflow(self._shell.slave, termios.TCOON)
        for _ in range(100):
            if self._shell.closed:
                return
            with contextlib.suppress(BlockingIOError):
                os.write(self._shell.slave, self._mark)
                break
            await asyncio.sleep(0.001)  # The terminal is full; the reader is emptying it.
        await first_of(self._marked, timeout_s=2.0)


def _is_report(parts: list[bytes], request_id: bytes) -> bool:
    return len(parts) == 4 and parts[0] == request_id and parts[1].isdigit() and len(parts[1]) <= 3


def _quoted(command: bytes) -> bytes:
    r"""As one ``$'…'`` word on one line of plain ASCII."""
    return b"$'" + b"".join(_ESCAPED[byte] for byte in command) + b"'"


_ESCAPED = [
    bytes([byte])
    if 32 <= byte < 127 and byte not in b"'\\"
    else b"\\x%02x" % byte
    if byte not in b"'\\"
    else b"\\%c" % byte
    for byte in range(256)
]


def _overlap(data: bytes, mark: bytes) -> int:
    """Length of the longest end of ``data`` that is a beginning of ``mark``."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:size]):
            return size
    return 0


def _plain_terminal(slave: int) -> list[object]:
    """No echo, and bytes come out as they were printed; lines and control keys stay."""
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST
    settings[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    return list(settings)
