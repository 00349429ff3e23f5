"""``MathGrader``: is an answer equivalent to the gold? Decided in worker processes that can be killed.

An answer is written by an agent and may be made to hang a computer algebra system or to eat the memory: that is a wrong
answer, not a broken grader. Each comparison therefore runs in a process of its own kind, with a memory limit and under
a watch; one that takes too long is killed and replaced. The gold is evaluated alone first, once, so that it is known
whose fault it is if a comparison does not end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

from prorl_env.envs.answers import extract_answer, same_text, stated_answer
from prorl_env.errors import ConfigError, GraderError, SetupError, StateError, UsageError

__all__ = ["MathGrader", "Verdict", "VerdictKind"]


class VerdictKind(StrEnum):
    """What came out of comparing an answer with the gold."""

    EQUIVALENT = "equivalent"
    """The answer says what the gold says."""
    DIFFERENT = "different"
    """It says something else."""
    ANSWER_UNPARSABLE = "answer_unparsable"
    """The answer has no meaning as mathematics, and is not the gold letter by letter either."""
    ANSWER_TOO_COSTLY = "answer_too_costly"
    """The answer is too long, or took too much time or memory to evaluate. The agent's doing."""
    GOLD_UNPARSABLE = "gold_unparsable"
    """The gold itself has no meaning, or cannot be evaluated: the task is invalid."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the grader says of one answer."""

    kind: VerdictKind
    detail: str
    """One sentence for a human: what was compared with what."""

    @property
    def equivalent(self) -> bool:
        """Whether the answer is right."""
        return self.kind is VerdictKind.EQUIVALENT


