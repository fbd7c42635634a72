"""The IFEval reward: the share of a prompt's verifiable instructions that a response follows, strictly or loosely.

These are the 25 types of IFEval (Zhou et al., arXiv 2311.07911, table 1), and the functions of RLVR-IFeval (Lambert et
al., "Tulu 3", arXiv 2411.15124) with the verdicts of open-instruct's ``if_functions.py``. The two share names and often
not their rules: in RLVR-IFeval words are cut at white space, a keyword is a whole word, letters and phrases are
compared with their case, paragraphs are divided by ``* * *``.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from roll.config.installation import install_command
from roll.config.reading.errors import did_you_mean
from roll.rewards.answers import after_thought
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure, read_json

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda found, wanted: found < wanted,
    "at least": lambda found, wanted: found >= wanted,
    "at most": lambda found, wanted: found <= wanted,
    "exactly": lambda found, wanted: found == wanted,
}
_FENCE_START, _FENCE_END = re.compile(r"^```(?:json|Json|JSON)?"), re.compile(r"```$")


def holds(found: int, relation: str, wanted: int) -> bool:
    """Compare two counts; ValueError for an unknown relation."""
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r}: must be one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](found, int(wanted))


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by two line ends; empty ones do not count."""
    paragraphs = [piece.strip() for piece in text.split("\n\n")]
    position = int(nth_paragraph) - 1
    if sum(map(bool, paragraphs)) != int(num_paragraphs) or not 0 <= position < int(num_paragraphs):
        return False
    words = paragraphs[position].split()
    first = words[0].lstrip("'\"") if words else ""
    return re.split(r"[.,?!'\"]", first, maxsplit=1)[0].lower() == first_word.lower()


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A marker written with spaces, or without its last stop, counts."""
    marker = postscript_marker.strip()
    if marker.upper() in ("P.S.", "P.P.S"):
        letters = marker.lower().replace(".", "")
        pattern = r"\.\s?".join(letters) + (r"\." if marker.endswith(".") else "")
    else:
        pattern = re.escape(marker.lower())
    return re.search(pattern, text.lower()) is not None


_BULLETS = (r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-.*$")
_HIGHLIGHTS = (r"\*[^\n*]*\*", r"\*\*[^\n*]*\*\*")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# What the Treebank tokenizer of the published checker puts between words: "ROLL's" has one, LOG_LEVEL and A-B are one.
_BETWEEN_WORDS = re.compile(
    r"[\s,;@#$%&?!()\[\]{}<>\"“”‘’`…]+|--+|\.\.\.+|:(?=[^0-9]|$)|(?<=\w)(?='(?:[smd]|ll|re|ve)\b|n't\b)", re.IGNORECASE
)
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


def count_sentences(text: str) -> int:
    """Sentences by punctuation; abbreviations (``Dr.``, ``e.g.``, ``U.S.``) end none. A last piece without a stop is a
    sentence as well."""
    text = text.rstrip()
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(text):
        tail = text[max(begin, end.end() - _LONGEST_ABBREVIATION) : end.end()]
        last = _LAST_WORD.search(tail) if end.end() < len(text) else None
        if last is not None:
            word = last.group(1).lstrip("\"'“‘([*_")
            # A single capital is an initial ("J. Smith"), "I" and small letters are words.
            is_initial = _INITIALS.fullmatch(word) and (len(word) > 1 or (word.isupper() and word != "I"))
            if is_initial or word.lower() in _ABBREVIATIONS:
                continue
        count += not text[begin : end.end()].isspace()
        begin = end.end()
    return count + bool(text[begin:])


def parts(text: str, separator: str) -> list[str] | None:
    """Texts between separators (a regular expression), without empty ends; None if a middle one is empty."""
    pieces = [piece.strip() for piece in re.split(separator, text)]
    pieces = pieces[1:] if not pieces[0] else pieces
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    return pieces if all(pieces) else None


@lru_cache(maxsize=64)
def language_of(text: str) -> str | None:
    """The code (``de``, ``zh-cn``) of the text's language; None where it has none, as numbers alone."""
    from langdetect import DetectorFactory, LangDetectException, detect

    # Without a seed the same text may get another verdict.
    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return None


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, *, keywords: all(keyword.lower() in text.lower() for keyword in keywords),
    "keywords:frequency": lambda text, *, keyword, frequency, relation: holds(
        text.lower().count(keyword.lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, *, forbidden_words: (
        not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, *, letter, let_frequency, let_relation: holds(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    # A text whose language is not detected passes, in the published checker too.
    "language:response_language": lambda text, *, language: language_of(text) in (language, None),
    "length_constraints:number_sentences": lambda text, *, num_sentences, relation: holds(
        count_sentences(text), relation, num_sentences
    ),
    # Divided by ``***``.
    "length_constraints:number_paragraphs": lambda text, *, num_paragraphs: (
        (found := parts(text, r"\s?\*\*\*\s?")) is not None and len(found) == int(num_paragraphs)
    ),
    "length_constraints:number_words": lambda text, *, num_words, relation: holds(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= int(num_placeholders)
    ),
    "detectable_content:postscript": postscript,
    # Searched for one after the other: a star alone on its line goes on to the next one, which may be a bullet itself.
    "detectable_format:number_bullet_lists": lambda text, *, num_bullets: (
        sum(len(re.findall(bullet, text, re.MULTILINE)) for bullet in _BULLETS) == int(num_bullets)
    ),
    "detectable_format:constrained_response": lambda text, *, options=ANSWERS: any(
        option in text for option in options
    ),
    "detectable_format:number_highlighted_sections": lambda text, *, num_highlights: (
        sum(bool(found.strip("*").strip()) for mark in _HIGHLIGHTS for found in re.findall(mark, text))
        >= int(num_highlights)
    ),
    "detectable_format:multiple_sections": lambda text, *, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= int(num_sections)
    ),
    # The whole text is JSON, perhaps in a fence.
    "detectable_format:json_format": lambda text: is_json(
        _FENCE_END.sub("", _FENCE_START.sub("", text.strip())).strip()
    ),
    # Something between the marks on one line.
    "detectable_format:title": lambda text: any(
        0 <= (begin := line.find("<<")) < (end := line.rfind(">>")) and line[begin:end].lstrip("<").rstrip(">").strip()
        for line in text.split("\n")
    ),
    "combination:two_responses": lambda text: (
        (found := parts(text, r"\*\*\*\*\*\*")) is not None and len(found) == 2 and found[0] != found[1]
    ),
    "combination:repeat_prompt": lambda text, *, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, *, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    # Words without small letters, such as ``NASA``, ``GPT-4`` and ``I``.
    "change_case:capital_word_frequency": lambda text, *, capital_frequency, capital_relation: holds(
        sum(map(str.isupper, _BETWEEN_WORDS.split(text))), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and language_of(text) in ("en", None),
    "change_case:english_lowercase": lambda text: text.islower() and language_of(text) in ("en", None),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""By the id of the instruction's type; the keyword arguments are those of a row's ``kwargs``."""


QUANTIFIERS = ("at least", "around", "at most")
DIVIDER = "* * *"
# A stop ends a sentence where one white space follows, unless it ends an abbreviation such as "e.g." or "Mr.".
_SENTENCE_OF_RLVR = re.compile(r"(?<=[.?!])(?<!\w\.\w.)(?<![A-Z][a-z]\.)\s")


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
        len(_SENTENCE_OF_RLVR.split(text)), quantifier, int(N), 1
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

MAX_LENGTH = 200_000  # characters that are looked at; no instruction needs more
Instruction = tuple[str, dict[str, Any]]
RULES = {**CHECKS, **FUNCTIONS}  # IFEval's by the instruction's id, RLVR-IFeval's by the function's name


@dataclass
class IFEval(RewardRule):
    """1 where all instructions of the prompt are followed, else 0; with ``partial`` the share that is.

    The instructions come from the columns ``instruction_id_list`` and ``kwargs`` as IFEval publishes them, or from the
    ground truth: a mapping (or its JSON) with those two, or with ``func_name`` and its arguments as in RLVR-IFeval,
    whose functions have rules of their own.
    """

    numbers: ClassVar[tuple[str, ...]] = ("strict", "loose", "instructions_strict", "instructions_loose")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    mode: Literal["strict", "loose"] = "strict"
    """``loose``: an instruction also counts as followed if it is without markdown stars, or without the first line (an
    introduction), the last (a farewell), or both."""
    partial: bool = False  # score the share of the instructions
    score: float = 1.0  # score of a response that follows all

    def __post_init__(self) -> None:
        if importlib.util.find_spec("langdetect") is None:
            raise RewardOptionError(
                f"ifeval tells languages with langdetect, which is missing: {install_command('ifeval')}"
            )

    def judge(self, sample: RewardSample) -> RewardResult:
        text = (after_thought(sample.response, sample.prompt) or "")[:MAX_LENGTH].strip()
        try:
            instructions = read_instructions(sample)
            strict = [follows(text, *instruction) for instruction in instructions]
            variants = list(loosened(text))
            loose = [
                followed or any(follows(variant, *instruction) for variant in variants)
                for followed, instruction in zip(strict, instructions, strict=True)
            ]
        except (TypeError, ValueError) as error:  # of the row: arguments that a check cannot use
            return failure(f"ifeval: {error}")
        verdicts = strict if self.mode == "strict" else loose
        value = sum(verdicts) / len(verdicts) if self.partial else float(all(verdicts))
        shares = sum(strict) / len(strict), sum(loose) / len(loose)
        metrics = zip(self.numbers, (float(all(strict)), float(all(loose)), *shares), strict=True)
        return RewardResult(self.score * value, dict(metrics))


def follows(text: str, identity: str, arguments: Mapping[str, Any]) -> bool:
    """An empty text follows nothing."""
    return bool(text.strip()) and RULES[identity](text, **arguments)


def loosened(text: str) -> Iterator[str]:
    """The text's variants of the loose criterion (IFEval, section 2.2), besides the text itself."""
    lines = text.split("\n")
    pieces = (lines, lines[1:], lines[:-1], lines[1:-1])
    for number, piece in enumerate("\n".join(part).strip() for part in pieces):
        if number:
            yield piece
        yield piece.replace("*", "")


def read_instructions(sample: RewardSample) -> list[Instruction]:
    """Types and arguments of a row's instructions, without null ones: published rows carry those of other types. Raises
    ``ValueError``: there are none, no such type, or an argument that it lacks."""
    source = sample.row if sample.row.get("instruction_id_list") is not None else as_mapping(sample.ground_truth)
    if "func_name" in source:
        found = [(source["func_name"], source)]
    else:
        identities, arguments = source.get("instruction_id_list"), source.get("kwargs")
        identities = json.loads(identities) if isinstance(identities, str) else identities
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if identities is None or not len(identities):
            raise ValueError("the row has no instruction_id_list, and its ground_truth names no instruction")
        arguments = [{}] * len(identities) if arguments is None else arguments
        if len(arguments) != len(identities):
            raise ValueError(f"{len(identities)} instructions but {len(arguments)} kwargs")
        found = list(zip(identities, map(as_mapping, arguments), strict=True))
    checked = []
    for identity, given in found:
        if identity not in RULES:
            hint = did_you_mean(str(identity), RULES, "; did you mean {!r}?")
            raise ValueError(f"no such instruction: {identity!r}{hint}")
        parameters = list(inspect.signature(RULES[identity]).parameters.values())[1:]
        missing = [p.name for p in parameters if p.default is p.empty and given.get(p.name) is None]
        if missing:
            raise ValueError(f"{identity}: kwargs lack {missing[0]!r}")
        checked.append((identity, {p.name: given[p.name] for p in parameters if given.get(p.name) is not None}))
    return checked


def as_mapping(value: object) -> dict[str, Any]:
    """A mapping, or one written as JSON; anything else is empty."""
    value = read_json(value)
    return dict(value) if isinstance(value, Mapping) else {}
