from __future__ import annotations

import random

import msgpack
import msgspec
import pytest

from prorl_env.config import Limits, SandboxSpec
from prorl_env.errors import ProtocolError
from prorl_env.remote import messages as m
from prorl_env.remote.sandbox import BashResult, CellResult, ExecResult

REQUESTS = [
    m.Hello(pid=1, pid_start=2),
    m.Ping(),
    m.Bye(),
    m.Start(runtime="auto", spec=SandboxSpec(env={"A": "é"}, limits=Limits(processes=7))),
    m.Exec(sandbox="s", argv=("a", "\udcff"), stdin=bytes(range(256)), env={"A": ""}, cwd="/", timeout_s=1.5),
    m.RunBash(sandbox="s", command=b"\xff\x00", session="x"),
    m.RunCell(sandbox="s", code="\ud800".encode("utf-8", "surrogatepass")),
    m.ReadFile(sandbox="s", path="/a", max_bytes=3),
    m.WriteFile(sandbox="s", path="/a", data=b"\0"),
    m.Stop(sandbox="s"),
    m.GetStatus(),
]
ANSWERS = [
    m.Done(),
    m.Started(sandbox="s", runtime="r", image="i"),
    m.FileData(data=b"\xff"),
    m.ExecDone(result=ExecResult(exit_code=-9, stdout=b"\xff", timed_out=True)),
    m.BashDone(result=BashResult(exit_code=None, output=b"\0", restarted=True, cwd="/\udcff")),
    m.CellDone(result=CellResult(status="ok", text="\ud800", outputs=({"type": "stream", "text": "\ud83d"},))),
    m.Status(pid=1, version="v", sandboxes=0, clients=1, started=2, bad_frames=3),
    m.Failure(code="config", message="é", fields={"a": None, "b": [1]}),
]


@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: type(body).__name__)
def test_a_request_comes_out_as_it_went_in(body: m.Body) -> None:
    request = m.Request(v=m.PROTOCOL_VERSION, id=2**40, body=body)
    assert m.decode_request(m.encode(request)) == request


@pytest.mark.parametrize("body", ANSWERS, ids=lambda body: type(body).__name__)
def test_a_reply_comes_out_as_it_went_in(body: m.Answer) -> None:
    reply = m.Reply(v=m.PROTOCOL_VERSION, id=1, body=body)
    assert m.decode_reply(m.encode(reply)) == reply


def test_every_kind_of_message_is_in_these_lists() -> None:
    assert {type(body) for body in REQUESTS} == set(m.Body.__args__)
    assert {type(body) for body in ANSWERS} == set(m.Answer.__args__)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "MessagePack"),
        (b"\xc1", "MessagePack"),
        (b"hello", "MessagePack"),
        (msgpack.packb([1, 2]), "valid request"),
        (msgpack.packb(None), "valid request"),
        (msgpack.packb({"v": 99, "id": 1, "body": {"type": "ping"}}), "version"),
        (msgpack.packb({"id": 1, "body": {"type": "ping"}}), "version"),
        (msgpack.packb({"v": 1, "id": "x", "body": {"type": "ping"}}), "id"),
        (msgpack.packb({"v": 1, "id": 1, "body": {"type": "launch"}}), "launch"),
        (msgpack.packb({"v": 1, "id": 1, "body": {"type": "bash", "sandbox": 3, "command": b""}}), "sandbox"),
        (msgpack.packb({"v": 1, "id": 1, "body": {"type": "start", "runtime": "a", "spec": {"limits": {"processes": -1}}}}), "processes"),
        (b"\x91" * 100_000 + b"\x90", "MessagePack"),
        (b"\xdf\xff\xff\xff\xff", "MessagePack"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "MessagePack"),
        (m.encode(m.Request(v=1, id=1, body=m.Ping())) + b"\x01", "MessagePack"),
    ],
)  # fmt: skip
def test_a_bad_frame_is_a_protocol_error_that_says_why(frame: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        m.decode_request(frame)


def test_random_and_mutated_frames_raise_nothing_but_protocol_errors() -> None:
    rng = random.Random(7)
    good = [m.encode(m.Request(v=1, id=1, body=body)) for body in REQUESTS]
    read = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 6)):
            where = rng.randrange(len(frame))
            match rng.randint(0, 2):
                case 0:
                    frame[where] = rng.randrange(256)
                case 1:
                    del frame[where:]
                case 2:
                    frame[where:where] = rng.randbytes(rng.randint(1, 5))
            if not frame:
                frame = bytearray(b"\x80")
        try:
            assert isinstance(m.decode_request(bytes(frame)), m.Request)
            read += 1
        except ProtocolError:
            pass
    assert 0 < read < 20_000


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="larger"):
        m.encode(m.Request(v=1, id=1, body=m.WriteFile(sandbox="s", path="p", data=b"x" * (m.MAX_FRAME_BYTES + 1))))
    with pytest.raises(ProtocolError, match="larger"):
        m.decode_request(b"x" * (m.MAX_FRAME_BYTES + 1))


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        m.Ping().x = 1  # type: ignore[attr-defined]
    assert msgspec.structs.fields(m.Request)
