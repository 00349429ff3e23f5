from __future__ import annotations

import pytest

from prorl_env.envs.answers import extract_answer, normal_text, same_text, stated_answer
from prorl_env.envs.forms import Group, Relation, Scalar, Words, read_form
from prorl_env.envs.units import read_unit


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{\frac{1}{2}} or rather \boxed{ \frac{1}{3} }", r"\frac{1}{3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \mid x > 2 \right.}", r"\left\{ x \mid x > 2 \right."),
        (r"\fbox{7}", "7"),
        (r"\boxed 5.", "5"),
        (r"\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        ("\\boxed\n{8}", "8"),
        ("```latex\n\\boxed{9}\n```", "9"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\[ \boxed{k=1}, \quad \boxed{n=2} \]", "k=1, n=2"),
        (r"First \boxed{3}, then the final answer is \boxed{7}", "7"),
        ("\\boxed{7}\n\n**Final answer**\n\\boxed{7}", "7"),
        (r"\boxed{4} and then \boxed{", "4"),
        (r"\boxed{4} \boxed{}", "4"),
        (r"<think>\boxed{1}</think> It is \boxed{2}.", "2"),
        (r"a set {1, 2 and \boxed{3}", "3"),
        (r"<think>\boxed{1}</think> I do not know.", None),
        (r"\boxed{1}</think> I do not know.", None),
        (r"\boxed{1} <think> or is it \boxed{2}", "1"),
        (r"\boxed{1", None),
        (r"\boxedness{1}", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_long_hostile_texts_are_searched_in_one_pass() -> None:
    assert extract_answer("\\boxed{" * 100_000) is None
    assert extract_answer("\\boxed{1}" + " " * 100_000 + "\\boxed{2}") == "2"
    assert extract_answer("<think>" * 100_000 + "\\boxed{2}") is None
    assert extract_answer("{" * 200_000 + "\\boxed{2}") == "2"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The final answer is $28 \\%$. I hope it is correct.", "$28 \\%$"),
        ("Final Answer: **73**", "**73**"),
        ("The answer is 5 cm.", "5 cm"),
        ("The answer is not 5.", "The answer is not 5."),
        ("Thus \\(x \\geq 5\\) is the solution.", "\\(x \\geq 5\\)"),
        ("It is not $5$.", "It is not $5$."),
        ("The answer is $5$ or $6$.", "$5$ or $6$"),
        ("The answer is $5$, for there are $6$ of them.", "$5$, for there are $6$ of them"),
        ("It may be 7, or $8$.", "It may be 7, or $8$."),
        ("Either $5$ or perhaps $6$.", "Either $5$ or perhaps $6$."),
        ("$5$", "$5$"),
    ],
)
def test_a_sentence_may_state_the_answer(text: str, answer: str) -> None:
    assert stated_answer(text) == answer


def test_one_spelling_for_all() -> None:
    assert normal_text(" $\\displaystyle \\dfrac{1}{2}$. ") == r"\frac{1}{2}"
    assert same_text(r"\left( 3, \tfrac{\pi}{2} \right)", r"(3,\ \frac{\pi}{2})")
    assert same_text("x ≤ 2", r"x \leqslant 2")
    assert same_text(r"10{,}080", r"10,\!080")
    assert not same_text("", " ")


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("5 cm", Scalar("5", read_unit("cm"))),
        ("3xy", Scalar("3xy")),
        ("1,600", Scalar("1600")),
        ("40_9", Scalar("40", read_form("11_9").unit)),  # type: ignore[union-attr]
        ("x = 5", Scalar("5", subject="x")),
        ("(2,251,252)", Group("()", (Scalar("2"), Scalar("251"), Scalar("252")))),
        (r"3 \pm x", Group("", (Scalar("3 + x"), Scalar("3 - x")))),
        (r"x \leq 2", Group("(]", (Scalar(r"-\infty"), Scalar("2")), "x")),
        ("2x + y = 1", Relation(("2x+y", "1"), ("=",))),
        ("n = 2, 3", Group("", (Scalar("2"), Scalar("3")), "n")),
        ("no solution", Words("no solution")),
        ("12:30", Words("12:30")),
        ("(" * 3000 + "2" + ")" * 3000, Scalar("2")),
        ("", Words("")),
    ],
)
def test_forms_are_read_from_text(text: str, form: object) -> None:
    assert read_form(text) == form


def test_units_are_products_of_powers() -> None:
    assert read_unit("km/h") == read_unit("kilometers per hour") == read_unit("kph")
    assert read_unit("square feet") == read_unit("ft^2") == read_unit("feet squared")
    assert read_unit("apples") == read_unit("apple") != read_unit("oranges")
    assert read_unit("if n is even") is None
