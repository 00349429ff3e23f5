"""The bash session on hostile input, in a real sandbox. Each case ends with a look at whether the session is still clean."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers import private_client, run

from prorl_env.config import SandboxSpec
from prorl_env.remote.sandbox import BashResult

# (what, commands, expected output of the last one, expected exit code of the last one)
CASES = [
    ("an option that prints commands", ["set -x", "echo a", "set +x", "echo b"], "b\n", 0),
    ("its trace is shown to the agent alone", ["set -x", "echo a"], "++ echo a\na\n", 0),
    ("an option that prints lines", ["set -v", "set +v", "echo b"], "b\n", 0),
    ("errexit that does not strike", ["set -euo pipefail; echo hi", "echo x"], "x\n", 0),
    ("errexit that strikes", ["set -e; false; echo no"], "", 1),
    ("errexit is gone after a restart", ["set -e; false", "false; echo on"], "on\n", 0),
    ("nounset", ["set -u; echo $NOT_SET_HERE; echo no"], "bash: line 1: NOT_SET_HERE: unbound variable\n", 1),
    ("break at top level", ["break 99; echo on"], None, 0),
    ("return at top level", ["return 5 2>/dev/null; echo on"], "on\n", 0),
    ("a subshell's exit", ["(exit 4)"], "", 4),
    ("status of the command before", ["(exit 4)", "echo $?"], "4\n", 0),
    ("exec of another program", ["exec echo replaced"], "replaced\n", 0),
    ("exec of a missing program", ["exec no-such-program 2>/dev/null"], "", 127),
    ("killing itself", ["kill -9 $$"], "", 137),
    ("closing standard output", ["exec 1>&-", "echo lost 2>/dev/null", "exec 1>&2", "echo back"], "back\n", 0),
    ("standard output to a file", ["exec >/tmp/out", "echo kept", "exec >/dev/tty; cat /tmp/out"], "kept\n", 0),
    ("closing our descriptors by number", ["exec 241>&- 242>&- 240>&-; echo on", "echo still"], "still\n", 0),
    ("functions with the names of builtins", ["printf() { echo no; }; echo() { builtin printf 'mine %s\\n' \"$1\"; }", "echo a"],
     "mine a\n", 0),
    ("aliases", ["shopt -s expand_aliases; alias eval='echo no'; alias builtin='echo no'", "pwd"], "/workspace\n", 0),
    ("IFS", ["IFS=xyz", "a='1 2'; echo $a"], "1 2\n", 0),
    ("a trap on exit", ["trap 'echo bye' EXIT", "exit 2"], "bye\n", 2),
    ("a trap on debug", ["trap 'echo D >> /tmp/debug' DEBUG", "echo x"], "x\n", 0),
    ("a trap on error", ["trap 'echo E >&2' ERR", "false"], None, 1),
    ("a trap on error is quiet about what was", ["trap 'echo E' ERR", "false", "true"], "", 0),
    ("a here-document", ["cat <<'EOF'\n$a\t`b` \\\n'\"\nEOF"], "$a\t`b` \\\n'\"\n", 0),
    ("a here-document in a substitution", ["x=$(cat <<EOF\na)b\nEOF\n); echo \"$x\""], "a)b\n", 0),
    ("an unfinished here-document", ["cat <<EOF\nx"], None, 0),
    ("an unmatched quote", ["echo 'x"], None, 2),
    ("an unmatched parenthesis", ["echo $("], None, 2),
    ("a loop without its end", ["for i in 1 2; do echo $i"], None, 2),
    ("a backslash at the end", ["echo a \\"], "a \\\n", 0),
    ("an exclamation mark", ["echo \"a!b\"; ! true"], "a!b\n", 1),
    ("a comment", ["# nothing", "echo x # y"], "x\n", 0),
    ("an empty command", [""], "", 0),
    ("blank lines around", ["\n\n  echo x  \n\n"], "x\n", 0),
    ("text that is not UTF-8", ["printf '\\xff\\x00\\xfe'"], "\udcff\x00\udcfe", 0),
    ("bytes that are not UTF-8 in the command", ["printf %s '\udcff'"], "\udcff", 0),
    ("tabs and carriage returns", ["printf 'a\\tb\\r\\nc\\r'"], "a\tb\r\nc\r", 0),
    ("no line end at the end", ["printf x"], "x", 0),
    ("a line of 1 MB in", ["x='" + "a" * 1_000_000 + "'; echo ${#x}"], "1000000\n", 0),
    ("a script of many lines", ["\n".join(f"n{i}={i}" for i in range(3000)) + "\necho $n2999"], "2999\n", 0),
    ("a terminal left in raw mode", ["stty raw echo", "printf 'a\\nb\\n'"], "a\nb\n", 0),
    ("a terminal that was stopped", ["stty -ixon; stty ixon", "echo x"], "x\n", 0),
    ("a background job", ["sleep 0.2 & wait $!; echo done"], "done\n", 0),
    ("a background job does not hold the call", ["sleep 30 & echo $((1+1))"], "2\n", 0),
    ("reading at the end of input", ["read x < /dev/null; echo [$x]"], "[]\n", 0),
    ("an interactive shell inside", ["echo 'echo inner; exit 3' | bash -i 2>/dev/null"], None, 3),
    ("a program that is a terminal's", ["test -t 0 && test -t 1 && test -t 2 && echo tty"], "tty\n", 0),
    ("colours", ["printf '\\033[31mred\\033[0m\\n'"], "\x1b[31mred\x1b[0m\n", 0),
    ("something that looks like our result", ["printf 'abc 0  /tmp\\0' > /dev/tty; printf '\\x1e'"], "abc 0  /tmp\x00\x1e", 0),
    ("kill everything that may be killed", ["kill -9 -1", "echo on"], "on\n", 0),
    ("unset what we use", ["unset PWD PATH HOME", "echo x"], "x\n", 0),
    ("posix mode", ["set -o posix", "echo x"], "x\n", 0),
    ("a directory that is removed", ["mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; exit 0", "echo x"], "x\n", 0),
]  # fmt: skip


async def _play(commands: list[str], runtime: str) -> tuple[BashResult, BashResult]:
    async with private_client() as client:
        sandbox = await client.start_sandbox(SandboxSpec(), runtime=runtime)
        for command in commands:
            result = await sandbox.run_bash(command, timeout_s=10)
        clean = await sandbox.run_bash("trap - DEBUG ERR EXIT; unset -f echo printf; set +u +e; (exit 7)", timeout_s=5)
        await sandbox.stop()
        return result, clean


@pytest.mark.parametrize(("commands", "output", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_hostile_command_gives_the_right_result_and_a_clean_session(
    commands: list[str], output: str | None, code: int, base_image: Path
) -> None:
    result, clean = run(_play(commands, "bubblewrap"))
    assert not result.timed_out
    assert result.exit_code == code
    if output is not None:
        assert result.output.decode("utf-8", "surrogateescape") == output
    assert (clean.exit_code, clean.timed_out) == (7, False)


@pytest.mark.slow
def test_the_same_on_every_runtime(runtime: str) -> None:
    async def work() -> list[str]:
        wrong = []
        async with private_client() as client:
            for name, commands, output, code in CASES:
                sandbox = await client.start_sandbox(SandboxSpec(), runtime=runtime)
                for command in commands:
                    result = await sandbox.run_bash(command, timeout_s=10)
                said = result.output.decode("utf-8", "surrogateescape")
                if result.exit_code != code or (output is not None and said != output):
                    wrong.append(f"{name}: {result.exit_code} {said[:200]!r}")
                await sandbox.stop()
        return wrong

    assert run(work()) == []


def test_a_deadline_stops_the_whole_tree_and_keeps_the_shell(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            await sandbox.run_bash("kept=1; cd /tmp; sleep 71 &")
            await asyncio.sleep(0.02)  # The kernel counts a process's start in steps of 10 ms.
            command = "echo begun; (trap '' INT TERM; sleep 61) & bash -c 'trap \"\" INT; sleep 62'"
            result = await sandbox.run_bash(command, timeout_s=0.5)
            assert (result.timed_out, result.restarted) == (True, False)
            assert result.output.startswith(b"begun\n")
            assert (await sandbox.run_bash("echo $kept; pwd")).output == b"1\n/tmp\n"
            left = await sandbox.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
            assert b"sleep 6" not in left.stdout
            assert b"sleep 71" in left.stdout, "an earlier background job has been killed as well"
            await sandbox.stop()

    run(work())


def test_a_loop_in_the_shell_itself_ends_with_a_restart_that_is_said(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            result = await sandbox.run_bash("cd /tmp; while :; do :; done", timeout_s=0.5)
            assert (result.timed_out, result.restarted, result.exit_code) == (True, True, None)
            assert (await sandbox.run_bash("echo fresh")).output == b"fresh\n"
            await sandbox.stop()

    run(work())


def test_endless_output_is_bounded_and_stops_at_the_deadline(base_image: Path) -> None:
    async def work() -> None:
        async with private_client() as client:
            sandbox = await client.start_sandbox(SandboxSpec(), runtime="bubblewrap")
            result = await sandbox.run_bash("yes", timeout_s=0.5)
            assert result.timed_out
            assert len(result.output) <= sandbox.spec.limits.output_bytes
            assert result.omitted_bytes > 1_000_000
            assert (await sandbox.run_bash("echo ok")).output == b"ok\n"
            await sandbox.stop()

    run(work())
