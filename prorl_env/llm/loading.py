"""Finding and loading a causal language model of ``transformers``: every way it can fail becomes one sentence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prorl_env.errors import ModelError, SetupError
from prorl_env.llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["context_length", "end_ids", "load_model"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")

HUB_TIMEOUT_S = 5.0
"""How long the model hub may take to say whether it has a model."""


def load_model(model: str | Path, *, dtype: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder or by its name on the hub, without a word on the terminal.

    A name is looked for in the hub's cache on this machine first, then on the hub, which is asked once and not again
    and again.

    Raises:
        ModelError: If there is no such folder or name, or what is there cannot be used.
        SetupError: If torch or ``transformers`` is not installed.
    """
    try:
        import torch
        import transformers  # noqa: F401 - tried here so that the error has a mend
    except ImportError as error:
        mend = "Install the extra: pip install 'prorl-env[transformers]'."
        raise SetupError(f"Running a model in this process needs the package {error.name}.", mend=mend) from None
    torch_dtype = getattr(torch, dtype)
    with _quiet():
        folder = _folder(model)
        if folder is not None:
            _check_folder(folder)
            return _read(str(folder), torch_dtype, local=True)
        name = str(model)
        if _in_cache(name):
            try:
                return _read(name, torch_dtype, local=True)
            except ModelError:
                pass  # only in part: the hub has to give the rest
        _ask_hub(name)
        return _read(name, torch_dtype, local=False)


def context_length(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens that the model can take.

    Raises:
        ModelError: If neither the model nor the tokenizer says.
    """
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokenizer.model_max_length
    if stated > 10**9:  # what tokenizers say for "unknown"
        raise ModelError("The model does not say how long its context is (max_position_embeddings in config.json).")
    return int(stated)


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a turn, as the model's generation settings and its tokenizer name them."""
    stated = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [stated] if isinstance(stated, int) else list(stated or [])
    own = tokenizer.eos_token_id
    return frozenset([*ids, own] if isinstance(own, int) else ids)


def _folder(model: str | Path) -> Path | None:
    """The folder that is meant, or nothing if it is a name on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path} is a file: give the folder that holds the model.")
    if isinstance(model, Path) or str(model).startswith((".", "/", "~")) or str(model).count("/") > 1:
        raise ModelError(f"There is no folder {path}.")
    return None


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder in the format of transformers: it has no config.json.")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"{folder} has no weights: no *.safetensors and no pytorch_model*.bin file.")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer: no tokenizer.json file.")


def _in_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        raise ModelError(f"{name!r} is neither a folder here nor a possible name on the model hub.") from None


def _ask_hub(name: str) -> None:
    """Ask once whether the hub has the model: loading itself would try for half a minute per file."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    missing = f"{name!r} is no folder here and not (or not completely) in the model hub's cache on this machine"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise ModelError(f"{name!r} is no folder here, and the model hub has no model of that name for you.") from None
    except OfflineModeIsEnabled:
        raise ModelError(f"{missing}, and offline mode is on.") from None
    except Exception as error:  # whatever its HTTP client raises
        raise ModelError(f"{missing}, and the hub cannot be reached ({_sentence(error)}).") from None


def _read(source: str, dtype: Any, *, local: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loader: Any = AutoModelForCausalLM  # its annotations do not know of output_loading_info
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except Exception as error:
        raise ModelError(f"The tokenizer of {source} cannot be loaded: {_sentence(error)}.") from error
    try:
        model, report = loader.from_pretrained(
            source, dtype=dtype, local_files_only=local, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:
        raise ModelError(f"The model {source} cannot be loaded: {_sentence(error)}.") from error
    absent, misfits = sorted(report["missing_keys"]), sorted(entry[0] for entry in report["mismatched_keys"])
    # transformers has filled both with random numbers
    if absent:
        raise ModelError(f"The weights of {source} lack {len(absent)} tensors, {absent[0]} for one.")
    if misfits:
        raise ModelError(f"The weights of {source} do not fit its config.json: {misfits[0]} has another shape.")
    model.eval()
    _try_out(source, model)
    return model, tokenizer


def _try_out(source: str, model: Any) -> None:
    """Decode two short rows of different length: what the model cannot do shall be said now."""
    import torch

    from prorl_env.llm.decoding import Batch, Row

    params = SamplingParams(max_tokens=2, temperature=0)
    batch = Batch(model)
    try:
        with torch.inference_mode():
            for prompt in ((0,), (0, 0)):
                batch.add(Row(prompt, params, max_tokens=2, end_ids=frozenset()))
            batch.step()
    except Exception as error:
        raise ModelError(f"{source} cannot be sampled as a causal language model: {_sentence(error)}.") from error


def _sentence(error: Exception) -> str:
    """The first line of an error that says something, at most 300 characters, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".:!")


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, log lines and progress bars of ``transformers`` and the hub's client, until the block ends."""
    import huggingface_hub.utils.logging as hub_logging
    import transformers.utils.logging as transformers_logging

    hub: Any = hub_logging  # both are only partly annotated
    logging: Any = transformers_logging

    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        hub.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(levels[0])
            hub.set_verbosity(levels[1])
            if bars:
                logging.enable_progress_bar()
