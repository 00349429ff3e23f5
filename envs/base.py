"""``SandboxEnv``: an episode with a sandbox behind the standard ``reset`` and ``step``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym

from prorl_env.config import Limits, SandboxSpec, Timeouts
from prorl_env.envs.episode import Episode, TurnResult
from prorl_env.envs.handler import TaskHandler
from prorl_env.envs.services import Services, shared_services
from prorl_env.envs.tasks import load_tasks
from prorl_env.errors import ActionError, ConfigError, EnvClosed, ResetNeeded, UnknownRuntime, UnknownTask
from prorl_env.portal import portal
from prorl_env.remote.embedded import is_address
from prorl_env.remote.runtimes import RUNTIMES
from prorl_env.spaces import Unicode, conversation_space
from prorl_env.types import Message, Task

__all__ = ["Observation", "SandboxEnv"]

Observation = dict[str, Any]
"""``{"messages": ({"role": str, "content": str}, …)}``: what is new since the last observation."""


class SandboxEnv(gym.Env[Observation, str]):
    """Base of the environments. One instance runs one episode at a time.

    ``reset`` picks a task and starts a fresh sandbox (INIT). ``step`` takes the assistant's text, verbatim, and
    carries out the tool calls in it (one turn of RUN); a malformed call is an observation, with
    ``info["parse_error"]``. The step that ends the episode also grades it (EVAL) and has in its info: ``outcome``,
    ``reward_valid``, ``detail``, ``answer``. If something breaks, that step has ``truncated=True`` and
    ``reward_valid=False``; its reward of 0.0 means nothing.

    The first sandbox starts with the first ``reset``, never before. ``close`` stops what runs; it is safe to call
    twice and before ``reset``. The environment pickles as its arguments.

    Args:
        handler: What the family of tasks is.
        tasks: A JSON Lines file, or tasks.
        runtime: ``auto``, ``apptainer``, ``singularity``, ``bubblewrap``, or the address of a node server.
        image: A name in the node's image store, the path of a root directory, or ``auto``.
        max_turns: Turns until the episode is truncated, and graded with what there is.
        timeouts: How long each phase may take.
        limits: What the sandbox may use.
        render_mode: ``ansi`` makes ``render`` return the conversation as text.

    Raises:
        TaskFileError: If the task file is missing, malformed or empty.
        ConfigError: If ``max_turns`` is below 1.
        UnknownRuntime: If there is no such runtime.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]

    def __init__(
        self,
        handler: TaskHandler,
        tasks: str | Path | Iterable[Task],
        *,
        runtime: str = "auto",
        image: str = "auto",
        max_turns: int = 10,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigError(f"max_turns must be a whole number of at least 1, got {max_turns!r}")
        if not isinstance(runtime, str) or (runtime not in RUNTIMES and not is_address(runtime)):
            raise UnknownRuntime(
                f"There is no runtime {runtime!r}; there are {', '.join(RUNTIMES)}, or the address of a node server."
            )
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"render_mode must be None or 'ansi', got {render_mode!r}")
        self.tasks = load_tasks(tasks)
        self.handler = handler
        self.runtime = runtime
        self.sandbox_spec = SandboxSpec(image=image, limits=limits or Limits())
        self.max_turns = max_turns
        self.timeouts = timeouts or Timeouts()
        self.render_mode = render_mode
        self.observation_space = conversation_space()
        self.action_space = Unicode()
        self._by_id = {task.task_id: task for task in self.tasks}
        self._episode: Episode | None = None
        self._transcript: list[Message] = []
        self._closed = False
        self._pid = os.getpid()

    @property
    def task(self) -> Task | None:
        """The task of the current episode."""
        return None if self._episode is None else self._episode.task

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the current episode by phase; kept out of ``info``, which does not depend on the clock."""
        return {} if self._episode is None else self._episode.seconds

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, ending the one that runs.

        Args:
            seed: Makes the following choices of tasks reproducible.
            options: ``{"task_id": …}`` picks a task by name.

        Returns:
            The messages before the first turn, and ``{"task_id", "data_source"}``.

        Raises:
            UnknownTask: If there is no task of that name.
            ConfigError: If ``options`` holds anything else.
            EnvClosed: After ``close``.
            SetupError: If this machine lacks the runtime or the image.
            InfraError: If the sandbox does not come up.
        """
        if self._closed:
            raise EnvClosed("this environment has been closed")
        super().reset(seed=seed)
        task = self._choose(options)
        portal().call(self._restart(shared_services(), task))
        assert self._episode is not None
        info = {"task_id": task.task_id, "data_source": task.data_source}
        return self._observe(tuple(self._transcript)), info

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One turn.

        Args:
            action: The assistant's text, verbatim.

        Returns:
            ``(observation, reward, terminated, truncated, info)``; ``info`` always has ``task_id``, ``turn`` and
            ``tool_calls`` (how many were carried out).

        Raises:
            ActionError: If the action is not a string of at most the action space's length.
            ResetNeeded: Before the first ``reset`` and after the end of the episode.
            EnvClosed: After ``close``.
        """
        if self._closed:
            raise EnvClosed("this environment has been closed")
        episode = self._own_episode()
        if episode is None:
            raise ResetNeeded("call reset() before step(), in the process that steps")
        if isinstance(action, str) and not self.action_space.contains(action):
            raise ActionError(f"the action has {len(action)} characters, more than {self.action_space!r} allows")
        result = portal().call(episode.turn(action))
        if self._closed or episode is not self._episode:
            raise EnvClosed("the environment was closed or reset while this step was in flight")
        self._transcript += [Message(role="assistant", content=action), *result.messages]
        return self._transition(result)

    def render(self) -> str | None:
        """The conversation so far as text, with ``render_mode="ansi"``."""
        if self.render_mode is None:
            return None
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in self._transcript)

    def close(self) -> None:
        """Stop the sandbox. Safe to call twice, and before ``reset``."""
        self._closed = True
        episode, self._episode = self._own_episode(), None
        if episode is not None:
            portal().call(episode.cancel(detail="the environment was closed"))

    def _own_episode(self) -> Episode | None:
        """The current episode, unless this process has inherited it by a fork: then it is the parent's, who goes on."""
        return self._episode if self._pid == os.getpid() else None

    def _choose(self, options: dict[str, Any] | None) -> Task:
        if options is not None and not isinstance(options, dict):
            raise ConfigError(f"options must be a dict, not {type(options).__name__}")
        options = dict(options or {})
        task_id = options.pop("task_id", None)
        if options:
            raise ConfigError(f"reset() has no option {sorted(options)[0]!r}; the only one is 'task_id'")
        if task_id is None:
            return self.tasks[int(self.np_random.integers(len(self.tasks)))]
        task = self._by_id.get(task_id) if isinstance(task_id, str) else None
        if task is None:
            raise UnknownTask(f"there is no task {task_id!r} among the {len(self.tasks)} loaded ones")
        return task

    async def _restart(self, services: Services, task: Task) -> None:
        previous, self._episode = self._own_episode(), None
        if previous is not None:
            await previous.cancel(detail="reset() was called")
        episode = Episode(task, self.handler, services, self.runtime, self.sandbox_spec, self.timeouts, self.max_turns)
        self._transcript = list(await episode.start())
        self._episode, self._pid = episode, os.getpid()

    def _transition(self, result: TurnResult) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        assert self._episode is not None
        info: dict[str, Any] = {
            "task_id": self._episode.task.task_id,
            "turn": self._episode.turns,
            "tool_calls": len(result.tool_results),
        }
        if result.parse_error is not None:
            info["parse_error"] = result.parse_error
        reward, terminated, truncated = 0.0, False, False
        if (end := result.end) is not None:
            reward = 0.0 if end.reward is None else float(end.reward)
            terminated = end.outcome in _TERMINAL
            truncated = not terminated
            info |= {
                "outcome": str(end.outcome),
                "reward_valid": end.outcome.reward_valid,
                "detail": end.detail,
                "answer": end.answer,
            }
            if end.timeout_phase is not None:
                info["timeout_phase"] = str(end.timeout_phase)
        return self._observe(result.messages), reward, terminated, truncated, info

    @staticmethod
    def _observe(messages: tuple[Message, ...]) -> Observation:
        # Fresh objects each time: who keeps an observation must not see it change.
        return {"messages": tuple({"role": m["role"], "content": m["content"]} for m in messages)}


_TERMINAL = frozenset({"ok", "agent_error"})
