"""Demonstrations of the tiny agentic examples, by players that err: what the warm starts imitate.

The lake is crossed by a player half of whose moves are random; numbers are guessed by a player that errs half of the
time; the calculator is first always called, then hardly ever.  Every turn is a row: the conversation so far, and the
response.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from games import Calculator, GuessNumber

from roll.environments.frozen_lake import FrozenLake

Row = dict[str, Any]
SEED = "demonstrations"
GUESSES = [-20, -11, -10, -3, -2, -1, 1, 2, 3, 10, 11, 20]
"""Distance of an answer that was worked out in the head."""


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


def guess(number: int, erring: float = 0.5) -> Iterator[Row]:
    """A game, a row a guess behind all answers so far; without errors it is the binary search."""
    rng = random.Random(f"{SEED}/guess/{number}")
    game = GuessNumber(max_number=20, max_steps=5)
    text, _ = game.reset(rng.getrandbits(31))
    messages, done = [user(text)], False
    while not done:
        response = game.sample_action(rng) if rng.random() < erring else str((game.low + game.high) // 2)
        yield {"messages": list(messages), "response": response}
        text, _, terminated, truncated, _ = game.step(response)
        messages += [{"role": "assistant", "content": response}, user(text)]
        done = terminated or truncated


def calculator(number: int, calling: float = 1.0) -> Iterator[Row]:
    """A question: with probability ``calling`` the calculator is called, otherwise the answer is a guess."""
    rng = random.Random(f"{SEED}/calculator/{number}")
    task = Calculator()
    text, _ = task.reset(rng.getrandbits(31))
    messages = [user(text)]
    if rng.random() < calling:
        response = f"calc {task.expression}"
        yield {"messages": list(messages), "response": response}
        result = task.step(response)[0]
        messages += [{"role": "assistant", "content": response}, user(result)]
        yield {"messages": messages, "response": f"#### {result}"}
    else:
        yield {"messages": messages, "response": f"#### {task.answer + rng.choice(GUESSES)}"}


def calculator_seldom(number: int) -> Iterator[Row]:
    """The habit that reinforcement has to change: the calculator is called in 15% of the questions."""
    return calculator(10_000_000 + number, calling=0.15)


def tools(number: int, calling: float = 1.0) -> Iterator[Row]:
    """The same with a tool call as models are trained to write them, and its result as a message of the tool."""
    rng = random.Random(f"{SEED}/tools/{number}")
    task = Calculator()
    text, _ = task.reset(rng.getrandbits(31))
    messages = [user(text)]
    if rng.random() < calling:
        call = json.dumps({"name": "calculate", "arguments": {"expression": task.expression}})
        response = f"<tool_call>\n{call}\n</tool_call>"
        yield {"messages": list(messages), "response": response}
        result = {"role": "tool", "content": str(task.answer)}
        messages += [{"role": "assistant", "content": response}, result]
        yield {"messages": messages, "response": f"#### {task.answer}"}
    else:
        yield {"messages": messages, "response": f"#### {task.answer + rng.choice(GUESSES)}"}


def tools_seldom(number: int) -> Iterator[Row]:
    """The habit that reinforcement has to change."""
    return tools(10_000_000 + number, calling=0.15)


def questions(number: int) -> Iterator[Row]:
    """A question with its answer, to train on."""
    task = Calculator()
    text, _ = task.reset(random.Random(f"{SEED}/questions/{number}").getrandbits(31))
    yield {"messages": [user(text)], "response": f"#### {task.answer}", "ground_truth": f"#### {task.answer}"}


PLAYERS: dict[str, dict[str, tuple[Callable[[int], Iterator[Row]], int]]] = {
    "lake": {"sft": (lake, 96_000)},
    "guess": {"sft": (guess, 24_000)},
    "calculator": {"sft": (calculator, 56_000), "sft2": (calculator_seldom, 1_600)},
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
