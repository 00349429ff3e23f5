"""Units of measurement in answers: read one, and say how many of another it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["PERCENT", "Unit", "is_unit_word", "read_unit"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of base units, and how many of that product it is."""

    factor: Fraction
    powers: tuple[tuple[str, int], ...]
    """Base units by name with their powers, sorted, none of them 0."""


PERCENT = Unit(Fraction(1, 100), (("percent", 1),))
"""The hundredth. It has a dimension of its own because leaving it out is not the same as leaving out a unit."""


def read_unit(text: str) -> Unit | None:
    r"""Read ``cm``, ``square feet``, ``km/h``, ``m^{2}`` or ``apples``; None if the words are not a unit.

    A word that is in no table is a base unit of its own, in the singular.
    """
    text = _SPEEDS.sub(lambda found: _SPEED_UNITS[found.group()], text)
    tokens = _TOKEN.findall(text)
    if not tokens or len(tokens) > _MOST_TOKENS or _TOKEN.sub("", text).strip(" .-"):
        return None
    factor = Fraction(1)
    powers: dict[str, int] = {}
    sign, prefix = 1, 1
    last: tuple[str, Fraction, int] | None = None
    for token in tokens:
        lower = token.lower()
        if lower in _STOP_WORDS:
            return None
        if token in {"/", "per"}:
            sign, last = -1, None
        elif lower in _PREFIXES:
            prefix = _PREFIXES[lower]
        elif token[0] == "^" or lower in _SUFFIXES:
            power = _SUFFIXES.get(lower) or int(token.strip("^{}"))
            if last is None:
                return None
            base, value, before = last
            factor *= value ** (before * (power - 1))
            powers[base] += before * (power - 1)
        else:
            base, value = _base(token)
            last = (base, value, sign * prefix)
            factor *= value ** (sign * prefix)
            powers[base] = powers.get(base, 0) + sign * prefix
            prefix = 1
    return Unit(factor, tuple(sorted((base, power) for base, power in powers.items() if power)))


def is_unit_word(word: str) -> bool:
    """Whether a word is the name or the symbol of a unit that the table knows."""
    return word in _SYMBOLS or word in _SPEED_UNITS or _singular(word.lower()) in _NAMES


def _base(word: str) -> tuple[str, Fraction]:
    if word in _SYMBOLS:
        return _NAMES[_SYMBOLS[word]]
    name = _singular(word.lower().strip("."))
    return _NAMES.get(name, (name, Fraction(1)))


def _singular(word: str) -> str:
    word = _IRREGULAR.get(word, word)
    if word in _NAMES or len(word) < 4 or word.endswith("ss"):
        return word
    if word.endswith("s") and word[:-1] in _NAMES:
        return word[:-1]
    return word.removesuffix("es") if word.endswith(("ches", "shes", "xes")) else word.removesuffix("s")


_MOST_TOKENS = 6
_TOKEN = re.compile(r"[^\W\d_]+\.?|/|\^(?:\{-?\d\}|-?\d)")
_STOP_WORDS = frozenset(
    {"a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "if", "is", "it", "mod", "no", "not", "of"}
    | {"only", "or", "than", "the", "to", "when", "where", "with"}
)
_SPEED_UNITS = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour"}
_SPEEDS = re.compile(r"\b(?:mph|kph|kmh|kmph)\b")
_PREFIXES = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}
_IRREGULAR = {
    "feet": "foot", "inches": "inch", "metre": "meter", "metres": "meter", "litre": "liter", "litres": "liter",
}  # fmt: skip

_NAMES: dict[str, tuple[str, Fraction]] = {
    name: (base, Fraction(factor))
    for name, base, factor in (
        ("meter", "meter", "1"),
        ("millimeter", "meter", "0.001"),
        ("centimeter", "meter", "0.01"),
        ("kilometer", "meter", "1000"),
        ("inch", "meter", "0.0254"),
        ("foot", "meter", "0.3048"),
        ("yard", "meter", "0.9144"),
        ("mile", "meter", "1609.344"),
        ("gram", "gram", "1"),
        ("milligram", "gram", "0.001"),
        ("kilogram", "gram", "1000"),
        ("pound", "pound", "1"),
        ("ounce", "pound", "1/16"),
        ("second", "second", "1"),
        ("minute", "second", "60"),
        ("hour", "second", "3600"),
        ("day", "second", "86400"),
        ("week", "second", "604800"),
        ("month", "month", "1"),
        ("year", "year", "1"),
        ("liter", "liter", "1"),
        ("milliliter", "liter", "0.001"),
        ("dollar", "dollar", "1"),
        ("cent", "dollar", "0.01"),
        ("degree", "degree", "1"),
        ("radian", "radian", "1"),
        ("percent", "percent", "0.01"),
        ("unit", "unit", "1"),
    )
}
_SYMBOLS = {
    "m": "meter", "mm": "millimeter", "cm": "centimeter", "km": "kilometer", "in": "inch", "ft": "foot", "yd": "yard",
    "mi": "mile", "g": "gram", "mg": "milligram", "kg": "kilogram", "lb": "pound", "lbs": "pound", "oz": "ounce",
    "s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "L": "liter",
    "l": "liter", "mL": "milliliter", "ml": "milliliter", "deg": "degree", "rad": "radian", "USD": "dollar",
    "pct": "percent", "percentage": "percent",
}  # fmt: skip
