"""Reads a judge's answer as a number: rules that find the score, its bounds, and its scaling to 0..1."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex  # type: ignore[import-untyped]

from roll.datasets.forms import last_boxed
from roll.rewards.answers import after_thought
from roll.rewards.base import RewardOptionError, parse_number

MAX_ANSWER = 50_000  # characters at the end of an answer that are looked at
MAX_OBJECTS = 1_000  # braces tried as the beginning of a JSON object
MAX_SHOWN = 200  # characters of an answer without a score
PATTERN_SECONDS = 1.0
_NARROW = {code + 0xFEE0: code for code in range(0x21, 0x7F)}
"""Full-width characters, as in ``Score：7``, to those of ASCII."""
CUT = frozenset({"length", "content_filter", "abort"})  # finish reasons of answers that did not come to their end


class NoScore(ValueError):
    """The answer has no score in the required form."""


Extract = Literal["yes_no", "number", "boxed", "json", "regex", "logprob"]


@dataclass(kw_only=True)
class ScoreReader:
    """Options by which the score is found in a judge's answer."""

    extract: Extract | None = None  # rule that finds the score in the answer; null: as the built-in prompt asks for it
    score_pattern: str = ""  # `extract: regex`: a regular expression with a group named `score`; the last match counts
    json_field: str = "score"  # `extract: json`: the field, with dots for nested objects
    positive: str = "Yes"  # counts as 1
    negative: str = "No"  # counts as 0
    min_score: float | None = None  # the judge's lowest score; a lower one is an error
    max_score: float | None = None  # the judge's highest score; a higher one is an error
    rescale: bool = True  # with both bounds: bring scores to 0..1

    def check_reading(self) -> None:
        """Raise ``RewardOptionError`` for options that contradict each other, or a pattern that cannot be used."""
        low, high = self.min_score, self.max_score
        if low is not None and high is not None and low >= high:
            raise RewardOptionError(f"min_score = {low:g}: must be less than max_score {high:g}")
        if self.extract == "regex":
            key = f"score_pattern = {self.score_pattern!r}"
            try:
                names = regex.compile(self.score_pattern).groupindex
            except regex.error as error:
                raise RewardOptionError(f"{key}: not a regular expression: {error}") from error
            if "score" not in names:
                example = r"Rating: (?P<score>\d+)"
                raise RewardOptionError(f"{key}: must have a group named score, as in {example!r}")
        elif self.score_pattern:
            raise RewardOptionError(f"score_pattern belongs to extract: regex, not to {self.extract}")

    def read(self, choice: Mapping[str, Any]) -> tuple[float, float]:
        """The score of one of a chat completion's ``choices``, and the number as the judge wrote it. Raises
        ``NoScore``: none is found, or it is out of bounds."""
        if self.extract == "logprob":
            raw = probability(choice, self.positive, self.negative)
        else:
            assert self.extract is not None, "set by the judge"
            text, is_cut = answer_text(choice), choice.get("finish_reason") in CUT
            found = {
                "yes_no": lambda: stated_word(text, self.positive, self.negative, is_cut),
                "number": lambda: self._on_scale(_decisive(text, _STRONG_NUMBERS, _WEAK_NUMBERS, is_cut)),
                "boxed": lambda: self._value(last_boxed(text)),
                "json": lambda: self._value(json_value(text, self.json_field)),
                "regex": lambda: self._value(last_match(self.score_pattern, text, is_cut)),
            }[self.extract]()
            if found is None:
                why = "; it was cut off: give it more max_tokens" if is_cut else ""
                # The end of the text, where the verdict should have been.
                shown = " ".join(text.split())
                shown = shown if len(shown) <= MAX_SHOWN else f"... {shown[-MAX_SHOWN:]}"
                raise NoScore(f"no score ({self.extract}) in the judge's answer {shown!r}{why}")
            raw = float(found)
        low, high = self.min_score, self.max_score
        if (low is not None and raw < low) or (high is not None and raw > high):
            raise NoScore(f"the judge's score {raw:g} is not between {low} and {high}")
        if self.rescale and low is not None and high is not None:
            return (raw - low) / (high - low), raw
        return raw, raw

    def _on_scale(self, match: re.Match[str] | None) -> float | None:
        """The number of a match as it was written; ``NoScore`` if it is on another scale than ``max_score``."""
        if match is None:
            return None
        number, scale = match["number"].replace("−", "-"), _scale_of(match)
        grouped = re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", number)
        value = float(number.replace(",", "" if grouped else "."))
        if self.max_score is not None and scale not in (None, self.max_score):
            scales = f"on a scale of {scale:g}, not of max_score {self.max_score:g}"
            raise NoScore(f"the judge's score {value:g} is {scales}")
        return value

    def _value(self, value: object) -> float | None:
        """A number, or a word that means one; None for anything else."""
        if isinstance(value, bool):
            return float(value)
        if isinstance(value, int | float):
            return float(value) if abs(value) <= sys.float_info.max else None
        if not isinstance(value, str):
            return None
        word = _TEXT.sub(r"\1", value.strip()).strip("*.!\"'").casefold()
        if word in (self.positive.casefold(), self.negative.casefold()):
            return float(word == self.positive.casefold())
        # The whole text as a score, such as "7/10", "85%" or "8 points".
        score = re.fullmatch(rf"{_SPACE}{_SCORE}(?:\s*points?)?[\s*_`\"'.!]*", value, re.IGNORECASE)
        if score is not None and _scale_of(score) is not None and self.max_score not in (None, 1):
            return self._on_scale(score)
        number = parse_number(value.strip().strip("*"))
        return float(number) if number is not None else self._on_scale(score)


