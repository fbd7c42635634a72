"""Preferences of published data sets: pairs, rankings, and single responses with a label.

The shapes, by what a row has:

* ``chosen`` and ``rejected``: texts behind a prompt of its own column, conversations that end with the response
  (UltraFeedback, trl-lib, Argilla, Skywork-Reward), texts of both sides' turns (Anthropic's HH), or one turn as an
  object behind ``conversations`` (LLaMA-Factory);
* ``response_1`` and ``response_2`` with a strength from -3 to 3 (HelpSteer2's and HelpSteer3's preferences);
* ``human_ref_A`` and ``human_ref_B`` with ``labels`` (SHP);
* ``answers`` with ranks (Nectar), ``completions`` with ratings (UltraFeedback's own), ``output`` as a list, best first;
* ``response`` with five grades (HelpSteer2's own);
* ``completion`` with ``label`` (KTO), or a conversation with ``kto_tag`` (LLaMA-Factory).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chat_sets import CHATS, hh_messages, messages_of, with_options
from published import PrepareOptions, one_of, others

from roll.datasets.columns import Message, with_system
from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError

PAIR_TAG = "preference"
PROMPTS = ("prompt", "question", "instruction", "context", "history", "input", *CHATS)
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response")
SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_score", "rejected_score"),
)
"""Columns of what the two responses of a pair were given."""
TWO = (("response_1", "response_2"), ("response1", "response2"))
STRENGTHS = ("preference_strength", "overall_preference")
"""Of HelpSteer: -3, the first is much better, to 3, the second is."""
SHP = ("human_ref_A", "human_ref_B")
LABELS = ("label", "kto_tag", "rating")
COMPLETIONS = ("completion", "response", "output", "answer")
GRADE = "helpfulness"
USED = ("id", "tag", *PROMPTS, *CHOSEN, *REJECTED, *(name for pair in (*SCORES, *TWO, SHP) for name in pair))
USED += (*STRENGTHS, "labels", "answers", "completions", "completion", "response", "output", *LABELS, GRADE)


class NoPreferenceError(DataError):
    """A row that says nothing of use: a tie, two equal responses, an empty one, two prompts. It is left out and counted
    under ``reason``, whatever becomes of rows that cannot be read."""

    def __init__(self, source: SourceRow, reason: str, message: str) -> None:
        super().__init__(f"{source.place}: {message}")
        self.reason = reason


@dataclass(frozen=True)
class Ranked:
    """The responses to one prompt with their scores, the higher the better."""

    prompt: list[Message]
    responses: list[str]
    scores: list[float]
    says_how_much: bool
    """Differences of scores mean something; else they are ranks."""


def convert_pair(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """``id, tag, messages`` (up to the response), ``chosen`` and ``rejected`` as texts, ``margin`` where the row says
    by how much, and all other columns. Of more than two responses the best and the worst.

    Raises:
        DataError: no preference in a known shape; :class:`NoPreferenceError` where there is none to learn.
    """
    ranked = read_ranked(source)
    best, worst = (ranked.scores.index(end(ranked.scores)) for end in (max, min))
    margin = {"margin": ranked.scores[best] - ranked.scores[worst]} if ranked.says_how_much else {}
    pair = {"chosen": ranked.responses[best], "rejected": ranked.responses[worst]}
    return {**head(ranked.prompt, row_id, options), **pair, **margin, **others(source, USED)}


def convert_ranking(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """``id, tag, messages``, ``responses`` as texts, best first, and their ``scores``; of a single graded response both
    are lists of one.

    Raises: as :func:`convert_pair`.
    """
    if GRADE in source.row and source.row.get("response") is not None:
        prompt, response = single(source, ("response",))
        grade = source.row[GRADE]
        if not isinstance(grade, int | float):
            raise DataError(f"{source.place}: {GRADE} must be a number, found {grade!r}")
        rated = {"responses": [response], "scores": [float(grade)]}
        return {**head(prompt, row_id, options), **rated, **others(source, USED)}
    ranked = read_ranked(source)
    order = sorted(range(len(ranked.scores)), key=lambda index: -ranked.scores[index])
    rated = {"responses": [ranked.responses[i] for i in order], "scores": [ranked.scores[i] for i in order]}
    return {**head(ranked.prompt, row_id, options), **rated, **others(source, USED)}


def convert_label(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """``id, tag, messages``, ``completion`` as a text, and ``label`` true or false (KTO).

    Raises:
        DataError: no completion, or no label.
    """
    prompt, completion = single(source, COMPLETIONS)
    column, label = one_of(source, LABELS)
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(f"{source.place}: {column} must be true or false, found {label!r}")
    judged = {"completion": completion, "label": bool(label)}
    return {**head(prompt, row_id, options), **judged, **others(source, USED)}


def head(prompt: list[Message], row_id: str, options: PrepareOptions) -> Row:
    return {"id": row_id, "tag": options.tag, "messages": with_options(prompt, options)}


def read_ranked(source: SourceRow) -> Ranked:
    """The responses of a row in any of the shapes."""
    row = source.row
    listed = next((name for name in ("answers", "completions", "output") if isinstance(row.get(name), list)), None)
    two = next((names for names in TWO if row.get(names[0]) is not None), None)
    if listed is not None:
        ranked = of_list(source, listed)
    elif two is not None:
        column, strength = one_of(source, STRENGTHS)
        if not isinstance(strength, int | float):
            raise DataError(f"{source.place}: {column} must be a number from -3 to 3, found {strength!r}")
        ranked = Ranked(prompt_of(source), [str(row[name]) for name in two], [-strength / 2, strength / 2], True)
    elif row.get(SHP[0]) is not None:
        _, label = one_of(source, ("labels",))
        # A score ratio of 2 says twice as many votes.
        lead = math.log(max(float(row.get("score_ratio") or math.e), 1.0)) * (1 if label else -1)
        ranked = Ranked(prompt_of(source), [str(row[name]) for name in SHP], [lead / 2, -lead / 2], True)
    else:
        ranked = of_sides(source)
    return checked(source, ranked)


def of_sides(source: SourceRow) -> Ranked:
    """``chosen`` and ``rejected``, with their scores where the row has both."""
    chosen_prompt, chosen = response_of(source, *one_of(source, CHOSEN))
    rejected_prompt, rejected = response_of(source, *one_of(source, REJECTED))
    if chosen_prompt != rejected_prompt:
        raise NoPreferenceError(source, "different prompts", "chosen and rejected answer different prompts")
    given = (tuple(source.row.get(name) for name in names) for names in SCORES)
    scores = next(([float(a), float(b)] for a, b in given if a is not None and b is not None), None)
    prompt = chosen_prompt or prompt_of(source)
    return Ranked(prompt, [chosen, rejected], scores or [1.0, 0.0], scores is not None)


def of_list(source: SourceRow, column: str) -> Ranked:
    """Answers as objects with a rank (the lower the better) or a rating, or as texts, best first."""
    texts, scores, rated = [], [], False
    entries = source.row[column]
    for place, entry in enumerate(entries):
        if isinstance(entry, Mapping) and "content" not in entry:
            texts.append(str(entry.get("answer") or entry.get("response") or ""))
            rating = next((entry[name] for name in ("overall_score", "score", "rating") if entry.get(name)), None)
            rated = rated or rating is not None
            scores.append(float(rating) if rating is not None else -float(entry.get("rank", place)))
        else:
            texts.append(response_of(source, column, [entry] if isinstance(entry, Mapping) else entry)[1])
            scores.append(float(len(entries) - place))
    return Ranked(prompt_of(source), texts, scores, rated)


def checked(source: SourceRow, ranked: Ranked) -> Ranked:
    """
    Raises:
        NoPreferenceError: an empty response, no two of different score, or one text with two scores.
    """
    if not all(text.strip() for text in ranked.responses):
        raise NoPreferenceError(source, "empty response", "a response is empty")
    if len(ranked.responses) < 2 or len(set(ranked.scores)) < 2:
        raise NoPreferenceError(source, "tie", "no response is better than another")
    best, worst = (ranked.responses[ranked.scores.index(end(ranked.scores))] for end in (max, min))
    if best == worst:
        raise NoPreferenceError(source, "same response", "chosen and rejected are the same response")
    return ranked


def single(source: SourceRow, columns: Sequence[str]) -> tuple[list[Message], str]:
    """A prompt and its only response: of two columns, or a conversation that ends with it."""
    column = next((name for name in columns if source.row.get(name) is not None), None)
    if column is None:
        column, value = one_of(source, CHATS)
        return response_of(source, column, value)
    before, text = response_of(source, column, source.row[column])
    return before or prompt_of(source), text


def response_of(source: SourceRow, column: str, value: Any) -> tuple[list[Message], str]:
    """The conversation before the response (empty: it stands elsewhere), and the response."""
    if isinstance(value, Mapping):
        value = [value]
    messages = hh_messages(value) if isinstance(value, str) else messages_of(source, column, value)
    if messages is None:
        if not str(value).strip():
            raise NoPreferenceError(source, "empty response", f"{column} is empty")
        return [], str(value)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{source.place}: {column} must end with the assistant's response")
    return messages[:-1], str(messages[-1]["content"])


def prompt_of(source: SourceRow) -> list[Message]:
    """The prompt of its own column; of LLaMA-Factory's and Alpaca's rows with what stands in ``input`` behind it."""
    column, value = one_of(source, PROMPTS)
    if isinstance(value, list):
        messages = messages_of(source, column, value)
    else:
        # Nectar's prompts end with the assistant's opening.
        text = str(value).removesuffix("\n\nAssistant: ").removesuffix("\n\nAssistant:")
        messages = hh_messages(text) or turns_of(text)
        extra = source.row.get("input")
        if column == "instruction" and isinstance(extra, str) and extra:
            messages[-1]["content"] += f"\n\n{extra}"
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{source.place}: {column} ends with the assistant; expected the turn that is answered")
    return with_system(messages, source.row.get("system"))


def turns_of(text: str) -> list[Message]:
    """A text that is one turn of a user, perhaps after ``Human:``."""
    return [{"role": "user", "content": text.strip().removeprefix("Human:").strip() if "Human:" in text[:9] else text}]
