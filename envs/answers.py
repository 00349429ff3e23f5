r"""Answers as text: find the boxed one in what a model wrote, and spell it in one way.

Pure functions over strings. All of them take time proportional to the text, whatever it holds, because the text is
written by an agent.
"""

from __future__ import annotations

import re

__all__ = ["extract_answer", "matching_brackets", "normal_text", "same_text", "stated_answer"]


def extract_answer(text: str) -> str | None:
    r"""Give what the last ``\boxed{…}`` (or ``\fbox{…}``) of a text holds, or None if there is none.

    Braces are balanced, with ``\{`` and ``\}`` left out of the count. A box that is never closed or holds nothing does
    not count; a box within a box belongs to the outer one. ``\boxed 5`` gives ``5``. The last boxes are one list if
    nothing stands between them but a comma, *and* or *or*: ``\boxed{1} and \boxed{2}`` gives ``1, 2``.

    Boxes inside ``<think>…</think>`` do not count, nor does anything after a ``<think>`` that stays open or before a
    lone ``</think>``. Code fences make no difference.
    """
    text = _without_thinking(text)
    closing = matching_brackets(text, braces_only=True)
    boxed: dict[str, None] = {}
    end = 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue
        before = end
        if text[box.end() : box.end() + 1] == "{":
            if box.end() not in closing:
                continue
            content = text[box.end() + 1 : closing[box.end()]].strip()
            after = closing[box.end()] + 1
        else:
            bare = _BARE_BOX.match(text, box.end())
            content = bare.group().strip().rstrip(".,;:") if bare else ""
            after = bare.end() if bare else box.end()
        if content:
            near = bool(boxed) and box.start() - before <= _MOST_BETWEEN_BOXES
            joined = near and _BETWEEN_BOXES.fullmatch(text, before, box.start())
            if not joined:
                boxed = {}
            boxed[content] = None
            end = after
    return ", ".join(boxed) or None


def stated_answer(text: str) -> str:
    """Give the answer that a sentence states, else the text itself.

    That is what follows the last "answer is" or "answer:" up to the end of the sentence, or only a formula at the start
    of that if no other number or formula comes after it; or the only formula of a text that has other words, but no
    other numbers and no denial. A text of more than 5000 characters is left alone.
    """
    if len(text) > _MOST_STATED:
        return text
    *_, said = [None, *_ANSWER_IS.finditer(text)]
    if said is not None:
        sentence = _SENTENCE_END.split(text[said.end() :].strip(), maxsplit=1)[0]
        formula = _FORMULA.match(sentence)
        alone = formula and not _MORE.search(sentence, formula.end())
        return (formula.group() if formula and alone else sentence).strip() or text
    formulas = _FORMULA.findall(text)
    words = _FORMULA.sub(" ", text)
    if len(formulas) == 1 and _WORD.search(words) and not _DENIAL.search(words) and not _MORE.search(words):
        return str(formulas[0])
    return text


