r"""Trajectories in files: JSON Lines, one line per finished episode.

A line is UTF-8 JSON: the fields of ``Trajectory`` after a key ``format``, which is the version of this layout. What is
read back equals what was written, with three rules where JSON has no equal:

- Text may hold lone surrogates; such a line is written with ``\ud800`` escapes. A high and a low surrogate side
  by side come back as the one character that they spell.
- Non-finite numbers are refused everywhere except in the arguments of a tool call, which an agent chose: there they are
  stored as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
- In those arguments a tuple comes back as a list; a key that is not text, and a value that JSON has no word for, is
  refused.

A process that is killed while it writes leaves at most one torn last line. A reader ignores it with a warning, and a
writer that opens the file again removes it first. A last line that is whole and lacks only its newline counts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import msgspec

from prorl_env.errors import InfraError, StateError, UsageError
from prorl_env.types import ToolCall, Trajectory, Turn

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "FORMAT",
    "TornLineWarning",
    "TrajectoryWriter",
    "decode_trajectory",
    "encode_trajectory",
    "read_trajectories",
]

FORMAT = 1
"""The version of the layout that this module writes and reads."""


class TornLineWarning(UserWarning):
    """The last line of a file was cut off in the middle and has been ignored."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Turn a trajectory into one line, without its newline.

    Raises:
        UsageError: If the trajectory could not be read back: it breaks a rule of ``Trajectory`` (a reward exactly if
            the outcome carries one, token fields of one length), or holds a value of the wrong type or a number that
            is not finite.
    """
    try:
        line = _to_json(_storable(trajectory))
        _parse(line)  # What is written can be read: a wrong type is the caller's to know now, not the reader's later.
    except (_BadLineError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the trajectory of task {trajectory.task_id!r} cannot be written: {error}") from None
    return line


def decode_trajectory(line: bytes | str) -> Trajectory:
    """Turn one line back into its trajectory. Keys that this version does not know are ignored.

    Raises:
        UsageError: If the line is not a trajectory of this format.
    """
    try:
        return _parse(line.encode() if isinstance(line, str) else line)
    except (_BadLineError, UnicodeError) as error:
        raise UsageError(f"not a trajectory: {error}") from None


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in their order, one at a time; blank lines are skipped.

    The file is opened at the first ``next()`` and closed at the end, so errors come while iterating.

    Warns:
        TornLineWarning: If the last line is torn; everything before it has been yielded.

    Raises:
        UsageError: If the file cannot be read or a line is malformed; the message names the path and the line.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    try:
                        yield _parse(line)
                    except _NotJsonError:
                        if line.endswith(b"\n"):
                            raise
                        text = f"{os.fspath(path)}: ignored a torn last line (line {number}, {len(line)} bytes)"
                        warnings.warn(text, TornLineWarning, stacklevel=2)
    except _BadLineError as error:
        raise UsageError(f"{os.fspath(path)}, line {number}: not a trajectory: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error


class TrajectoryWriter:
    """Appends trajectories to a file, each with one write, so that no reader sees half of one that stands.

    The file is made if it is missing and continued if it holds trajectories. Opening removes a torn last line that a
    killed writer left, so that no later line is damaged by it. One writer per file and one thread per writer: a second
    writer on the same file is refused as long as the first one is open (where the file system has locks).
    A line is safe from the death of the process as soon as ``write`` returns, not from the death of the machine.

    Args:
        path: A regular file in a folder that exists.

    Raises:
        UsageError: If the file cannot be opened, holds something else than trajectories, or is being written already.
    """

    path: Path
    """The file."""
    torn_bytes: int
    """Size of the torn last line that was removed at opening."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.torn_bytes = 0
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise UsageError(f"cannot write trajectories to {self.path}: not a regular file")
            self._lock()
            self._mend()
        except OSError as error:
            self.close()
            raise UsageError(f"cannot write trajectories to {self.path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def write(self, trajectory: Trajectory) -> None:
        """Append one line. After an error the file is as it was before the call.

        Raises:
            UsageError: If the trajectory cannot be stored; see ``encode_trajectory``.
            StateError: If the writer is closed.
            InfraError: If the disk does not take the line, for instance because it is full.
        """
        if self._fd < 0:
            raise StateError(f"the writer of {self.path} is closed")
        line = encode_trajectory(trajectory) + b"\n"
        start = os.fstat(self._fd).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException as error:
            os.ftruncate(self._fd, start)
            if isinstance(error, OSError):
                message = f"could not append {len(line)} bytes to {self.path}: {error.strerror or error}"
                raise InfraError(message) from error
            raise

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(f"another writer has {self.path} open: give each run a file of its own") from None
            # Some cluster file systems have no locks. Then two writers are the user's to avoid.

    def _mend(self) -> None:
        """Make the file end with a newline, and refuse a file of something else before anything in it is touched."""
        size = os.fstat(self._fd).st_size
        if size == 0:
            return
        with open(self._fd, "rb", closefd=False) as file:
            first = file.readline()
        tail = self._after_last_newline(size)
        if not (first.startswith(_PREFIX) or _PREFIX.startswith(first) or _has_format(first)):
            raise UsageError(f"{self.path} holds something else than trajectories: name another file")
        if not tail:
            return
        try:
            _parse(tail)
        except _NotJsonError:
            os.ftruncate(self._fd, size - len(tail))
            self.torn_bytes = len(tail)
            return
        except _BadLineError:
            pass  # Whole, though not of this version: what is written after it must not run into it.
        os.write(self._fd, b"\n")

    def _after_last_newline(self, size: int) -> bytes:
        tail, start = b"", size
        while start > 0 and b"\n" not in tail:
            start = max(0, start - max(1 << 16, len(tail)))
            tail = os.pread(self._fd, size - start, start)
        return tail.rpartition(b"\n")[2]


class _BadLineError(Exception):
    """A line that is not a trajectory; the text says why."""


class _NotJsonError(_BadLineError):
    """A line that is not even JSON, as a torn one is: no proper beginning of an object is itself JSON."""


class _Head(msgspec.Struct):
    format: int


_PREFIX = b'{"format":'
_HEAD = msgspec.json.Decoder(_Head)
_DECODER = msgspec.json.Decoder(Trajectory)


def _to_json(trajectory: Trajectory) -> bytes:
    try:
        body = msgspec.json.encode(trajectory)
    except UnicodeEncodeError:  # Lone surrogates, which UTF-8 cannot hold and the escapes of JSON can.
        body = json.dumps(msgspec.to_builtins(trajectory), separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX + str(FORMAT).encode() + b"," + body[1:]


def _parse(line: bytes) -> Trajectory:
    try:
        _check_format(_HEAD.decode(line))
        trajectory = _DECODER.decode(line)
    except msgspec.ValidationError as error:
        raise _BadLineError(str(error)) from None
    except (msgspec.DecodeError, ValueError):
        trajectory = _parse_slowly(line)
    except RecursionError:
        raise _BadLineError("nested too deeply") from None
    if problem := _broken_rule(trajectory):
        raise _BadLineError(problem)
    return trajectory


def _parse_slowly(line: bytes) -> Trajectory:
    """Read what the fast decoder does not take: lone surrogates. For the rest it knows better what is wrong."""
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _NotJsonError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except ValueError as error:
        raise _NotJsonError(f"not JSON: {error}") from None
    except RecursionError:
        raise _BadLineError("nested too deeply") from None
    try:
        _check_format(msgspec.convert(value, _Head))
        return msgspec.convert(value, Trajectory)
    except msgspec.ValidationError as error:
        raise _BadLineError(str(error)) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _check_format(head: _Head) -> None:
    if head.format != FORMAT:
        raise _BadLineError(f"format {head.format}, and this version of prorl-env reads format {FORMAT}")


def _has_format(line: bytes) -> bool:
    try:
        _HEAD.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


def _broken_rule(trajectory: Trajectory) -> str | None:
    if (trajectory.reward is not None) != trajectory.outcome.reward_valid:
        return f"the outcome {trajectory.outcome} and the reward {trajectory.reward} exclude each other"
    lengths = {len(trajectory.token_ids), len(trajectory.loss_mask), len(trajectory.logprobs)}
    if len(lengths) > 1:
        return "token_ids, loss_mask and logprobs differ in length"
    return None


def _storable(trajectory: Trajectory) -> Trajectory:
    """The same with every mapping a dict of JSON values; raises ValueError for numbers that are not finite."""
    _finite(trajectory.reward, "reward")
    if not all(map(math.isfinite, trajectory.logprobs)):
        raise ValueError("logprobs holds a number that is not finite")
    for name, seconds in trajectory.seconds.items():
        _finite(seconds, f"seconds[{name!r}]")
    turns = tuple(_storable_turn(turn, f"turns[{index}]") for index, turn in enumerate(trajectory.turns))
    return replace(trajectory, seconds=dict(trajectory.seconds), turns=turns)


def _storable_turn(turn: Turn, where: str) -> Turn:
    _finite(turn.policy_seconds, f"{where}.policy_seconds")
    _finite(turn.tool_seconds, f"{where}.tool_seconds")
    results = []
    for index, result in enumerate(turn.tool_results):
        _finite(result.seconds, f"{where}.tool_results[{index}].seconds")
        arguments = _json_object(result.call.arguments, f"{where}.tool_results[{index}].call.arguments")
        results.append(replace(result, call=ToolCall(result.call.name, arguments)))
    return replace(turn, tool_results=tuple(results))


def _finite(value: float | None, where: str) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is not a finite number")


def _json_object(mapping: Mapping[str, object], where: str) -> dict[str, object]:
    for key in mapping:
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {key!r}, which is not text")
    return {key: _json_value(value, f"{where}.{key}") for key, value in mapping.items()}


def _json_value(value: object, where: str) -> object:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else json.dumps(value)
        case Mapping():
            return _json_object(value, where)
        case list() | tuple():
            return [_json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case _:
            raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot hold")
