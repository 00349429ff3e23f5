"""The image ``host``: no image, but the host's ``/usr`` read-only and a virtual environment for Python tools.

So the library works on a machine without root and without an image, on bubblewrap only. What the agent sees is then not
the same on every machine: for training use a real image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from prorl_env.errors import SetupError

__all__ = ["HOST", "HOST_PATH", "build_host", "host_binds"]

HOST = "host"
_VENV = "/opt/prorl/venv"
HOST_PATH = f"{_VENV}/bin"
PACKAGES = ("ipykernel>=6.29", "numpy>=1.26", "scipy>=1.11", "sympy>=1.12")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:{uid}:{gid}:user:/root:/bin/bash\n",
    "group": "root:x:0:\nuser:x:{gid}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_FROM_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "magic", "mime.types")


def build_host(target: Path) -> None:
    """Make the virtual environment and the few files of ``/etc``; about a minute.

    ``target`` appears complete or not at all.

    Raises:
        SetupError: If the packages cannot be installed.
    """
    work = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    (work / "etc").mkdir(parents=True)
    for name, text in _ETC.items():
        (work / "etc" / name).write_text(text.format(uid=os.getuid() or 65534, gid=os.getgid() or 65534))
    python = _base_python()
    try:
        _run([str(python), "-m", "venv", "--without-pip", str(work / "venv")])
        _run([sys.executable, "-m", "pip", "--python", str(work / "venv/bin/python"), "install", "--quiet", *PACKAGES])
        (work / "python").write_text(str(python))
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def host_binds(root: Path, *, size_bytes: int) -> tuple[str, ...]:
    """Bubblewrap arguments for the root directory."""
    args = ["--size", str(size_bytes), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        args += ["--ro-bind", str(root / "etc" / name), f"/etc/{name}"]
    for name in _FROM_ETC:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    prefix = Path((root / "python").read_text()).parent.parent
    if not prefix.is_relative_to("/usr"):
        args += ["--ro-bind", str(prefix), str(prefix)]
    args += ["--ro-bind", str(root / "venv"), _VENV]
    return tuple(args)


def _base_python() -> Path:
    """A Python that the sandbox sees anyway if there is a good one in ``/usr``, else the one that runs us."""
    system = Path("/usr/bin/python3")
    test = "import sys, venv; sys.exit(sys.version_info < (3, 9))"
    if system.exists() and subprocess.run([system, "-c", test], capture_output=True, check=False).returncode == 0:
        return system
    return Path(sys.base_prefix) / "bin" / "python3"


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()
        raise SetupError(
            f"`{' '.join(argv[:6])} …` failed: {last[-1] if last else f'exit code {done.returncode}'}.",
            mend="Check pip's configuration and the network, then run `prorl-env image build host` again.",
        )
