"""The process that starts every other process of a node server, and outlives it just long enough to clean up.

Run as a file (``python -I -S spawner.py FD RUN_DIR``) with the standard library only, so that it stays small: a fork
of it takes a fraction of a millisecond, where a fork of the node server would take several and is not safe beside
ZeroMQ's threads.

Why a process of its own:

* It is single-threaded, so ``PR_SET_PDEATHSIG`` means "when the spawner dies", and joining a user namespace is allowed.
* It is the parent of every sandbox, so a pid cannot be recycled behind our back before its exit has been reported.
* When the node server dies, by whatever signal, its socket reads as closed here: the spawner kills what it started,
  waits for it, removes the run directory and exits. If the spawner itself is killed, the parent-death signal takes the
  sandboxes down; only then is a directory left, for the next server's janitor.

Protocol, over a ``SOCK_SEQPACKET`` pair, one JSON object a message: ``spawn`` (with the new process's descriptors
beside it as ``SCM_RIGHTS``) is answered by ``started`` or ``failed``, later followed by ``exited``; ``kill`` is not
answered.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import termios
import time
from typing import Any, NoReturn

MAX_MESSAGE = 1 << 20
START_S = 3.0
"""How long a start may take. It is the only thing that the spawner waits for."""
NAMESPACES = {"user": 0x10000000, "mnt": 0x00020000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000,
              "uts": 0x04000000, "cgroup": 0x02000000}  # fmt: skip
CLONE_PARENT = 0x00008000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine)

# PyDLL, not CDLL: the call must not let go of the interpreter lock around a fork.
libc = ctypes.PyDLL(None, use_errno=True)


def main() -> None:
    """Serve until the node server's end of the socket closes."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    run_dir = sys.argv[2]
    os.setsid()
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    Spawner(sock, run_dir).serve()


