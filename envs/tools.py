"""The tools that an agent has: their schemas, how calls are read from its text, and how results look to it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prorl_env.config import Limits
from prorl_env.remote.sandbox import BashResult, CellResult, Sandbox
from prorl_env.types import ToolCall, ToolResult

__all__ = [
    "TOOLS",
    "Parsed",
    "ToolSpec",
    "describe_tools",
    "parse_tool_calls",
    "run_tool",
    "without_thoughts",
    "write_tool_call",
]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, str]
    """Name of each parameter and what it is for. All are strings and all are required."""

    def schema(self) -> dict[str, Any]:
        """The JSON schema in the form of OpenAI's function tools."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": text} for name, text in self.parameters.items()
                    },
                    "required": list(self.parameters),
                    "additionalProperties": False,
                },
            },
        }


TOOLS: Mapping[str, ToolSpec] = {
    tool.name: tool
    for tool in (
        ToolSpec(
            "execute_bash",
            "Run a command in a persistent bash shell and read what the terminal shows.",
            {"command": "The command or script."},
        ),
        ToolSpec(
            "execute_ipython_cell",
            "Run a cell in a persistent IPython session and read its output. numpy, scipy and sympy are installed.",
            {"code": "The Python code of the cell."},
        ),
        ToolSpec("think", "Write down a thought. Nothing is run.", {"thought": "The thought."}),
        ToolSpec(
            "finish", "Give the final answer and end.", {"answer": "The final answer alone, e.g. 42 or \\frac{1}{2}."}
        ),
    )
}
"""All tools by name."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_EXAMPLES = {
    "execute_bash": {"command": "ls"},
    "execute_ipython_cell": {"code": "6 * 7"},
    "think": {"thought": "First I compute the sum."},
    "finish": {"answer": "42"},
}


@dataclass(frozen=True, slots=True)
class Parsed:
    """What was found in a text: calls, or the reason why there are none although there should be."""

    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


def without_thoughts(text: str) -> str:
    """The text without its ``<think>`` blocks: what stands there is not said to anybody."""
    return _THOUGHT.sub("", text)


def parse_tool_calls(text: str, tools: tuple[str, ...]) -> Parsed:
    """Read Hermes/Qwen calls, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, from an assistant's text.

    Several calls may stand in one text. If one of them is malformed none counts, and ``error`` tells the model what
    is wrong and how it is done right.
    """
    calls = []
    for number, match in enumerate(_CALL.finditer(without_thoughts(text)), 1):
        call = _parse_call(match.group(1).strip(), tools)
        if isinstance(call, str):
            example = write_tool_call(*_example_for(match.group(1), tools))
            return Parsed(error=f"Tool call {number} was not run: {call} A correct call looks like this:\n{example}")
        calls.append(call)
    return Parsed(tuple(calls))


def _example_for(body: str, tools: tuple[str, ...]) -> tuple[str, Mapping[str, str]]:
    """A right call of the tool that was probably meant."""
    named = [name for name in tools if f'"{name}"' in body[:200]]
    name = (named or [name for name in _EXAMPLES if name in tools])[0]
    return name, _EXAMPLES[name]


def _parse_call(body: str, tools: tuple[str, ...]) -> ToolCall | str:
    try:
        value = json.loads(body, strict=False)
    except json.JSONDecodeError as error:
        return f"it is not valid JSON ({error.msg} at character {error.pos})."
    except RecursionError:
        return "its JSON is nested too deeply."
    if not isinstance(value, dict):
        return "it must be a JSON object with the keys name and arguments."
    name = value.get("name")
    if name not in tools:
        return f"there is no tool named {json.dumps(name)[:80]}; the tools are {', '.join(tools)}."
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # Some models encode the arguments a second time.
        try:
            arguments = json.loads(arguments, strict=False)
        except (json.JSONDecodeError, RecursionError):
            return "its arguments are a string that is not a JSON object."
    if not isinstance(arguments, dict):
        return "its arguments must be a JSON object."
    wanted = TOOLS[name].parameters
    for parameter in wanted:
        if parameter not in arguments:
            return f"{name} needs the argument {parameter}."
        if not isinstance(arguments[parameter], str):
            if name == "finish" and isinstance(arguments[parameter], (int, float)):
                arguments[parameter] = json.dumps(arguments[parameter])
                continue
            return f"the argument {parameter} of {name} must be a string."
    for parameter in arguments:
        if parameter not in wanted:
            return f"{name} has no argument {parameter[:80]!r}."
    return ToolCall(name, arguments)


def write_tool_call(name: str, arguments: Mapping[str, str]) -> str:
    """A call as ``parse_tool_calls`` reads it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def describe_tools(tools: tuple[str, ...]) -> str:
    """The text that tells a model of its tools in a system message, for chat templates that do not do so."""
    schemas = "\n".join(json.dumps(TOOLS[name].schema(), ensure_ascii=False) for name in tools)
    return (
        "You can call tools. They are described here as JSON schemas:\n"
        f"<tools>\n{schemas}\n</tools>\n"
        "To call one, write its name and arguments as JSON between these tags, then stop and wait for the result:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )


async def run_tool(call: ToolCall, sandbox: Sandbox, *, timeout_s: float) -> ToolResult:
    """Carry out one call in the sandbox.

    What goes wrong in the program is text for the agent.

    Raises:
        InfraError: If the sandbox, its sessions or its node server break.
    """
    began = time.monotonic()
    content, is_error = "", False
    match call.name:
        case "execute_bash":
            command = call.arguments["command"]
            if "\0" in command:
                content, is_error = "The command was not run: it holds a NUL character.", True
            else:
                result = await sandbox.run_bash(command, timeout_s=timeout_s)
                content = _bash_text(result, sandbox.spec.limits, timeout_s)
        case "execute_ipython_cell":
            content = _cell_text(
                await sandbox.run_cell(call.arguments["code"], timeout_s=timeout_s), sandbox.spec.limits
            )
        case _:
            content = ""
    return ToolResult(call=call, content=content, is_error=is_error, seconds=time.monotonic() - began)


def _bash_text(result: BashResult, limits: Limits, timeout_s: float) -> str:
    notes = []
    if result.timed_out:
        notes.append(f"[stopped after {timeout_s:g} s]")
    if result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        notes.append("[the shell ended and was restarted; its variables are lost]")
    output = result.output
    if result.omitted_bytes:
        at = len(output) - limits.output_bytes // 2
        output = output[:at] + f"\n[… {result.omitted_bytes} bytes left out …]\n".encode() + output[at:]
    return _with_notes(output.decode("utf-8", "replace"), notes)


def _cell_text(result: CellResult, limits: Limits) -> str:
    text = result.text
    if result.omitted_chars:
        at = len(text) - limits.output_bytes // 2
        text = f"{text[:at]}\n[… {result.omitted_chars} characters left out …]\n{text[at:]}"
    return _with_notes(text, [f"[{result.cause}]"] if result.cause else [])


def _with_notes(text: str, notes: list[str]) -> str:
    text = text.encode("utf-8", "replace").decode()  # No tokenizer takes a lone surrogate.
    if not text and not notes:
        return "[no output]"
    if text and notes and not text.endswith("\n"):
        text += "\n"
    return text + "\n".join(notes)
