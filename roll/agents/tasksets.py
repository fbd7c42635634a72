"""Environments of the package ``verifiers``: black boxes whose program plays tasksets, in an interpreter of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from roll.agents.programs import program_environment

PREFIX = "verifiers:"
_PROGRAM = Path(__file__).with_name("taskset_program.py")
_EXAMPLE = "make install-verifiers gives env_config.python: .venv-verifiers/bin/python"
_DESCRIBE_SECONDS = 600


class TasksetError(ValueError):
    """A taskset that cannot be played; ``problems`` has keys of the entry and rules."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(map(": ".join, problems)))
        self.problems = problems


def is_taskset(env_type: str | None) -> bool:
    """True for ``verifiers:ID``."""
    return env_type is not None and env_type.startswith(PREFIX)


def taskset_options(env_type: str, env_config: Mapping[str, Any], turns: int) -> dict[str, Any]:
    """``agent_config`` of the black box that plays ``verifiers:ID``. ``env_config``: ``python`` (the interpreter),
    ``select`` (which tasks), and the package's section ``env``; ``turns``: most model calls of an episode."""
    section = dict(env_config)
    python = os.path.expanduser(str(section.pop("python", sys.executable)))
    if os.sep in python:  # a link to an interpreter is a virtual environment: it is not followed
        python = os.path.abspath(python)
    select = section.pop("select", {})
    options = {"id": env_type.removeprefix(PREFIX), "turns": turns, "select": select, "env": section}
    # -P: the program's folder would hide the package.
    return {"command": [python, "-P", str(_PROGRAM), json.dumps(options, default=str)], "processes": 1}


def number_of_tasks(options: Mapping[str, Any]) -> int:
    """The number of tasks of a taskset, by its program, which loads them. ``options``: of the black box. Raises
    ``TasksetError``: no such interpreter, package, taskset or option, or no tasks."""
    variables = program_environment(options.get("env", {}), options.get("inherit_env", ()))
    return _described(tuple(options["command"]), options.get("folder"), tuple(sorted(variables.items())))


@cache
def _described(command: tuple[str, ...], folder: str | None, variables: tuple[tuple[str, str], ...]) -> int:
    python = command[0]
    if shutil.which(python) is None:
        raise TasksetError([("env_config.python", f"there is no program {python}; {_EXAMPLE}")])
    if python == sys.executable and importlib.util.find_spec("verifiers") is None:
        rule = f"is needed: an interpreter with the package verifiers, which {python} has not; {_EXAMPLE}"
        raise TasksetError([("env_config.python", rule)])
    try:
        done = subprocess.run(
            [*command, "--describe"],
            capture_output=True,
            text=True,
            env=dict(variables),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            timeout=_DESCRIBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        rule = f"takes more than {_DESCRIBE_SECONDS} s to load its tasks; select.limit takes fewer"
        raise TasksetError([("env_type", rule)]) from None
    try:
        said = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        raise TasksetError([("env_config.python", f"{python} fails: {done.stderr.strip()[-500:]}")]) from None
    if "problems" in said:
        keys = ((f"env_config.{key}" if key else "env_type", rule) for key, rule in said["problems"])
        raise TasksetError(list(keys))
    return int(said["tasks"])
