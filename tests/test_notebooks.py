"""Every notebook runs from its first cell to its last, in a kernel of this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from helpers import ROOT, processes_with, wait_until
from nbclient import NotebookClient


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook packages themselves
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_runs(
    path: Path, base_image: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRORL_ENV_RUN", str(short_dir))
    # The kernel named python3 has to be this interpreter's, whatever else is installed for the user.
    kernel = tmp_path / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernel / "kernel.json").write_text(f'{{"argv": {argv}, "display_name": "Python 3", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert [output for output in outputs if output.output_type == "error"] == []
    shown = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "'outcome': 'ok'" in shown
    assert wait_until(lambda: processes_with(str(short_dir)) == [], within_s=10), "the notebook left something running"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
