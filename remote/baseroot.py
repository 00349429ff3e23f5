"""The image ``base``: a small Debian or Ubuntu with a shell, git, and Python with IPython, NumPy, SciPy and SymPy.

Made with debootstrap and apt from the archive that this machine's own apt uses. Everything runs in a mount and a
process namespace (an ordinary user's also in a user namespace): a killed build leaves neither mounts nor processes.
What is of this machine (its name, its resolver, its mirror) does not get into the image, and what differs from build to
build is taken out: the same packages give the same digest, whoever builds.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

from prorl_env.errors import SetupError
from prorl_env.remote.aptsources import Archive, find_archive, machine_codename

__all__ = ["BASE", "build_base", "remove_as_owner"]

BASE = "base"
_PACKAGES = """
    bash coreutils findutils grep sed gawk tar gzip xz-utils patch diffutils procps less file git
    python3 python3-ipykernel python3-numpy python3-scipy python3-sympy
"""
_LEFT_OUT = "python3-pythran python3-debugpy python3-jedi"
"""Depended upon but not needed: a compiler for SciPy's own build and a debugger (900 MB with what they want), and a
completer that slows the start of a kernel by a fifth. Empty packages stand in."""
_EXCLUDED = "usr/share/doc usr/share/man usr/share/info usr/share/locale usr/share/lintian"
"""Not unpacked, and taken away where debootstrap unpacked it; licences stay."""
_CLEANED = """
    var/log/* var/log/*/* run/* tmp/* var/tmp/* root/.wget-hsts
    var/cache/apt/* var/lib/apt/lists/* var/cache/ldconfig/* var/cache/debconf/*-old
    var/lib/dpkg/*-old var/lib/dpkg/lock* var/lib/dpkg/triggers/Lock var/lib/dbus etc/apt/sources.list.d/*
    etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/subuid- etc/subgid- etc/.pwd.lock
    usr/lib/python3/dist-packages/**/tests
"""
_NEUTRAL = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/resolv.conf": "# There is no network here.\n",
    "etc/apt/sources.list": "# There is no network here.\n",
    "etc/machine-id": "",
}
_OPEN_FOLDERS = {"tmp": 0o1777, "var/tmp": 0o1777, "workspace": 0o777, "root": 0o777}
"""Of a store that root made for all, an ordinary user's sandbox too has to write there."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEEDED = {"debootstrap": "debootstrap", "apt-get": "apt", "unshare": "util-linux", "setpriv": "util-linux"}
"""Program -> package."""
_SILENCE_S = 600.0
_USER_NAMESPACE = ("--user", "--map-root-user", "--map-auto")
_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child=KILL")
_SCRIPT = r"""
set -eu
tree=$1 work=$2 suite=$3 mirror=$4 left_out=$5 packages=$6; shift 6
say() { printf '## %s\n' "$*"; }
# Device nodes on a mount of their own: none get into the image, and no right to make them is needed ...
mkdir -p "$tree/dev"
mount -t tmpfs -o mode=755 dev "$tree/dev"
for node in null zero full random urandom tty; do
    : >"$tree/dev/$node"
    mount --bind "/dev/$node" "$tree/dev/$node"
done
# ... which is also what debootstrap expects when told that it is in such a container.
container=lxc debootstrap --variant=minbase "$@" "$suite" "$tree" "$mirror"
mount -t proc proc "$tree/proc"
# The machine's own apt fetches (it knows proxies, certificates and names), dpkg runs in the tree.
export APT_CONFIG="$work/apt.conf"
say 'Fetching the package lists.'
apt-get update
for name in $left_out; do
    mkdir -p "$work/$name/DEBIAN"
    printf '%s\n' "Package: $name" 'Version: 99' 'Architecture: all' 'Maintainer: nobody <nobody@localhost>' \
        'Description: empty, since this image does not need it' >"$work/$name/DEBIAN/control"
    dpkg-deb --root-owner-group --build "$work/$name" "$tree/var/cache/$name.deb"
    chroot "$tree" dpkg --install "/var/cache/$name.deb"
    rm "$tree/var/cache/$name.deb"
done
say 'Applying updates.'
apt-get dist-upgrade
say 'Installing the tools, Python, NumPy, SciPy and SymPy.'
apt-get install $packages
apt-get clean
say 'Checking and cleaning up.'
# Bytecode for all that can be imported, so that no sandbox has to make it. Debian's packages have done most of it.
chroot "$tree" python3 -m compileall -q /usr/lib/python3 >/dev/null 2>&1 || true
chroot "$tree" python3 -c 'import ipykernel, numpy, scipy, sympy; print("ipykernel", ipykernel.__version__)'
umount -l "$tree/proc"
umount -l -R "$tree/dev"
rm -rf "$tree/dev"
mkdir -m 755 "$tree/dev"
chown -hR 0:0 "$tree"
"""
_STAGES = {
    "I: Retrieving InRelease": "Fetching the archive's index.",
    "I: Retrieving ": "Fetching the base system.",
    "I: Extracting ": "Unpacking the base system.",
    "I: Installing core ": "Installing the base system.",
}
_APT_CONF = """
Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{sources}";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "{tree}/var/lib/apt";
Dir::State::status "{tree}/var/lib/dpkg/status";
Dir::Cache "{tree}/var/cache/apt";
Dir::Log "{tree}/var/log/apt";
DPkg::Chroot-Directory "{tree}";
DPkg::Options {{ "--force-unsafe-io"; "--force-confold"; {excluded} "--path-include=/usr/share/doc/*/copyright"; }};
DPkg::Use-Pty "false";
APT::Install-Recommends "false";
APT::Get::Assume-Yes "true";
APT::Sandbox::User "root";
quiet "1";
{fetching}
Acquire::Languages "none";
Acquire::IndexTargets::deb-src::Sources::DefaultEnabled "false";
Acquire::Retries "3";
Acquire::http::Timeout "60";
Acquire::https::Timeout "60";
"""


