"""``prorl-env bench step``: what the way through client, node server and sandbox costs, beside doing without it."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio

from prorl_env.benchmarks.measure import Measurement, p50_ms, sample_async, sample_sync
from prorl_env.config import SandboxSpec
from prorl_env.envs.mathematics import MathEnv
from prorl_env.remote import messages as m
from prorl_env.remote.embedded import Nodes

__all__ = ["run"]

_CALLS = 1000
_STEPS = 300
_BASH_STEP = '<tool_call>\n{"name": "execute_bash", "arguments": {"command": ":"}}\n</tool_call>'
# Reads a line, runs it, says its exit code: the least that a persistent shell over pipes can do.
_RAW_SHELL = 'while IFS= read -r line; do eval "$line"; echo $?; done'


def run(*, runtime: str, image: str) -> Iterator[Measurement]:
    """Measure; about ten seconds.

    Raises:
        SetupError, UsageError: If the runtime or the image is not there.
    """
    echo = p50_ms(_raw_echo())
    shell = p50_ms(_raw_shell())
    rpc, colon, name = asyncio.run(_through_node(runtime, image))
    where = f"{name}, {_CALLS} calls"
    yield Measurement(
        metric="step.rpc_p50_ms",
        value=p50_ms(rpc),
        unit="ms",
        floor=echo,
        note=f"empty request through client and node server, ipc, {_CALLS} calls; floor: raw ZeroMQ echo of 100 bytes",
    )
    yield Measurement(
        metric="step.bash_colon_p50_ms",
        value=p50_ms(colon),
        unit="ms",
        floor=shell,
        note=f"`:` in a persistent bash through client and node server, {where}; floor: raw bash over pipes",
    )
    yield Measurement(
        metric="step.env_step_p50_ms",
        value=p50_ms(_env_step(runtime, image)),
        unit="ms",
        floor=shell,
        note=f"env.step() with one bash call of `:`, {name}, {_STEPS} steps; floor: raw bash over pipes on the host",
    )


async def _through_node(runtime: str, image: str) -> tuple[list[float], list[float], str]:
    nodes = Nodes()
    try:
        client = await nodes.client(runtime)
        rpc = await sample_async(lambda: client.call(m.Ping(), m.Done, timeout_s=5), count=_CALLS)
        name = "auto" if "://" in runtime else runtime
        sandbox = await client.start_sandbox(SandboxSpec(image=image), runtime=name)
        colon = await sample_async(lambda: sandbox.run_bash(":"), count=_CALLS)
        await sandbox.stop()
        return rpc, colon, sandbox.runtime
    finally:
        await nodes.aclose()


def _env_step(runtime: str, image: str) -> list[float]:
    env = MathEnv(runtime=runtime, image=image, max_turns=_STEPS * 2)
    try:
        env.reset(seed=0)
        return sample_sync(lambda: env.step(_BASH_STEP), count=_STEPS)
    finally:
        env.close()


def _raw_echo() -> list[float]:
    with TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'echo'}"
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve_echo, args=(address, theirs), daemon=True)
        process.start()
        try:
            if not ours.poll(30):
                raise RuntimeError("the echo process did not start")
            return asyncio.run(_ask_echo(address))
        finally:
            process.kill()
            process.join(5)


def _serve_echo(address: str, ready: Connection) -> None:
    async def serve() -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.bind(address)
        ready.send(True)
        while True:
            await socket.send_multipart(await socket.recv_multipart())

    asyncio.run(serve())


async def _ask_echo(address: str) -> list[float]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)

        async def ask() -> None:
            await socket.send(b"x" * 100)
            await socket.recv()

        return await sample_async(ask, count=_CALLS)


def _raw_shell() -> list[float]:
    with subprocess.Popen(["bash", "-c", _RAW_SHELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask() -> None:
            stdin.write(b":\n")
            stdin.flush()
            if stdout.readline() != b"0\n":
                raise RuntimeError("the raw shell did not answer")

        taken = sample_sync(ask, count=_CALLS)
        stdin.close()
        return taken
