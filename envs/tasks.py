"""Task files: JSON Lines in, ``Task`` records out, and a sentence that says where and why if a line is malformed.

Four row shapes are understood; the first whose ``mark`` a row holds is taken.

=========  ==================================  ==========================================  ======================
shape      prompt                              gold answer                                 id
=========  ==================================  ==========================================  ======================
verl       ``prompt``: text or chat messages   ``reward_model.ground_truth``               ``task_id`` or ``id``
ours       ``prompt``: text or chat messages   ``answer``                                  ``task_id`` or ``id``
problem    ``problem``                         ``answer``                                  ``task_id`` or ``id``
question   ``question``                        ``answer``, after the last ``####`` if any  ``task_id`` or ``id``
=========  ==================================  ==========================================  ======================

``data_source`` names the handler and is ``math`` where a row has none. All other keys of a row go to ``Task.meta`` as
they are. An object may be given as JSON text wherever one is expected, as dumps of columnar files have it.

A gold answer becomes text in one normal form: text without spaces around it; whole numbers without a point (``142.0``
is ``142``), other numbers as short as they can be read back; the items of a list in this form, each once, joined by
``", "``. A row without an id gets one made of a hash of all its fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from prorl_env.errors import TaskFileError
from prorl_env.types import Task

__all__ = ["TaskSource", "load_tasks", "sample_tasks", "task_hash"]


TaskSource = str | Path | Iterable[Task | Mapping[str, Any]]
"""What ``load_tasks`` takes: a JSON Lines file, or rows."""


def load_tasks(source: TaskSource, *, data_source: str | None = None) -> tuple[Task, ...]:
    """Read tasks from a JSON Lines file, or from rows that are in memory already.

    A file is read line by line; blank lines and CRLF are fine. In errors about rows in memory, ``path`` is None and
    ``line`` counts rows from 1.

    Args:
        source: Path of a file, or an iterable of ``Task`` objects and mappings of the shapes above.
        data_source: If given, every task gets this one, whatever its row says.

    Raises:
        TaskFileError: If the file cannot be read, holds no task, or a row is malformed or repeats an id.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        return _collect(_file_rows(path), str(path), data_source)
    if isinstance(source, (Task, Mapping, bytes)) or not isinstance(source, Iterable):
        found = type(source).__name__
        raise TaskFileError(f"tasks must be given as the path of a file or as an iterable of tasks, not as {found}")
    return _collect(enumerate(source, start=1), None, data_source)


def sample_tasks() -> tuple[Task, ...]:
    """The word problems that come with the library, in order of difficulty (``meta["difficulty"]``, 1 to 6)."""
    resource = resources.files("prorl_env.data") / _SAMPLE
    with resources.as_file(resource) as path:
        return _collect(_file_rows(path), _SAMPLE, None)


def task_hash(task: Task) -> str:
    """The SHA-256 of everything a task holds, in hexadecimal digits: equal exactly for equal tasks, on every machine.

    Raises:
        TaskFileError: If ``meta`` holds something that JSON cannot.
    """
    record = {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "prompt": task.prompt,
        "answer": task.answer,
        "meta": task.meta,
    }
    try:
        return _sha256(record)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskFileError(f"task {task.task_id!r} cannot be hashed: meta holds what JSON cannot ({error})") from error


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where a row of one shape keeps things. A dot in a name goes into an object."""

    mark: str
    """The field that a row of this shape has."""
    prompt: str
    answer: str
    solution_first: bool = False
    """Whether a worked solution may stand before the gold, with ``####`` in between."""


