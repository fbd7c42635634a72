"""Samples per second of every reward rule, on one core, and of math-verify with one process per sample next to it.

    python benchmarks/rewards.py [--seconds 1.0]

Times are wall times of the calling process; the math rule's helper process works while the caller waits, so one core is
busy at any time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from roll.rewards import RewardSample, build_reward

WORDS = (
    "we",
    "add",
    "the",
    "apples",
    "and",
    "take",
    "away",
    "what",
    "Ben",
    "has",
    "eaten",
    "then",
    "divide",
    "baskets",
)


def make_samples(count: int, answer: Callable[[random.Random], tuple[str, str]]) -> list[RewardSample]:
    """Responses of about 400 characters that end in an answer."""
    rng = random.Random(0)
    samples = []
    for _ in range(count):
        text, truth = answer(rng)
        working = " ".join(f"{rng.choice(WORDS)} {rng.randint(1, 99)}" for _ in range(50))
        samples.append(RewardSample("", f"{working}\n{text}", truth))
    return samples


def marked(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(0, 9999)
    return f"#### {number:,}", str(number)


def unmarked(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(0, 9999)
    return f"So there are {number} of them.", str(number)


def boxed_number(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(0, 9999)
    return rf"The answer is \boxed{{{number}}}.", str(number)


def boxed_algebra(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return rf"Hence \boxed{{{a}x^2+{b}x}}.", f"x({a}x+{b})"


def stated_algebra(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return rf"The final answer is ${a}x^2+{b}x$.", f"x({a}x+{b})"


def choice(rng: random.Random) -> tuple[str, str]:
    return f"The answer is ({rng.choice('ABCD')}).", "B"


def words(rng: random.Random) -> tuple[str, str]:
    return rf"\boxed{{{' '.join(rng.choices(WORDS, k=4))}}}", "Ben has eaten apples"


def instructions(count: int) -> list[RewardSample]:
    """Four instructions to each response."""
    row = {
        "instruction_id_list": [
            "punctuation:no_comma",
            "keywords:existence",
            "length_constraints:number_words",
            "detectable_format:title",
        ],
        "kwargs": [{}, {"keywords": ["apples", "Ben"]}, {"relation": "less than", "num_words": 200}, {}],
    }
    return [RewardSample("", sample.response, None, row=row) for sample in make_samples(count, words)]


def boxes(rng: random.Random) -> tuple[str, str]:
    """Three boxes, shifted."""
    corners = [(rng.randint(0, 50), rng.randint(0, 50)) for _ in range(3)]
    truth = [[x, y, x + 40, y + 40] for x, y in corners]
    found = [{"bbox_2d": [x + 5, y + 5, x + 45, y + 45]} for x, y in corners]
    return json.dumps(found), json.dumps(truth)


def verify_alone(gold: str, answer: str) -> None:
    from math_verify import parse, verify

    verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}"))


def one_process_per_sample(samples: Sequence[RewardSample]) -> None:
    for sample in samples:
        process = multiprocessing.Process(target=verify_alone, args=(sample.ground_truth, sample.response[-20:]))
        process.start()
        process.join()


def rate(score: Callable[[Sequence[RewardSample]], object], samples: list[RewardSample], seconds: float) -> float:
    """Samples per second, after one warm-up batch."""
    score(samples[:4])
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        score(samples)
        done += len(samples)
    return done / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each row")
    seconds = parser.parse_args().seconds
    rows = [
        ("gsm8k_rule strict", "gsm8k_rule", {}, make_samples(2000, marked)),
        ("gsm8k_rule flexible, no mark", "gsm8k_rule", {"method": "flexible"}, make_samples(2000, unmarked)),
        ("math_rule, numbers", "math_rule", {}, make_samples(2000, boxed_number)),
        ("math_rule, algebra", "math_rule", {}, make_samples(50, boxed_algebra)),
        ("math_rule, numbers in prose", "math_rule", {}, make_samples(2000, unmarked)),
        ("math_rule, algebra without a box", "math_rule", {}, make_samples(50, stated_algebra)),
        ("multiple_choice", "multiple_choice", {}, make_samples(2000, choice)),
        ("format", "format", {"pattern": r"#### \d+$", "mode": "search"}, make_samples(2000, marked)),
        ("exact_match, boxed", "exact_match", {"source": "boxed"}, make_samples(2000, words)),
        ("f1, boxed", "f1", {"source": "boxed"}, make_samples(2000, words)),
        ("ifeval, 4 instructions", "ifeval", {}, instructions(200)),
        ("detection, 3 boxes", "detection", {}, make_samples(500, boxes)),
        ("crossthinkqa", "crossthinkqa", {}, make_samples(2000, choice)),
        ("repetition_penalty", "repetition_penalty", {}, make_samples(500, words)),
        ("length_penalty", "length_penalty", {"limit": 100}, make_samples(2000, words)),
    ]
    table = Table("reward", "samples / s", title="Rewards on one core")
    for title, name, options, samples in rows:
        reward = build_reward(name, options)
        table.add_row(title, f"{rate(reward, samples, seconds):,.0f}")
        reward.close()
    alone = partial(rate, one_process_per_sample, make_samples(10, boxed_algebra), seconds)
    table.add_row("math-verify, one process per sample", f"{alone():,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
