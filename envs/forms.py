r"""The form of an answer: words, one value, a group of values or a relation, read from its text alone.

Commas, brackets, ``\pm``, ``\cup``, units and ``x =`` are taken apart here, by small rules on text, so that a computer
algebra system only ever sees the single values in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from prorl_env.envs.answers import matching_brackets, normal_text
from prorl_env.envs.plain_math import to_latex
from prorl_env.envs.units import PERCENT, Unit, is_unit_word, read_unit

__all__ = ["Form", "Group", "Relation", "Scalar", "Words", "letters", "read_form"]


@dataclass(frozen=True, slots=True)
class Words:
    """An answer to be compared letter by letter: a name, a choice, a time."""

    text: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value or expression."""

    latex: str
    unit: Unit | None = None
    subject: str = ""
    """What the value was assigned to, if it was: ``x`` in ``x = 5``."""


@dataclass(frozen=True, slots=True)
class Group:
    """Several values together."""

    brackets: str
    """``""`` for a bare list, ``or`` for a union, ``matrix``, ``row``, else the brackets, as in ``[)`` and ``{}``."""
    items: tuple[Form, ...]
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality that is not simply about one named thing. It has one sign fewer than sides."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]


Form = Words | Scalar | Group | Relation
"""What an answer can be."""


def read_form(text: str) -> Form:
    """Read an answer. What is none of the other forms is ``Words``; nothing is refused here."""
    return _read(normal_text(text), 0)


def letters(text: str) -> str:
    """The letters and digits of a text and what stands between them, in lower case, without spaces."""
    text = text.replace(r"\text", "")
    return re.sub(r"(?<!\d) | (?!\d)|[{}\\]", "", " ".join(text.split())).strip("().[],:;!'\"").casefold()


def _read(text: str, depth: int) -> Form:
    text = _peel(text)
    if depth > _DEEPEST or not text:
        return Words(text)
    text = _without_digit_groups(text)
    parts, found = _split(text, _LIST)
    if len(parts) > 1:
        return _list(parts, found, depth)
    if _WORDS.fullmatch(text) and not _FUNCTION.search(text):
        return Words(text)
    parts, _ = _split(text, _UNION)
    if len(parts) > 1:
        return Group("or", tuple(_read(part, depth + 1) for part in parts))
    parts, found = _split(text, _SIGN)
    if found:
        return _relation(parts, [sign.strip() for sign in found], text, depth)
    if group := _group(text, depth):
        return group
    if _REALS.fullmatch(text):
        return Group("()", (Scalar(r"-\infty"), Scalar(r"\infty")))
    if _PLUS_MINUS.search(text):
        return Group("", tuple(_read(_choose_sign(text, upper), depth + 1) for upper in (True, False)))
    return _scalar(text)


def _peel(text: str) -> str:
    """Take off braces around everything, and round brackets that hold one value only."""
    text = text.strip()
    closing = matching_brackets(text)
    start, end = 0, len(text)
    round_ones = False
    while start < end and text[start] in "{(" and closing.get(start) == end - 1 and text[end - 1] in "})":
        round_ones = round_ones or text[start] == "("
        start, end = start + 1, end - 1
    inner = text[start:end]
    return f"({inner})" if round_ones and len(_split(inner, _LIST)[0]) > 1 else inner


