"""Node server and client: who may talk, what happens to bad frames, late replies, dead servers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from helpers import private_client, run

from prorl_env.config import Paths, SandboxSpec
from prorl_env.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvClosed,
    NodeUnreachable,
    ProtocolError,
    SandboxDied,
    SetupError,
    UsageError,
)
from prorl_env.remote import messages as m
from prorl_env.remote.client import NodeClient
from prorl_env.remote.embedded import Nodes
from prorl_env.remote.server import NodeServer


@asynccontextmanager
async def served(paths: Paths, address: str | None = None) -> AsyncIterator[NodeServer]:
    async with NodeServer(paths, address=address) as server:
        serving = asyncio.ensure_future(server.serve())
        try:
            yield server
        finally:
            server.stop()
            await serving


@asynccontextmanager
async def raw_socket(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield socket


@asynccontextmanager
async def fake_server() -> AsyncIterator[tuple[zmq.asyncio.Socket, str]]:
    """A ROUTER socket that the test answers from by hand."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


async def greeted(server: zmq.asyncio.Socket, address: str) -> tuple[NodeClient, bytes]:
    """A client that has shaken hands with the fake server, and its identity there."""
    connecting = asyncio.ensure_future(NodeClient.connect(address))
    identity, frame = await server.recv_multipart()
    await server.send_multipart([identity, reply(m.decode_request(frame), m.Done())])
    return await connecting, identity


def reply(request: m.Request, body: m.Answer) -> bytes:
    return m.encode(m.Reply(v=m.PROTOCOL_VERSION, id=request.id, body=body))


def test_garbage_is_answered_counted_and_hurts_nobody(paths: Paths) -> None:
    rng = random.Random(1)

    async def work() -> None:
        async with served(paths) as server, raw_socket(server.address) as raw:
            client = await NodeClient.connect(server.address)
            for _ in range(500):
                await raw.send(rng.randbytes(rng.randint(0, 300)))
            await raw.send_multipart([b"a", b"b", b"c"])
            for _ in range(501):
                answer = m.decode_reply(await raw.recv())
                assert answer.id == 0
                assert isinstance(answer.body, m.Failure)
                assert answer.body.code == ProtocolError.code
            assert (await client.status()).bad_frames == 501
            await client.aclose()

    run(work())


def test_another_protocol_version_is_told_so(paths: Paths) -> None:
    async def work() -> None:
        async with served(paths) as server, raw_socket(server.address) as raw:
            await raw.send(m.encode(m.Request(v=7, id=5, body=m.Ping())))
            answer = m.decode_reply(await raw.recv())
            assert isinstance(answer.body, m.Failure)
            assert "version 1" in answer.body.message
            assert "7" in answer.body.message

    run(work())


def test_a_client_sees_only_its_own_sandboxes(paths: Paths, base_image: Path) -> None:
    async def work() -> None:
        async with served(paths) as server:
            first, second = await NodeClient.connect(server.address), await NodeClient.connect(server.address)
            sandbox = await first.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            with pytest.raises(SandboxDied, match="no sandbox"):
                await second.call(m.Exec(sandbox=sandbox.sandbox_id, argv=("true",)), m.ExecDone, timeout_s=5)
            await second.call(m.Stop(sandbox=sandbox.sandbox_id), m.Done, timeout_s=5)
            assert (await sandbox.exec(["true"])).exit_code == 0
            await first.aclose()
            await second.aclose()

    run(work())


def test_the_socket_is_for_its_owner_alone(paths: Paths) -> None:
    async def work() -> None:
        async with served(paths) as server:
            path = Path(server.address.removeprefix("ipc://"))
            assert path.stat().st_mode & 0o077 == 0
            assert path.parent.stat().st_mode & 0o077 == 0
        assert not path.parent.exists()

    run(work())


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:1", "http://x", "ipc://relative", "ipc:///" + "x" * 120],
)
def test_an_address_that_must_not_be_is_refused(address: str, paths: Paths) -> None:
    with pytest.raises(ConfigError):
        NodeServer(paths, address=address)


def test_tcp_on_loopback_takes_a_free_port_and_says_which(paths: Paths, base_image: Path) -> None:
    async def work() -> None:
        async with served(paths, "tcp://127.0.0.1:0") as server:
            assert int(server.address.rpartition(":")[2]) > 0
            nodes = Nodes()
            client = await nodes.client(server.address)
            sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            assert (await sandbox.run_bash("echo over tcp")).output == b"over tcp\n"
            await nodes.aclose()

    run(work())


def test_an_address_in_use_is_a_clear_error(paths: Paths) -> None:
    async def work() -> None:
        async with served(paths, "tcp://127.0.0.1:0") as server:
            with pytest.raises(ConfigError, match="cannot listen"):
                async with NodeServer(paths, address=server.address):
                    pass

    run(work())


def test_a_file_in_the_way_is_left_alone(paths: Paths, short_dir: Path) -> None:
    precious = short_dir / "precious"
    precious.write_text("x")

    async def work() -> None:
        with pytest.raises(ConfigError, match="not a socket"):
            async with NodeServer(paths, address=f"ipc://{precious}"):
                pass

    run(work())
    assert precious.read_text() == "x"