def build_base(tree: Path, *, work: Path, log: Path, hold: int, progress: Callable[[str], None]) -> None:
    """Make the root directory; one to two minutes. See ``images.Recipe``.

    Raises:
        SetupError: If this machine cannot build it, or a step fails; the error says why and where the log is.
    """
    namespace = _namespace()
    archive = find_archive(Path("/etc/apt"), machine_codename())
    proxies = _write_apt_conf(work, tree, archive)
    options = ["--no-check-gpg"] if archive.trusted else ["--force-check-gpg"]
    if archive.keyring is not None:
        options.append(f"--keyring={archive.keyring}")
    arguments = (str(tree), str(work), archive.suite, archive.mirror, _LEFT_OUT, _PACKAGES.strip(), *options)
    env = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", **proxies}
    env |= {"DEBIAN_FRONTEND": "noninteractive", "DEBCONF_NONINTERACTIVE_SEEN": "true"}
    said: set[str] = set()

    def on_line(line: str) -> None:
        if (stage := _stage(line)) and stage not in said:
            said.add(stage)
            progress(stage)

    _run((*namespace, "/bin/sh", "-c", _SCRIPT, "build", *arguments), env=env, hold=hold, log=log, on_line=on_line)
    _clean(tree)


def remove_as_owner(path: Path) -> None:
    """Remove what an ordinary user's killed build left: files of that user's subordinate ids."""
    with contextlib.suppress(SetupError):
        subprocess.run([*_namespace(), "rm", "-rf", "--", str(path)], capture_output=True, check=False, timeout=300.0)


def _namespace() -> tuple[str, ...]:
    """What to put before a command that may do all that a build needs, and that dies with us."""
    for program, package in _NEEDED.items():
        if shutil.which(program, path=_PATH) is None:
            raise SetupError(
                f"Building the base image needs {program}, which is not installed.",
                mend=f"Run `apt-get install {package}` as root, or use the image `host` with runtime bubblewrap.",
            )
    tied = ("setpriv", "--pdeathsig", "KILL", "unshare")
    if os.geteuid() == 0:
        return (*tied, *_NAMESPACES, "--")
    test = ["unshare", *_USER_NAMESPACE, *_NAMESPACES, "--", "true"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"Building the base image needs root, or a user namespace with subordinate ids ({done.stderr.strip()}).",
            mend="Ask for the package `uidmap` and for a range of ids in /etc/subuid and /etc/subgid, or use the image "
            "`host` with runtime bubblewrap.",
        )
    return (*tied, *_USER_NAMESPACE, *_NAMESPACES, "--")


