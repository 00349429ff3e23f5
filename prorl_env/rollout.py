"""Many episodes at once: the simplest loop that is right.

``rollout`` yields each ``Trajectory`` as its episode ends. An episode that breaks costs itself alone; a mistake of
the caller's (a missing image, an unusable task) ends the whole, since it would be the same for every episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from prorl_env.config import SandboxSpec, Timeouts
from prorl_env.envs.episode import Episode, EpisodeEnd
from prorl_env.envs.handler import TaskHandler
from prorl_env.envs.services import Services
from prorl_env.envs.tasks import TaskSource, load_tasks
from prorl_env.errors import ConfigError, InfraError
from prorl_env.policies import ContextFull, Player, Policy
from prorl_env.types import Message, Outcome, Task, Trajectory, Turn

__all__ = ["RolloutConfig", "rollout", "run_episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are run.

    Raises:
        ConfigError: If ``concurrency`` or ``max_turns`` is below 1.
    """

    runtime: str = "auto"
    """A runtime's name or a node server's address."""
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_turns: int = 10
    concurrency: int = 8
    """How many episodes run at the same time."""
    seed: int = 0
    """Episode ``i`` has the seed ``seed + i``."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


async def rollout(
    tasks: TaskSource,
    policy: Policy,
    *,
    handler: TaskHandler,
    services: Services,
    config: RolloutConfig | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Run one episode of each task; yields in the order in which they end.

    Leaving the iteration early, or an exception in it, stops all other episodes and their sandboxes first. Use
    ``contextlib.aclosing`` around it if you may leave early.

    Raises:
        UsageError, SetupError: If tasks, policy or machine cannot be used; all episodes are stopped first.
        NodeUnreachable: If nobody answers at the address ``config.runtime``.
    """
    config = config or RolloutConfig()
    tasks = load_tasks(tasks)
    await services.nodes.client(config.runtime)  # Nobody there: one error, not one for each episode.
    gate = asyncio.Semaphore(config.concurrency)
    began = time.monotonic()

    async def one(index: int, task: Task) -> Trajectory:
        async with gate:
            queued = time.monotonic() - began
            return await run_episode(
                task,
                policy,
                handler=handler,
                services=services,
                config=config,
                seed=config.seed + index,
                queued_s=queued,
            )

    everything = {asyncio.ensure_future(one(index, task)) for index, task in enumerate(tasks)}
    running = everything
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for episode in done:
                yield episode.result()
    finally:
        for episode in everything:
            episode.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def run_episode(
    task: Task,
    policy: Policy,
    *,
    handler: TaskHandler,
    services: Services,
    config: RolloutConfig,
    seed: int,
    queued_s: float = 0.0,
) -> Trajectory:
    """Run one episode to its end. Whatever breaks in it is an outcome of the trajectory.

    Raises:
        UsageError, SetupError: If the task, the policy or the machine cannot be used.
    """
    episode = Episode(task, handler, services, config.runtime, config.spec, config.timeouts, config.max_turns)
    record = _Record(player=policy.player(task, seed=seed))
    try:
        try:
            record.prompt = await episode.start()
            await _play(episode, record)
        except ContextFull:
            record.end = await episode.truncate()
        except InfraError as error:
            await episode.cancel(Outcome.INFRA_ERROR, str(error))
        end = record.end or episode.end
        assert end is not None
    finally:
        with contextlib.suppress(InfraError):
            await episode.aclose()
    tokens = record.player.tokens()
    return Trajectory(
        task_id=task.task_id,
        data_source=task.data_source,
        outcome=end.outcome,
        reward=end.reward,
        detail=end.detail,
        answer=end.answer,
        gold=task.answer,
        timeout_phase=end.timeout_phase,
        seed=seed,
        policy=policy.name,
        runtime=record.runtime,
        prompt=record.prompt,
        turns=tuple(record.turns),
        token_ids=tokens.token_ids,
        loss_mask=tokens.loss_mask,
        logprobs=tokens.logprobs,
        seconds={"queued": queued_s, **episode.seconds, "policy": record.policy_s},
    )


@dataclass(slots=True)
class _Record:
    """What an episode has given so far; kept when it breaks."""

    player: Player
    prompt: tuple[Message, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    runtime: str = ""
    policy_s: float = 0.0
    end: EpisodeEnd | None = None


async def _play(episode: Episode, record: _Record) -> None:
    if episode.sandbox is not None:
        record.runtime = episode.sandbox.runtime
    messages = record.prompt
    while record.end is None:
        began = time.monotonic()
        try:
            move = await record.player.move(messages)
        finally:
            thought_s = time.monotonic() - began
            record.policy_s += thought_s
        result = await episode.turn(move.text)
        record.turns.append(
            Turn(
                text=move.text,
                tool_results=result.tool_results,
                observation=result.messages,
                parse_error=result.parse_error,
                stop_reason=move.stop_reason,
                policy_seconds=thought_s,
                tool_seconds=sum(tool.seconds for tool in result.tool_results),
            )
        )
        messages, record.end = result.messages, result.end
