"""The image store: unpacked root directories, addressed by their content, with names that point at them.

::

    home/store/sha256-<digest>/    a root directory, never changed once it is there
    home/store/.work-<pid>-<…>/    a build in progress; its owner holds a lock on it, which ends with its life
    home/store/.lock, .lock-<name> locks: of the layout, for moments; of one image, while it is built
    home/images/<name>             a link to ../store/sha256-<digest>
    home/images/host               no root directory but what stands in for one; see ``hostroot.py``
    home/logs/build-<name>.log     what the last build printed

Names appear by an atomic rename when all is in place, so nobody ever sees a half-made image, and any process may be
killed at any time. Images of the same content are one directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from prorl_env.errors import ImageNotFound, SetupError, UsageError
from prorl_env.remote.baseroot import BASE, build_base, remove_as_owner
from prorl_env.remote.hostroot import HOST, build_host
from prorl_env.remote.processes import start_time
from prorl_env.remote.spawner import remove_tree

__all__ = ["RECIPES", "ImageInfo", "ImageStore", "Recipe", "tree_digest"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PREFIX = "sha256-"
_WORK = ".work-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """What there is to know about an image."""

    name: str
    digest: str | None
    """Of its content, see ``tree_digest``; ``None`` for ``host``, which is made of this machine's own files."""
    size_bytes: int
    """On disk."""
    created: float
    """When it got its name; seconds since 1970."""
    path: Path
    """The root directory."""


class Recipe(Protocol):
    """How to make the root directory of an image."""

    def __call__(self, tree: Path, *, work: Path, log: Path, hold: int, progress: Callable[[str], None]) -> None:
        """Make it.

        Args:
            tree: Where; does not exist yet.
            work: A private folder for scratch files, removed afterwards.
            log: File for what the programs print.
            hold: A descriptor to pass to every process that may outlive this one: until all have closed it, the work
                folder is not taken for abandoned.
            progress: To be called with a short sentence at each new stage.

        Raises:
            SetupError: If it cannot be made; the error says why.
        """
        ...


RECIPES: Mapping[str, Recipe] = MappingProxyType({BASE: build_base})
"""Images that every store knows how to make, besides ``host``."""


