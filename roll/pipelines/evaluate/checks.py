"""Checks of an evaluation across keys. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.checks.roles import check_roles, note_engine_length, note_positions
from roll.config.model_files import CONFIG, looks_like_folder, model_folder
from roll.config.reading.errors import ConfigError, Problem, closest
from roll.config.reading.yaml_files import shown
from roll.config.strategies.remote import EXAMPLE_URL, url_problem
from roll.pipelines.evaluate.config import AGAINST, EvaluateConfig, read_entry, temperature_problem
from roll.pipelines.rlvr.checks import SET_NAME, check_lengths, check_templates, check_validation, longest_in_validation
from roll.pipelines.rlvr.checks_rewards import check_judges, check_rewards
from roll.pipelines.rlvr.plan import lengths

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


def check_evaluation(config: EvaluateConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    check_models(config, checks)
    options = check_roles(config, checks)
    check_lengths(config, checks)
    if not checks.broken("prompt_length", "response_length", "sequence_length"):
        val_prompt, val_sequence = longest_in_validation(config)
        prompt, longest = max(config.prompt_length, val_prompt), max(lengths(config)[1], val_sequence)
        note_engine_length(options, prompt, longest, checks)
        note_positions("pretrain", config.pretrain or None, longest, checks)
    check_rewards(config, checks)
    check_judges(config, checks)
    if config.validation is None:
        checks.missing(
            "validation", "is needed: the prompts that are asked", "validation.data_args.file_name: [val.jsonl]"
        )
    check_validation(config, checks)
    check_templates(config, checks)


def check_models(config: Any, checks: Checks) -> None:
    """Models are there, of a form that can be read, and their names differ; the other keys of ``evaluate``
    as well.

    Args:
        config: with the section ``evaluate``.
    """
    keys, own = config.evaluate, config.actor_infer.model_args.model_name_or_path or config.pretrain
    names: list[str] = []
    for name, path in keys.models.items():
        key = f"evaluate.models.{name}"
        if not SET_NAME.fullmatch(name.replace(".", "_")):
            checks.add(key, name, "a model's name is part of the metrics' names: letters, digits, ., - and _")
        if not checks.check_files:
            names.append(name)
            continue
        try:
            found = list(read_entry(name, path, own))
        except ValueError as error:
            checks.add(key, path, str(error))
            continue
        for model in found:
            folder = model_folder(model.base)
            if looks_like_folder(model.base) and (folder is None or not os.path.isfile(folder / CONFIG)):
                there = folder is not None and os.path.exists(folder)
                rule = f"has no {CONFIG}" if there else "does not exist"
                checks.add(key if model.checkpoint is None else "pretrain", model.base, rule)
        names += [model.name for model in found]
    if keys.against is not None:
        check_against(config, own, checks)
        names += [AGAINST] if names else []
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        checks.add("evaluate.models", doubled, "two models have this name: choose others")
    if keys.baseline is not None and names and keys.baseline not in names:
        rule = f"must be a model of evaluate.models: {', '.join(names)}"
        checks.add("evaluate.baseline", keys.baseline, rule, closest(keys.baseline, names) or names[0])
    for index, value in enumerate(keys.temperatures):
        problem = temperature_problem(value)
        if problem is not None:
            checks.add(f"evaluate.temperatures.{index}", value, problem, 1.0)


def check_against(config: Any, own: str | None, checks: Checks) -> None:
    """The model that is served elsewhere; ``own`` is the file's."""
    keys = config.evaluate
    if (wrong := url_problem(keys.against.partition("#")[0])) is not None:
        checks.add("evaluate.against", keys.against, wrong, EXAMPLE_URL)
    section = config.validation if hasattr(config, "validation") else None
    if section is not None and section.generating_args.stop_token_ids:
        text = "stop_token_ids are of this run's tokenizer, and are not sent: against ends where its own model does"
        checks.note("evaluate.against", text)
    if not own:
        checks.missing("pretrain", "is needed with evaluate.against: its tokenizer counts tokens", "my/model")
    if keys.against_api_key_env and not os.environ.get(keys.against_api_key_env):
        checks.add("evaluate.against_api_key_env", keys.against_api_key_env, "no such variable in the environment")


def check_taken_up(loaded: LoadedConfig[Any], settings: Callable[[], dict[str, Any]]) -> None:
    """The samples in the output folder, if any, are those of an evaluation with these settings.

    Raises:
        ConfigError: they are of another, and would be mixed with it.
    """
    from roll.pipelines.evaluate.samples import SAMPLES, differing

    plan = loaded.plan
    if not loaded.config.evaluate.resume:
        return
    found = differing(plan.output_dir, settings())
    if found:
        rule = (
            f"{plan.output_dir / SAMPLES} holds samples of an evaluation with other settings ({'; '.join(found)}); "
            "begin anew (the file is kept as .previous), or choose another output_dir"
        )
        raise ConfigError([Problem("evaluate.resume", True, rule, False, shown(loaded.source))])
