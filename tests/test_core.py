"""Values: types, config, spaces."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from prorl_env.config import Limits, Paths, SandboxSpec, Timeouts
from prorl_env.errors import ConfigError
from prorl_env.spaces import Unicode, conversation_space
from prorl_env.types import Outcome, Score, Task


@pytest.mark.parametrize("value", [Limits(), Timeouts(tool_s=3.5), SandboxSpec(image="x", env={"A": "b"}), Task(
    task_id="t", data_source="d", prompt="p", answer="a", meta={"k": [1]}
)])  # fmt: skip
def test_values_paste_back_and_pickle(value: object) -> None:
    names = {"Limits": Limits, "Timeouts": Timeouts, "SandboxSpec": SandboxSpec, "Task": Task}
    assert eval(repr(value), names) == value
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "3", None, True])
def test_limits_and_timeouts_refuse_what_is_not_above_zero(bad: object) -> None:
    with pytest.raises(ConfigError, match="processes"):
        Limits(processes=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tool_s"):
        Timeouts(tool_s=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"workdir": "here"}, "workdir"),
        ({"env": {"A=B": "c"}}, "A=B"),
        ({"env": {"A": "\0"}}, "A"),
        ({"env": {"": "c"}}, "env"),
    ],
)
def test_a_spec_refuses_what_cannot_be(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SandboxSpec(**fields)  # type: ignore[arg-type]


def test_paths_come_from_the_environment() -> None:
    assert Paths.from_env({"PRORL_ENV_HOME": "/a", "PRORL_ENV_RUN": "/b"}) == Paths(home=Path("/a"), run=Path("/b"))
    assert Paths.from_env({"XDG_CACHE_HOME": "/c"}).home == Path("/c/prorl-env")


def test_exactly_three_outcomes_carry_a_reward() -> None:
    assert {outcome for outcome in Outcome if outcome.reward_valid} == {
        Outcome.OK,
        Outcome.TRUNCATED,
        Outcome.AGENT_ERROR,
    }


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if not outcome.reward_valid])
def test_no_score_can_be_made_of_a_breakdown(outcome: Outcome) -> None:
    with pytest.raises(ValueError, match="carries no reward"):
        Score(0.0, outcome)


@pytest.mark.parametrize("text", ["", "é漢🙂", "\x00\n", "\ud800", "x" * 10])
def test_unicode_contains_any_text(text: str) -> None:
    assert text in Unicode(10)


@pytest.mark.parametrize("thing", ["x" * 11, b"bytes", None, 3, ["a"]])
def test_unicode_contains_nothing_else(thing: object) -> None:
    assert thing not in Unicode(10)


def test_unicode_samples_are_contained_and_reproducible() -> None:
    first, second = Unicode(20, seed=3), Unicode(20, seed=3)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(sample in first for sample in samples)
    assert len(set(samples)) > 10


def test_unicode_compares_pickles_and_goes_through_json() -> None:
    space = Unicode(20)
    assert pickle.loads(pickle.dumps(space)) == space
    assert Unicode(20) != Unicode(21)
    assert eval(repr(space)) == space
    assert space.from_jsonable(space.to_jsonable(["a", ""])) == ["a", ""]


def test_unicode_batches() -> None:
    space = Unicode(20)
    batched = batch_space(space, 3)
    assert isinstance(batched, spaces.Tuple)
    assert batched.contains(("a", "", "c"))
    assert list(iterate(batched, ("ab", "", "cde"))) == ["ab", "", "cde"]
    empty = create_empty_array(space, 2)
    assert empty == ("", "")
    assert concatenate(space, ["x", "y"], empty) == ("x", "y")
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=np.ones(3))  # type: ignore[arg-type]


def test_the_conversation_space_contains_what_environments_give() -> None:
    space = conversation_space()
    assert {"messages": ({"role": "user", "content": "hi"}, {"role": "tool", "content": ""})} in space
    assert {"messages": ()} in space
    assert {"messages": ({"role": "user"},)} not in space
    assert space.sample() in space
