"""The answer that a response stands for in a majority vote."""

from __future__ import annotations

from roll.rewards.answers import (
    after_thought,
    isolated_number,
    last_boxed,
    last_marked,
    parse_number,
    stated_answer,
    tagged_answer,
)

LONGEST = 200
"""Characters: what is longer is no answer that two samples would share."""


def voted_answer(response: str, prompt: str = "") -> str | None:
    """The boxed answer, else the one behind ``####``, in ``<answer>`` tags, else the stated one or the last number, as
    ``math_rule`` finds them; equal numbers are spelled alike. None: the response holds none of these.

    Equivalence is of spellings and of numbers: ``1/2`` and ``0.5`` are one vote, ``x+1`` and ``1+x`` are two.
    """
    text = after_thought(response, prompt)
    if text is None:
        return None
    found = next((answer for read in READERS if (answer := read(text)) is not None), None)
    if found is None or len(found) > LONGEST:
        return None
    number = parse_number(found)
    return str(number) if number is not None else "".join(found.split()).strip(".$").lower()


READERS = (last_boxed, last_marked, tagged_answer, stated_answer, isolated_number)
