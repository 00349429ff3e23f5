"""The process behind ``MathGrader``: compares two answers at a time, and can be killed at any time.

It reads one JSON object a line from its standard input and writes one a line to its standard output. It dies with the
thread that started it and never holds more memory than it was given.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

__all__ = ["main"]


def main() -> None:
    """Serve until the input ends. ``sys.argv`` holds the parent's process id and the memory limit in bytes."""
    parent, memory_bytes = int(sys.argv[-2]), int(sys.argv[-1])
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    replies = _take_over_stdout()
    # Numbers longer than Python's own limit of 4300 digits can be answers; their length is bounded by the caller.
    sys.set_int_max_str_digits(_MOST_DIGITS)
    try:
        from prorl_env.envs import equivalence  # noqa: F401  (half a second: before the first request, not in it)
    except ImportError as error:
        _send(replies, {"result": "missing", "why": str(error)})
        return
    _send(replies, {"result": "ready"})
    for line in sys.stdin.buffer:
        reply = _serve(json.loads(line))
        _send(replies, reply)
        if reply["result"] == "memory":
            # What is left of a heap that was full once is not worth keeping.
            return


def _serve(request: dict[str, str]) -> dict[str, str]:
    from prorl_env.envs.equivalence import Unparsable, check, equivalent

    try:
        if "answer" not in request:
            check(request["gold"])
            return {"result": "fine"}
        return {"result": "equivalent" if equivalent(request["gold"], request["answer"]) else "different"}
    except Unparsable as error:
        return {"result": "unparsable", "why": str(error)}
    except MemoryError:
        return {"result": "memory"}
    except RecursionError:
        return {"result": "unparsable", "why": "it is nested too deeply"}
    except Exception as error:
        # SymPy raises errors of every kind on expressions that make no sense. They are about the expression.
        return {"result": "unparsable", "why": f"it makes no sense as an expression ({type(error).__name__})"}


def _take_over_stdout() -> BinaryIO:
    """Keep the pipe for replies, and send what a library prints nowhere."""
    replies = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return replies


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It died before the line above.
        sys.exit(1)


_NICENESS = 5
_MOST_DIGITS = 20_000
_PR_SET_PDEATHSIG = 1
