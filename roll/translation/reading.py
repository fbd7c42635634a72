"""Reading of a pasted command, a script or a YAML file: their keys with values, environment and launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from roll.config.checks.keys import leaves
from roll.config.reading.compose import parse_override
from roll.config.reading.errors import ConfigError, Problem
from roll.translation.launching import Launch, Variables, commands, launch_of
from roll.translation.recording import UNSET_MARK, Command, Recording

COMMAND = "(command)"
FOREIGN = (
    "is no training program of verl or SkyRL, whose keys say what is trained (docs/migration.md has TRL and OpenRLHF)"
)
CONFIG_NAME = "--config-name"
ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)
# In a script a name without dots is a variable; among bare keys one in small letters may be their key.
SCRIPT_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
LAUNCH = re.compile(r"\s-m\s+[\w.]+|\.(?:sh|py)\s")
UNSET = re.compile(r"\$\{oc\.env:(\w+)\}")
KEY_VALUE = re.compile(r"[+]{0,2}[A-Za-z_][\w./@-]*=", re.DOTALL)
DELETION = re.compile(r"~[A-Za-z_][\w./@-]*(?:=|$)")
# bash's complaint about arithmetic, which leaves a variable empty.
FAILED = re.compile(r"(line \d+: .*) \(error token is ")
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
# Commands around a launch that say nothing about the run.
HOUSEKEEPING = {
    *("set", "cd", "mkdir", "source", ".", "echo", "ray", "sleep", "pip", "conda", "ulimit", "export", "unset"),
    *("exit", "true", "wait", "rm", "tee"),
}
MAX_LEFT_OUT = 20  # commands around a launch that the notes list
SHORT = 120  # characters of such a command


@dataclass
class Source:
    """Keys to translate, and what was read with them."""

    keys: dict[str, Any] = field(default_factory=dict)  # their keys, in order, the last value of each
    environment: dict[str, str] = field(default_factory=dict)  # variables set in front of the command or exported
    launcher: str = ""  # the module or script that the command starts; empty for bare keys and YAML files
    # The launcher is their program itself, so that their defaults hold for every key that is not given.
    from_module: bool = False
    unset: tuple[str, ...] = ()  # shell variables that the text uses and does not set
    left_out: list[str] = field(default_factory=list)  # words and commands that were passed over
    # Options of the program that starts one process a device (`torchrun`, `accelerate launch`, `deepspeed`).
    options: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # remarks on how the text was read
    config_path: str = ""  # folder of the file that `--config-name` names


def read_text(text: str) -> Source:
    """Read a command or a script. Raises ``ConfigError``: an open quote, a command that is not understood, several
    runs, or none."""
    variables = Variables()
    source, launches, mistakes = Source(), 0, []
    assignment = SCRIPT_ASSIGNMENT if LAUNCH.search(text) else ASSIGNMENT
    try:
        for words in commands(text, variables):
            words = _take_assignments(words, assignment, variables, source)
            if not words:
                continue
            launch = launch_of(words)
            if launch is not None and launch.is_foreign:
                mistakes.append(Problem(COMMAND, launch.program, FOREIGN))
                continue
            source.options |= dict(launch.options) if launch is not None else {}
            kind = _launcher_of(words, source)
            if kind in ("run", "keys"):
                launches += kind == "run"
                mistakes += _read_arguments(words, source)
            elif kind == "other":
                mistakes.append(Problem(COMMAND, " ".join(words), "is no launch command and no key=value"))
    except ValueError as error:
        raise ConfigError([Problem(COMMAND, text, str(error))]) from None
    if launches > 1:
        mistakes.append(Problem(COMMAND, launches, "runs are in the text: translate one at a time"))
    if not mistakes and not source.keys:
        rule = "holds no key=value; a script is translated by its text: roll translate SCRIPT"
        mistakes.append(Problem(COMMAND, source.launcher or text, rule))
    if mistakes:
        raise ConfigError(mistakes)
    used = (str(value) for value in source.keys.values())
    source.unset = tuple(name for name in variables.unknown if any(f"oc.env:{name}}}" in text for text in used))
    return source


def read_recording(recording: Recording, name: str, call: int | None = None) -> Source:
    """Read what a script called. ``call``: which of several runs, from 1; None: the first. Raises ``ConfigError``: no
    run, none of number ``call``, or words that are no keys."""
    launches = [(command, launch) for command in recording.commands if (launch := launch_of(command.words))]
    runs = [(command, launch) for command, launch in launches if launch.trains]
    if not runs:
        keys = [command for command in recording.commands if KEY_VALUE.match(command.words[0])]
        if keys:
            return _of_words([word for command in keys for word in command.words], keys[0].environment)
        raise ConfigError([Problem("(script)", name, _no_run(recording, launches))])
    if call is not None and not 1 <= call <= len(runs):
        raise ConfigError([Problem("--call", call, f"must be from 1 to {len(runs)}: {name} starts so many runs", 1)])
    command, launch = runs[(call or 1) - 1]
    source = _of_words(launch.arguments, command.environment)
    source.launcher, source.from_module = launch.module, launch.is_module
    source.options = dict(launch.options)
    empty, complaint = [key for key, value in source.keys.items() if value == ""], FAILED.search(recording.output)
    if empty and complaint:
        raise ConfigError([Problem(empty[0], "", f"is empty: the script's own arithmetic fails ({complaint[1]})")])
    others = (" ".join(other.words) for other in recording.commands if other is not command)
    left_out = dict.fromkeys(text if len(text) <= SHORT else f"{text[:SHORT]}..." for text in others)
    source.left_out = list(left_out)[:MAX_LEFT_OUT]
    if call is None and len(runs) > 1:
        source.remarks.append(f"the first of {len(runs)} runs: --call N takes another")
    if lost := next((other.words[0] for other in recording.commands if KEY_VALUE.match(other.words[0])), None):
        source.remarks.append(f"{lost} and what follows reach no run: the line before ends the command, in bash too")
    if recording.went_on:
        text = "the script ended before its launch, for files or nodes that are not here: its checks were passed over, "
        text += "and the first node was taken"
        source.remarks.append(text)
    return source


def _of_words(words: Sequence[str], environment: Mapping[str, str]) -> Source:
    """Keys of split words. Raises ``ConfigError``: words that are no keys."""
    source = Source(environment=dict(environment))
    if mistakes := _read_arguments(list(words), source):
        raise ConfigError(mistakes)
    used = (str(value) for value in source.keys.values())
    source.unset = tuple(dict.fromkeys(name for text in used for name in UNSET.findall(text)))
    return source


def _no_run(recording: Recording, launches: Sequence[tuple[Command, Launch]]) -> str:
    """Return why a script has nothing to translate."""
    if launches:
        started = list(dict.fromkeys(launch.program for _, launch in launches))
        if absent := [program for program in started if program.endswith(".sh")]:
            return f"starts {', '.join(absent)}, which is not here: translate it within its repository"
        return f"starts {', '.join(started)}, which {FOREIGN}"
    last = recording.output.splitlines()[-3:]
    printed = UNSET_MARK.sub(r"$\1", f"; it printed: {' / '.join(last)}" if last else "")
    rule = f"starts no training program (exit status {recording.status}){printed}"
    return f"{rule}. Variables are given in front, arguments behind: roll translate NAME=value script.sh argument"


def read_words(words: Sequence[str]) -> Source:
    """Read a command that the shell has split already.

    Raises:
        ConfigError: as :func:`read_text`.
    """
    return read_text(" ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words))


def read_yaml(text: str, name: str) -> Source:
    """Read one of their YAML files; dotted and nested keys both work, and so do references between keys. Raises
    ``ConfigError``: not a YAML section, or a ``${...}`` that leads nowhere."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem("(YAML)", name, f"is not valid YAML: {str(error).splitlines()[0]}")]) from None
    if not isinstance(data, Mapping):
        raise ConfigError([Problem("(YAML)", name, "must be a section of keys")])
    source = Source()
    mistakes = []
    # Dotted keys; empty sections are left out.
    flat = {key: value for key, value in leaves(data) if not isinstance(value, Mapping)}
    for key, value in flat.items():
        if key == "defaults" or key.rpartition(".")[2] == "_target_":
            source.left_out.append(key)
            continue
        resolved = _resolve(value, flat)
        if isinstance(resolved, str) and (match := REFERENCE.search(resolved)):
            if "defaults" in flat:  # it may be in one of the files that the list names
                source.left_out.append(f"{key}: {value}")
                continue
            mistakes.append(Problem(key, value, f"refers to {match[1]}, which the file does not have"))
        source.keys[key] = resolved
    if mistakes:
        raise ConfigError(mistakes)
    return source


