"""From a judge's answer to a number: rules that find the score, its bounds, and its place between 0 and 1."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]

from roll.rewards.base import RewardOptionError
from roll.rewards.extraction import after_thought, last_boxed
from roll.rewards.judge.verdicts import Score, read_score, stated_score, stated_word
from roll.rewards.numerals import parse_number

MAX_ANSWER = 50_000
"""Characters at the end of an answer that are looked at."""
MAX_OBJECTS = 1_000
"""Braces tried as the beginning of a JSON object."""
PATTERN_SECONDS = 1.0
CUT = frozenset({"length", "content_filter", "abort"})
"""Finish reasons of answers that did not come to their end."""


class NoScore(ValueError):
    """The answer has no score in the form that was asked for."""


@dataclass(frozen=True)
class ScoreReader:
    """How the score is found; see ``extract`` of :class:`roll.rewards.judge.rule.LLMJudge`."""

    extract: str
    pattern: str = ""
    json_field: str = "score"
    positive: str = "Yes"
    negative: str = "No"
    min_score: float | None = None
    max_score: float | None = None
    rescale: bool = True

    def __post_init__(self) -> None:
        low, high = self.min_score, self.max_score
        if low is not None and high is not None and low >= high:
            raise RewardOptionError(f"min_score = {low:g}: must be less than max_score {high:g}")
        if self.extract == "regex":
            check_pattern(self.pattern)
        elif self.pattern:
            raise RewardOptionError(f"score_pattern belongs to extract: regex, not to {self.extract}")

    def read(self, choice: Mapping[str, Any]) -> tuple[float, float]:
        """The score, and the number as the judge wrote it.

        Args:
            choice: one of the ``choices`` of a chat completion.

        Raises:
            NoScore: none is found, or it is out of bounds.
        """
        if self.extract == "logprob":
            raw = probability(choice, self.positive, self.negative)
        else:
            raw = self._find(answer_text(choice), choice.get("finish_reason") in CUT)
        low, high = self.min_score, self.max_score
        if (low is not None and raw < low) or (high is not None and raw > high):
            raise NoScore(f"the judge's score {raw:g} is not between {low} and {high}")
        if self.rescale and low is not None and high is not None:
            return (raw - low) / (high - low), raw
        return raw, raw

    def _find(self, text: str, is_cut: bool) -> float:
        found = {
            "yes_no": lambda: stated_word(text, self.positive, self.negative, is_cut),
            "number": lambda: self._on_scale(stated_score(text, is_cut)),
            "boxed": lambda: self._value(last_boxed(text)),
            "json": lambda: self._value(json_value(text, self.json_field)),
            "regex": lambda: self._value(last_match(self.pattern, text, is_cut)),
        }[self.extract]()
        if found is None:
            why = "; it was cut off: give it more max_tokens" if is_cut else ""
            raise NoScore(f"no score ({self.extract}) in the judge's answer {shortened(text)!r}{why}")
        return float(found)

    def _on_scale(self, score: Score | None) -> float | None:
        """The number as it was written.

        Raises:
            NoScore: it belongs to another scale than the one that was asked for.
        """
        if score is None:
            return None
        if self.max_score is not None and score.scale not in (None, self.max_score):
            scales = f"on a scale of {score.scale:g}, not of max_score {self.max_score:g}"
            raise NoScore(f"the judge's score {score.value:g} is {scales}")
        return score.value

    def _value(self, value: Any) -> float | None:
        """A number, or a word that stands for one; None for anything else."""
        if isinstance(value, bool):
            return float(value)
        if isinstance(value, int | float):
            return float(value) if abs(value) <= sys.float_info.max else None
        if not isinstance(value, str):
            return None
        word = value.strip().strip("*.!\"'").casefold()
        if word in (self.positive.casefold(), self.negative.casefold()):
            return float(word == self.positive.casefold())
        score, is_fraction = read_score(value), self.max_score in (None, 1)
        if score is not None and score.scale is not None and not is_fraction:
            return self._on_scale(score)
        number = parse_number(value.strip().strip("*"))
        if number is not None:
            return float(number)
        return None if score is None else self._on_scale(score)


def check_pattern(pattern: str) -> None:
    """
    Raises:
        RewardOptionError: no regular expression, or one without a group named ``score``.
    """
    key = f"score_pattern = {pattern!r}"
    try:
        names = regex.compile(pattern).groupindex
    except regex.error as error:
        raise RewardOptionError(f"{key}: not a regular expression: {error}") from error
    if "score" not in names:
        example = r"Rating: (?P<score>\d+)"
        raise RewardOptionError(f"{key}: must have a group named score, as in {example!r}")


def answer_text(choice: Mapping[str, Any]) -> str:
    """The end of the judge's answer, without its thought.

    Raises:
        NoScore: there is none, or the thought never ended.
    """
    message = choice.get("message")
    content = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    if not isinstance(content, str):
        raise NoScore("the judge's answer has no text")
    text = after_thought(content)
    if text is None:
        raise NoScore("the judge's thought never ended: give it more max_tokens, or switch thinking off")
    return text[-MAX_ANSWER:]


def last_match(pattern: str, text: str, is_cut: bool) -> str | None:
    """The group ``score`` of the last match; one at the very end of a text that was cut off could have gone on.

    Raises:
        NoScore: the pattern takes too long.
    """
    try:
        matches = list(regex.finditer(pattern, text, timeout=PATTERN_SECONDS))
    except TimeoutError:
        raise NoScore(f"timeout: the pattern took more than {PATTERN_SECONDS:g} s") from None
    if is_cut:
        matches = [match for match in matches if match.end() < len(text)]
    return matches[-1].group("score") if matches else None


def json_value(text: str, field: str) -> Any:
    """``field`` (with dots for nested objects) of the last JSON object that has it; None without one."""
    decoder, position, value = json.JSONDecoder(), text.find("{"), None
    for _ in range(MAX_OBJECTS):
        if position < 0:
            break
        try:
            found, end = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError):
            position = text.find("{", position + 1)
            continue
        for name in field.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        value = value if found is None else found
        position = text.find("{", end)
    return value


def probability(choice: Mapping[str, Any], positive: str, negative: str) -> float:
    """P(positive) / (P(positive) + P(negative)) of the first token, over all spellings (case, leading space).

    Raises:
        NoScore: the service gave no log-probs, or neither word is among the likeliest tokens.
    """
    try:
        first = choice["logprobs"]["content"][0]
        listed: Sequence[Mapping[str, Any]] = first.get("top_logprobs") or [first]
        weights = [(str(token["token"]).strip().casefold(), min(float(token["logprob"]), 0.0)) for token in listed]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError):
        raise NoScore("the judge's answer has no log-probs; the service must return top_logprobs") from None
    # A word of several tokens begins with its first one.
    yes = sum(math.exp(value) for token, value in weights if token and positive.casefold().startswith(token))
    no = sum(math.exp(value) for token, value in weights if token and negative.casefold().startswith(token))
    if not yes + no > 0:  # a service may write NaN
        likeliest = ", ".join(repr(token) for token, _ in weights[:5])
        raise NoScore(f"neither {positive!r} nor {negative!r} is among the likeliest first tokens ({likeliest} ...)")
    return yes / (yes + no)


def shortened(text: str, length: int = 200) -> str:
    """The end of a text, where the verdict should have been."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"... {text[-length:]}"
