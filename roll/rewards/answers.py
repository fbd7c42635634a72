"""Answers in responses: after the thought, in a box, after ``####``, in tags, stated in prose; and numbers in other
notations."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from roll.datasets.forms import last_boxed, last_marked
from roll.rewards.base import NUMERAL
from roll.rewards.thoughts import opened_thought, split_thought
from roll.rewards.units import unit_of


def after_thought(response: str, prompt: str = "") -> str | None:
    """The part of a response that is meant for the reader, or None if the thought never ended.

    A thought is opened in the response, or by the end of the prompt (templates that open it themselves).
    """
    return split_thought(response, opened_thought(prompt))[1]


def tagged_answer(text: str) -> str | None:
    """The contents of the last ``<answer>...</answer>``."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


_PERIOD = re.compile(r"(?<![0-9.])([0-9]{1,30})\.([0-9]{0,30})\\(?:overline|bar|dot)\s?\{([0-9]{1,30})\}")


def without_periods(expression: str) -> str:
    """The expression with fractions in place of decimals with a period, such as ``0.1\\overline{36}``."""

    def fraction(match: re.Match[str]) -> str:
        number, decimals, period = match.groups()
        scale = 10 ** len(decimals)
        return str(Fraction(int(number + decimals), scale) + Fraction(int(period), scale * (10 ** len(period) - 1)))

    text = expression.strip()
    sign = "-" if text.startswith("-") else ""
    whole = _PERIOD.fullmatch(text.removeprefix("-"))
    return f"{sign}{fraction(whole)}" if whole else _PERIOD.sub(lambda match: f"({fraction(match)})", expression)


_IN_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?([0-9]{1,2})\}?")
_PREFIXED = re.compile(r"0(?:[bB][01]{1,64}|[oO][0-7]{1,32}|[xX][0-9a-fA-F]{1,16})")
_LARGEST_BASE = 16
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{([^{}]*)\}")

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_UNITS = {word: value for value, word in enumerate(_SMALL)}
_UNITS |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}
_UNITS |= {
    f"{ten}-{_SMALL[digit]}": 10 * value + digit for value, ten in enumerate(_TENS, start=2) for digit in range(1, 10)
}
_SCALES = {"thousand": 1000, "million": 10**6}
_LONGEST = 120  # characters of a number in words


def value_in_base(expression: str) -> tuple[int, int] | None:
    """Value and base of an integer written with its base, such as ``1011_2``; None for anything else."""
    match = _IN_BASE.fullmatch(expression.strip())
    if match is None or not 2 <= int(match.group(2)) <= _LARGEST_BASE:
        return None
    try:
        return int(match.group(1), int(match.group(2))), int(match.group(2))
    except ValueError:
        return None


def other_notation(expression: str) -> int | None:
    """Value of ``1011_2``, ``0b101``, ``0o17``, ``0x1F`` or ``twenty-one``; None for others (``A_{12}`` is a name)."""
    text = _TEXT.sub(r"\1", expression).strip()
    if _PREFIXED.fullmatch(text):
        return int(text, 0)
    in_base = value_in_base(text) if text[:1].isdigit() else None
    return in_base[0] if in_base else in_words(text)


def in_words(text: str) -> int | None:
    """Value of a cardinal number in English words below a billion, such as ``one hundred and five``."""
    if len(text) > _LONGEST:
        return None
    text = re.sub(r"^\s*-\s*", "minus ", text)
    words = re.sub(r"\b([a-z]+ty) (?=(?:one|two|three|four|five|six|seven|eight|nine)\b)", r"\1-", text.lower()).split()
    negative = words[:1] in (["minus"], ["negative"])
    total = group = 0
    last_scale, state = 10**9, "start"
    for word in words[negative:]:
        if word in _UNITS and state in ("start", "hundred", "and", "scale"):
            group, state = group + _UNITS[word], "unit"
        elif word == "hundred" and state == "unit" and 0 < group < 10:
            group, state = 100 * group, "hundred"
        elif word == "and" and state in ("hundred", "scale"):
            state = "and"
        elif word in _SCALES and state in ("unit", "hundred") and group and _SCALES[word] < last_scale:
            last_scale = _SCALES[word]
            total, group, state = total + group * last_scale, 0, "scale"
        else:
            return None
    if state in ("start", "and"):
        return None
    return -(total + group) if negative else total + group


TAIL = 2000  # characters at the end of a text in which the answer is looked for
MAX_FORMULA = 1000
_FIRST = 0xE000
_MASK = "[\ue000-\uf8ff]"  # one formula; Unicode's private use area

