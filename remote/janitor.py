"""Run directories: one for each node server, with a lease in it; and the removal of those whose owner is dead.

The spawner removes its server's directory even when the server is killed. What the janitor finds is what is left when
both were killed at once (a batch job's end, a power cut): a directory whose lease names a process, by pid, start time
and boot, that is no more. Anything without a readable lease, or of another user, is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path

from prorl_env.errors import SetupError
from prorl_env.remote.processes import start_time
from prorl_env.remote.spawner import remove_tree

__all__ = ["MAX_SOCKET_PATH_BYTES", "claim_run_dir", "sweep"]

MAX_SOCKET_PATH_BYTES = 107

_LEASE = "lease.json"
_PREFIX = "n-"


def claim_run_dir(parent: Path) -> Path:
    """Make a run directory with this process's lease in it, mode 0700.

    Raises:
        SetupError: If ``parent`` cannot be used, e.g. since it belongs to somebody else.
    """
    path = parent / f"{_PREFIX}{secrets.token_hex(4)}"
    if len(os.fsencode(path / "node")) > MAX_SOCKET_PATH_BYTES:
        raise SetupError(
            f"The run folder's path is too long for a socket of at most {MAX_SOCKET_PATH_BYTES} bytes: {parent}.",
            mend="Set PRORL_ENV_RUN to a short path.",
        )
    nascent = parent / f".{path.name}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = parent.lstat()
        if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
            raise SetupError(f"{parent} belongs to somebody else.", mend="Set PRORL_ENV_RUN to a folder of yours.")
        parent.chmod(0o700)
        # The lease is there before the directory has its name: the janitor never sees one without.
        nascent.mkdir(mode=0o700)
        (nascent / _LEASE).write_text(json.dumps(_identity(os.getpid())))
        nascent.rename(path)
    except OSError as error:
        remove_tree(str(nascent))
        mend = "Free some space" if error.errno == errno.ENOSPC else "Make it a folder that you may write to"
        raise SetupError(
            f"Cannot make a run folder in {parent}: {error.strerror}.", mend=f"{mend}, or set PRORL_ENV_RUN to another."
        ) from None
    return path


def sweep(parent: Path) -> list[Path]:
    """Remove the run directories of dead servers; returns what was removed."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_PREFIX}*"):
            if _owner_is_dead(path):
                remove_tree(str(path))
                removed.append(path)
    return removed


def _owner_is_dead(path: Path) -> bool:
    try:
        if path.lstat().st_uid != os.getuid():
            return False
        lease = json.loads((path / _LEASE).read_text())
        here = _identity(int(lease["pid"]))
        if any(lease[key] != here[key] for key in ("host", "pid_namespace")):
            return False  # Its pids mean nothing here: another machine on the same file system, or another container.
        return bool(lease["boot"] != here["boot"] or lease["start"] != here["start"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _identity(pid: int) -> dict[str, object]:
    return {
        "pid": pid,
        "start": start_time(pid),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "host": os.uname().nodename,
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
    }
