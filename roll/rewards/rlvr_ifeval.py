"""The functions of RLVR-IFeval (Lambert et al., "Tulu 3", arXiv 2411.15124), with the verdicts of open-instruct's
``if_functions.py``.

They share their names with IFEval's instructions, and often not their rules: words are cut at white space, a keyword is
a whole word, letters and phrases are compared with their case, paragraphs are divided by ``* * *``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from roll.rewards.ifeval_instructions import is_json
from roll.rewards.ifeval_instructions import language as language_of

QUANTIFIERS = ("at least", "around", "at most")
DIVIDER = "* * *"
# A stop ends a sentence where one white space follows, unless it ends an abbreviation such as "e.g." or "Mr.".
_SENTENCE_END = re.compile(r"(?<=[.?!])(?<!\w\.\w.)(?<![A-Z][a-z]\.)\s")


def _enough(found: int, quantifier: str, wanted: int, tolerance: int | None = None) -> bool:
    """Compare with a tolerance (a tenth) to the allowed side; ValueError for an unknown quantifier."""
    if quantifier not in QUANTIFIERS:
        raise ValueError(f"quantifier {quantifier!r}: must be one of {', '.join(QUANTIFIERS)}")
    tolerance = max(round(wanted * 0.1), 1) if tolerance is None else tolerance
    low = wanted if quantifier == "at least" else wanted - tolerance
    high = wanted if quantifier == "at most" else wanted + tolerance
    return (quantifier == "at most" or found >= low) and (quantifier == "at least" or found <= high)


def _spans(text: str, opening: str, closing: str) -> int:
    """Pairs of marks on one line, from left to right."""
    count = 0
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0 and (end := line.find(closing, begin + len(opening))) >= 0:
            count += 1
            begin = line.find(opening, end + len(closing))
    return count


def letter_frequency(text: str, *, letter: str, N: int) -> bool:
    if len(letter) != 1:
        raise ValueError(f"letter {letter!r}: must be a single character")
    return text.count(letter) == int(N)


def first_word_of_paragraph(text: str, *, N: int, first_word: str, i: int) -> bool:
    paragraphs = text.split("\n\n")
    if not 1 <= int(i) <= int(N):
        raise ValueError(f"i = {i}: must lie in 1..{N}, the number of paragraphs")
    return len(paragraphs) == int(N) and paragraphs[int(i) - 1].strip().startswith(first_word)


def choice(text: str, *, options: Sequence[str] | str) -> bool:
    """Published rows also hold the options as one text, ``(yes, no)``."""
    if isinstance(options, str):
        options = [option.strip().strip("\"'") for option in options.strip("[]()").split(",")]
    return any(option in text for option in options)


FUNCTIONS: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, *, keyword_list: all(keyword.lower() in text.lower() for keyword in keyword_list),
    "verify_keyword_frequency": lambda text, *, word, N: re.findall(r"\w+", text.lower()).count(word.lower()) == int(N),
    # A forbidden word inside another one counts.
    "validate_forbidden_words": lambda text, *, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": letter_frequency,
    "validate_response_language": lambda text, *, language: language_of(text) == language,
    "verify_paragraph_count": lambda text, *, N: (
        len(found := "\n".join(map(str.strip, text.splitlines())).split(DIVIDER)) == int(N)
        and all(map(str.strip, found))
    ),
    "validate_word_constraint": lambda text, *, N, quantifier: _enough(len(text.split()), quantifier, int(N)),
    "verify_sentence_constraint": lambda text, *, N, quantifier: _enough(
        len(_SENTENCE_END.split(text)), quantifier, int(N), 1
    ),
    "validate_paragraphs": first_word_of_paragraph,
    # Something follows the first marker.
    "verify_postscript": lambda text, *, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda text, *, N: _spans(text, "[", "]") >= int(N),
    "verify_bullet_points": lambda text, *, N: (
        sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == int(N)
    ),
    "validate_title": lambda text: _spans(text, "<<", ">>") > 0,
    "validate_choice": choice,
    # ``**bold**`` are two: an empty section at either end.
    "validate_highlighted_sections": lambda text, *, N: _spans(text, "*", "*") >= int(N),
    "validate_sections": lambda text, *, N, section_splitter: (
        len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text, re.IGNORECASE)) >= int(N)
    ),
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda text, *, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: (
        len(found := text.split("******")) == 2 and found[0].strip() != found[1].strip()
    ),
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, *, N, quantifier: _enough(
        len(re.findall(r"\b[A-Z]+\b", text)), quantifier, int(N)
    ),
    "validate_end": lambda text, *, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
"""By the ``func_name`` of a row; a row's other keys are the function's arguments."""
