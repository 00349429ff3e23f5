"""Who plays the agent: a model, or a script.

A policy makes one player for each episode; the player is told what is new and answers with the next assistant text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from prorl_env.envs.tools import write_tool_call
from prorl_env.errors import UsageError
from prorl_env.llm.tokens import TokenStream
from prorl_env.types import Message, Task

if TYPE_CHECKING:
    from prorl_env.llm import Generation, SamplingParams

__all__ = ["ContextFull", "ModelPolicy", "Move", "Player", "Policy", "ReferencePolicy"]


class ContextFull(Exception):
    """The conversation no longer fits into the model's context: a budget of the agent's ran out."""


@dataclass(frozen=True, slots=True)
class Move:
    """What the agent says next."""

    text: str
    stop_reason: str


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The tokens of an episode so far, each of shape ``(num_tokens,)``; empty for a policy without tokens."""

    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class Player(Protocol):
    """Plays one episode."""

    async def move(self, messages: tuple[Message, ...]) -> Move:
        """The next assistant text.

        Args:
            messages: What is new: at first the prompt, then each turn's observation.

        Raises:
            ContextFull: If the conversation does not fit into the model's context any more.
            BackendError: If the model cannot be asked.
            UsageError: If the policy cannot play this task.
        """
        ...

    def tokens(self) -> TokenRecord:
        """The tokens so far, exactly as they were sampled."""
        ...


class Policy(Protocol):
    """Makes players. Shared by concurrent episodes."""

    name: str

    def player(self, task: Task, *, seed: int) -> Player:
        """A player for one episode."""
        ...


class Generator(Protocol):
    """The part of a backend that a policy needs."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample a continuation."""
        ...


class ModelPolicy:
    """A language model, asked with exact token ids.

    Args:
        backend: Where it runs.
        params: How to sample; ``max_tokens`` is for each turn. Its seed is replaced by one of each episode and turn.
        name: What to call it in results.
    """

    def __init__(self, backend: Generator, params: SamplingParams, *, name: str) -> None:
        self.name = name
        self._backend = backend
        self._params = params

    def player(self, task: Task, *, seed: int) -> Player:
        """See ``Policy``."""
        return _ModelPlayer(self._backend, self._params, seed)


class _ModelPlayer:
    def __init__(self, backend: Generator, params: SamplingParams, seed: int) -> None:
        self._backend = backend
        self._params = params
        self._seed = seed
        self._stream = TokenStream(backend.tokenizer)
        self._turn = 0

    async def move(self, messages: tuple[Message, ...]) -> Move:
        stream = self._stream
        if self._turn == 0:
            stream.start(messages)
        else:
            stream.extend_messages(messages)
        prompt = list(stream.token_ids)
        if len(prompt) + 1 >= self._backend.context_length:
            raise ContextFull
        params = replace(self._params, seed=self._seed * 1_000 + self._turn)
        generation = await self._backend.generate(prompt, params)
        stream.extend_sampled(generation.token_ids, generation.logprobs)
        self._turn += 1
        return Move(generation.text, generation.stop_reason)

    def tokens(self) -> TokenRecord:
        stream = self._stream
        return TokenRecord(tuple(stream.token_ids), tuple(stream.loss_mask), tuple(stream.logprobs))


class ReferencePolicy:
    """Computes the answer with the tools, by the program that a task carries under ``program``; then calls ``finish``.

    It shows that tasks, tools and grading work, not that anybody is clever.
    """

    name = "reference"

    def player(self, task: Task, *, seed: int) -> Player:
        """See ``Policy``."""
        return _ReferencePlayer(task)


class _ReferencePlayer:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._asked = False

    async def move(self, messages: tuple[Message, ...]) -> Move:
        if not self._asked:
            program = self._task.meta.get("program")
            if not isinstance(program, str):
                raise UsageError(
                    f"task {self._task.task_id} has no program, which the reference policy needs; "
                    "use a model, or the sample tasks"
                )
            self._asked = True
            return Move(write_tool_call("execute_ipython_cell", {"code": program}), "script")
        lines = [line for message in messages for line in message["content"].splitlines() if line.strip()]
        return Move(write_tool_call("finish", {"answer": lines[-1].strip() if lines else ""}), "script")

    def tokens(self) -> TokenRecord:
        return TokenRecord()
