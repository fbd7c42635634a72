"""The process in which mathematical equivalence is decided: requests and verdicts as JSON lines on standard streams.

Run as ``python -m roll.rewards.verifier_child`` by :class:`roll.rewards.math_rule.MathVerifier`.  Symbolic algebra on
what a model wrote may take for ever or eat all memory; here it can be interrupted, limited, and at worst killed, and
the numbers that an expression would make are bounded before it is evaluated."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import signal
import sys
import types
from typing import IO, Any

import sympy  # type: ignore[import-untyped]
from sympy.functions.combinatorial.numbers import bell, catalan, fibonacci, harmonic, lucas  # type: ignore[import-untyped]

MEMORY_LIMIT = 4 * 2**30
"""Bytes of address space."""
ANSWER_SECONDS = 1.0
"""CPU seconds for reading an answer and comparing it, whatever else the machine is doing: right answers take a few
hundredths."""
CPU_GRACE = 5
"""CPU seconds beyond a request's limit after which the kernel ends this process, should nobody be left to do so."""
ANSWER_GRACE = 1
"""The same while an answer is evaluated."""
_RELATION = r"\s*(?:<=?|>=?|\\leq?(?:slant)?|\\geq?(?:slant)?|\\lt|\\gt|≤|≥)\s*"
_CONSTANT = r"(?:[-+]?(?:[0-9.,/^_{}()+\- ]|\\[dt]?frac|\\sqrt|\\pi|\\infty|\\cdot|\\left|\\right)+)"
_SOLVED = re.compile(
    rf"\s*(?:[A-Za-z]{_RELATION}{_CONSTANT}|{_CONSTANT}{_RELATION}[A-Za-z](?:{_RELATION}{_CONSTANT})?)\s*"
)
MAX_SOLVED = 100


class RequestTimeout(BaseException):
    """Wall time is over. Not an ``Exception``, so that the algebra packages' own handlers let it through."""


class AnswerTimeout(BaseException):
    """The CPU time of an answer is over."""


def on_alarm(number: int, frame: types.FrameType | None) -> None:
    raise AnswerTimeout if number == signal.SIGPROF else RequestTimeout


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a package prints must not be taken for a verdict.
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGPROF, on_alarm)
    # Ctrl-C is the parent's affair: it closes our input when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It warns at every call that its own time limit is off, as it is meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Much is loaded at the first comparison: made here, so that no request pays for it out of its own time.
    equivalent("x^2", "x*x", 60.0)
    reply(replies, {"ready": True})
    for line in sys.stdin:
        reply(replies, answer(json.loads(line)))


def reply(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    limit_cpu(request["timeout"] + CPU_GRACE)
    try:
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        try:
            return {"equal": equivalent(request["gold"], request["answer"], min(request["timeout"], ANSWER_SECONDS))}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RequestTimeout:
        return {"timeout": True}
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # any failure of the algebra packages belongs to this sample
        return {"error": f"{type(error).__name__}: {error}"}


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so many further CPU seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def equivalent(gold: str, given: str, cpu_seconds: float) -> bool:
    """True if math-verify takes the two expressions for the same.

    An answer that would make huge numbers, or on which algebra fails or takes longer than ``cpu_seconds``, is not: to
    leave it unjudged would let a policy escape its score.

    Raises:
        ValueError: the ground truth is no expression that it understands.
    """
    from math_verify import parse

    # Their own limits rely on signals too and swallow the interruption; ours is the one that counts.
    truth = parse(boxed(gold), parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground_truth {gold!r} is not a mathematical expression")
    limit_cpu(cpu_seconds + ANSWER_GRACE)
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            return says_the_same(truth, given)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (AnswerTimeout, MemoryError, RecursionError, TooLarge):
        return False


def is_solved_inequality(expression: str) -> bool:
    """True if a single variable stands alone against constants, as in ``x > 2`` and ``-1 \\le x < 3``.

    Such an answer may be compared with an interval.  Any inequality must not be: to repeat the question would be right.
    """
    return len(expression) <= MAX_SOLVED and _SOLVED.fullmatch(expression) is not None


def says_the_same(truth: list[Any], given: str) -> bool:
    """
    Raises:
        TooLarge: evaluating the answer would make numbers far beyond those of the truth.
    """
    from math_verify import parse, verify

    check_spelling(given)
    answer = parse(boxed(given), parsing_timeout=None)
    limit = max(MAX_BITS, 4 * max(height(form, math.inf) for form in truth))
    for form in answer:
        height(form, limit)
    answer = with_imaginary_unit(truth, answer)
    as_set = is_solved_inequality(given)
    return bool(verify(truth, answer, timeout_seconds=None, allow_set_relation_comp=as_set))


def with_imaginary_unit(truth: list[Any], answer: list[Any]) -> list[Any]:
    """The answer with the imaginary unit for the letter i, where the truth is a number and no other letter is in the
    answer."""
    numbers = [form for form in truth if isinstance(form, sympy.Basic)]
    if not numbers or not all(form.is_number for form in numbers):
        return answer
    return [
        form.subs(dict.fromkeys(form.free_symbols, sympy.I))
        if isinstance(form, sympy.Expr) and {letter.name for letter in form.free_symbols} == {"i"}
        else form
        for form in answer
    ]


def boxed(expression: str) -> str:
    return f"\\boxed{{{expression}}}"


MAX_BITS = 200_000.0
"""Of one number: 2^200000, 10^60000, or 17000!."""
BITS_OF_A_TERM = 50.0
"""A term of a power that is multiplied out costs as much: 4,000 of them are the bound."""
MAX_TERMS = 10_000
"""Of a sum or product with numbers as limits."""
MAX_ENTRIES = 400
"""Of a matrix."""
MAX_DEPTH = 30
"""Brackets in brackets: parsing takes exponential time in them."""
_EVALUATED_AT_ONCE = re.compile(r"\\[dt]?binom\s*\{?\s*[0-9]{7}")
"""Types that the parser does not leave as a tree."""

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
    if isinstance(node, sympy.Pow) and isinstance(parts[0], sympy.Add) and parts[0].free_symbols:
        return max(bits[0], BITS_OF_A_TERM * _terms(len(parts[0].args), _magnitude(parts[1], bits[1])))
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
    # Symbols stand for small numbers.
    return 2.0 ** min(bits, 1000.0) if node.is_number else 1.0


def _terms(summands: int, exponent: float) -> float:
    """Terms of a power of a sum, multiplied out; one where the exponent is no number."""
    return math.exp(math.lgamma(exponent + summands) - math.lgamma(exponent + 1) - math.lgamma(summands))


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


if __name__ == "__main__":
    main()