class ImageStore:
    """The images of one node. Keeps no state of its own: any number of processes may use the same ``home``.

    Args:
        home: See the module's text. Made when something is first put into it.
        recipes: What ``build`` can make, by image name.
    """

    def __init__(self, home: Path, *, recipes: Mapping[str, Recipe] = RECIPES) -> None:
        self.home = home.absolute()
        self._recipes = recipes
        self._images = self.home / "images"
        self._store = self.home / "store"

    def names(self) -> frozenset[str]:
        """The names of all images there are."""
        try:
            return frozenset(name for name in os.listdir(self._images) if self._is_image(name))
        except OSError:
            return frozenset()

    def resolve(self, image: str) -> Path:
        """The root directory of an image.

        It stays the same directory, with the same content, when the name later comes to mean another image.

        Args:
            image: A name in the store, or the absolute path of a root directory that has a ``bash``.

        Raises:
            ImageNotFound: If there is no such image or directory; the error says what to do.
            UsageError: If it can be neither a name nor an absolute path.
        """
        if image.endswith(".sif") and not (Path(image).is_dir() if image.startswith("/") else image in self.names()):
            raise ImageNotFound(
                f"{image} is a SIF file, and sandboxes run from unpacked root directories.",
                mend=f"Unpack it with `apptainer build --sandbox DIR {image}` and give the absolute path of DIR.",
            )
        if image.startswith("/"):
            return _root_directory(Path(image))
        _check_name(image)
        if self._is_image(image):
            return (self._images / image).resolve()
        if image in self._buildable():
            mend = f"Run `prorl-env image build {image}`."
            raise ImageNotFound(f"The image `{image}` has not been built.", mend=mend)
        there = ", ".join(sorted(self.names())) or "none yet"
        raise ImageNotFound(f"There is no image `{image}` in {self.home}; there are: {there}.")

    def list(self) -> tuple[ImageInfo, ...]:
        """All images, by name."""
        found: list[ImageInfo] = []
        for name in sorted(self.names()):
            with contextlib.suppress(OSError, ImageNotFound):  # Removed meanwhile.
                found.append(self._info(name))
        return tuple(found)

    def add_tree(self, name: str, tree: Path) -> ImageInfo:
        """Move a root directory into the store and give it a name; the name may have meant another image before.

        ``tree`` is gone afterwards, unless it is an image's directory already. Nothing may write into it any more.

        Raises:
            UsageError: If the name cannot be; or ``tree`` is no root directory, cannot be read, or is on another file
                system.
            SetupError: If the store cannot be written.
        """
        _check_name(name)
        if name in (HOST, "auto"):
            raise UsageError(f"{name!r} cannot be the name of an image: it has a meaning of its own")
        _check_root_directory(tree)
        with self._writing():
            if tree.lstat().st_dev != self._store.stat().st_dev:
                raise UsageError(f"{tree} must be on the file system of {self._store}, so that it can be moved at once")
            digest = tree_digest(tree)
            target = self._store / f"{_PREFIX}{digest}"
            with self._work() as (work, _):
                (work / "link").symlink_to(Path("..", self._store.name, target.name))
                with _locked(self._store / ".lock"):
                    if not target.is_dir():
                        tree.rename(target)
                    elif not tree.samefile(target):
                        tree.rename(work / "double")
                    (work / "link").replace(self._images / name)
            return self._info(name)

    def build(self, name: str, *, progress: Callable[[str], None] = lambda _: None, rebuild: bool = False) -> ImageInfo:
        """Make one of the images that there is a recipe for, such as ``base`` or ``host``; each takes a minute or two.

        One that is there already is left as it is. When several processes ask at once, one builds and the others wait.

        Args:
            name: The image.
            progress: Gets a short sentence at each stage.
            rebuild: Build even if it is there.

        Raises:
            UsageError: If there is no recipe of that name.
            SetupError: If this machine cannot build it, or the build fails; the error says why, and where the log is.
        """
        if name not in self._buildable():
            raise UsageError(f"there is no recipe for an image {name!r}; there are: {', '.join(self._buildable())}")
        with self._writing():
            if not self._is_image(name) or rebuild:
                waiting = f"Another process is building {name}: waiting for it."
                with _locked(self._store / f".lock-{name}", lambda: progress(waiting)):
                    if not self._is_image(name) or rebuild:
                        self._build(name, progress)
            return self._info(name)

    def remove(self, name: str) -> None:
        """Take a name away, and the directory behind it unless another name points there.

        Sandboxes that run on it lose the files they have not opened yet.

        Raises:
            ImageNotFound: If there is no such image.
            SetupError: If the store cannot be written.
        """
        if name.startswith("/"):
            raise UsageError(f"{name} is not in the store: only an image's name can be removed")
        path = self.resolve(name)
        with self._writing(), self._work() as (work, _), _locked(self._store / ".lock"):
            (self._images / name).rename(work / "name")
            in_use = {self._target(other) for other in self.names()}
            if path.parent == self._store.resolve() and path.name not in in_use:
                path.rename(work / "tree")

    # ------------------------------------------------------------------ helpers

    def _buildable(self) -> tuple[str, ...]:
        return (*self._recipes, HOST)

    def _is_image(self, name: str) -> bool:
        path = self._images / name
        return _NAME.fullmatch(name) is not None and path.is_dir() and (path.is_symlink() or name == HOST)

    def _target(self, name: str) -> str:
        return Path(os.readlink(self._images / name)).name if name != HOST else ""

    def _info(self, name: str) -> ImageInfo:
        path = self.resolve(name)
        return ImageInfo(
            name=name,
            digest=path.name.removeprefix(_PREFIX) if path.name.startswith(_PREFIX) else None,
            size_bytes=_size_on_disk(path),
            created=(self._images / name).lstat().st_mtime,
            path=path,
        )

    def _build(self, name: str, progress: Callable[[str], None]) -> None:
        with self._work() as (work, hold):
            tree = work / name
            if name == HOST:
                progress("Installing IPython, NumPy, SciPy and SymPy for the image host.")
                build_host(tree)
                with contextlib.suppress(FileNotFoundError):
                    (self._images / name).rename(work / "old")
                tree.rename(self._images / name)
            else:
                logs = self.home / "logs"
                logs.mkdir(exist_ok=True)
                self._recipes[name](tree, work=work, log=logs / f"build-{name}.log", hold=hold, progress=progress)
                _flush(hold)
                self.add_tree(name, tree)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Make the folders, and turn what the system refuses into our errors."""
        try:
            self._images.mkdir(parents=True, exist_ok=True)
            self._store.mkdir(exist_ok=True)
            yield
        except OSError as error:
            raise SetupError(
                f"the image store {self.home} cannot be used: {error}.",
                mend="Set PRORL_ENV_HOME to a folder of yours with some space.",
            ) from error

    @contextlib.contextmanager
    def _work(self) -> Iterator[tuple[Path, int]]:
        """A private folder that is gone afterwards, and the descriptor that holds its lock.

        Whoever can get the lock knows that the owner, and every process that got the descriptor from it, is dead: pids
        would prove less, and nothing across containers.
        """
        path = self._store / f"{_WORK}{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(4)}"
        with _locked(self._store / ".lock"):
            for other in self._store.glob(f"{_WORK}*"):
                _remove_if_abandoned(other)
            path.mkdir(mode=0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield path, fd
        finally:
            remove_tree(str(path))
            if path.exists():
                remove_as_owner(path)
            os.close(fd)


def tree_digest(tree: Path) -> str:
    """SHA-256, as hexadecimal digits, of a root directory's content.

    What is hashed is the text ``prorl-image-1`` and then, for each entry of the tree (the root itself is ``.``) in the
    order of the bytes of its path relative to the root: a letter for its type (``d f l p s c b``), its permission bits
    in octal (``-`` for a link), that path, and its content (SHA-256 in hexadecimal of a file, a link's target,
    ``major:minor`` of a device, else nothing). Each of these ends with a zero byte. Owner, times, hard links and
    extended attributes are left out: they do not matter in a sandbox, and differ where the same tree is unpacked by
    another user or on another day.

    Raises:
        UsageError: If something in it cannot be read.
    """
    total = hashlib.sha256(b"prorl-image-1\0")
    root = os.fsencode(tree)
    try:
        for path in sorted([b".", *_paths_below(root)]):
            full = os.path.join(root, path)
            facts = os.lstat(full)
            letter, content = _content(full, facts)
            mode = b"-" if letter == b"l" else b"%o" % stat.S_IMODE(facts.st_mode)
            total.update(b"%b\0%b\0%b\0%b\0" % (letter, mode, path, content))
    except OSError as error:
        raise UsageError(f"{tree} cannot be read: {error}") from error
    return total.hexdigest()


def _content(path: bytes, facts: os.stat_result) -> tuple[bytes, bytes]:
    match stat.S_IFMT(facts.st_mode):
        case stat.S_IFDIR:
            return b"d", b""
        case stat.S_IFREG:
            with open(path, "rb") as file:
                return b"f", hashlib.file_digest(file, "sha256").hexdigest().encode()
        case stat.S_IFLNK:
            return b"l", os.readlink(path)
        case stat.S_IFIFO:
            return b"p", b""
        case stat.S_IFSOCK:
            return b"s", b""
        case kind:
            device = b"%d:%d" % (os.major(facts.st_rdev), os.minor(facts.st_rdev))
            return (b"c" if kind == stat.S_IFCHR else b"b"), device


def _paths_below(root: bytes) -> Iterator[bytes]:
    """Relative paths of all entries."""
    folders = [b""]
    while folders:
        folder = folders.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                yield path
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)


def _size_on_disk(tree: Path) -> int:
    root = os.fsencode(tree)
    # By inode: a hard link takes no space of its own.
    return sum({facts.st_ino: facts.st_blocks * 512 for facts in _facts(root)}.values())


def _facts(root: bytes) -> Iterator[os.stat_result]:
    for path in (b".", *_paths_below(root)):
        yield os.lstat(os.path.join(root, path))


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} is not an image: neither a name (letters, digits, '.', '_' and '-') nor an absolute path"
        )


def _root_directory(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    if not real.is_dir():
        raise ImageNotFound(f"There is no directory {path}.")
    if real == Path("/"):
        raise UsageError("the directory / is this machine itself and cannot be an image; use the image `host`")
    if not _has_bash(real):
        raise ImageNotFound(f"{path} is not the root directory of an image: it has no bin/bash.")
    return real


def _check_root_directory(tree: Path) -> None:
    if tree.is_symlink() or not tree.is_dir():
        raise UsageError(f"{tree} is not a directory")
    if not _has_bash(tree):
        raise UsageError(f"{tree} is not the root directory of an image: it has no bin/bash")


def _has_bash(root: Path) -> bool:
    # lexists: a link may be absolute, and then means something inside only.
    return any(os.path.lexists(root / name) for name in ("bin/bash", "usr/bin/bash"))


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock, which ends with the process, however it dies. ``waiting`` is called first if somebody has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_if_abandoned(work: Path) -> None:
    try:
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # Its owner lives.
    else:
        remove_tree(str(work))
        if work.exists():
            remove_as_owner(work)
    finally:
        os.close(fd)


def _flush(fd: int) -> None:
    """Have the file system write everything, so that after a power cut a digest does not stand over empty files."""
    ctypes.CDLL(None).syncfs(fd)
