"""``ProRL/Math-v0``: mathematics with Python at hand, graded by ``math-verify``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gymnasium.utils import EzPickle

from prorl_env.config import Limits, SandboxSpec, Timeouts
from prorl_env.envs.answers import extract_answer
from prorl_env.envs.base import SandboxEnv
from prorl_env.envs.grading import VerdictKind
from prorl_env.envs.handler import Submission
from prorl_env.envs.services import Services
from prorl_env.envs.tasks import load_tasks, sample_tasks
from prorl_env.envs.tools import describe_tools, without_thoughts, write_tool_call
from prorl_env.errors import InvalidTask
from prorl_env.remote.sandbox import Sandbox
from prorl_env.types import Message, Outcome, Phase, Score, Task

__all__ = ["MathEnv", "MathHandler"]

_SYSTEM = (
    "You solve mathematics problems. You have a sandbox with Python; compute instead of guessing. When you know the "
    "answer, call finish with it, or write it in \\boxed{} in a message without a tool call.\n\n"
)


_SHORT_SYSTEM = (
    "You solve mathematics problems with Python. Write one tool call, wait for its result, then call finish with the "
    "answer."
)
_EXAMPLES = (
    ("A farmer has 17 sheep and buys 3 pens of 8 sheep each. How many sheep does he have now?", "17 + 3 * 8", "41"),
    ("Four friends share 52 marbles equally. How many does each one get?", "52 // 4", "13"),
)


class MathHandler:
    """Prompt, tools and grading of mathematics tasks. The answer is compared outside of any sandbox.

    Args:
        examples: Show the tools by two solved problems instead of by their schemas. A model too small to make sense of
            a JSON schema can still follow these.
    """

    def __init__(self, *, examples: bool = False) -> None:
        self._examples = examples

    tools = ("execute_bash", "execute_ipython_cell", "think", "finish")
    grades_in_live_sandbox = False

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """A system message with the tools, or examples of them, then the problem."""
        if self._examples:
            return (
                Message(role="system", content=_SHORT_SYSTEM),
                *(message for example in _EXAMPLES for message in _solved(*example)),
                Message(role="user", content=task.prompt),
            )
        return (
            Message(role="system", content=_SYSTEM + describe_tools(self.tools)),
            Message(role="user", content=task.prompt),
        )

    def sandbox_spec(self, task: Task, base: SandboxSpec) -> SandboxSpec:
        """The same for all tasks."""
        return base

    async def init(self, task: Task, sandbox: Sandbox) -> None:
        """Nothing to prepare."""

    def final_answer(self, text: str) -> str | None:
        r"""The last ``\boxed{…}`` outside of ``<think>``."""
        return extract_answer(without_thoughts(text))

    async def evaluate(
        self, task: Task, submission: Submission, *, services: Services, sandbox: Sandbox | None
    ) -> Score:
        """1.0 if the answer is equivalent to the gold, else 0.0.

        Raises:
            InvalidTask: If the gold cannot be understood.
            GraderError: If the grader breaks.
        """
        if submission.answer is None:
            return Score(0.0, detail="there is no answer")
        verdict = await services.math_grader.grade(task.answer, submission.answer)
        match verdict.kind:
            case VerdictKind.EQUIVALENT:
                return Score(1.0, detail=verdict.detail)
            case VerdictKind.GOLD_UNPARSABLE:
                raise InvalidTask(f"the gold answer of {task.task_id} cannot be understood: {verdict.detail}")
            case VerdictKind.ANSWER_TOO_COSTLY:
                return Score(0.0, Outcome.AGENT_ERROR, verdict.detail)
            case _:
                return Score(0.0, detail=verdict.detail)

    def on_failure(self, task: Task, phase: Phase, error: BaseException) -> None:
        """Nothing to do."""


def _solved(problem: str, code: str, answer: str) -> tuple[Message, ...]:
    return (
        Message(role="user", content=problem),
        Message(role="assistant", content=write_tool_call("execute_ipython_cell", {"code": code})),
        Message(role="tool", content=f"{answer}\n"),
        Message(role="assistant", content=write_tool_call("finish", {"answer": answer})),
    )


class MathEnv(SandboxEnv, EzPickle):
    """Mathematics problems. Tools: ``execute_bash``, ``execute_ipython_cell``, ``think``, ``finish``.

    Args:
        tasks: A JSON Lines file, tasks, or ``None`` for the sample of word problems that comes with the package.
        runtime: See ``SandboxEnv``.
        image: See ``SandboxEnv``.
        max_turns: See ``SandboxEnv``.
        timeouts: See ``SandboxEnv``.
        limits: See ``SandboxEnv``.
        render_mode: See ``SandboxEnv``.
        examples: See ``MathHandler``.

    Raises:
        TaskFileError, ConfigError, UnknownRuntime: See ``SandboxEnv``.
    """

    def __init__(
        self,
        tasks: str | Path | Iterable[Task] | None = None,
        *,
        runtime: str = "auto",
        image: str = "auto",
        max_turns: int = 10,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        render_mode: str | None = None,
        examples: bool = False,
    ) -> None:
        loaded = sample_tasks() if tasks is None else load_tasks(tasks)
        EzPickle.__init__(
            self,
            loaded,
            runtime=runtime,
            image=image,
            max_turns=max_turns,
            timeouts=timeouts,
            limits=limits,
            render_mode=render_mode,
            examples=examples,
        )
        super().__init__(
            MathHandler(examples=examples),
            loaded,
            runtime=runtime,
            image=image,
            max_turns=max_turns,
            timeouts=timeouts,
            limits=limits,
            render_mode=render_mode,
        )
