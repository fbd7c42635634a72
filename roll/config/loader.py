"""Loads a configuration: compose, check against the schema, refuse what is not available, check across keys, plan.

Imports neither torch nor ray; a whole load takes well under a second."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from roll.config.checks.base import Checks
from roll.config.checks.keys import refuse_unavailable
from roll.config.checks.unknown_keys import name_unknown
from roll.config.defaults import with_estimator, with_learning_defaults
from roll.config.installation import dotted_path, offered
from roll.config.pipelines import (
    NAMES,
    PIPELINES,
    PipelineDefinition,
    definition_of,
    definitions,
    find_own_modules,
    load_definition,
)
from roll.config.plan.plan import Plan
from roll.config.reading.compose import LEARNING, Composed, compose_file
from roll.config.reading.errors import ConfigError, Notice, Problem, Problems, closest
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.legacy_keys import dead_keys
from roll.config.reading.masking import know_keys, register_secrets
from roll.config.reading.schema import SchemaReader, build, declared_secrets, known_keys
from roll.config.reading.yaml_files import shown
from roll.config.run import PolicyRunConfig, RunConfig

C = TypeVar("C", bound=RunConfig)
EXTENSION = ".yaml"
MISSPELT = 0.8  # likeness (`difflib`) from which on an unknown name is taken for a known one with a mistake in it


@dataclass(frozen=True)
class LoadedConfig(Generic[C]):
    """A configuration that can be run."""

    config: C = field(repr=False)
    pipeline: PipelineDefinition = field(repr=False)
    plan: Plan = field(repr=False)
    resolved: dict[str, Any] = field(repr=False)
    """The effective YAML: what was written, composed and resolved (secrets included: mask before showing)."""
    warnings: tuple[Notice, ...]
    """Values that were accepted and that the user should know of."""
    source: Path
    """The file; where there is none, ``(config)``."""
    overrides: tuple[str, ...] = ()
    written: Mapping[str, Any] | None = field(default=None, repr=False)
    """The mapping that a configuration without a file was read from."""
    callbacks: tuple[Any, ...] = ()
    """Objects as of :class:`roll.tracking.callbacks.Callback`."""

    def problem(self, key: str, value: object, rule: str, example: object = None, *, has_value: bool = True) -> Problem:
        """A problem with a key of this file, to be raised in a :class:`ConfigError`."""
        return Problem(key, value, rule, example, shown(self.source), has_value)

    def is_written(self, key: str) -> bool:
        """Return whether the file or the command line has the key, also in a section under another name."""
        first, dot, rest = key.partition(".")
        aliases = (name for name, own in self.pipeline.section_aliases.items() if own == first)
        return any(_is_written(self.resolved, f"{name}{dot}{rest}") for name in (first, *aliases))


def load_config(
    config_class: type[C] | None,
    config_path: str | Path,
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
) -> LoadedConfig[C]:
    """Load and check a configuration.

    Args:
        config_class: of a pipeline, such as ``RLVRConfig``; None: read off the file.
        config_path: with ``config_name``, its folder, relative to the working directory or to ``examples/``; without,
            the file itself.
        config_name: file name, with or without ``.yaml``.
        overrides: ``key=value``, ``+new.key=value``, ``~key``.
        check_files: data files and model folders must exist.

    Raises:
        ConfigError: every mistake that was found, each with its file, key, value and rule.
    """
    file = find_file(Path(config_path), config_name)
    problems = Problems()
    composed = compose_file(file, overrides, problems)
    return replace(load_composed(config_class, composed, problems, check_files=check_files), overrides=tuple(overrides))


def load_composed(
    config_class: type[C] | None, composed: Composed, problems: Problems, *, check_files: bool = True
) -> LoadedConfig[C]:
    """:func:`load_config` from the composed tree on; ``problems`` holds the mistakes found so far. Raises
    ``ConfigError``: as :func:`load_config`."""
    # First of all: messages about a broken file must not show its secrets either.
    for known in definitions():
        know_keys(declared_secrets(known.config_class))
    register_secrets(composed.data)
    if not composed.data and not problems.errors:
        problems.missing("(file)", "is empty")
    loaded = _load(config_class, composed, problems, check_files) if composed.data else None
    if loaded is None or problems.errors:
        mistakes = [replace(one, key=problems.rename(one.key)) for one in problems.errors]
        raise ConfigError([replace(one, source=composed.source.place_of(one.key)) for one in mistakes])
    pipeline, config, plan = loaded
    # A file that means the same as all that was composed.
    resolved = composed.data if composed.defaults == LEARNING else {"defaults": composed.defaults, **composed.data}
    # One note may name several keys.
    named = [replace(one, key=", ".join(map(problems.rename, one.key.split(", ")))) for one in problems.notices]
    return LoadedConfig(
        config=cast(C, config),
        pipeline=pipeline,
        plan=plan,
        resolved=resolved,
        warnings=tuple(named),
        source=composed.source.file,
    )


def _load(
    config_class: type[C] | None, composed: Composed, problems: Problems, check_files: bool
) -> tuple[PipelineDefinition, RunConfig, Plan] | None:
    data, source = without_fragments(composed), composed.source
    expected = next((one.name for one in definitions() if one.config_class is config_class), None)
    pipeline = detect_pipeline(data, expected, problems)
    if pipeline is None:
        return None
    cls = pipeline.config_class
    # A pipeline of the user's own is not among the definitions.
    know_keys(declared_secrets(cls))
    # Sections go by the pipeline's own names; messages have the names that were written.
    aliases = {name: own for name, own in pipeline.section_aliases.items() if name in data}
    for name, own in aliases.items():
        if own in data:
            problems.add(name, data[name], f"is another name of {own}, which is set too: keep one of them")
    spelled = {own: name for name, own in aliases.items()}
    written = {aliases.get(name, name): value for name, value in data.items()}
    reader = SchemaReader(problems, composed.referenced, source.is_own, source.rank)

    def as_written(key: str) -> str:
        first, dot, rest = reader.as_written(key).partition(".")
        return f"{spelled.get(first, first)}{dot}{rest}"

    problems.rename = as_written
    learns = issubclass(cls, PolicyRunConfig) and composed.defaults == LEARNING
    values = reader.read(cls, with_estimator(written) if learns else written, "")
    refuse_unavailable(written, problems)
    config: RunConfig = build(cls, values)
    name_unknown(reader.unknown, config, pipeline, problems)
    checks = Checks(problems, lambda key: _is_written(written, key), check_files, pipeline, source.is_own)
    if learns and isinstance(config, PolicyRunConfig):
        config = with_learning_defaults(config, pipeline, checks.written)
    pipeline.check(config, checks)
    if problems.errors:
        return None
    return pipeline, config, pipeline.plan(config, config.exp_name or source.file.stem, checks.written)


def without_fragments(composed: Composed) -> dict[str, Any]:
    """The tree without top-level names that only serve ``${...}``: those that are referred to, sections that come from
    the files of a ``defaults`` list (presets, of which a file uses what it needs); and unless they look like a misspelt
    key, single values that stand in such a file with them, or that refer to another key themselves."""
    known = {key for entry in PIPELINES for key in entry.start_keys}
    known |= {key for one in definitions() for key in (*known_keys(one.config_class), *dead_keys(one.config_class))}
    # A collector to throw away: detect_pipeline reports what is wrong with the path.
    own = _own_definition(composed.data.get("pipeline"), Problems())
    known |= set(known_keys(own.config_class)) if own is not None else set()
    unknown = {key: value for key, value in composed.data.items() if key not in known}
    presets = {key for key, value in unknown.items() if isinstance(value, Mapping) and composed.source.included(key)}
    files = {file for key in presets for file in composed.source.files_with(key)}
    loose = {
        key for key in unknown if composed.source.included(key) and files.issuperset(composed.source.files_with(key))
    }
    loose = {key for key in loose | composed.derived if not get_close_matches(key, known, cutoff=MISSPELT)}
    dropped = presets | (unknown.keys() & (composed.referenced | loose))
    return {key: value for key, value in composed.data.items() if key not in dropped}


def detect_pipeline(data: Mapping[str, Any], expected: str | None, problems: Problems) -> PipelineDefinition | None:
    """The pipeline that a file is for: its ``pipeline`` key, the launcher's own, or read off its sections."""
    named = data.get("pipeline")
    marked = next(
        (one.name for one in PIPELINES if any(data.get(key) not in (None, False) for key in one.start_keys)), None
    )
    pipeline = named or expected or marked
    if named is not None and not isinstance(named, str):
        problems.add("pipeline", named, f"must be one of {', '.join(NAMES)}", marked or "rlvr")
    elif expected is not None and named is not None and named != expected:
        problems.add("pipeline", named, f"this launcher runs {expected}; use the launcher of {named}", expected)
    elif isinstance(named, str) and ("." in named or named in offered("pipelines")):
        return _own_definition(named, problems)
    elif pipeline is None:
        problems.missing("pipeline", f"cannot be told from the file: it must be one of {', '.join(NAMES)}", "rlvr")
    elif pipeline in NAMES:
        return definition_of(str(pipeline))
    else:
        rule = f"must be one of {', '.join(NAMES)}"
        problems.add("pipeline", pipeline, rule, closest(str(pipeline), NAMES) or "rlvr")
    return None


