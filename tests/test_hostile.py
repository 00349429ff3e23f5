"""An agent that attacks the node server from inside costs itself, never a neighbour."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers import private_client, run

from prorl_env.config import SandboxSpec
from prorl_env.errors import SessionDied
from prorl_env.remote.client import NodeClient
from prorl_env.remote.sandbox import CellResult, Sandbox

KERNEL = "k = get_ipython().kernel; send = lambda kind, **content: k.send_response(k.iopub_socket, kind, content)\n"
NONSENSE = {
    "many outputs": "for i in range(70000): send('display_data', data={'text/plain': '1'}, metadata={})",
    "many prints": "for i in range(100000): print(i, flush=True)",
    "many kinds": "from IPython.display import display; display({f'a/{i}': '' for i in range(5000)}, raw=True)",
    "an error that is a list": "send('error', ename=['x'], evalue=['y'], traceback=[])",
    "data that is a list": "send('display_data', data=[1], metadata={})",
    "an empty stream": "send('stream')",
    "deep JSON": "k.session.send(k.iopub_socket, 'stream', content=b'[' * 100000, parent=k.get_parent('shell'))",
    "a wrong signature": "k.session.key = b'other'; print(1)",
    "a lone surrogate": "print('\\ud800')",
    "a number for text": "send('execute_result', data={'text/plain': 5}, metadata={})",
    "long errors": "for i in range(300): send('error', ename='x', evalue='y' * 100000, traceback=[])",
}


async def start(client: NodeClient) -> Sandbox:
    return await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")


@pytest.mark.parametrize("code", NONSENSE.values(), ids=NONSENSE.keys())
def test_what_a_kernel_sends_cannot_harm_a_neighbour(code: str, base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            evil, neighbour = await start(client), await start(client)
            waiting = asyncio.ensure_future(neighbour.run_bash("sleep 1; echo fine", timeout_s=50))
            result = await evil.run_cell(KERNEL + code, timeout_s=30)
            assert isinstance(result, CellResult)
            assert len(result.outputs) <= 1000
            assert result.status != "timeout"
            assert len(result.text) <= evil.spec.limits.output_bytes
            assert (await waiting).output == b"fine\n"
            assert (await evil.run_cell("1 + 1")).text == "2\n"

    run(work())


def test_every_stopped_newcomer_is_given_up_and_others_are_served(base_image: Path) -> None:
    stopper = (
        "import os, signal\n"
        "while True:\n"
        "    for name in os.listdir('/proc'):\n"
        "        if name.isdigit() and int(name) not in (1, os.getpid()):\n"
        "            try: os.kill(int(name), signal.SIGSTOP)\n"
        "            except OSError: pass\n"
    )

    async def work() -> None:
        async with private_client() as client:
            evil, neighbour = await start(client), await start(client)
            attack = asyncio.ensure_future(evil.exec(["python3", "-c", stopper], timeout_s=20))
            for _ in range(3):
                await evil.exec(["true"], timeout_s=1)
            assert (await neighbour.exec(["echo", "hi"])).stdout == b"hi\n"
            assert (await neighbour.run_bash("echo hi")).output == b"hi\n"
            await evil.stop()
            await asyncio.gather(attack, return_exceptions=True)
            assert (await (await start(client)).exec(["echo", "hi"])).stdout == b"hi\n"

    run(work())


def test_a_terminal_that_waits_does_not_stop_the_server(base_image: Path) -> None:
    program = (
        "import fcntl, os, threading\n"
        "def wait():\n"
        "    while True: fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) & ~os.O_NONBLOCK)\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "while True: os.write(1, b'x' * 4096)\n"
    )

    async def work() -> None:
        async with private_client() as client:
            evil, neighbour = await start(client), await start(client)
            await evil.write_file("/tmp/p.py", program.encode())
            for _ in range(3):
                await evil.run_bash("python3 /tmp/p.py & sleep 0.3", timeout_s=1)
            assert (await neighbour.run_bash("echo hi", timeout_s=5)).output == b"hi\n"

    run(work())


def test_too_large_a_request_fails_alone(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            evil, neighbour = await start(client), await start(client)
            assert (await evil.exec(["echo", "x" * 300_000])).exit_code == 127
            assert (await evil.exec(["echo", "漢" * 30_000])).exit_code == 0
            assert (await neighbour.exec(["echo", "hi"])).stdout == b"hi\n"

    run(work())


def test_forged_reports_of_a_shell_are_no_results(base_image: Path) -> None:
    forge = (
        "import glob, os\n"
        "for fd in glob.glob(f'/proc/{os.getppid()}/fd/*'):\n"
        "    try: out = os.open(fd, os.O_WRONLY | os.O_NONBLOCK)\n"
        "    except OSError: continue\n"
        "    for text in (b'0 9' + b'9' * 5000 + b' x /\\0', b'\\xff' * 60000):\n"
        "        try: os.write(out, text)\n"
        "        except OSError: pass\n"
    )

    async def work() -> None:
        async with private_client() as client:
            evil, neighbour = await start(client), await start(client)
            await evil.write_file("/tmp/p.py", forge.encode())
            result = await evil.run_bash("python3 /tmp/p.py; (exit 5)", timeout_s=10)
            assert result.restarted or result.exit_code == 5
            assert (await evil.run_bash("echo mine")).output.endswith(b"mine\n")
            assert (await neighbour.run_bash("echo hi")).output == b"hi\n"

    run(work())


def test_a_link_in_place_of_a_kernels_socket_is_not_followed(base_image: Path, short_dir: Path) -> None:
    connected = 0

    def count(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        writer.close()

    plant = (
        "import os, glob\n"
        f"target = {str(short_dir / 'host.sock')!r}\n"
        "done = set()\n"
        "while True:\n"
        "    for path in glob.glob('/run/prorl/*.json'):\n"
        "        for n in range(1, 6):\n"
        "            name = f'{path[:-5]}-{n}'\n"
        "            if name not in done:\n"
        "                try: os.symlink(target, name); done.add(name)\n"
        "                except OSError: pass\n"
    )

    async def work() -> None:
        server = await asyncio.start_unix_server(count, str(short_dir / "host.sock"))
        async with private_client() as client:
            evil = await start(client)
            await evil.write_file("/tmp/p.py", plant.encode())
            await evil.run_bash("python3 /tmp/p.py >/dev/null 2>&1 & sleep 0.3")
            with pytest.raises(SessionDied):
                await evil.run_cell("1", timeout_s=10)
            assert (await evil.run_bash("echo on")).output.endswith(b"on\n")
        server.close()
        await server.wait_closed()

    run(work())
    assert connected == 0
