from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from prorl_env.envs.grading import MathGrader
from prorl_env.envs.tasks import sample_tasks
from prorl_env.types import Task

TASKS = sample_tasks()


def printed_last(program: str) -> str:
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_every_task_says_what_it_is_about_and_how_it_is_computed() -> None:
    for task in TASKS:
        assert set(task.meta) <= {"difficulty", "topic", "program", "check"}
        assert task.meta["topic"]
        assert task.meta["program"].endswith("\n")
        assert task.prompt.endswith(("?", ".", "$"))
    assert len({task.prompt for task in TASKS}) == len(TASKS)


def test_the_gold_answer_is_not_in_the_prompt() -> None:
    assert [task.task_id for task in TASKS if len(task.answer) > 2 and task.answer in task.prompt] == []


@pytest.mark.slow
@pytest.mark.parametrize("level", range(1, 7))
def test_programs_print_the_answer(level: int) -> None:
    tasks = [task for task in TASKS if task.meta["difficulty"] == level]
    assert asyncio.run(wrong_ones(tasks)) == []


async def wrong_ones(tasks: list[Task]) -> list[str]:
    wrong = []
    async with MathGrader(workers=1) as grader:
        for task in tasks:
            for name in ("program", "check"):
                if name in task.meta:
                    printed = await asyncio.to_thread(printed_last, task.meta[name])
                    verdict = await grader.grade(task.answer, printed)
                    if not verdict.equivalent:
                        wrong.append(f"{task.task_id}, {name}: {verdict.detail}")
    return wrong