def answer_text(choice: Mapping[str, Any]) -> str:
    """The end of the judge's answer, without its thought. Raises ``NoScore``: there is none, or the thought never
    ended."""
    message = choice.get("message")
    content = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    if not isinstance(content, str):
        raise NoScore("the judge's answer has no text")
    text = after_thought(content)
    if text is None:
        raise NoScore("the judge's thought never ended: give it more max_tokens, or switch thinking off")
    return text[-MAX_ANSWER:].translate(_NARROW)


def last_match(pattern: str, text: str, is_cut: bool) -> str | None:
    """The group ``score`` of the last match; one at the very end of a text that was cut off could have gone on. Raises
    ``NoScore``: the pattern takes too long."""
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
        except (ValueError, RecursionError):  # ValueError: also integers of thousands of digits
            position = text.find("{", position + 1)
            continue
        for name in field.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        value = value if found is None else found
        position = text.find("{", end)
    return value


def probability(choice: Mapping[str, Any], positive: str, negative: str) -> float:
    """P(positive) / (P(positive) + P(negative)) of the first token, over all spellings (case, leading space). Raises
    ``NoScore``: the service gave no log-probs, or neither word is among the most probable tokens."""
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
        top = ", ".join(repr(token) for token, _ in weights[:5])
        raise NoScore(f"neither {positive!r} nor {negative!r} is among the most probable first tokens ({top} ...)")
    return yes / (yes + no)


_TEXT = re.compile(r"\\(?:text|textbf|mathrm)\s?\{([^{}]*)\}")
_SPACE = r"[\s*_`\"'~]{0,12}"
"""Between the parts of a verdict: spaces and markup, which is not removed since it may be a part of the words. Bounded,
as all repetition here, so that searching takes linear time."""
_LABELS = r"(?:score|rating|grade|mark|verdict|answer|decision|conclusion|judge?ment|result|assessment|evaluation)"
_LABEL = rf"(?<![A-Za-z])(?:final|overall|total|my|the|your)?\s?{_LABELS}"
_TAG = rf"<(?:final|overall|total)?[_\s-]?{_LABELS}>{_SPACE}"
_LINK = (
    r"(?:\s(?:for|of)\s(?:this|that|the|your)\s[a-z]{1,20})?"
    r"(?:\s?\([^()\n]{0,40}\))?"
    + _SPACE
    + r"(?::|=|-|–|—|→|=>|\b(?:is|of|would\sbe)\b(?:\s(?:therefore|thus|hence|an?)\b)?)"
    + r"(?:[\s*_`\"'~:=]|\[\[|\\boxed\{){0,12}"
)
_LINE_START, _LINE_END = r"(?:^|\n)[\s*_`\"'~#>-]{0,12}", r"[\s*_`\"'~.!]{0,12}(?=\n|$)"

_NUMBER = r"(?P<number>[-+−]?\d{1,12}(?:[.,]\d{1,12}){0,4})"
_OF = r"(?P<scale>\d{1,12}(?:\.\d{1,12})?)"
_SCALE = rf"(?:{_SPACE}(?:(?:/|\bout\s+of\b|\bof\b){_SPACE}{_OF}|(?P<percent>%|per\s?cent\b)))?"
_NUMBER_ENDS = r"(?![\w%]|[.,:]\d|\s{0,3}(?:[-–—/+×=]|to\b|or\b)\s{0,3}\d)"
_SUM = r"(?:\d{1,12}(?:\.\d{1,12})?(?:\s?\+\s?\d{1,12}(?:\.\d{1,12})?){1,20}\s?=\s?)?"
_SCORE = rf"{_SUM}{_NUMBER}(?![\d])(?![.,]\d){_SCALE}{_NUMBER_ENDS}"

