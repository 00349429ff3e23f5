"""Facts about processes, from ``/proc``: who descends from whom, and whether a pid is still the one we knew."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = [
    "children",
    "descendants",
    "describe",
    "innermost",
    "kill_tree",
    "now_ticks",
    "pid_namespace",
    "send_signal",
    "start_time",
]


def start_time(pid: int) -> int | None:
    """When it started, in clock ticks after boot; ``None`` if it is gone. With the pid it makes it unique."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def children(pid: int) -> list[int]:
    """Its living children."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text("ascii").split())
    except OSError:
        return []
    return found


def describe(pid: int) -> str:
    """A process in words, for an error message."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        fields = _stat(pid)
        return f"process {pid} ({name}, state {fields[0] if fields else '?'})"
    return f"process {pid} (gone)"


def descendants(pid: int, *, since: int = 0) -> list[int]:
    """Its children, their children and so on, parents first.

    Args:
        pid: Where to begin; not part of the result.
        since: Leave out children that started before this (see ``now_ticks``), with everything below them.
    """
    found, queue = [], [pid]
    while queue:
        queue = [child for parent in queue for child in children(parent) if (start_time(child) or 0) >= since]
        found += queue
    return found


def now_ticks() -> int:
    """The present, as ``start_time`` counts."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def kill_tree(pid: int, *, root: bool, since: int = 0) -> None:
    """Kill everything below a process that ``descendants`` gives, and itself if ``root``.

    All are stopped first, until no new one is found, or a parent would go on with its next line when its child is
    killed.
    """
    found: list[int] = []
    for _ in range(10):
        new = [one for one in ([pid] if root else []) + descendants(pid, since=since) if one not in found]
        if not new:
            break
        for one in new:
            send_signal(one, signal.SIGSTOP)
        found += new
    for one in found:
        send_signal(one, signal.SIGKILL)


def pid_namespace(pid: int) -> int | None:
    """Inode of its pid namespace; ``None`` if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


def innermost(pid: int) -> int | None:
    """The first process of the pid namespace that was made below ``pid``: its init. ``None`` if there is none yet."""
    ours = pid_namespace(os.getpid())
    inside = [child for child in descendants(pid) if pid_namespace(child) not in (ours, None)]
    for candidate in inside:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{candidate}/status").read_text("utf-8", "replace").splitlines():
                if line.startswith("NSpid:") and line.split()[-1] == "1":
                    return candidate
    return None


def send_signal(pid: int, number: int) -> None:
    """Signal a process; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()
