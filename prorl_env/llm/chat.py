"""Messages to token ids, such that no message can forge a control token.

A chat template writes control tokens such as ``<|im_end|>`` between the messages. Tokenising the rendered text as it is
would turn the same words inside a message (the output of a tool, say) into the same tokens, and whoever wrote them
could end the turn and begin one in another's name. So each such word in a message is cut after its first character by a
mark, the template is rendered, and the text is tokenised piece by piece between the marks: the two halves of a cut word
can never become one token, and the text that the ids stand for is unchanged.

Messages without such words give exactly the ids of ``tokenizer.apply_chat_template``. In the others nothing merges
across a cut, so ids there may differ from those of the same text in another place; the model reads the same characters.

Cut are, in every message, the tokenizer's special tokens, and in messages of the roles ``user`` and ``tool`` also those
added tokens that the template mentions, special or not (some tokenizers mark their turns with tokens they do not call
special). What a template writes in plain characters, such as ``[INST]`` where that is no token, can still be imitated:
there the tokenizer itself knows no difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from prorl_env.errors import ModelError, UsageError
from prorl_env.types import Message, Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTemplate", "Rendered", "check_messages", "fresh_mark"]

_EXTERNAL: frozenset[str] = frozenset({"user", "tool"})
"""Roles whose words come from outside."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text that a template made of some messages, with its cuts still in it."""

    marked: str
    cut: str
    """The mark; in no message and nowhere else in the text."""

    @property
    def text(self) -> str:
        """The text without marks."""
        return self.marked.replace(self.cut, "")

    @property
    def pieces(self) -> list[str]:
        """What is to be tokenised apart."""
        return self.marked.split(self.cut)

    def split(self, mark: str) -> tuple[Rendered, Rendered]:
        """Give what stands before and after ``mark``, which must be there once.

        Raises:
            ModelError: If it is not.
        """
        parts = self.marked.split(mark)
        if len(parts) != 2:
            raise ModelError(f"The chat template prints an assistant message {len(parts) - 1} times, not once.")
        return Rendered(parts[0], self.cut), Rendered(parts[1], self.cut)


class ChatTemplate:
    """The chat template of a tokenizer, with its tokenizer.

    Args:
        tokenizer: A fast tokenizer of ``transformers`` with a chat template.
        options: Extra variables for the template, such as ``{"enable_thinking": False}``.

    Raises:
        ModelError: If the tokenizer has no chat template, or alters pieces of text when they are tokenised apart.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        try:
            source = tokenizer.get_chat_template()
        except ValueError:
            raise ModelError(
                f"The tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template: use the model's "
                "instruct version."
            ) from None
        added = tokenizer.added_tokens_decoder
        special = {token.content: index for index, token in added.items() if token.special and token.content.strip()}
        named = {
            word: index
            for index, token in added.items()
            if len(word := token.content) > 1 and word.strip() and word in source
        }
        self.special_ids = frozenset(special.values())
        """Ids of the tokenizer's special tokens."""
        self.control_ids = self.special_ids | frozenset(named.values())
        """Those, and the ids of all added tokens that the template mentions."""
        self._special = _pattern(special)
        self._control = _pattern({**special, **named})
        self._anchor = _anchor(tokenizer)
        if tokenizer.decode(self._ids("x") + self._ids("y")) != "xy":
            raise ModelError("The tokenizer adds or drops characters where text is tokenised in pieces.")

    def render(
        self, messages: Sequence[Message], *, generation_prompt: bool, sampled: Collection[int] = ()
    ) -> Rendered:
        """Render messages, with cuts in all of them but those with the indices ``sampled``.

        Args:
            messages: The conversation from its beginning.
            generation_prompt: Whether to end with what introduces an assistant turn.
            sampled: Indices of assistant messages that the template shall see as they are; their text in the result is
                for comparing only, never to be tokenised.

        Raises:
            ModelError: If the template refuses the messages.
        """
        cut = fresh_mark(message["content"] for message in messages)
        prepared: Any = [
            message if index in sampled else self._with_cuts(message, cut) for index, message in enumerate(messages)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                prepared, tokenize=False, add_generation_prompt=generation_prompt, **self._options
            )
        except Exception as error:
            # A template is a program of the model's maker, with its own complaints ("roles must alternate").
            raise ModelError(f"The chat template refuses the messages: {error}.") from error
        return Rendered(str(text), cut)

    def encode(self, rendered: Rendered, *, at_start: bool) -> list[int]:
        """Tokenise rendered text.

        Args:
            rendered: The text.
            at_start: Whether it is the beginning of the sequence; some tokenizers begin a sequence differently.

        Raises:
            ModelError: If a control token came out that the template did not write.
        """
        ids: list[int] = []
        for index, piece in enumerate(rendered.pieces):
            new = self._ids(piece, anchored=index > 0 or not at_start)
            written = len(self._control.findall(piece)) if self._control else 0
            if sum(token in self.control_ids for token in new) > written:
                raise ModelError("The tokenizer makes a control token of text that does not spell it: not safe to use.")
            ids += new
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text that ids stand for, control tokens included."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _with_cuts(self, message: Message, cut: str) -> Message:
        pattern = self._control if message["role"] in _EXTERNAL else self._special
        content = message["content"]
        if pattern is not None:
            content = pattern.sub(lambda found: f"{found[0][0]}{cut}{found[0][1:]}", content)
        return {"role": message["role"], "content": content}

    def _ids(self, text: str, *, anchored: bool = True) -> list[int]:
        """Ids of a piece. Behind an anchor, a special token, no tokenizer treats it as the beginning of a sequence."""
        if not text:
            return []
        anchor = self._anchor if anchored else ""
        # not verbose: no complaint on stderr about texts longer than the model's context, which is not decided here
        ids = self._tokenizer(anchor + text, add_special_tokens=False, split_special_tokens=False, verbose=False)
        return list(ids["input_ids"])[1 if anchor else 0 :]


def check_messages(messages: Sequence[Message], *, roles: Iterable[str] = get_args(Role)) -> None:
    """Check that there are messages, and that each has one of the roles and text.

    Raises:
        UsageError: If not.
    """
    allowed = tuple(roles)
    if not messages:
        raise UsageError("No messages: at least one is needed.")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in allowed:
            raise UsageError(f"A message here must have one of the roles {', '.join(allowed)}, got {role!r}.")
        if not isinstance(content, str):
            raise UsageError(f"The content of a message must be text, got {type(content).__name__}.")
        if not content.isascii() and any("\ud800" <= character <= "\udfff" for character in content):
            raise UsageError("The content of a message has half of a surrogate pair, which is no text.")


def fresh_mark(texts: Iterable[str]) -> str:
    """A short word that is in none of the texts, of letters and digits, so that no template changes it.

    No beginning of it is also an end of it: set beside any text, it is found where it was put and nowhere else.
    """
    everything = list(texts)
    number = 0
    while any((mark := f"q{number}vkwjz") in text for text in everything):
        number += 1
    return mark


def _pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    """What finds any of the words, the longest first. Single characters cannot be cut: the final check is for them."""
    ordered = sorted((word for word in words if len(word) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _anchor(tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token that leaves the text after it alone, or nothing if there is none."""
    for index, token in tokenizer.added_tokens_decoder.items():
        plain = token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        if plain and list(tokenizer(token.content + "x", add_special_tokens=False)["input_ids"])[:1] == [index]:
            return str(token.content)
    return ""
