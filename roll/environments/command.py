"""``roll env``: list, check and play environments, without a model."""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from roll.agents.images import content_text, has_images
from roll.config.pipelines import find_own_modules
from roll.datasets.reading import read_rows
from roll.datasets.types import DataError
from roll.environments.base import BrokenContract, Environment, Turn, read_reset, read_step, reset_arguments, resolved
from roll.environments.checking import EnvironmentReport, check_environment, row_of
from roll.environments.registry import (
    ADAPTER_PREFIXES,
    EnvironmentOptionError,
    environment_names,
    load_environment_class,
    make_environment,
)

_EXIT_FAULTS = 1
_EXIT_USAGE = 2


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
        given, named = reset_arguments(environment, arguments.seed, row_of(rows, arguments.seed))
        first = functools.partial(environment.reset, *given, **named)
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
        f"success {report.successes / count:.0%}; slowest reset {report.reset_milliseconds:.1f} ms, "
        f"step {report.step_milliseconds:.1f} ms"
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
