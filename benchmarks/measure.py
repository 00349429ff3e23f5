"""What a benchmark gives, and how durations become a figure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

__all__ = ["Measurement", "p50_ms", "sample_async", "sample_sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One figure, beside the floor that was measured in the same run."""

    metric: str
    value: float
    unit: str
    floor: float | None
    """The same in the barest way possible, in the same unit; ``None`` if there is no such way."""
    note: str


def p50_ms(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return statistics.median(seconds) * 1e3


def sample_sync(work: Callable[[], object], *, count: int, warm_up: int = 20) -> list[float]:
    """Run ``work`` over and over; the seconds that each run took, ``(count,)``."""
    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return taken


async def sample_async(work: Callable[[], Awaitable[object]], *, count: int, warm_up: int = 20) -> list[float]:
    """The same for a coroutine function."""
    for _ in range(warm_up):
        await work()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await work()
        taken.append(time.perf_counter() - began)
    return taken
