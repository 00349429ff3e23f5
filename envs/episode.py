"""One episode, asynchronous: INIT, the turns of RUN, EVAL. Everything that runs episodes runs this.

``SandboxEnv`` is a synchronous face of it, a rollout awaits many of them at once. The rule of the house: what the
agent does wrong is an observation, what breaks is an outcome without a reward, and neither is an exception out of
``turn``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from prorl_env.config import SandboxSpec, Timeouts
from prorl_env.envs.handler import Submission, TaskHandler
from prorl_env.envs.services import Services
from prorl_env.envs.tools import parse_tool_calls, run_tool
from prorl_env.errors import ActionError, DeadlineExceeded, EnvClosed, InfraError, InvalidTask, ProrlError, ResetNeeded
from prorl_env.remote.sandbox import Sandbox
from prorl_env.types import Message, Outcome, Phase, Score, Task, ToolCall, ToolResult

__all__ = ["Episode", "EpisodeEnd", "TurnResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """How the episode ended."""

    outcome: Outcome
    reward: float | None
    """``None`` exactly if the outcome carries no reward."""
    detail: str = ""
    answer: str | None = None
    timeout_phase: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What one turn gave."""

    messages: tuple[Message, ...] = ()
    """The new messages for the agent."""
    tool_results: tuple[ToolResult, ...] = ()
    parse_error: str | None = None
    end: EpisodeEnd | None = None
    """Set after the last turn."""


@dataclass(slots=True)
class _Seconds:
    init: float = 0.0
    run: float = 0.0
    eval: float = 0.0
    teardown: float = 0.0


