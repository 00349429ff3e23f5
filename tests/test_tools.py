from __future__ import annotations

import json

import pytest

from prorl_env.envs.tools import TOOLS, describe_tools, parse_tool_calls, without_thoughts
from prorl_env.types import ToolCall

ALL = tuple(TOOLS)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


GOOD = [
    ("one call", call("execute_bash", command="ls"), [("execute_bash", {"command": "ls"})]),
    (
        "text around two calls",
        f"First {call('think', thought='hm')} then {call('execute_bash', command='a')} done",
        [("think", {"thought": "hm"}), ("execute_bash", {"command": "a"})],
    ),
    ("no line breaks", '<tool_call>{"name":"think","arguments":{"thought":""}}</tool_call>', [("think", {"thought": ""})]),
    ("no end tag", '<tool_call>{"name":"think","arguments":{"thought":"x"}}', [("think", {"thought": "x"})]),
    ("raw line break in a string", '<tool_call>{"name":"execute_bash","arguments":{"command":"a\nb"}}</tool_call>',
     [("execute_bash", {"command": "a\nb"})]),
    ("arguments encoded twice", call("execute_bash", command="ls").replace('{"command": "ls"}', '"{\\"command\\": \\"ls\\"}"'),
     [("execute_bash", {"command": "ls"})]),
    ("parameters instead of arguments", '<tool_call>{"name":"think","parameters":{"thought":"x"}}</tool_call>',
     [("think", {"thought": "x"})]),
    ("a number as the answer", call("finish", answer=42), [("finish", {"answer": "42"})]),
    ("a call in a thought is none", f"<think>{call('execute_bash', command='rm')}</think>{call('think', thought='x')}",
     [("think", {"thought": "x"})]),
    ("a call in an unfinished thought is none", f"<think>{call('execute_bash', command='rm')}", []),
    ("plain text", "The answer is \\boxed{4}.", []),
    ("nothing", "", []),
    ("braces and quotes in code", call("execute_ipython_cell", code="d = {'a': \"</x>\"}"),
     [("execute_ipython_cell", {"code": "d = {'a': \"</x>\"}"})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD])
def test_calls_are_read(text: str, calls: list[tuple[str, dict[str, str]]]) -> None:
    parsed = parse_tool_calls(text, ALL)
    assert parsed.error is None
    assert [(c.name, dict(c.arguments)) for c in parsed.calls] == calls


BAD = [
    ("cut off", '<tool_call>{"name": "execute_bash", "arguments": {"comm', "not valid JSON"),
    ("trailing comma", '<tool_call>{"name": "think", "arguments": {"thought": "x",}}</tool_call>', "not valid JSON"),
    ("empty", "<tool_call></tool_call>", "not valid JSON"),
    ("python", "<tool_call>execute_bash('ls')</tool_call>", "not valid JSON"),
    ("a list", "<tool_call>[1]</tool_call>", "JSON object"),
    ("unknown tool", call("rm_rf", path="/"), "no tool named"),
    ("no name", '<tool_call>{"arguments": {}}</tool_call>', "no tool named"),
    ("name is a number", '<tool_call>{"name": 3}</tool_call>', "no tool named"),
    ("name is a list", '<tool_call>{"name": ["execute_bash"]}</tool_call>', "no tool named"),
    ("null arguments", '<tool_call>{"name": "think", "arguments": null}</tool_call>', "must be a JSON object"),
    ("arguments are a list", '<tool_call>{"name": "think", "arguments": ["x"]}</tool_call>', "must be a JSON object"),
    ("arguments are no JSON", '<tool_call>{"name": "think", "arguments": "x"}</tool_call>', "not a JSON object"),
    ("missing argument", call("execute_bash"), "needs the argument command"),
    ("wrong type", call("execute_bash", command=["ls"]), "must be a string"),
    ("null argument", call("execute_bash", command=None), "must be a string"),
    ("extra argument", call("execute_bash", command="ls", timeout=3), "no argument 'timeout'"),
    ("one good, one bad", call("think", thought="x") + call("nope"), "Tool call 2"),
    ("deep", "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>", "Tool call 1"),
    ("1 MB", call("execute_bash", cmd="x" * 1_000_000), "needs the argument command"),
]


@pytest.mark.parametrize(("text", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_malformed_call_tells_the_model_what_is_wrong_and_how_it_is_right(text: str, says: str) -> None:
    parsed = parse_tool_calls(text, ALL)
    assert parsed.calls == ()
    assert parsed.error is not None
    assert says in parsed.error
    assert "<tool_call>" in parsed.error
    assert len(parsed.error) < 1000


def test_the_example_in_the_error_is_itself_right() -> None:
    error = parse_tool_calls("<tool_call>", ALL).error
    assert error is not None
    assert parse_tool_calls(error, ALL).calls == (ToolCall("execute_bash", {"command": "ls"}),)


def test_a_tool_that_the_environment_does_not_have_is_unknown() -> None:
    assert "no tool named" in (parse_tool_calls(call("execute_bash", command="ls"), ("think",)).error or "")


def test_the_description_holds_a_schema_of_each_tool() -> None:
    text = describe_tools(ALL)
    schemas = [json.loads(line) for line in text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()]
    assert [schema["function"]["name"] for schema in schemas] == list(ALL)
    for schema in schemas:
        parameters = schema["function"]["parameters"]
        assert parameters["required"] == list(parameters["properties"])


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a<think>b</think>c", "ac"),
        ("<think>x", ""),
        ("x</think>y", "x</think>y"),
        ("<think>1</think><think>2</think>3", "3"),
    ],
)
def test_thoughts_are_left_out(text: str, rest: str) -> None:
    assert without_thoughts(text) == rest
