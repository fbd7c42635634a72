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
from itertools import accumulate, chain
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.functions.combinatorial.numbers import bell, catalan, fibonacci, harmonic, lucas  # type: ignore[import-untyped]

MEMORY_LIMIT = 4 * 2**30  # bytes of address space
ANSWER_SECONDS = 1.0
"""CPU seconds for reading an answer and comparing it, whatever else the machine is doing: right answers take a few
hundredths."""
CPU_GRACE = 5
"""CPU seconds beyond a request's limit after which the kernel ends this process, should nobody be left to do so."""
ANSWER_GRACE = 1  # the same while an answer is evaluated
_RELATION = r"\s*(?:\\neq?\b|<=?|>=?|\\leq?(?:slant)?|\\geq?(?:slant)?|\\lt|\\gt|≤|≥)\s*"
_CONSTANT = r"(?:[-+]?(?:[0-9.,/^_{}()+\- ]|\\[dt]?frac|\\sqrt|\\pi|\\infty|\\cdot|\\left|\\right)+)"
_SOLVED = re.compile(
    rf"\s*(?:[A-Za-z]{_RELATION}{_CONSTANT}|{_CONSTANT}{_RELATION}[A-Za-z](?:{_RELATION}{_CONSTANT})?)\s*"
)
MAX_SOLVED = 100
_SPACE = r"(?:\\[ ,;:!]|\\q?quad|\s)*"
_JOINED = rf"(?:\\(?:text|mathrm)\s*\{{)?{_SPACE}\b%s\b{_SPACE}\}}?"
_OR = re.compile(_JOINED % "or" + r"|\\(?:lor|vee)\b")
_AND = re.compile(_JOINED % "and" + r"|\\(?:land|wedge)\b|,")


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
    from math_verify import grader

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGPROF, on_alarm)
    # Ctrl-C is the parent's affair: it closes our input when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It warns at every call that its own time limit is off, as it is meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grader.sympy_numeric_eq = equal_numbers
    # Much is loaded at the first comparison: made here, so that no request pays for it out of its own time.
    equivalent("x^2", "x*x", 60.0)
    ready: dict[str, Any] = {"ready": True}
    for message in chain([ready], map(answer, map(json.loads, sys.stdin))):
        replies.write(json.dumps(message) + "\n")
        replies.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    # Signals are handled between bytecodes only: a C call of the algebra that never returns is ended by the kernel.
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
    leave it unjudged would let a policy escape its score. Raises ``ValueError``: the ground truth is no expression that
    it understands.
    """
    from math_verify import parse

    # Their own limits rely on signals too and swallow the interruption; ours is the one that counts.
    truth = parse(boxed(gold), parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground_truth {gold!r} is not a mathematical expression")
    # Tighter from here on: the truth has been read, and what the kernel ends now is the evaluation of the answer.
    limit_cpu(cpu_seconds + ANSWER_GRACE)
    try:
        # CPU time, not wall time: on a busy machine a right answer must not be judged wrong for waiting.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            return says_the_same(joined_inequalities(gold) or truth, given)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (AnswerTimeout, MemoryError, RecursionError, TooLarge):
        return False


def is_solved_inequality(expression: str) -> bool:
    """True if a single variable is compared with constants, as in ``x > 2`` and ``-1 \\le x < 3``.

    Such an answer may be compared with an interval.  Any inequality must not be: to repeat the question would be right.
    """
    return len(expression) <= MAX_SOLVED and _SOLVED.fullmatch(expression) is not None


def says_the_same(truth: list[Any], given: str) -> bool:
    """Compare an answer with the forms of a truth. Raises ``TooLarge``: parsing the answer would take too long, or
    evaluating it make numbers far beyond those of the truth."""
    from math_verify import parse, verify

    depths = accumulate((character in "([{") - (character in ")]}") for character in given)
    if max(depths, default=0) > MAX_DEPTH or _EVALUATED_AT_ONCE.search(given):
        raise TooLarge
    answer = joined_inequalities(given) or parse(boxed(given), parsing_timeout=None)
    limit = max(MAX_BITS, 4 * max(height(form, math.inf) for form in truth))
    for form in answer:
        height(form, limit)
    truth, answer = [exact(form) for form in truth], [exact(form) for form in answer]
    if any(isinstance(form, sympy.MatrixBase) for form in truth) != any(
        isinstance(form, sympy.MatrixBase) for form in answer
    ):
        # A row or a column is compared as a tuple where the other side is none.
        truth, answer = (
            [sympy.Tuple(*form) if isinstance(form, sympy.MatrixBase) and 1 in form.shape else form for form in forms]
            for forms in (truth, answer)
        )
    # The letter i is the imaginary unit where neither side has another letter.
    forms = [*truth, *answer]
    if {letter.name for form in forms for letter in getattr(form, "free_symbols", ())} == {"i"}:
        truth, answer = (
            [
                form.subs(dict.fromkeys(form.free_symbols, sympy.I)) if isinstance(form, sympy.Expr) else form
                for form in side
            ]
            for side in (truth, answer)
        )
    as_set = is_solved_inequality(given)
    return bool(verify(truth, answer, timeout_seconds=None, allow_set_relation_comp=as_set))


def exact(form: object) -> Any:
    """The form with the decimal fractions that are written in it, in place of floating-point numbers, and odd roots of
    powers as powers, since they are real ones."""
    if isinstance(form, sympy.Rel):
        return form.func(exact(form.lhs), exact(form.rhs), evaluate=False)
    if not isinstance(form, sympy.Basic | sympy.MatrixBase):
        return form
    decimal: Any = form.xreplace({number: sympy.Rational(str(number)) for number in form.atoms(sympy.Float)})
    roots = [
        power
        for power in decimal.atoms(sympy.Pow)
        if power.exp.is_Rational and power.exp.q % 2 and power.base.is_Pow and power.base.exp.is_Integer
    ]
    return decimal.xreplace({power: power.base.base ** (power.base.exp * power.exp) for power in roots})


_TURN = (4 * sympy.I - 3) / sympy.Integer(5)
POINTS = [
    (sympy.Rational(71, 97), -sympy.Rational(17, 9)),
    (-sympy.Rational(411, 97), -sympy.Rational(5, 8)),
    ((53 + 40 * sympy.I) / sympy.Integer(97), _TURN),
    ((-61 - 45 * sympy.I) / sympy.Integer(89), 1 / _TURN),
]
"""Values of a first letter, and factors for each further one. Two functions without jumps that agree at all of them are
the same: branches of roots and logarithms differ at one."""
_JUMPING = (sympy.floor, sympy.ceiling, sympy.sign, sympy.Max, sympy.Min, sympy.Piecewise, sympy.Mod)
DIGITS = 100  # digits in which numbers that are no fractions are compared


def equal_numbers(gold: Any, given: Any, *_: int) -> bool:
    """Exact where both are fractions; irrational numbers agree in all of :data:`DIGITS` digits, or up to rounding where
    they cancel. In place of math-verify's comparison, in which all numbers below 1e-15 are equal."""
    from math_verify import grader

    if all(isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) for one in (gold, given)):
        gold, given = grader.safe_sympy_doit(gold), grader.safe_sympy_doit(given)
        if not all(isinstance(one, sympy.MatrixBase) for one in (gold, given)) or gold.shape != given.shape:
            return False
        return all(equal_numbers(one, other) for one, other in zip(gold.flat(), given.flat(), strict=True))
    gold, given = grader.safe_sympy_doit(gold), grader.safe_sympy_doit(given)
    if not all(isinstance(one, sympy.Expr) for one in (gold, given)):
        return False
    if gold == given or (gold.is_Rational and given.is_Rational):
        return bool(gold == given)
    letters = sorted(gold.free_symbols, key=str)
    if letters:
        return (
            given.free_symbols == set(letters)
            and not (gold.has(*_JUMPING) or given.has(*_JUMPING))
            and all(
                equal_values(gold.subs(point), given.subs(point))
                for point in ({letter: x * turn**k for k, letter in enumerate(letters)} for x, turn in POINTS)
            )
        )
    return bool(gold.is_number and given.is_number) and equal_values(gold, given)


