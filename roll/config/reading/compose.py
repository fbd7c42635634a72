"""From YAML files and ``key=value`` words to one plain tree: hydra composes, OmegaConf resolves.

Native ROLL files load as they are: ``hydra:`` blocks, ``defaults:`` lists with ``@_here_``, ``${...}``, ``~``."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.config.reading.errors import Problems, closest
from roll.config.reading.yaml_files import SourceFile, readable, yaml_problem

LEARNING, ROLL = "learning", "roll"
DEFAULT_SETS = (LEARNING, ROLL)  # values of `defaults` other than hydra's list of files
_SET_ASIDE = "_set_of_defaults_"
_PLAIN = re.compile(r"[A-Za-z_./][\w./+@:%-]*", re.ASCII)  # text that hydra reads as itself without quotes
_WORDS_WITH_A_MEANING = frozenset({"true", "false", "null", "nan", "inf"})
OVERRIDE_RULE = "must be key=value (or +key=value, or ~key to take a key out)"
# Exceptions of hydra and OmegaConf on trees that they cannot read: their own errors, and plain ones.
COMPOSITION_ERRORS = (
    *(HydraException, OmegaConfBaseException, ValueError, TypeError, KeyError),
    *(AttributeError, AssertionError, RecursionError, OSError),
)


@dataclass(frozen=True)
class Composed:
    """The composed tree: plain dicts, lists and scalars, every interpolation resolved."""

    data: dict[str, Any]
    source: SourceFile
    # Top-level names that some `${...}` refers to, in any file, be its section replaced by another one or not.
    referenced: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()  # top-level names whose own value refers to another
    # The set of defaults that the file has: as it says, and ROLL's for a file with a `hydra` section
    # (`roll.config.defaults`).
    defaults: str = LEARNING


def compose_file(file: Path, overrides: Sequence[str], problems: Problems) -> Composed:
    """Compose ``file`` with its ``defaults`` and the overrides; mistakes go to ``problems``."""
    source = SourceFile(file)
    after: dict[str, object] = {}
    words = [word for word in (_hydra_word(text, file.parent, source, after, problems) for text in overrides) if word]
    unreadable = [one for one in source.files() if not readable(one, problems)]
    if unreadable:
        return Composed({}, source)
    named = source.default_set and source.default_set[1]
    if named is not None and named not in DEFAULT_SETS:
        problems.add("defaults", named, f"must be one of {', '.join(DEFAULT_SETS)}, or a list of files", LEARNING)
    try:
        with (
            warnings.catch_warnings(),
            _hydra_folder(source) as folder,
            initialize_config_dir(config_dir=folder, version_base="1.3", job_name="roll"),
        ):
            # A file without _self_ in its defaults is meant to override them, which is what hydra then does.
            warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`")
            config = compose(config_name=file.stem, overrides=words)
        for key, value in after.items():
            OmegaConf.update(config, key, value, force_add=True)
        defaults = named or (ROLL if source.files_with("hydra") else LEARNING)
        written = dict(_interpolations(config, ""))
        texts = [*written.values(), *(file.read_text(encoding="utf-8") for file in source.files())]
        names = frozenset(name for text in texts for name in re.findall(r"\$\{\s*(\w+)", text))
        return Composed(_resolve(config, written, problems), source, names, frozenset(written), defaults)
    except MissingConfigException as error:
        rule = f"there is no {error.missing_cfg_file}.yaml in {file.parent} or in a folder named there"
        problems.add("defaults", error.missing_cfg_file, rule)
    except yaml.YAMLError as error:
        problems.add("(YAML)", *yaml_problem(error, file))
    except COMPOSITION_ERRORS as error:
        problems.missing("(composition)", _first_lines(error) or str(error.__cause__ or type(error).__name__))
    return Composed({}, source)


@contextmanager
def _hydra_folder(source: SourceFile) -> Iterator[str]:
    """The folder that hydra reads the file from: its own, or one with a copy that does not name a set of defaults,
    where hydra expects a list of files."""
    if source.default_set is None:
        yield str(source.file.parent.resolve())
        return
    lines = source.file.read_text(encoding="utf-8").splitlines(keepends=True)
    number, column = source.default_set[0].line, source.default_set[0].column
    lines[number] = f"{lines[number][:column]}{_SET_ASIDE}{lines[number][column + len('defaults') :]}"
    with TemporaryDirectory() as folder:
        (Path(folder) / source.file.name).write_text("".join(lines), encoding="utf-8")
        yield folder


def _hydra_word(
    text: str, folder: Path, source: SourceFile, after: dict[str, object], problems: Problems
) -> str | None:
    """The override as hydra takes it: a key that the file does not have is added, odd values are quoted. Hydra takes
    any folder's name for a group of configurations; a key named like a folder that has none goes to ``after``."""
    key, equals, value = text.partition("=")
    text = f"{key.strip()}={value.strip()}" if equals else text.strip()
    override = parse_override(text)
    if override is None or not KEY.fullmatch(override.key_or_group):
        problems.add("(command line)", text, OVERRIDE_RULE, "actor_train.training_args.learning_rate=1e-6")
        return None
    if override.is_sweep_override():
        value = text.partition("=")[2]
        problems.add(override.key_or_group, value, "must be one value; write a list in brackets", f"[{value}]")
        return None
    beside = folder / override.key_or_group
    if override.is_delete() or any(beside.glob("*.y*ml")) or override.package is not None:
        return override.input_line
    source.add_override(override.key_or_group, override.value())
    if beside.is_dir():
        after[override.key_or_group] = override.value()
        return None
    return f"++{(override.input_line or text).lstrip('+')}"


