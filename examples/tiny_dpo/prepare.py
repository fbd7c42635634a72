"""Make what the tiny DPO example needs: the tiny example's warm start, and pairs of worked solutions.

    python examples/tiny_dpo/prepare.py [--seed 0]

A pair is a word problem with a solution that is right and one in which at least one step is wrong, so that which of the
two is preferred can be checked.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "tiny"))

import prepare as tiny  # noqa: E402  of the tiny example
import word_problems  # noqa: E402
from warm_start import make_warm_start  # noqa: E402

SETS = {"train": (tiny.TRAIN_PROBLEMS, tiny.TRAIN_SEED, False), "val": (tiny.VALIDATION_PROBLEMS, 999, True)}
SLIP_PROBABILITY = 0.4


def pairs(count: int, seed: int, *, validation: bool) -> list[dict[str, str]]:
    """One pair for each of ``count`` problems."""
    rng = random.Random(seed)
    rows = []
    for index, problem in enumerate(word_problems.draw_problems(count, seed, validation=validation)):
        right = wrong = word_problems.solution(problem)
        while wrong == right:
            wrong = word_problems.demonstration(problem, rng, SLIP_PROBABILITY)
        rows.append({"id": f"pair-{index}", "instruction": problem.question, "chosen": right, "rejected": wrong})
    return rows


def prepare(seed: int, output: Path = FOLDER / "artifacts") -> None:
    """Write ``train.jsonl`` and ``val.jsonl``, and make the warm start of ``seed`` if it is not there."""
    make_warm_start(seed)
    output.mkdir(parents=True, exist_ok=True)
    for name, (count, drawn_with, validation) in SETS.items():
        lines = [json.dumps(row) + "\n" for row in pairs(count, drawn_with, validation=validation)]
        (output / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    prepare(parser.parse_args().seed)
