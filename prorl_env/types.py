"""The nouns: what a task, a message, a turn, an outcome and a trajectory are.

Plain frozen dataclasses without behaviour that could fail; every one pickles and prints as the code that makes it.
Times are seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict

__all__ = [
    "Message",
    "Outcome",
    "Phase",
    "Role",
    "Score",
    "Task",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
]

Role = Literal["system", "user", "assistant", "tool"]
"""Who speaks."""


class Message(TypedDict):
    """One message of a conversation, as chat templates take it."""

    role: Role
    content: str


class Phase(StrEnum):
    """The three phases of an episode."""

    INIT = "init"
    """A sandbox is prepared for the task; ``reset()``."""
    RUN = "run"
    """The agent's turns; ``step()``."""
    EVAL = "eval"
    """The result is graded; part of the last ``step()``."""


class Outcome(StrEnum):
    """How an episode ended. Only the first three carry a reward."""

    OK = "ok"
    """The agent gave an answer and it was graded."""
    TRUNCATED = "truncated"
    """A budget of the agent's (turns, tokens) ran out; what there was has been graded."""
    AGENT_ERROR = "agent_error"
    """The agent's result cannot be graded for a reason of its own making; the reward is the lowest."""
    TIMEOUT = "timeout"
    """A phase ran out of time; ``Trajectory.timeout_phase`` or ``info["timeout_phase"]`` says which."""
    INFRA_ERROR = "infra_error"
    """A sandbox, grader, backend or node broke; says nothing about the agent."""
    CANCELLED = "cancelled"
    """Somebody asked for the end."""
    INVALID_TASK = "invalid_task"
    """The task itself cannot be run or graded."""

    @property
    def reward_valid(self) -> bool:
        """Whether an episode that ended so has a reward that may be trained on."""
        return self in _WITH_REWARD


_WITH_REWARD = frozenset({Outcome.OK, Outcome.TRUNCATED, Outcome.AGENT_ERROR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem, as a task file gives it.

    The agent sees ``prompt`` alone; everything else stays outside its sandbox.
    """

    task_id: str
    """Unique among the tasks loaded together."""
    data_source: str
    """Which handler runs and grades it."""
    prompt: str
    """What the agent is asked."""
    answer: str
    """The gold answer."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Everything else the record held."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the parser accepted."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one tool call gave."""

    call: ToolCall
    content: str
    """The text that the agent reads."""
    is_error: bool = False
    """Whether the tool could not do what was asked (a failing command is not an error of the tool)."""
    seconds: float = 0.0
    """How long it ran."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a grader says of an episode's result."""

    reward: float
    outcome: Outcome = Outcome.OK
    detail: str = ""
    """One sentence for a human: what was compared with what."""

    def __post_init__(self) -> None:
        """A reward can only come with an outcome that carries one."""
        if not self.outcome.reward_valid:
            raise ValueError(f"a Score cannot have the outcome {self.outcome}: it carries no reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: what the model wrote, what came back, and what it took."""

    text: str
    """The assistant's text, verbatim."""
    tool_results: tuple[ToolResult, ...] = ()
    observation: tuple[Message, ...] = ()
    """The new messages that followed; empty after the last turn."""
    parse_error: str | None = None
    """Why no tool call could be read from the text, if so."""
    stop_reason: str = "stop"
    """Why the model stopped: ``stop`` (end token), ``length`` or ``script`` (a scripted policy)."""
    policy_seconds: float = 0.0
    """Time the policy took to write ``text``."""
    tool_seconds: float = 0.0
    """Time the tools took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode, as a trainer or a reader gets it.

    ``token_ids``, ``loss_mask`` and ``logprobs`` have the same length, ``(num_tokens,)``, or are all empty for a policy
    without tokens. Sampled ids are stored as they were sampled, never re-tokenised; ``loss_mask`` is 1 exactly for
    them, and ``logprobs`` is 0.0 where it is 0.
    """

    task_id: str
    data_source: str
    outcome: Outcome
    reward: float | None
    """``None`` exactly if the outcome carries no reward."""
    detail: str = ""
    """One sentence on the grading, or the error's text."""
    answer: str | None = None
    """What the agent answered."""
    gold: str | None = None
    timeout_phase: Phase | None = None
    seed: int | None = None
    policy: str = ""
    runtime: str = ""
    prompt: tuple[Message, ...] = ()
    """The messages before the first turn."""
    turns: tuple[Turn, ...] = ()
    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: ``queued``, ``init``, ``run`` (the tools), ``policy``, ``eval``, ``teardown``."""

    @property
    def num_tool_calls(self) -> int:
        """How many tool calls were carried out."""
        return sum(len(turn.tool_results) for turn in self.turns)
