"""Environments played by a random player: seeds that do not reproduce, broken contracts, coroutines that block."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.environments.base import BrokenContract, Environment, Turn, read_reset, read_step, reset_arguments, resolved
from roll.environments.registry import make_environment

_BLOCKING_SECONDS = 0.05
"""A coroutine that holds the event loop for longer stalls every other episode."""
_MAX_TURNS = 200


@dataclass
class EnvironmentReport:
    """``faults`` break the contract, ``remarks`` may be intended."""

    episodes: int = 0
    turns: int = 0
    milliseconds: dict[str, float] = field(default_factory=lambda: {"reset": 0.0, "step": 0.0})
    """Slowest call of each method."""
    rewards: tuple[float, float] = (0.0, 0.0)
    """Least and greatest reward of a step."""
    returns: list[float] = field(default_factory=list)
    successes: int = 0
    unfinished: int = 0
    """Episodes that did not end within 200 turns."""
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class Played:
    """The record of an episode."""

    actions: list[str]
    turns: list[Turn]
    """The first one is that of ``reset``."""

    @property
    def trace(self) -> list[tuple[Any, float, bool, bool]]:
        return [(turn.observation, turn.reward, turn.terminated, turn.truncated) for turn in self.turns]


def check_environment(
    env_type: str,
    env_config: Mapping[str, Any],
    episodes: int = 20,
    actions: Callable[[int], str] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> EnvironmentReport:
    """Play ``episodes`` seeds twice with the same actions, in two environments, and compare.

    Args:
        actions: returns the n-th action of an episode, for environments without ``sample_action``.
        rows: rows of a data set, each in turn the ``task`` of an episode.

    Raises:
        EnvironmentOptionError: the environment cannot be built.
    """
    report = EnvironmentReport()
    first, second = make_environment(env_type, env_config), make_environment(env_type, env_config)
    if actions is None and not samples_actions(first):
        report.remarks.append("no sample_action(rng): every action is the text 'test'")
    asyncio.run(_check_seeds(env_type, first, second, episodes, actions, report, rows))
    return report


async def _check_seeds(
    name: str,
    first: Environment,
    second: Environment,
    episodes: int,
    actions: Callable[[int], str] | None,
    report: EnvironmentReport,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    least, greatest = float("inf"), float("-inf")
    started: dict[str, int] = {}
    for seed in range(episodes):
        try:
            # The second environment plays another seed first, of which nothing may be left. Imports and loading of a
            # first call are not timed.
            await play_episode(name, second, seed + episodes, actions, None, rows)
            played = await play_episode(name, first, seed, actions, report, rows)
            again = await play_episode(name, second, seed, played.actions.__getitem__, None, rows)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, BrokenContract) else f" ({Path(where.filename).name}:{where.lineno})"
            report.faults.append(f"seed {seed}: {type(error).__name__}: {error}{place}")
            break
        if again.turns[0].observation != played.turns[0].observation:
            report.faults.append(f"seed {seed}: reset gives two different observations; members of a group start apart")
            break
        if again.trace != played.trace:
            turn = next(i for i, (a, b) in enumerate(zip(played.trace, again.trace, strict=False)) if a != b)
            report.faults.append(f"seed {seed}: the same actions give another episode from turn {turn} on")
            break
        started.setdefault(str(played.turns[0].observation), seed)
        rewards = [turn.reward for turn in played.turns[1:]] or [0.0]
        least, greatest = min(least, *rewards), max(greatest, *rewards)
        report.episodes += 1
        report.turns += len(played.actions)
        report.returns.append(sum(rewards))
        report.successes += bool(played.turns[-1].info.get("success"))
        report.unfinished += not played.turns[-1].done
    if report.episodes > 1 and len(started) == 1:
        report.remarks.append("every seed begins alike: the seed may not be used")
    if report.unfinished:
        report.remarks.append(f"{report.unfinished} episodes did not end within {_MAX_TURNS} turns")
    if report.episodes:
        report.rewards = (least, greatest)
        if least == greatest:
            report.remarks.append(f"every reward is {least:g}: a random player learns nothing about the task")
    for environment in (first, second):
        if (close := getattr(environment, "close", None)) is not None:
            await resolved(close())


async def play_episode(
    name: str,
    environment: Environment,
    seed: int,
    actions: Callable[[int], str] | None,
    report: EnvironmentReport | None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Played:
    """Play one episode with the given actions, else with random ones drawn from ``seed``."""
    rng, samples = random.Random(seed), samples_actions(environment)
    args, keywords = reset_arguments(environment, seed, row_of(rows, seed))
    answer = await _timed(functools.partial(environment.reset, *args, **keywords), "reset", report)
    played = Played([], [read_reset(name, answer)])
    while not played.turns[-1].done and len(played.actions) < _MAX_TURNS:
        if actions is not None:
            try:
                action = actions(len(played.actions))
            except IndexError:
                break
        else:
            action = environment.sample_action(rng) if samples else "test"  # type: ignore[attr-defined]
        answer = await _timed(functools.partial(environment.step, action), "step", report)
        played.actions.append(action)
        played.turns.append(read_step(name, answer))
    return played


def samples_actions(environment: Environment) -> bool:
    """True where the environment, and what it wraps, has ``sample_action``."""
    return getattr(environment, "sample_action", None) is not None


def row_of(rows: Sequence[Mapping[str, Any]], seed: int) -> Mapping[str, Any] | None:
    """The task of a seed: the rows in turn; None without rows."""
    return rows[seed % len(rows)] if rows else None


async def _timed(call: Callable[[], Any], method: str, report: EnvironmentReport | None) -> Any:
    """The answer of ``call``; its duration, and a coroutine that blocks the event loop, are noted in ``report``."""
    begin = time.perf_counter()
    answer = call()
    if inspect.isawaitable(answer):
        stretches = _Stretches(answer)
        answer = await stretches
        remark = f"{method} is a coroutine that blocks the event loop; use `await asyncio.to_thread(...)` inside"
        if report is not None and stretches.longest > _BLOCKING_SECONDS and remark not in report.faults:
            report.faults.append(remark)
    if report is not None:
        report.milliseconds[method] = max(report.milliseconds[method], 1e3 * (time.perf_counter() - begin))
    return answer


class _Stretches:
    """Awaits an awaitable, and measures the longest time that it holds the event loop between two waits.

    Pauses of the loop itself are no measure: on a busy machine they are long whatever the awaitable does.
    """

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._steps = awaitable.__await__()
        self.longest = 0.0
        """Seconds."""

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            begin = time.perf_counter()
            try:
                waits_for = next(self._steps)
            except StopIteration as end:
                return end.value
            finally:
                self.longest = max(self.longest, time.perf_counter() - begin)
            yield waits_for
