"""The client's side of the wire: calls to one node server, and a sandbox there as an object."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import zmq
import zmq.asyncio

from prorl_env.config import SandboxSpec
from prorl_env.errors import (
    DeadlineExceeded,
    EnvClosed,
    NodeUnreachable,
    ProrlError,
    ProtocolError,
    UsageError,
    from_wire,
)
from prorl_env.remote import messages as m
from prorl_env.remote.processes import start_time
from prorl_env.remote.sandbox import BashResult, CellResult, ExecResult

__all__ = ["NodeClient", "RemoteSandbox"]

A = TypeVar("A", m.Done, m.Started, m.FileData, m.ExecDone, m.BashDone, m.CellDone, m.Status)

_SLACK_S = 15.0
"""How much longer than the thing itself a call may take before the node server counts as not answering."""
_PING_EVERY_S = 2.0
_SILENCE_S = 10.0


class NodeClient:
    """A connection to one node server, for use on one event loop. Create with ``connect``.

    Any number of calls may be in flight. Each is sent once and never again; its reply is matched by id; one that
    comes after its deadline is dropped.
    """

    def __init__(self, address: str, *, gone: asyncio.Future[str] | None = None) -> None:
        self.address = address
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[m.Answer]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME_BYTES)
        self._lost: str | None = None
        self._closed = False
        self._heard = asyncio.get_running_loop().time()
        self._tasks: list[asyncio.Task[None]] = []
        if gone is not None:
            gone.add_done_callback(self._server_ended)

    @classmethod
    async def connect(
        cls, address: str, *, timeout_s: float = 5.0, gone: asyncio.Future[str] | None = None
    ) -> NodeClient:
        """Connect and shake hands.

        Args:
            address: ``ipc://…`` or ``tcp://…``.
            timeout_s: How long to wait for the node server's first answer.
            gone: Done, with the reason, when the caller knows that the server has ended.

        Raises:
            UsageError: If it is not an address.
            NodeUnreachable: If nobody answers there, or there is no socket that this user may use.
        """
        _check_socket(address)
        client = cls(address, gone=gone)
        try:
            client._socket.connect(address)
        except zmq.ZMQError as error:
            client._context.destroy(linger=0)
            raise UsageError(f"{address!r} is not an address of a node server: {error}") from None
        client._tasks = [asyncio.ensure_future(client._receive()), asyncio.ensure_future(client._beat())]
        pid = os.getpid()
        try:
            await client.call(m.Hello(pid=pid, pid_start=start_time(pid)), m.Done, timeout_s=timeout_s)
        except DeadlineExceeded:
            await client.aclose()
            raise NodeUnreachable(f"no node server answers at {address}; start one with `prorl-env node`") from None
        except BaseException:
            await client.aclose()
            raise
        return client

    @property
    def lost(self) -> bool:
        """Whether the node server is known to be gone, or this client is closed."""
        return self._closed or self._lost is not None

    async def call(self, body: m.Body, answer: type[A], *, timeout_s: float) -> A:
        """Send one request and wait for its answer.

        Raises:
            DeadlineExceeded: If no answer came within ``timeout_s``; whether the call had its effect is not known.
            NodeUnreachable: If the node server is gone.
            EnvClosed: If this client is closed.
            ProrlError: What the node server answered.
        """
        if self._closed:
            raise EnvClosed(f"the connection to {self.address} is closed")
        if self._lost is not None:
            raise NodeUnreachable(self._lost)
        request_id = next(self._ids)
        future: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        frame = m.encode(m.Request(v=m.PROTOCOL_VERSION, id=request_id, body=body))
        self._pending[request_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send(frame)
                reply = await future
        except TimeoutError:
            what = type(body).__name__
            raise DeadlineExceeded(f"no answer to {what} from {self.address} within {timeout_s:g} s") from None
        finally:
            self._pending.pop(request_id, None)
        if isinstance(reply, m.Failure):
            raise from_wire(reply.code, reply.message, reply.fields)
        if not isinstance(reply, answer):
            raise ProtocolError(f"{self.address} answered {type(body).__name__} with {type(reply).__name__}")
        return reply

    async def start_sandbox(self, spec: SandboxSpec, *, runtime: str = "auto") -> RemoteSandbox:
        """Start a sandbox and wait until it is ready.

        Raises:
            UnknownRuntime, RuntimeUnavailable, ImageNotFound: If the node has no such thing.
            SandboxStartFailed: If it does not come up.
            DeadlineExceeded, NodeUnreachable: If the node server does not answer.
        """
        started = await self.call(
            m.Start(runtime=runtime, spec=spec), m.Started, timeout_s=spec.start_timeout_s + _SLACK_S
        )
        return RemoteSandbox(self, started, spec)

    async def status(self, *, timeout_s: float = 5.0) -> m.Status:
        """What the node server is up to.

        Raises:
            DeadlineExceeded, NodeUnreachable: If it does not answer.
        """
        return await self.call(m.GetStatus(), m.Status, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close the connection: calls in flight raise ``EnvClosed``, the sandboxes are stopped. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(zmq.ZMQError, TimeoutError):
            async with asyncio.timeout(0.2):
                await self._post(m.Bye())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(lambda: EnvClosed(f"the connection to {self.address} was closed"))
        self._context.destroy(linger=200)

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._socket.recv()
            self._heard = loop.time()
            try:
                reply = m.decode_reply(frame)
            except ProtocolError as error:
                self._fail(m.id_of(frame), partial(ProtocolError, error.message))
                continue
            if reply.id == 0 and isinstance(reply.body, m.Failure):
                # The server could not read a frame of ours, so it cannot say which: none of them may wait for ever.
                self._fail_all(partial(from_wire, reply.body.code, reply.body.message, reply.body.fields))
                continue
            future = self._pending.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply.body)
            elif isinstance(reply.body, m.Started):
                # Whoever asked for it has given up; nobody else knows of it.
                await self._post(m.Stop(sandbox=reply.body.sandbox))

    async def _beat(self) -> None:
        """Let the server hear of us, and notice when it is not heard of any more."""
        loop = asyncio.get_running_loop()
        ping = m.encode(m.Request(v=m.PROTOCOL_VERSION, id=0, body=m.Ping()))
        while True:
            slept_from = loop.time()
            await asyncio.sleep(_PING_EVERY_S)
            if loop.time() - slept_from > _SILENCE_S:
                self._heard = loop.time()  # This process was stopped meanwhile, not the server.
            await self._socket.send(ping)
            if loop.time() - self._heard > _SILENCE_S:
                self._lose(f"the node server at {self.address} has not been heard of for {_SILENCE_S:g} s")
                return

    async def _post(self, body: m.Body) -> None:
        """Send a request whose answer nobody waits for."""
        await self._socket.send(m.encode(m.Request(v=m.PROTOCOL_VERSION, id=next(self._ids), body=body)))

    def _fail(self, request_id: int | None, make: Callable[[], ProrlError]) -> None:
        future = self._pending.get(request_id) if request_id is not None else None
        if future is None:
            self._fail_all(make)
        elif not future.done():
            future.set_exception(make())

    def _server_ended(self, gone: asyncio.Future[str]) -> None:
        if not gone.cancelled():
            self._lose(gone.result())

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            self._fail_all(lambda: NodeUnreachable(why))

    def _fail_all(self, make: Callable[[], ProrlError]) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(make())
        self._pending.clear()


class RemoteSandbox:
    """A sandbox on a node server; keeps the contract of ``remote.sandbox.Sandbox``."""

    def __init__(self, client: NodeClient, started: m.Started, spec: SandboxSpec) -> None:
        self._client = client
        self.sandbox_id = started.sandbox
        self.spec = spec
        self.runtime = started.runtime
        self.image = started.image

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
        body = m.Exec(
            sandbox=self.sandbox_id, argv=tuple(argv), stdin=stdin, env=dict(env or {}), cwd=cwd, timeout_s=timeout_s
        )
        return (await self._client.call(body, m.ExecDone, timeout_s=timeout_s + _SLACK_S)).result

    async def run_bash(self, command: str, *, session: str = "main", timeout_s: float = 30.0) -> BashResult:
        """See ``Sandbox``."""
        data = command.encode("utf-8", "surrogateescape" if _escaped(command) else "surrogatepass")
        body = m.RunBash(sandbox=self.sandbox_id, command=data, session=session, timeout_s=timeout_s)
        return (await self._client.call(body, m.BashDone, timeout_s=timeout_s + _SLACK_S)).result

    async def run_cell(self, code: str, *, session: str = "main", timeout_s: float = 30.0) -> CellResult:
        """See ``Sandbox``."""
        data = code.encode("utf-8", "surrogatepass")
        body = m.RunCell(sandbox=self.sandbox_id, code=data, session=session, timeout_s=timeout_s)
        return (await self._client.call(body, m.CellDone, timeout_s=timeout_s + 60.0 + _SLACK_S)).result

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """See ``Sandbox``."""
        body = m.ReadFile(sandbox=self.sandbox_id, path=path, max_bytes=max_bytes)
        return (await self._client.call(body, m.FileData, timeout_s=30.0 + _SLACK_S)).data

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See ``Sandbox``."""
        body = m.WriteFile(sandbox=self.sandbox_id, path=path, data=data, mode=mode)
        await self._client.call(body, m.Done, timeout_s=30.0 + _SLACK_S)

    async def stop(self) -> None:
        """See ``Sandbox``."""
        with contextlib.suppress(
            EnvClosed, NodeUnreachable
        ):  # Then the node server has stopped it, or is gone with it.
            await self._client.call(m.Stop(sandbox=self.sandbox_id), m.Done, timeout_s=_SLACK_S)


def _check_socket(address: str) -> None:
    """ZeroMQ waits for a socket to appear; whoever gives a wrong path wants to know at once."""
    if not address.startswith("ipc://"):
        return
    path = address.removeprefix("ipc://")
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError as error:
        raise NodeUnreachable(f"no node server listens at {address}: {error.strerror}") from None
    if not is_socket:
        raise NodeUnreachable(f"no node server listens at {address}: it is not a socket")
    if not os.access(path, os.W_OK):
        raise NodeUnreachable(f"the node server at {address} belongs to another user")


def _escaped(text: str) -> bool:
    """Whether all lone surrogates in it stand for undecodable bytes, as in Python's file names."""
    return not any("\ud800" <= char <= "\udfff" and not "\udc80" <= char <= "\udcff" for char in text)
