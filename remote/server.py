"""The node server: one asyncio process that owns every sandbox of a machine.

A ROUTER socket takes requests; each becomes a task of its own, so that a slow one holds nobody up, and its reply goes
back under the id that it came with. A frame that makes no sense is counted and, where it has an id, answered; it never
ends the server. A client that dies, or is silent for too long, loses its sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import stat
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from prorl_env._version import __version__
from prorl_env.config import Paths
from prorl_env.errors import ConfigError, ProrlError, ProtocolError, SandboxDied, to_wire
from prorl_env.remote import messages as m
from prorl_env.remote.images import ImageStore
from prorl_env.remote.janitor import MAX_SOCKET_PATH_BYTES, claim_run_dir, sweep
from prorl_env.remote.local import LocalSandbox
from prorl_env.remote.processes import start_time
from prorl_env.remote.runtimes import choose
from prorl_env.remote.spawn import Spawner
from prorl_env.remote.spawner import remove_tree
from prorl_env.remote.waiting import first_of

__all__ = ["NodeServer"]

SILENCE_S = 30.0
"""A client elsewhere of which nothing has been heard for so long is taken for dead."""
LOCAL_SILENCE_S = 300.0
"""The same for one whose process is known to live: it may be stopped, or busy."""


@dataclass(slots=True, eq=False)
class _Client:
    """What belongs to one client."""

    identity: bytes
    heard: float
    sandboxes: dict[str, LocalSandbox] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    pidfd: int = -1


class NodeServer:
    """Serves sandboxes at one address. ``async with NodeServer(…) as server: await server.serve()``.

    Args:
        paths: Where images are and where run-time files go.
        address: ``ipc://PATH``, ``tcp://127.0.0.1:PORT`` (0: any free one), or ``None`` for a socket in the run
            directory.
        on_bound: Called with the real address once it is bound.

    Raises:
        ConfigError: If the address is not one of these. TCP beyond loopback needs keys, which this version does not
            have.
    """

    def __init__(
        self, paths: Paths, *, address: str | None = None, on_bound: Callable[[str], None] | None = None
    ) -> None:
        _check_address(address)
        self._paths = paths
        self._wanted = address
        self._on_bound = on_bound
        self._images = ImageStore(paths.home)
        self._clients: dict[bytes, _Client] = {}
        self._ids = itertools.count(1)
        self._started = 0
        self._bad_frames = 0
        self._stop = asyncio.Event()
        self.address = ""
        self._inode = -1
        self._dropping: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> NodeServer:
        sweep(self._paths.run)
        self._run_dir = claim_run_dir(self._paths.run)
        self._spawner = Spawner.start(self._run_dir)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        address = self._wanted or f"ipc://{self._run_dir}/node"
        try:
            if address.startswith("ipc://"):
                _clear_the_way(address.removeprefix("ipc://"))
            self._socket.bind(address)
        except (zmq.ZMQError, ConfigError) as error:
            self._context.destroy(linger=0)
            await asyncio.to_thread(self._spawner.close)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot listen at {address}: {error.strerror}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.address.startswith("ipc://"):
            path = self.address.removeprefix("ipc://")
            os.chmod(path, 0o600)
            self._inode = os.lstat(path).st_ino
        if self._on_bound is not None:
            self._on_bound(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self._drop(client) for client in list(self._clients.values())), return_exceptions=True)
        self._context.destroy(linger=200)
        if self.address.startswith("ipc://"):
            path = self.address.removeprefix("ipc://")
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_ino == self._inode:  # Another server may have taken the place.
                    os.unlink(path)
        await asyncio.to_thread(self._spawner.close)
        remove_tree(str(self._run_dir))

    def stop(self) -> None:
        """Make ``serve`` return."""
        self._stop.set()

    async def serve(self) -> None:
        """Answer requests until ``stop``."""
        watching = asyncio.ensure_future(self._watch_silence())
        receiving = asyncio.ensure_future(self._receive())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await first_of(receiving, stopping, watching)
            for running in (receiving, watching):
                if running.done():
                    running.result()
        finally:
            receiving.cancel()
            watching.cancel()
            stopping.cancel()
            await asyncio.gather(watching, receiving, stopping, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a message of {len(frames)} frames instead of one")
                request = m.decode_request(frames[0])
            except ProtocolError as error:
                self._bad_frames += 1
                await self._reply(identity, 0, _failure(error))
                continue
            client = self._clients.get(identity)
            if client is None:
                client = self._clients[identity] = _Client(identity, asyncio.get_running_loop().time())
            client.heard = asyncio.get_running_loop().time()
            task = asyncio.ensure_future(self._answer(client, request))
            client.tasks.add(task)
            task.add_done_callback(client.tasks.discard)

    async def _answer(self, client: _Client, request: m.Request) -> None:
        try:
            body = await self._handle(client, request.body)
        except ProrlError as error:
            body = _failure(error)
        except Exception as error:
            body = _failure(error)
        await self._reply(client.identity, request.id, body)

    async def _reply(self, identity: bytes, request_id: int, body: m.Answer) -> None:
        try:
            frame = m.encode(m.Reply(v=m.PROTOCOL_VERSION, id=request_id, body=body))
            if isinstance(body, m.CellDone):
                m.decode_reply(frame)  # Made of what a kernel sent: the client must be able to read it.
        except Exception as error:
            frame = m.encode(m.Reply(v=m.PROTOCOL_VERSION, id=request_id, body=_failure(error)))
        with contextlib.suppress(zmq.ZMQError):  # The client is gone.
            await self._socket.send_multipart([identity, frame])

    async def _handle(self, client: _Client, body: m.Body) -> m.Answer:
        match body:
            case m.Exec():
                box = _find(client, body.sandbox)
                return m.ExecDone(
                    result=await box.exec(
                        body.argv, stdin=body.stdin, env=body.env, cwd=body.cwd, timeout_s=body.timeout_s
                    )
                )
            case m.RunBash():
                box = _find(client, body.sandbox)
                return m.BashDone(
                    result=await box.run_bash(body.command, session=body.session, timeout_s=body.timeout_s)
                )
            case m.RunCell():
                code = body.code.decode("utf-8", "surrogatepass")
                box = _find(client, body.sandbox)
                return m.CellDone(result=await box.run_cell(code, session=body.session, timeout_s=body.timeout_s))
            case m.ReadFile():
                return m.FileData(data=await _find(client, body.sandbox).read_file(body.path, max_bytes=body.max_bytes))
            case m.WriteFile():
                await _find(client, body.sandbox).write_file(body.path, body.data, mode=body.mode)
                return m.Done()
            case m.Start():
                return await self._start(client, body)
            case m.Stop():
                if (found := client.sandboxes.get(body.sandbox)) is not None:
                    await found.stop()
                    client.sandboxes.pop(body.sandbox, None)
                return m.Done()
            case m.Hello():
                self._watch_process(client, body)
                return m.Done()
            case m.Ping():
                return m.Done()
            case m.Bye():
                self._drop_later(client)
                return m.Done()
            case m.GetStatus():
                return self._status()

    async def _start(self, client: _Client, body: m.Start) -> m.Started:
        runtime, image = choose(body.runtime, body.spec.image, self._images.names())
        rootfs = self._images.resolve(image)
        sandbox_id = f"s{next(self._ids)}-{secrets.token_hex(3)}"
        box = await LocalSandbox.start(
            sandbox_id,
            body.spec,
            runtime=runtime,
            image=image,
            rootfs=rootfs,
            scratch=self._run_dir / sandbox_id,
            spawner=self._spawner,
        )
        if self._clients.get(client.identity) is not client:  # It was dropped meanwhile.
            await box.stop()
            raise SandboxDied("the client is gone")
        client.sandboxes[sandbox_id] = box
        self._started += 1
        return m.Started(sandbox=sandbox_id, runtime=runtime.name, image=image)

    def _status(self) -> m.Status:
        return m.Status(
            pid=os.getpid(),
            version=__version__,
            sandboxes=sum(len(client.sandboxes) for client in self._clients.values()),
            clients=len(self._clients),
            started=self._started,
            bad_frames=self._bad_frames,
        )

    # ------------------------------------------------------------------ clients that go away

    def _watch_process(self, client: _Client, hello: m.Hello) -> None:
        """Notice the death of a client on this machine at once, by its pid; others have to be heard of."""
        if hello.pid is None or not self.address.startswith("ipc://") or client.pidfd != -1:
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except OSError:
            return  # Another pid namespace, or gone already: silence will tell.
        if start_time(hello.pid) != hello.pid_start:
            os.close(pidfd)
            return
        client.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._process_died, client)

    def _process_died(self, client: _Client) -> None:
        asyncio.get_running_loop().remove_reader(client.pidfd)
        self._drop_later(client)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_S / 10)
            now = asyncio.get_running_loop().time()
            for client in list(self._clients.values()):
                if now - client.heard > (SILENCE_S if client.pidfd == -1 else LOCAL_SILENCE_S):
                    self._drop_later(client)

    def _drop_later(self, client: _Client) -> None:
        if self._clients.get(client.identity) is client:
            task = asyncio.ensure_future(self._drop(client))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, client: _Client) -> None:
        """Forget a client and everything of it."""
        self._clients.pop(client.identity, None)
        if client.pidfd != -1:
            asyncio.get_running_loop().remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1
        tasks = list(client.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(box.stop() for box in client.sandboxes.values()), return_exceptions=True)


def _find(client: _Client, sandbox_id: str) -> LocalSandbox:
    """A client sees only its own."""
    box = client.sandboxes.get(sandbox_id)
    if box is None:
        raise SandboxDied(
            f"there is no sandbox {sandbox_id} of this client; it was stopped, or its node server restarted"
        )
    return box


def _failure(error: BaseException) -> m.Failure:
    code, message, fields = to_wire(error, traceback="".join(traceback.format_exception(error)))
    return m.Failure(code=code, message=message, fields=fields)


def _clear_the_way(path: str) -> None:
    """Remove a dead server's socket, and nothing else: ZeroMQ would remove whatever is there."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error.strerror}") from None
    if not is_socket:
        raise ConfigError(f"{path} exists and is not a socket; choose another address")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error.strerror}") from None
        else:
            raise ConfigError(f"a server already listens at {path}; stop it, or choose another address")


def _check_address(address: str | None) -> None:
    if address is None or address.startswith("ipc:///"):
        if address is not None and len(address.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"the socket path {address!r} is longer than the 107 bytes that the system allows")
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit():
        raise ConfigError(f"an address is ipc:///PATH or tcp://HOST:PORT, not {address!r}")
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        raise ConfigError(
            f"{address}: plain TCP is for loopback only; anybody who reaches the port could run commands here"
        )