def test_a_living_servers_place_is_not_taken_and_a_dead_ones_is(paths: Paths, short_dir: Path) -> None:
    address = f"ipc://{short_dir}/node"

    async def work() -> None:
        async with served(paths, address):
            with pytest.raises(ConfigError, match="already listens"):
                async with NodeServer(paths, address=address):
                    pass
            await (await NodeClient.connect(address)).aclose()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(short_dir / "node"))
        async with served(paths, address):
            await (await NodeClient.connect(address)).aclose()

    run(work())


def test_a_run_folder_with_too_long_a_path_is_named(paths: Paths, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(SetupError, match="PRORL_ENV_RUN"):
            async with NodeServer(Paths(home=paths.home, run=tmp_path / ("x" * 120))):
                pass

    run(work())


def test_what_a_client_has_started_ends_with_its_connection_and_what_it_gave_up_as_well(
    paths: Paths, base_image: Path
) -> None:
    async def work() -> None:
        async with served(paths) as server:
            watcher, client = await NodeClient.connect(server.address), await NodeClient.connect(server.address)
            for delay in (0.0, 0.001, 0.005, 0.01, 0.02):
                start = asyncio.ensure_future(client.start_sandbox(SandboxSpec(), runtime="bubblewrap"))
                await asyncio.sleep(delay)
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
            while (await watcher.status()).started < 5 or (await watcher.status()).sandboxes > 0:
                await asyncio.sleep(0.02)
            await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            await client.aclose()
            while (await watcher.status()).sandboxes > 0:
                await asyncio.sleep(0.02)
            await watcher.aclose()

    run(work())


def test_nobody_at_the_address(paths: Paths) -> None:
    async def work() -> None:
        with pytest.raises(NodeUnreachable, match="no node server answers"):
            await NodeClient.connect("tcp://127.0.0.1:9", timeout_s=0.3)
        with pytest.raises(UsageError, match="not an address"):
            await NodeClient.connect("bogus://x", timeout_s=0.3)

    run(work())


def test_a_late_reply_is_dropped_and_never_taken_for_the_next() -> None:
    async def work() -> None:
        async with fake_server() as (server, address):
            client, identity = await greeted(server, address)
            with pytest.raises(DeadlineExceeded, match="ReadFile"):
                await client.call(m.ReadFile(sandbox="s", path="/first", max_bytes=9), m.FileData, timeout_s=0.1)
            first = m.decode_request((await server.recv_multipart())[1])
            second_call = asyncio.ensure_future(
                client.call(m.ReadFile(sandbox="s", path="/second", max_bytes=9), m.FileData, timeout_s=5)
            )
            second = m.decode_request((await server.recv_multipart())[1])
            await server.send_multipart([identity, reply(first, m.FileData(data=b"first"))])
            await server.send_multipart([identity, reply(second, m.FileData(data=b"second"))])
            await server.send_multipart([identity, reply(second, m.FileData(data=b"twice"))])
            assert (await second_call).data == b"second"
            await client.aclose()

    run(work())


def test_the_wrong_kind_of_answer_and_garbage_are_protocol_errors() -> None:
    async def work() -> None:
        async with fake_server() as (server, address):
            client, identity = await greeted(server, address)
            for answer in (m.encode(m.Reply(v=1, id=2, body=m.FileData(data=b""))), b"garbage"):
                call = asyncio.ensure_future(client.call(m.GetStatus(), m.Status, timeout_s=5))
                request = m.decode_request((await server.recv_multipart())[1])
                await server.send_multipart([identity, answer if answer == b"garbage" else reply(request, m.Done())])
                with pytest.raises(ProtocolError):
                    await call
            await client.aclose()

    run(work())


def test_closing_fails_what_is_in_flight_and_is_idempotent() -> None:
    async def work() -> None:
        async with fake_server() as (server, address):
            client, _ = await greeted(server, address)
            call = asyncio.ensure_future(client.call(m.GetStatus(), m.Status, timeout_s=50))
            await server.recv_multipart()
            await client.aclose()
            await client.aclose()
            with pytest.raises(EnvClosed):
                await call
            with pytest.raises(EnvClosed):
                await client.status()

    run(work())


def test_the_death_of_the_private_node_server_fails_calls_at_once_and_a_new_one_is_started(base_image: Path) -> None:
    async def work() -> None:
        nodes = Nodes()
        client = await nodes.client("auto")
        sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
        call = asyncio.ensure_future(sandbox.run_bash("sleep 60", timeout_s=50))
        os.kill((await client.status()).pid, signal.SIGKILL)
        with pytest.raises(NodeUnreachable, match="signal 9"):
            await asyncio.wait_for(call, 5)
        again = await nodes.client("auto")
        assert again is not client
        assert (await again.status()).sandboxes == 0
        await sandbox.stop()
        await nodes.aclose()

    run(work())


def test_stop_is_idempotent_on_the_wire_too(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            await asyncio.gather(sandbox.stop(), sandbox.stop())
            await client.call(m.Stop(sandbox="never-was"), m.Done, timeout_s=5)

    run(work())
