r"""One HTML file that shows a run: every episode, turn by turn, for whoever asks why an agent failed.

The file needs nothing else: no network, no fonts, no other file. Its content security policy forbids requests and
allows only the one script that is part of the template. Sorting, filters, search and keys need that script; reading
does not.

Text of agents, tools and tasks is shown and never interpreted. What HTML cannot hold (NUL, lone surrogates) or the eye
cannot see (terminal codes, direction overrides) appears as an escape such as ``\x1b[31m``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup, escape

from prorl_env.errors import UsageError
from prorl_env.types import Message, Outcome, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["render_report", "write_report"]


def render_report(trajectories: Iterable[Trajectory], *, title: str, created: str, meta: Mapping[str, str]) -> str:
    """Render a run as one HTML page.

    Args:
        trajectories: The episodes, in the order in which they are numbered.
        title: The heading, for instance the name of the run.
        created: When the run was made, as it is to be shown; this module reads no clock.
        meta: Further facts of the run by name, for instance ``{"Model": ..., "Version": ...}``, in their order. They
            win over those that are read off the trajectories: ``Policy``, ``Runtime``, ``Data``, ``Tasks``.

    Returns:
        The page; it can be encoded as UTF-8 whatever the trajectories hold.
    """
    all_of_them = tuple(trajectories)
    full_bar = _full_bar_seconds([_total_seconds(trajectory.seconds) for trajectory in all_of_them])
    episodes = [_Episode(number, trajectory, full_bar) for number, trajectory in enumerate(all_of_them, start=1)]
    template, script_hash = _template()
    return template.render(
        title=title,
        facts=_facts(all_of_them, created, meta),
        summary=_Summary(episodes, full_bar),
        episodes=episodes,
        script_hash=script_hash,
    )


def write_report(
    path: str | os.PathLike[str],
    trajectories: Iterable[Trajectory],
    *,
    title: str,
    created: str,
    meta: Mapping[str, str],
) -> None:
    """Write ``render_report``'s page to a file. A reader of the file sees the old page or the new one, never half.

    Raises:
        UsageError: If the file cannot be written.
    """
    page = render_report(trajectories, title=title, created=created, meta=meta)
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError(f"cannot write the report {target}: {error.strerror or error}") from error


@cache
def _template() -> tuple[jinja2.Template, str]:
    """The template and the hash that its content security policy allows."""
    source = resources.files("prorl_env.viewer").joinpath("report.html.j2").read_text(encoding="utf-8")
    script = source.partition("<script>")[2].partition("</script>")[0]
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_finalize,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(fold=_fold, seconds=_seconds, visible=_visible)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(source), f"sha256-{digest}"


# Text. ---------------------------------------------------------------------------------------------------------------

_UNSEEN = re.compile(
    "\x1b\\[[0-9;:?]*[ -/]*[@-~]"  # A terminal's control sequence, as one piece.
    "|[\0-\x08\x0b-\x1f\x7f-\x9f]"  # Controls, but for tab and newline. HTML would turn \r into \n.
    "|[\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"  # Unseen, or turning the text.
    "|[\ud800-\udfff\ufffe\uffff]+"  # What UTF-8 or HTML cannot hold.
)


def _finalize(value: object) -> object:
    """Whatever the template prints passes here, so that no text can be forgotten."""
    return _plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _plain(text: str) -> str:
    return _UNSEEN.sub(_escapes, text)


def _visible(text: str) -> Markup:
    """The same with each escape marked, so that it can be told from text that reads so."""
    parts, end = [], 0
    for match in _UNSEEN.finditer(text):
        css = ' class="terminal"' if len(match[0]) > 1 and match[0][0] == "\x1b" else ""
        parts += [escape(text[end : match.start()]), f"<i{css}>{escape(_escapes(match))}</i>"]
        end = match.end()
    return Markup("".join([*parts, escape(text[end:])]))


def _escapes(match: re.Match[str]) -> str:
    return "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in match[0])


@dataclass(frozen=True, slots=True)
class _Fold:
    """A text in three parts; the middle one, empty for a short text, is shown on demand."""

    head: str
    middle: str
    tail: str

    @property
    def label(self) -> str:
        lines = self.middle.count("\n")
        return (f"{lines:,} more lines, " if lines > 1 else "") + f"{len(self.middle):,} characters"


def _fold(text: str, lines: int = 24) -> _Fold:
    """Fold a text of more than about ``lines`` lines of 100 characters."""
    chars = lines * 100
    if len(text) <= chars and text.count("\n", 0, chars) <= lines:
        return _Fold(text, "", "")
    first, last = text[: chars // 2].split("\n"), text[-chars // 4 :].split("\n")
    kept = max(1, lines // 2)
    head = "\n".join(first[:kept]) + ("\n" if len(first) > kept else "")
    tail = "\n".join(last[-max(1, lines // 4) :])
    return _Fold(head, text[len(head) : len(text) - len(tail)], tail)


_CODE_ARGUMENTS = frozenset({"code", "command", "cmd", "script", "patch", "diff", "file_text", "old_str", "new_str"})


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    text: str
    is_block: bool


def _arguments(arguments: Mapping[str, object]) -> list[_Argument]:
    shown = []
    for name, value in arguments.items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2, default=repr)
        except RecursionError:
            text = "(nested too deeply to show)"
        is_block = name in _CODE_ARGUMENTS or "\n" in text or len(text) > 72
        shown.append(_Argument(name, text if is_block or not isinstance(value, str) else json.dumps(text), is_block))
    return shown


_RAW_CALL = re.compile(r"(\s*<tool_call>.*?(?:</tool_call>\s*|\Z))", re.DOTALL)


def _speech(turn: Turn) -> list[tuple[bool, str]]:
    """The assistant's text in pieces ``(is_raw_call, text)``: a call that is shown parsed can be folded as written."""
    if turn.parse_error is not None or not turn.tool_results:
        return [(False, turn.text)]
    return [(index % 2 == 1, piece) for index, piece in enumerate(_RAW_CALL.split(turn.text)) if piece.strip()]


