"""The backend in this process, with real models: SmolLM2 and a tiny one with random weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from prorl_env.errors import BackendError, ConfigError, ModelError, StateError, UsageError
from prorl_env.llm import Generation, SamplingParams, TokenStream, TransformersBackend

T = TypeVar("T")

IM_START, IM_END = 1, 2
CONTEXT = 100_000
POISON = 7
"""A token at which the tiny model computes NaN."""
PROMPTS = [(1, 4093, 198, 104), (20,), (300, 17, 9000, 41, 5, 77, 1200, 33), (11, 12), (40000, 3, 3, 3, 3, 19)]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


@pytest.fixture(scope="module")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with random weights, a vocabulary of 49152 and the tokenizer of SmolLM2."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.6,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.get_input_embeddings().weight.data[POISON] = torch.nan
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(demo_model / name, folder)
    return folder


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()


def with_backend(model: Path, work: Callable[[TransformersBackend], Coroutine[Any, Any, T]], max_batch: int = 8) -> T:
    async def whole() -> T:
        async with TransformersBackend.load(model, max_batch=max_batch, threads=1) as backend:
            return await work(backend)

    return run(whole())


def together(model: Path, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[Generation]:
    async def work(backend: TransformersBackend) -> list[Generation]:
        return await asyncio.gather(*(backend.generate(*pair) for pair in zip(prompts, params, strict=True)))

    return with_backend(model, work)


def alone(model: Path, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[Generation]:
    async def work(backend: TransformersBackend) -> list[Generation]:
        return [await backend.generate(*pair) for pair in zip(prompts, params, strict=True)]

    return with_backend(model, work)


def close(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return len(left) == len(right) and left == pytest.approx(right, abs=2e-4)


# ---- what is sampled -------------------------------------------------------------------------------------------------


def test_greedy_gives_the_ids_that_transformers_gives(tiny_model: Path, reference: Any) -> None:
    import torch

    params = [SamplingParams(max_tokens=12, temperature=0)] * len(PROMPTS)
    for prompt, answer in zip(PROMPTS, together(tiny_model, PROMPTS, params), strict=True):
        ids = torch.tensor([prompt])
        whole = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert answer.token_ids == tuple(whole[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=0),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1),
        SamplingParams(max_tokens=12, temperature=0.7, top_k=20, seed=2),
        SamplingParams(max_tokens=12, temperature=1.3, top_p=0.8, seed=3),
        SamplingParams(max_tokens=12, temperature=3.0, top_p=0.99, seed=4),
        SamplingParams(max_tokens=12, temperature=0.9, top_p=0.6, top_k=50, seed=5),
        SamplingParams(max_tokens=12, temperature=1.0, top_p=1e-9, seed=6),
        SamplingParams(max_tokens=12, temperature=1.0, top_k=10**6, seed=7),
    ],
    ids=repr,
)
def test_logprobs_are_those_of_the_distribution_drawn_from(
    tiny_model: Path, reference: Any, params: SamplingParams
) -> None:
    """Compared with one pass over prompt and answer, and the warpers of transformers."""
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for prompt, answer in zip(PROMPTS, together(tiny_model, PROMPTS, [params] * len(PROMPTS)), strict=True):
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
        if params.temperature:
            logits = TemperatureLogitsWarper(float(params.temperature))(None, logits)
            logits = TopKLogitsWarper(params.top_k)(None, logits) if params.top_k else logits
            logits = TopPLogitsWarper(params.top_p)(None, logits) if params.top_p < 1 else logits
        expected = logits.log_softmax(-1)[range(len(answer.token_ids)), list(answer.token_ids)]
        assert close(answer.logprobs, tuple(expected.tolist()))


def test_draws_follow_the_distribution() -> None:
    import torch

    from prorl_env.llm.decoding import pick

    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)
    draws = [pick(logits, SamplingParams(), generator)[0] for _ in range(20_000)]
    shares = [draws.count(token) / len(draws) for token in range(4)]
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)
    kept = {pick(logits, SamplingParams(top_p=0.79), generator)[0] for _ in range(500)}
    assert kept == {0, 1}


def test_a_nucleus_wider_than_the_first_guess_is_found() -> None:
    import torch

    from prorl_env.llm.decoding import NUCLEUS_GUESS, pick

    flat = torch.zeros(NUCLEUS_GUESS * 8)
    _, logprob = pick(flat, SamplingParams(top_p=0.5), torch.Generator().manual_seed(0))
    assert logprob == pytest.approx(-torch.tensor(NUCLEUS_GUESS * 4.0).log().item(), abs=1e-3)


def test_the_same_seed_gives_the_same_answer_alone_and_in_company(tiny_model: Path) -> None:
    params = [SamplingParams(max_tokens=5 + 7 * index, seed=index) for index in range(len(PROMPTS))]
    first, second = alone(tiny_model, PROMPTS, params), alone(tiny_model, PROMPTS, params)
    assert first == second
    for one, other in zip(first, together(tiny_model, PROMPTS, params), strict=True):
        assert one.token_ids == other.token_ids
        assert close(one.logprobs, other.logprobs)


def test_other_seeds_give_other_answers(tiny_model: Path) -> None:
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in (1, 2, None, None)]
    answers = together(tiny_model, [PROMPTS[0]] * 4, params)
    assert len({answer.token_ids for answer in answers}) == 4


# ---- where it stops --------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_turn_and_is_in_the_ids_but_not_in_the_text(tiny_model: Path) -> None:
    async def work(backend: TransformersBackend) -> None:
        whole = await backend.generate(PROMPTS[0], SamplingParams(max_tokens=9, temperature=0))
        assert (whole.stop_reason, len(whole.token_ids)) == ("length", 9)
        stop = whole.token_ids[4]
        at = whole.token_ids.index(stop)
        cut = await backend.generate(PROMPTS[0], SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(stop,)))
        assert cut.stop_reason == "stop"
        assert cut.token_ids == whole.token_ids[: at + 1]
        assert cut.logprobs == whole.logprobs[: at + 1]
        assert cut.text == backend.tokenizer.decode(whole.token_ids[:at])

    with_backend(tiny_model, work)


def test_an_answer_ends_where_the_context_ends(tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path, max_position_embeddings=10)

    async def work(backend: TransformersBackend) -> None:
        assert backend.context_length == 10
        answer = await backend.generate(PROMPTS[0], SamplingParams(max_tokens=500, temperature=0))
        assert (answer.stop_reason, len(answer.token_ids)) == ("length", 6)
        with pytest.raises(UsageError, match="10 tokens, which leaves no room"):
            await backend.generate((5,) * 10, SamplingParams())

    with_backend(folder, work)


@pytest.mark.parametrize("prompt", [(), (-1,), (49152,)])
def test_prompts_that_cannot_be_are_refused(tiny_model: Path, prompt: tuple[int, ...]) -> None:
    async def work(backend: TransformersBackend) -> None:
        with pytest.raises(UsageError):
            await backend.generate(prompt, SamplingParams())

    with_backend(tiny_model, work)


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"stop_token_ids": [2]},
        {"stop_token_ids": ("2",)},
    ],
    ids=str,
)
def test_sampling_params_out_of_range_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"SamplingParams.{next(iter(field))} must be"):
        SamplingParams(**field)


# ---- cancelling, closing, failing ------------------------------------------------------------------------------------


def test_a_cancelled_answer_makes_room_at_once(tiny_model: Path) -> None:
    """With room for one row, the second can only be answered if the first, of 90,000 tokens, is given up."""

    async def work(backend: TransformersBackend) -> Generation:
        endless = asyncio.create_task(backend.generate(PROMPTS[0], SamplingParams(max_tokens=90_000, seed=0)))
        waiting = asyncio.create_task(backend.generate(PROMPTS[1], SamplingParams(max_tokens=3, temperature=0)))
        await asyncio.sleep(0)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        return await waiting

    assert (
        with_backend(tiny_model, work, max_batch=1)
        == alone(tiny_model, [PROMPTS[1]], [SamplingParams(max_tokens=3, temperature=0)])[0]
    )


def test_cancelling_one_row_does_not_disturb_the_others(tiny_model: Path) -> None:
    params = [SamplingParams(max_tokens=40, seed=index) for index in range(len(PROMPTS))]

    async def work(backend: TransformersBackend) -> list[Generation]:
        endless = asyncio.create_task(backend.generate((9,) * 50, SamplingParams(max_tokens=90_000, seed=0)))
        others = [asyncio.create_task(backend.generate(*pair)) for pair in zip(PROMPTS, params, strict=True)]
        await others[0]
        endless.cancel()
        return await asyncio.gather(*others)

    for one, other in zip(alone(tiny_model, PROMPTS, params), with_backend(tiny_model, work), strict=True):
        assert one.token_ids == other.token_ids
        assert close(one.logprobs, other.logprobs)


def test_a_late_comer_joins_a_running_batch(tiny_model: Path) -> None:
    async def work(backend: TransformersBackend) -> None:
        endless = asyncio.create_task(backend.generate(PROMPTS[0], SamplingParams(max_tokens=90_000, seed=0)))
        await backend.generate(PROMPTS[1], SamplingParams(max_tokens=2, temperature=0))
        late = await backend.generate(PROMPTS[2], SamplingParams(max_tokens=5, temperature=0))
        assert len(late.token_ids) == 5
        assert not endless.done()
        endless.cancel()

    with_backend(tiny_model, work)


def test_closing_fails_what_runs_and_what_waits_and_can_be_repeated(tiny_model: Path) -> None:
    async def work() -> None:
        backend = TransformersBackend.load(tiny_model, max_batch=1, threads=1)
        endless = SamplingParams(max_tokens=90_000, seed=0)
        tasks = [asyncio.create_task(backend.generate(prompt, endless)) for prompt in PROMPTS]
        await asyncio.sleep(0)
        await asyncio.gather(backend.aclose(), backend.aclose())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [BackendError] * len(PROMPTS)
        await backend.aclose()
        with pytest.raises(StateError, match="closed"):
            await backend.generate(PROMPTS[0], endless)

    run(work())


def test_a_failing_model_is_a_backend_error_and_the_next_prompt_works(tiny_model: Path) -> None:
    async def work(backend: TransformersBackend) -> None:
        with pytest.raises(BackendError, match="not numbers"):
            await backend.generate((POISON,), SamplingParams())
        assert len((await backend.generate((5,), SamplingParams(max_tokens=2, seed=0))).token_ids) in (1, 2)

    with_backend(tiny_model, work)


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends(tiny_model: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from prorl_env.llm import SamplingParams, TransformersBackend\n"
        "async def main():\n"
        "    backend = TransformersBackend.load(sys.argv[1], threads=1)\n"
        "    asyncio.create_task(backend.generate((5,), SamplingParams(max_tokens=90_000)))\n"
        "    print(len((await backend.generate((5,), SamplingParams(max_tokens=3, temperature=0))).token_ids))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


# ---- loading ---------------------------------------------------------------------------------------------------------


def changed(model: Path, parent: Path, **config: Any) -> Path:
    """A copy with other values in config.json; ``None`` takes a key out."""
    folder = parent / "changed"
    shutil.copytree(model, folder)
    old = json.loads((folder / "config.json").read_text())
    new = {key: value for key, value in {**old, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(new))
    return folder


def without(name: str) -> Callable[[Path, Path], Path | str]:
    def make(model: Path, parent: Path) -> Path:
        folder = changed(model, parent)
        (folder / name).unlink()
        return folder

    return make


def a_truncated_file(model: Path, parent: Path) -> Path:
    folder = changed(model, parent)
    os.truncate(folder / "model.safetensors", 1000)
    return folder


def an_empty_folder(model: Path, parent: Path) -> Path:
    return parent


def no_json(model: Path, parent: Path) -> Path:
    folder = changed(model, parent)
    (folder / "config.json").write_text("not json")
    return folder


def no_tokenizer(model: Path, parent: Path) -> Path:
    folder = changed(model, parent)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda model, parent: parent / "nowhere", "There is no folder"),
        (lambda model, parent: str(parent / "nowhere"), "There is no folder"),
        (lambda model, parent: model / "config.json", "is a file"),
        (an_empty_folder, "it has no config.json"),
        (without("config.json"), "it has no config.json"),
        (without("model.safetensors"), "has no weights"),
        (without("tokenizer.json"), "has no tokenizer"),
        (no_json, "cannot be loaded"),
        (no_tokenizer, "The tokenizer of .* cannot be loaded"),
        (a_truncated_file, "cannot be loaded"),
        (lambda model, parent: changed(model, parent, num_hidden_layers=3), "lack 9 tensors, model.layers.2."),
        (lambda model, parent: changed(model, parent, hidden_size=64), "do not fit its config.json"),
        (lambda model, parent: changed(model, parent, model_type="never-heard-of"), "cannot be loaded"),
        (lambda model, parent: changed(model, parent, model_type=None), "cannot be loaded"),
        (lambda model, parent: "no such name!", "neither a folder here nor a possible name"),
        (lambda model, parent: "prorl-env-no-such-owner/no-such-model", "is no folder here"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence_and_silently(
    tiny_model: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], Path | str],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = make(tiny_model, tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        TransformersBackend.load(model)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert capfd.readouterr() == ("", "")


def test_loading_and_sampling_print_nothing(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(alone(tiny_model, [PROMPTS[0]], [SamplingParams(max_tokens=2, temperature=0)])) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("setting", [{"dtype": "int8"}, {"max_batch": 0}, {"threads": 0}, {"threads": 1.5}], ids=str)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, setting: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        TransformersBackend.load(tmp_path, **setting)


def test_importing_is_light() -> None:
    code = "import sys, prorl_env.llm; print(sorted({'torch', 'transformers', 'gguf'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_the_demo_model_answers_over_two_turns(demo_model: Path) -> None:
    async def work(backend: TransformersBackend) -> None:
        stream = TokenStream(backend.tokenizer)
        greedy = SamplingParams(max_tokens=40, temperature=0)
        first = await backend.generate(
            stream.start([{"role": "user", "content": "What is the capital of France?"}]), greedy
        )
        stream.extend_sampled(first.token_ids, first.logprobs)
        assert (first.text, first.stop_reason) == ("The capital of France is Paris.", "stop")
        assert first.token_ids[-1] == IM_END
        prompt = stream.extend_messages([{"role": "user", "content": "What is 7 + 5?"}])
        second = await backend.generate(prompt, greedy)
        stream.extend_sampled(second.token_ids, second.logprobs)
        assert "12" in second.text
        assert sum(stream.loss_mask) == len(first.token_ids) + len(second.token_ids)

    with_backend(demo_model, work)
