"""The environments as gymnasium sees them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from helpers import wait_until

import prorl_env
from prorl_env.config import Limits, Timeouts
from prorl_env.envs.mathematics import MathEnv
from prorl_env.envs.tools import parse_tool_calls
from prorl_env.errors import (
    ActionError,
    ConfigError,
    EnvClosed,
    ResetNeeded,
    SetupError,
    TaskFileError,
    UnknownRuntime,
    UnknownTask,
)
from prorl_env.types import Task

MATH = "prorl_env:ProRL/Math-v0"
TASK = Task(task_id="t1", data_source="test", prompt="What is 6 times 7?", answer="42")


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def env(base_image: Path) -> Iterator[MathEnv]:
    env = MathEnv([TASK], runtime="bubblewrap", max_turns=4)
    yield env
    env.close()


def contents(observation: dict[str, Any]) -> list[str]:
    return [message["content"] for message in observation["messages"]]


def test_gymnasiums_checker_passes(runtime: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(MATH, runtime=runtime).unwrapped)


def test_stable_baselines_checker_passes_but_for_its_word_on_sequences(base_image: Path) -> None:
    from stable_baselines3.common.env_checker import check_env as sb3_check_env

    env = gym.make(MATH, runtime="bubblewrap").unwrapped
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sb3_check_env(env)
    env.close()
    said = {str(warning.message).split(".")[0] for warning in caught}
    assert len(said) == 1
    assert "Sequence" in said.pop()


def test_it_pickles_and_the_copy_is_its_equal(env: MathEnv) -> None:
    first, _ = env.reset(seed=3)
    copy = pickle.loads(pickle.dumps(env))
    second, _ = copy.reset(seed=3)
    copy.close()
    assert first == second
    assert (copy.tasks, copy.max_turns, copy.runtime) == (env.tasks, 4, "bubblewrap")


def test_the_same_seed_gives_the_same_tasks(base_image: Path) -> None:
    def ids(seed: int) -> list[str]:
        env = MathEnv(runtime="bubblewrap")
        chosen = [env.reset(seed=seed)[1]["task_id"]] + [env.reset()[1]["task_id"] for _ in range(4)]
        env.close()
        return chosen

    assert ids(5) == ids(5)
    assert ids(5) != ids(6)


def test_an_episode_with_tools(env: MathEnv) -> None:
    observation, info = env.reset(seed=0)
    assert [message["role"] for message in observation["messages"]] == ["system", "user"]
    assert contents(observation)[1] == TASK.prompt
    assert "execute_ipython_cell" in contents(observation)[0]
    assert info == {"task_id": "t1", "data_source": "test"}
    observation, reward, terminated, truncated, info = env.step(call("execute_bash", command="echo $((6*7)); false"))
    assert contents(observation) == ["42\n[exit code 1]"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"task_id": "t1", "turn": 1, "tool_calls": 1}
    two = call("think", thought="hm") + call("execute_ipython_cell", code="print(1); 6 * 7")
    observation, *_ = env.step(two)
    assert contents(observation) == ["", "1\n42\n"]
    observation, reward, terminated, truncated, info = env.step(call("finish", answer="42"))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["outcome"], info["reward_valid"], info["answer"]) == ("ok", True, "42")
    assert observation == {"messages": ()}


@pytest.mark.parametrize(
    ("text", "reward"),
    [("So it is \\boxed{42}.", 1.0), ("\\boxed{41} no, \\boxed{\\frac{84}{2}}", 1.0), ("\\boxed{43}", 0.0)],
)
def test_a_boxed_answer_ends_the_episode(env: MathEnv, text: str, reward: float) -> None:
    env.reset(seed=0)
    _, got, terminated, _, info = env.step(text)
    assert (got, terminated, info["outcome"]) == (reward, True, "ok")


def test_a_malformed_call_is_an_observation_and_costs_a_turn(env: MathEnv) -> None:
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step('<tool_call>{"name": "execute_bash", "argu')
    assert (reward, terminated, truncated, info["tool_calls"]) == (0.0, False, False, 0)
    assert contents(observation) == [info["parse_error"]]
    assert env.step("\\boxed{42}")[1] == 1.0


def test_the_last_turn_without_an_answer_is_truncated_and_graded(env: MathEnv) -> None:
    env.reset(seed=0)
    for _ in range(3):
        observation, _, terminated, truncated, _ = env.step("I wonder.")
        assert (terminated, truncated) == (False, False)
        assert "\\boxed" in contents(observation)[0]
    _, reward, terminated, truncated, info = env.step("I wonder.")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["outcome"], info["reward_valid"]) == ("truncated", True)


def test_the_gold_answer_is_nowhere_in_the_sandbox_or_the_observation(base_image: Path) -> None:
    gold = "918273645546"
    env = MathEnv([Task(task_id="t", data_source="d", prompt="p", answer=gold)], runtime="bubblewrap")
    observation, _ = env.reset(seed=0)
    assert gold not in str(observation)
    command = (
        f"grep -rIl {gold[:6]}''{gold[6:]} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr 2>/dev/null; env"
    )
    observation, *_ = env.step(call("execute_bash", command=command))
    assert gold not in str(observation)
    env.close()


def test_a_sandbox_that_dies_is_an_outcome_without_a_reward(env: MathEnv) -> None:
    env.reset(seed=0)
    assert env._episode is not None
    sandbox = env._episode.sandbox
    assert sandbox is not None
    prorl_env.portal.portal().call(sandbox.stop())
    observation, reward, terminated, truncated, info = env.step(call("execute_bash", command="true"))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["outcome"], info["reward_valid"], info["answer"]) == ("infra_error", False, None)
    assert "stopped" in info["detail"] or "no sandbox" in info["detail"]
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset()
    assert env.step("\\boxed{42}")[1] == 1.0
    assert observation == {"messages": ()}


def test_a_gold_that_means_nothing_is_an_invalid_task(base_image: Path) -> None:
    env = MathEnv([Task(task_id="t", data_source="d", prompt="p", answer="\\frac{")], runtime="bubblewrap")
    env.reset(seed=0)
    *_, truncated, info = env.step("\\boxed{1}")
    assert (truncated, info["outcome"], info["reward_valid"]) == (True, "invalid_task", False)
    env.close()


def test_tool_time_over_the_budget_is_a_timeout_without_a_reward(base_image: Path) -> None:
    env = MathEnv([TASK], runtime="bubblewrap", timeouts=Timeouts(tool_s=0.6, run_s=0.5))
    env.reset(seed=0)
    observation, *_ = env.step(call("execute_bash", command="sleep 30"))
    assert contents(observation) == ["[stopped after 0.5 s]\n[exit code 130]"]
    *_, truncated, info = env.step(call("execute_bash", command="true"))
    assert (truncated, info["outcome"], info["timeout_phase"], info["reward_valid"]) == (True, "timeout", "run", False)
    env.close()


def test_long_output_is_cut_in_the_middle_and_says_so(base_image: Path) -> None:
    env = MathEnv([TASK], runtime="bubblewrap", limits=Limits(output_bytes=100))
    env.reset(seed=0)
    (text,) = contents(env.step(call("execute_bash", command="seq 1 1000"))[0])
    assert text.startswith("1\n2\n")
    assert text.endswith("999\n1000\n")
    assert "bytes left out" in text
    assert len(text) < 200
    (text,) = contents(env.step(call("execute_ipython_cell", code="print('x' * 1000)"))[0])
    assert "characters left out" in text
    env.close()


def test_examples_show_every_call_as_the_parser_reads_it(base_image: Path) -> None:
    env = MathEnv([TASK], runtime="bubblewrap", examples=True)
    observation, _ = env.reset(seed=0)
    assert [message["role"] for message in observation["messages"]] == [
        "system",
        *["user", "assistant", "tool", "assistant"] * 2,
        "user",
    ]
    for message in observation["messages"]:
        if message["role"] == "assistant":
            parsed = parse_tool_calls(message["content"], env.handler.tools)
            assert parsed.error is None
            assert len(parsed.calls) == 1
    code = next(m["content"] for m in observation["messages"] if m["role"] == "assistant")
    said = next(m["content"] for m in observation["messages"] if m["role"] == "tool")
    assert contents(env.step(code)[0]) == [said]
    env.close()


def test_misuse_is_named(env: MathEnv) -> None:
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset(seed=0)
    for thing in (None, 3, b"x", ["x"]):
        with pytest.raises(ActionError):
            env.step(thing)  # type: ignore[arg-type]
    with pytest.raises(UnknownTask, match="nope"):
        env.reset(options={"task_id": "nope"})
    with pytest.raises(ConfigError, match="colour"):
        env.reset(options={"colour": 1})
    env.close()
    env.close()
    for use in (lambda: env.step("x"), env.reset):
        with pytest.raises(EnvClosed):
            use()


def test_observations_are_fresh_objects(env: MathEnv) -> None:
    first, _ = env.reset(seed=0)
    first["messages"][0]["content"] = "changed"
    second, _ = env.reset(seed=0)
    assert second["messages"][0]["content"] != "changed"


def test_closing_before_reset_starts_nothing(base_image: Path) -> None:
    code = (
        "import gymnasium as gym, threading\n"
        f"env = gym.make('{MATH}', runtime='bubblewrap'); env.close()\n"
        "print([t.name for t in threading.enumerate()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['MainThread']"


def test_render_gives_the_conversation(base_image: Path) -> None:
    env = gym.make(MATH, tasks=[TASK], runtime="bubblewrap", render_mode="ansi")
    env.reset(seed=0)
    env.step(call("execute_bash", command="echo hello"))
    text = env.render()
    assert isinstance(text, str)
    assert text.endswith("[tool]\nhello\n")
    assert TASK.prompt in text
    env.close()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"tasks": "/no/such/file.jsonl"}, TaskFileError, "/no/such/file.jsonl"),
        ({"runtime": "docker"}, UnknownRuntime, "docker"),
        ({"max_turns": 0}, ConfigError, "max_turns"),
        ({"max_turns": 2.5}, ConfigError, "max_turns"),
        ({"tasks": []}, TaskFileError, "no task"),
    ],
)
def test_bad_arguments_are_named_when_the_environment_is_made(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        gym.make(MATH, **arguments)


@pytest.mark.parametrize("env_id", ["ProRL/Code-v0", "ProRL/STEM-v0", "ProRL/SWE-v0"])
def test_an_id_to_come_says_so(env_id: str) -> None:
    with pytest.raises(SetupError, match="not in version"):
        gym.make(f"prorl_env:{env_id}")


def test_an_unknown_id_is_gymnasiums_error() -> None:
    with pytest.raises(gym.error.NameNotFound):
        gym.make("prorl_env:ProRL/Nothing-v0")


def test_an_address_works_like_a_name(base_image: Path, short_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "prorl_env.cli", "node", "--address", f"ipc://{short_dir}/node"],
        stdout=subprocess.PIPE,
        text=True,
    ) as node:
        assert node.stdout is not None
        assert node.stdout.readline().strip() == f"ipc://{short_dir}/node"
        env = MathEnv([TASK], runtime=f"ipc://{short_dir}/node")
        env.reset(seed=0)
        assert contents(env.step(call("execute_bash", command="echo there"))[0]) == ["there\n"]
        env.close()
        node.terminate()
        assert node.wait(10) == 0
    assert wait_until(lambda: not (short_dir / "node").exists(), within_s=2)


def test_a_forked_process_has_an_environment_of_its_own(env: MathEnv) -> None:
    code = f"""