def equal_values(gold: Any, given: Any) -> bool:
    values = [one.evalf(DIGITS) for one in (gold, given)]
    if not all(value.is_number and value.is_finite for value in values):
        return False
    size = max(abs(value) for value in values)
    # What cancels to zero is left with hardly a digit.
    return bool(abs(values[0] - values[1]) <= size * sympy.Float(10, DIGITS) ** (10 - DIGITS))


def joined_inequalities(given: str) -> list[Any]:
    """The set of ``x < 1 or x > 2``, or of ``x > 1 and x < 2``; empty for anything but solved inequalities of one
    variable."""
    from math_verify import grader, parse

    for separator, join in ((_OR, sympy.Union), (_AND, sympy.Intersection)):
        parts = separator.split(given)
        if len(parts) < 2 or not all(map(is_solved_inequality, parts)):
            continue
        forms = [form for part in parts for form in parse(boxed(part), parsing_timeout=None)[:1]]
        relations = [exact(form) for form in forms if grader.is_relation(form)]
        if len(relations) == len(parts) and len({letter for one in relations for letter in one.free_symbols}) == 1:
            return [join(*(one.as_set() for one in relations))]
    return []


def boxed(expression: str) -> str:
    return f"\\boxed{{{expression}}}"


MAX_BITS = 200_000.0  # most of one number: 2^200000, 10^60000, or 17000!
BITS_OF_A_TERM = 50.0  # a term of a power that is multiplied out costs as much: 4,000 of them are the bound
MAX_TERMS = 10_000  # most terms of a sum or product with numbers as limits
MAX_ENTRIES = 400  # most entries of a matrix
MAX_DEPTH = 30  # brackets in brackets: parsing takes exponential time in them
_EVALUATED_AT_ONCE = re.compile(r"\\[dt]?binom\s*\{?\s*[0-9]{7}")  # types that the parser does not leave as a tree

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