def parse_override(text: str) -> Override | None:
    """hydra's reading of the word; a value outside hydra's grammar is read as the text that it is."""
    key, equals, value = text.partition("=")
    candidates = [text]
    if equals:
        candidates.append(f"{key}=null" if value.strip() == "~" else f"{key}={hydra_value(value)}")
    for candidate in candidates:
        try:
            return OverridesParser.create().parse_override(candidate)
        except (OverrideParseException, HydraException):
            continue
    return None


def hydra_value(value: object) -> str:
    """A value in hydra's grammar, so that it is read as the same value."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS_WITH_A_MEANING:
            return value
        # Backslashes count as such only before a quotation mark.
        return "'" + re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + (r"\'" if m[2] else ""), value) + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{hydra_value(entry)}' for key, entry in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _first_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:4])


CIRCLE = "refers to itself, or to a key that does: write the value out in one place"
_CIRCLE = re.compile("Recursive interpolation|Interpolation to parent node")
KEY = re.compile(r"[^\s.\[\]=]+(\.[^\s.\[\]=]+|\[\d+\])*")  # key of an override: names with dots between them


def _resolve(config: DictConfig, written: Mapping[str, str], problems: Problems) -> dict[str, Any]:
    """Plain data; of the interpolations in ``written`` one that leads nowhere, and a ``???`` left unset, are mistakes
    and are left out."""
    broken = []
    for path, raw in written.items():
        try:
            OmegaConf.select(config, path, throw_on_resolution_failure=True)
        except (OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
            broken.append(path)
            # OmegaConf 2.3.0 recurses, later ones say what they found.
            is_circle = isinstance(error, RecursionError) or _CIRCLE.match(str(error))
            rule = CIRCLE if is_circle else _interpolation_rule(config, raw, error)
            if rule is not None:
                problems.add(path, raw, rule)
    for path in broken:
        OmegaConf.update(config, path, None, force_add=True)
    for path in OmegaConf.missing_keys(config):
        problems.add(path, "???", "must be given, in the file or on the command line")
        OmegaConf.update(config, path, None, force_add=True)
        broken.append(path)
    data = OmegaConf.to_container(config, resolve=True)
    assert isinstance(data, dict)
    plain = {str(key): value for key, value in data.items() if key not in ("hydra", "defaults", _SET_ASIDE)}
    for path in broken:  # an entry of a list takes the whole list with it
        *sections, last = path.partition("[")[0].split(".")
        reduce(lambda section, name: section[name], sections, plain).pop(last, None)
    return plain


def _interpolations(node: object, prefix: str) -> Iterator[tuple[str, str]]:
    """Every leaf that holds ``${...}``, with its path."""
    if isinstance(node, DictConfig):
        items: list[tuple[Any, Any]] = [(key, node._get_node(key)) for key in node]
    elif isinstance(node, ListConfig):
        items = [(index, node._get_node(index)) for index in range(len(node))]
    else:
        return
    for key, child in items:
        path = f"{prefix}{key}" if isinstance(node, DictConfig) else f"{prefix.rstrip('.')}[{key}]"
        if child._is_interpolation():
            yield path, str(child._value())
        elif not child._is_none() and not child._is_missing():
            yield from _interpolations(child, f"{path}.")


def _interpolation_rule(config: DictConfig, raw: str, error: Exception) -> str | None:
    """The problem of ``raw``; None when it refers to a key that is itself wrong (one message is enough)."""
    names = re.findall(r"\$\{([\w.]+)\}", raw)
    unset = [name for name in names if OmegaConf.select(config, name, throw_on_resolution_failure=False) is None]
    if not unset:
        return f"cannot be resolved: {_first_lines(error)}"
    section, _, last = unset[0].rpartition(".")
    siblings = OmegaConf.select(config, section, throw_on_resolution_failure=False) if section else config
    known = [str(key) for key in siblings] if isinstance(siblings, DictConfig) else []
    if last in known:
        return None
    nearest = closest(last, known)
    return f"refers to {unset[0]}, which is not set" + (f"; the nearest key is {nearest}" if nearest else "")


def add_config_arguments(parser: argparse.ArgumentParser, changes: str) -> None:
    """Add ``config`` and ``overrides`` of a command; ``changes``: help of the latter."""
    parser.add_argument("config", help="YAML file, also relative to examples/")
    parser.add_argument("overrides", nargs="*", default=(), metavar="key=value", help=changes)


def parse_launcher_args(argv: Sequence[str] | None, default_path: str, default_name: str) -> argparse.Namespace:
    """Read ``config_path``, ``config_name`` and ``overrides`` off a launcher's command line; exits with a usage message
    on a flag it does not know."""
    parser = argparse.ArgumentParser(
        description="Run a pipeline from a YAML configuration.",
        epilog="Overrides: key=value (any key of the schema), +new.key=value, '~key'. See docs/configuration.md.",
    )
    parser.add_argument(
        *("--config_path", "--config-path"), default=default_path, help="folder of the configuration (%(default)s)"
    )
    parser.add_argument(
        *("--config_name", "--config-name"), default=default_name, help="its name, with or without .yaml (%(default)s)"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="changes to the configuration")
    known, rest = parser.parse_known_intermixed_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}; overrides are written key=value")
    return known
