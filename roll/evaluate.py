"""``roll evaluate FILE``: models and checkpoints on the prompts of an RLVR file's validation, or in the environments of
an agentic file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.loader import LoadedConfig, find_file, load_composed
from roll.config.pipelines import definition_of
from roll.config.reading.compose import add_config_arguments, compose_file
from roll.config.reading.errors import ConfigError, Problem, Problems

EVALUATE, AGENTIC = "evaluate", "agentic_rollout"
AGENTIC_KEYS = ("train_env_manager", "val_env_manager", "custom_envs")  # A file with one of these plays environments
EPILOG = "Exit status: 0; 3 where a model stays below a threshold; 2 for a wrong configuration; 1 for a failure."


def main(words: Sequence[str]) -> int:
    """The exit status."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}; overrides are written key=value")
    overrides = [*arguments.overrides, *rest]
    if arguments.harness is not None:
        return evaluate_by(arguments, overrides)
    if arguments.tasks or arguments.chat or arguments.harness_argument:
        parser.error("--tasks, --chat and --harness-argument are read with --harness only")
    return evaluate(arguments.config, None, overrides, keys_of(arguments))


def evaluate_by(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the program of a harness against the models; the exit status. Raises ``ConfigError``: every mistake."""
    from roll.cli import ready, run
    from roll.pipelines.evaluate.models import HarnessRun
    from roll.serving.harness import HARNESSES, HarnessConfig

    HARNESSES[arguments.harness].require("--harness")
    if not arguments.tasks:
        example = "my_task" if arguments.harness == "lm_eval" else "my_task.py"
        raise ConfigError([Problem("--tasks", None, "is needed with --harness", example, has_value=False)])
    keys = keys_of(arguments) | {"resume": False}  # it keeps no samples that could be taken up
    loaded = ready(partial(load_evaluation, arguments.config, None, overrides, keys))
    if loaded.pipeline.name != EVALUATE:
        raise ConfigError([Problem("--harness", arguments.harness, "asks prompts: the file must be an RLVR file")])
    if loaded.config.evaluate.against is not None:
        key = "evaluate.against" if arguments.against is None else "--against"
        rule = "has no place with --harness, whose program asks this run's engines"
        raise ConfigError([Problem(key, loaded.config.evaluate.against, rule)])
    tasks = [name for names in arguments.tasks for name in names.split(",")]
    options = HarnessConfig(arguments.harness, tasks, arguments.harness_argument, arguments.chat)
    return run(loaded, lambda: HarnessRun(loaded, options).run())


def evaluate(config_path: str, config_name: str | None, overrides: Sequence[str], keys: Mapping[str, Any]) -> int:
    """Load, show the plan, run; the exit status. ``keys``: of the section ``evaluate``, before those of the file.
    Raises ``ConfigError``: every mistake."""
    from roll.cli import ready, run

    loaded = ready(partial(load_evaluation, config_path, config_name, overrides, keys))
    return run(loaded, partial(loaded.pipeline.run, loaded))


def load_evaluation(
    config_path: str,
    config_name: str | None,
    overrides: Sequence[str],
    keys: Mapping[str, Any],
    check_files: bool = True,
) -> LoadedConfig[Any]:
    """The configuration of an evaluation from an RLVR or an agentic file; the arguments are those of
    :func:`~roll.config.loader.load_config` and :func:`evaluate`. Raises ``ConfigError``: every mistake."""
    # By way of the composed keys: the class of the configuration depends on them.
    problems = Problems()
    composed = compose_file(find_file(Path(config_path), config_name), overrides, problems)
    data = composed.data
    is_agentic = "agentic" in str(data.get("pipeline")) or any(key in data for key in AGENTIC_KEYS)
    if data.get("pipeline") in ("rlvr", "agentic", None):
        data = data | {"pipeline": AGENTIC if is_agentic else EVALUATE}
    if keys and isinstance(data.get(EVALUATE) or {}, Mapping):
        data = data | {EVALUATE: {**(data.get(EVALUATE) or {}), **keys}}
    config_class: Any = definition_of(AGENTIC if is_agentic else EVALUATE).config_class
    loaded = load_composed(config_class, replace(composed, data=data), problems, check_files=check_files)
    return replace(loaded, overrides=tuple(overrides))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll evaluate", description=__doc__, epilog=EPILOG)
    add_config_arguments(parser, "changes: key=value, +new.key=value, '~key'")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a model folder, a training checkpoint or a folder of checkpoints; may be given several times",
    )
    parser.add_argument(
        "--against", metavar="URL[#MODEL]", help="compare with a model served elsewhere (OpenAI-compatible, .../v1)"
    )
    parser.add_argument("--samples", type=int, help="samples of every prompt")
    parser.add_argument(
        "--temperature", type=float, action="append", default=[], help="answer at this temperature (0: greedy); several"
    )
    parser.add_argument(
        "--at-least",
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="exit with status 3 where the metric is lower, such as val_correct/all/mean=0.8",
    )
    parser.add_argument("--anew", action="store_true", help="do not reuse the samples of an interrupted evaluation")
    group = parser.add_argument_group("harness", "in place of the file's prompts, tasks of another program")
    group.add_argument(
        "--harness", choices=("lm_eval", "inspect"), help="lm-eval or Inspect, asking the engines by HTTP"
    )
    group.add_argument("--tasks", action="append", default=[], help="lm-eval: names; Inspect: files; several")
    group.add_argument("--chat", action="store_true", help="lm-eval: chat completions (no log-likelihoods)")
    group.add_argument(
        "--harness-argument",
        action="append",
        default=[],
        metavar="WORD",
        help="a word for the program, such as --limit=5 or lm-eval's --include_path=tasks",
    )
    return parser


def keys_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags as keys of ``evaluate``. Raises ``ConfigError``: a flag that is written otherwise."""
    models: dict[str, str] = {}
    for word in arguments.model:
        named, equals, path = word.partition("=")
        name, path = (named, path) if equals else (Path(word).name, word)
        if name in models:
            raise ConfigError([Problem("--model", word, f"a second model named {name}: write NAME=PATH", f"b={path}")])
        models[name] = path
    keys = {
        "models": models or None,
        "against": arguments.against,
        "num_samples": arguments.samples,
        "temperatures": arguments.temperature or None,
        "thresholds": dict(map(threshold, arguments.at_least)) or None,
        "resume": False if arguments.anew else None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def threshold(word: str) -> tuple[str, float]:
    metric, _, value = word.rpartition("=")
    with suppress(ValueError):
        if metric:
            return metric, float(value)
    raise ConfigError([Problem("--at-least", word, "must be METRIC=VALUE", "val_correct/all/mean=0.8")])
