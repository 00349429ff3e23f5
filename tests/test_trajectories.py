"""Trajectories go to a file and come back as they were, whatever they hold and however the writer died."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_env.errors import InfraError, StateError, UsageError
from prorl_env.trajectories import (
    FORMAT,
    TornLineWarning,
    TrajectoryWriter,
    decode_trajectory,
    encode_trajectory,
    read_trajectories,
)
from prorl_env.types import Message, Outcome, Phase, ToolCall, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FULL = Trajectory(
    task_id="gsm8k/17",
    data_source="gsm8k",
    outcome=Outcome.OK,
    reward=0.1 + 0.2,
    detail="Compared 18 with 18: é, \u202eltr\u202c, \0, \x1b[31m, \u2028.",
    answer="18",
    gold="18",
    seed=2**63,
    policy="script",
    runtime="bubblewrap",
    prompt=({"role": "system", "content": "Use tools."}, {"role": "user", "content": "9 + 9?"}),
    turns=(
        Turn(
            text='<tool_call>{"name": "execute_ipython_cell", "arguments": {"code": "9 + 9"}}</tool_call>',
            tool_results=(
                ToolResult(call=ToolCall("execute_ipython_cell", {"code": "9 + 9"}), content="18", seconds=1 / 3),
                ToolResult(call=ToolCall("bash", {"n": [1, 1.0, None, {"x": 10**40}]}), content="", is_error=True),
            ),
            observation=({"role": "tool", "content": "18"},),
            stop_reason="stop",
            policy_seconds=5e-324,
            tool_seconds=1.7976931348623157e308,
        ),
        Turn(text="\\boxed{18}", parse_error="no call", stop_reason="length"),
    ),
    token_ids=(1, 2, 3),
    loss_mask=(0, 1, 1),
    logprobs=(0.0, -1 / 3, -1e-17),
    seconds={"init": 0.25, "run": 2.0},
)
TIMED_OUT = Trajectory(
    task_id="t", data_source="d", outcome=Outcome.TIMEOUT, reward=None, timeout_phase=Phase.EVAL, detail="too slow"
)


def with_arguments(arguments: Mapping[Any, object]) -> Trajectory:
    """A trajectory with one tool call of these arguments."""
    result = ToolResult(call=ToolCall("f", arguments), content="")
    return replace(FULL, turns=(Turn(text="", tool_results=(result,)),))


def round_trip(trajectory: Trajectory) -> Trajectory:
    """Write and read one."""
    return decode_trajectory(encode_trajectory(trajectory))


def read(path: Path) -> list[Trajectory]:
    """Everything in a file."""
    return list(read_trajectories(path))


PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
TEXT = st.text(st.characters(), max_size=20).filter(lambda text: not PAIR.search(text))
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=TEXT)
RESULT = st.builds(
    ToolResult,
    call=st.builds(ToolCall, name=TEXT, arguments=st.dictionaries(TEXT, VALUE, max_size=3)),
    content=TEXT,
    is_error=st.booleans(),
    seconds=NUMBER,
)
TURN = st.builds(
    Turn,
    text=TEXT,
    tool_results=st.lists(RESULT, max_size=2).map(tuple),
    observation=st.lists(MESSAGE, max_size=2).map(tuple),
    parse_error=st.none() | TEXT,
    stop_reason=TEXT,
    policy_seconds=NUMBER,
    tool_seconds=NUMBER,
)


@st.composite
def any_trajectory(draw: st.DrawFn) -> Trajectory:
    """Any trajectory that keeps the rules of its class."""
    outcome = draw(st.sampled_from(Outcome))
    tokens = draw(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 1), NUMBER), max_size=4))
    return Trajectory(
        task_id=draw(TEXT),
        data_source=draw(TEXT),
        outcome=outcome,
        reward=draw(NUMBER) if outcome.reward_valid else None,
        detail=draw(TEXT),
        answer=draw(st.none() | TEXT),
        gold=draw(st.none() | TEXT),
        timeout_phase=draw(st.none() | st.sampled_from(Phase)),
        seed=draw(st.none() | st.integers()),
        policy=draw(TEXT),
        runtime=draw(TEXT),
        prompt=tuple(draw(st.lists(MESSAGE, max_size=2))),
        turns=tuple(draw(st.lists(TURN, max_size=2))),
        token_ids=tuple(token for token, _, _ in tokens),
        loss_mask=tuple(mask for _, mask, _ in tokens),
        logprobs=tuple(logprob for _, _, logprob in tokens),
        seconds=draw(st.dictionaries(TEXT, NUMBER, max_size=2)),
    )


@settings(deadline=None, max_examples=150, database=None)
@given(any_trajectory())
def test_any_trajectory_comes_back_equal(trajectory: Trajectory) -> None:
    again = round_trip(trajectory)
    assert again == trajectory
    assert repr(again) == repr(trajectory)  # Equality would let -0.0 pass for 0.0 and 1 for 1.0 or True.
    assert b"\n" not in encode_trajectory(trajectory)


def test_a_line_is_flat_json_with_a_format() -> None:
    record = json.loads(encode_trajectory(FULL))
    assert record["format"] == FORMAT
    assert next(iter(record)) == "format"
    assert record["reward"] == FULL.reward
    assert record["turns"][0]["tool_results"][0]["call"]["arguments"] == {"code": "9 + 9"}


def test_types_come_back_not_only_values() -> None:
    again = round_trip(replace(FULL, reward=1, timeout_phase=Phase.RUN))
    assert type(again.reward) is float
    assert type(again.outcome) is Outcome
    assert type(again.timeout_phase) is Phase
    assert type(again.turns[0].tool_results[0].call) is ToolCall


def test_lone_surrogates_survive() -> None:
    trajectory = replace(FULL, detail="a\ud800b\udfffc", turns=(Turn(text="\udc80\n"),))
    line = encode_trajectory(trajectory)
    assert line.isascii()
    assert decode_trajectory(line) == trajectory


def test_a_surrogate_pair_comes_back_as_the_character_it_spells() -> None:
    assert round_trip(replace(FULL, detail="\ud83d\ude00")).detail == "\U0001f600"


def test_mappings_of_any_kind_come_back_as_equal_dicts() -> None:
    again = round_trip(with_arguments(MappingProxyType({"a": MappingProxyType({"b": (1, 2)})})))
    assert again.turns[0].tool_results[0].call.arguments == {"a": {"b": [1, 2]}}


def test_what_an_agent_wrote_as_nan_is_stored_as_text() -> None:
    again = round_trip(with_arguments({"x": math.nan, "y": [math.inf, -math.inf]}))
    assert again.turns[0].tool_results[0].call.arguments == {"x": "NaN", "y": ["Infinity", "-Infinity"]}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("reward", lambda x: replace(FULL, reward=x)),
        ("logprobs", lambda x: replace(FULL, logprobs=(0.0, x, 0.0))),
        ("seconds['run']", lambda x: replace(FULL, seconds={"run": x})),
        ("turns[0].policy_seconds", lambda x: replace(FULL, turns=(Turn(text="", policy_seconds=x),))),
        ("turns[0].tool_seconds", lambda x: replace(FULL, turns=(Turn(text="", tool_seconds=x),))),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name(
    field: str, spoil: Callable[[float], Trajectory], number: float
) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{field} ")):
        encode_trajectory(spoil(number))


@pytest.mark.parametrize(
    ("trajectory", "reason"),
    [
        (replace(FULL, reward=None), "the outcome ok and the reward None exclude each other"),
        (replace(TIMED_OUT, reward=0.0), "the outcome timeout and the reward 0.0 exclude each other"),
        (replace(FULL, token_ids=(1,)), "differ in length"),
        (with_arguments({"x": b"bytes"}), r"arguments.x is a bytes"),
        (with_arguments({1: 2}), "the key 1, which is not text"),
        (replace(FULL, seed=cast("Any", "7")), r"Expected `int \| null`, got `str` - at `\$.seed`"),
        (replace(FULL, prompt=(Message(role=cast("Any", "robot"), content=""),)), r"robot.*\$.prompt"),
        (replace(FULL, detail=cast("Any", object())), "object"),
    ],
)
def test_a_trajectory_that_could_not_be_read_back_is_not_written(trajectory: Trajectory, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        encode_trajectory(trajectory)
    assert trajectory.task_id in caught.value.message


def test_arguments_nested_too_deeply_are_a_usage_error() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"d": deep}
    with pytest.raises(UsageError, match="recursion"):
        encode_trajectory(with_arguments(deep))
    with pytest.raises(UsageError, match="nested too deeply"):
        decode_trajectory(b'{"format":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not JSON"),
        (b"garbage", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `format`"),
        (b'{"format":"1"}', r"Expected `int`, got `str` - at `\$.format`"),
        (b'{"format":2}', "format 2, and this version of prorl-env reads format 1"),
        (b'{"format":1}', "missing required field"),
        (encode_trajectory(FULL).replace(b'"ok"', b'"fine"'), r"fine.*\$.outcome"),
        (encode_trajectory(FULL).replace(b'"seed":9223372036854775808', b'"seed":NaN'), "NaN is not a number"),
        (encode_trajectory(FULL).replace(b"[0,1,1]", b"[0,1]"), "differ in length"),
    ],
)
def test_a_malformed_line_is_named_with_its_path_and_number(tmp_path: Path, line: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        decode_trajectory(line)
    path = tmp_path / "run.jsonl"
    path.write_bytes(encode_trajectory(FULL) + b"\n\n" + (line or b"{") + b"\n" + encode_trajectory(FULL) + b"\n")
    with pytest.raises(UsageError, match=rf"run\.jsonl, line 3: not a trajectory: .*{reason}"):
        read(path)


def test_unknown_keys_are_ignored_and_missing_ones_have_their_defaults() -> None:
    line = '{"outcome":"infra_error","task_id":"t","reward":null,"data_source":"d","format":1,"later":[1]}'
    assert decode_trajectory(line) == Trajectory(task_id="t", data_source="d", outcome=Outcome.INFRA_ERROR, reward=None)


def test_a_file_is_written_continued_and_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(FULL)
        assert read(path) == [FULL]  # Each line stands as soon as write() returns.
        writer.write(TIMED_OUT)
    with TrajectoryWriter(path) as writer:
        assert writer.torn_bytes == 0
        writer.write(FULL)
    assert read(path) == [FULL, TIMED_OUT, FULL]


def test_a_tear_at_any_byte_costs_only_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = encode_trajectory(TIMED_OUT) + b"\n", encode_trajectory(replace(FULL, detail="é\ud800")) + b"\n"
    for size in range(len(second) + 1):
        path.write_bytes(first + second[:size])
        whole = size >= len(second) - 1  # A line that lacks only its newline counts.
        expected = [TIMED_OUT, decode_trajectory(second)] if whole else [TIMED_OUT]
        if size == 0 or whole:
            assert read(path) == expected
        else:
            with pytest.warns(TornLineWarning, match=rf"ignored a torn last line \(line 2, {size} bytes\)"):
                assert read(path) == expected
        with TrajectoryWriter(path) as writer:
            assert writer.torn_bytes == (0 if whole else size)
            writer.write(TIMED_OUT)
        assert read(path) == [*expected, TIMED_OUT]


def test_a_tear_in_the_only_line_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    line = encode_trajectory(TIMED_OUT)
    for size in (1, 5, len(line) - 1):
        path.write_bytes(line[:size])
        with TrajectoryWriter(path) as writer:
            assert (writer.torn_bytes, path.read_bytes()) == (size, b"")


def test_a_torn_line_longer_than_one_read_is_removed_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = encode_trajectory(TIMED_OUT) + b"\n", encode_trajectory(replace(FULL, detail="x" * 1_000_000))
    path.write_bytes(first + second[:-1])
    TrajectoryWriter(path).close()
    assert path.read_bytes() == first


ENDLESS_WRITER = """
import sys
from prorl_env.trajectories import TrajectoryWriter
from prorl_env.types import Outcome, Trajectory
with TrajectoryWriter(sys.argv[1]) as writer:
    for seed in range(1000):
        writer.write(Trajectory(task_id="t" * 300_000, data_source="d", outcome=Outcome.OK, reward=1.0, seed=seed))
        print(seed, flush=True)
