"""What the episodes of one event loop share: connections to node servers, and graders."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from prorl_env.portal import portal
from prorl_env.remote.embedded import Nodes

if TYPE_CHECKING:
    from prorl_env.envs.grading import MathGrader

__all__ = ["Services", "shared_services"]


class Services:
    """Opened when first used, closed together. ``async with Services() as services``."""

    def __init__(self) -> None:
        self.nodes = Nodes()
        self._math_grader: MathGrader | None = None

    @property
    def math_grader(self) -> MathGrader:
        """The grader for mathematics; its worker processes start with the first answer to grade."""
        if self._math_grader is None:
            from prorl_env.envs.grading import MathGrader

            self._math_grader = MathGrader()
        return self._math_grader

    async def aclose(self) -> None:
        """End everything. Safe to call twice."""
        grader, self._math_grader = self._math_grader, None
        closing = [self.nodes.aclose(), *([grader.aclose()] if grader is not None else [])]
        await asyncio.gather(*closing)

    async def __aenter__(self) -> Services:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.aclose())


def shared_services() -> Services:
    """The services of the process's portal, which synchronous environments share. They end with the process."""
    loop = portal()
    with loop.lock:
        services = loop.shared.get("services")
        if services is None:
            services = loop.call(_make())
            loop.shared["services"] = services
            loop.at_exit(services.aclose)
    assert isinstance(services, Services)
    return services


async def _make() -> Services:
    return Services()  # On the loop: it makes objects that belong to one.
