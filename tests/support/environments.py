"""Environments played twice by a random player: seeds that do not reproduce, broken contracts."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.environments.base import (
    BrokenContract,
    Environment,
    Turn,
    make_environment,
    read_reset,
    read_step,
    reset_arguments,
    resolved,
)

MAX_TURNS = 200


@dataclass
class Checked:
    """``faults`` is empty, and there is a return of each episode."""

    faults: list[str] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


def check_environment(
    env_type: str,
    env_config: Mapping[str, Any],
    episodes: int = 20,
    actions: Callable[[int], str] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Checked:
    """Play ``episodes`` seeds twice with the same actions, in two environments, and compare.

    Args:
        actions: returns the n-th action of an episode; else ``sample_action``, or the text ``test`` without one.
        rows: rows of a data set, each in turn the ``task`` of an episode.
    """
    first, second = make_environment(env_type, env_config), make_environment(env_type, env_config)
    return asyncio.run(_check(env_type, first, second, episodes, actions, rows))


async def _check(
    name: str, first: Environment, second: Environment, episodes: int, actions: Any, rows: Sequence[Any]
) -> Checked:
    found = Checked()
    for seed in range(episodes):
        task = rows[seed % len(rows)] if rows else None
        try:
            # The second environment plays another seed first, of which nothing may be left.
            await play(name, second, seed + episodes, actions, task)
            said, turns = await play(name, first, seed, actions, task)
            _, again = await play(name, second, seed, said.__getitem__, task)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, BrokenContract) else f" ({Path(where.filename).name}:{where.lineno})"
            found.faults.append(f"seed {seed}: {type(error).__name__}: {error}{place}")
            break
        differ = [turn for turn, (a, b) in enumerate(zip(turns, again, strict=False)) if seen(a) != seen(b)]
        if differ or len(turns) != len(again):
            found.faults.append(f"seed {seed}: the same actions give another episode from turn {differ[:1]} on")
            break
        if not turns[-1].done:
            found.faults.append(f"seed {seed}: no end within {MAX_TURNS} turns")
        found.returns.append(sum(turn.reward for turn in turns[1:]))
    for environment in (first, second):
        if (close := getattr(environment, "close", None)) is not None:
            await resolved(close())
    return found


def seen(turn: Turn) -> tuple[Any, ...]:
    return turn.observation, turn.reward, turn.terminated, turn.truncated


async def play(
    name: str, environment: Environment, seed: int, actions: Callable[[int], str] | None, task: Any
) -> tuple[list[str], list[Turn]]:
    """The actions of an episode and its turns, of which the first one is that of ``reset``."""
    rng, sample = random.Random(seed), getattr(environment, "sample_action", None)
    arguments, keywords = reset_arguments(environment, seed, task)
    turns, said = [read_reset(name, await resolved(environment.reset(*arguments, **keywords)))], list[str]()
    while not turns[-1].done and len(said) < MAX_TURNS:
        if actions is not None:
            said.append(actions(len(said)))
        else:
            said.append(sample(rng) if sample is not None else "test")
        turns.append(read_step(name, await resolved(environment.step(said[-1]))))
    return said, turns