def _news(turn: Turn) -> list[Message]:
    """The messages of the observation that tell more than the tool results do."""
    return [message for message in turn.observation if not _is_told(message["content"], turn)]


def _is_told(content: str, turn: Turn) -> bool:
    for result in turn.tool_results:
        content = content.replace(result.content.strip(), "", 1)
    return bool(turn.tool_results) and not re.sub(r"</?tool_response>", "", content).strip()


def _seconds(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}\u00a0s"


# Episodes. -----------------------------------------------------------------------------------------------------------

_PHASES = ("queued", "init", "policy", "run", "eval", "teardown")

_MARKS = {
    "call": ("●", "tool call"),
    "text": ("○", "no tool call"),
    "error": ("✕", "tool error"),
    "parse": ("!", "parse error"),
    "cut": ("…", "cut at the length limit"),
}
"""What a turn's mark looks like and means. The shapes tell it without the colours."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a bar."""

    name: str
    kind: str
    seconds: float


class _Bar:
    """Seconds by phase, drawn as one element: a thousand rows of six elements each are slow to open."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        spent = {name: value for name, value in seconds.items() if value > 0}
        order = [name for name in _PHASES if name in spent] + [name for name in spent if name not in _PHASES]
        kinds = {name: name for name in _PHASES}
        self.segments = [_Segment(name, kinds.get(name, "other"), spent[name]) for name in order]
        self.label = ", ".join(f"{segment.name} {_seconds(segment.seconds)}" for segment in self.segments)
        total, end, stops = sum(spent.values()), 0.0, []
        for segment in self.segments:
            start, end = end, end + 100 * segment.seconds / total
            stops.append(f"var(--{segment.kind}) {start:.4g}% {end:.4g}%")
        self.gradient = ",".join(stops)


def _total_seconds(seconds: Mapping[str, float]) -> float:
    return sum(value for value in seconds.values() if value > 0)


def _full_bar_seconds(totals: list[float]) -> float:
    """What a bar of full width stands for; the slowest twentieth exceeds it, or one time-out would shrink the rest."""
    return sorted(totals)[int(0.95 * (len(totals) - 1))] or 1.0 if totals else 1.0


class _Turn:
    """One turn as the template shows it."""

    def __init__(self, number: int, turn: Turn) -> None:
        self.number = number
        self.turn = turn
        self.speech = _speech(turn)
        self.calls = [(result, _arguments(result.call.arguments)) for result in turn.tool_results]
        self.news = _news(turn)
        self.problems = [kind for kind in ("parse", "error", "cut") if self._has(kind)]
        self.kind = self.problems[0] if self.problems else "call" if turn.tool_results else "text"
        self.mark, self.meaning = _MARKS[self.kind]
        self.flags = [_MARKS[kind][1] for kind in self.problems]

    def _has(self, problem: str) -> bool:
        match problem:
            case "parse":
                return self.turn.parse_error is not None
            case "error":
                return any(result.is_error for result in self.turn.tool_results)
            case _:
                return self.turn.stop_reason == "length"


class _Episode:
    """One trajectory as the template shows it."""

    def __init__(self, number: int, trajectory: Trajectory, full_bar_seconds: float) -> None:
        self.number = number
        self.trajectory = trajectory
        self.turns = [_Turn(index, turn) for index, turn in enumerate(trajectory.turns, start=1)]
        self.seconds = _total_seconds(trajectory.seconds)
        self.bar = _Bar(trajectory.seconds) if self.seconds else None
        self.bar_percent = round(min(100.0, 100 * self.seconds / full_bar_seconds), 1)
        self.bar_is_cut = self.seconds > full_bar_seconds
        reward = trajectory.reward
        self.reward = "none" if reward is None else f"{reward:.4g}"
        self.verdict = "none" if reward is None else "solved" if reward >= 1 else "unsolved"
        self.outcome = trajectory.outcome.replace("_", " ")
        if trajectory.outcome is Outcome.TIMEOUT and trajectory.timeout_phase is not None:
            self.outcome += f" in {trajectory.timeout_phase.upper()}"
        self.problems = Counter(problem for turn in self.turns for problem in turn.problems)
        self.tokens = _Tokens(trajectory) if trajectory.token_ids else None

    @property
    def marks(self) -> list[tuple[str, str]]:
        """Runs of equal marks ``(kind, text)``, at most 24 marks in all."""
        shown = self.turns if len(self.turns) <= 24 else self.turns[:23]
        runs = [(kind, "".join(turn.mark for turn in run)) for kind, run in groupby(shown, key=lambda turn: turn.kind)]
        return [*runs, ("more", f"+{len(self.turns) - len(shown)}")] if len(shown) < len(self.turns) else runs


class _Tokens:
    """Where in the token stream the policy was how sure, as bars of a small picture."""

    BARS = 160

    def __init__(self, trajectory: Trajectory) -> None:
        size = len(trajectory.token_ids)
        sampled = [value for value, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=False) if mask]
        self.total = size
        self.sampled = len(sampled)
        self.mean = sum(sampled) / len(sampled) if sampled else 0.0
        self.lowest = min(sampled, default=0.0)
        self.width = min(size, self.BARS)
        ends = [index * size // self.width for index in range(self.width + 1)]
        bars = [_bar(trajectory.logprobs[a:b], trajectory.loss_mask[a:b]) for a, b in pairwise(ends)]
        paths: dict[str, list[str]] = {}
        for (kind, height), run in groupby(range(self.width), key=lambda index: bars[index]):
            start, *rest = run
            paths.setdefault(kind, []).append(f"M{start} 24v-{height}h{len(rest) + 1}v{height}")
        self.paths = [(kind, "".join(parts)) for kind, parts in sorted(paths.items())]


def _bar(logprobs: Sequence[float], loss_mask: Sequence[int]) -> tuple[str, int]:
    """Kind and height, 2 to 24, of one bar: the less likely the sampled tokens were on average, the higher."""
    sampled = [value for value, mask in zip(logprobs, loss_mask, strict=False) if mask]
    if not sampled:
        return "context", 2
    surprise = -sum(sampled) / len(sampled)
    height = 4 + round(20 * (1 - math.exp(-max(surprise, 0.0))))
    return f"level{min(3, (height - 4) // 5)}", height


class _Summary:
    """The run in numbers."""

    def __init__(self, episodes: Sequence[_Episode], full_bar_seconds: float) -> None:
        rewards = [e.trajectory.reward for e in episodes if e.trajectory.reward is not None]
        self.full_bar_seconds = full_bar_seconds
        self.episodes = len(episodes)
        self.graded = len(rewards)
        self.solved = sum(episode.verdict == "solved" for episode in episodes)
        self.percent = f"{100 * self.solved / self.graded:.1f}\u00a0%" if rewards else "none graded"
        self.mean_reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
        self.turns = sum(len(episode.turns) for episode in episodes)
        self.calls = sum(episode.trajectory.num_tool_calls for episode in episodes)
        counts = Counter(episode.trajectory.outcome for episode in episodes)
        self.outcomes = [(outcome, counts[outcome]) for outcome in Outcome if counts[outcome]]
        by_phase: dict[str, float] = {}
        for name, value in (item for episode in episodes for item in episode.trajectory.seconds.items()):
            by_phase[name] = by_phase.get(name, 0.0) + max(value, 0.0)
        self.seconds = _total_seconds(by_phase)
        self.bar = _Bar(by_phase) if self.seconds else None
        self.marks = list(_MARKS.items())


def _facts(trajectories: Sequence[Trajectory], created: str, meta: Mapping[str, str]) -> dict[str, str]:
    def distinct(values: Iterable[str]) -> str:
        names = sorted({value for value in values if value})
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

    facts = {
        "Policy": distinct(trajectory.policy for trajectory in trajectories),
        "Runtime": distinct(trajectory.runtime for trajectory in trajectories),
        "Data": distinct(trajectory.data_source for trajectory in trajectories),
        "Tasks": f"{len({trajectory.task_id for trajectory in trajectories}):,}",
        "Created": created,
    }
    return {name: value for name, value in {**facts, **meta}.items() if value}
