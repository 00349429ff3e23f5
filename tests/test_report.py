"""The report page, opened in a real Chromium: it shows what happened, as text, and does nothing else."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_env.errors import UsageError
from prorl_env.trajectories import encode_trajectory
from prorl_env.types import Message, Outcome, ToolCall, ToolResult, Trajectory, Turn
from prorl_env.viewer import report
from prorl_env.viewer.report import render_report, write_report
from tests.browser import Browser
from tests.example_run import COUNT, KINDS, MALFORMED, WORK, WRONG, call, example_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def page(run: Sequence[Trajectory]) -> str:
    """The page of a run."""
    meta = {"Model": "Qwen/Qwen3-4B-Instruct", "Version": "prorl-env 0.1.0"}
    return render_report(run, title="Lattice paths, step 120", created="2025-11-30 14:05 UTC", meta=meta)


# Fixtures. -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium with a fresh profile."""
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 40 episodes."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(example_run(40)), encoding="utf-8")
    return path


# What the page shows. ------------------------------------------------------------------------------------------------

VISIBLE_EPISODES = "[...document.querySelectorAll('.episode')].filter((e) => e.offsetParent).map((e) => e.id)"
LISTED = "[...document.querySelectorAll('tbody tr')].filter((r) => !r.hidden).map((r) => Number(r.id.slice(4)))"
OVERVIEW_IS_SHOWN = "document.getElementById('overview').offsetParent !== null"


def test_the_script_runs_and_no_request_goes_out(browser: Browser, example: Path) -> None:
    for fragment in ("", "#ep-3", "#ep-3-5", "#row-3", "#ep-999", "#%"):
        browser.open(example, fragment)
        browser.assert_calm(example)
    assert browser.run(VISIBLE_EPISODES) == []
    assert browser.run(OVERVIEW_IS_SHOWN)


def test_the_summary_counts(browser: Browser, example: Path) -> None:
    run = example_run(40)
    graded = [trajectory for trajectory in run if trajectory.reward is not None]
    solved = sum(trajectory.reward == 1 for trajectory in graded)
    browser.open(example)
    text = browser.run("document.querySelector('.numbers').innerText")
    assert f"{solved} of {len(graded)}" in text
    assert f"{sum(len(trajectory.turns) for trajectory in run)} turns" in text
    facts = browser.run("document.querySelector('.facts').innerText").split("\n")
    assert dict(zip(facts[::2], facts[1::2], strict=True)) == {
        "Policy": "vllm",
        "Runtime": "apptainer",
        "Data": "gsm8k, math500",
        "Tasks": "10",
        "Created": "2025-11-30 14:05 UTC",
        "Model": "Qwen/Qwen3-4B-Instruct",
        "Version": "prorl-env 0.1.0",
    }
    assert browser.run("document.querySelectorAll('tbody tr').length") == 40


def test_an_episode_tells_each_turn(browser: Browser, example: Path) -> None:
    browser.open(example, "#ep-3")
    assert browser.run(VISIBLE_EPISODES) == ["ep-3"]
    assert not browser.run(OVERVIEW_IS_SHOWN)
    text = browser.run("document.getElementById('ep-3').innerText")
    assert KINDS["wrong"][2] in text
    assert browser.run("document.querySelector('#ep-3 .verdict').innerText").split("\n") == (
        ["Outcome", "ok", "Reward", "0, not solved", "Answer", "6435", "Gold", "858"]
    )
    marks = browser.run("[...document.querySelectorAll('#ep-3 .steps a')].map((a) => a.title)")
    ok, failed, parse = "tool call", "tool error", "parse error"
    assert marks == [ok, failed, ok, parse, failed, ok, "no tool call"]
    turn = browser.run("document.getElementById('ep-3-2').innerText").replace("\xa0", " ")
    for part in ("Turn 2", "tool error", "policy 1.84 s", "tools 0.21 s", "stop reason: stop", "Tool error"):
        assert part in turn
    assert browser.run("document.querySelector('#ep-3-1 .code pre').textContent") == COUNT
    assert MALFORMED.parse_error in browser.run("document.querySelector('#ep-3-4 .problem').innerText")
    assert "tokens sampled" in text


def test_an_episode_without_a_reward_says_why(browser: Browser, example: Path) -> None:
    browser.open(example, "#ep-7")
    text = browser.run("document.getElementById('ep-7').innerText")
    assert "infra error" in text
    assert "Why there is no reward" in text
    assert KINDS["broken"][2] in text
    browser.open(example, "#ep-6")
    assert "timeout in RUN" in browser.run("document.querySelector('#ep-6 .verdict').innerText")
    browser.open(example, "#ep-8")
    assert "The agent had no turn." in browser.run("document.getElementById('ep-8').innerText")


