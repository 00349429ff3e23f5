"""Many episodes at once, with scripted and with real policies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import run

from prorl_env.config import SandboxSpec, Timeouts
from prorl_env.envs.mathematics import MathEnv, MathHandler
from prorl_env.envs.services import Services
from prorl_env.envs.tasks import load_tasks, sample_tasks
from prorl_env.errors import BackendError, ConfigError, ImageNotFound, UsageError
from prorl_env.policies import ContextFull, Move, Player, ReferencePolicy, TokenRecord
from prorl_env.rollout import RolloutConfig, rollout
from prorl_env.types import Message, Outcome, Task, Trajectory


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """A policy that says the given texts in order; an exception among them is raised."""

    name = "script"

    def __init__(self, texts: Sequence[str | Exception]) -> None:
        self._texts = texts

    def player(self, task: Task, *, seed: int) -> Player:
        return _ScriptPlayer(list(self._texts))


class _ScriptPlayer:
    def __init__(self, texts: list[str | Exception]) -> None:
        self._texts = texts
        self.seen: list[tuple[Message, ...]] = []

    async def move(self, messages: tuple[Message, ...]) -> Move:
        self.seen.append(messages)
        text = self._texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return Move(text, "script")

    def tokens(self) -> TokenRecord:
        return TokenRecord()


def tasks(count: int) -> list[Task]:
    return [Task(task_id=f"t{i}", data_source="test", prompt="6 times 7?", answer="42") for i in range(count)]


async def play(
    policy: object, count: int = 1, config: RolloutConfig | None = None, given: Sequence[Task] | None = None
) -> list[Trajectory]:
    config = config or RolloutConfig(runtime="bubblewrap")
    async with Services() as services:
        episodes = rollout(given or tasks(count), policy, handler=MathHandler(), services=services, config=config)  # type: ignore[arg-type]
        async with contextlib.aclosing(episodes):
            return [trajectory async for trajectory in episodes]


def test_a_scripted_episode_becomes_a_whole_trajectory(base_image: Path) -> None:
    texts = [call("execute_bash", command="echo $((6*7))"), "no call", "<tool_call>{", call("finish", answer="42")]
    (trajectory,) = run(play(Script(texts)))
    assert (trajectory.outcome, trajectory.reward, trajectory.answer, trajectory.gold) == (Outcome.OK, 1.0, "42", "42")
    assert (trajectory.policy, trajectory.runtime, trajectory.seed) == ("script", "bubblewrap", 0)
    assert [turn.text for turn in trajectory.turns] == texts
    assert trajectory.turns[0].tool_results[0].content == "42\n"
    assert trajectory.turns[1].observation[0]["role"] == "user"
    assert trajectory.turns[2].parse_error is not None
    assert trajectory.num_tool_calls == 2
    assert set(trajectory.seconds) == {"queued", "init", "run", "eval", "teardown", "policy"}
    assert all(seconds >= 0 for seconds in trajectory.seconds.values())


def test_the_same_script_gives_the_same_through_env_and_rollout(base_image: Path) -> None:
    texts = [
        call("execute_bash", command="seq 3; exit 4"),
        call("execute_ipython_cell", code="1/0"),
        "hm",
        "\\boxed{7}",
    ]
    (trajectory,) = run(play(Script(texts)))
    env = MathEnv(tasks(1), runtime="bubblewrap")
    first, _ = env.reset(seed=0)
    assert first["messages"] == trajectory.prompt
    for text, turn in zip(texts, trajectory.turns, strict=True):
        observation, reward, terminated, _, info = env.step(text)
        assert observation["messages"] == turn.observation
    env.close()
    assert (reward, terminated, info["outcome"]) == (trajectory.reward, True, trajectory.outcome)


@pytest.mark.slow
def test_the_reference_policy_solves_every_sample_task(runtime: str) -> None:
    trajectories = run(play(ReferencePolicy(), config=RolloutConfig(runtime=runtime), given=sample_tasks()))
    assert len(trajectories) == 48
    wrong = [(t.task_id, t.outcome, t.detail) for t in trajectories if t.reward != 1.0]
    assert wrong == []


def test_the_reference_policy_says_what_it_lacks(base_image: Path) -> None:
    with pytest.raises(UsageError, match="has no program"):
        run(play(ReferencePolicy()))


def test_an_episode_that_breaks_costs_itself_alone(base_image: Path) -> None:
    class Mixed(Script):
        def player(self, task: Task, *, seed: int) -> Player:
            broken = task.task_id == "t1"
            return _ScriptPlayer([BackendError("the server is gone") if broken else "\\boxed{42}"])

    trajectories = run(play(Mixed([]), count=4))
    by_id = {trajectory.task_id: trajectory for trajectory in trajectories}
    assert by_id["t1"].outcome is Outcome.INFRA_ERROR
    assert by_id["t1"].reward is None
    assert "the server is gone" in by_id["t1"].detail
    assert [by_id[name].reward for name in ("t0", "t2", "t3")] == [1.0, 1.0, 1.0]


def test_a_full_context_is_truncation(base_image: Path) -> None:
    (trajectory,) = run(play(Script(["hm", ContextFull()])))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED, 0.0)
    assert len(trajectory.turns) == 1


def test_init_that_takes_too_long_is_an_outcome(base_image: Path) -> None:
    config = RolloutConfig(runtime="bubblewrap", timeouts=Timeouts(init_s=0.001))
    (trajectory,) = run(play(Script(["x"]), config=config))
    assert trajectory.outcome is Outcome.INFRA_ERROR
    assert "INIT" in trajectory.detail


def test_a_missing_image_ends_the_whole_since_it_would_be_missing_for_all(base_image: Path) -> None:
    config = RolloutConfig(runtime="bubblewrap", spec=SandboxSpec(image="nope"))
    with pytest.raises(ImageNotFound, match="nope"):
        run(play(Script(["x"]), count=3, config=config))


def test_leaving_early_stops_everything(base_image: Path) -> None:
    async def work() -> None:
        async with Services() as services:
            policy = Script([call("execute_bash", command="sleep 60")])
            config = RolloutConfig(runtime="bubblewrap")
            client = await services.nodes.client("bubblewrap")
            episodes = rollout(tasks(4), policy, handler=MathHandler(), services=services, config=config)
            waiting = asyncio.ensure_future(anext(episodes))
            while (await client.status()).sandboxes < 4:
                await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await episodes.aclose()
            assert (await client.status()).sandboxes == 0

    run(work())


def test_no_more_run_at_once_than_asked_for(base_image: Path) -> None:
    alive = most = 0

    class Counting(Script):
        def player(self, task: Task, *, seed: int) -> Player:
            inner = _ScriptPlayer(["\\boxed{42}"])

            class Counted:
                async def move(self, messages: tuple[Message, ...]) -> Move:
                    nonlocal alive, most
                    alive += 1
                    most = max(most, alive)
                    await asyncio.sleep(0)
                    alive -= 1
                    return await inner.move(messages)

                def tokens(self) -> TokenRecord:
                    return inner.tokens()

            return Counted()

    run(play(Counting([]), count=6, config=RolloutConfig(runtime="bubblewrap", concurrency=2)))
    assert 1 <= most <= 2


@pytest.mark.parametrize("field", ["concurrency", "max_turns"])
def test_numbers_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        RolloutConfig(**{field: 0})  # type: ignore[arg-type]


@pytest.mark.slow
def test_real_problems_load_run_and_grade_their_gold(shared_data: Path, base_image: Path) -> None:
    problems = load_tasks(shared_data / "math" / "problems.jsonl")

    class Gold(Script):
        """Answers with the gold, which a real policy never sees: the grader must accept it."""

        def player(self, task: Task, *, seed: int) -> Player:
            return _ScriptPlayer([f"\\boxed{{{task.answer}}}"])

    trajectories = run(play(Gold([]), given=problems))
    assert len(trajectories) == 199
    broken = [(t.task_id, t.gold, t.detail) for t in trajectories if t.reward != 1.0]
    assert broken == []
