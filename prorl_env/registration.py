"""One table: environment id -> where its class is and what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from prorl_env._version import __version__
from prorl_env.errors import SetupError

__all__ = ["ENVIRONMENTS", "TO_COME", "EnvironmentId", "register_all"]


@dataclass(frozen=True, slots=True)
class EnvironmentId:
    """An id and what is behind it."""

    entry_point: str
    """The class of the environment."""
    handler: str
    """The class of its task handler."""
    summary: str


ENVIRONMENTS: dict[str, EnvironmentId] = {
    "ProRL/Math-v0": EnvironmentId(
        "prorl_env.envs.mathematics:MathEnv",
        "prorl_env.envs.mathematics:MathHandler",
        "mathematics with Python at hand, graded by math-verify",
    ),
}
"""The ids that work in this version."""

TO_COME = {
    "ProRL/Code-v0": "programs, graded by hidden tests",
    "ProRL/STEM-v0": "science questions with a search tool",
    "ProRL/SWE-v0": "repository issues, graded by the repository's tests",
}
"""Ids that are reserved; making one says that it is not there yet, instead of that nobody knows it."""


def register_all() -> None:
    """Register every id with gymnasium; doing so twice is harmless.

    The turn limit is the environment's own: an outer ``TimeLimit`` would cut an episode without grading it.
    """
    for env_id, entry in ENVIRONMENTS.items():
        if env_id not in gym.registry:
            gym.register(id=env_id, entry_point=entry.entry_point)
    for env_id, summary in TO_COME.items():
        if env_id not in gym.registry:
            gym.register(id=env_id, entry_point=_not_yet, kwargs={"env_id": env_id, "summary": summary})


def _not_yet(**kwargs: Any) -> gym.Env[Any, Any]:
    raise SetupError(
        f"{kwargs['env_id']} ({kwargs['summary']}) is not in version {__version__}.",
        mend=f"There is {', '.join(ENVIRONMENTS)}.",
    )
