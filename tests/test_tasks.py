from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from prorl_env.envs.tasks import load_tasks, sample_tasks, task_hash
from prorl_env.errors import TaskFileError
from prorl_env.types import Task

ROW = {"task_id": "t1", "prompt": "What is 1 + 1?", "answer": "2"}


def write(path: Path, *lines: object) -> Path:
    """A file of these lines: bytes as they are, everything else as JSON."""
    file = path / "tasks.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return file


def load_one(row: object) -> Task:
    (task,) = load_tasks([row])  # type: ignore[list-item]
    return task


def test_a_row_of_our_own_shape_keeps_other_fields_in_meta(tmp_path: Path) -> None:
    file = write(tmp_path, {**ROW, "data_source": "stem", "difficulty": 3, "tags": ["a"]})
    assert load_tasks(file) == (
        Task(
            task_id="t1",
            data_source="stem",
            prompt="What is 1 + 1?",
            answer="2",
            meta={"difficulty": 3, "tags": ["a"]},
        ),
    )


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "meta"),
    [
        ({"id": 7, "problem": "p", "answer": "a", "source": "s"}, "p", "a", {"source": "s"}),
        ({"question": "q", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}, "q", "2", {"solution": "1 + 1 = <<1+1=2>>2"}),
        ({"question": "q", "answer": "1,600"}, "q", "1,600", {}),
        (
            {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"style": "rule", "ground_truth": "a"}},
            "p",
            "a",
            {"reward_model": {"style": "rule"}},
        ),
        (
            {
                "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "p"}],
                "reward_model": '{"style": "rule", "ground_truth": "a"}',
                "extra_info": {"index": 0},
            },
            "p",
            "a",
            {"system": "Think.", "reward_model": {"style": "rule"}, "extra_info": {"index": 0}},
        ),
        ({"prompt": '[{"role": "user", "content": "p"}]', "answer": "a"}, "p", "a", {}),
        ({"prompt": "[1, 2] reversed?", "answer": "[2, 1]"}, "[1, 2] reversed?", "[2, 1]", {}),
    ],
)
def test_rows_of_published_sets_are_read(row: dict[str, Any], prompt: str, answer: str, meta: dict[str, Any]) -> None:
    task = load_one(row)
    assert (task.prompt, task.answer, dict(task.meta), task.data_source) == (prompt, answer, meta, "math")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (142.0, "142"),
        (0.5, "0.5"),
        (-3, "-3"),
        (10**30, "1" + "0" * 30),
        (1e300, "1e+300"),
        ("  x ", "x"),
        (["a", "b"], "a, b"),
        (["m\n", "m"], "m"),
        ([1, 2.0], "1, 2"),
        ("$\\frac12$", "$\\frac12$"),
    ],
)
def test_gold_answers_get_one_normal_form(gold: object, answer: str) -> None:
    assert load_one({**ROW, "answer": gold}).answer == answer


@pytest.mark.parametrize(
    ("lines", "line", "field", "words"),
    [
        ([ROW, b'{"prompt": '], 2, None, "not JSON: Expecting value in column 12"),
        ([b"[1]"], 1, None, "must be an object, not a list"),
        ([b"null"], 1, None, "must be an object, not null"),
        ([b"7 8"], 1, None, "not JSON: Extra data in column 3"),
        ([{"answer": "2"}], 1, "prompt", "no field holds the problem"),
        ([{"prompt": "p"}], 1, "answer", "the field answer is missing"),
        ([{**ROW, "answer": ""}], 1, "answer", "answer is empty"),
        ([{**ROW, "answer": []}], 1, "answer", "answer is empty"),
        ([{**ROW, "answer": None}], 1, "answer", "not null"),
        ([{**ROW, "answer": True}], 1, "answer", "not true or false"),
        ([{**ROW, "answer": {"a": 1}}], 1, "answer", "not an object"),
        ([{**ROW, "answer": [["a"]]}], 1, "answer", "not a list"),
        ([{**ROW, "prompt": " \n"}], 1, "prompt", "prompt is empty"),
        ([{**ROW, "prompt": 5}], 1, "prompt", "prompt must be text, not a number"),
        ([{**ROW, "prompt": []}], 1, "prompt", "no message of the user"),
        ([{**ROW, "prompt": [{"role": "assistant", "content": "x"}]}], 1, "prompt", "neither user nor system"),
        ([{**ROW, "prompt": [{"role": "user", "content": 5}]}], 1, "prompt.content", "must be text"),
        ([{**ROW, "task_id": ""}], 1, "task_id", "task_id is empty"),
        ([{**ROW, "task_id": 1.5}], 1, "task_id", "task_id must be text"),
        ([{**ROW, "data_source": None}], 1, "data_source", "data_source must be text, not null"),
        ([ROW, b"", b"   ", {**ROW, "prompt": "other"}], 4, "task_id", "the id 't1' is that of line 1"),
        ([{"prompt": "p", "answer": "a"}] * 2, 2, "task_id", "every field is that of line 1"),
        ([{"prompt": "p", "reward_model": {}}], 1, "reward_model.ground_truth", "is missing"),
        ([{"prompt": "p", "reward_model": "x"}], 1, "reward_model", "must be an object, not text"),
        ([{"question": "q", "answer": "work ####"}], 1, "answer", "answer is empty"),
        ([b'{"prompt": "p", "answer": NaN}'], 1, None, "NaN is not a JSON value"),
        ([b'{"prompt": "p", "answer": -Infinity}'], 1, None, "-Infinity is not a JSON value"),
        ([b'{"prompt": "p", "answer": 1e999}'], 1, None, "1e999 is too large"),
        ([b'{"prompt": "p", "answer": ' + b"1" * 5000 + b"}"], 1, None, "not JSON that can be read"),
        ([b'{"prompt": "p", "answer": "1", "answer": "2"}'], 1, None, "the field 'answer' is there twice"),
        ([b'{"prompt": "\\ud800", "answer": "1"}'], 1, "prompt", "half of a surrogate pair"),
        ([b'{"prompt": "p", "answer": "1", "x": {"y": "\\udfff"}}'], 1, "x", "half of a surrogate pair"),
        ([b'\xef\xbb\xbf{"prompt": "p", "answer": "1"}'], 1, None, "byte order mark"),
        ([b"\xff\xfe{\x00"], 1, None, "byte order mark"),
        ([ROW, b'{"prompt": "caf\xe9"}'], 2, None, "not UTF-8: byte 0xe9 in column 16"),
        ([b"[" * 100_000], 1, None, "nested too deeply"),
    ],
)
def test_a_malformed_line_is_named(
    tmp_path: Path, lines: list[object], line: int, field: str | None, words: str
) -> None:
    file = write(tmp_path, *lines)
    with pytest.raises(TaskFileError) as caught:
        load_tasks(file)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(file), line, field)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{file}, line {line}: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n"])
