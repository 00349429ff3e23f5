"""Whether an answer says the same as the gold: forms part by part, single values by value.

Imported in grading workers alone, because the values behind it need SymPy.
"""

from __future__ import annotations

import re
from fractions import Fraction

from prorl_env.envs.forms import Form, Group, Relation, Scalar, Words, letters, read_form
from prorl_env.envs.units import PERCENT, Unit
from prorl_env.envs.values import Unparsable, evaluate, same_equation, same_value

__all__ = ["Unparsable", "check", "equivalent"]


def check(text: str) -> None:
    """Parse and evaluate every value of an answer.

    Raises:
        Unparsable: If one of them cannot be.
    """
    _check(read_form(text))


def equivalent(gold: str, answer: str) -> bool:
    """Whether the answer says the same as the gold. The gold's format counts where the two differ in kind.

    Raises:
        Unparsable: If a value cannot be parsed, and the two are not different for another reason.
    """
    return _same(read_form(gold), read_form(answer))


def _check(form: Form) -> None:
    match form:
        case Words("") | Group(_, ()):
            raise Unparsable("there is nothing in it")
        case Scalar(latex):
            evaluate(latex)
        case Relation(sides):
            for side in sides:
                evaluate(side)
        case Group(_, items):
            for item in items:
                _check(item)
        case _:
            pass


def _same(gold: Form, answer: Form) -> bool:
    match gold, answer:
        case (Words(), Words()):
            return _spelled(gold) == _spelled(answer) != ""
        case (Words(), _) | (_, Words()):
            return _spelled(gold) == _spelled(answer) and any(map(str.isalpha, _spelled(gold)))
        case (Scalar(), Scalar()):
            return _same_scalar(gold, answer)
        case (Group(), Group()):
            return _same_group(gold, answer)
        case (Group(_, (item,)), Scalar()):
            return _same(item, answer)
        case (Scalar(), Group(_, (item,))):
            return _same(gold, item)
        case (Relation(), _) | (_, Relation()):
            return _same_relation(gold, answer)
        case _:
            return False


def _spelled(form: Form) -> str:
    match form:
        case Words(text):
            return letters(text)
        case Scalar(latex, None):
            return letters(latex)
        case _:
            return ""


def _same_scalar(gold: Scalar, answer: Scalar) -> bool:
    if gold.subject and answer.subject and _name(gold.subject, gold.latex) != _name(answer.subject, answer.latex):
        return _same_relation(gold, answer)
    return any(same_value(gold.latex, answer.latex, ratio=ratio) for ratio in _ratios(gold.unit, answer.unit))


def _ratios(gold: Unit | None, answer: Unit | None) -> tuple[Fraction, ...]:
    """By what the gold's number may be multiplied to get the answer's; empty if the units cannot be compared.

    A unit that only one side has is the one that the problem asks for. With percent only the gold may have that
    licence: 28 is how people answer "what percent", but 28% is never 28.
    """
    one = Fraction(1)
    if gold is not None and answer is not None:
        return (gold.factor / answer.factor,) if gold.powers == answer.powers else ()
    if gold == PERCENT:
        return (one, PERCENT.factor)
    if answer is not None and answer.powers[:1] and answer.powers[0][0].startswith("base "):
        return ()
    if answer == PERCENT:
        return (one / PERCENT.factor,)
    return (one,)


def _same_group(gold: Group, answer: Group) -> bool:
    if gold.subject and answer.subject and _name(gold.subject) != _name(answer.subject):
        return False
    kinds = {gold.brackets, answer.brackets}
    if len(kinds) > 1 and ("" not in kinds or not kinds <= {"", "()", "{}", "[]"}):
        return False
    ordered = not kinds <= {"", "{}", "or"} or _named_apart(gold) != _named_apart(answer)
    if ordered:
        return len(gold.items) == len(answer.items) and all(map(_same, gold.items, answer.items))
    left = list(answer.items)
    if len(set(gold.items)) == len(gold.items):
        # In a list of different things, saying one of them twice adds nothing.
        left = list(dict.fromkeys(left))
    if len(gold.items) != len(left):
        return False
    for item in gold.items:
        at = next((at for at, other in enumerate(left) if _same(item, other)), None)
        if at is None:
            return False
        del left[at]
    return True


def _named_apart(group: Group) -> bool:
    """Whether the items are values of different things, as in ``x = 1, y = 2``: without the names, order counts."""
    return len({_name(item.subject) for item in group.items if isinstance(item, (Scalar, Group))} - {""}) > 1


def _same_relation(gold: Form, answer: Form) -> bool:
    left, right = _as_relation(gold), _as_relation(answer)
    if left is None or right is None or len(left.sides) != len(right.sides):
        return False
    if left.signs == right.signs and all(same_value(*pair) for pair in zip(left.sides, right.sides, strict=True)):
        return True
    turned = Relation(right.sides[::-1], tuple(_TURNED.get(sign, sign) for sign in right.signs[::-1]))
    if left.signs == turned.signs and all(same_value(*pair) for pair in zip(left.sides, turned.sides, strict=True)):
        return True
    if left.signs == right.signs == ("=",):
        return same_equation((left.sides[0], left.sides[1]), (right.sides[0], right.sides[1]))
    return False


def _as_relation(form: Form) -> Relation | None:
    match form:
        case Relation():
            return form
        case Scalar(latex, None, subject) if subject:
            return Relation((subject, latex), ("=",))
        case _:
            return None


def _name(subject: str, value: str = "") -> str:
    """What a subject is called: ``W(n)`` and ``W(x)`` are both ``W``, unless the value is one of its argument."""
    subject = re.sub(r"[\s{}]", "", subject)
    call = re.fullmatch(r"(\w+)\((\w)\)", subject)
    return call[1] if call and call[2] not in re.sub(r"\\[A-Za-z]+", "", value) else subject


_TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