def _split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split at those matches that stand outside of all brackets; give the parts and what separated them."""
    parts, separators = [], []
    at, inside_to = 0, -1
    spans = sorted(matching_brackets(text).items())
    next_span = 0
    for found in pattern.finditer(text):
        while next_span < len(spans) and spans[next_span][0] < found.start():
            inside_to = max(inside_to, spans[next_span][1])
            next_span += 1
        if found.start() > inside_to:
            parts.append(text[at : found.start()])
            separators.append(found.group())
            at = found.end()
    return [*parts, text[at:]], separators


def _without_digit_groups(text: str) -> str:
    """``1,600`` becomes ``1600`` outside of brackets; within them a comma always separates."""
    parts, groups = _split(text, _DIGIT_GROUPS)
    merged = [part + group.replace(",", "") for part, group in zip(parts, [*groups, ""], strict=True)]
    return "".join(merged)


def _list(parts: list[str], separators: list[str], depth: int) -> Form:
    items = _flat(_read(part, depth + 1) for part in parts if part.strip())
    if not items:
        return Words("")
    subjects = [item.subject if isinstance(item, (Scalar, Group)) else "" for item in items]
    first = items[0]
    if isinstance(first, (Scalar, Group)) and first.subject and not any(subjects[1:]):
        # "n = 2, 3, 4" says of n that it is all three.
        return Group("", (replace(first, subject=""), *items[1:]), first.subject)
    if all(subjects) and all("or" in separator for separator in separators) and all(map(_is_interval, items)):
        return Group("or", tuple(items))
    return Group("", tuple(items)) if len(items) > 1 else items[0]


def _group(text: str, depth: int) -> Group | None:
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in matrix[2].split(r"\\") if row.strip()]
        cells = [tuple(_read(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows]
        return Group("matrix", tuple(Group("row", row) for row in cells))
    width = 2 if text.startswith(r"\{") else 1
    opening = text[width - 1 : width]
    if opening not in "([{" or matching_brackets(text).get(width - 1) != len(text) - 1:
        return None
    inner = text[width : len(text) - width].strip()
    if width == 2 and (rule := _SET_RULE.fullmatch(inner)):
        ruled = _read(rule[1], depth + 1)
        return ruled if isinstance(ruled, Group) else None
    # Within brackets "1,234" is a group of digits only if semicolons do the separating.
    parts = _split(_without_digit_groups(inner), _LIST)[0] if ";" in inner else _split(inner, _LIST)[0]
    parts = list(filter(str.strip, parts))
    items = tuple(_read(part, depth + 1) for part in parts)
    brackets = opening + text[-1]
    if brackets == "{}":
        return Group(brackets, tuple(_flat(items)))
    return Group("" if brackets == "[]" and len(items) != _ENDS else brackets, items)


def _relation(parts: list[str], signs: list[str], text: str, depth: int) -> Form:
    parts = [part.strip() for part in parts]
    if not parts[0]:
        parts, signs = parts[1:], signs[1:]
    for at, sign in enumerate(signs):
        if sign == r"\approx":
            if at == 0 and _is_name(parts[0]):
                signs[0] = "="
                continue
            parts, signs = parts[: at + 1], signs[:at]
            break
    if not signs:
        return _read(parts[0], depth + 1)
    if not all(parts):
        return Words(text)
    if set(signs) <= {"=", r"\in"} and _is_name(parts[0]):
        return _about(parts[0], _read(parts[-1], depth + 1), text)
    if signs == ["="] and _is_name(parts[1]) and not _LETTER.search(parts[0]):
        return _about(parts[1], _read(parts[0], depth + 1), text)
    return _inequality(parts, signs, depth) or Relation(tuple(map(to_latex, parts)), tuple(signs))


def _inequality(parts: list[str], signs: list[str], depth: int) -> Group | None:
    r"""``2 < x \leq 5`` as the interval that it is; None for what is no inequality about one named thing."""
    if set(signs) <= {">", r"\geq"}:
        parts, signs = parts[::-1], [{">": "<"}.get(sign, r"\leq") for sign in signs[::-1]]
    if not set(signs) <= {"<", r"\leq"}:
        return None
    edges = ["(" if sign == "<" else "[" for sign in signs], [")" if sign == "<" else "]" for sign in signs]
    if len(parts) == _ENDS + 1 and _is_name(parts[1]):
        ends = (_read(parts[0], depth + 1), _read(parts[2], depth + 1))
        return Group(edges[0][0] + edges[1][1], ends, parts[1])
    if len(parts) == _ENDS and _is_name(parts[0]):
        return Group("(" + edges[1][0], (Scalar(r"-\infty"), _read(parts[1], depth + 1)), parts[0])
    if len(parts) == _ENDS and _is_name(parts[1]):
        return Group(edges[0][0] + ")", (_read(parts[0], depth + 1), Scalar(r"\infty")), parts[1])
    return None


def _scalar(text: str) -> Form:
    unit: Unit | None = None
    if based := _BASED.fullmatch(text):
        return Scalar(based[1], Unit(Fraction(1), ((f"base {int(based[2])}", 1),)))
    core = text
    if money := _MONEY.match(core):
        unit = read_unit(_CURRENCIES[money[2]])
        core = money[1] + core[money.end() :]
    for pattern in _UNIT_TAILS:
        tail = pattern.search(core)
        if tail and "circ" in tail.group() and _FUNCTION.search(core):
            # The degrees in "2 sin 30°" belong to the sine.
            break
        said = _unit_said(tail.group()) if tail and tail.start() else None
        if tail and said and (unit is None or unit.powers == said.powers):
            unit, core = said, core[: tail.start()].strip()
            break
    latex = to_latex(core)
    literal = r"\text" in core or r"\ldots" in core or not core.isascii()
    if literal or _PROSE.search(core) or _TWO_NUMBERS.search(latex):
        return Words(text)
    return Scalar(latex, unit)


def _unit_said(tail: str) -> Unit | None:
    said = tail.strip()
    if said in {r"\%", "percent", "percentage", "pct"}:
        return PERCENT
    if said.startswith(r"^{\circ}"):
        return read_unit("degree" + re.sub(r"[^CF]", "", said[len(r"^{\circ}") :]))
    if r"\text" in said:
        return read_unit(re.sub(r"\\text\{([^{}]*)\}|\\cdot", r" \1 ", said))
    words = re.findall(r"[^\W\d_]+", said)
    spaced = tail.startswith(" ")
    # "5cm" and "5 m" hold a unit; "5m" and "5xyz" are products; "5 red apples" are apples.
    if all(map(is_unit_word, words)) and (spaced or len(words[0]) > 1):
        return read_unit(said)
    if spaced and len(words) <= _MOST_WORDS and all(map(_WORD_LIKE.fullmatch, words)) and not _FUNCTION.search(said):
        return read_unit(said)
    return None


def _about(subject: str, value: Form, text: str) -> Form:
    return replace(value, subject=subject) if isinstance(value, (Scalar, Group)) else Words(text)


def _is_name(text: str) -> bool:
    r"""Whether a side of an equation names a thing, as ``a_{1}``, ``f(x)``, ``(p,q)``, ``\frac{NO}{BO}`` do."""
    return bool(_NAME.fullmatch(_NAME_DECORATION.sub("", text)))


def _is_interval(form: Form) -> bool:
    return isinstance(form, Group) and form.brackets in {"()", "(]", "[)", "[]"} and len(form.items) == _ENDS


def _flat(items: Iterable[Form]) -> list[Form]:
    """The items, with those of bare lists among them in the place of the lists."""
    flat: list[Form] = []
    for item in items:
        bare = isinstance(item, Group) and item.brackets == "" and not item.subject
        flat += item.items if isinstance(item, Group) and bare else (item,)
    return flat


def _choose_sign(text: str, upper: bool) -> str:
    text = _PLUS_MINUS.sub(lambda found: "+" if (found.group() == r"\pm") is upper else "-", text)
    return text.removeprefix("+")


_DEEPEST = 40
_ENDS = 2
_MOST_WORDS = 3
_WORD_LIKE = re.compile(r"[^\W\d_]{3,}|[^\x00-\x7f]+")

_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|psi|omega|Delta|ell)"
)
_NAME = re.compile(
    rf"(?:{_GREEK}\s*|[A-Za-z])+(?:\([A-Za-z0-9,;]*\))?|\((?:(?:{_GREEK}|[A-Za-z])+[,;])+(?:{_GREEK}|[A-Za-z])+\)"
)
_NAME_DECORATION = re.compile(
    r"_\{[^{}]*\}|\^\{-1\}|\\(?:text|overline|vec|angle|triangle|frac|mathcal|operatorname)(?![A-Za-z])|[{}|/' ]"
)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_LIST = re.compile(
    r"[;,]?\s*(?:\\text\{[,;]?\s*(?:and|or)\s*\}|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])|(?<![A-Za-z])(?:and|or)(?![a-z]))"
    r"|[;,]"
)
_DIGIT_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNION = re.compile(r"\\(?:cup|bigcup)(?![A-Za-z])")
_SIGN = re.compile(r"\\(?:leq|geq|neq|approx|in)(?![A-Za-z])\s*|[=<>]")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_REALS = re.compile(r"\\mathbb\s*\{?R\}?|\\R")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}((?:(?!\\begin).)*)\\end\{\1\}", re.DOTALL)
_SET_RULE = re.compile(r"[A-Za-z](?:\\in\s*\\mathbb\{?R\}?)?\s*(?:\\mid(?![A-Za-z])|:|\|)\s*(.+)")
_FUNCTION = re.compile(
    r"(?<![A-Za-z])(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|pi|theta|alpha|beta|floor|ceil|infinity|inf)"
    r"(?![A-Za-z])"
)
_WORDS = re.compile(
    r"\(?\s*\\text\{[^{}]*[^\W\d_][^{}]*\}\s*[).]?|(?=[^\\]*[^\W\d_]{3})(?:[^\W\d_]|[ '.-])+|[^\\]*:[^\\]*"
)
_BASED = re.compile(r"(\d[0-9A-F]*)_\{(?:\\text\{)?(\d{1,3})\}?\}")
_MONEY = re.compile(r"(-?)\s*(?:US)?(\\\$|\\text\{[€£]\})\s*")
_CURRENCIES = {r"\$": "dollar", r"\text{€}": "euro", r"\text{£}": "sterling"}
_TEXT = r"\\text\{[^{}]*\}(?:\^\{-?\d\})?"
_UNIT_TAILS = (
    re.compile(r"\s*\\%$|\s*(?:percent(?:age)?|pct)$"),
    re.compile(r"\s*\^\{\\circ\}\s*(?:[CF]|\\text\{\s*[CF]\s*\})?$"),
    re.compile(rf"\s*{_TEXT}(?:\s*(?:/|\\cdot)?\s*{_TEXT})*$"),
    re.compile(r"(?<=[\d})]) ?[^\W\d_]+(?:[ ./]+[^\W\d_]+)*(?:\^\{-?\d\})?$"),
)
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?!(?:arcsin|arccos|arctan|sqrt|infinity|theta|alpha|beta|floor|ceil)(?![A-Za-z]))[A-Za-z]{4,}"
)
_TWO_NUMBERS = re.compile(r"\d \d")