_DELIMITED = re.compile(
    r"(?<!\\)\$\$(?P<display>[^$]+)\$\$"
    r"|\\\[(?P<bracket>.+?)\\\]"
    r"|\\\((?P<parenthesis>.+?)\\\)"
    r"|(?<![\\$])\$(?P<dollar>(?:\\.|[^$\\\n])+)\$(?![0-9$])"
    r"|(?P<environment>\\begin\{(?P<name>[a-zA-Z]+\*?)\}.+?\\end\{(?P=name)\})",
    re.DOTALL,
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MARKUP = re.compile(r"(?<![\w)])(?:\*\*|__)|(?:\*\*|__)(?![\w(])")

_ANSWER = re.compile(
    # "The final answer to part 2 is", "Answer:"
    r"\banswers?\b(?:(?!\banswer|\.\s)[^\n?!]){0,100}?(?:\b(?:is|are|equals|becomes)\b|[:=])[\s:]*(?=\S)"
    # a heading
    r"|^\W*(?:final\s+)?answer\W*\n\s*(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
_END = re.compile(r"[.!?](?=\s|$)|\n")
_SENTENCES = re.compile(r"(?<=[.!?])(?<!\bi\.e\.)(?<!\be\.g\.)(?<!\bapprox\.)\s+|\n+")

_JOINED = r"\s*(?:,\s*and\b|,\s*or\b|,|;|\band\b|\bor\b)\s*"
_RUN = re.compile(rf"{_MASK}(?:(?:{_JOINED}){_MASK})*(?P<percent>\s*(?:\\?%|per\s?cent\b))?")
_NEAR_WORDS = 3

_VALUE = r"(?:\b(?:is|are|equals?|gives?|get|obtain|have|be|becomes?|therefore|thus|hence|so)\b|(?<![0-9]):|[=≈])[\s,]*"
_ENDS_IN_NUMBER = re.compile(
    rf"{_VALUE}(?P<number>{NUMERAL}(?:\s*\\?%)?)(?:\s?(?!times\b|of\b|more\b|less\b)[A-Za-z°]+)?\s*$", re.IGNORECASE
)
_INTRODUCED = re.compile(_VALUE.replace("[=≈]", "≈"), re.IGNORECASE)
_NUMBER_AND_WORDS = re.compile(rf"(?P<number>{NUMERAL})(?P<percent>\s*(?:\\?%|per\s?cent\b))?(?P<rest>[^0-9]*)")
_OPERATOR = re.compile(r"\s*(?:[-+*/^=<>(\[{!_:|\\×÷±≤≥,;]|or\b|and\b|to\b|mod\b|[A-Za-z]\b(?!\s*\.))")
_OPENS, _GOES_ON = tuple("+*/^<>([{!_|×÷±≤≥-−"), tuple("-+*/^=<>[{!_|×÷±≤≥)]}(")
"""Next to a number, these make it a part of something."""
_MATH_WORDS = frozenset(
    ("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi", "inf", "infinity", "cup", "cap", "in", "mod", "min", "max")
)
# "(by rule 2)", ", not 8"
_REMARK = re.compile(
    r"(?<=\s)\((?=[^()\\]*[A-Za-z]{3})[^()\\]*\)"
    r"|(?<=[0-9$%)}\ue000-\uf8ff]),? (?:and not|not|rather than|instead of) .*$"
)
_LEAD = re.compile(r"\s*(?:(?:thus|so|hence|therefore|then|finally|and|we|that)\b[\s,:]*)+", re.IGNORECASE)


def stated_answer(text: str) -> str | None:
    """The answer in LaTeX or plain spelling, or None where nothing is stated."""
    masked, formulas = mask(text[-TAIL:])
    statements = list(_ANSWER.finditer(masked)) if "answer" in masked.lower() else []
    for match in reversed(statements):
        end = _END.search(masked, match.end())
        segment = masked[match.end() : end.start() if end else None]
        runs = list(_RUN.finditer(segment))
        if runs:
            near = len(segment[: runs[0].start()].split()) <= _NEAR_WORDS
            run = runs[0] if near else runs[-1]
            return _with_unit(_joined(formulas, run), segment[run.end() :])
        if (found := _plain_value(segment)) is not None:
            return found
    # Else the last sentence, which does not say that it is the answer.
    sentence = last_sentence(masked)
    if sentence is None:
        return None
    runs = list(_RUN.finditer(sentence))
    if runs:
        number = _ENDS_IN_NUMBER.search(sentence, runs[-1].end())
        if number is not None:
            return number.group("number").strip()
        return _with_unit(_joined(formulas, runs[-1]), sentence[runs[-1].end() :])
    introduced = list(_INTRODUCED.finditer(sentence))
    for match in reversed(introduced):
        value = sentence[match.end() :]
        if _looks_like_mathematics(value):
            return _plain_value(value)
    whole = _LEAD.sub("", sentence, count=1)
    return _plain_value(whole) if _looks_like_mathematics(whole) else None


def isolated_number(text: str) -> str | None:
    """The last number of the last sentence with a formula or a number, where that sentence has no formula and the
    number stands alone: not part of ``2^10``, ``(1, 2)`` or ``x^2 + 3``."""
    sentence = last_sentence(mask(text[-TAIL:])[0])
    if sentence is None or re.search(_MASK, sentence) or "\\" in sentence.replace("\\$", "").replace("\\%", ""):
        return None
    matches = list(re.finditer(rf"(?<![0-9A-Za-z_.,])({NUMERAL})(?![0-9A-Za-z_]|[.,][0-9])", sentence))
    if not matches:
        return None
    last = matches[-1]
    before, after = sentence[: last.start()].rstrip(), sentence[last.end() :].lstrip()
    if re.search(r"[0-9]\s*:$", before) or before.endswith(_OPENS) or after.startswith(_GOES_ON):
        return None
    return last.group(1).strip()


@lru_cache(maxsize=16)
def mask(text: str) -> tuple[str, list[str]]:
    """The text with one private character in the place of each formula, bold type dropped; and the formulas by the code
    point of their character, from ``_FIRST`` on."""
    formulas: list[str] = []
    if not text.isascii():
        text = re.sub(_MASK, " ", text)
    pieces, position = [], 0
    # Most texts without formulas have not even the characters that these begin with.
    has_formulas = "$" in text or "\\" in text
    while has_formulas and (match := _DELIMITED.search(text, position)) is not None:
        between = match.group("dollar") or ""
        if between[:1].isdigit() and (between[-1].isspace() or between[-1] == "(") and _PROSE.search(between):
            # "$5 and then $": the first sign stands before an amount; the second may open a formula or precede
            # another amount.
            pieces.append(text[position : match.start() + 1])
            position = match.start() + 1
            continue
        kind = match.lastgroup if match.lastgroup != "name" else "environment"
        content = match.group() if kind == "environment" else match.group(kind or 0)
        pieces += [text[position : match.start()], chr(_FIRST + len(formulas))]
        formulas.append(content.strip().rstrip(".,;").rstrip())
        position = match.end()
    masked = "".join([*pieces, text[position:]])
    has_markup = "**" in masked or "__" in masked
    return _MARKUP.sub("", masked) if has_markup else masked, formulas


def last_sentence(masked: str) -> str | None:
    """The last one that has a formula, a number or a LaTeX command."""
    for sentence in reversed(_SENTENCES.split(masked)):
        if re.search(rf"{_MASK}|[0-9]|\\[a-zA-Z]", sentence):
            return _REMARK.sub(" ", sentence).strip().rstrip(".!").rstrip()
    return None


def _joined(formulas: list[str], run: re.Match[str]) -> str:
    """Adjacent formulas, as one list. Of ``a + b = 3 + 4 = 7`` the last link counts; a single equation is
    left as it is."""
    found = []
    for character in re.findall(_MASK, run.group()):
        formula = formulas[ord(character) - _FIRST]
        links = re.split(r"(?<![<>!:=\\])=(?!=)", formula)
        is_chain = len(links) > 2 and "," not in formula and "\\\\" not in formula
        found.append(links[-1].strip() if is_chain else formula)
    return ", ".join(found) + (r"\%" if run.group("percent") and not found[-1].endswith("%") else "")


def _plain_value(segment: str) -> str | None:
    """A value written without delimiters; of words after a number those that are a unit."""
    segment = _REMARK.sub(" ", segment).strip().strip("\"'`*").rstrip(".,;:! ").strip()
    if segment.startswith("$") and segment.count("$") == 1 and not segment[1:2].isdigit():
        segment = segment[1:]  # a formula that was never closed
    is_cut_off = "\\boxed{" in segment and segment.count("{") > segment.count("}")
    if not segment or len(segment) > MAX_FORMULA or is_cut_off:
        return None
    number = _NUMBER_AND_WORDS.fullmatch(segment)
    if number is not None and not _OPERATOR.match(number.group("rest")):
        rest, percent = number.group("rest"), r"\%" if number.group("percent") else ""
        if rest.isascii() or unit_of(rest) is not None:
            return _with_unit(number.group("number").strip() + percent, rest)
    return segment


def _with_unit(value: str, rest: str) -> str:
    """Return the value, with ``rest`` appended if that is a unit."""
    rest = rest.strip().rstrip(".,;")
    return rf"{value} \text{{ {rest}}}" if unit_of(rest) is not None else value


def _looks_like_mathematics(value: str) -> bool:
    """Digits, commands or operators, and no words but those of mathematics; or a number and its unit."""
    value = value.strip()
    if not re.search(r"[0-9\\]", value):
        return False
    number = _NUMBER_AND_WORDS.fullmatch(value)
    if number is not None and not _OPERATOR.match(number.group("rest")):
        return True
    bare = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", value)
    return all(word.lower() in _MATH_WORDS for word in _PROSE.findall(bare))


SOURCES: dict[str, Callable[[str], str | None]] = {
    "response": str.strip,
    "boxed": last_boxed,
    "marked": last_marked,
    "tagged": tagged_answer,
    "stated": stated_answer,
    "number": isolated_number,
}
"""Places of an answer, as options of rules name them."""