def test_an_observation_is_shown_once_or_in_full(browser: Browser, tmp_path: Path) -> None:
    told: Message = {"role": "tool", "content": "<tool_response>\n858\n</tool_response>"}
    more: Message = {"role": "tool", "content": "858\nOnly 1 turn is left."}
    run = [replace(example_run(1)[0], turns=(replace(WORK[0], observation=(message,)),)) for message in (told, more)]
    path = tmp_path / "report.html"
    path.write_text(page(run), encoding="utf-8")
    for number, shown in ((1, False), (2, True)):
        browser.open(path, f"#ep-{number}")
        assert browser.run(f"document.querySelector('#ep-{number} .observation') !== null") is shown
    assert browser.run("document.querySelector('#ep-2 .observation').textContent") == more["content"]


def test_keys_go_from_episode_to_episode_and_turn_to_turn(browser: Browser, example: Path) -> None:
    browser.open(example)
    for key, fragment in zip("jjkjnnpujk", ("1", "2", "1", "2", "2-1", "2-2", "2-1", "row-2", "1", "1"), strict=True):
        browser.press(key)
        browser.until(f"location.hash.endsWith({('-' + fragment)[-5:]!r})")
    assert browser.run(VISIBLE_EPISODES) == ["ep-1"]
    browser.press("/")
    browser.until("document.activeElement.id === 'search'")
    browser.press("j")
    assert browser.run("document.getElementById('search').value") == "j"
    assert browser.run(OVERVIEW_IS_SHOWN)


def test_the_list_is_filtered_by_outcome_reward_and_text(browser: Browser, example: Path) -> None:
    run = example_run(40)
    browser.open(example)
    browser.run("document.querySelector('#outcomes input[value=ok]').click()")
    assert browser.run(LISTED) == [n for n, t in enumerate(run, start=1) if t.outcome is not Outcome.OK]
    browser.run("document.querySelector('#outcomes input[value=ok]').click()")
    for value, wanted in (("none", [None]), ("solved", [1.0]), ("unsolved", [0.0]), ("", [None, 1.0, 0.0])):
        browser.run(f"verdict.value = {value!r}; verdict.dispatchEvent(new Event('change'))")
        assert browser.run(LISTED) == [n for n, t in enumerate(run, start=1) if t.reward in wanted]
    wrong = [n for n, t in enumerate(run, start=1) if WRONG in t.turns]
    browser.press("/")
    browser.press(*"HALF of THEM")  # Whatever the case.
    browser.until("count.textContent !== ''")
    assert browser.run(LISTED) == wrong
    assert browser.run("count.textContent") == f"{len(wrong)} of 40 episodes"
    browser.press("Enter", "j")
    browser.until(f"location.hash === '#ep-{wrong[1]}'")
    browser.until(f"document.querySelector('#ep-{wrong[1]} .position').textContent === '2 of {len(wrong)}'")
    assert browser.run("CSS.highlights.get('found').size") == 1


@pytest.mark.parametrize("head", ["Time", "Turns"])
def test_the_list_is_sorted_by_a_column(browser: Browser, example: Path, head: str) -> None:
    run = example_run(40)
    key = (lambda t: sum(t.seconds.values())) if head == "Time" else (lambda t: len(t.turns))
    browser.open(example)
    button = f"[...document.querySelectorAll('th button')].find((b) => b.textContent === {head!r})"
    for sort, reverse in (("ascending", False), ("descending", True)):
        browser.run(f"{button}.click()")
        assert browser.run(f"{button}.parentNode.ariaSort ?? {button}.parentNode.getAttribute('aria-sort')") == sort
        keys = [key(run[number - 1]) for number in browser.run(LISTED)]
        assert keys == sorted(keys, reverse=reverse)


