r"""Answers outside a box, as models phrase them, generated from phrasings and pairs of answer and truth.

``RIGHT`` and ``WRONG`` are (response, truth). The last number of every wrong response is its truth, as in
``$x = \frac{3}{4}$`` for 4. ``stated_cases.tsv`` has the answers, and phrasings that suit one answer only; ``⏎`` is the
end of a line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(name: str, kind: str = "") -> list[list[Any]]:
    """Rows of ``NAME.jsonl``; with a ``kind`` those that begin with it, without it."""
    lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if not line.startswith("#")]
    return [row[1:] for row in rows if row[0] == kind] if kind else rows


PHRASINGS = (
    "The final answer is ${}$.",
    "The final answer is ${}$. I hope it is correct.",
    "Therefore, the answer is \\({}\\).",
    "Answer: \\({}\\)",
    "**Answer:** ${}$",
    "**Answer: ${}$**",
    "### Final answer\n\n$${}$$",
    "So the answer is:\n\n\\[\n{}.\n\\]\n",
    "Adding both sides gives 10 = 10, and hence we obtain\n\\[ {} \\]",
    "Step 1. We know $a+b=7$.\nStep 2. We conclude that it is ${}$, as required.",
    "Thus the answer to part 2, where $t+1=3$, is ${}$ .",
    "Answer: {}",
    "The answer is **${}$**. This took 3 steps, checked against 2 sources!",
    "I first thought that the answer is $99$. No: the answer is ${}$.\n\nLet me know if step 3 needs more detail.",
)
"""With a place for the answer."""

_LINES = Path(__file__).with_name("stated_cases.tsv").read_text(encoding="utf-8").splitlines()
_ROWS = [line.replace("⏎", "\n").split("\t") for line in _LINES]


def _cases(kind: str, phrasings: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [(answer, truth) for of, answer, truth in _ROWS if of == kind]
    phrased = [
        (phrasing.replace("{}", answer), truth)
        for row, (answer, truth) in enumerate(pairs)
        for column, phrasing in enumerate(phrasings)
        if (row + column) % 2 == 0
    ]
    return phrased + [(text, truth) for of, text, truth in _ROWS if of == f"{kind} whole"]


RIGHT = _cases("right", PHRASINGS)
# Without those that speak of other numbers behind the answer.
WRONG = _cases("wrong", tuple(text for index, text in enumerate(PHRASINGS) if index not in (12, 13)))
