"""The server's ends of a process's pipes, read and written without ever waiting."""

from __future__ import annotations

import asyncio
import os

from prorl_env.remote.output import HeadTail

__all__ = ["Drain", "Feed"]


class Drain:
    """Reads a pipe into a ``HeadTail`` until ``close``, which takes what is there and does not wait for more.

    Args:
        fd: The pipe's end; owned from now on.
        keep: Bytes kept.
    """

    def __init__(self, fd: int, keep: int) -> None:
        self._fd = fd
        self._kept = HeadTail(keep)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def result(self) -> tuple[bytes, int]:
        """``(bytes kept so far, bytes left out between head and tail)``."""
        return self._kept.result()

    def close(self) -> tuple[bytes, int]:
        """Take in what the pipe holds, close it, and return ``result()``. Safe to call twice."""
        if self._fd != -1:
            # What a program wrote before its end is in the pipe, which holds at most 1 MiB; a daemon may go on writing.
            for _ in range(8):
                if not self._read():
                    break
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        return self.result()

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 262_144)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._fd)
            return False
        self._kept.add(data)
        return True


class Feed:
    """Writes bytes into a pipe as it takes them, then closes it.

    Args:
        fd: The pipe's end; owned from now on.
        data: What to write.
    """

    def __init__(self, fd: int, data: bytes) -> None:
        self._fd = fd
        self._left = memoryview(data)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._write()

    def close(self) -> None:
        """Stop writing and close the pipe. Safe to call twice."""
        if self._fd != -1:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._fd, self._left) :]
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._write)
            return
        except BrokenPipeError:
            pass
        self.close()
