r"""Single values as a computer algebra system reads them, and whether two of them are equal.

The only module that imports SymPy and Math-Verify, so it is imported in grading workers alone. Values are parsed with
Math-Verify's LaTeX parser and compared

* as fractions, when both are rational;
* to 600 digits, when both are numbers: Math-Verify's own comparison rounds, and takes ``1/2004!`` for ``1/2006!`` and
  ``1-1/e`` for ``1+1/e``;
* at fixed points, when they hold symbols.

Only where that decides nothing, Math-Verify's ``verify`` does. Nothing here bounds time or memory: an expression that
takes too much of them takes the process down, which is why there is one to take down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify
from sympy.core.function import AppliedUndef

Expression = Any
"""A SymPy expression. SymPy's own annotations are too few and too wide to be of use."""

__all__ = ["Unparsable", "evaluate", "same_equation", "same_value"]


class Unparsable(ValueError):
    """Text that the parser does not take as a value. Does not leave the worker."""


def same_value(gold: str, answer: str, *, ratio: Fraction = Fraction(1)) -> bool:
    """Whether ``gold`` times ``ratio`` equals ``answer``; both are LaTeX.

    A decimal may stand for a value that has no finite decimal, if it is rounded rightly and to enough digits.

    Raises:
        Unparsable: If one of them is not a value.
    """
    written = (_as_written(gold), _as_written(answer)) if ratio == 1 else (None, None)
    if written[0] and written[1]:
        return _same_decimals(written[0], written[1])
    left, right = _parse(gold), _parse(answer)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return bool(verify(left, right, timeout_seconds=None, allow_set_relation_comp=True))
    if _same_expression(left * sympy.Rational(ratio) if ratio != 1 else left, right):
        return True
    for decimal, expression in ((written[0], right), (written[1], left)):
        if decimal and decimal.places:
            return _rounded(decimal, expression)
    return False