import gymnasium as gym, os, sys
env = gym.make("{MATH}", runtime="bubblewrap"); env.reset(seed=0)
pid = os.fork()
if pid == 0:
    mine = gym.make("{MATH}", runtime="bubblewrap"); mine.reset(seed=0); mine.close()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(env.step("\\\\boxed{{1}}")[2])
env.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "True", done.stderr


def test_an_environment_inherited_by_a_fork_is_the_parents(env: MathEnv) -> None:
    code = f"""
import gymnasium as gym, os, sys
env = gym.make("{MATH}", runtime="bubblewrap").unwrapped; env.reset(seed=0)
pid = os.fork()
if pid == 0:
    try: env.step("x")
    except Exception as error: print(type(error).__name__, flush=True)
    env.reset(seed=0)
    print(env.step("\\\\boxed{{1}}")[2], flush=True)
    env.close()
    os._exit(0)
os.waitpid(pid, 0)
print(env.step("\\\\boxed{{1}}")[2])
env.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["ResetNeeded", "True", "True"], done.stderr


def one() -> gym.Env[Any, Any]:
    return gym.make(MATH, tasks=[TASK], runtime="bubblewrap")


@pytest.mark.slow
def test_gymnasiums_vector_environments_step_it(base_image: Path) -> None:
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    for make in (SyncVectorEnv, lambda fns: AsyncVectorEnv(fns, shared_memory=False, context="spawn")):
        envs = make([one] * 2)
        envs.reset(seed=0)
        _, rewards, terminated, *_ = envs.step(("\\boxed{42}", "\\boxed{7}"))
        assert rewards.tolist() == [1.0, 0.0]
        assert terminated.tolist() == [True, True]
        envs.close()


def test_closing_from_another_thread_ends_a_step_in_flight(env: MathEnv) -> None:
    env.reset(seed=0)
    with ThreadPoolExecutor() as threads:
        step = threads.submit(env.step, call("execute_bash", command="echo $$ > /tmp/begun; sleep 60"))
        assert env._episode is not None
        sandbox = env._episode.sandbox
        assert sandbox is not None
        running = wait_until(
            lambda: prorl_env.portal.portal().call(sandbox.exec(["test", "-s", "/tmp/begun"])).exit_code == 0,
            within_s=10,
        )
        assert running
        env.close()
        with pytest.raises(EnvClosed):
            step.result(timeout=10)


def test_it_works_inside_a_running_event_loop(base_image: Path) -> None:
    import asyncio

    async def cell() -> float:
        env = MathEnv([TASK], runtime="bubblewrap")
        env.reset(seed=0)
        reward = env.step("\\boxed{42}")[1]
        env.close()
        return reward

    assert asyncio.run(cell()) == 1.0
