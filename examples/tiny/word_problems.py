"""Three-step word problems in the manner of GSM8K, their worked solutions, and demonstrations that make mistakes.

"Leo has 3 bags with 7 stamps in each. Zoe takes 9 of them. Dan gives Leo 3 more. How many stamps does Leo have now?"
is worked as ``3*7=21``, ``21-9=12``, ``12+3=15``, ``#### 15``, a line each.  Operands are 2..9 and every intermediate
result is 1..99.  A problem's (operators, operands) belong either to training or to validation, decided by a hash, so
validation never asks for a calculation that training has shown.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

NAMES = ("Mia", "Tom", "Ada", "Ben", "Eva", "Leo", "Zoe", "Sam", "Ivy", "Max", "Amy", "Dan")
ITEMS = ("apples", "books", "coins", "cards", "eggs", "pens", "shells", "stamps")
OPENINGS = {
    "*": ("{name} buys {a} boxes of {b} {item}.", "{name} has {a} bags with {b} {item} in each."),
    "+": ("{name} has {a} {item} and buys {b} more.", "{name} has {a} {item} and finds {b} more."),
}
EVENTS = {
    "+": ("{other} gives {name} {x} more.", "Then {name} finds {x} more."),
    "-": ("Then {name} sells {x}.", "{other} takes {x} of them."),
}
QUESTION = "How many {item} does {name} have now?"
STEPS = 3
SMALLEST_OPERAND, LARGEST_OPERAND = 2, 9
RESULT_LIMIT = 100
VALIDATION_SHARE = 10
"""One of this many calculations is set aside for validation."""
SLIPS = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True)
class WordProblem:
    question: str
    operators: tuple[str, ...]
    operands: tuple[int, ...]
    """One more than ``operators``."""

    @property
    def answer(self) -> int:
        return self.results[-1]

    @property
    def results(self) -> list[int]:
        """The result of each step."""
        total, results = self.operands[0], []
        for operator, operand in zip(self.operators, self.operands[1:], strict=True):
            total = apply(total, operator, operand)
            results.append(total)
        return results

    @property
    def is_validation(self) -> bool:
        key = "".join(self.operators) + ",".join(map(str, self.operands))
        return zlib.crc32(key.encode()) % VALIDATION_SHARE == 0


def apply(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def draw_problem(rng: random.Random) -> WordProblem:
    """One problem whose intermediate results are all within 1..99."""
    while True:
        operators = (rng.choice("*+"), *(rng.choice("+-") for _ in range(STEPS - 1)))
        operands = tuple(rng.randint(SMALLEST_OPERAND, LARGEST_OPERAND) for _ in range(STEPS + 1))
        problem = WordProblem("", operators, operands)
        if all(0 < result < RESULT_LIMIT for result in problem.results):
            return WordProblem(_tell(operators, operands, rng), operators, operands)


def _tell(operators: tuple[str, ...], operands: tuple[int, ...], rng: random.Random) -> str:
    name, *others = rng.sample(NAMES, STEPS + 1)
    item = rng.choice(ITEMS)
    sentences = [rng.choice(OPENINGS[operators[0]]).format(name=name, a=operands[0], b=operands[1], item=item)]
    for operator, operand, other in zip(operators[1:], operands[2:], others, strict=False):
        sentences.append(rng.choice(EVENTS[operator]).format(name=name, other=other, x=operand))
    sentences.append(QUESTION.format(name=name, item=item))
    return " ".join(sentences)


def draw_problems(count: int, seed: int, *, validation: bool) -> list[WordProblem]:
    """``count`` problems with different questions, all of the training or all of the validation part."""
    rng = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    while len(problems) < count:
        problem = draw_problem(rng)
        if problem.is_validation == validation:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def solution(problem: WordProblem) -> str:
    """The worked solution, without a mistake."""
    return demonstration(problem, random.Random(0), slip_probability=0.0)


def demonstration(problem: WordProblem, rng: random.Random, slip_probability: float) -> str:
    """A worked solution in which each step's result is wrong with ``slip_probability``; later steps build on it."""
    total, lines = problem.operands[0], []
    for operator, operand in zip(problem.operators, problem.operands[1:], strict=True):
        result = apply(total, operator, operand)
        if slip_probability and rng.random() < slip_probability:
            result = max(0, result + rng.choice(SLIPS))
        lines.append(f"{total}{operator}{operand}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"])
