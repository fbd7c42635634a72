"""Mathematical problems with an answer: GSM8K, MATH, MATH-500, DAPO-Math, NuminaMath, DeepScaleR, AIME."""

from __future__ import annotations

import re
from typing import Any

from published import PrepareOptions, difficulty, one_of, others, prompt_columns, text_of

from roll.datasets.columns import check_messages, require
from roll.datasets.forms import last_boxed, read_ground_truth
from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError

MATH_TAG = "math"
MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""The request that training scripts for such sets commonly make."""

PROBLEMS = ("problem", "Problem", "question", "Question")
ANSWERS = ("answer", "Answer", "final_answer", "expected_answer", "ground_truth", "target")
SOLUTIONS = ("solution", "Solution", "generated_solution")


def convert_math(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """``id, tag, messages, prompt, ground_truth``, ``difficulty`` where the row has one, and all other columns.

    The problem is ``problem`` or ``question``, or (DAPO, verl) a conversation in ``prompt``, which stays as it is,
    with the request it brings along.  The answer is a column of its own, or in ``reward_model``, else what the solution
    has in its last box.

    Raises:
        DataError: no problem, or no answer.
    """
    prompt = source.row.get("prompt")
    if isinstance(prompt, list):
        check_messages(source, "prompt", prompt)
        columns: Row = {"messages": prompt, "prompt": prompt[-1]["content"]}
    else:
        names = PROBLEMS if prompt is None else (*PROBLEMS, "prompt")
        columns = prompt_columns(text_of(source, names), options)
    answer = read_answer(source)
    kept = others(source, ("id", "tag", "messages", "prompt", "ground_truth", "reward_model", "difficulty"))
    head = {"id": row_id, "tag": options.tag, **columns, "ground_truth": answer}
    return {**head, **difficulty(source), **kept}


def read_answer(source: SourceRow) -> str:
    """
    Raises:
        DataError: neither an answer column nor a boxed answer in the solution.
    """
    given: Any = next((source.row[name] for name in ANSWERS if source.row.get(name) is not None), None)
    if given is None:
        given = read_ground_truth(source.row)
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if given is not None:
        text = str(given).strip()
        if not text:
            raise DataError(f"{source.place}: the answer is empty")
        return text
    column, solution = one_of(source, SOLUTIONS)
    boxed = last_boxed(str(solution))
    if boxed is None:
        raise DataError(f"{source.place}: no answer: {column} has none in a \\boxed{{}}, and there is no answer column")
    return boxed


GSM8K_TAG = "gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""The request that training scripts for this data set commonly make."""

_FINAL = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


def final_number(answer: str) -> str | None:
    """The number behind the last ``####``, without commas."""
    found = _FINAL.findall(answer)
    return found[-1].replace(",", "") if found else None


def convert_gsm8k(source: SourceRow, row_id: str, options: PrepareOptions) -> Row:
    """A published row (``question``, ``answer``) as ``id, tag, messages, prompt, ground_truth, question, answer``.

    Raises:
        DataError: a column is missing, or the answer does not end in ``#### <number>``.
    """
    question, answer = str(require(source, "question")), str(require(source, "answer"))
    ground_truth = final_number(answer)
    if ground_truth is None:
        raise DataError(f"{source.place}: the answer must end in '#### <number>', found {answer[-60:]!r}")
    head = {"id": row_id, "tag": options.tag, **prompt_columns(question, options, separator=" ")}
    return {**head, "ground_truth": ground_truth, "question": question, "answer": answer}
