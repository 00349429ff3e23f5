from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from prorl_env.envs.answers import extract_answer
from prorl_env.envs.grading import MathGrader, Verdict, VerdictKind
from prorl_env.errors import ConfigError, GraderError, StateError, UsageError

TOWER = "9^{9^{9^9}}"
EATS_MEMORY = r"\gcd(2^{20000000000},3)"


def with_grader(work: Callable[[MathGrader], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with MathGrader(**settings) as grader:
            return await work(grader)

    return asyncio.run(run())


def grade_all(pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
    async def work(grader: MathGrader) -> list[Verdict]:
        return await asyncio.gather(*(grader.grade(gold, answer) for gold, answer in pairs))

    return with_grader(work)


OTHERS: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Tests of other modules may have left the process's shared grader running, which is right."""
    OTHERS.clear()
    OTHERS.update(workers())


def workers() -> set[psutil.Process]:
    """Those of the test, zombies included."""
    return set(filter(is_worker, psutil.Process().children())) - OTHERS


def is_worker(child: psutil.Process) -> bool:
    try:
        return "grading_worker" in " ".join(child.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


# What is equal, and what is not.

EQUAL = {
    "numbers": [("1/2", "0.5"), ("055", "55"), ("1000", "1 000"), ("1,000,000", "10^6"), ("-0", "0"), ("6", "2(3)")],
    "latex": [(r"\frac14", "1/4"), (r"\sqrt3/2", r"\frac{\sqrt{3}}{2}"), (r"4\frac{2}{3}", r"\frac{14}{3}")],
    "plain text": [(r"\frac{\pi}{2}", "pi/2"), (r"2\sqrt{2}", "sqrt(8)"), ("2^{10}", "2**10"), ("10^{-5}", "1e-5")],
    "rounded": [("1/12", "0.0833"), (r"\sqrt{17}", "4.123106"), ("2.5", "2.50"), ("0.3", "0.30000000000000004")],
    "recurring": [("1/3", r"0.\overline{3}"), (r"0.8\overline{4}", "38/45")],
    "exact": [("120", "5!"), (r"\binom{5}{2}", "10"), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"), (r"e^{i\pi}", "-1")],
    "symbols": [("x^2+2x+1", "(x+1)^2"), ("2^{n+1}", r"2\cdot 2^n"), (r"\ln(x^2)", r"2\ln x"), ("5x", r"x\cdot5")],
    "trigonometry": [(r"\sin^2 x+\cos^2 x", "1"), (r"\frac{\sqrt{5}-1}{2}", r"2\sin 18^\circ")],
    "units": [("5 cm", "50 mm"), ("5 cm", "5"), ("5", "5 cm"), (r"\$5", "5 dollars"), ("60 mph", "60 miles per hour")],
    "percent": [(r"28\%", "28 pct"), (r"28\%", "0.28"), (r"25\%", "25")],
    "degrees": [(r"90^\circ", "90 degrees"), (r"90^{\circ}", "90")],
    "bases": [("204_5", "204_{5}"), ("204_5", "204")],
    "lists": [("1,2", "2, 1"), (r"\{1,2\}", "2,1"), (r"\pm 4", "4, -4"), ("1,2,3", "[1, 2, 3]"), ("1, 2", "1, 2, 2")],
    "tuples": [(r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac\pi2)"), ("(1,3)", "{1,3}"), ("(p,q)=(3,2)", "(3,2)")],
    "intervals": [
        (r"(-\infty,2]", r"x \le 2"),
        (r"x \in [-2,7]", r"-2 \le x \le 7"),
        (r"\mathbb{R}", r"(-\infty,\infty)"),
    ],
    "unions": [(r"x<1 \text{ or } x>3", r"(3,\infty)\cup(-\infty,1)")],
    "matrices": [(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 4/2 \end{bmatrix}")],
    "equations": [("2x+4y-3=0", r"y=-\frac12 x+\frac34"), ("x=5", "5"), ("5", "x = 2+3 = 5"), ("y=2x+1", "2x+1")],
    "words": [(r"\text{(C)}", "C"), (r"\text{even}", "Even."), (r"\text{Tuesday}", "tuesday"), ("12:00", "12:00")],
    "texts": [("7", r"First \boxed{3}, then \boxed{7}"), ("73", "Final Answer: **73**")],
}
DIFFERENT = {
    "numbers": [("5", "6"), ("100", "99.99999999"), ("12", "1 2"), ("1,2", "1.2"), ("3", "3x"), ("28", r"28\%")],
    "tiny or huge": [(r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("10^{400}", "10^{400}+1"), ("1-1/e", "1+1/e")],
    "almost equal": [(r"\sqrt{10^{100}+1}", "10^{50}"), ("5", "5+10^{-60}"), ("x", r"x+\frac{1}{2004!}")],
    "too rough": [("1/3", "0.33"), ("2/3", "0.666"), (r"\pi", "3.14"), ("1/8", "0.13"), ("3", "2.9999999")],
    "symbols": [
        ("x^2", "2x"),
        ("R", "r"),
        (r"\sqrt{x^2}", "x"),
        (r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor\sqrt{n}\rfloor"),
    ],
    "dropped": [("4", r"4\sqrt(2)"), ("1", r"1\sqrt{19}"), ("x+1", "x+2n+1"), ("2x", "2")],
    "units": [("5 cm", "5 m"), ("5 cm", "5 cm^2"), ("10 apples", "10 oranges"), (r"\$5", "5 cents"), ("5", r"5\% ")],
    "bases": [("204_5", "204_6"), ("204", "204_5"), ("204_5", "54")],
    "lists": [("7", "7, 8"), ("7", "7 or 8"), (r"\pm 2021", "2021"), ("1,2", "1,2,3"), ("x=1,y=2", "2,1")],
    "dots": [(r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1")],
    "tuples": [("(1,2)", "(2,1)"), (r"(1,2)", r"\{1,2\}"), ("(1,2)", "[1,2]"), ("(1,2),(3,4)", "(1,2)")],
    "intervals": [("[0,1)", "(0,1)"), (r"(-\infty,2)", r"x \le 2"), ("x>3", "x<3"), ("(0,1)", "(0,1.5)")],
    "matrices": [(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}")],
    "equations": [("3x-y+13=0", "3x+4y+14=0"), ("f(x)=0", r"\forall x>0, f(x)=0"), ("x=5", "y=5"), ("a+3z=0", "0")],
    "words": [(r"\text{Evelyn}", r"\text{Briana}"), ("A", "a"), ("7", "not 7"), ("5", "five"), ("12:00", "12:30")],
}


def cases(table: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return [pair for pairs in table.values() for pair in pairs]


def test_equal_answers_are_equivalent_however_written() -> None:
    pairs = cases(EQUAL)
    assert [pair for pair, verdict in zip(pairs, grade_all(pairs), strict=True) if not verdict.equivalent] == []


def test_other_answers_are_different() -> None:
    pairs = cases(DIFFERENT)
    verdicts = grade_all(pairs)
    assert [
        (*pair, v.kind) for pair, v in zip(pairs, verdicts, strict=True) if v.kind is not VerdictKind.DIFFERENT
    ] == []


# Whose fault it is.


@pytest.mark.parametrize(
    ("gold", "answer", "kind", "words"),
    [
        ("2", "2.0", VerdictKind.EQUIVALENT, "the answer '2.0' equals the gold '2'"),
        ("2", "2", VerdictKind.EQUIVALENT, "as written"),
        ("2", "3", VerdictKind.DIFFERENT, "the answer '3' is not the gold '2'"),
        ("2", r"\frac{1}{", VerdictKind.ANSWER_UNPARSABLE, "brackets do not match"),
        ("2", r"2 + + \times", VerdictKind.ANSWER_UNPARSABLE, "has no meaning"),
        ("2", "", VerdictKind.ANSWER_UNPARSABLE, "the answer is empty"),
        ("2", "1+" * 3000 + "1", VerdictKind.ANSWER_UNPARSABLE, "nested too deeply"),
        ("2", "1" * 10_001, VerdictKind.ANSWER_TOO_COSTLY, "longer than 10000 characters"),
        ("2", "1" * 1_000_001, VerdictKind.ANSWER_TOO_COSTLY, "longer than 1000000 characters"),
        ("2", "\ud800\x00", VerdictKind.DIFFERENT, "is not the gold"),
        (r"\frac{1}{", "2", VerdictKind.GOLD_UNPARSABLE, "brackets do not match"),
        (r"\frac{1}{", r"\frac{1}{", VerdictKind.EQUIVALENT, "as written"),
        (r"\frac{0}{0}", "2", VerdictKind.GOLD_UNPARSABLE, "has no meaning"),
        ("", "2", VerdictKind.GOLD_UNPARSABLE, "the gold is empty"),
        ("1+" * 6000, "2", VerdictKind.GOLD_UNPARSABLE, "the gold is longer than"),
    ],
)
def test_a_verdict_says_whose_fault_it_is(gold: str, answer: str, kind: VerdictKind, words: str) -> None:
    (verdict,) = grade_all([(gold, answer)])
    assert verdict.kind is kind
    assert words in verdict.detail
    assert "\n" not in verdict.detail
    assert verdict.equivalent == (kind is VerdictKind.EQUIVALENT)
    assert pickle.loads(pickle.dumps(verdict)) == verdict


def test_an_answer_that_hangs_is_the_agent_s_fault_and_a_gold_that_hangs_is_not() -> None:
    async def work(grader: MathGrader) -> list[Verdict]:
        return [
            await grader.grade("2", TOWER),
            await grader.grade(TOWER, "2"),
            await grader.grade(TOWER, "3"),  # known by now
            await grader.grade("2", "1+1"),
        ]

    costly, *invalid, right = with_grader(work, timeout_s=1.0, workers=1)
    assert costly.kind is VerdictKind.ANSWER_TOO_COSTLY
    assert "could not be evaluated within 1 s" in costly.detail
    assert [verdict.kind for verdict in invalid] == [VerdictKind.GOLD_UNPARSABLE] * 2
    assert right.equivalent


def test_an_answer_that_eats_memory_is_too_costly_and_the_next_one_is_graded() -> None:
    async def work(grader: MathGrader) -> list[Verdict]:
        return [await grader.grade("2", EATS_MEMORY), await grader.grade("2", "1+1")]

    costly, right = with_grader(work, workers=1, memory_bytes=400 * 1024 * 1024)
    assert costly.kind is VerdictKind.ANSWER_TOO_COSTLY
    assert "within the memory limit" in costly.detail
    assert right.equivalent


# Workers come, go and leave nothing behind.


def test_no_worker_runs_before_it_is_needed_nor_after_the_end() -> None:
    async def work() -> None:
        grader = MathGrader(workers=3)
        assert (await grader.grade("2", "2")).equivalent
        assert workers() == set()
        await grader.start()
        await grader.start()
        assert len(workers()) == 3
        await asyncio.gather(grader.aclose(), grader.aclose())
        await grader.aclose()
        assert workers() == set()

    asyncio.run(work())


def test_more_answers_than_workers_wait_for_their_turn() -> None:
    async def work(grader: MathGrader) -> tuple[list[Verdict], int]:
        verdicts = await asyncio.gather(*(grader.grade(str(n), f"{n}.0") for n in range(40)))
        return verdicts, len(workers())

    verdicts, number = with_grader(work, workers=2)
    assert all(verdict.equivalent for verdict in verdicts)
    assert number == 2


def test_cancelling_ends_the_worker_that_was_at_it_and_nothing_else() -> None:
    async def work(grader: MathGrader) -> None:
        await grader.start()
        assert (await grader.grade("2", "1+1")).equivalent
        handles = [os.pidfd_open(worker.pid) for worker in workers()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(grader.grade("2", TOWER), 0.5)
        assert len(ended(handles, at_least=1)) == 1
        waiting = asyncio.gather(*(grader.grade("2", TOWER) for _ in range(5)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await grader.grade("2", "3-1")).equivalent
        for handle in handles:
            os.close(handle)

    with_grader(work, workers=2, timeout_s=60.0)


def ended(handles: list[int], *, at_least: int) -> list[int]:
    """Those of some process handles whose process has ended, once there are so many."""
    found: list[int] = []
    while len(found) < at_least:
        now = select.select([handle for handle in handles if handle not in found], [], [], 30)[0]
        assert now, "nothing more ended within 30 s"
        found += now
    return found


def test_a_worker_that_was_killed_is_replaced() -> None:
    async def work(grader: MathGrader) -> Verdict:
        await grader.start()
        for worker in workers():
            worker.kill()
        return await grader.grade("2", "1+1")

    assert with_grader(work, workers=2).equivalent


def test_workers_that_are_killed_twice_are_a_grader_error() -> None:
    async def work(grader: MathGrader) -> None:
        await grader.start()
        grading = asyncio.ensure_future(grader.grade("2", TOWER))
        while not grading.done():
            for worker in workers():
                worker.kill()
            await asyncio.sleep(0)
        with pytest.raises(GraderError, match="SIGKILL"):
            await grading

    with_grader(work, workers=1, timeout_s=60.0)


def test_closing_in_flight_raises_and_ends_all() -> None:
    async def work() -> None:
        grader = MathGrader(workers=1, timeout_s=60.0)
        await grader.start()
        calls = [asyncio.ensure_future(grader.grade("2", TOWER)) for _ in range(3)]
        await asyncio.sleep(0)
        await grader.aclose()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, StateError)
        assert workers() == set()
        with pytest.raises(StateError, match="closed"):
            await grader.grade("2", "2")
        with pytest.raises(StateError):
            await grader.start()
        with pytest.raises(StateError):
            async with grader:
                pass

    asyncio.run(work())


def test_too_little_memory_to_start_is_a_grader_error() -> None:
    async def work(grader: MathGrader) -> None:
        with pytest.raises(GraderError, match="did not come up"):
            await grader.grade("2", "1+1")

    with_grader(work, memory_bytes=50 * 1024 * 1024)


@pytest.mark.parametrize(
    "settings",
    [{"workers": 0}, {"workers": 1.5}, {"workers": True}, {"timeout_s": 0}, {"timeout_s": "5"}, {"memory_bytes": -1}],
)
def test_settings_must_make_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        MathGrader(**settings)


def test_answers_must_be_text() -> None:
    async def work(grader: MathGrader) -> None:
        with pytest.raises(UsageError, match="answer must be a string, got int"):
            await grader.grade("2", 2)  # type: ignore[arg-type]

    with_grader(work)


PARENT = f"""
import asyncio, sys
from prorl_env.envs.grading import MathGrader

async def main():
    grader = MathGrader(workers=2, timeout_s=600.0)
    await grader.start()
    grading = asyncio.ensure_future(grader.grade("2", {TOWER!r}))
    await grader.grade("3", "1+1")
    print("started", flush=True)
    await grading

asyncio.run(main())
"""


def test_workers_die_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=with_own_path())
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "started\n"
        children = psutil.Process(parent.pid).children()
        handles = [os.pidfd_open(child.pid) for child in children]
        parent.kill()
        parent.wait(timeout=30)
    assert len(handles) == 2
    assert sorted(ended(handles, at_least=2)) == sorted(handles)
    for handle in handles:
        os.close(handle)


def with_own_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def test_the_parent_imports_no_computer_algebra() -> None:
    program = "import sys, prorl_env.envs.grading; print(sorted({'sympy', 'math_verify', 'mpmath'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=with_own_path(), timeout=60
    )
    assert done.stdout.strip() == "[]"


# Published data, where it is at hand.


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wrong_ways(rows: list[dict[str, Any]], gold: str, answer: str, label: str) -> tuple[list[str], list[str]]:
    """The ids of what was accepted and should not have been, and the other way round."""
    verdicts = grade_all((row[gold], row[answer]) for row in rows)
    accepted = [row["id"] for row, verdict in zip(rows, verdicts, strict=True) if verdict.equivalent and not row[label]]
    rejected = [row["id"] for row, verdict in zip(rows, verdicts, strict=True) if row[label] and not verdict.equivalent]
    return accepted, rejected


@pytest.mark.slow
def test_no_pair_that_math_verify_gets_wrong_is_accepted(shared_data: Path) -> None:
    rows = read_lines(shared_data.parent / "cases" / "grading" / "math_verify_known_wrong.jsonl")
    accepted, rejected = wrong_ways(rows, "gold", "pred", "equivalent")
    assert accepted == []
    # "Theta(log log n)" is words to us.
    assert rejected == ["mvwrong-27"]


@pytest.mark.slow
def test_no_pair_of_math_verify_s_own_tests_is_accepted_wrongly(shared_data: Path) -> None:
    accepted, rejected = wrong_ways(
        read_lines(shared_data / "math" / "equivalence_pairs.jsonl"), "gold", "pred", "equivalent"
    )
    assert accepted == []
    assert len(rejected) <= 11


@pytest.mark.slow
@pytest.mark.parametrize("name", ["responses_math_qwen", "responses_gsm8k"])
def test_all_labelled_responses_of_models_are_graded_as_labelled(shared_data: Path, name: str) -> None:
    rows = read_lines(shared_data / "math" / f"{name}.jsonl")
    for row in rows:
        row["said"] = extract_answer(row["response"]) or row["response"].rpartition("A:")[2]
    assert wrong_ways(rows, "answer", "said", "label_correct") == ([], [])


@pytest.mark.slow
def test_every_published_gold_means_something_and_no_two_are_confused(shared_data: Path) -> None:
    rows = read_lines(shared_data / "math" / "problems.jsonl")
    golds = list(dict.fromkeys(row["answer"] for row in rows))
    # One more space and a pair of braces, so that the texts are not the same.
    same = grade_all((gold, f"{{{gold.rstrip('.$')} }}") for gold in golds)
    assert [verdict.detail for verdict in same if not verdict.equivalent] == []
    integers = [gold for gold in golds if gold.isdigit() and not gold.startswith("0")]
    others = grade_all(pairwise(integers))
    assert [verdict.kind for verdict in others] == [VerdictKind.DIFFERENT] * (len(integers) - 1)
