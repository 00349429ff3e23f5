"""The sandbox contract, on every runtime, through client and node server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers import private_client, processes_with, run

from prorl_env.config import Limits, SandboxSpec
from prorl_env.errors import ImageNotFound, SandboxDied, SandboxStartFailed, SessionDied, UnknownRuntime, UsageError
from prorl_env.remote.sandbox import Sandbox
from prorl_env.testing import check_sandbox


@pytest.mark.slow
def test_every_runtime_keeps_the_contract(runtime: str) -> None:
    async def work() -> None:
        async with private_client() as client:
            report = await check_sandbox(lambda spec: client.start_sandbox(spec, runtime=runtime))
            report.raise_if_failed()
            assert len(report.passed) == 33
            assert (await client.status()).sandboxes == 0

    run(work())


@pytest.mark.slow
def test_the_host_image_keeps_the_contract_but_for_a_writable_usr(host_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:

            async def make(spec: SandboxSpec) -> Sandbox:
                with_image = SandboxSpec(image="host", limits=spec.limits, env=spec.env)
                return await client.start_sandbox(with_image, runtime="bubblewrap")

            report = await check_sandbox(make)
            # The host's /usr is read-only there, which is why it is not for training.
            assert list(report.failed) == ["the_image_can_be_changed_freely"]
            assert len(report.passed) == 32

    run(work())


def test_the_check_fails_for_a_sandbox_that_does_not_keep_the_contract(base_image: Path) -> None:
    class Forgetful:
        """Loses the output of every command."""

        def __init__(self, inner: Sandbox) -> None:
            self._inner = inner

        async def run_bash(self, *args: object, **kwargs: object) -> object:
            raise RuntimeError("a foreign error")

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    async def work() -> None:
        async with private_client() as client:

            async def make(spec: SandboxSpec) -> Sandbox:
                return Forgetful(await client.start_sandbox(spec, runtime="bubblewrap"))  # type: ignore[return-value]

            report = await check_sandbox(make, only="bash_keeps_its_state")
            assert report.failed == {"bash_keeps_its_state": "RuntimeError: a foreign error"}
            with pytest.raises(AssertionError, match="a foreign error"):
                report.raise_if_failed()

    run(work())


def test_nothing_of_the_host_is_to_be_seen(runtime: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    os.environ["PRORL_TEST_SECRET"] = "host secret"
    script = (
        f"cat {secret}; ls {tmp_path}; env; cat /proc/1/environ /proc/*/cmdline | tr '\\0' '\\n'; hostname; "
        "cat /etc/hosts /etc/resolv.conf /etc/hostname /etc/passwd; ls /etc/localtime -l; ls -la /root /home"
    )

    async def work() -> str:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(), runtime=runtime)
            seen = (await sandbox.exec(["bash", "-c", script])).stdout.decode("utf-8", "replace")
            await sandbox.stop()
            return seen

    try:
        seen = run(work())
    finally:
        del os.environ["PRORL_TEST_SECRET"]
    assert "host secret" not in seen
    assert "PRORL" not in seen
    assert os.uname().nodename not in seen
    assert "prorl-env/store" not in seen
    for line in Path("/etc/resolv.conf").read_text().splitlines():
        if line.startswith("nameserver") and "127.0.0.1" not in line:
            assert line not in seen


def test_a_fresh_sandbox_knows_nothing_of_the_last_one(runtime: str) -> None:
    async def work() -> None:
        async with private_client() as client:
            first = await client.start_sandbox(SandboxSpec(), runtime=runtime)
            await first.run_bash(
                "echo mine > /etc/mine; echo mine > /tmp/mine; rm -rf /usr/share/common-licenses; rm /bin/true"
            )
            second = await client.start_sandbox(SandboxSpec(), runtime=runtime)
            done = await second.exec(["bash", "-c", "ls /etc/mine /tmp/mine; ls /bin/true"])
            assert done.stdout == b"/bin/true\n"
            assert (await first.exec(["/bin/true"])).exit_code == 127
            await first.stop()
            await second.stop()

    run(work())


def test_sandboxes_cannot_reach_each_other_or_the_host_over_the_network(runtime: str) -> None:
    serve = "import socket; s=socket.socket(); s.bind(('127.0.0.1', 23456)); s.listen(); print('up', flush=True); s.accept()"
    ask = "import socket; s=socket.socket(); s.settimeout(2); s.connect(('127.0.0.1', 23456)); print('reached')"

    async def work() -> None:
        async with private_client() as client:
            first = await client.start_sandbox(SandboxSpec(), runtime=runtime)
            second = await client.start_sandbox(SandboxSpec(), runtime=runtime)
            await first.run_bash(f'python3 -c "{serve}" &\nsleep 0.5')
            own = await first.exec(["python3", "-c", ask])
            other = await second.exec(["python3", "-c", ask])
            assert own.stdout == b"reached\n"
            assert other.stdout == b""
            assert b"refused" in other.stderr or b"unreachable" in other.stderr
            await first.stop()
            await second.stop()

    run(work())


def test_many_start_at_once(runtime: str) -> None:
    async def work() -> None:
        async with private_client() as client:
            boxes = await asyncio.gather(*(client.start_sandbox(SandboxSpec(), runtime=runtime) for _ in range(16)))
            outputs = await asyncio.gather(*(box.run_bash(f"echo {index}") for index, box in enumerate(boxes)))
            assert [result.output for result in outputs] == [f"{index}\n".encode() for index in range(16)]
            assert (await client.status()).sandboxes == 16
            await asyncio.gather(*(box.stop() for box in boxes))
            assert (await client.status()).sandboxes == 0

    run(work())


def test_a_sandbox_that_is_killed_says_so_at_once(runtime: str) -> None:
    marker = "PRORL_KILL_MARK"

    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(env={marker: "1"}), runtime=runtime)
            running = asyncio.ensure_future(sandbox.run_bash("sleep 60", timeout_s=50))
            await sandbox.exec(["true"])
            for pid in processes_with(marker):
                os.kill(pid, 9)
            for pid in anchors_below(client_pid=(await client.status()).pid):
                os.kill(pid, 9)
            with pytest.raises((SandboxDied, SessionDied)):
                await asyncio.wait_for(running, 10)
            with pytest.raises(SandboxDied, match=sandbox.sandbox_id):
                await sandbox.exec(["true"])
            await sandbox.stop()

    run(work())


def anchors_below(client_pid: int) -> list[int]:
    from prorl_env.remote.processes import descendants

    return [pid for pid in descendants(client_pid) if b"anchor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("spec", "name", "error", "says"),
    [
        (SandboxSpec(), "docker", UnknownRuntime, "docker"),
        (SandboxSpec(image="no-such-image"), "bubblewrap", ImageNotFound, "no-such-image"),
        (SandboxSpec(image="/no/such/dir"), "bubblewrap", ImageNotFound, "/no/such/dir"),
    ],
)
def test_what_cannot_be_is_a_clear_error(
    spec: SandboxSpec, name: str, error: type[Exception], says: str, base_image: Path
) -> None:
    async def work() -> None:
        async with private_client() as client:
            with pytest.raises(error, match=says):
                await client.start_sandbox(spec, runtime=name)
            assert (await client.status()).sandboxes == 0

    run(work())


def test_a_root_directory_without_a_shell_is_a_start_that_failed(runtime: str, tmp_path: Path) -> None:
    for folder in ("bin", "dev", "proc", "tmp", "run", "etc", "usr"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root" / "bin" / "bash").write_text("not a program")

    async def work() -> None:
        async with private_client() as client:
            with pytest.raises(SandboxStartFailed, match=runtime):
                await client.start_sandbox(SandboxSpec(image=str(tmp_path / "root")), runtime=runtime)
            assert (await client.status()).sandboxes == 0

    run(work())


def test_sessions_of_one_name_queue_and_others_do_not(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            slow = asyncio.ensure_future(sandbox.run_bash("read -t 5 x < <(sleep 5)", session="a", timeout_s=1.5))
            quick = await sandbox.run_bash("echo quick", session="b")
            assert quick.output == b"quick\n"
            assert not slow.done()
            after = await sandbox.run_bash("echo after", session="a")
            assert slow.done()
            assert after.output == b"after\n"
            await sandbox.stop()

    run(work())


def test_a_command_that_is_cancelled_does_not_run_on_into_the_next(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(limits=Limits(output_bytes=1000)), runtime="bubblewrap")
            with pytest.raises(UsageError, match="NUL"):
                await sandbox.run_bash("a\0b")
            task = asyncio.ensure_future(sandbox.run_bash("sleep 1; echo late", timeout_s=20))
            await sandbox.exec(["true"])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await sandbox.run_bash("echo next")).output.endswith(b"next\n")
            await sandbox.stop()

    run(work())