"""


@pytest.mark.filterwarnings("default::prorl_env.trajectories.TornLineWarning")
def test_a_killed_writer_loses_nothing_that_it_had_reported(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with subprocess.Popen([sys.executable, "-c", ENDLESS_WRITER, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        reported = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
    assert [trajectory.seed for trajectory in read(path)][: len(reported)] == reported
    with TrajectoryWriter(path) as writer:
        writer.write(FULL)
    seeds = [trajectory.seed for trajectory in read(path)]
    assert seeds == [*range(len(seeds) - 1), FULL.seed]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    # The kernel cuts a write at the limit and refuses the rest, as a full disk does.
    script = f"""
import resource, signal, sys
from prorl_env.errors import InfraError
from prorl_env.trajectories import TrajectoryWriter, decode_trajectory
from prorl_env.types import Outcome, Trajectory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with TrajectoryWriter({str(path)!r}) as writer:
    small = Trajectory(task_id="small", data_source="d", outcome=Outcome.OK, reward=1.0)
    writer.write(small)
    try:
        writer.write(Trajectory(task_id="big" * 100_000, data_source="d", outcome=Outcome.OK, reward=1.0))
    except InfraError as error:
        print(error)
    writer.write(small)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"could not append 300\d\d\d bytes to .*run\.jsonl", done.stdout)
    assert InfraError.__name__ not in done.stderr
    assert [trajectory.task_id for trajectory in read(path)] == ["small", "small"]