class MathGrader:
    """Grades answers to mathematics problems. ``async with MathGrader() as grader: await grader.grade("1/2", "0.5")``.

    Belongs to the event loop that first uses it. Workers are started when needed, kept, and die with the thread of that
    loop, however it dies.

    Args:
        workers: How many comparisons run at a time; more calls wait for their turn.
        timeout_s: How long one evaluation may take, in seconds, without the time in the queue.
        memory_bytes: Address space of one worker, which needs about a quarter of a gigabyte for itself.
        start_timeout_s: How long a worker may take to come up, in seconds.

    Raises:
        ConfigError: If a number is not above 0.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_bytes: int = 1024 * 1024 * 1024,
        start_timeout_s: float = 60.0,
    ) -> None:
        for name, value in (("workers", workers), ("memory_bytes", memory_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"MathGrader: {name} must be a whole number above 0, got {value!r}")
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
                raise ConfigError(f"MathGrader: {name} must be a number of seconds above 0, got {seconds!r}")
        self._workers = workers
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._turns = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._golds: OrderedDict[str, str | None] = OrderedDict()
        self._closed = False

    async def grade(self, gold: str, answer: str) -> Verdict:
        r"""Compare an answer with the gold.

        Both may be bare answers, or texts of which the last ``\boxed{…}`` or the statement "the answer is …" counts.
        Cancelling the call kills the worker that was at it.

        Raises:
            UsageError: If one of the two is not a string.
            StateError: If the grader is closed, before or during the call.
            GraderError: If workers do not come up, or break for a reason that is not the answer's twice in a row.
            SetupError: If Math-Verify is not installed.
        """
        for name, text in (("gold", gold), ("answer", answer)):
            if not isinstance(text, str):
                raise UsageError(f"MathGrader.grade: {name} must be a string, got {type(text).__name__}")
        self._must_be_open()
        if len(answer) > _MOST_TEXT:
            return Verdict(VerdictKind.ANSWER_TOO_COSTLY, f"the answer is longer than {_MOST_TEXT} characters")
        gold, answer = (extract_answer(text) or stated_answer(text).strip() for text in (gold, answer))
        if not gold or len(gold) > _MOST_ANSWER:
            what = "empty" if not gold else f"longer than {_MOST_ANSWER} characters"
            return Verdict(VerdictKind.GOLD_UNPARSABLE, f"the gold is {what}")
        if not answer:
            return Verdict(VerdictKind.ANSWER_UNPARSABLE, f"the answer is empty, the gold is {_short(gold)}")
        if len(answer) > _MOST_ANSWER:
            return Verdict(VerdictKind.ANSWER_TOO_COSTLY, f"the answer is longer than {_MOST_ANSWER} characters")
        if same_text(gold, answer):
            return Verdict(VerdictKind.EQUIVALENT, f"the answer {_short(answer)} is the gold {_short(gold)} as written")
        fault = await self._fault_of(gold)
        if fault is not None:
            return Verdict(VerdictKind.GOLD_UNPARSABLE, f"the gold {_short(gold)} {fault}")
        reply = await self._ask({"gold": gold, "answer": answer})
        return _verdict(gold, answer, reply, self._timeout_s)

    async def start(self) -> None:
        """Bring up all workers now, so that no grading waits for it. May be called again.

        Raises:
            StateError: If the grader is closed.
            GraderError: If a worker does not come up.
            SetupError: If Math-Verify is not installed.
        """
        self._must_be_open()
        await asyncio.gather(*(self._warm() for _ in range(self._workers - len(self._alive))))

    async def aclose(self) -> None:
        """End all workers and wait until they are gone. Calls in flight raise StateError. Safe to call twice."""
        self._closed = True
        for worker in tuple(self._alive):
            self._end(worker)
        # Whoever has a turn sees that its worker is gone, or ends the one that it was just starting, and gives it back.
        for _ in range(self._workers):
            await self._turns.acquire()
        for _ in range(self._workers):
            self._turns.release()
        while self._ending:
            await asyncio.wait(tuple(self._ending))

    async def __aenter__(self) -> MathGrader:
        self._must_be_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _must_be_open(self) -> None:
        if self._closed:
            raise StateError("this MathGrader is closed; make a new one")

    async def _fault_of(self, gold: str) -> str | None:
        """What is wrong with a gold, or None."""
        if gold in self._golds:
            self._golds.move_to_end(gold)
            return self._golds[gold]
        reply = await self._ask({"gold": gold})
        match reply.result:
            case "fine":
                fault = None
            case "unparsable":
                fault = f"has no meaning: {reply.why}"
            case _:
                fault = f"could not be evaluated{_limit_hit(reply, self._timeout_s)}"
        self._golds[gold] = fault
        if len(self._golds) > _MOST_GOLDS:
            self._golds.popitem(last=False)
        return fault

    async def _ask(self, request: dict[str, str]) -> _Reply:
        """Have a worker do it; if that one breaks, have a fresh one do it once more."""
        reply = _Reply("crashed")
        for fresh in (False, True):
            async with self._worker(fresh=fresh) as worker:
                reply = await worker.ask(request, self._timeout_s)
            self._must_be_open()
            if reply.result not in {"crashed", "memory"}:
                return reply
        if reply.result == "crashed" and reply.why not in _CRASHES_OF_EXPRESSIONS:
            raise GraderError(f"two grading workers in a row ended on the same request, the last with {reply.why}")
        return reply

    @asynccontextmanager
    async def _worker(self, *, fresh: bool = False) -> AsyncIterator[_Worker]:
        async with self._turns:
            self._must_be_open()
            worker = self._idle.pop() if self._idle else None
            if worker is not None and fresh:
                self._end(worker)
                worker = None
            if worker is None:
                worker = await self._spawn()
            try:
                yield worker
            finally:
                if worker.usable and not self._closed:
                    self._idle.append(worker)
                else:
                    self._end(worker)

    async def _warm(self) -> None:
        async with self._turns:
            worker = await self._spawn()
            self._idle.append(worker)

    async def _spawn(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _BOOT,
            json.dumps(sys.path),
            str(os.getpid()),
            str(self._memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
        worker = _Worker(process)
        self._alive.add(worker)
        try:
            reply = await worker.hear(self._start_timeout_s)
            self._must_be_open()
        except BaseException:
            self._end(worker)
            raise
        if reply.result == "ready":
            return worker
        self._end(worker)
        if reply.result == "missing":
            raise SetupError(f"grading needs Math-Verify: {reply.why}.", mend="Install it: pip install math-verify")
        how = f"ended with {reply.why}" if reply.why else f"said nothing for {self._start_timeout_s:g} s"
        raise GraderError(f"a grading worker with {self._memory_bytes} bytes of memory did not come up: it {how}")

    def _end(self, worker: _Worker) -> None:
        """Kill a worker and have it waited for, so that no zombie stays."""
        if worker not in self._alive:
            return
        self._alive.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        ending = asyncio.ensure_future(worker.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


@dataclass(frozen=True, slots=True)
class _Reply:
    result: str
    """What the worker says, or ``timeout`` or ``crashed``."""
    why: str = ""


class _Worker:
    """One worker process. ``usable`` is False while it owes a reply: it cannot be asked anything else then."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._owes = True
        self._served = 0

    @property
    def usable(self) -> bool:
        return not self._owes and self._served < _MOST_SERVED and self._process.returncode is None

    async def ask(self, request: dict[str, str], timeout_s: float) -> _Reply:
        self._owes = True
        self._served += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return await self.hear(timeout_s)
        except ConnectionError:
            return await self._crash()

    async def hear(self, timeout_s: float) -> _Reply:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            return _Reply("timeout")
        if not line.endswith(b"\n"):
            return await self._crash()
        reply = json.loads(line)
        self._owes = reply["result"] == "memory"
        return _Reply(reply["result"], reply.get("why", ""))

    async def _crash(self) -> _Reply:
        code = await self._process.wait()
        return _Reply("crashed", signal.Signals(-code).name if code < 0 else f"exit status {code}")

    async def end(self) -> None:
        if self._process.returncode is None:
            # Not Process.kill(): that may reap the child itself, and the loop would then make up its exit status.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _verdict(gold: str, answer: str, reply: _Reply, timeout_s: float) -> Verdict:
    said, wanted = f"the answer {_short(answer)}", f"the gold {_short(gold)}"
    match reply.result:
        case "equivalent":
            return Verdict(VerdictKind.EQUIVALENT, f"{said} equals {wanted}")
        case "different":
            return Verdict(VerdictKind.DIFFERENT, f"{said} is not {wanted}")
        case "unparsable":
            return Verdict(VerdictKind.ANSWER_UNPARSABLE, f"{said} has no meaning: {reply.why}; {wanted} was wanted")
        case _:
            limit = _limit_hit(reply, timeout_s)
            return Verdict(VerdictKind.ANSWER_TOO_COSTLY, f"{said} could not be evaluated{limit}; {wanted} was wanted")


def _limit_hit(reply: _Reply, timeout_s: float) -> str:
    match reply.result:
        case "timeout":
            return f" within {timeout_s:g} s"
        case "memory":
            return " within the memory limit"
        case _:
            return f": it ended the worker with {reply.why}, twice"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…")


_MOST_TEXT = 1_000_000
_MOST_ANSWER = 10_000
_MOST_GOLDS = 10_000
_MOST_SERVED = 2_000
"""SymPy's caches grow; a worker is replaced before they matter."""
_SHORT = 80
_CRASHES_OF_EXPRESSIONS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS"})
"""How a process ends by itself when an expression is too much for a C library. SIGKILL comes from outside."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]);from prorl_env.envs.grading_worker import main; main()"
"""Takes over the parent's module path, so that the worker finds what the parent found."""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # SymPy's ordering, and with it its running time, depends on hashes.
    "SYMPY_GROUND_TYPES": "python",  # GMP ends the process when memory is short; Python raises MemoryError.
    "MPMATH_NOGMPY": "1",
}