def same_equation(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Whether two equations, given by their sides, are multiples of each other.

    Raises:
        Unparsable: If a side is not a value.
    """
    left, right = (_parse(pair[0]) - _parse(pair[1]) for pair in (gold, answer))
    ratios = []
    for first, second in _pairs(left, right, _DIGITS[0]):
        if first == 0 or second == 0:
            continue
        ratios.append(first / second)
    return len(ratios) >= _ENOUGH_POINTS and all(_close(ratio, ratios[0], _DIGITS[0]) for ratio in ratios)


def evaluate(latex: str) -> None:
    """Do with one value what a comparison does with it, to see that it can be done.

    Raises:
        Unparsable: If it is not a value.
    """
    if not _as_written(latex):
        expression = _parse(latex)
        if isinstance(expression, sympy.Expr):
            _same_expression(expression, expression + sympy.Symbol("never"))


@dataclass(frozen=True, slots=True)
class _Decimal:
    """A number written out in digits."""

    value: Fraction
    places: int
    """Digits after the point."""
    digits: int
    """Significant digits."""


def _as_written(latex: str) -> _Decimal | None:
    found = _NUMBER.fullmatch(latex.replace(" ", ""))
    if not found:
        return None
    sign, whole, places = found[1], found[2], found[3] or ""
    value = Fraction(int(whole + places or "0"), 10 ** len(places))
    return _Decimal(-value if sign == "-" else value, len(places), len((whole + places).lstrip("0")))


def _same_decimals(one: _Decimal, other: _Decimal) -> bool:
    if one.value == other.value:
        return True
    rough = min(one, other, key=lambda decimal: decimal.places)
    if _is_float_noise(one, other.value) or _is_float_noise(other, one.value):
        return True
    precise = min(one.places, one.digits, other.places, other.digits) > 0 and rough.digits >= _ROUNDED_DIGITS
    return precise and abs(one.value - other.value) * 10**rough.places <= Fraction(1, 2)


def _is_float_noise(decimal: _Decimal, value: Fraction) -> bool:
    """Whether the decimal is what binary floating point makes of the value."""
    return decimal.digits in _FLOAT_DIGITS and abs(decimal.value - value) <= abs(value) * _FLOAT_NOISE


def _rounded(decimal: _Decimal, expression: Expression) -> bool:
    exact = _exact(expression)
    enough = _ROUNDED_DIGITS
    if exact is None:
        if expression.free_symbols:
            return False
        value = _number(expression, decimal.digits + _DIGITS[0])
        if value is None or not value.is_real:
            return False
        exact = Fraction(str(sympy.Rational(value)))
    elif _is_finite_decimal(exact):
        return _is_float_noise(decimal, exact)
    else:
        enough = _ROUNDED_FRACTION_DIGITS
    return decimal.digits >= enough and abs(decimal.value - exact) * 10**decimal.places <= Fraction(1, 2)


def _is_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


@lru_cache(maxsize=256)
def _parse(latex: str) -> Expression:
    if len(_OPENING.findall(latex)) != len(_CLOSING.findall(latex)):
        # The parser would find out too, but takes seconds to if there are many.
        raise Unparsable(f"{latex!r} is not a value: its brackets do not match")
    text = _DECIMAL_PART.sub(_decimal_fraction, latex)
    text = _MIXED.sub(r"(\1+\2)", text)
    text = _JUXTAPOSED.sub(r"\\cdot ", text)
    text = _RESERVED.sub(r"Z_{\1\2}", text)
    complex_unit = _COMPLEX_UNIT.search(text)
    try:
        expression = latex2sympy(
            text,
            is_real=None if complex_unit else True,
            convert_degrees=True,
            normalization_config=None,
            conversion_config=_CASE_COUNTS,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        # The parser raises plain Exception for a syntax error and lets SymPy's own errors through.
        said = (str(error) or repr(error)).splitlines()[0]
        raise Unparsable(f"{latex!r} is not a value: {said}") from error
    if isinstance(expression, sympy.Expr):
        expression = _settle(expression)
    if not isinstance(expression, sympy.Basic) or expression is sympy.nan:
        raise Unparsable(f"{latex!r} is not a value")
    return expression


def _decimal_fraction(found: re.Match[str]) -> str:
    whole, places = found[1], found[2]
    return rf"(\frac{{{int(whole + places)}}}{{{10 ** len(places)}}})"


def _settle(expression: Expression) -> Expression:
    """Carry out sums and the like, read ``i`` as the imaginary unit, and take what is left unknown for a symbol."""
    imaginary = [symbol for symbol in expression.free_symbols if symbol.name == "i"]
    expression = expression.subs(dict.fromkeys(imaginary, sympy.I))
    if expression.has(*_UNFINISHED):
        expression = expression.doit()
    unknown = [*expression.atoms(AppliedUndef), *expression.atoms(sympy.Derivative)]
    return expression.xreplace({part: sympy.Symbol(f"<{part}>", real=True) for part in unknown})


def _same_expression(left: Expression, right: Expression) -> bool:
    if left == right:
        return True
    if not left.free_symbols and not right.free_symbols:
        one, other = _exact(left), _exact(right)
        if one is not None and other is not None:
            return one == other
        return all(_close(_number(left, digits), _number(right, digits), digits) for digits in _digits(left, right))
    compared = 0
    for first, second in _pairs(left, right, _DIGITS[0]):
        if not _close(first, second, _DIGITS[0]):
            return False
        compared += 1
    if compared < _ENOUGH_POINTS:
        return bool(verify(left, right, timeout_seconds=None))
    # A difference that 50 digits do not show, fractions or 600 digits do at one more point.
    point = next(_points(_symbols(left, right)))
    first, second = left.subs(point), right.subs(point)
    digits = _digits(left, right)[-1]
    exact = _exact(first), _exact(second)
    if None not in exact:
        return exact[0] == exact[1]
    numbers = _number(first, digits), _number(second, digits)
    return None in numbers or _close(*numbers, digits)


def _pairs(left: Expression, right: Expression, digits: int) -> Iterator[tuple[Expression, Expression]]:
    """The values of two expressions at the same points: where both are real, if there are enough of those."""
    symbols = _symbols(left, right)
    others = []
    found = 0
    for point in _points(symbols):
        first, second = _number(left.subs(point), digits), _number(right.subs(point), digits)
        if first is None or second is None:
            continue
        if first.is_real and second.is_real:
            found += 1
            yield first, second
        else:
            others.append((first, second))
    if found < _ENOUGH_POINTS:
        yield from others


def _symbols(*expressions: Expression) -> list[Expression]:
    return sorted({symbol for expression in expressions for symbol in expression.free_symbols}, key=str)


def _points(symbols: list[Expression]) -> Iterator[dict[Expression, Expression]]:
    """Positive fractions first, because most problems are about positive things, then integers and negative ones."""
    for values in (_ABOVE_ONE, _WHOLE, _BELOW_ONE, _NEGATIVE):
        for first in range(len(values)):
            shift = [values[(first + at * _STRIDE) % len(values)] for at in range(len(symbols))]
            # More symbols than values repeat them, moved on so that no two are equal.
            moved = [value + at // len(values) for at, value in enumerate(shift)]
            yield dict(zip(symbols, moved, strict=True))


def _number(expression: Expression, digits: int) -> Expression | None:
    """The value to that many digits, or None if it is not a finite number."""
    value = expression.evalf(digits, maxn=digits * 4)
    if not isinstance(value, sympy.Expr) or not value.is_number or not value.is_finite:
        return None
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    if abs(imaginary) <= abs(real) * _tiny(digits):
        return real
    return value


def _close(one: Expression | None, other: Expression | None, digits: int) -> bool:
    if one is None or other is None:
        return False
    size = max(abs(one), abs(other))
    return bool(size < _tiny(digits) or abs(one - other) <= size * _tiny(digits))


def _tiny(digits: int) -> Expression:
    return sympy.Rational(1, 10 ** (digits - 10))


def _digits(*expressions: Expression) -> tuple[int, ...]:
    """How precisely to compare: sums and integrals that stay are summed up numerically, which is dear."""
    return _DIGITS[:1] if any(expression.has(*_UNFINISHED) for expression in expressions) else _DIGITS


def _exact(expression: Expression) -> Fraction | None:
    """The value as a fraction, if it is one made of numbers of a size that can be written down."""
    if isinstance(expression, sympy.Rational):
        return Fraction(expression.p, expression.q)
    parts = [_exact(part) for part in expression.args]
    if not parts or None in parts:
        return None
    numbers = [part for part in parts if part is not None]
    whole = [part.numerator for part in numbers if part.denominator == 1]
    match expression:
        case sympy.Add():
            return sum(numbers, Fraction(0))
        case sympy.Mul() | sympy.UnevaluatedExpr():
            product = Fraction(1)
            for number in numbers:
                product *= number
            return product
        case sympy.Pow() if numbers[1].denominator == 1:
            base, power = numbers[0], numbers[1].numerator
            bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(power)
            return base**power if bits <= _MOST_BITS and (base or power >= 0) else None
        case sympy.factorial() if whole and 0 <= whole[0] <= _MOST_FACTORIAL:
            return Fraction(factorial(whole[0]))
        case sympy.binomial() if len(whole) == len(numbers) and 0 <= whole[1] <= whole[0] <= _MOST_FACTORIAL:
            return Fraction(comb(*whole))
        case sympy.Abs():
            return abs(numbers[0])
    return None


_CASE_COUNTS = ConversionConfig(lowercase_symbols=False)
_DIGITS = (50, 600)
_ROUNDED_DIGITS = 6
"""Significant digits that a decimal needs to stand for an irrational number or for a longer decimal."""
_ROUNDED_FRACTION_DIGITS = 3
"""The same for a fraction without a finite decimal: ``0.0833`` is how people write 1/12."""
_FLOAT_DIGITS = range(15, 19)
_FLOAT_NOISE = Fraction(1, 10**13)
_ENOUGH_POINTS = 4
_STRIDE = 3
_MOST_BITS = 200_000
_MOST_FACTORIAL = 5_000
_UNFINISHED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)

_ABOVE_ONE = [sympy.Rational(*pair) for pair in ((17, 5), (41, 9), (23, 11), (90, 19), (13, 8), (58, 7), (101, 13))]
_WHOLE = [sympy.Integer(value) for value in (4, 9, 2, 7, 3, 12, 5)]
_BELOW_ONE = [sympy.Rational(*pair) for pair in ((3, 7), (1, 9), (8, 11), (5, 17))]
_NEGATIVE = [sympy.Rational(*pair) for pair in ((-7, 3), (-2, 9), (-31, 8), (-5, 1))]

_OPENING = re.compile(r"[{(\[]")
_CLOSING = re.compile(r"[})\]]")
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?<=\d)(?<!^\.)")
_DECIMAL_PART = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\w.])")
_MIXED = re.compile(r"(?<![\w.}^])(\d+) ?(\\frac\{\d+\}\{\d+\})")
_JUXTAPOSED = re.compile(r"(?<=[\d)]) *(?=[({]|\\binom)|(?<=\)) *(?=\d)")
"""Where the parser would add instead of multiply, taking ``2(3)`` for a mixed number."""
_RESERVED = re.compile(r"(?<![A-Za-z\\])([EeIid])_\{(\w+)\}")
_COMPLEX_UNIT = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