def test_reading_needs_no_script(browser: Browser, example: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        for fragment, shown in (("", []), ("#ep-3", ["ep-3"]), ("#ep-4-8", ["ep-4"])):
            browser.open(example, fragment)
            assert browser.run("document.documentElement.dataset.ready ?? null") is None
            assert browser.run(VISIBLE_EPISODES) == shown
            assert browser.run(OVERVIEW_IS_SHOWN) is (not shown)
        assert browser.run("document.getElementById('search').offsetParent") is None
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


# What it must not do. ------------------------------------------------------------------------------------------------

HOSTILE = """</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"></pre></section>
"'><svg onload=window.hacked=3> {{ 7 * 7 }} {% raw %} &lt;b&gt; \0 \x1b[31mred\x1b[0m \x1b[&lt; \x85 \r \ud800 \udfff
\u202eright to left\u202c שלום عالم \u2066 --> <!-- ]]> \\x00 \ufffe javascript:alert(1) https://example.org/x.png"""
SHOWN = r"""\x00 \x1b[31mred\x1b[0m \x1b[&lt; \x85 \r \ud800 \udfff
\u202eright to left\u202c שלום عالم \u2066 --> <!-- ]]> \x00 \ufffe javascript"""


def spoiled(text: str) -> Trajectory:
    """A trajectory that holds a text wherever it can hold one."""
    call = ToolCall(text, {text: text, "code": text, "other": [text, {text: text}]})
    turn = Turn(
        text=text,
        tool_results=(ToolResult(call=call, content=text, is_error=True),),
        observation=(Message(role="tool", content="x" + text), Message(role="user", content=text)),
        parse_error=text,
        stop_reason=text,
    )
    return Trajectory(
        task_id=text,
        data_source=text,
        outcome=Outcome.OK,
        reward=1.0,
        detail=text,
        answer=text,
        gold=text,
        policy=text,
        runtime=text,
        prompt=(Message(role="system", content=text), Message(role="user", content=text)),
        turns=(turn, turn),
        seconds={"run": 1.0, text: 2.0},
    )


def write(path: Path, text: str, **changes: Any) -> Path:
    """The page of a run that is spoiled with a text, title and facts too."""
    write_report(path, [replace(spoiled(text), **changes)] * 2, title=text, created=text, meta={text: text})
    return path


def test_text_is_shown_as_text_and_changes_no_element(browser: Browser, tmp_path: Path) -> None:
    tree = "JSON.stringify([...document.querySelectorAll('*')].map((e) => e.tagName).filter((t) => t !== 'I'))"
    browser.open(write(tmp_path / "harmless.html", re.sub(".", "x", HOSTILE)))
    harmless = browser.run(tree)
    path = write(tmp_path / "hostile.html", HOSTILE)
    browser.open(path, "#ep-1")
    browser.assert_calm(path)
    assert browser.run(tree) == harmless
    assert browser.run("window.hacked ?? null") is None
    for part in ("h2", ".speech", ".answer", ".gold", ".detail", ".error", ".result", ".code", ".prompt", ".name"):
        text = browser.run(f"document.querySelector('#ep-1 {part}').textContent")
        assert text.startswith(HOSTILE.split("\0")[0]), part
        assert SHOWN in text, part
    # The raw text that reads like an escape is not marked as one.
    assert "\\x00" in browser.run("document.querySelector('#ep-1 .speech').textContent")
    assert "\\x00" in browser.run("document.querySelector('#ep-1 .speech i').textContent")
    assert browser.run("document.querySelectorAll('#ep-1-1 .speech i').length") == 12


def test_even_markup_that_got_in_could_not_run_or_load(browser: Browser, example: Path, tmp_path: Path) -> None:
    attack = "<script>hacked = 1</script><img src='https://example.org/x.png' onerror='hacked = 2'>"
    path = tmp_path / "broken-in.html"
    path.write_text(example.read_text(encoding="utf-8").replace("<h1>", f"<h1>{attack}"), encoding="utf-8")
    browser.open(path)
    assert browser.run("document.querySelectorAll('h1 script, h1 img').length") == 2
    assert browser.run("window.hacked ?? null") is None
    assert browser.run("document.documentElement.dataset.ready") == "true"
    answers = [answer["response"]["url"] for answer in browser.seen("Network.responseReceived")]
    assert answers == [f"file://{path}"]
    refused = [entry["entry"]["text"] for entry in browser.seen("Log.entryAdded")]
    assert len([text for text in refused if "Content Security Policy" in text]) >= 2


def test_the_page_is_utf8_whatever_it_holds(tmp_path: Path) -> None:
    codes = [*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFD00, 0x10010), 0x10FFFF]
    path = write(tmp_path / "report.html", "".join(map(chr, codes)))
    text = path.read_text(encoding="utf-8")
    assert re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff]", text) is None
    assert "\U0010ffff" in text


