r"""Bounds on the numbers that evaluating an expression would make, found without evaluating it.

math-verify's parser leaves ``9^{9^{9^9}}`` and ``99999999!`` as trees; comparing them computes the numbers.  The height
of a tree bounds the bits of these numbers from above: a few additions instead of a few hours.
"""

from __future__ import annotations

import math
import re
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.functions.combinatorial.numbers import bell, catalan, fibonacci, harmonic, lucas  # type: ignore[import-untyped]

MAX_BITS = 200_000.0
"""Of one number: 2^200000, 10^60000, or 17000!."""
MAX_TERMS = 10_000
"""Of a sum or product with numbers as limits."""
MAX_ENTRIES = 400
"""Of a matrix."""
MAX_DEPTH = 30
"""Brackets in brackets: parsing takes exponential time in them."""
_EVALUATED_AT_ONCE = re.compile(r"\\[dt]?binom\s*\{?\s*[0-9]{7}")
"""What the parser does not leave as a tree."""

_GROWING = (
    sympy.factorial,
    sympy.factorial2,
    sympy.subfactorial,
    sympy.gamma,
    fibonacci,
    lucas,
    bell,
    catalan,
    harmonic,
)
_FACTORIALS_OF_TWO = (sympy.RisingFactorial, sympy.FallingFactorial)
_ITERATED = (sympy.Sum, sympy.Product)


class TooLarge(Exception):
    """Evaluating the expression would make numbers beyond the bounds."""


def check_spelling(expression: str) -> None:
    """
    Raises:
        TooLarge: parsing alone would take too long.
    """
    depth = deepest = 0
    for character in expression:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or _EVALUATED_AT_ONCE.search(expression):
        raise TooLarge


def height(expression: Any, limit: float = MAX_BITS) -> float:
    """An upper bound in bits on numerator and denominator of every number in the value of ``expression``.

    A symbol counts 0 bits, a function such as sine what its argument counts.

    Raises:
        TooLarge: a part is beyond ``limit``.
    """
    bits = _height(expression, limit)
    if bits > limit:
        raise TooLarge
    return bits


def _height(node: Any, limit: float) -> float:
    if isinstance(node, sympy.Rational):
        return math.log2(max(abs(node.p), node.q))
    if isinstance(node, sympy.Float):
        return abs(float(sympy.log(abs(node), 2))) if node else 0.0
    if isinstance(node, sympy.MatrixBase) and len(node) > MAX_ENTRIES:
        raise TooLarge
    if not isinstance(node, sympy.Basic | sympy.MatrixBase) or isinstance(node, sympy.Symbol):
        return 0.0
    if isinstance(node, sympy.NumberSymbol):
        return 2.0
    parts = list(node) if isinstance(node, sympy.MatrixBase) else list(node.args)
    bits = [height(part, limit) for part in parts]
    if isinstance(node, sympy.Pow):
        return max(bits[0], float(isinstance(parts[0], sympy.MatrixBase))) * _magnitude(parts[1], bits[1])
    if isinstance(node, sympy.exp):
        return 2.0 * _magnitude(parts[0], bits[0])
    if isinstance(node, _GROWING):
        number = _magnitude(parts[0], bits[0])
        return number * math.log2(number + 1)
    if isinstance(node, _FACTORIALS_OF_TWO):
        return _magnitude(parts[1], bits[1]) * (max(bits) + 1)
    if isinstance(node, sympy.binomial):
        return min(_magnitude(parts[0], bits[0]), _magnitude(parts[1], bits[1]) * (bits[0] + 1))
    if isinstance(node, _ITERATED):
        return _iterated(node, limit)
    # The bits of a sum of fractions add up as those of a product do.
    return sum(bits) + len(bits) - 1 if isinstance(node, sympy.Add | sympy.Mul) else max(bits, default=0.0)


def _magnitude(node: Any, bits: float) -> float:
    """An upper bound on the absolute value."""
    if isinstance(node, sympy.Rational):
        return abs(node.p) / node.q
    # Symbols stand for small numbers: (x + y)^n is not expanded.
    return 2.0 ** min(bits, 1000.0) if node.is_number else 1.0


def _iterated(node: Any, limit: float) -> float:
    """Bits of all terms together; an infinite range is left to the algebra."""
    terms = 1.0
    for _, low, high in node.limits:
        if low.is_infinite or high.is_infinite:
            continue
        terms *= _magnitude(low, height(low, limit)) + _magnitude(high, height(high, limit)) + 1
    if terms > MAX_TERMS:
        raise TooLarge
    return terms * (height(node.function, limit) + 1)