def test_a_file_without_a_task_is_refused(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path, content)
    with pytest.raises(TaskFileError, match="holds no task") as caught:
        load_tasks(file)
    assert (caught.value.path, caught.value.line) == (str(file), None)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"cannot be read as a task file: no such file"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskFileError, match="is a directory"):
        load_tasks(str(tmp_path))


@pytest.mark.parametrize("source", [5, None, b"x", ROW, load_one(ROW)])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(TaskFileError, match="as the path of a file or as an iterable"):
        load_tasks(source)


def test_crlf_and_blank_lines_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "crlf.jsonl"
    file.write_bytes(b"\r\n" + json.dumps(ROW).encode() + b"\r\n\r\n" + json.dumps({**ROW, "id": 2}).encode())
    with pytest.raises(TaskFileError) as caught:
        load_tasks(file)
    assert (caught.value.line, caught.value.message) == (4, f"{file}, line 4: the id 't1' is that of line 2")
    file.write_bytes(b"\r\n" + json.dumps(ROW).encode() + b"\r\n\r\n")
    assert load_tasks(file)[0].prompt == ROW["prompt"]


def test_rows_in_memory_are_counted_from_one_and_have_no_path() -> None:
    with pytest.raises(TaskFileError, match=r"^row 2: the field answer is missing$") as caught:
        load_tasks([ROW, {"prompt": "p"}])
    assert (caught.value.path, caught.value.line, caught.value.field) == (None, 2, "answer")
    with pytest.raises(TaskFileError, match="x holds what JSON cannot: a set"):
        load_tasks([{**ROW, "x": {1}}])
    with pytest.raises(TaskFileError, match="the iterable holds no task"):
        load_tasks([])


def test_tasks_pass_through_and_can_be_renamed() -> None:
    task = load_one({**ROW, "extra": 1})
    assert load_tasks(iter([task])) == (task,)
    assert load_tasks([task], data_source="other")[0].data_source == "other"
    with pytest.raises(TaskFileError, match="row 1: prompt is empty"):
        load_tasks([Task(task_id="a", data_source="math", prompt="", answer="1")])


def test_the_data_source_given_by_the_caller_wins_and_the_row_s_own_is_kept() -> None:
    (task,) = load_tasks([{**ROW, "data_source": "openai/gsm8k"}], data_source="math")
    assert (task.data_source, task.meta["data_source"]) == ("math", "openai/gsm8k")


def test_a_missing_id_is_a_hash_of_the_row_whatever_the_order_of_its_fields() -> None:
    one = load_one({"prompt": "p", "answer": "a", "n": 1})
    assert one.task_id == load_one({"n": 1, "answer": "a", "prompt": "p"}).task_id
    assert one.task_id == "task-87db398fefed40f3"
    assert one.task_id != load_one({"prompt": "p", "answer": "a", "n": 2}).task_id


def test_the_hash_of_a_task_depends_on_everything_in_it() -> None:
    task = load_one({**ROW, "n": {"b": 1, "a": [2]}})
    assert task_hash(task) == task_hash(pickle.loads(pickle.dumps(task)))
    assert len({task_hash(task), *(task_hash(load_one({**ROW, "n": n})) for n in range(3))}) == 4
    with pytest.raises(TaskFileError, match="cannot be hashed"):
        task_hash(Task(task_id="a", data_source="math", prompt="p", answer="1", meta={"x": float("nan")}))


def test_the_sample_is_forty_eight_tasks_of_rising_difficulty() -> None:
    tasks = sample_tasks()
    difficulties = [task.meta["difficulty"] for task in tasks]
    assert difficulties == sorted(difficulties)
    assert {level: difficulties.count(level) for level in range(1, 7)} == dict.fromkeys(range(1, 7), 8)
    assert [task.task_id for task in tasks] == [f"sample-{number:02d}" for number in range(1, 49)]


@pytest.mark.slow
def test_a_hundred_thousand_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    with file.open("w") as out:
        for number in range(100_000):
            out.write(json.dumps({"question": f"{number} + 1?", "answer": f"#### {number + 1}"}) + "\n")
    tasks = load_tasks(file)
    assert (len(tasks), tasks[-1].answer) == (100_000, "100000")


@pytest.mark.parametrize(
    ("name", "count"),
    [("math/problems.jsonl", 199), ("code/eurus_format.jsonl", 95), ("math/responses_gsm8k.jsonl", 160)],
)
def test_shared_files_load(shared_data: Path, name: str, count: int) -> None:
    tasks = load_tasks(shared_data / name)
    assert len(tasks) == count
    assert all(task.prompt and task.answer for task in tasks)
