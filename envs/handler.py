"""What a family of tasks has to say: its prompt, its tools, how an episode is prepared and how it is graded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prorl_env.config import SandboxSpec
from prorl_env.envs.services import Services
from prorl_env.remote.sandbox import Sandbox
from prorl_env.types import Message, Phase, Score, Task

__all__ = ["Submission", "TaskHandler"]


@dataclass(frozen=True, slots=True)
class Submission:
    """What there is to grade at the end of an episode."""

    answer: str | None
    """What the agent gave as its answer, if it did."""
    truncated: bool = False
    """Whether a budget ran out before it did."""


class TaskHandler(Protocol):
    """One family of tasks. Instances are shared by concurrent episodes and hold no state of an episode."""

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that the agent has."""
        ...

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """The messages before the first turn. Nothing in them may give the answer away."""
        ...

    def sandbox_spec(self, task: Task, base: SandboxSpec) -> SandboxSpec:
        """The sandbox that the task needs."""
        ...

    async def init(self, task: Task, sandbox: Sandbox) -> None:
        """Prepare the sandbox; the end of INIT.

        Raises:
            InvalidTask: If the task cannot be prepared.
            InfraError: If something breaks.
        """
        ...

    def final_answer(self, text: str) -> str | None:
        """The answer in an assistant's text without tool calls, or ``None`` if it holds none."""
        ...

    async def evaluate(
        self, task: Task, submission: Submission, *, services: Services, sandbox: Sandbox | None
    ) -> Score:
        """Grade; the middle of EVAL. ``sandbox`` is the agent's, alive, only if ``grades_in_live_sandbox``.

        Raises:
            InvalidTask: If the task's gold means nothing.
            InfraError: If a grader breaks. Never a score of 0 for that.
        """
        ...

    @property
    def grades_in_live_sandbox(self) -> bool:
        """Whether ``evaluate`` needs the agent's sandbox. Usually not: it is stopped, with proof, before grading."""
        ...

    def on_failure(self, task: Task, phase: Phase, error: BaseException) -> None:
        """Told of an error in a phase, before the episode ends with it."""
        ...
