"""``roll env``: list, check and play environments, without a model."""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from roll.agents.images import content_text, has_images
from roll.config.pipelines import find_own_modules
from roll.datasets.reading import read_rows
from roll.datasets.types import DataError
from roll.environments.base import BrokenContract, Environment, Turn, read_reset, read_step, reset_arguments, resolved
from roll.environments.registry import (
    ADAPTER_PREFIXES,
    EnvironmentOptionError,
    environment_names,
    load_environment_class,
    make_environment,
)

_EXIT_FAULTS = 1
_EXIT_USAGE = 2
_BLOCKING_SECONDS = 0.05
"""A coroutine that holds the event loop for longer stalls every other episode."""
_MAX_TURNS = 200


def main(argv: Sequence[str]) -> int:
    """Run ``roll env ...``; the exit status is 0, 1 where a check found faults, or 2 for a wrong command line."""
    arguments = _parser().parse_args(argv)
    find_own_modules()
    console = Console()
    try:
        if arguments.action == "list":
            return _list(console)
        config = _options(arguments.options)
        if arguments.action == "check":
            return _check(console, arguments.env_type, config, arguments.episodes, arguments.data)
        environment = make_environment(arguments.env_type, config)
        rows = _rows(environment, arguments.data)
        chooser = _random_player(environment, arguments.seed) if arguments.random else _person
        args, keywords = reset_arguments(environment, arguments.seed, row_of(rows, arguments.seed))
        first = functools.partial(environment.reset, *args, **keywords)
        asyncio.run(_play(console, arguments.env_type, environment, first, chooser))
    except (EnvironmentOptionError, DataError, BrokenContract) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return _EXIT_USAGE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll env", description="List, check and play environments.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="name the built-in environments and the adapters")
    check = actions.add_parser("check", help="play episodes at random and say what breaks the contract")
    check.add_argument("--episodes", type=int, default=20, help="seeds to play, each twice (default 20)")
    play = actions.add_parser("play", help="play an episode by hand, or watch a random player")
    play.add_argument("--seed", type=int, default=0)
    play.add_argument("--random", action="store_true", help="let a random player act")
    for command in (check, play):
        command.add_argument("--data", metavar="FILE", help="a data set, whose row SEED is the task of an episode")
        command.add_argument("env_type", help="a name of `roll env list`, PREFIX:ID, or the dotted path of a class")
        command.add_argument("options", nargs="*", help="options of the environment, as key=value")
    return parser


def _options(words: Sequence[str]) -> dict[str, Any]:
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise EnvironmentOptionError(f"{word!r} is no option; options are written key=value, as in size=5")
        options[key] = yaml.safe_load(value)
    return options


def _rows(environment: Environment, file_name: str | None) -> list[dict[str, Any]]:
    if file_name is not None:
        return [source.row for source in read_rows(file_name)]
    task = inspect.signature(environment.reset).parameters.get("task")
    if task is not None and task.default is inspect.Parameter.empty:
        raise EnvironmentOptionError("reset takes a task, the row of a data set; name its file with --data FILE")
    return []


def _list(console: Console) -> int:
    table = Table("env_type", "what it is", "options")
    for name in environment_names():
        target = load_environment_class(name)
        about = (inspect.getdoc(target) or "").split("\n", 1)[0]
        table.add_row(name, about, ", ".join(inspect.signature(target).parameters))
    console.print(table)
    console.print(f"Adapters: {', '.join(f'{prefix}:ID' for prefix in ADAPTER_PREFIXES)}", highlight=False)
    return 0


def _check(console: Console, env_type: str, config: dict[str, Any], episodes: int, data: str | None) -> int:
    rows = _rows(make_environment(env_type, config), data)
    report = check_environment(env_type, config, episodes, rows=rows)
    console.print(_summary(report), highlight=False, markup=False)
    for fault in report.faults:
        console.print(f"FAULT   {fault}", style="red", markup=False, highlight=False)
    for remark in report.remarks:
        console.print(f"remark  {remark}", style="yellow", markup=False, highlight=False)
    if not report.faults:
        console.print(f"{env_type}: no faults", style="green", markup=False)
    return _EXIT_FAULTS if report.faults else 0


def _summary(report: EnvironmentReport) -> str:
    count = max(report.episodes, 1)
    low, high = report.rewards
    return (
        f"{report.episodes} episodes of a random player, {report.turns / count:.1f} turns each; "
        f"reward of a step {low:g} to {high:g}, mean return {sum(report.returns) / count:.3f}, "
        f"success {report.successes / count:.0%}; slowest reset {report.milliseconds['reset']:.1f} ms, "
        f"step {report.milliseconds['step']:.1f} ms"
    )


async def _play(
    console: Console, name: str, environment: Environment, first: Callable[[], Any], choose: Callable[[], str | None]
) -> None:
    turn = read_reset(name, await resolved(first()))
    total, number = 0.0, 0
    _show(console, turn)
    while not turn.done:
        action = choose()
        if action is None:
            console.print("given up", markup=False)
            return
        number += 1
        console.print(f"[{number}] {action}", style="cyan", markup=False, highlight=False)
        turn = read_step(name, await resolved(environment.step(action)))
        total += turn.reward
        _show(console, turn)
    how = "ended" if turn.terminated else "stopped at its limit"
    success = turn.info.get("success")
    verdict = "" if success is None else ", success" if success else ", no success"
    console.print(f"{how} after {number} turns, return {total:g}{verdict}", style="bold", markup=False)


def _show(console: Console, turn: Turn) -> None:
    for message in turn.observation:
        console.print(content_text(message["content"]), markup=False, highlight=False)
        if has_images(message["content"]):
            console.print(f"state: {turn.state}", style="dim", markup=False, highlight=False)
    if turn.reward:
        console.print(f"reward {turn.reward:g}", style="green", markup=False)


def _person() -> str | None:
    sys.stdout.write("> ")
    sys.stdout.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _random_player(environment: Environment, seed: int) -> Callable[[], str | None]:
    rng = random.Random(seed)
    sample = getattr(environment, "sample_action", None)
    if sample is None:
        raise EnvironmentOptionError("the environment has no method sample_action(rng); play it by hand")
    return lambda: str(sample(rng))


@dataclass
class EnvironmentReport:
    """Findings of ``roll env check``: ``faults`` break the contract, ``remarks`` may be intended."""

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
