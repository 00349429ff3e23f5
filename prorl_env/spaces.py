"""Spaces for text. ``gymnasium.spaces.Text`` rejects the empty string and wants a character set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

__all__ = ["Unicode", "conversation_space"]

# What samples are drawn from: enough to make a parser stumble, nothing that a terminal or a file could not hold.
_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCXYZ 0123456789 {}[]()<>\"'`\\/|$&;:,.!?*+-=_#%\n\té漢🙂"


class Unicode(spaces.Space[str]):
    """Any string of at most ``max_length`` characters, the empty one among them.

    Batched, it is a tuple of ``num_envs`` strings.

    Args:
        max_length: Longest string that is contained, in characters.
        seed: Seed of the sampler.
    """

    def __init__(self, max_length: int = 1_000_000, *, seed: int | np.random.Generator | None = None) -> None:
        if max_length < 0:
            raise ValueError(f"max_length must not be negative, got {max_length}")
        self.max_length = max_length
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed number of numbers."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A short random string.

        Raises:
            ValueError: If a mask or probabilities are given; neither has a meaning here.
        """
        if mask is not None or probability is not None:
            raise ValueError("Unicode.sample takes neither a mask nor probabilities")
        length = int(self.np_random.integers(0, min(self.max_length, 32) + 1))
        return "".join(_ALPHABET[i] for i in self.np_random.integers(0, len(_ALPHABET), size=length))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """A list of strings."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """The strings again."""
        return [str(sample) for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]  # Like every gymnasium space.

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"


def conversation_space() -> spaces.Dict:
    """``{"messages": ({"role": str, "content": str}, …)}``: the messages that are new since the last observation."""
    message = spaces.Dict({"role": Unicode(32), "content": Unicode(10_000_000)})
    return spaces.Dict({"messages": spaces.Sequence(message)})


# ``iterate`` is not registered on purpose: gymnasium would then zip the characters of a batch's strings together.
@batch_space.register(Unicode)
def _batch_space(space: Unicode, n: int = 1) -> spaces.Tuple[Any]:
    return spaces.Tuple(Unicode(space.max_length) for _ in range(n))


@concatenate.register(Unicode)
def _concatenate(space: Unicode, items: Sequence[str], out: Any) -> tuple[str, ...]:
    return tuple(items)


@create_empty_array.register(Unicode)
def _create_empty_array(space: Unicode, n: int = 1, fn: Any = None) -> tuple[str, ...]:
    return ("",) * n
