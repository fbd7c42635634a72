"""Numbers as people and models write them: ``1,234``, ``$72``, ``72.``, ``-3.50``, ``1/2``, ``25%``."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 60
"""Longer numerals are not answers, and exact arithmetic on them would only cost time."""

_SIGN = r"[-+−–]?"
_MONEY = r"(?:\\?[$€£¥]\s?)?"
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
NUMERAL = rf"{_SIGN}{_MONEY}{_SIGN}{_DIGITS}(?:\s?/\s?[0-9][0-9,]*(?![.,]?[0-9]))?"
"""Regular expression of one numeral; :func:`parse_number` reads what it matches."""

_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_PARTS = re.compile(rf"({_SIGN}){_MONEY}({_SIGN})({_DIGITS})(?:\s?/\s?([0-9][0-9,]*))?\s?(?:\\?%)?")


def parse_number(text: str) -> Fraction | None:
    """The exact value of a numeral, or None if ``text`` is not one.

    A comma must group thousands (``1,234``); a percent sign and a currency sign are dropped, so ``25%`` is 25.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    match = _PARTS.fullmatch(text.rstrip(",").rstrip())
    if match is None:
        return None
    outer, inner, numerator, denominator = match.groups()
    if outer and inner:
        return None
    value = _decimal(numerator)
    if value is not None and denominator:
        divisor = _decimal(denominator)
        value = value / divisor if divisor else None
    if value is None:
        return None
    return -value if (outer or inner) in ("-", "−", "–") else value


def _decimal(digits: str) -> Fraction | None:
    whole, _, decimals = digits.rstrip(",").partition(".")
    if "," in whole:
        if _GROUPED.fullmatch(whole) is None:
            return None
        whole = whole.replace(",", "")
    if not decimals:
        return Fraction(int(whole or "0"))
    scale = 10 ** len(decimals)
    return Fraction(int(whole or "0") * scale + int(decimals), scale)
