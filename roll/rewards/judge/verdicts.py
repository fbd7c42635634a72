"""Verdicts in prose: which word or number of a judge's answer is what it finally says.

An answer mentions words and numbers that are no verdict: ``Yes. No further comments.``, ``Score: 8/10. I deducted 2
points.``  So only mentions that are marked as one count.  The strong ones carry a label (``Verdict: No``) or stand
alone: on a line, in a box, or in ``[[ ]]``; the last of them decides.  Where there is none the last weak one does, and
without any there is no verdict.  Of an answer that was cut off, strong ones count if something follows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACE = r"[\s*_`\"'~]{0,12}"
"""Between the parts of a verdict: spaces and markup, which is not removed since it may be a part of the words. Bounded,
as all repetition here, so that searching takes linear time."""
_LABEL = (
    r"(?<![A-Za-z])(?:final|overall|total|my|the|your)?\s?"
    r"(?:score|rating|grade|mark|verdict|answer|decision|conclusion|judge?ment|result|assessment|evaluation)"
)
_LINK = (
    r"(?:\s?\([^()\n]{0,40}\))?"
    + _SPACE
    + r"(?::|=|-|–|—|→|=>|\bis\b|\bof\b|\bwould be\b)"
    + r"(?:[\s*_`\"'~:=]|\[\[|\\boxed\{){0,12}"
)
_LINE_START, _LINE_END = r"(?:^|\n)[\s*_`\"'~#>-]{0,12}", r"[\s*_`\"'~.!]{0,12}(?=\n|$)"

_NUMBER = r"(?P<number>[-+−]?\d{1,12}(?:[.,]\d{1,12}){0,4})"
_OF = r"(?P<scale>\d{1,12}(?:\.\d{1,12})?)"
_SCALE = rf"(?:{_SPACE}(?:(?:/|\bout\s+of\b|\bof\b){_SPACE}{_OF}|(?P<percent>%|per\s?cent\b)))?"
_NUMBER_ENDS = r"(?![\w%]|[.,:]\d|\s{0,3}(?:[-–—/]|to\b|or\b)\s{0,3}\d)"
_SCORE = rf"{_NUMBER}(?![\d])(?![.,]\d){_SCALE}{_NUMBER_ENDS}"

_STRONG_NUMBERS = (
    re.compile(rf"{_LABEL}{_LINK}{_SCORE}", re.IGNORECASE),
    re.compile(rf"\[\[{_SPACE}{_SCORE}{_SPACE}\]\]", re.IGNORECASE),
    re.compile(rf"\\boxed\{{{_SPACE}{_SCORE}{_SPACE}\}}", re.IGNORECASE),
    re.compile(rf"{_LINE_START}{_SCORE}{_LINE_END}", re.IGNORECASE),
)
_WEAK_NUMBERS = (
    re.compile(
        rf"(?<![\w.,/]){_NUMBER}(?![\d]){_SPACE}(?:/|\bout\s+of\b){_SPACE}{_OF}{_NUMBER_ENDS}",
        re.I,
    ),
    re.compile(
        rf"\b(?:rate|rated|rating|give|giving|assign|award|grade|score|scores|say|deserves|worth)\b"
        rf"(?:\s+(?:it|this|that|them|the|an?|answer|response|essay|text|as|with|at|score|rating|grade|of)){{0,8}}{_SPACE}{_SCORE}",
        re.IGNORECASE,
    ),
)
_DISTANCE = 1
"""Characters that must follow a strong verdict in an answer that was cut off: it could have gone on otherwise."""


@dataclass(frozen=True)
class Score:
    """A number as a judge wrote it."""

    value: float
    scale: float | None = None
    """10 in ``7 out of 10``, 100 of a percentage."""


def stated_score(text: str, is_cut: bool) -> Score | None:
    """The last number that is marked as a score."""
    match = _decisive(text, _STRONG_NUMBERS, _WEAK_NUMBERS, is_cut)
    return None if match is None else _score_of(match)


def read_score(text: str) -> Score | None:
    """A text that is a score as a whole, such as ``7/10``, ``85%`` or ``8 points``."""
    match = re.fullmatch(rf"{_SPACE}{_SCORE}(?:\s*points?)?[\s*_`\"'.!]*", text, re.IGNORECASE)
    return None if match is None else _score_of(match)


def _score_of(match: re.Match[str]) -> Score:
    groups = match.groupdict()
    scale = 100.0 if groups.get("percent") else None
    return Score(_as_float(groups["number"]), float(groups["scale"]) if groups.get("scale") else scale)


def _as_float(number: str) -> float:
    number = number.replace("−", "-")
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", number):
        return float(number.replace(",", ""))
    return float(number.replace(",", "."))


def stated_word(text: str, positive: str, negative: str, is_cut: bool) -> bool | None:
    """Whether the last verdict is ``positive``; None where there is none, or it is negated."""
    words = sorted((positive, negative), key=len, reverse=True)
    word = rf"(?<![\w'’])(?P<word>{'|'.join(map(re.escape, words))})(?![\w]|['’]\w)"
    # "Yes or No", "Yes/No": the choice, not a verdict.
    other = rf"(?:{'|'.join(map(re.escape, words))})"
    single = rf"(?<!\bor )(?<!/){word}(?!{_SPACE}(?:/|\bor\b){_SPACE}{other})"
    strong = (
        re.compile(rf"{_LABEL}{_LINK}{single}", re.IGNORECASE),
        re.compile(rf"(?:\[\[|\\boxed\{{(?:\\text\{{)?){_SPACE}{word}", re.IGNORECASE),
        re.compile(rf"{_LINE_START}{single}{_LINE_END}", re.IGNORECASE),
    )
    start, end = r"(?:^|[.!?:;]\s|\n)[\s*_`\"'(]{0,12}", rf"{_SPACE}(?:[.!;)\n]|$)"
    sentences = (re.compile(rf"{start}{single}{end}", re.IGNORECASE),)
    parts = (
        re.compile(rf"{start}{single}{_SPACE}[,:;–—-]", re.IGNORECASE),  # "No, because ..."
        re.compile(rf"{single}{end}", re.IGNORECASE),  # "I would say yes."
    )
    match = _decisive(text, strong, sentences, is_cut) or _decisive(text, (), parts, is_cut)
    if match is None or _NEGATED.search(text, max(0, match.start("word") - _REACH), match.start("word")):
        return None
    return match.group("word").casefold() == positive.casefold()


_REACH = 20
_NEGATED = re.compile(rf"(?:\bnot|n['’]t|\bnever|\bneither|\bnor|\bcannot)\s+(?:\w+\s+)?{_SPACE}$", re.IGNORECASE)


def _decisive(
    text: str, strong: tuple[re.Pattern[str], ...], weak: tuple[re.Pattern[str], ...], is_cut: bool
) -> re.Match[str] | None:
    """The last strong match, else the last weak one."""
    found = [match for pattern in strong for match in pattern.finditer(text)]
    if is_cut:
        found = [match for match in found if match.end() + _DISTANCE <= len(text)]
    elif not found:
        found = [match for pattern in weak for match in pattern.finditer(text)]
    # Of two that end together the longer one says more: "7/10" with its label.
    return max(found, key=lambda match: (match.end(), match.end() - match.start()), default=None)
