"""The exact token history of one episode.

Decoding what a model sampled and encoding it again gives other ids now and then, and a trainer that does so learns from
a text that the model never saw. So sampled ids are kept as they are; only new text from outside is tokenised, once; and
the prompt of a turn begins with exactly the ids of the turn before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prorl_env.errors import ModelError, StateError, UsageError
from prorl_env.llm.chat import ChatTemplate, Rendered, check_messages, fresh_mark
from prorl_env.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenStream"]


class TokenStream:
    """Prompt, sampled and environment tokens of one episode, in order.

    ``start`` once, then ``extend_sampled`` and ``extend_messages`` in turn. A call that raises changes nothing.

    Text between two assistant turns is found by rendering the whole conversation and taking what follows the
    assistant's text. That is only right if the template prints what came before in the same way as earlier in the
    episode. If it does not (it drops the reasoning of earlier turns, say, or prints the number of messages),
    ``extend_messages`` raises: the ids that were sampled after the old prompt do not belong to the new one. Differences
    in white space are let pass, since templates strip it and sampled ids keep it.

    Sampled ids are decoded for that comparison only.

    Args:
        tokenizer: A fast tokenizer of ``transformers`` with a chat template.
        template_options: Extra variables for the template, such as ``{"enable_thinking": False}``.

    Raises:
        ModelError: If the tokenizer has no chat template or cannot tokenise text in pieces.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self._chat = ChatTemplate(tokenizer, options=template_options)
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._messages: list[Message] = []
        self._sampled: set[int] = set()
        """Which messages are sampled ones."""
        self._text = ""
        """What the ids stand for, up to the end of the last prompt."""
        self._turn_start = 0
        """Where in the ids the current assistant turn begins."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids so far, ``(num_tokens,)``."""
        return tuple(self._ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for sampled ids, 0 for all others, ``(num_tokens,)``."""
        return tuple(self._mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of sampled ids, 0.0 for all others, ``(num_tokens,)``."""
        return tuple(self._logprobs)

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Begin with the first messages; give the prompt of the first turn.

        Raises:
            StateError: If it has begun already.
            UsageError: If there are no messages, or one has no known role or no text.
            ModelError: If the chat template refuses the messages.
        """
        if self._messages:
            raise StateError("This TokenStream has begun already: use one for each episode.")
        check_messages(messages)
        rendered = self._chat.render(messages, generation_prompt=True)
        self._append(self._chat.encode(rendered, at_start=True))
        self._messages = list(messages)
        self._text = rendered.text
        return list(self._ids)

    def extend_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append what the model sampled, the end token included if it was sampled. A turn may come in several parts.

        Raises:
            StateError: Before ``start``.
            UsageError: If ``ids`` and ``logprobs`` differ in length, an id is not a whole number from 0, or a
                log-probability is NaN.
        """
        if not self._messages:
            raise StateError("Nothing can be sampled before start(): there is no prompt yet.")
        if len(ids) != len(logprobs):
            raise UsageError(f"{len(ids)} sampled ids came with {len(logprobs)} log-probabilities.")
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise UsageError("A sampled id must be a whole number from 0.")
        if any(math.isnan(value) for value in logprobs):
            raise UsageError("A log-probability is NaN.")
        self._ids += ids
        self._mask += [1] * len(ids)
        self._logprobs += map(float, logprobs)

    def extend_messages(self, new_messages: Sequence[Message]) -> list[int]:
        """End the assistant turn and append new messages; give the prompt of the next turn.

        It is all ids so far: those of the last prompt, those sampled since, and the new text. Of the end of the turn,
        what the model sampled itself is not appended again.

        Raises:
            StateError: If nothing was sampled since the last prompt.
            UsageError: If there are no messages, or one is not from ``system``, ``user`` or ``tool`` or has no text.
            ModelError: If the chat template refuses the messages, or prints the conversation so far differently now.
        """
        turn = self._ids[self._turn_start :]
        if not turn:
            raise StateError("Nothing was sampled since the last prompt: call extend_sampled() first.")
        check_messages(new_messages, roles=("system", "user", "tool"))
        end = self._end_of_turn()
        end_ids = self._chat.encode(end, at_start=False)
        last = turn[-1]
        ended = last in end_ids and last in self._chat.control_ids
        text = self._chat.decode(turn[:-1] if ended or last in self._chat.special_ids else turn)
        before, after = self._render_around(text, new_messages)
        if not after.text.startswith(end.text):
            raise ModelError("The chat template ends an assistant turn differently when messages follow it.")
        if _squeeze(before.text) != _squeeze(self._text + text):
            raise ModelError(
                "The chat template prints the earlier conversation differently once messages follow "
                f"({_first_difference(self._text + text, before.text)}), so the ids sampled so far cannot be kept. "
                "Use a template that only appends."
            )
        new = self._chat.encode(after, at_start=False)
        self._append(new[new.index(last) + 1 :] if ended else new)
        self._sampled.add(len(self._messages))
        self._messages += [_assistant(text), *new_messages]
        self._text += text + after.text
        return list(self._ids)

    def _append(self, ids: list[int]) -> None:
        self._ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)
        self._turn_start = len(self._ids)

    def _end_of_turn(self) -> Rendered:
        """What the template prints after the text of an assistant turn."""
        mark = fresh_mark(message["content"] for message in self._messages)
        history = [*self._messages, _assistant(mark)]
        rendered = self._chat.render(history, generation_prompt=False, sampled=self._sampled | {len(self._messages)})
        return rendered.split(mark)[1]

    def _render_around(self, text: str, new_messages: Sequence[Message]) -> tuple[Rendered, Rendered]:
        """What the template prints up to the end of the assistant's text, and after it."""
        mark = fresh_mark([text, *(message["content"] for message in (*self._messages, *new_messages))])
        history = [*self._messages, _assistant(text + mark), *new_messages]
        rendered = self._chat.render(history, generation_prompt=True, sampled=self._sampled | {len(self._messages)})
        return rendered.split(mark)


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _first_difference(old: str, new: str) -> str:
    """Where two texts part, ignoring white space, with a few characters of each."""
    left, right = _squeeze(old), _squeeze(new)
    both = zip(left, right, strict=False)
    index = next((place for place, (one, other) in enumerate(both) if one != other), min(len(left), len(right)))
    begin = max(0, index - 10)
    return f"{left[begin : index + 20]!r} became {right[begin : index + 20]!r}"
