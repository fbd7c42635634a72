"""Generate small repositories with a fault and tests that fail: a JSON line each, for the agent of repository_agent.py.

python examples/agentic_demo/toy_repositories.py data/repositories/train.jsonl 2000
python examples/agentic_demo/toy_repositories.py data/repositories/val.jsonl 200 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SHOP = '''"""Prices of a shop."""

from shop.rules import REDUCTION, SHIPPING


def total(prices, reduced=False):
    """The sum of all prices with shipping, reduced by a share where asked."""
    amount = sum(prices)
    if reduced:
        amount = amount {minus} amount * REDUCTION / 100
    return amount + SHIPPING if amount < {limit} else amount
'''
RULES = "REDUCTION = {reduction}\nSHIPPING = {shipping}\n"
TEXTS = '''"""Words of a text."""


def longest(text, least={least}):
    """The longest word of at least ``least`` letters, the first of equals; an empty text without one."""
    found = ""
    for word in text.split():
        if len(word) >= least and len(word) {longer} len(found):
            found = word
    return found


def initials(text):
    """The first letters of all words in capitals."""
    return "".join(word[{first}].upper() for word in text.split())
'''


def shop(rng: random.Random) -> dict[str, Any]:
    """Two modules; the fault is a sign or a limit."""
    values = {"reduction": rng.choice([10, 20, 25, 50]), "shipping": rng.randint(2, 6)}
    limit, sign = rng.choice([20, 30, 40]), rng.random() < 0.5
    wrong = SHOP.format(minus="+" if sign else "-", limit=limit if sign else limit + 60)
    small, big = [limit // 4] * 2, [limit // 2] * 4

    def right(prices: list[int], reduced: bool = False) -> float:
        amount = sum(prices) - sum(prices) * values["reduction"] / 100 * reduced
        return amount + values["shipping"] if amount < limit else amount

    return {
        "issue": f"total() is wrong: a reduction takes off a share of the sum, and shipping is free from {limit} on.",
        "files": {"shop/__init__.py": "", "shop/prices.py": wrong, "shop/rules.py": RULES.format(**values)},
        "imports": "from shop.prices import total",
        "tests": f"assert total({big}) == {right(big)}\nassert total({small}, True) == {right(small, True)}",
        "hidden_tests": f"assert total({small}) == {right(small)}\nassert total({big}, True) == {right(big, True)}",
        "solution": {"shop/prices.py": SHOP.format(minus="-", limit=limit)},
    }


def texts(rng: random.Random) -> dict[str, Any]:
    """One module with two functions, one of them wrong."""
    least, which = rng.randint(2, 4), rng.random() < 0.5
    wrong = TEXTS.format(least=least, longer="<" if which else ">", first=0 if which else -1)
    words = [" ".join("".join(rng.choices("abcde", k=length)) for length in (2, 5, 3, 5)) for _ in range(2)]
    first = [text.split()[1] for text in words]
    capitals = ["".join(word[0].upper() for word in text.split()) for text in words]
    tests = [f"assert longest({text!r}) == {word!r}" for text, word in zip(words, first, strict=True)]
    others = [f"assert initials({text!r}) == {word!r}" for text, word in zip(words, capitals, strict=True)]
    return {
        "issue": "longest() finds nothing." if which else "initials() takes the wrong letters.",
        "files": {"texts.py": wrong},
        "imports": "from texts import initials, longest",
        "tests": f"{tests[0]}\n{others[0]}",
        "hidden_tests": f"{tests[1]}\n{others[1]}",
        "solution": {"texts.py": TEXTS.format(least=least, longer=">", first=0)},
    }


def task(number: int, seed: int = 0) -> dict[str, Any]:
    """Task ``number``; with ``solution``, the files that repair it, which is no part of the policy's prompt."""
    rng = random.Random(f"{seed}/{number}")
    return rng.choice([shop, texts])(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task(number, options.seed)) + "\n" for number in range(options.count)]
    options.file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
