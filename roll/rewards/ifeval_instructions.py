"""The 25 types of verifiable instructions of IFEval (Zhou et al., arXiv 2311.07911, table 1)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}
"""By the id of the instruction's type."""
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda found, wanted: found < wanted,
    "at least": lambda found, wanted: found >= wanted,
    "at most": lambda found, wanted: found <= wanted,
    "exactly": lambda found, wanted: found == wanted,
}
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE_START, _FENCE_END = re.compile(r"^```(?:json|Json|JSON)?"), re.compile(r"```$")


def instruction(identity: str) -> Callable[[Check], Check]:
    """Register a check under the id of its instruction."""

    def decorate(check: Check) -> Check:
        CHECKS[identity] = check
        return check

    return decorate


def holds(found: int, relation: str, wanted: int) -> bool:
    """
    Raises:
        ValueError: no such relation.
    """
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r}: must be one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](found, int(wanted))


@instruction("keywords:existence")
def existence(text: str, *, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


@instruction("keywords:frequency")
def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return holds(text.lower().count(keyword.lower()), relation, frequency)


@instruction("keywords:forbidden_words")
def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


@instruction("keywords:letter_frequency")
def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("language:response_language")
def response_language(text: str, *, language: str) -> bool:
    return _is_in(text, language)


def _is_in(text: str, code: str) -> bool:
    """As published: a text whose language is not detected is not held against the response."""
    return language(text) in (code, None)


@instruction("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return holds(count_sentences(text), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are divided by ``***``."""
    paragraphs = parts(text, r"\s?\*\*\*\s?")
    return paragraphs is not None and len(paragraphs) == int(num_paragraphs)


@instruction("length_constraints:number_words")
def number_words(text: str, *, num_words: int, relation: str) -> bool:
    return holds(count_words(text), relation, num_words)


@instruction("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by two line ends; empty ones do not count."""
    paragraphs = [piece.strip() for piece in text.split("\n\n")]
    position = int(nth_paragraph) - 1
    if sum(map(bool, paragraphs)) != int(num_paragraphs) or not 0 <= position < len(paragraphs):
        return False
    words = paragraphs[position].split()
    first = words[0].lstrip("'\"") if words else ""
    return re.split(r"[.,?!'\"]", first, maxsplit=1)[0].lower() == first_word.lower()


@instruction("detectable_content:number_placeholders")
def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= int(num_placeholders)


@instruction("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: str) -> bool:
    """A marker written with spaces, or without its last stop, counts."""
    marker = postscript_marker.strip()
    if marker.upper() in ("P.S.", "P.P.S"):
        letters = marker.lower().replace(".", "")
        pattern = r"\.\s?".join(letters) + (r"\." if marker.endswith(".") else "")
    else:
        pattern = re.escape(marker.lower())
    return re.search(pattern, text.lower()) is not None


@instruction("detectable_format:number_bullet_lists")
def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^*\n].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == int(num_bullets)


@instruction("detectable_format:constrained_response")
def constrained_response(text: str, *, options: Sequence[str] = ANSWERS) -> bool:
    return any(option in text for option in options)


@instruction("detectable_format:number_highlighted_sections")
def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    found = [section for section in single + double if section.strip("*").strip()]
    return len(found) >= int(num_highlights)


@instruction("detectable_format:multiple_sections")
def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    headings = re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)
    return len(headings) >= int(num_sections)


@instruction("detectable_format:json_format")
def json_format(text: str) -> bool:
    """The whole text is JSON, perhaps in a fence."""
    inner = _FENCE_END.sub("", _FENCE_START.sub("", text.strip())).strip()
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def title(text: str) -> bool:
    """Something between ``<<`` and ``>>`` on one line."""
    spans = ((line, line.find("<<"), line.rfind(">>")) for line in text.split("\n"))
    return any(0 <= begin < end and line[begin:end].strip("<> \t\r") for line, begin, end in spans)


@instruction("combination:two_responses")
def two_responses(text: str) -> bool:
    answers = parts(text, r"\*\*\*\*\*\*")
    return answers is not None and len(answers) == 2 and answers[0] != answers[1]


@instruction("combination:repeat_prompt")
def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def quotation(text: str) -> bool:
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'


@instruction("change_case:capital_word_frequency")
def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return holds(count_capital_words(text), capital_relation, capital_frequency)


@instruction("change_case:english_capital")
def english_capital(text: str) -> bool:
    return text.isupper() and _is_in(text, "en")


@instruction("change_case:english_lowercase")
def english_lowercase(text: str) -> bool:
    return text.islower() and _is_in(text, "en")


@instruction("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return "," not in text


WORD = re.compile(r"\w+")
_CAPITAL_WORD = re.compile(r"[^\W_]+(?:[-'’.&/][^\W_]+)*")
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr jr vs etc al fig eq vol approx dept est inc ltd co corp gen col sgt rev hon pres gov sen
    rep jan feb mar apr jun jul aug sep sept oct nov dec
    """.split()  # noqa: SIM905  a word a line would take forty
)
# A stop ends a sentence where white space and no small letter follows it; the stops of Chinese and Japanese need none.
# Possessive, and begun at the first stop of a run only: a model may write a hundred thousand stops.
_SENTENCE_END = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s++[^\sa-z]|\s*+$)|(?<![。！？])[。！？]++[」』”’）]*+"
)
_LAST_WORD = re.compile(r"(\S*)\.\W*$")
_LONGEST_ABBREVIATION = 40
_INITIALS = re.compile(r"(?:[A-Za-z]\.)*[A-Za-z]")


def count_words(text: str) -> int:
    return len(WORD.findall(text))


def count_sentences(text: str) -> int:
    """Sentences by punctuation; abbreviations (``Dr.``, ``e.g.``, ``U.S.``) end none. A last piece without a stop is a
    sentence as well."""
    text = text.rstrip()
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(text):
        tail = text[max(begin, end.end() - _LONGEST_ABBREVIATION) : end.end()]
        if end.end() < len(text) and _ends_in_abbreviation(tail):
            continue
        count += WORD.search(text, begin, end.end()) is not None
        begin = end.end()
    return count + (WORD.search(text, begin) is not None)


def _ends_in_abbreviation(piece: str) -> bool:
    last = _LAST_WORD.search(piece)
    if last is None:
        return False
    word = last.group(1).lstrip("\"'“‘([*_")
    # A single capital is an initial ("J. Smith"), "I" and small letters are words.
    is_initial = _INITIALS.fullmatch(word) is not None and (len(word) > 1 or (word.isupper() and word != "I"))
    return is_initial or word.lower() in _ABBREVIATIONS


def count_capital_words(text: str) -> int:
    """Words without small letters, such as ``NASA``, ``GPT-4`` and ``I``."""
    return sum(word.isupper() for word in _CAPITAL_WORD.findall(text))


def parts(text: str, separator: str) -> list[str] | None:
    """Texts between separators (a regular expression), without empty ends; None if a middle one is empty."""
    pieces = [piece.strip() for piece in re.split(separator, text)]
    pieces = pieces[1:] if not pieces[0] else pieces
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    return pieces if all(pieces) else None


@lru_cache(maxsize=64)
def language(text: str) -> str | None:
    """The code (``de``, ``zh-cn``) of the text's language; None where it has none, as numbers alone."""
    from langdetect import DetectorFactory, LangDetectException, detect

    # Without a seed the same text may get another verdict.
    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return None
