"""Every error that prorl-env raises, named after whose fault it is.

::

    ProrlError                       the base of all; carries ``code`` and pickles
    ├── UsageError (ValueError)      the caller asked for something that cannot be
    │   ├── ConfigError              a setting has a value that it cannot have
    │   ├── UnknownRuntime           no runtime of that name
    │   ├── UnknownTask              no task of that id in the loaded tasks
    │   ├── InvalidTask              a task that cannot be run or graded
    │   ├── TaskFileError            a task file is missing or one of its lines is malformed
    │   ├── ModelError               a model folder or name that cannot be used
    │   └── ActionError              an action that is not text
    ├── StateError (RuntimeError)    the right call at the wrong time
    │   ├── EnvClosed                used after ``close()``
    │   └── ResetNeeded              ``step()`` before ``reset()`` or after the end
    ├── SetupError (RuntimeError)    the machine lacks something; ``mend`` says what to do
    │   ├── RuntimeUnavailable       no such sandbox runtime works here
    │   └── ImageNotFound            the image store has no such image
    └── InfraError (RuntimeError)    something of ours or of the machine broke: never the agent's fault
        ├── SandboxStartFailed       a sandbox did not come up
        ├── SandboxDied              a sandbox is gone while it was needed
        ├── SessionDied              a shell or kernel is gone and could not be put back
        ├── GraderError              a grader crashed, hung or ran out of memory
        ├── BackendError             an LLM backend failed
        └── RemoteError              between client and node server
            ├── NodeUnreachable (ConnectionError)   nobody answers at the address
            ├── DeadlineExceeded (TimeoutError)     the answer did not come in time
            ├── ProtocolError                       a frame that is not of our protocol
            └── RemoteFault                         an unforeseen exception in the node server

The policy: a bad rollout is data, not a crash. What the *agent* does wrong (a malformed tool call, a command that fails
or hangs) is never an exception but an observation. What the *user* does wrong is a ``UsageError``, ``StateError`` or
``SetupError`` and is raised at once. What *breaks* is an ``InfraError``; an environment turns it into an episode
without a reward. Errors cross the wire as ``(code, message, fields)`` from the closed table ``CODES``; the other side
never chooses what is imported. To add an error: subclass here, set ``code``, list extra constructor fields in
``fields``.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "CODES",
    "ActionError",
    "BackendError",
    "ConfigError",
    "DeadlineExceeded",
    "EnvClosed",
    "GraderError",
    "ImageNotFound",
    "InfraError",
    "InvalidTask",
    "ModelError",
    "NodeUnreachable",
    "ProrlError",
    "ProtocolError",
    "RemoteError",
    "RemoteFault",
    "ResetNeeded",
    "RuntimeUnavailable",
    "SandboxDied",
    "SandboxStartFailed",
    "SessionDied",
    "SetupError",
    "StateError",
    "TaskFileError",
    "UnknownRuntime",
    "UnknownTask",
    "UsageError",
    "from_wire",
    "to_wire",
]


class ProrlError(Exception):
    """Base of every error of this library.

    Args:
        message: One sentence that says what happened and, where it can be known, what to do.
        **fields: Exactly the names in the class's ``fields``; each becomes an attribute. A missing one is ``None``.
    """

    code: ClassVar[str] = "error"
    """What the class is called on the wire."""
    fields: ClassVar[tuple[str, ...]] = ()
    """Names of extra attributes, all of them values that MessagePack can carry."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        unknown = fields.keys() - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)[0]!r}")
        for name in self.fields:
            setattr(self, name, fields.get(name))

    @property
    def message(self) -> str:
        """The sentence, without the class name."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the fields; the plain exception protocol would lose them."""
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in self.fields})


def _rebuild(cls: type[ProrlError], message: str, fields: dict[str, Any]) -> ProrlError:
    return cls(message, **fields)


class UsageError(ProrlError, ValueError):
    """The caller asked for something that cannot be."""

    code = "usage"


class ConfigError(UsageError):
    """A setting has a value that it cannot have."""

    code = "config"


class UnknownRuntime(UsageError):
    """No sandbox runtime has that name."""

    code = "unknown_runtime"


class UnknownTask(UsageError):
    """No task of that id among the loaded ones."""

    code = "unknown_task"


