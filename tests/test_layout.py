"""The shape of the repository: who may import whom, what is public, and what the wheel holds."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import prorl_env

ROOT = Path(__file__).resolve().parents[1]
CORE = {"errors", "types", "config", "spaces", "portal", "_version"}
# package or module -> what of ours it may import, besides itself
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors"},
    "spaces": set(),
    "portal": set(),
    "_version": set(),
    "registration": {"errors", "_version"},
    "remote": CORE,
    "llm": {"errors", "types", "config"},
    "envs": CORE | {"remote"},
    "wrappers": {"types", "spaces", "errors"},
    "policies": CORE | {"llm", "envs"},
    "trajectories": {"errors", "types"},
    "viewer": {"errors", "types", "_version"},
    "rollout": CORE | {"envs", "policies"},
    "testing": CORE | {"remote"},
    "data": set(),
    "benchmarks": CORE | {"remote", "envs"},
}
FREE = {"cli", ""}  # the command line and the package's own __init__ stand above everything
# What envs may see of remote: the client's side, never the server's.
SERVER_SIDE = {
    "server",
    "local",
    "spawn",
    "spawner",
    "bash",
    "kernel",
    "apptainer",
    "bubblewrap",
    "images",
    "janitor",
    "node",
}


def sources() -> dict[str, Path]:
    found = {}
    for folder in ("prorl_env", "envs", "remote", "wrappers", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if any(part.is_symlink() for part in path.parents if part != ROOT and ROOT in part.parents):
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "prorl_env" else ("prorl_env", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == "prorl_env"}


def test_imports_go_one_way() -> None:
    wrong = []
    names = set(sources())
    for module, path in sources().items():
        owner = [*module.split("."), ""][1]
        if owner in FREE:
            continue
        assert owner in ALLOWED, f"say in this test what prorl_env.{owner} may import"
        for name in imports_of(path) & names:
            target = [*name.split("."), ""][1]
            if target not in {owner, *ALLOWED[owner], ""} or (target == "" and name != "prorl_env"):
                wrong.append(f"{module} imports {name}")
            if owner == "envs" and target == "remote" and name.split(".")[-1] in SERVER_SIDE:
                wrong.append(f"{module} imports {name}, which is the node server's side")
    assert wrong == []


def test_the_spawner_needs_the_standard_library_alone() -> None:
    path = ROOT / "remote" / "spawner.py"
    assert imports_of(path) == set()
    roots = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
    }
    assert roots <= sys.stdlib_module_names


def test_no_module_is_longer_than_500_lines() -> None:
    assert [str(path) for path in sources().values() if len(path.read_text().splitlines()) > 500] == []


@pytest.mark.parametrize("folder", ["envs", "remote", "wrappers", "benchmarks"])
def test_the_top_level_folders_cannot_be_imported_by_their_own_name(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"import prorl_env.{folder}, not {folder}" in done.stderr


@pytest.mark.parametrize("folder", ["envs", "remote", "wrappers", "benchmarks"])
def test_the_links_lead_to_the_top_level_folders(folder: str) -> None:
    link = ROOT / "prorl_env" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def public_modules() -> list[str]:
    return [name for name, path in sources().items() if "__all__" in path.read_text()]


@pytest.mark.parametrize("name", public_modules())
def test_all_names_exactly_what_is_there(name: str) -> None:
    if name.endswith("spawner"):
        pytest.fail("the spawner is a program; it has no __all__")
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__, key=_as_ruff_sorts)
    for export in module.__all__:
        assert hasattr(module, export), f"{name}.__all__ names {export}, which is not there"


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    constant = name.isupper() and len(name) > 1
    return (0 if constant else 1 if name[0].isupper() else 2, name)


def test_the_package_exports_what_it_says() -> None:
    shown = {name for name in vars(prorl_env) if not name.startswith("_")} - {
        module.name for module in pkgutil.iter_modules(prorl_env.__path__)
    }
    assert shown | {"errors", "__version__"} == set(prorl_env.__all__) | {"register_all"}


def test_import_is_light() -> None:
    heavy = ["torch", "transformers", "math_verify", "sympy", "jupyter_client", "zmq", "typer", "rich", "jinja2"]
    code = f"import sys, prorl_env; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_wheel_holds_the_tree(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {"prorl_env/py.typed"}
    for folder in ("prorl_env", "envs", "remote", "wrappers", "benchmarks"):
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.split():
            if not (ROOT / name).is_symlink():
                wanted.add(name if folder == "prorl_env" else f"prorl_env/{name}")
    assert packed == wanted
