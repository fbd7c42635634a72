"""Units of numbers: their dimension and their size, for answers and truths that both have one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib import resources

PREFIXES = {
    symbol: (word, power)
    for symbol, word, power in zip(
        "nµumcdhkMGT",
        ["nano", "micro", "micro", "milli", "centi", "deci", "hecto", "kilo", "mega", "giga", "tera"],
        (-9, -6, -6, -3, -2, -1, 2, 3, 6, 9, 12),
        strict=True,
    )
}
"""By their symbols: words and powers of ten."""
Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """``size`` times the product of powers of base units."""

    dimension: Dimension
    size: Fraction
    count: Fraction = Fraction(1)  # number words among them: a dozen, a million
    is_sure: bool = True  # false for a short symbol without `\text` around it, whose letters may be variables


_WITH_PREFIX: dict[str, Unit] = {}
_WITHOUT: dict[str, Unit] = {}
_table = _WITH_PREFIX
for _line in (resources.files("roll.rewards") / "units.table").read_text(encoding="utf-8").splitlines():
    if _line.startswith("#"):
        continue
    if _line.startswith(";"):
        _table = _WITHOUT
        continue
    _names, _, _made_of = _line.partition(" = ")
    _size, *_bases = _made_of.split()
    _powers = [(base.partition("^")[0], int(base.partition("^")[2] or 1)) for base in _bases]
    _table.update(dict.fromkeys(_names.split(), Unit(tuple(sorted(_powers)), Fraction(_size))))
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox|operatorname|textit|rm)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[ ,;:!]|\\q?quad\b|\s+")
_TOKEN = re.compile(
    r"(/)|(\()|(\))|([A-Za-zµΩ°¢€£¥]+(?:-[a-z]+)?|\\circ)(?:\s*\^\s*\{?\s*(-?[0-9]{1,2})\s*\}?|([23])(?![0-9]))?|\s+"
)
_POWERS = (
    (re.compile(r"\b(?:square|sq\.?)\s+([A-Za-z]+)"), r"\1^2"),
    (re.compile(r"\b(?:cubic|cu\.?)\s+([A-Za-z]+)"), r"\1^3"),
    (re.compile(r"\b([A-Za-z]+)\s+squared\b"), r"\1^2"),
    (re.compile(r"\b([A-Za-z]+)\s+cubed\b"), r"\1^3"),
    (re.compile(r"\bper\b"), "/"),
    (re.compile(r"\\cdot|\*"), " "),
    (re.compile(r"\\mu\s*"), "µ"),
    (re.compile(r"\\Omega\b|\u2126"), "Ω"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*"), "°"),
    (re.compile(r"(?:°|\bdegrees?)\s*(C|F)(?:elsius|ahrenheit)?\b"), r"°\1"),
)
LONGEST = 60  # characters of a unit


def _named(name: str) -> Unit | None:
    """The unit of a symbol or word, with a prefix or without."""
    for form in (name, name.lower(), name.lower().removesuffix("s"), name.lower().removesuffix("es")):
        if form != name and len(form) <= 2:
            break
        for table in (_WITHOUT, _WITH_PREFIX):
            if form in table:
                return table[form]
        for symbol, (word, power) in PREFIXES.items():
            for prefix in (symbol, word):
                rest = form.removeprefix(prefix)
                is_word = len(rest) > 3 or rest in ("bit",)
                if rest != form and rest in _WITH_PREFIX and is_word == (len(prefix) > 1):
                    unit = _WITH_PREFIX[rest]
                    return Unit(unit.dimension, unit.size * Fraction(10) ** power)
    return None


def unit_of(text: str) -> Unit | None:
    """The unit that ``text`` (without LaTeX around it) is, such as ``km/h``, ``square meters`` or ``kg m^2``."""
    if not 0 < len(text.strip()) <= LONGEST:
        return None
    for pattern, replacement in _POWERS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".")
    powers: Counter[str] = Counter()
    size, count, sign, depth, position = Fraction(1), Fraction(1), 1, 0, 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
        slash, opening, closing, name, exponent, digit = token.groups()
        depth += bool(opening) - bool(closing)
        if slash:
            sign = -1
        if name:
            unit = _named(name)
            if unit is None:
                return None
            power = sign * int(exponent or digit or 1)
            if unit.dimension:
                size *= unit.size**power
            else:
                count *= unit.size**power
            for base, own in unit.dimension:
                powers[base] += own * power
            sign = sign if depth else 1
    dimension = tuple(sorted((base, power) for base, power in powers.items() if power))
    return Unit(dimension, size, count)


_FRACTION_OF_UNITS = re.compile(
    r"\\d?frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
)
_BEGIN = re.compile(
    r"\x00|(?<=[0-9])(?=[¢°])|\s(?=[A-Za-zµΩ\x00])|\s?\^\s*\{?\s*\\circ|\\(?:Omega|mu)|(?<=[0-9])(?=[a-zA-Z]{2})"
)
_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]{1,12})")
_COMPOUND = re.compile(rf"{_PART.pattern}(?:\s*(?:,|and)?\s*{_PART.pattern}){{1,3}}")


@lru_cache(maxsize=4096)
def quantity(expression: str) -> tuple[str, Unit | None]:
    """The value of an expression and the unit after it (or the currency in front); None: it has none that is known."""
    if len(expression) > 400 or not re.search(r"[0-9)}]|\\pi", expression):
        return expression, None
    text = expression.strip()
    currency = re.match(r"\\?\$\s?(?=[0-9.])|[€£¥]\s?(?=[0-9.])", text)
    if currency and text.count("$") <= 1:
        value, further = quantity(text[currency.end() :])
        unit = _named({"$": "dollar"}.get(currency.group().strip("\\ "), currency.group()[0]))
        return (value, unit) if further is None else (text, None)
    marked = _SPACES.sub(" ", _TEXT.sub("\x00\\1\x00", _FRACTION_OF_UNITS.sub(r"\\text{\1/\2}", text)))
    if (compound := _COMPOUND.fullmatch(marked.replace("\x00", " ").strip())) is not None:
        # "1 hour 30 minutes", in the first of its units
        parts = [(Fraction(number), _named(name)) for number, name in _PART.findall(compound.group())]
        first = parts[0][1]
        if first is None or any(unit is None or unit.dimension != first.dimension for _, unit in parts):
            return compound.group(), None
        return str(sum(number * unit.size for number, unit in parts if unit) / first.size), first
    for found in _BEGIN.finditer(marked):
        value, rest = marked[: found.start()].strip(), marked[found.start() :]
        unit = unit_of(rest.replace("\x00", "").strip())
        if unit is not None and value and re.search(r"[0-9)}i]$", value) and "\x00" not in value:
            if unit.count != 1:
                try:
                    value = str(Fraction(value.replace(",", "")) * unit.count)
                except (ValueError, ZeroDivisionError):
                    value = f"({value})*{unit.count}"
            if not unit.dimension:
                return value, None
            return value, replace(unit, is_sure=re.search(r"\x00|[°¢]|\\circ|[A-Za-z]{4}", rest) is not None)
    return expression, None
