"""The over-optimisation curve of a run: what the reward model says, and what the verifier says of the same samples.

    python examples/tiny_rm/curve.py [output/tiny_rm_grpo/seed0] [--width 10]

reads the run's ``metrics.jsonl`` and prints, for every ``--width`` steps, the distance from the first policy (square
root of the KL divergence in nats a token, as in arXiv 2210.10760), the normalised score of the reward model (proxy),
and the share of right answers (gold).
"""

from __future__ import annotations

import argparse
import json
from math import sqrt
from pathlib import Path
from typing import Any

DISTANCE, PROXY, GOLD = "actor/kl_loss", "reward/judged/proxy/score", "reward/judged/gold/correct"


def curve(rows: list[dict[str, Any]], width: int) -> list[tuple[int, float, float, float]]:
    """(last step, distance, proxy, gold), means over ``width`` steps each."""
    found = []
    for begin in range(0, len(rows), width):
        part = rows[begin : begin + width]
        distance, proxy, gold = (sum(row[name] for row in part) / len(part) for name in (DISTANCE, PROXY, GOLD))
        found.append((begin + len(part), sqrt(max(distance, 0.0)), proxy, gold))
    return found


def curve_rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of the run's training steps."""
    lines = (run / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if PROXY in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("output/tiny_rm_grpo/seed0"))
    parser.add_argument("--width", type=int, default=10, help="steps averaged in a line")
    arguments = parser.parse_args()
    print("steps  sqrt(KL)   proxy    gold")
    for step, distance, proxy, gold in curve(curve_rows(arguments.run), arguments.width):
        print(f"{step:5d}  {distance:8.3f}  {proxy:6.3f}  {gold:6.3f}")


if __name__ == "__main__":
    main()