class InvalidTask(UsageError):
    """A task that cannot be run or graded, e.g. since its gold answer means nothing."""

    code = "invalid_task"


class TaskFileError(UsageError):
    """A task file is missing, or one of its lines is malformed.

    ``path``, ``line`` (from 1) and ``field`` say where; the last two are ``None`` where they have no meaning.
    """

    code = "task_file"
    fields = ("path", "line", "field")
    path: str | None
    line: int | None
    field: str | None


class ModelError(UsageError):
    """A model folder or name that cannot be used."""

    code = "model"


class ActionError(UsageError):
    """An action that is not a string of text."""

    code = "action"


class StateError(ProrlError, RuntimeError):
    """The right call at the wrong time."""

    code = "state"


class EnvClosed(StateError):
    """Used after, or in flight during, ``close()``."""

    code = "env_closed"


class ResetNeeded(StateError):
    """``step()`` before the first ``reset()`` or after the end of the episode."""

    code = "reset_needed"


class SetupError(ProrlError, RuntimeError):
    """The machine lacks something; ``mend`` is what to do about it, or ``None``."""

    code = "setup"
    fields = ("mend",)
    mend: str | None

    def __str__(self) -> str:
        """The message, followed by the mend."""
        return f"{self.message} {self.mend}" if self.mend else self.message


class RuntimeUnavailable(SetupError):
    """The sandbox runtime does not work on this machine."""

    code = "runtime_unavailable"


class ImageNotFound(SetupError):
    """The image store has no such image."""

    code = "image_not_found"


class InfraError(ProrlError, RuntimeError):
    """Something of ours or of the machine broke. Never the agent's fault, so never a reward of 0."""

    code = "infra"


class SandboxStartFailed(InfraError):
    """A sandbox did not come up; ``output`` is what its runtime printed."""

    code = "sandbox_start_failed"
    fields = ("output",)
    output: str | None


class SandboxDied(InfraError):
    """A sandbox is gone while it was needed."""

    code = "sandbox_died"


class SessionDied(InfraError):
    """A shell or kernel is gone and could not be put back."""

    code = "session_died"


class GraderError(InfraError):
    """A grader crashed, hung or ran out of memory."""

    code = "grader"


class BackendError(InfraError):
    """An LLM backend failed."""

    code = "backend"


class RemoteError(InfraError):
    """Something went wrong between client and node server."""

    code = "remote"


class NodeUnreachable(RemoteError, ConnectionError):
    """Nobody answers at the address, or the node server is gone."""

    code = "node_unreachable"


class DeadlineExceeded(RemoteError, TimeoutError):
    """The answer did not come in time; the call may or may not have had its effect."""

    code = "deadline_exceeded"


class ProtocolError(RemoteError):
    """A frame that is not of our protocol, or of another version of it."""

    code = "protocol"


class RemoteFault(RemoteError):
    """An unforeseen exception in the node server: a bug of ours.

    ``type_name`` and ``traceback`` are the remote exception's, as text.
    """

    code = "remote_fault"
    fields = ("type_name", "traceback")
    type_name: str | None
    traceback: str | None


def _tree(cls: type[ProrlError]) -> list[type[ProrlError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in _tree(child))]


CODES: dict[str, type[ProrlError]] = {cls.code: cls for cls in _tree(ProrlError)}
"""The closed table: wire code to class."""


def to_wire(error: BaseException, *, traceback: str | None = None) -> tuple[str, str, dict[str, Any]]:
    """Turn an exception into ``(code, message, fields)``.

    An exception that is not of this library becomes a ``remote_fault`` with its type name and ``traceback``.
    """
    if isinstance(error, ProrlError) and CODES.get(error.code) is type(error):
        return error.code, error.message, {name: getattr(error, name) for name in error.fields}
    name = type(error).__name__
    return RemoteFault.code, f"{name}: {error}", {"type_name": name, "traceback": traceback}


def from_wire(code: str, message: str, fields: dict[str, Any]) -> ProrlError:
    """Turn ``(code, message, fields)`` back into an error; an unknown code becomes a ``RemoteFault``."""
    cls = CODES.get(code)
    if cls is None:
        return RemoteFault(f"error {code!r}, which this version does not know: {message}", type_name=code)
    return cls(message, **{name: fields.get(name) for name in cls.fields})
