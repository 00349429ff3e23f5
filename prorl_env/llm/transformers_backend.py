"""A language model of ``transformers`` in this process, on the CPU: for demos, tests and notebooks."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from prorl_env.errors import BackendError, ConfigError, StateError, UsageError
from prorl_env.llm.loading import context_length, end_ids, load_model
from prorl_env.llm.sampling_params import Generation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prorl_env.llm.decoding import Batch, Row

__all__ = ["Dtype", "TransformersBackend"]

Dtype = Literal["float32", "bfloat16", "float16"]
"""What the model computes in."""

EXIT_TIMEOUT_S = 30.0
"""How long the end of the interpreter waits for the step that the worker is in."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    row: Row
    future: Future[None] = field(default_factory=Future)
    """Done when the row is; cancelled when nobody wants it any more."""


class TransformersBackend:
    """Generates for many callers at once; made by ``load``.

    One worker thread owns the model. Requests join the running batch at the next step and leave it when they are done
    or cancelled, so an early end is not sampled further and a late comer does not wait for the others to end.

    A seed fixes the random numbers of a row, whatever runs beside it; alone in the batch the same seed gives the same
    ids and log-probabilities, bit for bit. Padding and company change log-probabilities in their last bits, and an id
    then differs where a draw was nearly a tie. Measured with SmolLM2-135M on 72 answers of up to 50 tokens, alone and
    in a batch of 8: in float32 all had the same ids, with log-probabilities within 4e-5; in bfloat16 33 had.

    Use it with ``async with``, or call ``aclose()``. It may be used from several event loops.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, *, max_batch: int, threads: int) -> None:
        """Use ``load``; this takes what it has checked."""
        self._tokenizer = tokenizer
        self._context_length = context_length(model, tokenizer)
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._end_ids = end_ids(model, tokenizer)
        self._model = model
        self._max_batch = max_batch
        self._threads = threads
        self._inbox: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._worker = threading.Thread(target=self._work, name="transformers-backend", daemon=True)
        self._worker.start()
        atexit.register(self._close)

    @classmethod
    def load(
        cls, model: str | Path, *, dtype: Dtype = "float32", max_batch: int = 8, threads: int | None = None
    ) -> TransformersBackend:
        """Load a model; blocks for some seconds.

        Args:
            model: A folder in the format of ``transformers``, or a name on the model hub. Code that comes with a model
                is never run.
            dtype: What to compute in. ``bfloat16`` takes half the memory, and gives rougher log-probabilities.
            max_batch: Most rows decoded together; further requests wait.
            threads: Threads that compute. By default half of the cores: the others are for the sandboxes, and more
                threads than idle cores make a step several times slower. torch keeps this setting for all new threads.

        Raises:
            ModelError: If it is no model folder, lacks weights or a tokenizer, cannot be loaded, or is not to be had
                from the hub. An unreachable hub is noticed within seconds.
            ConfigError: If ``dtype``, ``max_batch`` or ``threads`` has an impossible value.
            SetupError: If torch or ``transformers`` is not installed.
        """
        if dtype not in get_args(Dtype):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {dtype!r}")
        if threads is None:
            threads = max(1, len(os.sched_getaffinity(0)) // 2)
        for name, value in (("max_batch", max_batch), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number from 1, got {value!r}")
        loaded, tokenizer = load_model(model, dtype=dtype)
        return cls(loaded, tokenizer, max_batch=max_batch, threads=threads)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._context_length

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample an answer to a prompt.

        Where prompt and ``max_tokens`` together exceed the context, fewer tokens are sampled, and ``stop_reason`` is
        ``length``. Cancelling the call takes the row out of the batch at the next step and leaves the others alone.

        Raises:
            UsageError: If the prompt is empty, fills the whole context by itself, or has an id outside the vocabulary.
            StateError: After ``aclose()``.
            BackendError: If the model fails, or ``aclose()`` comes before the answer.
        """
        from prorl_env.llm.decoding import Row

        prompt = tuple(prompt_ids)
        room = self._context_length - len(prompt)
        if not prompt:
            raise UsageError("The prompt is empty.")
        if room < 1:
            raise UsageError(
                f"The prompt has {len(prompt)} tokens, which leaves no room for an answer: the model's context is "
                f"{self._context_length}."
            )
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise UsageError(f"The prompt has an id outside the model's vocabulary of {self._vocabulary}.")
        stops = self._end_ids | frozenset(params.stop_token_ids)
        row = Row(prompt, params, max_tokens=min(params.max_tokens, room), end_ids=stops)
        request = _Request(row)
        with self._lock:
            if self._closed:
                raise StateError("This backend has been closed.")
            self._inbox.put(request)
        await asyncio.wrap_future(request.future)
        # Decoded here and not by the worker: tokenizers do not like two threads at once.
        said = row.token_ids[:-1] if row.ended else row.token_ids
        text = self._tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Generation(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            text=str(text),
            stop_reason="stop" if row.ended else "length",
        )

    async def aclose(self) -> None:
        """Stop; what is running or waiting fails with ``BackendError``. Closing again does nothing."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        """Give the backend itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.aclose()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._worker.join(EXIT_TIMEOUT_S)
        atexit.unregister(self._close)
        self._model = None

    def _work(self) -> None:
        """The worker: admit, step, answer, until closed."""
        import torch

        from prorl_env.llm.decoding import Batch

        torch.set_num_threads(self._threads)
        model = self._model
        running: dict[Row, Future[None]] = {}
        batch = Batch(model)
        with torch.inference_mode():
            while not self._closed:
                try:
                    self._admit(batch, running)
                    batch.remove([row for row in batch.rows if running[row].cancelled()])
                    if batch.rows:
                        batch.step()
                    _answer(batch, running)
                except Exception as error:  # whatever the model raises is its callers' to know
                    _fail(running.values(), f"The model failed: {type(error).__name__}: {error}")
                    running.clear()
                    batch = Batch(model)
        left = [request.future for request in self._drain() if request is not None]
        _fail([*running.values(), *left], "The backend was closed before the answer was complete.")

    def _admit(self, batch: Batch, running: dict[Row, Future[None]]) -> None:
        """Take in what waits, as far as there is room; wait only if there is nothing else to do."""
        while len(batch.rows) < self._max_batch and not self._closed:
            try:
                request = self._inbox.get(block=not running)
            except queue.Empty:
                return
            if request is None or request.future.cancelled():
                continue
            running[request.row] = request.future
            batch.add(request.row)

    def _drain(self) -> Iterator[_Request | None]:
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return


def _answer(batch: Batch, running: dict[Row, Future[None]]) -> None:
    """Answer the requests whose rows are done, and forget those that were cancelled."""
    for row, future in list(running.items()):
        if row.done or row not in batch.rows:
            del running[row]
            if future.set_running_or_notify_cancel():
                future.set_result(None)


def _fail(futures: Iterable[Future[None]], message: str) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_exception(BackendError(message))
