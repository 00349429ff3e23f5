"""An example run on mathematics, of every kind of episode, for tests that need one. The same at every call."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from prorl_env.types import Outcome, Phase, ToolCall, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM = """Solve the problem. You may run Python in a notebook that keeps its state between cells.

<tools>
{"type": "function", "function": {"name": "execute_ipython_cell", "parameters": {"properties": {"code": {"type": \
"string"}}, "required": ["code"]}}}
</tools>

For each call, return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>

Put the final answer in \\boxed{}."""

TASK = """A lattice path goes from $(0, 0)$ to $(8, 8)$ by unit steps right and up. How many of these paths
touch the line $y = x$ nowhere but at their two ends?"""

COUNT = """from functools import cache

@cache
def paths(x, y):
    # Strictly below the diagonal, apart from the two ends.
    if (x, y) == (0, 0):
        return 1
    if x < 0 or y < 0 or (x <= y and (x, y) != (8, 8)):
        return 0
    return paths(x - 1, y) + paths(x, y - 1)

print(2 * paths(8, 8))"""

TRACEBACK = """\x1b[0;31m---------------------------------------------------------------------------\x1b[0m
\x1b[0;31mNameError\x1b[0m                                 Traceback (most recent call last)
Cell \x1b[0;32mIn[2], line 1\x1b[0m
\x1b[0;32m----> 1\x1b[0m \x1b[38;5;28mprint\x1b[39m(path(8, 8))

\x1b[0;31mNameError\x1b[0m: name 'path' is not defined"""

LISTING = "\n".join(f"n = {n:>3}   paths = {n * n * 7919 % 100_003:>6}   ratio = {n / (n + 3):.6f}" for n in range(90))


def call(thought: str, code: str, output: str, *, is_error: bool = False, seconds: float = 0.21) -> Turn:
    """A turn that runs one cell."""
    text = json.dumps({"name": "execute_ipython_cell", "arguments": {"code": code}})
    result = ToolResult(
        call=ToolCall("execute_ipython_cell", {"code": code}), content=output, is_error=is_error, seconds=seconds
    )
    return Turn(
        text=f"{thought}\n\n<tool_call>\n{text}\n</tool_call>",
        tool_results=(result,),
        observation=({"role": "tool", "content": output},),
        policy_seconds=1.84,
        tool_seconds=seconds,
    )


MALFORMED = Turn(
    text='Let me check small cases first.\n\n<tool_call>\n{"name": "execute_ipython_cell", "arguments": {"code": '
    '"for n in range(1, 6):\n    print(n, 2 * catalan(n - 1))"}}\n</tool_call>',
    parse_error="The JSON of tool call 1 is malformed: a string holds a raw line break (line 1, column 84). "
    "Write it as \\n.",
    observation=({"role": "tool", "content": "Your tool call could not be read: a string holds a raw line break."},),
    policy_seconds=1.2,
)
WORK = (
    call(
        "I count the paths that stay strictly below the diagonal and double them.\nA recursion with a memo is enough, "
        "since the grid is small: each cell is the sum of its left and its lower neighbour, and every cell on the "
        "diagonal but the ends counts for nothing.",
        COUNT,
        "858",
    ),
    call("I want to see the value again.", "print(path(8, 8))", TRACEBACK, is_error=True),
)
LAST = Turn(
    text="The doubled Catalan number $2 C_7 = 2 \\cdot 429$ agrees with the program.\n\nThe answer is \\boxed{858}.",
    policy_seconds=0.9,
)
WRONG = Turn(
    text="Each path is one of $\\binom{16}{8}$, and half of them\nstay below.\n\n\\boxed{6435}", policy_seconds=0.7
)
ENDLESS = call(
    "Brute force over all paths.",
    "import itertools\nn = 0\nwhile True:\n    n += 1",
    "The cell did not end within 30 s and was interrupted.",
    is_error=True,
    seconds=30.0,
)

KINDS: dict[str, tuple[Outcome, float | None, str, str | None, tuple[Turn, ...]]] = {
    "solved": (Outcome.OK, 1.0, "858 equals the gold answer 858.", "858", (WORK[0], LAST)),
    "slips": (Outcome.OK, 1.0, "858 equals the gold answer 858.", "858", (MALFORMED, *WORK, LAST)),
    "wrong": (
        Outcome.OK,
        0.0,
        "6435 does not equal the gold answer 858: the difference is 5577.",
        "6435",
        (
            *WORK,
            call("A table of the first values.", "for n in range(90): show(n)", LISTING),
            MALFORMED,
            WORK[1],
            call("Nothing to print this time.", "ratio = 6435 / 12870", ""),
            WRONG,
        ),
    ),
    "cut": (
        Outcome.TRUNCATED,
        0.0,
        "No answer after 12 turns; the last one ended at the length limit.",
        None,
        (*WORK, MALFORMED) * 3 + (*WORK, replace(WRONG, stop_reason="length", text="Wait. " * 800)),
    ),
    "silent": (Outcome.AGENT_ERROR, 0.0, "The last turn holds no \\boxed{} answer.", None, (replace(LAST, text=""),)),
    "slow": (Outcome.TIMEOUT, None, "RUN took more than 900 s.", None, (WORK[0], ENDLESS, ENDLESS)),
    "broken": (
        Outcome.INFRA_ERROR,
        None,
        "SandboxDied: the sandbox is gone: its init was killed by signal 9 (out of memory on the node).",
        None,
        (WORK[0],),
    ),
    "stopped": (Outcome.CANCELLED, None, "Cancelled in INIT: its group had enough episodes.", None, ()),
}


def example_run(count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Trajectory]:
    """So many episodes as a run on mathematics gives them."""
    rng = random.Random(7)
    run = []
    for number in range(count):
        kind = kinds[number] if number < len(kinds) else rng.choices(kinds, [24, 8, 12, 3, 2, 1.5, 1.5, 1])[0]
        outcome, reward, detail, answer, turns = KINDS[kind]
        mask = [0] * 310 + [bit for _ in turns for bit in [1] * rng.randint(60, 160) + [0] * rng.randint(20, 90)]
        mask = mask if turns else []
        run.append(
            Trajectory(
                task_id=f"math/lattice-paths-{number // 4 + 1:04}",
                data_source="math500" if number // 4 % 3 else "gsm8k",
                outcome=outcome,
                reward=reward,
                detail=detail,
                answer=answer,
                gold="858",
                timeout_phase=Phase.RUN if outcome is Outcome.TIMEOUT else None,
                seed=number % 4,
                policy="vllm",
                runtime="apptainer",
                prompt=({"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}),
                turns=turns,
                token_ids=tuple(rng.randrange(150_000) for _ in mask),
                loss_mask=tuple(mask),
                logprobs=tuple(-(rng.expovariate(3) ** 2) if bit else 0.0 for bit in mask),
                seconds={
                    "queued": rng.random() * 2,
                    "init": 0.4 + rng.random(),
                    "policy": sum(turn.policy_seconds for turn in turns) * (0.6 + rng.random()),
                    "run": sum(turn.tool_seconds for turn in turns),
                    "eval": 0.05 + rng.random() / 4 if reward is not None else 0.0,
                    "teardown": 0.08,
                },
            )
        )
    return run
