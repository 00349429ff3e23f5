"""Fixtures. Real parts: Apptainer, bubblewrap and images are installed by `scripts/setup test`; a missing one fails the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

from prorl_env.config import Paths
from prorl_env.llm.demo_model import ensure_demo_model
from prorl_env.remote.images import ImageStore

RUNTIMES = ["apptainer", "bubblewrap"]
"""Every test that takes the fixture ``runtime`` runs on each of these."""


@pytest.fixture(scope="session")
def paths() -> Paths:
    return Paths.from_env()


@pytest.fixture(scope="session")
def store(paths: Paths) -> ImageStore:
    return ImageStore(paths.home)


@pytest.fixture(scope="session")
def base_image(store: ImageStore) -> Path:
    """The root directory of the image ``base``; built if it is not there, which takes a minute or two."""
    return store.build("base", progress=print).path


@pytest.fixture(scope="session")
def host_image(store: ImageStore) -> Path:
    return store.build("host", progress=print).path


@pytest.fixture(scope="session")
def demo_model(paths: Paths) -> Path:
    """The folder of the demo model; made if it is not there, which takes some seconds."""
    return ensure_demo_model(paths.home, progress=print)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, base_image: Path) -> str:
    """Each runtime in turn, with the base image in the store."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party task data, which is not part of the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("there is no third-party task data in ../shared/data beside the repository")
    return folder


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a path short enough for sockets, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