def _own_definition(path: object, problems: Problems) -> PipelineDefinition | None:
    """The user's pipeline at a dotted path, or under a name that a package offers; None for anything else."""
    path = dotted_path("pipelines", path) if isinstance(path, str) and path not in NAMES else path
    if not isinstance(path, str) or "." not in path:
        return None
    if not DOTTED_PATH.fullmatch(path):
        problems.add("pipeline", path, f"must be one of {', '.join(NAMES)}, or a dotted path", "my_module.MyPipeline")
        return None
    find_own_modules()
    try:
        return load_definition(path)
    except ValueError as error:
        problems.add("pipeline", path, str(error), "my_module.MyPipeline")
        return None


def _is_written(data: Mapping[str, Any], key: str) -> bool:
    node: Any = data
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def find_file(config_path: Path, config_name: str | None) -> Path:
    """The configuration file. Raises ``ConfigError``: there is none; the message lists where it was looked for, and
    what is there."""
    wanted = config_path if config_name is None else config_path / config_name
    candidates = [root / wanted for root in (Path(), Path("examples"), recipes_root() / "examples")]
    for candidate in candidates:
        # Not with_suffix, which would cut a name such as qwen2.5-grpo at its dot.
        for file in (candidate, Path(f"{candidate}{EXTENSION}")):
            if os.path.isfile(file) and file.suffix == EXTENSION:
                return file
            if os.path.isfile(file):
                raise ConfigError([Problem("(file)", str(file), "must be a file that ends in .yaml")])
    places = dict.fromkeys(place if os.path.isdir(place) else place.parent for place in candidates)
    near = [folder for folder in places if os.path.isdir(folder)]
    there = sorted({file.name for folder in near for file in folder.iterdir() if file.suffix == EXTENSION})
    rule = "no such file, neither from the working directory nor from examples/"
    listing = f"; there is {', '.join(there)}" if there else ""
    key = "(file)" if config_name is None else "--config_path and --config_name"
    nearest = closest(wanted.name, [Path(name).stem for name in there])
    raise ConfigError([Problem(key, str(wanted), f"{rule}{listing}", f"nearest: {nearest}" if nearest else None)])


PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "shipped"  # written by `setup.py` when a wheel is built; a clone has none
FOLDERS = ("examples", "configs")


def recipes_root() -> Path:
    """The folder that holds ``examples`` and ``configs``: the root of the clone, or ``roll/shipped`` of a wheel."""
    return SHIPPED if os.path.isdir(SHIPPED) else PACKAGE.parent


def copy_recipes(target: Path) -> list[Path]:
    """Copy ``examples`` and ``configs`` into ``target``; existing files are never replaced.

    Returns:
        The folders that were written.

    Raises:
        ConfigError: ``target`` already has one of the folders.
    """
    root = recipes_root()
    present = [name for name in FOLDERS if os.path.exists(target / name)]
    if present:
        rule = f"already holds {' and '.join(present)}, which are not replaced; choose another folder"
        raise ConfigError([Problem("(folder)", str(target), rule, "my_project")])
    ignored = shutil.ignore_patterns("__pycache__", "artifacts", "output")
    for name in FOLDERS:
        shutil.copytree(root / name, target / name, ignore=ignored)
    return [target / name for name in FOLDERS]