def _resolve(value: object, flat: Mapping[str, Any], depth: int = 8) -> Any:
    if not isinstance(value, str) or depth == 0:
        return value
    whole = REFERENCE.fullmatch(value)
    if whole and whole[1] in flat:
        return _resolve(flat[whole[1]], flat, depth - 1)
    return REFERENCE.sub(lambda match: str(_resolve(flat.get(match[1], match[0]), flat, depth - 1)), value)


def _take_assignments(words: list[str], assignment: re.Pattern[str], variables: Variables, source: Source) -> list[str]:
    """Read leading ``NAME=value`` words (also after ``export``) into variables; return the rest of the command."""
    exported = words[0] == "export"
    rest = words[1:] if exported else words
    assigned: dict[str, str] = {}
    while rest and (match := assignment.fullmatch(rest[0])):
        assigned[match[1]] = match[2]
        rest = rest[1:]
    variables.values |= assigned
    if exported or rest:
        source.environment |= assigned
    return [] if exported or rest[:1] == [":"] else rest


def _launcher_of(words: list[str], source: Source) -> str:
    """``run``, ``keys``, ``skip`` or ``other``; a run's words are cut to its arguments."""
    if "-m" in words[:-1]:
        module = words.index("-m") + 1
        source.launcher, source.from_module = words[module], True
        del words[: module + 1]
        return "run"
    if KEY_VALUE.match(words[0]):
        return "keys"
    place = next((place for place, word in enumerate(words) if word.endswith((".sh", ".py"))), None)
    if place is not None:
        script = words[place]
        if "dataset" in PurePath(script).stem:
            source.left_out.append(" ".join(words))
            return "skip"
        source.launcher = script
        del words[: place + 1]
        return "run"
    if words[0] in HOUSEKEEPING:
        source.left_out.append(" ".join(words))
        return "skip"
    return "other"


def _read_arguments(words: list[str], source: Source) -> list[Problem]:
    """``key=value``, ``+key=value`` and ``group@package=choice`` with values as hydra reads them, and its options."""
    mistakes = []
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag in ("-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir"):
            value = value if equals else words.pop(0) if words else ""
            if flag in ("-cn", "--config-name"):
                source.keys[CONFIG_NAME] = value.removesuffix(".yaml")
            else:
                source.config_path = value
                source.left_out.append(f"{flag} {value}")
        elif word in ("...", "\\", "--"):
            source.left_out.append(word)
        elif DELETION.match(word):
            # Hydra takes out the key or section that came before; nothing then states it.
            name = flag.lstrip("~")
            for key in [key for key in source.keys if key == name or key.startswith(f"{name}.")]:
                del source.keys[key]
            source.left_out.append(word)
        elif KEY_VALUE.match(word):
            override = parse_override(word)
            source.keys[flag.lstrip("+")] = value if override is None else override.value()
        else:
            mistakes.append(Problem(COMMAND, word, "must be key=value", "trainer.strategy=fsdp2"))
    return mistakes
