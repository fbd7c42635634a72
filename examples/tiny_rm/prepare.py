"""Make what the tiny reward-model example needs: the tiny example's warm start, and judged solutions.

    python examples/tiny_rm/prepare.py [--seed 0]

A row of ``train.jsonl`` is a word problem with four worked solutions of the kind that the warm start writes, each with
what the tiny task's verifier says of its final number: 1 or 0. A row of ``steps.jsonl`` is one such solution line by
line, each with whether its result is right. ``prompts_val.jsonl`` is the tiny example's validation set under the tag
``verified``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "tiny"))

import prepare as tiny  # noqa: E402  of the tiny example
import word_problems  # noqa: E402
from warm_start import make_warm_start  # noqa: E402

SETS = {"train": (tiny.TRAIN_PROBLEMS, tiny.TRAIN_SEED, False), "val": (tiny.VALIDATION_PROBLEMS, 999, True)}
RESPONSES, SLIP_PROBABILITY = 4, tiny.SLIP_PROBABILITY
STEP_SEED = 5


def is_right(problem: word_problems.WordProblem, text: str) -> bool:
    """The verifier: the number behind ``####``."""
    return text.rpartition("#### ")[2].strip() == str(problem.answer)


def judged(count: int, seed: int, *, validation: bool) -> list[dict[str, Any]]:
    """For each of ``count`` problems solutions of which at least one is right and one wrong."""
    rng = random.Random(seed)
    rows = []
    for index, problem in enumerate(word_problems.draw_problems(count, seed, validation=validation)):
        scores: list[int] = []
        while len(set(scores)) < 2:
            texts = [word_problems.demonstration(problem, rng, SLIP_PROBABILITY) for _ in range(RESPONSES)]
            scores = [int(is_right(problem, text)) for text in texts]
        rows.append({"id": f"judged-{index}", "prompt": problem.question, "responses": texts, "scores": scores})
    return rows


def judged_steps(count: int, seed: int, *, validation: bool) -> Iterator[dict[str, Any]]:
    """A solution to each of ``count`` problems, its lines labelled; what follows from a wrong number is wrong."""
    rng = random.Random(STEP_SEED)
    for index, problem in enumerate(word_problems.draw_problems(count, seed, validation=validation)):
        lines = word_problems.demonstration(problem, rng, SLIP_PROBABILITY).split("\n")
        written = [line.rpartition("=")[2].removeprefix("#### ") for line in lines]
        wanted = [*problem.results, problem.answer]
        labels = [int(number == str(result)) for number, result in zip(written, wanted, strict=True)]
        yield {"id": f"steps-{index}", "prompt": problem.question, "completions": lines, "labels": labels}


def prepare(seed: int, output: Path = FOLDER / "artifacts") -> None:
    """Write the sets, and make the warm start of ``seed`` if it is not there."""
    make_warm_start(seed)
    output.mkdir(parents=True, exist_ok=True)
    for name, (count, drawn_with, validation) in SETS.items():
        rows = judged(count, drawn_with, validation=validation)
        tiny.write_jsonl(output / f"{name}.jsonl", rows)
        suffix = "" if name == "train" else f"_{name}"
        tiny.write_jsonl(output / f"steps{suffix}.jsonl", judged_steps(count, drawn_with, validation=validation))
    prompts = map(json.loads, tiny.Artifacts(tiny.DEFAULT_OUTPUT).validation_file.open(encoding="utf-8"))
    tiny.write_jsonl(output / "prompts_val.jsonl", (row | {"tag": "verified"} for row in prompts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    prepare(parser.parse_args().seed)
