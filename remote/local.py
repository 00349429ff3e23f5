"""A sandbox as its node server holds it: the processes, the scratch folder and the sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prorl_env.config import Limits, SandboxSpec
from prorl_env.errors import InfraError, SandboxDied, SandboxStartFailed, UsageError
from prorl_env.remote.bash import BashSession
from prorl_env.remote.hostroot import HOST, HOST_PATH
from prorl_env.remote.pipes import Drain, Feed
from prorl_env.remote.processes import descendants, describe, innermost, kill_tree
from prorl_env.remote.runtimes import IO_DIR, Runtime
from prorl_env.remote.sandbox import BashResult, CellResult, ExecResult
from prorl_env.remote.spawn import DEFAULT_PATH, Child, Spawner
from prorl_env.remote.spawner import remove_tree
from prorl_env.remote.waiting import first_of

__all__ = ["LocalSandbox"]

T = TypeVar("T")

# The first process inside: makes the folders, says so, and then lives as long as the server holds its standard input
# open. Before that it execs itself with an empty environment, which else would tell of the host (APPTAINER_… in
# /proc/1/environ).
_ANCHOR = (
    'mkdir -p -- "$1" "$2" "$3" /tmp && { [ -k /tmp ] || chmod 1777 /tmp; } && chmod 1777 /dev/shm '
    '&& chmod 700 "$3" && echo ready '
    '&& exec >/dev/null 2>&1 && trap "" HUP INT TERM QUIT && while IFS= read -r _; do :; done'
)
_CLEAR = 'PATH=/usr/sbin:/usr/bin:/sbin:/bin; export PATH; exec -c /bin/bash -c "PATH=$PATH; $0" anchor "$@"'
_HOME = "/root"
_STOP_S = 10.0
_READ = (
    'if [ -d "$1" ]; then echo "it is a folder" >&2; exit 1; fi; '
    'n=$(wc -c < "$1") || exit 1; if [ "$n" -gt "$2" ]; then echo "it has $n bytes" >&2; exit 1; fi; exec cat < "$1"'
)
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod -- "$2" "$1"'


class LocalSandbox:
    """Keeps the contract of ``remote.sandbox.Sandbox``. Create with ``start``."""

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        runtime: Runtime,
        image: str,
        rootfs: Path,
        scratch: Path,
        spawner: Spawner,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.spec = spec
        self.runtime = runtime.name
        self.image = image
        self._launcher = runtime
        self._rootfs = rootfs
        self._scratch = scratch
        self._spawner = spawner
        self._outer: Child | None = None
        self._init_pid = -1
        self._init_pidfd = -1
        self._io_fd = -1
        self._keep_alive = -1
        self._shells: dict[str, BashSession] = {}
        self._kernels: dict[str, Any] = {}
        self._stopping: asyncio.Task[None] | None = None
        path = [HOST_PATH] if image == HOST else []
        self._path = (*path, *DEFAULT_PATH)
        self._env = {"PATH": ":".join(self._path), "HOME": _HOME, "LANG": "C.UTF-8", "USER": "root", **spec.env}

    @classmethod
    async def start(
        cls,
        sandbox_id: str,
        spec: SandboxSpec,
        *,
        runtime: Runtime,
        image: str,
        rootfs: Path,
        scratch: Path,
        spawner: Spawner,
    ) -> LocalSandbox:
        """Start one and wait until it is ready. Nothing is left behind if that fails or is cancelled.

        Raises:
            SandboxStartFailed: If it does not come up within ``spec.start_timeout_s``.
        """
        sandbox = cls(sandbox_id, spec, runtime, image, rootfs, scratch, spawner)
        try:
            await sandbox._come_up()
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30.0,
    ) -> ExecResult:
        """See ``Sandbox``."""
        if not argv:
            raise UsageError("exec needs at least a program's name")
        return await self._guard(self._exec(argv, stdin, env or {}, cwd, timeout_s, self.spec.limits.output_bytes))

    async def run_bash(self, command: str | bytes, *, session: str = "main", timeout_s: float = 30.0) -> BashResult:
        """See ``Sandbox``."""
        shell = self._shells.get(session)
        if shell is None:
            shell = self._shells[session] = BashSession(
                self._spawn_inside, env=self._env, cwd=self.spec.workdir, output_bytes=self.spec.limits.output_bytes
            )
        data = command if isinstance(command, bytes) else command.encode("utf-8", "surrogateescape")
        return await self._guard(shell.run(data, timeout_s=timeout_s))

    async def run_cell(self, code: str, *, session: str = "main", timeout_s: float = 30.0) -> CellResult:
        """See ``Sandbox``."""
        kernel = self._kernels.get(session)
        if kernel is None:
            from prorl_env.remote.kernel import KernelSession

            kernel = self._kernels[session] = KernelSession(
                self._spawn_inside,
                env=self._env,
                cwd=self.spec.workdir,
                write_file=self._write,
                private=self._scratch,
                outside=self._io_fd,
                inside=IO_DIR,
                output_chars=self.spec.limits.output_bytes,
            )
        result: CellResult = await self._guard(kernel.run(code, timeout_s=timeout_s))
        return result

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """See ``Sandbox``."""
        argv = ["bash", "-c", _READ, "read", path, str(max_bytes)]
        done = await self._guard(self._exec(argv, b"", {}, self.spec.workdir, 30.0, max_bytes * 2 + 65536))
        if done.exit_code != 0:
            raise UsageError(f"cannot read {path} in the sandbox: {_last_line(done)}")
        return done.stdout

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See ``Sandbox``."""
        await self._guard(self._write(path, data, mode))

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        argv = ["bash", "-c", _WRITE, "write", path, f"{stat.S_IMODE(mode):o}"]
        done = await self._exec(argv, data, {}, self.spec.workdir, 30.0, 65536)
        if done.exit_code != 0:
            raise UsageError(f"cannot write {path} in the sandbox: {_last_line(done)}")

    async def stop(self) -> None:
        """See ``Sandbox``."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    @property
    def alive(self) -> bool:
        """Whether it is running, as far as is known."""
        return self._stopping is None and self._outer is not None and self._outer.alive

    # ------------------------------------------------------------------ start and end

    async def _come_up(self) -> None:
        self._scratch.mkdir(mode=0o700)
        anchor = ("/bin/bash", "-c", _CLEAR, _ANCHOR, self.spec.workdir, _HOME, IO_DIR)
        launch = self._launcher.launch(
            image=self.image, rootfs=self._rootfs, scratch=self._scratch, spec=self.spec, anchor=anchor
        )
        stdin_out, self._keep_alive = os.pipe()
        ready_out, ready_in = os.pipe()
        log = os.open(self._scratch / "runtime.log", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._outer = await self._spawner.spawn(
                launch.argv,
                env=launch.env,
                fds={0: stdin_out, 1: ready_in, 2: log},
                stage=launch.stage,
                cwd=str(self._scratch),
            )
            os.close(ready_in)
            ready_in = -1
            said = await self._until_ready(ready_out, self._outer)
            if said != b"ready\n":
                raise SandboxStartFailed(self._why(said), output=self._log_text())
            init = innermost(self._outer.pid)
            if init is None:
                raise SandboxStartFailed(f"{self.runtime}: the sandbox has no process namespace of its own")
            self._init_pid, self._init_pidfd = init, os.pidfd_open(init)
            # Through the root of the sandbox's first process, before anything of the agent's has run.
            self._io_fd = os.open(
                f"/proc/{init}/root{IO_DIR}", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        finally:
            for fd in (stdin_out, ready_in, ready_out, log):
                if fd != -1:
                    os.close(fd)

    async def _until_ready(self, ready_fd: int, outer: Child) -> bytes:
        os.set_blocking(ready_fd, False)
        await _until_readable(ready_fd, outer.exit_code, timeout_s=self.spec.start_timeout_s)
        try:
            return os.read(ready_fd, 64)
        except BlockingIOError:
            return b"" if not outer.alive else b"silent"

    def _why(self, said: bytes) -> str:
        if said == b"silent":
            return f"{self.runtime}: the sandbox was not ready after {self.spec.start_timeout_s:g} s"
        lines = [line for line in self._log_text().splitlines() if line.strip()]
        return f"{self.runtime}: the sandbox did not start: {lines[-1].strip() if lines else 'it said nothing'}"

    def _log_text(self) -> str:
        with contextlib.suppress(OSError):
            return (self._scratch / "runtime.log").read_text("utf-8", "replace")[-4000:]
        return ""

    async def _stop(self) -> None:
        for session in (*self._shells.values(), *self._kernels.values()):
            session.close()
        if self._keep_alive != -1:
            os.close(self._keep_alive)
            self._keep_alive = -1
        left: list[str] = []
        if self._outer is not None:
            if self._init_pidfd != -1:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            self._outer.kill()
            if not await first_of(self._outer.exit_code, timeout_s=_STOP_S):
                left.append(describe(self._outer.pid))
        if self._init_pidfd != -1:
            # Readable once the first process inside is gone, and the kernel lets that happen only after all the others.
            if not await _until_readable(self._init_pidfd, timeout_s=_STOP_S):
                left += [describe(pid) for pid in (self._init_pid, *descendants(self._init_pid))]
            os.close(self._init_pidfd)
            self._init_pidfd = -1
        if self._io_fd != -1:
            os.close(self._io_fd)
            self._io_fd = -1
        await asyncio.to_thread(remove_tree, str(self._scratch))
        if self._scratch.exists():
            left.append(str(self._scratch))
        if left:
            raise InfraError(f"sandbox {self.sandbox_id} left behind: {', '.join(left)}")

    # ------------------------------------------------------------------ running things

    async def _spawn_inside(
        self, argv: Sequence[str], *, env: Mapping[str, str], fds: Mapping[int, int], terminal: int | None, cwd: str
    ) -> Child:
        return await self._spawner.spawn(
            argv,
            env=env,
            fds=fds,
            join=self._init_pid,
            terminal=terminal,
            cwd=cwd,
            limits=_rlimits(self.spec.limits),
            path=self._path,
        )

    async def _guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one call, and turn the sandbox's death during it into ``SandboxDied``."""
        if self._outer is None or not self.alive:
            work.close()
            raise SandboxDied(self._epitaph())
        task = asyncio.ensure_future(work)
        death = self._outer.exit_code
        try:
            await first_of(task, death)
            if task.done() and isinstance(task.exception(), InfraError):
                # A session that cannot be put back often is the first sign of the sandbox's death.
                await first_of(death, timeout_s=0.5)
            if death.done() or self._stopping is not None:
                raise SandboxDied(self._epitaph())
            return await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    def _epitaph(self) -> str:
        if self._stopping is not None:
            return f"sandbox {self.sandbox_id} has been stopped"
        status = self._outer.exit_code.result() if self._outer is not None else 0
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return f"sandbox {self.sandbox_id} ({self.runtime}) died with {how}"

    async def _exec(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: str | None, timeout_s: float, keep: int
    ) -> ExecResult:
        began = time.monotonic()
        pipes = [os.pipe() for _ in range(3)]
        (in_out, in_in), (out_out, out_in), (err_out, err_in) = pipes
        try:
            child = await self._spawn_inside(
                argv,
                env={**self._env, **env},
                fds={0: in_out, 1: out_in, 2: err_in},
                terminal=None,
                cwd=cwd or self.spec.workdir,
            )
        except SandboxStartFailed as error:
            for pair in pipes:
                _close(*pair)
            if not self.alive:
                raise
            return ExecResult(exit_code=127, stderr=f"{error.message}\n".encode(), seconds=time.monotonic() - began)
        except BaseException:
            for pair in pipes:
                _close(*pair)
            raise
        _close(in_out, out_in, err_in)
        out, err = Drain(out_out, keep), Drain(err_out, keep)
        feed = Feed(in_in, stdin)
        timed_out = False
        try:
            timed_out = not await first_of(child.exit_code, timeout_s=timeout_s)
            if timed_out:
                kill_tree(child.pid, root=True)
                await first_of(child.exit_code, timeout_s=5.0)
        finally:
            if child.alive:
                child.kill()
            feed.close()
            (stdout, stdout_omitted), (stderr, stderr_omitted) = out.close(), err.close()
        return ExecResult(
            exit_code=child.exit_code.result() if child.exit_code.done() else -signal.SIGKILL,
            stdout=stdout,
            stderr=stderr,
            stdout_omitted_bytes=stdout_omitted,
            stderr_omitted_bytes=stderr_omitted,
            timed_out=timed_out,
            seconds=time.monotonic() - began,
        )


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "NPROC": limits.processes,
        "FSIZE": limits.file_size_bytes,
        "DATA": limits.memory_bytes,
        "NOFILE": limits.open_files,
        "CORE": 0,
    }


async def _until_readable(fd: int, *others: asyncio.Future[Any], timeout_s: float) -> bool:
    """Wait until there is something to read (or one of ``others`` is done); False at the timeout."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, readable)
    try:
        return await first_of(readable, *others, timeout_s=timeout_s)
    finally:
        loop.remove_reader(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _last_line(done: ExecResult) -> str:
    if done.timed_out:
        return "it took too long"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.exit_code}"