class Spawner:
    """Starts, watches and kills processes for one node server."""

    def __init__(self, sock: socket.socket, run_dir: str) -> None:
        self._sock = sock
        self._run_dir = run_dir
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, request id)

    def serve(self) -> None:
        """Loop over requests and exits."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._sock.fileno():
                    self._reap(fd)
                elif not self._handle():
                    self._end()
                    return

    def _handle(self) -> bool:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(16 * 4))
        except ConnectionError:
            return False
        if not data:
            return False
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        request = json.loads(data)
        try:
            if request["op"] == "kill":
                self._kill(request["pid"], request["signal"])
            else:
                self._spawn(request, list(fds))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = start(request, fds)
        except OSError as error:
            self._send({"event": "failed", "id": request["id"], "error": str(error)})
            return
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, request["id"])
        self._poll.register(pidfd, select.POLLIN)
        self._send({"event": "started", "id": request["id"], "pid": pid})

    def _reap(self, pidfd: int) -> None:
        pid, request_id = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send({"event": "exited", "id": request_id, "status": os.waitstatus_to_exitcode(status)})
        self._end_orphans()

    def _end_orphans(self) -> None:
        """A runtime that is killed early may leave its half-made sandbox; as the subreaper we inherit it.

        It is reaped like any other child, never waited for here: it may have to wait for processes that joined it.
        """
        known = {pid for pid, _ in self._children.values()}
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            pids = [int(word) for word in file.read().split()]
        for pid in pids:
            if pid not in known:
                pidfd = os.pidfd_open(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                self._children[pidfd] = (pid, 0)
                self._poll.register(pidfd, select.POLLIN)

    def _kill(self, pid: int, number: int) -> None:
        # Only a child that is not reaped yet: its pid is still its own.
        if any(pid == child for child, _ in self._children.values()):
            os.kill(pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # The server is gone; the closed socket is noticed by the loop.
            self._sock.send(json.dumps(message).encode())

    def _end(self) -> None:
        self._poll.unregister(self._sock)
        deadline = time.monotonic() + 5.0
        for pidfd in self._children:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        while self._children and time.monotonic() < deadline:
            for fd, _ in self._poll.poll(100):
                self._reap(fd)
        remove_tree(self._run_dir)


def start(request: dict[str, Any], fds: list[int]) -> int:
    """Fork and exec; returns the pid as the host sees it.

    Request keys: ``argv``, ``env``, ``fds`` (target numbers, in the order of the descriptors passed), ``cwd`` (or
    None), ``join`` (pid of a process whose namespaces to enter, or None), ``stage`` (what to do in a user and mount
    namespace of its own, or None for none), ``terminal`` (index of the target that becomes the controlling terminal,
    or None), ``limits`` (name of an rlimit -> value), ``path`` (directories to look for argv[0] in).

    Raises:
        OSError: If the process cannot be started; its text says which step failed.
    """
    errors_in, errors_out = os.pipe()  # CLOEXEC: closes by itself when the exec succeeds
    pid = os.fork()
    if pid == 0:
        os.close(errors_in)
        if request["join"] is None:
            become(request, fds, errors_out)
        join_and_clone(request, fds, errors_out)
    os.close(errors_out)
    said, in_time = read_to_end(errors_in, START_S)
    if request["join"] is not None:
        # The one in between has done its work, unless it hangs as well.
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if said[:4] != b"PID ":
            raise OSError(said.decode(errors="replace") or "it did not get into the sandbox in time")
        number, _, said = said[4:].partition(b"\n")
        pid = int(number)
    if said or not in_time:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise OSError(said.decode(errors="replace") or "it did not start in time, or was stopped from inside")
    return pid


def read_to_end(fd: int, seconds: float) -> tuple[bytes, bool]:
    """What comes out of a pipe until its other ends are closed, and whether they were in time. Closes it.

    A process that joins a sandbox can be stopped by those inside; nobody else may have to wait for that.
    """
    said, deadline = b"", time.monotonic() + seconds
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return said, False
            data = os.read(fd, 4096)
            if not data:
                return said, True
            said += data
    finally:
        os.close(fd)


def join_and_clone(request: dict[str, Any], fds: list[int], errors_out: int) -> NoReturn:
    """Enter the namespaces of ``request["join"]`` and make a sibling there, so that the spawner is its parent."""
    try:
        # From inside, this process can be seen from now on. Nobody may look into it (its memory, environment and
        # descriptors are the host's) until it has become the program.
        check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        target = request["join"]
        flags = 0
        for name, flag in NAMESPACES.items():
            try:
                if os.stat(f"/proc/{target}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
                    flags |= flag
            except FileNotFoundError:
                pass
        if not flags & NAMESPACES["user"]:
            raise OSError(f"process {target} is not in a user namespace of its own")
        check(libc.setns(os.pidfd_open(target), flags), "setns")
        check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # A change of credentials has reset it.
        # A pid namespace holds from the next process on. CLONE_PARENT makes that a child of the spawner itself.
        pid = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        check(pid, "clone")
        if pid == 0:
            become(request, fds, errors_out, confined=True)
        os.write(errors_out, b"PID %d\n" % pid)
    except BaseException as error:
        os.write(errors_out, str(error).encode())
    os._exit(0)


def become(request: dict[str, Any], fds: list[int], errors_out: int, *, confined: bool = False) -> NoReturn:
    """Turn this process into the requested program, or report why not."""
    try:
        # First out of the way of all targets, then onto them: a source may be another one's target.
        base = max([*request["fds"], 2, *fds, errors_out]) + 1
        errors_out = fcntl.fcntl(errors_out, fcntl.F_DUPFD_CLOEXEC, base)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, base) for fd in fds]
        os.setsid()
        for fd, target in zip(parked, request["fds"], strict=True):
            os.dup2(fd, target, inheritable=True)
        close_others({*request["fds"], errors_out})
        if request["terminal"] is not None:
            fcntl.ioctl(request["fds"][request["terminal"]], termios.TIOCSCTTY, 0)
        for number in range(1, signal.NSIG):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        for name, value in request["limits"].items():
            set_limit(getattr(resource, f"RLIMIT_{name}"), value)
        if request["cwd"] is not None:
            os.chdir(request["cwd"])
        if request["stage"] is not None:
            set_stage(request["stage"])
        libc.syscall(SYS_KEYCTL, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: the host's keys stay out of reach
        if confined:
            give_up_privileges()
            check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        # The death signal is cleared by a change of credentials, so it comes last.
        check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        execute(request["argv"], request["env"], request["path"])
    except BaseException as error:
        os.write(errors_out, f"{request['argv'][0]}: {error}".encode())
    os._exit(127)


def execute(argv: list[str], env: dict[str, str], path: list[str]) -> None:
    """Exec ``argv``, looking in ``path`` unless its first word has a slash."""
    arguments = [os.fsencode(word) for word in argv]
    environment = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
    places = [argv[0]] if "/" in argv[0] else [f"{folder}/{argv[0]}" for folder in path]
    last: OSError = FileNotFoundError(2, "no such program")
    for place in places:
        try:
            os.execve(place, arguments, environment)
        except (FileNotFoundError, NotADirectoryError) as error:
            last = error
        except PermissionError as error:
            last = error
    raise last


def set_stage(steps: list[list[str]]) -> None:
    """Become root of a new user namespace with mounts of its own, and carry out ``steps`` there.

    A step is ``["mkdir", path]``, ``["mount", source, target, type, options]`` or ``["sysctl", name, value]``. Relative
    paths do not tell the sandbox where on the host things are. The mounts are gone with the last process that sees
    them.
    """
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(NAMESPACES["user"] | NAMESPACES["mnt"]), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    for step in steps:
        if step[0] == "mkdir":
            os.mkdir(step[1], 0o755)
        elif step[0] == "sysctl":
            with contextlib.suppress(FileNotFoundError), open(f"/proc/sys/{step[1]}", "w") as file:
                file.write(step[2])
        else:
            _, source, target, kind, options = (word.encode() for word in step)
            check(libc.mount(source, target, kind, 0, options), f"mount {step[3]}")


def give_up_privileges() -> None:
    """No capabilities, none to be had again: inside a user namespace we would hold all of them."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for number in range(64):
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # EINVAL: one past the last capability that this kernel knows
    libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    check(libc.syscall(SYS_CAPSET, header, data), "capset")


def set_limit(which: int, value: int) -> None:
    """Lower both the soft and the hard limit; one that is already lower stays."""
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def close_others(keep: set[int]) -> None:
    """Close every descriptor but ``keep``: nothing of the host's leaks into a sandbox."""
    at = 0
    for fd in sorted(keep):
        if at < fd:  # An empty range from 0 would close everything (CPython passes its end on as -1).
            os.closerange(at, fd)
        at = fd + 1
    os.closerange(at, 1 << 20)


def check(result: int, what: str) -> None:
    """Turn a C return value of -1 into an OSError."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def remove_tree(path: str) -> None:
    """Remove a directory tree that may hold folders without permissions (an overlay's work directory)."""

    def unlock(function: Any, name: str, _: Any) -> None:
        try:
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
            function(name)
        except OSError:
            pass

    for _ in range(3):
        shutil.rmtree(path, onerror=unlock)
        if not os.path.lexists(path):
            return


if __name__ == "__main__":
    main()
