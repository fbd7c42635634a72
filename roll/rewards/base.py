"""Rewards: texts in, a scalar (or an explained failure) per sample out.

A failure stays with its sample, is counted, and ends the run or not as ``on_error`` says.  Torch-free: workers start
fast.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal

from roll.config.reading.masking import masked_text

FLOAT32_MAX = 3.4028234663852886e38


def finite_number(value: object) -> float | None:
    """The value as a float; None where it is no number, NaN, infinite, or infinite in float32, the type of rewards in a
    batch."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= FLOAT32_MAX else None


MAX_LENGTH = 60  # longer numerals are not answers, and exact arithmetic on them would only cost time

_SIGN = r"[-+−–]?"
CURRENCIES = "".join(sign for sign in map(chr, range(128, 0x2100)) if unicodedata.category(sign) == "Sc")
_MONEY = rf"(?:\\?[${CURRENCIES}]\s?)?"
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
NUMERAL = rf"{_SIGN}{_MONEY}{_SIGN}{_DIGITS}(?:\s?/\s?[0-9][0-9,]*(?![.,]?[0-9]))?"
"""Regular expression of one numeral; :func:`parse_number` reads what it matches."""

_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_POWER = r"(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?([-+]?[0-9]{1,4})\}?"
_PARTS = re.compile(rf"({_SIGN}){_MONEY}({_SIGN})({_DIGITS})(?:\s?/\s?([0-9][0-9,]*)|{_POWER})?\s?(?:\\?%)?")


def parse_number(text: str) -> Fraction | None:
    """The exact value of a numeral, or None if ``text`` is not one.

    A comma must group thousands (``1,234``); a percent sign and a currency sign are dropped, so ``25%`` is 25. A power
    of ten may follow (``3\\times10^{8}``).
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    match = _PARTS.fullmatch(text.rstrip(",").rstrip())
    if match is None:
        return None
    outer, inner, numerator, denominator, power = match.groups()
    if outer and inner:
        return None
    value = _decimal(numerator)
    if value is not None and denominator:
        divisor = _decimal(denominator)
        value = value / divisor if divisor else None
    if value is None:
        return None
    if power is not None:
        value *= Fraction(10) ** int(power)
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


def read_json(value: object) -> Any:
    """The contents of a text that holds a JSON list or object; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A ``score``, or an ``error`` that explains its absence: a failure never looks like a bad answer."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers of this sample, averaged per domain in the log."""
    error: str | None = None

    def __post_init__(self) -> None:
        assert self.score is not None or self.error is not None, "a result needs a score or an error"


@dataclass(slots=True)  # a frozen one takes twice as long to pickle, and the driver sends thousands a step
class RewardSample:
    """One finished response with its prompt and data row."""

    prompt: str  # the prompt as the model saw it, template applied
    response: str  # the decoded response, without special tokens
    ground_truth: Any = None
    finish_reason: str = "stop"  # `stop`, `length` (cut off) or `abort`
    row: dict[str, Any] = field(default_factory=dict)  # all columns of the data row
    num_tokens: int = 0  # length of the response as the model wrote it, end token included
    model_result: RewardResult | None = None  # result of the role `reward_model`; None where the domain does not use it


class RewardFunction(ABC):
    """Scores a batch; called from one thread at a time, in any thread."""

    @abstractmethod
    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. Never raises for what a model has written."""

    def check_host(self) -> None:
        """Called once on the driver's host before anything starts; most rewards run anywhere. Raises
        ``RewardOptionError``: this host does not give what the options ask for."""

    def prepare(self) -> str:
        """Called once in the worker, before the run starts. What it raises ends the run; most rewards need nothing.
        Returns a line about the worker's host, which the driver logs once; empty: nothing to say."""
        return ""

    def close(self) -> None:
        """Release helper processes; the reward is not used again."""


