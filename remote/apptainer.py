"""The Apptainer runtime (and SingularityCE, which takes the same command line)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from prorl_env.config import SandboxSpec
from prorl_env.errors import RuntimeUnavailable, UsageError
from prorl_env.remote.hostroot import HOST
from prorl_env.remote.runtimes import Launch, missing_folders, overlay_stage, proc_masks, program_version

__all__ = ["Apptainer"]


@dataclass(frozen=True, slots=True)
class Apptainer:
    """Runs on an unpacked root directory under an overlay of ours, by the kernel in a user namespace: no FUSE."""

    program: str
    name: str = "apptainer"

    @classmethod
    def find(cls, name: str) -> Apptainer:
        """``apptainer`` or ``singularity`` on the ``PATH``.

        Raises:
            RuntimeUnavailable: If it is not there.
        """
        found = shutil.which(name)
        if found is None:
            raise RuntimeUnavailable(
                f"{name} is not installed.",
                mend="Run `scripts/install-apptainer`, install your system's package, or use runtime='bubblewrap'.",
            )
        return cls(found, name)

    def version(self) -> str:
        """See ``Runtime``."""
        return program_version(self.program)

    def default_image(self, available: frozenset[str]) -> str | None:
        """The base image."""
        return "base" if "base" in available else None

    def launch(self, *, image: str, rootfs: Path, scratch: Path, spec: SandboxSpec, anchor: tuple[str, ...]) -> Launch:
        """See ``Runtime``."""
        if image == HOST:
            raise UsageError(f"the image {HOST} is for bubblewrap alone; {self.name} needs a root directory, e.g. base")
        # With --writable, what is bound must be there.
        stage = (
            *overlay_stage(rootfs, scratch, size_bytes=spec.limits.scratch_bytes),
            *(("mkdir", path) for path in missing_folders(rootfs, ("dev", "proc", "tmp", "root"), below="t/root")),
        )
        argv = (
            self.program,
            *(
                "--silent",
                "exec",
                "--userns",
                "--containall",
                "--no-init",
                "--no-privs",
                "--no-home",
                "--home",
                "/root",
            ),
            *("--cwd", "/", "--net", "--network", "none", "--hostname", "sandbox", "--dns", "127.0.0.1"),
            *("--no-mount", "sys,tmp,bind-paths", "--cleanenv"),
            *("--bind", f"{scratch / 't' / 'shm'}:/dev/shm"),
            *(word for source, path in proc_masks() for word in ("--bind", f"{source}:{path}:ro")),
            *("--writable", str(scratch / "t" / "root")),
            *anchor,
        )
        return Launch(argv=argv, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stage=stage)
