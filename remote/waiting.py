"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["first_of"]


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until one of them is done, at most ``timeout_s`` seconds; none is cancelled. Returns whether one is done."""
    done, _ = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