_SHAPES = (
    _Shape("reward_model", "prompt", "reward_model.ground_truth"),
    _Shape("prompt", "prompt", "answer"),
    _Shape("problem", "problem", "answer"),
    _Shape("question", "question", "answer", solution_first=True),
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row came from, for errors about it."""

    path: str | None
    line: int

    def fail(self, message: str, field: str | None = None) -> NoReturn:
        where = f"{self.path}, line {self.line}" if self.path is not None else f"row {self.line}"
        raise TaskFileError(f"{where}: {message}", path=self.path, line=self.line, field=field)


def _collect(rows: Iterable[tuple[int, Any]], path: str | None, data_source: str | None) -> tuple[Task, ...]:
    tasks: dict[str, tuple[int, Task]] = {}
    for line, row in rows:
        place = _Place(path, line)
        task = _read_row(row, place, data_source)
        if task.task_id in tasks:
            first = tasks[task.task_id][0]
            named = isinstance(row, Task) or any(name in row for name in _ID_FIELDS)
            what = f"the id {task.task_id!r} is" if named else "there is no id, and every field is"
            place.fail(f"{what} that of line {first}", _ID_FIELDS[0])
        tasks[task.task_id] = (line, task)
    if not tasks:
        raise TaskFileError(f"{path or 'the iterable'} holds no task", path=path)
    return tuple(task for _, task in tasks.values())


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    yield line, _decode(raw, _Place(str(path), line))
    except OSError as error:
        what = "is a directory" if path.is_dir() else (error.strerror or str(error)).lower()
        raise TaskFileError(f"{path} cannot be read as a task file: {what}", path=str(path)) from error


def _decode(raw: bytes, place: _Place) -> Any:
    if place.line == 1 and raw.startswith(_BYTE_ORDER_MARKS):
        place.fail("the file starts with a byte order mark; save it as UTF-8 without one")
    try:
        return json.loads(
            raw.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_refuse_repeats
        )
    except UnicodeDecodeError as error:
        place.fail(f"not UTF-8: byte 0x{raw[error.start]:02x} in column {error.start + 1}")
    except json.JSONDecodeError as error:
        place.fail(f"not JSON: {error.msg} in column {error.colno}")
    except RecursionError:
        place.fail("not JSON that can be read: it is nested too deeply")
    except ValueError as error:
        place.fail(f"not JSON that can be read: {error}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return row


def _read_row(row: Any, place: _Place, data_source: str | None) -> Task:
    if isinstance(row, Task):
        for name in ("task_id", "data_source", "prompt", "answer"):
            _text(getattr(row, name), name, place)
        return replace(row, data_source=data_source or row.data_source)
    if not isinstance(row, Mapping):
        place.fail(f"a task must be an object, not {_kind(row)}")
    _refuse_what_json_cannot_hold(row, place)
    shape = next((shape for shape in _SHAPES if shape.mark in row), None)
    if shape is None:
        names = ", ".join(shape.prompt for shape in _SHAPES[1:])
        place.fail(f"no field holds the problem; it must be in one of {names}", _SHAPES[1].prompt)
    meta = dict(row)
    prompt = _read_prompt(meta, shape.prompt, place)
    answer = _read_answer(meta, shape, place)
    task_id = _read_id(meta, place) or f"task-{_sha256(row)[:16]}"
    own_source = _text(meta.pop("data_source", _DEFAULT_DATA_SOURCE), "data_source", place)
    if data_source is not None and "data_source" in row and own_source != data_source:
        meta["data_source"] = own_source
    return Task(task_id=task_id, data_source=data_source or own_source, prompt=prompt, answer=answer, meta=meta)


def _read_prompt(meta: dict[str, Any], field: str, place: _Place) -> str:
    """Take the prompt out of a row. Of chat messages, those of the user are it; a system message stays in ``meta``."""
    given = _take(meta, field, place)
    messages = _from_json_text(given, "[") if isinstance(given, str) else given
    if not isinstance(messages, list):
        return _text(given, field, place)
    said: dict[str, list[str]] = {"system": [], "user": []}
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in said:
            place.fail(f"{field} holds a message that is of neither user nor system: {_kind(message)} {role!r}", field)
        said[role].append(_text(message.get("content"), f"{field}.content", place))
    if not said["user"]:
        place.fail(f"{field} holds no message of the user", field)
    if said["system"]:
        meta["system"] = "\n\n".join(said["system"])
    return "\n\n".join(said["user"])


def _read_answer(meta: dict[str, Any], shape: _Shape, place: _Place) -> str:
    """Take the gold answer out of a row, in the normal form."""
    field, _, inner = shape.answer.partition(".")
    given = _take(meta, field, place)
    if inner:
        holder = _from_json_text(given, "{") if isinstance(given, str) else given
        if not isinstance(holder, Mapping):
            place.fail(f"{field} must be an object, not {_kind(given)}", field)
        rest = dict(holder)
        given = _take(rest, inner, place, shape.answer)
        meta[field] = rest
    answer = _normal_answer(given, shape.answer, place)
    if shape.solution_first and _GOLD_MARK in answer:
        solution, _, answer = answer.rpartition(_GOLD_MARK)
        meta["solution"] = solution.strip()
    return _text(answer, shape.answer, place).strip()


def _normal_answer(given: Any, field: str, place: _Place) -> str:
    match given:
        case bool() | None | Mapping():
            place.fail(f"{field} must be text, a number or a list of these, not {_kind(given)}", field)
        case str():
            return given.strip()
        case int():
            return str(given)
        case float():
            return str(int(given)) if given.is_integer() and abs(given) < _EXACT_FLOATS else repr(given)
        case [*items] if not any(isinstance(item, list) for item in items):
            return ", ".join(dict.fromkeys(_normal_answer(item, field, place) for item in items))
        case _:
            place.fail(f"{field} must be text, a number or a list of these, not {_kind(given)}", field)


def _read_id(meta: dict[str, Any], place: _Place) -> str | None:
    for field in _ID_FIELDS:
        if field in meta:
            given = meta.pop(field)
            is_number = isinstance(given, int) and not isinstance(given, bool)
            return str(given) if is_number else _text(given, field, place)
    return None


def _take(holder: dict[str, Any], field: str, place: _Place, name: str | None = None) -> Any:
    if field not in holder:
        place.fail(f"the field {name or field} is missing", name or field)
    return holder.pop(field)


def _text(given: Any, field: str, place: _Place) -> str:
    if not isinstance(given, str):
        place.fail(f"{field} must be text, not {_kind(given)}", field)
    if not given.strip():
        place.fail(f"{field} is empty", field)
    return given


def _from_json_text(text: str, opening: str) -> Any:
    """What JSON text stands for, if it is such text; else None."""
    if not text.lstrip().startswith(opening):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refuse_what_json_cannot_hold(row: Mapping[str, Any], place: _Place) -> None:
    """Lone surrogates can be written in JSON and NaN can be read by Python; neither can be sent on."""
    try:
        _canonical(row).encode()
    except (TypeError, ValueError, RecursionError):
        for field, value in row.items():
            try:
                _canonical(value).encode()
            except UnicodeEncodeError:
                place.fail(f"{field} holds half of a surrogate pair, which is no text", str(field))
            except (TypeError, ValueError, RecursionError) as error:
                place.fail(f"{field} holds what JSON cannot: {error}", str(field))
        place.fail("a field name is not text that JSON can hold")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _canonical(value: Any) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain_mapping
    )


def _plain_mapping(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def _sha256(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


_ID_FIELDS = ("task_id", "id")
_GOLD_MARK = "####"
_DEFAULT_DATA_SOURCE = "math"
_SAMPLE = "math_sample.jsonl"
_EXACT_FLOATS = 2**53
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
