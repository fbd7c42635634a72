"""Demonstrations of the tiny agentic examples, by players that err: what the warm starts imitate.

Every turn is a row: the conversation so far, and the response.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from roll.environments.frozen_lake import FrozenLake

Row = dict[str, Any]
SEED = "demonstrations"


def lake(number: int, erring: float = 0.5) -> Iterator[Row]:
    """A game, a row a move: the lake as it is now, and where to go."""
    rng = random.Random(f"{SEED}/lake/{number}")
    game = FrozenLake(size=4, max_steps=8, min_distance=2, show_instruction=False)
    text, _ = game.reset(rng.getrandbits(31))
    done = False
    while not done:
        random_move = rng.random() < erring
        move = game.sample_action(rng) if random_move else rng.choice(game.best_moves())
        yield {"messages": [user(text)], "response": move}
        text, _, terminated, truncated, _ = game.step(move)
        done = terminated or truncated


PLAYERS: dict[str, dict[str, tuple[Callable[[int], Iterator[Row]], int]]] = {
    "lake": {"sft": (lake, 48_000)},
    "tools": {"sft": (tools, 28_000), "sft2": (tools_seldom, 1_600), "questions": (questions, 20_000)},
}
"""By task and file: the player, and the number of rows."""


def rows(player: Callable[[int], Iterator[Row]], count: int) -> list[Row]:
    """The first ``count`` rows of its games."""
    found: list[Row] = []
    number = 0
    while len(found) < count:
        found += player(number)
        number += 1
    return found[:count]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
