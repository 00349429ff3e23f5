"""Conformance checks that anybody may run on their own parts, free of any test framework.

``check_sandbox`` is the contract of ``remote.sandbox.Sandbox`` as a function: the library's own runtimes pass it, and
a new runtime, or a fake, has to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from prorl_env.config import Limits, SandboxSpec
from prorl_env.errors import SandboxDied, UsageError
from prorl_env.remote.sandbox import Sandbox

__all__ = ["CheckReport", "check_sandbox"]

MakeSandbox = Callable[[SandboxSpec], Awaitable[Sandbox]]

_PROBE_KEY, _PROBE_VALUE = "PRORL_PROBE", "a b=c\n'\"é"
_SPEC = SandboxSpec(env={_PROBE_KEY: _PROBE_VALUE}, limits=Limits(output_bytes=10_000, file_size_bytes=1_000_000))
_SMALL = SandboxSpec(limits=Limits(file_size_bytes=1_000_000, memory_bytes=200_000_000, scratch_bytes=64_000_000))


@dataclass(slots=True)
class CheckReport:
    """What was checked, and what did not hold."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Name of the check -> what happened instead."""

    def raise_if_failed(self) -> None:
        """Raise if anything failed.

        Raises:
            AssertionError: With all failures, one a line.
        """
        if self.failed:
            raise AssertionError("\n".join(f"{name}: {why}" for name, why in self.failed.items()))


async def check_sandbox(make: MakeSandbox, *, only: str | None = None) -> CheckReport:
    """Run every check of the sandbox contract.

    Args:
        make: Starts a sandbox with the given spec.
        only: Run just the check of this name.

    Returns:
        A report; it does not raise for a check that fails. Each check gets the same sandbox, except those that end
        theirs.
    """
    report = CheckReport()
    shared = await make(_SPEC)
    try:
        for check in _SHARED:
            await _one(report, check, shared, only)
    finally:
        await shared.stop()
    for check in _ENDING:
        sandbox = await make(_SMALL)
        try:
            await _one(report, check, sandbox, only)
        finally:
            await sandbox.stop()
    return report


async def _one(
    report: CheckReport, check: Callable[[Sandbox], Awaitable[None]], sandbox: Sandbox, only: str | None
) -> None:
    name = check.__name__.removeprefix("_")
    if only not in (None, name):
        return
    try:
        async with asyncio.timeout(60):
            await check(sandbox)
    except TimeoutError:
        report.failed[name] = "it took longer than 60 s"
    except AssertionError as error:
        report.failed[name] = str(error)
    except Exception as error:  # A check must not end the others, whatever a foreign sandbox raises.
        report.failed[name] = f"{type(error).__name__}: {error}"
    else:
        report.passed.append(name)


def _same(got: object, wanted: object, what: str) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: wanted {wanted!r}, got {got!r}")


def _true(fact: object, what: str) -> None:
    if not fact:
        raise AssertionError(what)


async def _exec_gives_exit_code_and_both_streams(s: Sandbox) -> None:
    done = await s.exec(["bash", "-c", "printf out; printf err >&2; exit 7"])
    _same((done.exit_code, done.stdout, done.stderr), (7, b"out", b"err"), "exec")


async def _exec_of_a_missing_program_is_127(s: Sandbox) -> None:
    done = await s.exec(["no-such-program-here"])
    _same(done.exit_code, 127, "exit code")
    _true(b"no-such-program-here" in done.stderr, f"the message does not name the program: {done.stderr!r}")


async def _exec_passes_arguments_and_stdin_untouched(s: Sandbox) -> None:
    data = bytes(range(256)) * 4
    done = await s.exec(["cat"], stdin=data)
    _same(done.stdout, data, "stdin to stdout")
    words = ["a b", "", "'", '"', "$HOME", "*", "é\n"]
    done = await s.exec(["printf", "%s|", *words])
    _same(done.stdout.decode(), "".join(f"{word}|" for word in words), "arguments")


async def _exec_death_by_signal_is_negative(s: Sandbox) -> None:
    _same((await s.exec(["bash", "-c", "kill -TERM $$"])).exit_code, -15, "exit code")


async def _exec_stops_at_its_deadline_with_partial_output(s: Sandbox) -> None:
    done = await s.exec(["bash", "-c", "echo before; sleep 60; echo after"], timeout_s=0.5)
    _same((done.timed_out, done.stdout), (True, b"before\n"), "timed out, output")
    _true(done.seconds < 20, "it was not stopped at its deadline")
    left = await s.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"])
    _true(b"sleep 60" not in left.stdout, "the program's child is still running")