class TooLarge(Exception):
    """Evaluating the expression would make numbers beyond the bounds."""


def height(expression: object, limit: float = MAX_BITS) -> float:
    """An upper bound in bits on numerator and denominator of every number in the value; at most ``limit``. Raises
    ``TooLarge``: a part is beyond ``limit``."""
    bits = _height(expression, limit)
    if bits > limit:
        raise TooLarge
    return bits


def _height(node: object, limit: float) -> float:
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
        # Terms of a power of a sum, multiplied out; one where the exponent is no number.
        summands, exponent = len(parts[0].args), _magnitude(parts[1], bits[1])
        terms = math.lgamma(exponent + summands) - math.lgamma(exponent + 1) - math.lgamma(summands)
        return max(bits[0], BITS_OF_A_TERM * math.exp(terms))
    if isinstance(node, sympy.Pow):
        return max(bits[0], float(isinstance(parts[0], sympy.MatrixBase))) * _magnitude(parts[1], bits[1])
    if isinstance(node, sympy.exp):
        return 2.0 * _magnitude(parts[0], bits[0])
    if isinstance(node, _GROWING):
        number = _magnitude(parts[0], bits[0])
        return number * math.log2(number + 1)
    if isinstance(node, sympy.RisingFactorial | sympy.FallingFactorial):
        return _magnitude(parts[1], bits[1]) * (max(bits) + 1)
    if isinstance(node, sympy.binomial):
        return min(_magnitude(parts[0], bits[0]), _magnitude(parts[1], bits[1]) * (bits[0] + 1))
    if isinstance(node, sympy.Sum | sympy.Product):
        return _iterated(node, limit)
    # The bits of a sum of fractions add up as those of a product do.
    return sum(bits) + len(bits) - 1 if isinstance(node, sympy.Add | sympy.Mul) else max(bits, default=0.0)


def _magnitude(node: sympy.Basic, bits: float) -> float:
    if isinstance(node, sympy.Rational):
        return abs(node.p) / node.q
    # Symbols count as small numbers.
    return 2.0 ** min(bits, 1000.0) if node.is_number else 1.0


def _iterated(node: sympy.Basic, limit: float) -> float:
    """Bits of all terms together; an infinite range is left to the algebra."""
    terms = 1.0
    for _, low, high in node.limits:
        if not (low.is_infinite or high.is_infinite):
            terms *= _magnitude(low, height(low, limit)) + _magnitude(high, height(high, limit)) + 1
    if terms > MAX_TERMS:
        raise TooLarge
    return terms * (height(node.function, limit) + 1)


if __name__ == "__main__":
    main()