@settings(deadline=None, max_examples=300, database=None)
@given(st.text("ab\n", max_size=120), st.integers(1, 6), st.integers(1, 60))
def test_folding_loses_nothing(text: str, lines: int, repeat: int) -> None:
    parts = report._fold(text * repeat, lines)
    assert parts.head + parts.middle + parts.tail == text * repeat


def test_a_long_line_is_folded_and_all_there(browser: Browser, tmp_path: Path) -> None:
    long = "0123456789" * 100_000
    path = tmp_path / "report.html"
    path.write_text(page([replace(example_run(1)[0], turns=(call("Long.", long, long), Turn(text=long)))]))
    browser.open(path, "#ep-1")
    assert browser.run("document.documentElement.scrollHeight") < 10_000
    for place in (".box:last-child", ".box.code"):
        parts = f"[...document.querySelectorAll('#ep-1-1 {place} pre')].map((p) => p.textContent).join('')"
        assert browser.run(f"{parts} === '0123456789'.repeat(100000)")
    assert browser.run("document.querySelector('#ep-1-1 .more summary').textContent") == "997,000 characters"
    browser.run("document.querySelectorAll('#ep-1 details').forEach((fold) => { fold.open = true; })")
    assert browser.run("document.documentElement.scrollHeight") > 100_000
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_nothing_is_wider_than_the_window(browser: Browser, example: Path, tmp_path: Path) -> None:
    hostile = write(tmp_path / "hostile.html", "W" * 300 + HOSTILE, seed=10**30, reward=-1.23456e-300)
    for path, fragment in itertools.product((example, hostile), ("", "#ep-1")):
        for width in (360, 420, 900, 1280, 1600):
            with browser.screen(width):
                browser.open(path, fragment)
                assert browser.run("document.documentElement.scrollWidth") <= width
                if not fragment:
                    assert browser.run("document.querySelector('td.task').clientWidth") > 90


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(browser: Browser, example: Path, scheme: str) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    texts = ["ink", "dim", "accent", "good", "bad", "warn"]
    phases = ["queued", "init", "policy", "run", "eval", "teardown", "other"]
    names = ["bg", "panel", "code", "mark", "tint", *texts, *phases]
    with browser.screen(1280, scheme=scheme):
        browser.open(example)
        get = "getComputedStyle(document.documentElement).getPropertyValue"
        colours = {name: browser.run(f"{get}('--{name}').trim()") for name in names}
    assert len(set(colours.values())) == len(names) - 1  # `other` is `dim`.
    for ground in ("bg", "panel", "code", "mark"):
        assert all(contrast(text, ground) >= 4.5 for text in texts), ground
    assert contrast("warn", "tint") >= 4.5
    assert all(contrast(phase, "bg") >= 3 for phase in phases)


def test_controls_and_pictures_have_names(browser: Browser, example: Path) -> None:
    browser.open(example, "#ep-3")
    assert browser.run("[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length).length") == 0
    unnamed = "[...document.querySelectorAll('[role=img]')].filter((e) => !e.title && !e.ariaLabel).length"
    assert browser.run(unnamed) == 0
    assert browser.run("[...document.querySelectorAll('th')].every((e) => e.scope === 'col')")
    assert browser.run("new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size") == (
        browser.run("document.querySelectorAll('[id]').length")
    )


@pytest.mark.slow
def test_a_run_of_a_thousand_episodes_is_not_larger_than_its_trajectories(browser: Browser, tmp_path: Path) -> None:
    run = example_run(1000)
    path = tmp_path / "report.html"
    path.write_text(page(run), encoding="utf-8")
    assert path.stat().st_size < sum(len(encode_trajectory(trajectory)) for trajectory in run)
    browser.open(path, "#ep-1000")
    browser.assert_calm(path)
    assert browser.run(VISIBLE_EPISODES) == ["ep-1000"]
    assert browser.run("document.querySelectorAll('tbody tr').length") == 1000


def test_a_run_without_episodes_or_times_has_a_page(browser: Browser, tmp_path: Path) -> None:
    bare = Trajectory(task_id="", data_source="", outcome=Outcome.INVALID_TASK, reward=None)
    for run in ([], [bare]):
        path = tmp_path / "report.html"
        path.write_text(page(run), encoding="utf-8")
        browser.open(path)
        browser.assert_calm(path)
        assert "none graded" in browser.run("document.querySelector('.numbers').innerText")


def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "report.html", tmp_path):
        with pytest.raises(UsageError, match="cannot write the report"):
            write_report(path, [], title="t", created="c", meta={})
    assert list(tmp_path.iterdir()) == []