def normal_text(text: str) -> str:
    r"""Spell an answer in the one way that the grader reads.

    Math delimiters, spacing and sizing commands, markdown emphasis and a full stop at the end go away; Unicode signs
    become LaTeX; the variants of ``\frac``, ``\text``, ``\leq`` and of the digit group separators become one each.
    """
    text = text.translate(_UNICODE).strip("` \t\r\n").removeprefix("**").removesuffix("**")
    if "begin{" not in text:
        # Records that were escaped twice; in a matrix the double backslash ends a row.
        text = _DOUBLED.sub(r"\\", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _LOOSE_SPACE.sub("", " ".join(text.split()))
    return text.strip().rstrip(".,;:").strip()


def same_text(first: str, second: str) -> bool:
    """Whether two answers are the same once spelled in the normal way. The empty text is not the same as anything."""
    first, second = normal_text(first), normal_text(second)
    return bool(first) and first == second


def matching_brackets(text: str, *, braces_only: bool = False) -> dict[int, int]:
    r"""Map the position of each opening bracket to that of the one that closes it.

    A backslash takes the next character out of the count, except that ``\{`` pairs with ``\}`` when all kinds are
    asked for; positions are then those of the brace itself. Round and square brackets may close each other, as they do
    in half-open intervals.
    """
    pairs: dict[int, int] = {}
    stack: list[tuple[int, str]] = []
    for found in (_BRACES if braces_only else _BRACKETS).finditer(text):
        sign = found.group()
        at = found.end() - 1
        if braces_only and sign[0] == "\\":
            continue
        if sign in _CLOSED_BY:
            stack.append((at, _CLOSED_BY[sign]))
        elif stack and sign in stack[-1][1].split():
            pairs[stack.pop()[0]] = at
    return pairs


def _without_thinking(text: str) -> str:
    text = _THINKING.sub(" ", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


_MOST_BETWEEN_BOXES = 60
_MOST_STATED = 5_000
_CLOSED_BY = {"{": "}", "(": ") ]", "[": "] )", "\\{": "\\}"}
_BRACKETS = re.compile(r"\\.|[{}()\[\]]", re.DOTALL)
_BRACES = re.compile(r"(?:\\.)+|[{}]", re.DOTALL)
_THINKING = re.compile(r"<think>(?:(?!<think>).)*?</think>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t\n]*")
_BARE_BOX = re.compile(r"\\[A-Za-z]+(?:\{[^{}\n]*\})*|[-+]?[\w.,/^%]+")
_NO_WORDS = r"(?:[ $,;.{}]|\\[\[\]()]|\\q?quad|\\text)*"
_BETWEEN_BOXES = re.compile(rf"{_NO_WORDS}|\s*{_NO_WORDS}\s*(?:[,;]|and|or)\s*{_NO_WORDS}\s*")
_ANSWER_IS = re.compile(r"\banswer(?:\s+is)?\s*:|\banswer\s+is\b(?!\s+not\b)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$[^$]+\$\$|\$[^$\n]+\$|\\\((?:[^\\\n]|\\[^)\n])*\\\)|\\\[(?:[^\\]|\\[^\]])*\\\]")
_SENTENCE_END = re.compile(r"\.\s|(?<=\S)\n|\.$")
_MORE = re.compile(r"[\d$]|\\[(\[]")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
_DENIAL = re.compile(r"\b(?:not|never|no|cannot|isn't|wrong|false|unless|except)\b|n't", re.IGNORECASE)
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.\\])")

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "＋": "+", "＝": "=", "，": ",", "（": "(", "）": ")",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
        "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "±": r"\pm ", "∓": r"\mp ", "θ": r"\theta ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "°": r"^{\circ}", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "…": r"\ldots ", "∅": r"\emptyset ", "€": r"\text{€}", "£": r"\text{£}", "％": "%",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "", "“": "", "”": "", "’": "'",
    }
)  # fmt: skip

# In this order. Each pattern is free of nested repeats, so that no text can make it slow.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:boxed|fbox)(?![A-Za-z])", ""),
        (r"(?<!\\)\$|(?<!\\)\\[()]|(?<!\\)\\[\[\]]", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|hfill|phantom\{\})(?![A-Za-z])", " "),
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad|(?<!\\)~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text|math)(?:normal|bf|it|rm|sf|tt|up)(?![A-Za-z])|\\mbox(?![A-Za-z])", r"\\text"),
        (r"\\text\s*\{\s*([eid])\s*\}", r" \1 "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\(?:le|leqslant|leqq)(?![A-Za-z])|<=", r"\\leq "),
        (r"\\(?:ge|geqslant|geqq)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:ne|not=)(?![A-Za-z])|!=", r"\\neq "),
        (r"\\(?:simeq|doteq)(?![A-Za-z])|~=", r"\\approx "),
        (r"\\(?:dots|cdots|dotsc)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|o(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\s*\{,\}\s*", ","),
        # From here on a comma can group digits and a semicolon cannot.
        (r",\s+", ";"),
        (r"(?<![\\%])%", r"\\%"),
        (r"\*\*", "^"),
        (r"\^\s*(-?\d+|[A-Za-z])", r"^{\1}"),
        (r"_\s*(\d+|[A-Za-z])", r"_{\1}"),
        (r"\\text\s*\{\s*\}", " "),
    )
)