def test_a_refused_trajectory_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(FULL)
        with pytest.raises(UsageError):
            writer.write(replace(FULL, reward=math.nan))
        writer.write(TIMED_OUT)
    assert read(path) == [FULL, TIMED_OUT]


def test_a_second_writer_is_refused_while_the_first_is_open(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TrajectoryWriter(path) as writer:
        with pytest.raises(UsageError, match="another writer has"):
            TrajectoryWriter(path)
        writer.write(FULL)
    TrajectoryWriter(path).close()
    assert read(path) == [FULL]


@pytest.mark.parametrize("content", [b'{"problem": "1+1", "answer": "2"}\n', b"precious notes", b"a\nb\nc", b'{"f'])
def test_a_file_of_something_else_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    if content == b'{"f':  # Could be the very beginning of a line of ours.
        TrajectoryWriter(path).close()
        assert path.read_bytes() == b""
        return
    with pytest.raises(UsageError, match="holds something else than trajectories"):
        TrajectoryWriter(path)
    assert path.read_bytes() == content


def test_paths_that_cannot_be_opened_are_usage_errors(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, reason in [
        (tmp_path / "none" / "run.jsonl", "No such file"),
        (tmp_path, "Is a directory"),
        (fifo, "not a regular file"),
    ]:
        with pytest.raises(UsageError, match=reason):
            TrajectoryWriter(path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="Is a directory"):
        read(tmp_path)


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "run.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(StateError, match="is closed"):
        writer.write(FULL)
