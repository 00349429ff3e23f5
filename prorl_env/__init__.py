"""Gymnasium environments for LLM agents whose tool calls run in rootless sandboxes.

::

    import gymnasium as gym
    env = gym.make("prorl_env:ProRL/Math-v0", runtime="bubblewrap")

Importing this package registers the ids, and does nothing else.
"""

from prorl_env import errors
from prorl_env._version import __version__
from prorl_env.config import Limits, Paths, SandboxSpec, Timeouts
from prorl_env.errors import InfraError, ProrlError, SetupError, StateError, UsageError
from prorl_env.registration import register_all
from prorl_env.types import (
    Message,
    Outcome,
    Phase,
    Score,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

__all__ = [
    "InfraError",
    "Limits",
    "Message",
    "Outcome",
    "Paths",
    "Phase",
    "ProrlError",
    "SandboxSpec",
    "Score",
    "SetupError",
    "StateError",
    "Task",
    "Timeouts",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
    "UsageError",
    "__version__",
    "errors",
]

register_all()
