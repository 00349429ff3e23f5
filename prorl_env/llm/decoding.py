"""A batch of rows that a causal language model of ``transformers`` decodes together, token by token.

Plain synchronous torch, for one thread, and without waiting, queues or errors of ours: ``transformers_backend`` does
that.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from prorl_env.llm.sampling_params import SamplingParams

__all__ = ["Batch", "Row", "pick"]

NUCLEUS_GUESS = 1024
"""Tokens among which a nucleus is looked for first; sorting the whole vocabulary takes several times as long."""


@dataclass(slots=True, eq=False)
class Row:
    """One prompt and what has been sampled for it."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    """``params.max_tokens``, or less where the context ends earlier."""
    end_ids: frozenset[int]
    """Ids that end the turn."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        """Seed the row's own random numbers."""
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    @property
    def ended(self) -> bool:
        """Whether an end token was sampled."""
        return bool(self.token_ids) and self.token_ids[-1] in self.end_ids

    @property
    def done(self) -> bool:
        """Whether nothing more is to be sampled."""
        return self.ended or len(self.token_ids) >= self.max_tokens

    def take(self, logits: torch.Tensor) -> None:
        """Sample one more id from logits of the shape ``(vocabulary,)``."""
        token, logprob = pick(logits, self.params, self.generator)
        if not math.isfinite(logprob):
            raise ArithmeticError("its logits are not numbers")
        self.token_ids.append(token)
        self.logprobs.append(logprob)


class Batch:
    """Rows that are decoded together; they come and go at any step.

    A prompt is read alone, without padding, so a row's first token does not depend on its company. Then its keys and
    values join those of the others, with empty columns on the left of the shorter ones, which the attention mask hides.

    Args:
        model: The model, in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.rows: list[Row] = []
        self._model = model
        # The argument was called ``past_key_values`` before; models of a hub's own code may still call it so.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        self._cache: Any = None
        self._mask = torch.empty((0, 0), dtype=torch.long)
        """1 where a column of the cache belongs to the row, ``(num_rows, columns)``."""

    def add(self, row: Row) -> None:
        """Read the row's prompt and sample its first id; it stays in ``rows`` unless that finishes it."""
        cache = DynamicCache()
        row.take(self._forward(torch.tensor([row.prompt_ids]), cache)[0])
        if row.done:
            return
        mask = torch.ones((1, len(row.prompt_ids)), dtype=torch.long)
        if self.rows:
            self._join(cache, mask)
        else:
            self._cache, self._mask = cache, mask
        self.rows.append(row)

    def step(self) -> list[Row]:
        """Sample one more id for every row; give the rows that this finished, which leave."""
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        last = torch.tensor([[row.token_ids[-1]] for row in self.rows])
        positions = self._mask.sum(dim=1, keepdim=True) - 1
        logits = self._forward(last, self._cache, attention_mask=self._mask, position_ids=positions)
        for row, row_logits in zip(self.rows, logits, strict=True):
            row.take(row_logits)
        finished = [row for row in self.rows if row.done]
        self.remove(finished)
        return finished

    def remove(self, rows: Sequence[Row]) -> None:
        """Take rows out; the others are not affected."""
        keep = [index for index, row in enumerate(self.rows) if row not in rows]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in keep]
        if not keep:
            self._cache, self._mask = None, self._mask[:0]
            return
        self._mask = self._mask[keep]
        unused = int(self._mask.argmax(dim=1).min())  # columns that only longer rows needed
        self._mask = self._mask[:, unused:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[keep][:, :, unused:], layer.values[keep][:, :, unused:]

    def _join(self, cache: Any, mask: torch.Tensor) -> None:
        columns = max(self._mask.shape[1], mask.shape[1])

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return functional.pad(tensor, (0, 0, columns - tensor.shape[2], 0))

        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            layer.keys = torch.cat([widen(layer.keys), widen(new.keys)])
            layer.values = torch.cat([widen(layer.values), widen(new.values)])
        self._mask = torch.cat([functional.pad(one, (columns - one.shape[1], 0)) for one in (self._mask, mask)])

    def _forward(self, ids: torch.Tensor, cache: Any, **where: torch.Tensor) -> torch.Tensor:
        """Logits of the last column, float32, ``(num_rows, vocabulary)``; ``cache`` grows."""
        output = self._model(input_ids=ids, **{self._cache_name: cache}, **self._options, **where)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def pick(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """Draw one id from logits of the shape ``(vocabulary,)``; give it and its log-probability.

    The log-probability is that of the distribution drawn from (after temperature, ``top_k`` and ``top_p``), in float32;
    at temperature 0 it is that of the raw logits. Each draw takes one random number for each id of the vocabulary, so a
    small change of the logits seldom changes the id drawn.
    """
    if params.temperature == 0:
        logprobs = torch.log_softmax(logits, dim=-1)
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    warped = logits / params.temperature
    if 0 < params.top_k < warped.numel():
        warped = warped.masked_fill(warped < warped.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        warped = _nucleus(warped, params.top_p)
    logprobs = torch.log_softmax(warped, dim=-1)
    # Of clocks that run at the rates p, the first to ring is i with probability p[i].
    waits = torch.empty_like(logprobs).exponential_(generator=generator).clamp_min_(torch.finfo(torch.float32).tiny)
    token = int((logprobs - waits.log_()).argmax())
    return token, float(logprobs[token])


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep an id exactly if those more probable sum to less than ``top_p``."""
    probs = torch.softmax(logits, dim=-1)
    for width in (min(NUCLEUS_GUESS, probs.numel()), probs.numel()):
        top = probs.topk(width)
        sums = top.values.cumsum(dim=-1)
        if float(sums[-1]) >= top_p:
            break
    kept = top.indices[sums - top.values < top_p]
    result = torch.full_like(logits, -torch.inf)
    result[kept] = logits[kept]
    return result
