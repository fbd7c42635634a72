"""Short games of words and numbers: guess the number, a calculator task."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roll.environments.grids import ActionPattern

Step = tuple[str, float, bool, bool, dict[str, Any]]


@dataclass
class GuessNumber:
    """A secret number of a range; every guess is answered with ``higher``, ``lower`` or ``right``."""

    instant: ClassVar[bool] = True
    min_number: int = 1
    max_number: int = 20
    max_steps: int = 10
    format_penalty: float = 0.0
    action_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.min_number >= self.max_number:
            raise ValueError(
                f"max_number of guess_number must be above min_number ({self.min_number}), got {self.max_number}"
            )
        self._pattern = ActionPattern(self.action_pattern)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.secret = random.Random(f"guess_number/{seed}").randint(self.min_number, self.max_number)
        self.low, self.high, self._steps = self.min_number, self.max_number, 0
        return f"Guess a number from {self.low} to {self.high}.", {"state": self._state}

    def step(self, action: str) -> Step:
        self._steps += 1
        text = self._pattern.find(action) or ""
        guess = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if guess is None or not self.min_number <= guess <= self.max_number:
            guess, answer = None, f"Not a number from {self.min_number} to {self.max_number}."
        elif guess == self.secret:
            answer = "right"
        elif guess < self.secret:
            self.low, answer = max(self.low, guess + 1), "higher"
        else:
            self.high, answer = min(self.high, guess - 1), "lower"
        success = guess == self.secret
        reward = float(success) + (self.format_penalty if guess is None else 0.0)
        info = {"success": success, "valid": guess is not None, "state": self._state}
        return answer, reward, success, not success and self._steps >= self.max_steps, info

    def sample_action(self, rng: random.Random) -> str:
        return str(rng.randint(self.min_number, self.max_number))

    @property
    def _state(self) -> str:
        """The numbers that the guesses so far leave possible."""
        return f"{self.low}-{self.high}"


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MAX_EXPRESSION = 64


def calculate(expression: str) -> int:
    """The value of whole numbers with ``+ - *`` and brackets.

    Raises:
        ValueError: anything else, or a text of more than 64 characters.
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"an expression has at most {_MAX_EXPRESSION} characters, got {len(expression)}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an expression of whole numbers with + - * and brackets") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)!r} is not an expression of whole numbers with + - * and brackets")


@dataclass
class Calculator:
    """An arithmetic question; ``calc EXPRESSION`` uses the calculator, ``#### n`` is the final answer."""

    instant: ClassVar[bool] = True
    digits: int = 2
    """Of both numbers."""
    operators: Sequence[str] = ("+", "-", "*")
    max_steps: int = 3
    format_penalty: float = 0.0
    action_pattern: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise ValueError(f"digits of calculator must lie in 1..9, got {self.digits}")
        if not self.operators or not set(self.operators) <= set("+-*"):
            raise ValueError(f"operators of calculator are some of + - *, got {list(self.operators)}")
        self._pattern = ActionPattern(self.action_pattern)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        rng = random.Random(f"calculator/{seed}")
        low, high = (10 ** (self.digits - 1), 10**self.digits - 1) if self.digits > 1 else (0, 9)
        self.expression = f"{rng.randint(low, high)}{rng.choice(list(self.operators))}{rng.randint(low, high)}"
        self.answer, self._steps, self._uses = calculate(self.expression), 0, 0
        return f"What is {self.expression} ?", {"state": self.expression}

    def step(self, action: str) -> Step:
        self._steps += 1
        text = self._pattern.find(action) or ""
        last = self._steps >= self.max_steps
        if text.startswith("calc "):
            self._uses += 1
            try:
                result, valid = str(calculate(text.removeprefix("calc "))), True
            except ValueError:
                result, valid = "error", False
            penalty = 0.0 if valid else self.format_penalty
            return result, penalty, False, last, self._info(False, valid, f"{self.expression}={result}")
        final = re.fullmatch(r"#### (-?[0-9]{1,30})", text)
        if final is None:
            hint = "Answer with #### n, or calc EXPRESSION."
            return hint, self.format_penalty, False, last, self._info(False, False)
        success = int(final[1]) == self.answer
        return "", float(success), True, False, self._info(success, True)

    def sample_action(self, rng: random.Random) -> str:
        return rng.choice([f"calc {self.expression}", f"#### {rng.randint(-99, 9999)}"])

    def _info(self, success: bool, valid: bool, state: str | None = None) -> dict[str, Any]:
        info = {"success": success, "valid": valid, "state": state or self.expression}
        return info | {"metrics": {"tool_uses": float(self._uses)}, "metrics_agg_mode": {"tool_uses": "last"}}
