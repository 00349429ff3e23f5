"""How a model is to be sampled, and what came of it. The same two values serve every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prorl_env.errors import ConfigError

__all__ = ["Generation", "SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Temperature comes first, then ``top_k``, then ``top_p``.

    Raises:
        ConfigError: If a value is out of its range.
    """

    max_tokens: int = 256
    """Most tokens to sample, the end token included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token (and ``top_k``, ``top_p`` and ``seed`` mean nothing)."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose probabilities sum to this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 keeps all."""
    seed: int | None = None
    """Start of the row's own random numbers, 0 to 2**63 - 1; ``None`` takes a fresh one."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the turn, besides the model's own end tokens."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check("max_tokens", self.max_tokens, _whole(self.max_tokens) and self.max_tokens >= 1, "a whole number from 1")
        _check("temperature", self.temperature, _real(self.temperature) and self.temperature >= 0, "a number from 0")
        _check("top_p", self.top_p, _real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("top_k", self.top_k, _whole(self.top_k) and self.top_k >= 0, "a whole number from 0")
        good_seed = self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**63)
        _check("seed", self.seed, good_seed, "None or a whole number from 0 to 2**63 - 1")
        good_stops = isinstance(self.stop_token_ids, tuple) and all(map(_whole, self.stop_token_ids))
        _check("stop_token_ids", self.stop_token_ids, good_stops, "a tuple of whole numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was sampled for one prompt."""

    token_ids: tuple[int, ...]
    """The sampled ids in order, the end token included if one was sampled, ``(num_tokens,)``."""
    logprobs: tuple[float, ...]
    """Log-probability of each id under the distribution that it was drawn from, ``(num_tokens,)``."""
    text: str
    """What the ids stand for, without the end token. Never encode it again: keep the ids."""
    stop_reason: Literal["stop", "length"]
    """``stop``: an end token was sampled. ``length``: ``max_tokens`` or the model's context was full."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < float("inf")


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ConfigError(f"SamplingParams.{name} must be {expected}, got {value!r}")