_STRONG_NUMBERS = (
    re.compile(rf"{_LABEL}{_LINK}{_SCORE}", re.IGNORECASE),
    re.compile(rf"{_TAG}{_SCORE}{_SPACE}</", re.IGNORECASE),
    re.compile(rf"\[\[{_SPACE}{_SCORE}{_SPACE}\]\]", re.IGNORECASE),
    re.compile(rf"\\boxed\{{{_SPACE}{_SCORE}{_SPACE}\}}", re.IGNORECASE),
    re.compile(rf"{_LINE_START}{_SCORE}{_LINE_END}", re.IGNORECASE),
)
_WEAK_NUMBERS = (
    re.compile(rf"(?<![\w.,/]){_NUMBER}(?![\d]){_SPACE}(?:/|\bout\s+of\b){_SPACE}{_OF}{_NUMBER_ENDS}", re.I),
    re.compile(
        rf"\b(?:rate|rated|rating|give|giving|assign|award|grade|score|scores|say|deserves|worth)\b"
        rf"(?:\s+(?:it|this|that|them|the|an?|answer|response|essay|text|as|with|at|score|rating|grade|of)){{0,8}}{_SPACE}{_SCORE}",
        re.IGNORECASE,
    ),
)
_DISTANCE = 1
"""Characters that must follow a strong verdict in an answer that was cut off: it could have gone on otherwise."""
_ALTERNATIVE = re.compile(r"[\s*_`\"']*(?:/|\bor?\b)[\s*_`\"']*\w*\Z", re.IGNORECASE)
"""An alternative to the verdict that was cut while it was named: "Yes or", "Yes/N"."""


def _scale_of(match: re.Match[str]) -> float | None:
    """10 in ``7 out of 10``, 100 of a percentage; None: the judge named none."""
    groups = match.groupdict()
    return float(groups["scale"]) if groups.get("scale") else 100.0 if groups.get("percent") else None


def stated_word(text: str, positive: str, negative: str, is_cut: bool) -> bool | None:
    """True if the last verdict is ``positive``; None where there is none, or it is negated."""
    words = sorted((positive, negative), key=len, reverse=True)
    word = rf"(?<![^\W_])(?<!['’])(?P<word>{'|'.join(map(re.escape, words))})(?![^\W_]|['’]\w)"
    # "Yes or No", "Yes/No": the choice, not a verdict.
    other = rf"(?:{'|'.join(map(re.escape, words))})"
    single = rf"(?<!\bor )(?<!/){word}(?!{_SPACE}(?:/|\bor\b){_SPACE}{other})"
    strong = (
        re.compile(rf"{_LABEL}{_LINK}{single}", re.IGNORECASE),
        re.compile(rf"{_TAG}{single}{_SPACE}</", re.IGNORECASE),
        re.compile(rf"(?:\[\[|\\boxed\{{(?:\\text\{{)?){_SPACE}{word}", re.IGNORECASE),
        re.compile(rf"{_LINE_START}{single}{_LINE_END}", re.IGNORECASE),
    )
    start, end = r"(?:^|[.!?:;]\s|\n)[\s*_`\"'(]{0,12}", rf"{_SPACE}(?:[.!;)\n]|$)"
    sentences = (re.compile(rf"{start}{single}{end}", re.IGNORECASE),)
    parts = (
        re.compile(rf"{start}{single}{_SPACE}[,:;(–—-]", re.IGNORECASE),  # "No, because ..."
        re.compile(rf"{single}{end}", re.IGNORECASE),  # "I would say yes."
    )
    match = _decisive(text, strong, sentences, is_cut) or _decisive(text, (), parts, is_cut)
    if match is None or _NEGATED.search(text, max(0, match.start("word") - _REACH), match.start("word")):
        return None
    return match.group("word").casefold() == positive.casefold()


_REACH = 80
_NEGATED = re.compile(
    r"(?:\bnot|n['’]t|\bnever|\bneither|\bnor|\bcannot|\bwrong\s+to)\b"
    r"(?:(?![,.;:!?\n]|\b(?:and|but|so|because|since|therefore|hence|thus)\b).)*$",
    re.IGNORECASE,
)


def _decisive(
    text: str, strong: tuple[re.Pattern[str], ...], weak: tuple[re.Pattern[str], ...], is_cut: bool
) -> re.Match[str] | None:
    """The last strong match, else the last weak one."""
    found = [match for pattern in strong for match in pattern.finditer(text)]
    # A text that ends so was cut, whatever its service says.
    found = [match for match in found if not _ALTERNATIVE.match(text, match.end())]
    if is_cut:
        found = [match for match in found if match.end() + _DISTANCE <= len(text)]
    elif not found:
        weaker = [match for pattern in weak for match in pattern.finditer(text)]
        found = [match for match in weaker if not _ALTERNATIVE.match(text, match.end())]
    # Of two that end together the longer one says more: "7/10" with its label.
    return max(found, key=lambda match: (match.end(), match.end() - match.start()), default=None)
