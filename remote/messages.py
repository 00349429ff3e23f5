"""What goes over the wire between client and node server.

A frame is one MessagePack map. ``msgpack`` decodes it under hard limits on every size, then ``msgspec.convert`` turns
it into one of the tagged Structs below, which checks every type and names the path of a wrong one. Requests carry the
protocol version and an id that their reply repeats; a reply is a result or an error ``(code, message, fields)``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
import msgspec

from prorl_env.config import SandboxSpec
from prorl_env.errors import ProtocolError
from prorl_env.remote.sandbox import BashResult, CellResult, ExecResult

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Failure",
    "Reply",
    "Request",
    "decode_reply",
    "decode_request",
    "encode",
    "id_of",
]

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """First request of a client. On the same machine its pid lets the server notice its death at once."""

    pid: int | None = None
    pid_start: int | None = None
    """Start time of ``pid`` in clock ticks after boot, so that a recycled pid is not taken for it."""


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Nothing; shows that both sides live."""


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The client is going: stop everything of its. Answered by ``Done``, which it may not wait for."""


class Start(msgspec.Struct, tag="start", frozen=True, kw_only=True):
    """Start a sandbox; answered by ``Started``."""

    runtime: str
    """A name, or ``auto``."""
    spec: SandboxSpec


class Exec(msgspec.Struct, tag="exec", frozen=True, kw_only=True):
    """``Sandbox.exec``; answered by ``ExecResult``."""

    sandbox: str
    argv: tuple[str, ...]
    stdin: bytes = b""
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_s: float = 30.0


class RunBash(msgspec.Struct, tag="bash", frozen=True, kw_only=True):
    """``Sandbox.run_bash``; answered by ``BashResult``."""

    sandbox: str
    command: bytes
    """Encoded with ``surrogateescape``: any bytes but NUL."""
    session: str = "main"
    timeout_s: float = 30.0


class RunCell(msgspec.Struct, tag="cell", frozen=True, kw_only=True):
    """``Sandbox.run_cell``; answered by ``CellResult``."""

    sandbox: str
    code: bytes
    """Encoded with ``surrogatepass``: Python source may hold lone surrogates."""
    session: str = "main"
    timeout_s: float = 30.0


class ReadFile(msgspec.Struct, tag="read", frozen=True, kw_only=True):
    """``Sandbox.read_file``; answered by ``FileData``."""

    sandbox: str
    path: str
    max_bytes: int


class WriteFile(msgspec.Struct, tag="write", frozen=True, kw_only=True):
    """``Sandbox.write_file``; answered by ``Done``."""

    sandbox: str
    path: str
    data: bytes
    mode: int = 0o644


class Stop(msgspec.Struct, tag="stop", frozen=True, kw_only=True):
    """Stop a sandbox; answered by ``Done`` when everything of it is gone. Unknown or stopped ones too: idempotent."""

    sandbox: str


class GetStatus(msgspec.Struct, tag="status", frozen=True):
    """Answered by ``Status``."""


Body = Hello | Ping | Bye | Start | Exec | RunBash | RunCell | ReadFile | WriteFile | Stop | GetStatus


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A client's question."""

    v: int
    id: int
    body: Body


class Done(msgspec.Struct, tag="done", frozen=True):
    """It is done."""


class Started(msgspec.Struct, tag="started", frozen=True, kw_only=True):
    """A sandbox is ready."""

    sandbox: str
    runtime: str
    image: str


class FileData(msgspec.Struct, tag="file", frozen=True, kw_only=True):
    """Content of a file."""

    data: bytes


class ExecDone(msgspec.Struct, tag="exec_done", frozen=True, kw_only=True):
    """Carries an ``ExecResult``."""

    result: ExecResult


class BashDone(msgspec.Struct, tag="bash_done", frozen=True, kw_only=True):
    """Carries a ``BashResult``."""

    result: BashResult


class CellDone(msgspec.Struct, tag="cell_done", frozen=True, kw_only=True):
    """Carries a ``CellResult``."""

    result: CellResult


class Status(msgspec.Struct, tag="status_is", frozen=True, kw_only=True):
    """What a node server is up to."""

    pid: int
    version: str
    sandboxes: int
    """Alive now, of all clients."""
    clients: int
    started: int
    """Sandboxes started since the server came up."""
    bad_frames: int


class Failure(msgspec.Struct, tag="failure", frozen=True, kw_only=True):
    """An error, as ``errors.to_wire`` gives it."""

    code: str
    message: str
    fields: dict[str, Any] = {}


Answer = Done | Started | FileData | ExecDone | BashDone | CellDone | Status | Failure


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A node server's answer to the request of the same id."""

    v: int
    id: int
    body: Answer


def encode(message: Request | Reply) -> bytes:
    """One frame.

    Raises:
        ProtocolError: If the message is larger than ``MAX_FRAME_BYTES``.
    """
    frame = bytes(msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), unicode_errors="surrogatepass"))
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(frame)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    return frame


def decode_request(frame: bytes | memoryview) -> Request:
    """Read a client's frame.

    Raises:
        ProtocolError: If it is anything else than a valid request of this protocol version.
    """
    return _decode(frame, Request)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Read a server's frame.

    Raises:
        ProtocolError: If it is anything else than a valid reply of this protocol version.
    """
    return _decode(frame, Reply)


def id_of(frame: bytes | memoryview) -> int | None:
    """The id of a reply that cannot be read as a whole, if it can be told: so that it costs one call, not all."""
    unpacker = msgpack.Unpacker(max_buffer_size=0, raw=True)
    try:
        unpacker.feed(frame)
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == b"id":
                found = unpacker.unpack()
                return found if isinstance(found, int) else None
            unpacker.skip()
    except Exception:  # Whatever is wrong with the frame, there is no id to be had.
        return None
    return None


_M = TypeVar("_M", Request, Reply)


def _decode(frame: bytes | memoryview, kind: type[_M]) -> _M:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    try:
        raw = msgpack.unpackb(
            frame,
            unicode_errors="surrogatepass",
            max_str_len=MAX_FRAME_BYTES,
            max_bin_len=MAX_FRAME_BYTES,
            max_array_len=65_536,
            max_map_len=4_096,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises a handful of unrelated classes, RecursionError among them
        raise ProtocolError(f"not a MessagePack frame: {error}") from None
    if isinstance(raw, dict) and raw.get("v") != PROTOCOL_VERSION:
        raise ProtocolError(f"this side speaks protocol version {PROTOCOL_VERSION}, the other {raw.get('v')!r}")
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ProtocolError(f"not a valid {kind.__name__.lower()}: {error}") from None
