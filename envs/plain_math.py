r"""Mathematics as it is typed, such as ``sqrt(2)/2``, ``2**10`` or ``1 000``, turned into LaTeX that a parser takes."""

from __future__ import annotations

import re

from prorl_env.envs.answers import matching_brackets

__all__ = ["to_latex"]


def to_latex(text: str) -> str:
    r"""Write one value in plain LaTeX: no digit groups, no shorthand, every exponent and root in braces.

    Decimals that recur (``0.\overline{3}``) become fractions. What is LaTeX already stays as it is.
    """
    text = _SPACE_GROUPS.sub(lambda found: found.group().replace(" ", ""), text)
    text = _COMMA_GROUPS.sub(lambda found: found.group().replace(",", ""), text)
    text = _RECURRING.sub(_fraction_of_recurring, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    for command in (r"\sqrt", "^"):
        text = _braced(text, command)
    return text.strip().removeprefix("+").strip()


def _braced(text: str, command: str) -> str:
    r"""``\sqrt(…)`` becomes ``\sqrt{…}``."""
    closing = matching_brackets(text)
    signs = list(text)
    for found in re.finditer(re.escape(command) + r"\s*\(", text):
        end = closing.get(found.end() - 1, -1)
        if end > 0 and text[end] == ")":
            signs[found.end() - 1], signs[end] = "{", "}"
    return "".join(signs)


def _fraction_of_recurring(found: re.Match[str]) -> str:
    whole, fixed, repeated = found[1], found[2], found[3]
    bottom = int("9" * len(repeated) + "0" * len(fixed))
    top = int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed)
    return rf"(\frac{{{top}}}{{{bottom}}})"


_SPACE_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_RECURRING = re.compile(r"(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{(\d{1,30})\}")
_FUNCTIONS = "sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|theta|alpha|beta|infty"

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])", r"\1\\cdot 10^{\2}"),
        (r"(?<=\d) ?x ?(?=10\^)", r"\\cdot "),
        (r"(?<![\w.])(\d+) (\d+)/(\d+)(?![\w.])", r"\1\\frac{\2}{\3}"),
        (r"(?<![\w.])(\d+)/(\d+) (?=[A-Za-z\\])", r"\\frac{\1}{\2}"),
        (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"\*", r"\\cdot "),
        (r"\\times(?![A-Za-z])", r"\\cdot "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(frac|binom)\s*([0-9A-Za-z]|\\pi)\s*([0-9A-Za-z])", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom)\s*([0-9A-Za-z])\s*\{", r"\\\1{\2}{"),
        (r"\\(frac|binom)\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\\1\2{\3}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\+(?=\+)", ""),
    )
)