class RewardRule(RewardFunction):
    """A reward that judges one sample at a time. Subclasses are dataclasses: their fields are the rule's options."""

    numbers: ClassVar[tuple[str, ...]] = ()  # names in the `metrics` of every result; empty: unknown
    concurrent_calls: ClassVar[int] = 1
    """Calls in flight at a time, in as many threads: more than one for rewards that wait for others."""
    client_options: ClassVar[tuple[str, ...]] = ()
    """Options that the clients of a reward service may choose; ``*``: all, for rules whose options read no files and no
    environment, and make no connections. Subclasses do not inherit it: their own options may."""

    @abstractmethod
    def judge(self, sample: RewardSample) -> RewardResult: ...

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        return [self.judge(sample) for sample in samples]


def failure(error: str) -> RewardResult:
    return RewardResult(None, {}, masked_text(error))


class RewardOptionError(ValueError):
    """A reward that does not exist, or an option that it does not have or cannot use."""

    component: str | None = None  # the component of the domain that it is about; None: the domain has none
    key = "reward_kwargs"  # the key at fault, of the domain or the component


class RewardNameError(RewardOptionError):
    """A reward that does not exist."""

    key = "worker_cls"


TIMEOUT_MARK = "timeout:"  # marks the error of a sample whose scoring took too long


logger = logging.getLogger(__name__)


class GuardedReward(RewardFunction):
    """Calls a reward; what it raises becomes the error of the sample that it was raised for.

    The first traceback is logged, and so is the first error that the reward reports itself; later ones are counted
    (``error_rate``, ``timeout_rate``).
    """

    def __init__(self, name: str, reward: RewardFunction) -> None:
        self.numbers: tuple[str, ...] = getattr(reward, "numbers", ())
        self._name, self._reward = name, reward
        self._has_raised = self._has_failed = False

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        try:
            results = self._checked(samples)
        except Exception:  # one bad sample must not cost the others their reward: find it
            results = []
            for sample in samples:
                try:
                    results += self._checked([sample])
                except Exception as error:
                    if not self._has_raised:
                        self._has_raised = self._has_failed = True
                        logger.exception("reward %s failed; later failures are counted without a traceback", self._name)
                    results.append(failure(f"{self._name}: {type(error).__name__}: {error}"))
        failed = next((result for result in results if result.error is not None), None)
        if failed is not None and not self._has_failed:
            self._has_failed = True
            logger.warning("reward %s: first failure (later ones are only counted): %s", self._name, failed.error)
        return results

    def _checked(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results = self._reward(samples)
        if len(results) != len(samples):
            raise ValueError(f"returned {len(results)} results for {len(samples)} samples")
        return [
            # Scores become float32 tensors, in which 1e39 is infinite and would reach the advantages.
            failure(f"{self._name}: the score {one.score} is no finite number of float32")
            if one.score is not None and finite_number(one.score) is None
            else one
            for one in results
        ]

    def check_host(self) -> None:
        self._reward.check_host()

    def prepare(self) -> str:
        return self._reward.prepare()

    def close(self) -> None:
        self._reward.close()


OnError = Literal["raise", "mask", "value"]


class RewardError(RuntimeError):
    """A reward failed and the configuration says ``on_error: raise``."""


def apply_on_error(
    results: Sequence[RewardResult], on_error: OnError, error_value: float = 0.0, name: str = "reward"
) -> list[RewardResult]:
    """``mask`` leaves failed samples without a score, ``value`` scores them ``error_value``; both keep the error text.
    Raises ``RewardError``: with ``raise``, for the first failure."""
    failed = [result for result in results if result.error is not None]
    if failed and on_error == "raise":
        raise RewardError(f"{name}: {len(failed)} of {len(results)} samples failed, the first with: {failed[0].error}")
    if on_error == "value":
        return [result if result.error is None else replace(result, score=error_value) for result in results]
    return list(results)


def failure_rates(results: Sequence[RewardResult]) -> dict[str, float]:
    """``error_rate`` (all failures) and ``timeout_rate`` of a batch, 0..1; empty for an empty batch."""
    if not results:
        return {}
    errors = sum(result.error is not None for result in results)
    timeouts = sum(TIMEOUT_MARK in (result.error or "") for result in results)
    return {"error_rate": errors / len(results), "timeout_rate": timeouts / len(results)}