async def _exec_is_not_held_open_by_what_it_leaves_behind(s: Sandbox) -> None:
    done = await s.exec(["bash", "-c", "sleep 30 & echo started"], timeout_s=20)
    _same((done.timed_out, done.stdout), (False, b"started\n"), "timed out, output")


async def _output_is_bounded_and_counted(s: Sandbox) -> None:
    done = await s.exec(["bash", "-c", "printf 'HEAD'; head -c 1000000 /dev/zero; printf 'TAIL'"])
    _same(len(done.stdout) + done.stdout_omitted_bytes, 1_000_008, "bytes kept and left out together")
    _same(len(done.stdout), _SPEC.limits.output_bytes, "bytes kept")
    _true(done.stdout.startswith(b"HEAD") and done.stdout.endswith(b"TAIL"), "head and tail are not kept")
    bash = await s.run_bash("head -c 1000000 /dev/zero | tr '\\0' x; echo")
    _same(len(bash.output) + bash.omitted_bytes, 1_000_001, "bytes of bash kept and left out together")


async def _bash_keeps_its_state(s: Sandbox) -> None:
    await s.run_bash("cd /tmp; x='1 2'; export Y=two; f() { echo \"f-$1\"; }; set -o pipefail")
    result = await s.run_bash('pwd; echo "$x"; bash -c "echo \\$Y"; f z; false | true')
    _same((result.output, result.exit_code, result.cwd), (b"/tmp\n1 2\ntwo\nf-z\n", 1, "/tmp"), "state")
    await s.run_bash("set +o pipefail")
    _same((await s.run_bash("(exit 9)")).exit_code, 9, "exit code")
    _same((await s.run_bash("echo $?")).output, b"9\n", "$? of the command before")


async def _bash_survives_its_own_end(s: Sandbox) -> None:
    await s.run_bash("cd /tmp")
    result = await s.run_bash("echo before; exit 3")
    _same((result.exit_code, result.output, result.restarted), (3, b"before\n", True), "exit 3")
    result = await s.run_bash("pwd")
    _same((result.output, result.restarted), (b"/tmp\n", False), "the call after it")


async def _bash_reports_a_syntax_error_at_once(s: Sandbox) -> None:
    result = await s.run_bash("echo 'unfinished", timeout_s=20)
    _true(result.exit_code not in (0, None) and not result.timed_out, f"an unfinished quote gave {result.exit_code}")
    _same((await s.run_bash("echo ok")).output, b"ok\n", "the call after it")


async def _bash_times_out_and_stays_usable(s: Sandbox) -> None:
    await s.run_bash("kept=1")
    result = await s.run_bash("echo begun; sleep 60", timeout_s=0.5)
    _same((result.timed_out, result.output), (True, b"begun\n"), "timed out, output")
    _same((await s.run_bash("echo $kept")).output, b"1\n", "state after a time-out")


async def _bash_output_is_exact(s: Sandbox) -> None:
    result = await s.run_bash(r"printf 'a\tb\r\n\x00\xff\xc3\xa9\x1b[31m'; cat <<'E'" + "\n$x `y` \\\nE")
    _same(result.output, b"a\tb\r\n\x00\xff\xc3\xa9\x1b[31m$x `y` \\\n", "output")


async def _bash_refuses_nul(s: Sandbox) -> None:
    try:
        await s.run_bash("echo \0")
    except UsageError:
        return
    raise AssertionError("a NUL character in a command was not refused")


async def _bash_sessions_are_separate_and_concurrent(s: Sandbox) -> None:
    await asyncio.gather(s.run_bash("v=a; sleep 0.2", session="a"), s.run_bash("v=b; sleep 0.2", session="b"))
    a, b = await asyncio.gather(s.run_bash("echo $v", session="a"), s.run_bash("echo $v", session="b"))
    _same((a.output, b.output), (b"a\n", b"b\n"), "variables of two sessions")


async def _ipython_keeps_its_state_and_shows_results(s: Sandbox) -> None:
    await s.run_cell("x = 20")
    result = await s.run_cell("print('printed'); x + 22")
    _same((result.status, result.text), ("ok", "printed\n42\n"), "a cell")
    result = await s.run_cell("1 / 0")
    _true(
        result.status == "error" and "ZeroDivisionError" in result.text,
        f"an error gave {result.status}, {result.text!r}",
    )
    _true("\x1b" not in result.text, "the traceback has colour codes")