def _write_apt_conf(work: Path, tree: Path, archive: Archive) -> dict[str, str]:
    """Write apt's settings: this machine's for fetching, none of its others. Returns debootstrap's proxy variables."""
    sources = work / "sources.list.d"
    sources.mkdir()
    for number, (kind, text) in enumerate(archive.sources):
        (sources / f"{number}.{kind}").write_text(text)
    dump = subprocess.run(
        ["apt-config", "dump"], capture_output=True, text=True, check=False, env={"PATH": _PATH}
    ).stdout
    not_ours = re.compile(r"(?!Acquire::)|Acquire::(IndexTargets|Languages|Changelogs)")
    text = _APT_CONF.format(
        sources=sources,
        tree=tree,
        excluded=" ".join(f'"--path-exclude=/{folder}/*";' for folder in _EXCLUDED.split()),
        fetching="\n".join(line for line in dump.splitlines() if not not_ours.match(line)),
    )
    (work / "apt.conf").write_text(text)
    names = ("http_proxy", "https_proxy", "no_proxy")
    proxies = {name: value for name, value in os.environ.items() if name.lower() in names}
    if found := re.search(r'^Acquire::http::Proxy "([^"]+)";', dump, re.MULTILINE):
        proxies.setdefault("http_proxy", found[1])
    return proxies


def _run(argv: tuple[str, ...], *, env: dict[str, str], hold: int, log: Path, on_line: Callable[[str], None]) -> None:
    """Run it to its end, with all it prints going into the log as well.

    Raises:
        SetupError: If it fails, or says nothing for ten minutes.
    """
    tail: list[str] = []
    pending = b""
    silent = False
    process = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(hold,),
        cwd="/",
    )
    assert process.stdout is not None
    fd = process.stdout.fileno()
    with process, log.open("wb") as out:
        try:
            while not (silent := not select.select([fd], [], [], _SILENCE_S)[0]):
                data = os.read(fd, 65536)
                if not data:
                    process.wait()
                    break
                out.write(data)
                *lines, pending = (pending + data).split(b"\n")
                for line in (line.decode("utf-8", "replace").strip() for line in lines):
                    on_line(line)
                    tail = [*tail[-5:], line] if line else tail
        finally:
            if process.poll() is None:
                process.kill()
                while os.read(fd, 65536):  # Until all have closed it: then nothing of the build is alive any more.
                    pass
    if silent or process.returncode != 0:
        why = f"was silent for {_SILENCE_S:g} s" if silent else f"failed with exit code {process.returncode}"
        raise SetupError(
            f"Building the base image {why}; it said last:\n  " + "\n  ".join(tail) + "\n",
            mend=f"All that it said is in {log}.",
        )


def _stage(line: str) -> str | None:
    """The sentence for a line that begins a stage."""
    if line.startswith("## "):
        return line[3:]
    return next((sentence for start, sentence in _STAGES.items() if line.startswith(start)), None)


def _clean(tree: Path) -> None:
    """Take out what is not needed, what is of this machine and what differs from build to build; set the modes."""
    for name in _EXCLUDED.split():
        _remove_all_but_licences(tree / name)
    for pattern in _CLEANED.split():
        for path in list(tree.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for name, text in _NEUTRAL.items():
        # Away first: it may be a link, which would be followed to a file of this machine.
        (tree / name).unlink(missing_ok=True)
        (tree / name).write_text(text)
    shadow = tree / "etc/shadow"
    without_days = re.sub(r"^(\w+:[^:]*):\d+:", r"\1::", shadow.read_text(), flags=re.MULTILINE)
    shadow.write_text(without_days)
    for folder, _, files in os.walk(tree):
        _set_mode(Path(folder), 0o755)
        for file in files:
            _set_mode(Path(folder, file), 0o644)
    for name, mode in _OPEN_FOLDERS.items():
        (tree / name).mkdir(exist_ok=True)
        (tree / name).chmod(mode)
    (tree / "run/prorl").mkdir()


def _set_mode(path: Path, least: int) -> None:
    """Readable to all, so that one user's store can serve another, and without set-id bits, a danger on the host."""
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        wanted = (stat.S_IMODE(mode) | least) & ~(stat.S_ISUID | stat.S_ISGID)
        path.chmod(wanted | (0o111 if wanted & 0o111 else 0))


def _remove_all_but_licences(folder: Path) -> None:
    for here, _, files in os.walk(folder, topdown=False):
        for file in files:
            if file != "copyright":
                Path(here, file).unlink()
        with contextlib.suppress(OSError):  # Not empty.
            Path(here).rmdir()
