"""Settings: small frozen values whose ``repr`` pastes back. Seconds and bytes throughout.

Nothing here reads the environment or the disk except the two ``from_env`` constructors, which only entry points call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prorl_env.errors import ConfigError

__all__ = ["Limits", "Paths", "SandboxSpec", "Timeouts"]

MIB = 1024 * 1024


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{type(owner).__name__}.{name} must be a number above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use.

    Raises:
        ConfigError: If a value is not above 0.
    """

    processes: int = 512
    """Processes and threads in the sandbox, counted inside its own user namespace."""
    file_size_bytes: int = 2048 * MIB
    """Largest file that can be written."""
    memory_bytes: int = 4096 * MIB
    """Private memory of one process."""
    open_files: int = 4096
    """Descriptors of one process."""
    scratch_bytes: int = 2048 * MIB
    """Everything that the sandbox writes, its ``/tmp`` and ``/dev/shm`` among it. It is memory, taken as needed."""
    output_bytes: int = 64 * 1024
    """Output kept of one tool call: half from its head, half from its tail."""

    def __post_init__(self) -> None:
        _positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long each thing may take, in seconds of running (not of waiting in a queue).

    Raises:
        ConfigError: If a value is not above 0.
    """

    init_s: float = 60.0
    """INIT: until the sandbox and its sessions are ready."""
    tool_s: float = 30.0
    """One tool call."""
    run_s: float = 900.0
    """All of RUN, without the time the policy takes."""
    eval_s: float = 60.0
    """EVAL."""

    def __post_init__(self) -> None:
        _positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is to be. The same spec gives an equal sandbox on every runtime that has the image."""

    image: str = "auto"
    """A name in the image store, a path of an unpacked root directory, ``host`` (bubblewrap only), or ``auto``."""
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables inside."""
    workdir: str = "/workspace"
    """Where sessions start; made if missing."""
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _positive(self, "start_timeout_s")
        if not self.workdir.startswith("/"):
            raise ConfigError(f"SandboxSpec.workdir must be an absolute path, got {self.workdir!r}")
        for key, value in self.env.items():
            if not key or "=" in key or "\0" in key + value:
                raise ConfigError(f"SandboxSpec.env: {key!r} cannot be an environment variable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where things live on a node."""

    home: Path
    """Kept between runs: ``images/``, ``models/``, ``venvs/``. ``PRORL_ENV_HOME``, else ``~/.cache/prorl-env``."""
    run: Path
    """Sockets and overlays of living servers, mode 0700, short because of the 107 bytes of a socket path.

    ``PRORL_ENV_RUN``, else ``/tmp/prorl-<uid>``.
    """

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Paths:
        """Read ``PRORL_ENV_HOME``, ``PRORL_ENV_RUN`` and ``XDG_CACHE_HOME``."""
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(
            home=Path(environ.get("PRORL_ENV_HOME") or cache / "prorl-env").absolute(),
            run=Path(environ.get("PRORL_ENV_RUN") or f"/tmp/prorl-{os.getuid()}").absolute(),
        )