async def _ipython_runs_the_cell_after_an_error(s: Sandbox) -> None:
    for number in range(10):
        await s.run_cell("1 / 0")
        _same((await s.run_cell(f"{number}")).text, f"{number}\n", "a cell right after one that raised")


async def _ipython_notices_a_dead_kernel(s: Sandbox) -> None:
    result = await s.run_cell("import os; os._exit(3)", timeout_s=30)
    _true(
        result.status == "died" and result.restarted and "3" in result.cause,
        f"it gave {result.status}, {result.cause!r}",
    )
    _same((await s.run_cell("'back'")).text, "'back'\n", "the next cell")


async def _ipython_interrupts_at_the_deadline(s: Sandbox) -> None:
    await s.run_cell("kept = 5")
    result = await s.run_cell("import time; time.sleep(60)", timeout_s=1.0)
    _same((result.status, result.restarted), ("timeout", False), "status, restarted")
    _same((await s.run_cell("kept")).text, "5\n", "state after an interrupt")


async def _ipython_kills_what_ignores_an_interrupt(s: Sandbox) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    result = await s.run_cell(code, timeout_s=0.5)
    _same((result.status, result.restarted), ("timeout", True), "status, restarted")
    _same((await s.run_cell("'back'")).text, "'back'\n", "the next cell")


async def _ipython_refuses_input(s: Sandbox) -> None:
    _same((await s.run_cell("input()", timeout_s=20)).status, "error", "input()")


async def _files_are_written_and_read_exactly(s: Sandbox) -> None:
    data = bytes(range(256)) * 1000
    await s.write_file("/workspace/new folder/a b.bin", data, mode=0o600)
    _same(await s.read_file("/workspace/new folder/a b.bin"), data, "content")
    mode = await s.exec(["stat", "-c", "%a", "/workspace/new folder/a b.bin"])
    _same(mode.stdout, b"600\n", "mode")
    for path in ("/no/such", "/workspace"):
        try:
            await s.read_file(path)
        except UsageError as error:
            _true(path in error.message, f"the error does not name {path}")
        else:
            raise AssertionError(f"reading {path} did not fail")


async def _environment_is_the_specs_alone(s: Sandbox) -> None:
    done = await s.exec(["printenv", _PROBE_KEY])
    _same(done.stdout.decode(), f"{_PROBE_VALUE}\n", "a variable of the spec")
    names = {line.split(b"=")[0] for line in (await s.exec(["env", "-0"])).stdout.split(b"\0") if line}
    known = {b"PATH", b"HOME", b"LANG", b"USER", _PROBE_KEY.encode()}
    _true(names <= known, f"more variables than these: {sorted(names - known)}")


