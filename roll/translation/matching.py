"""The keys of a source one by one: what is written, what is left open, and the rule that each follows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from roll.translation.reading import UNSET
from roll.translation.rules import Dialect, Draft, Rule

# Facts that a script may leave for its reader to fill in, and the variables that take them.
BLANKS = {"model": "MODEL_PATH", "train_files": "TRAIN_FILES", "val_files": "VAL_FILES"}
# Names of keys that say what is logged, or how many processes work.
MEASURES = re.compile(
    r"[._](?:wandb|swanlab|tensorboard|mlflow|trackio|to_log|log_to|log_(?:dir|file|path|freq|interval|level)"
    r"|num_(?:processes|threads|workers))(?![a-z])"
)
SIZES = ("gpus", "nodes", "engine_gpus", "engine_nodes")


@dataclass(frozen=True)
class Note:
    """Outcome of one of their keys."""

    theirs: str
    value: Any
    ours: tuple[str, ...]  # `key=value` of each key of ours that it decided
    text: str
    is_default: bool = False  # not written; their tool's default, made explicit


def flat_keys(explicit: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Sections written as one value (``a={b: 1}``, in YAML or JSON; null: empty) as the keys within them, where the
    dialect knows those alone."""
    flat: dict[str, Any] = {}
    for key, value in explicit.items():
        section: object = None
        if key not in dialect.rules and any(name.startswith(f"{key}.") for name in dialect.rules):
            section = {} if value is None else value
            if isinstance(value, str) and value.lstrip().startswith("{"):
                with suppress(yaml.YAMLError):
                    section = yaml.safe_load(value)
        if isinstance(section, Mapping):
            flat |= flat_keys({f"{key}.{name}": entry for name, entry in section.items()}, dialect)
        else:
            flat[key] = value
    return flat


def unknown_key(key: str, dialect: Dialect) -> str:
    nearest = dialect.nearest(key)
    hint = f"; the nearest known one is {nearest}" if nearest else "; docs/translation.md lists those that are known"
    return f"no translation is known for this key of {dialect.title}{hint}"


def refuse_doubles(explicit: Mapping[str, Any], dialect: Dialect, draft: Draft) -> None:
    """Refuse two spellings of one key with different values."""
    first: dict[Rule, str] = {}
    for key in explicit:
        rule = dialect.rules.get(key)
        if rule is None or not rule.ours:
            continue
        other = first.setdefault(rule, key)
        if other != key and explicit[other] != explicit[key]:
            text = f"is another spelling of {other}, which is {explicit[other]}: keep one"
            draft.problems.add(key, explicit[key], text)


def unwritten_defaults(dialect: Dialect, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Their defaults of keys that are not written under any spelling."""
    rules = [dialect.rules[key] for key in explicit if key in dialect.rules]
    written = {spelling for rule in rules for spelling in rule.spellings}
    stated = {rule.fact for rule in rules} - {""}
    return {
        key: value
        for key, value in dialect.defaults.items()
        if key not in written and dialect.rules[key].fact not in stated
    }


def complete(explicit: dict[str, Any], dialect: Dialect) -> list[Note]:
    """Take out or fill in values that are left open: unset variables, empty text and null. Changes ``explicit``.

    - Numbers of devices and nodes that a variable of their cluster would give are taken out.
    - Switches that a variable would give are false where their program reads the empty text that bash leaves so.
    - A model or data left empty, for the reader to fill in, become a variable.
    - Keys that are null where only a value means something are taken out.

    Returns:
        The notes that say so.
    """
    notes = []
    for key, value in list(explicit.items()):
        rule, unset = dialect.rules.get(key), UNSET.fullmatch(str(value))
        found = dialect.find(key)
        if unset and rule is not None and rule.fact.partition(".")[0] in SIZES:
            del explicit[key]
            text = f"{unset[1]} is not set, so their default holds; give it in front: roll translate {unset[1]}=2 ..."
        elif unset and dialect.empty_is_false and found is not None and found[0].is_switch:
            explicit[key] = False
            text = f"{unset[1]} is not set, and an empty text is false there; give it in front: roll translate "
            text += f"{unset[1]}=true ..."
        elif rule is not None and value == "" and rule.fact in BLANKS:
            explicit[key] = f"${{oc.env:{BLANKS[rule.fact]}}}"
            text = f"is left empty there: {BLANKS[rule.fact]} says it, where the run starts"
        elif rule is None or value is not None or (rule.default and rule.fact != "epochs") or rule.takes(None):
            continue
        else:
            del explicit[key]
            text = "null: as if it were not written"
        notes.append(Note(key, value, (), text))
    return notes


def idle(explicit: dict[str, Any], dialect: Dialect) -> list[Note]:
    """Take out keys of a fork that change nothing in the run: of sections that ``enable`` switches off, and those whose
    names say what is logged or how many processes work."""
    unknown = [key for key in explicit if dialect.find(key) is None]
    sections = tuple(
        key.removesuffix("enable") for key in unknown if key.endswith(".enable") and explicit[key] is False
    )
    texts = {
        key: "its name says what is logged, or how many processes work" for key in unknown if MEASURES.search(f".{key}")
    }
    texts |= {key: "its section is switched off there" for key in unknown if key.startswith(sections)}
    return [Note(key, explicit.pop(key), (), f"left out: {text}") for key, text in texts.items()]


@dataclass(frozen=True)
class Match:
    rule: Rule
    rest: str
    value: Any


def matched(key: str, value: object, dialect: Dialect, draft: Draft) -> Match | None:
    """The rule and our value for one key; mistakes go to the draft, which also learns the fact."""
    found = dialect.find(key)
    if found is None:
        draft.problems.add(key, value, unknown_key(key, dialect))
        return None
    rule, rest = found
    try:
        ours = rule.value(value)
    except ValueError as error:
        problem = str(error)
        if unset := UNSET.fullmatch(str(value)):
            problem = f"is a variable that is not set, and {error}: give it in front: roll translate {unset[1]}=... ..."
        draft.problems.add(key, value, problem)
        return None
    if rule.fact and rest:
        draft.facts.setdefault(rule.fact, {})[rest] = ours
    elif rule.fact:
        draft.facts[rule.fact] = ours
    if rule.fact:
        draft.written.add(rule.fact)
        draft.names[rule.fact], draft.raw[rule.fact] = key, value
    return Match(rule, rest, ours)
