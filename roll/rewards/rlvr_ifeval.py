"""The functions of RLVR-IFeval (Lambert et al., "Tulu 3", arXiv 2411.15124), with the verdicts of open-instruct's
``if_functions.py``.

They share their names with IFEval's instructions, and often not their rules: words are cut at white space, a keyword is
a whole word, letters and phrases are compared with their case, paragraphs are divided by ``* * *``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from roll.rewards.ifeval_instructions import language as language_of

QUANTIFIERS = ("at least", "around", "at most")
DIVIDER = "* * *"
# A stop ends a sentence where one white space follows, unless it ends an abbreviation such as "e.g." or "Mr.".
_SENTENCE_END = re.compile(r"(?<=[.?!])(?<!\w\.\w.)(?<![A-Z][a-z]\.)\s")


def _enough(found: int, quantifier: str, wanted: int, tolerance: int) -> bool:
    """
    Raises:
        ValueError: no such quantifier.
    """
    if quantifier not in QUANTIFIERS:
        raise ValueError(f"quantifier {quantifier!r}: must be one of {', '.join(QUANTIFIERS)}")
    low = wanted if quantifier == "at least" else wanted - tolerance
    high = wanted if quantifier == "at most" else wanted + tolerance
    return (quantifier == "at most" or found >= low) and (quantifier == "at least" or found <= high)


def _tenth(wanted: int) -> int:
    return max(round(wanted * 0.1), 1)


def _spans(text: str, opening: str, closing: str) -> int:
    """Pairs of marks on one line, from left to right."""
    count = 0
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0 and (end := line.find(closing, begin + len(opening))) >= 0:
            count += 1
            begin = line.find(opening, end + len(closing))
    return count


def verify_keywords(text: str, *, keyword_list: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def verify_keyword_frequency(text: str, *, word: str, N: int) -> bool:
    return re.findall(r"\w+", text.lower()).count(word.lower()) == int(N)


def validate_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """A forbidden word inside another one counts."""
    return not any(word.lower() in text.lower() for word in forbidden_words)


def verify_letter_frequency(text: str, *, letter: str, N: int) -> bool:
    if len(letter) != 1:
        raise ValueError(f"letter {letter!r}: must be a single character")
    return text.count(letter) == int(N)


def validate_response_language(text: str, *, language: str) -> bool:
    return language_of(text) == language


def verify_paragraph_count(text: str, *, N: int) -> bool:
    paragraphs = "\n".join(map(str.strip, text.splitlines())).split(DIVIDER)
    return len(paragraphs) == int(N) and all(map(str.strip, paragraphs))


def validate_word_constraint(text: str, *, N: int, quantifier: str) -> bool:
    return _enough(len(text.split()), quantifier, int(N), _tenth(int(N)))


def verify_sentence_constraint(text: str, *, N: int, quantifier: str) -> bool:
    return _enough(len(_SENTENCE_END.split(text)), quantifier, int(N), 1)


def validate_paragraphs(text: str, *, N: int, first_word: str, i: int) -> bool:
    paragraphs = text.split("\n\n")
    if not 1 <= int(i) <= int(N):
        raise ValueError(f"i = {i}: must lie in 1..{N}, the number of paragraphs")
    return len(paragraphs) == int(N) and paragraphs[int(i) - 1].strip().startswith(first_word)


def verify_postscript(text: str, *, postscript_marker: str) -> bool:
    """Something follows the first marker."""
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker and rest.strip())


def validate_placeholders(text: str, *, N: int) -> bool:
    return _spans(text, "[", "]") >= int(N)


def verify_bullet_points(text: str, *, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == int(N)


def validate_title(text: str) -> bool:
    return _spans(text, "<<", ">>") > 0


def validate_choice(text: str, *, options: Sequence[str] | str) -> bool:
    """Published rows also hold the options as one text, ``(yes, no)``."""
    if isinstance(options, str):
        options = [option.strip().strip("\"'") for option in options.strip("[]()").split(",")]
    return any(option in text for option in options)


def validate_highlighted_sections(text: str, *, N: int) -> bool:
    """``**bold**`` are two: an empty section at either end."""
    return _spans(text, "*", "*") >= int(N)


def validate_sections(text: str, *, N: int, section_splitter: str) -> bool:
    headings = re.findall(rf"{re.escape(section_splitter)}\s?\d+", text, re.IGNORECASE)
    return len(headings) >= int(N)


def validate_json_format(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, *, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def validate_two_responses(text: str) -> bool:
    answers = text.split("******")
    return len(answers) == 2 and answers[0].strip() != answers[1].strip()


def validate_uppercase(text: str) -> bool:
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    return text == text.lower()


def validate_frequency_capital_words(text: str, *, N: int, quantifier: str) -> bool:
    return _enough(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, int(N), _tenth(int(N)))


def validate_end(text: str, *, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


def validate_quotation(text: str) -> bool:
    return text.startswith('"') and text.endswith('"')


def validate_no_commas(text: str) -> bool:
    return "," not in text


FUNCTIONS: dict[str, Callable[..., bool]] = {
    function.__name__: function
    for function in (
        *(verify_keywords, verify_keyword_frequency, validate_forbidden_words, verify_letter_frequency),
        *(validate_response_language, verify_paragraph_count, validate_word_constraint, verify_sentence_constraint),
        *(validate_paragraphs, verify_postscript, validate_placeholders, verify_bullet_points, validate_title),
        *(validate_choice, validate_highlighted_sections, validate_sections, validate_json_format),
        *(validate_repeat_prompt, validate_two_responses, validate_uppercase, validate_lowercase),
        *(validate_frequency_capital_words, validate_end, validate_quotation, validate_no_commas),
    )
}
"""By the ``func_name`` of a row; a row's other keys are the function's arguments."""
