"""Output of unbounded length in bounded memory: the head and the tail, and an exact count of what lies between."""

from __future__ import annotations

from collections import deque

__all__ = ["HeadTail", "clip_text"]


class HeadTail:
    """Collects bytes, keeping the first and the last ``limit // 2``."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Take in the next bytes."""
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            gone = len(self._tail.popleft())
            self._tail_size -= gone
            self._dropped += gone

    def result(self) -> tuple[bytes, int]:
        """``(bytes kept, bytes left out between head and tail)``."""
        tail = b"".join(self._tail)
        excess = max(0, len(tail) - self._tail_limit)
        return bytes(self._head) + tail[excess:], self._dropped + excess


def clip_text(text: str, limit: int) -> tuple[str, int]:
    """The head and tail of a text within ``limit`` characters, and how many characters were left out."""
    if len(text) <= limit:
        return text, 0
    head = limit - limit // 2
    tail = limit // 2
    return text[:head] + text[len(text) - tail :], len(text) - head - tail