@dataclass(eq=False)
class Episode:
    """One episode of one task. ``start`` once, ``turn`` until it says ``end``, ``aclose`` at any time.

    Not for concurrent use, except that ``aclose`` may come while another call is in flight; that call then raises.
    """

    task: Task
    handler: TaskHandler
    services: Services
    runtime: str = "auto"
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_turns: int = 10

    sandbox: Sandbox | None = field(default=None, init=False)
    turns: int = field(default=0, init=False)
    end: EpisodeEnd | None = field(default=None, init=False)
    _started: bool = field(default=False, init=False)
    _seconds: _Seconds = field(default_factory=_Seconds, init=False)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase: ``init``, ``run`` (the tools, not the policy), ``eval``, ``teardown``."""
        s = self._seconds
        return {"init": s.init, "run": s.run, "eval": s.eval, "teardown": s.teardown}

    async def start(self) -> tuple[Message, ...]:
        """INIT: start the sandbox and prepare it. Returns the messages before the first turn.

        Raises:
            UsageError, SetupError: If the task, the runtime or the image cannot be used.
            InfraError: If something breaks; ``DeadlineExceeded`` if it takes longer than ``timeouts.init_s``.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.timeouts.init_s):
                client = await self.services.nodes.client(self.runtime)
                spec = self.handler.sandbox_spec(self.task, self.spec)
                runtime = self.runtime if "://" not in self.runtime else "auto"
                self.sandbox = await client.start_sandbox(spec, runtime=runtime)
                await self.handler.init(self.task, self.sandbox)
        except TimeoutError as error:
            self.handler.on_failure(self.task, Phase.INIT, error)
            await self.aclose()
            if isinstance(error, ProrlError):
                raise
            raise DeadlineExceeded(f"INIT took longer than {self.timeouts.init_s:g} s") from None
        except BaseException as error:
            self.handler.on_failure(self.task, Phase.INIT, error)
            await self.aclose()
            raise
        finally:
            self._seconds.init = time.monotonic() - began
        self._started = True
        return self.handler.prompt(self.task)

    async def turn(self, text: str) -> TurnResult:
        """One turn of RUN; the last one includes EVAL.

        Args:
            text: What the assistant wrote, verbatim.

        Raises:
            ActionError: If ``text`` is not a string.
            ResetNeeded: If the episode has not been started or has ended.
        """
        if not isinstance(text, str):
            raise ActionError(f"an action is the assistant's text, a str, not {type(text).__name__}")
        if not self._started or self.end is not None or self.sandbox is None:
            raise ResetNeeded("the episode has ended or was never started; call reset() first")
        self.turns += 1
        parsed = parse_tool_calls(text, self.handler.tools)
        results: list[ToolResult] = []
        answer: str | None = None
        try:
            for call in parsed.calls:
                if call.name == "finish":
                    answer = _answer_of(call, self.handler)
                    results.append(ToolResult(call=call, content=""))
                    break
                results.append(await self._run(call))
        except (InfraError, TimeoutError) as error:
            return TurnResult(tool_results=tuple(results), end=await self._fail(Phase.RUN, error))
        messages = [Message(role="tool", content=result.content) for result in results if result.call.name != "finish"]
        if parsed.error is not None:
            messages.append(Message(role="tool", content=parsed.error))
        elif not parsed.calls:
            answer = self.handler.final_answer(text)
            if answer is None:
                messages.append(Message(role="user", content=_NUDGE))
        end: EpisodeEnd | None = None
        if answer is not None or self.turns >= self.max_turns:
            end = await self._evaluate(Submission(answer, truncated=answer is None))
        return TurnResult(messages=tuple(messages), tool_results=tuple(results), parse_error=parsed.error, end=end)

    async def truncate(self) -> EpisodeEnd:
        """End RUN now, since a budget of the agent's ran out, and grade what there is.

        Raises:
            ResetNeeded: If the episode has not been started or has ended.
        """
        if not self._started or self.end is not None:
            raise ResetNeeded("the episode has ended or was never started")
        return await self._evaluate(Submission(None, truncated=True))

    async def cancel(self, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> None:
        """End without grading, whatever is going on. Harmless after the end."""
        if self.end is None:
            self.end = EpisodeEnd(outcome=outcome, reward=None, detail=detail)
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the sandbox. When this returns nothing of it is left. Safe to call twice.

        Raises:
            InfraError: If something of it is still there.
        """
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            began = time.monotonic()
            try:
                await asyncio.shield(sandbox.stop())
            finally:
                self._seconds.teardown += time.monotonic() - began

    async def _run(self, call: ToolCall) -> ToolResult:
        sandbox = self.sandbox
        if sandbox is None:
            raise EnvClosed("the episode was closed while a turn was in flight")
        left = self.timeouts.run_s - self._seconds.run
        if left <= 0:
            raise TimeoutError
        began = time.monotonic()
        try:
            async with asyncio.timeout(left + 1.0):
                return await run_tool(call, sandbox, timeout_s=min(left, self.timeouts.tool_s))
        finally:
            self._seconds.run += time.monotonic() - began

    async def _evaluate(self, submission: Submission) -> EpisodeEnd:
        try:
            if not self.handler.grades_in_live_sandbox:
                await self.aclose()
            began = time.monotonic()
            try:
                async with asyncio.timeout(self.timeouts.eval_s):
                    score = await self.handler.evaluate(
                        self.task, submission, services=self.services, sandbox=self.sandbox
                    )
            finally:
                self._seconds.eval = time.monotonic() - began
            await self.aclose()
        except (InfraError, TimeoutError, InvalidTask) as error:
            return await self._fail(Phase.EVAL, error, answer=submission.answer)
        except BaseException:
            await self.aclose()
            raise
        self.end = _end(score, submission)
        return self.end

    async def _fail(self, phase: Phase, error: Exception, *, answer: str | None = None) -> EpisodeEnd:
        """End with an outcome that carries no reward."""
        self.handler.on_failure(self.task, phase, error)
        timeout = isinstance(error, TimeoutError) and not isinstance(error, ProrlError)
        if timeout:
            outcome, detail = Outcome.TIMEOUT, f"{phase.name} took longer than it may"
        elif isinstance(error, InvalidTask):
            outcome, detail = Outcome.INVALID_TASK, str(error)
        else:
            outcome, detail = Outcome.INFRA_ERROR, str(error)
        if self.end is not None:  # Somebody has cancelled it, and what broke is what that broke.
            return self.end
        self.end = EpisodeEnd(
            outcome=outcome, reward=None, detail=detail, answer=answer, timeout_phase=phase if timeout else None
        )
        with contextlib.suppress(InfraError):  # The episode has its outcome; the node server's janitor has the rest.
            await self.aclose()
        return self.end


_NUDGE = (
    "There is neither a tool call nor an answer in your message. Call a tool, or give the final answer in \\boxed{}."
)


def _answer_of(call: ToolCall, handler: TaskHandler) -> str:
    given: Any = call.arguments["answer"]
    return handler.final_answer(given) or given


def _end(score: Score, submission: Submission) -> EpisodeEnd:
    outcome = score.outcome
    if submission.truncated and outcome is Outcome.OK:
        outcome = Outcome.TRUNCATED
    return EpisodeEnd(outcome=outcome, reward=score.reward, detail=score.detail, answer=submission.answer)