async def _there_is_no_network(s: Sandbox) -> None:
    devices = await s.exec(["bash", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"])
    _true(set(devices.stdout.split()) <= {b"lo"}, f"network devices: {devices.stdout!r}")


async def _processes_are_its_own(s: Sandbox) -> None:
    done = await s.exec(["bash", "-c", "ls -d /proc/[0-9]* | wc -l"])
    _true(int(done.stdout) < 40, f"{done.stdout!r} processes are to be seen")


async def _it_has_no_privileges(s: Sandbox) -> None:
    done = await s.exec(["grep", "-E", "^(CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs)", "/proc/self/status"])
    for line in done.stdout.decode().splitlines():
        name, value = line.split()
        _same(int(value, 16), 1 if name == "NoNewPrivs:" else 0, name)


async def _no_user_namespace_can_be_made_inside(s: Sandbox) -> None:
    # In one an agent would have capabilities again, and could mount cgroup file systems of the host's.
    done = await s.exec(["bash", "-c", "unshare --user true || unshare --user --map-root-user true"])
    _true(done.exit_code != 0, "unshare --user succeeded")


async def _descriptors_of_the_host_are_not_inherited(s: Sandbox) -> None:
    done = await s.exec(["bash", "-c", "ls -l /proc/self/fd | tail -n +2 | wc -l"])
    _true(int(done.stdout) <= 5, f"{done.stdout!r} descriptors are open")


# `tail` holds as much as it is told to print, and `wc` says how much that was.
_TAKE_300_MB = "head -c 300000000 /dev/zero | tail -c 300000000 2>/dev/null | wc -c"


async def _limits_hold(s: Sandbox) -> None:
    big = await s.exec(["bash", "-c", "head -c 3000000 /dev/zero > /tmp/big; stat -c %s /tmp/big; rm /tmp/big"])
    size = int(big.stdout or b"0")
    _true(0 < size <= _SMALL.limits.file_size_bytes, f"a file could grow to {size} bytes")
    done = await s.exec(["bash", "-c", _TAKE_300_MB], timeout_s=30)
    _true(b"300000000" not in done.stdout, "a process could take more memory than its limit")


async def _what_it_writes_is_bounded(s: Sandbox) -> None:
    script = 'for i in {1..200}; do head -c 900000 /dev/zero > "$1/$i" || break; done; cat "$1"/* | wc -c; rm -f "$1"/*'
    for folder in ("/tmp", "/dev/shm", "/workspace"):
        done = await s.exec(["bash", "-c", script, "fill", folder])
        size = int(done.stdout or b"0")
        _true(0 < size <= _SMALL.limits.scratch_bytes, f"{folder} could take {size} bytes")


async def _kernel_settings_cannot_be_written(s: Sandbox) -> None:
    # Opening to append changes nothing, and fails or not like a write.
    files = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches")
    script = 'for f in "$@"; do : 2>/dev/null >> "$f" && echo "$f"; done'
    done = await s.exec(["bash", "-c", script, "try", *files])
    _same(done.stdout, b"", "files of the kernel's that can be written")
    # Some settings belong to the sandbox's own namespaces and may be its to change.
    own = "^/proc/sys/(net/|user/|fs/mqueue/|kernel/(msg|sem|shm|auto_msgmni|ns_last_pid|pid_max))"
    script = 'find /sys /proc/sys -type f -writable 2>/dev/null | grep -vE "$1" | head -n 3'
    found = await s.exec(["bash", "-c", script, "find", own])
    _same(found.stdout, b"", "writable files below /sys and /proc/sys")


async def _the_image_can_be_changed_freely(s: Sandbox) -> None:
    change = "d=$(ls -d */ | head -n 1); mv $d moved; mkdir $d; rm -rf moved $d"
    script = f"set -e; cd /usr/share; {change}; rm -rf /usr/share; mkdir /usr/share"
    done = await s.exec(["bash", "-c", script])
    _same((done.exit_code, done.stderr), (0, b""), "moving and removing folders of the image")


async def _stop_ends_everything_and_is_idempotent(s: Sandbox) -> None:
    running = asyncio.ensure_future(s.run_bash("sleep 60", timeout_s=50))
    await s.exec(["true"])
    await s.stop()
    await s.stop()
    for call in (running, s.exec(["true"]), s.run_bash("true"), s.run_cell("1"), s.read_file("/etc/passwd")):
        try:
            await call
        except SandboxDied:
            continue
        raise AssertionError("a call after stop() did not raise SandboxDied")


async def _the_agent_cannot_end_it_by_killing_everything(s: Sandbox) -> None:
    await s.run_bash("kill -9 -1", timeout_s=10)
    _same((await s.run_bash("echo alive")).output, b"alive\n", "after kill -9 -1")


_SHARED = (
    _exec_gives_exit_code_and_both_streams,
    _exec_of_a_missing_program_is_127,
    _exec_passes_arguments_and_stdin_untouched,
    _exec_death_by_signal_is_negative,
    _exec_stops_at_its_deadline_with_partial_output,
    _exec_is_not_held_open_by_what_it_leaves_behind,
    _output_is_bounded_and_counted,
    _bash_keeps_its_state,
    _bash_survives_its_own_end,
    _bash_reports_a_syntax_error_at_once,
    _bash_times_out_and_stays_usable,
    _bash_output_is_exact,
    _bash_refuses_nul,
    _bash_sessions_are_separate_and_concurrent,
    _ipython_keeps_its_state_and_shows_results,
    _ipython_runs_the_cell_after_an_error,
    _ipython_notices_a_dead_kernel,
    _ipython_interrupts_at_the_deadline,
    _ipython_kills_what_ignores_an_interrupt,
    _ipython_refuses_input,
    _files_are_written_and_read_exactly,
    _environment_is_the_specs_alone,
    _there_is_no_network,
    _processes_are_its_own,
    _it_has_no_privileges,
    _descriptors_of_the_host_are_not_inherited,
    _no_user_namespace_can_be_made_inside,
    _kernel_settings_cannot_be_written,
)
_ENDING = (
    _limits_hold,
    _what_it_writes_is_bounded,
    _the_image_can_be_changed_freely,
    _the_agent_cannot_end_it_by_killing_everything,
    _stop_ends_everything_and_is_idempotent,
)
