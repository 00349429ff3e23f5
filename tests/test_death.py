"""When something of ours is killed, nothing of it is left: no process, no mount, no directory, no socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import processes_with, wait_until

from prorl_env.remote.janitor import claim_run_dir, sweep

EPISODE = """
    import os, sys
    import gymnasium as gym
    env = gym.make("prorl_env:ProRL/Math-v0", runtime=sys.argv[1])
    env.reset(seed=0)
    call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
    leftovers = "(setsid sleep 300 &) ; setsid nohup sleep 301 >/dev/null 2>&1 & mkdir -p /tmp/d; cd /tmp/d"
    env.step(call % ("execute_bash", "command", leftovers))
    child = "import subprocess; p = subprocess.Popen(['sleep', '302']); 1"
    env.step(call % ("execute_ipython_cell", "code", child))
    print("ready", flush=True)
    if sys.argv[2] == "busy":
        env.step(call % ("execute_bash", "command", "sleep 303"))
    sys.stdin.read()
"""


class Episode:
    """A Python process in the middle of an episode, with a run directory of its own that marks everything of it."""

    def __init__(self, runtime: str, run_dir: Path, mode: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(EPISODE), runtime, mode],
            env={**os.environ, "PRORL_ENV_RUN": str(run_dir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def family(self) -> set[int]:
        """Every process that belongs to it, found by descent."""
        from prorl_env.remote.processes import descendants

        return set(descendants(self.process.pid))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def gone(pids: set[int], run_dir: Path) -> bool:
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in state(pid)]
    return not alive and not list(run_dir.glob("*")) and not mounts_below(run_dir)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def mounts_below(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(path) in line]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_sigkill_of_the_client_leaves_nothing(runtime: str, mode: str, short_dir: Path) -> None:
    episode = Episode(runtime, short_dir, mode)
    family = episode.family()
    assert len(family) >= 5, "node server, spawner, sandbox, shell and kernel should be running"
    assert len(list(short_dir.glob("n-*/s*"))) == 1
    episode.process.send_signal(signal.SIGKILL)
    assert wait_until(lambda: gone(family, short_dir), within_s=5)
    episode.end()
    assert processes_with(str(short_dir)) == []


@pytest.mark.slow
def test_sigkill_of_the_node_server_leaves_nothing(runtime: str, short_dir: Path) -> None:
    episode = Episode(runtime, short_dir, "idle")
    family = episode.family()
    (node,) = (pid for pid in family if b"prorl_env.remote.node" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(node, signal.SIGKILL)
    assert wait_until(lambda: gone(family, short_dir), within_s=5)
    episode.end()


@pytest.mark.slow
def test_sigkill_of_everything_at_once_leaves_only_what_the_janitor_removes(runtime: str, short_dir: Path) -> None:
    episode = Episode(runtime, short_dir, "idle")
    family = episode.family()
    os.kill(episode.process.pid, signal.SIGSTOP)
    for pid in sorted(family):
        if b"spawner.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    for pid in (*family, episode.process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    episode.end()
    assert wait_until(lambda: all(state(pid) == "Z" for pid in family), within_s=5)
    assert mounts_below(short_dir) == []
    left = list(short_dir.glob("n-*"))
    assert sweep(short_dir) == left
    assert list(short_dir.glob("*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_client_leaves_nothing(number: signal.Signals, short_dir: Path, base_image: Path) -> None:
    episode = Episode("bubblewrap", short_dir, "busy")
    family = episode.family()
    episode.process.send_signal(number)
    assert wait_until(lambda: gone(family, short_dir), within_s=5)
    episode.end()


def test_the_janitor_leaves_alone_what_it_cannot_prove_dead(short_dir: Path) -> None:
    mine = claim_run_dir(short_dir)
    (short_dir / "n-noleases").mkdir()
    (short_dir / "n-garbage").mkdir()
    (short_dir / "n-garbage" / "lease.json").write_text("{")
    elsewhere = short_dir / "n-elsewhere"
    elsewhere.mkdir()
    lease = (mine / "lease.json").read_text()
    (elsewhere / "lease.json").write_text(
        lease.replace(os.uname().nodename, "another-host").replace(str(os.getpid()), "1")
    )
    (short_dir / "notes").mkdir()
    assert sweep(short_dir) == []
    assert mine.exists()


def test_the_janitor_knows_a_recycled_pid_by_its_start_time(short_dir: Path) -> None:
    mine = claim_run_dir(short_dir)
    lease = mine / "lease.json"
    import json

    identity = json.loads(lease.read_text())
    lease.write_text(json.dumps({**identity, "start": identity["start"] - 1}))
    assert sweep(short_dir) == [mine]
