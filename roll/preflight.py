"""What only the parts themselves can check, before anything starts: rewards, own functions, a checkpoint, trackers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

from roll.checkpoint.contents import STATE_NAME as TRAINER_STATE
from roll.checkpoint.contents import (
    CheckpointMismatchError,
    frozen_mismatches,
    read_contents,
    read_trainer_state,
    readers_of,
    trained_under,
)
from roll.checkpoint.manager import glance
from roll.checkpoint.manifest import CheckpointDamagedError
from roll.config.errors import ConfigError, Problem
from roll.config.loader import LoadedConfig
from roll.config.lora import uses_lora
from roll.config.masking import masked
from roll.config.packages import require_trackers
from roll.config.pipelines import find_own_modules
from roll.config.roles import WorkerConfig
from roll.config.sources import shown

STATE_FOLDER, PIPELINE_STATE = "pipeline", "state.json"
"""Where a checkpoint has the state of its pipeline."""


def check_parts(loaded: LoadedConfig[Any]) -> None:
    """All checks of this module.

    Raises:
        ConfigError: a reward that cannot be built, a function that is not there, or options that they or trackers do
            not have.
    """
    require_trackers(loaded)
    loaded.pipeline.check_parts(loaded)
    check_own_functions(loaded)
    loaded.pipeline.check_host(loaded)
    from roll.tracking.trackers import tracker_options

    kwargs = loaded.config.tracker_kwargs
    try:
        tracker_options(loaded.config.track_with, kwargs)
    except ValueError as error:
        shown_kwargs = masked(kwargs)
        problem = Problem(
            "tracker_kwargs", shown_kwargs, str(error), source=shown(loaded.source), has_value=bool(kwargs)
        )
        raise ConfigError([problem]) from error


def check_resumption(loaded: LoadedConfig[Any]) -> None:
    """See from what a checkpoint says of itself whether this configuration takes up all of it.

    Its tensors are compared with the model when that is built; what the configuration alone tells is refused here.

    Raises:
        ConfigError: no such checkpoint, one that another strategy wrote, or one of which something would be lost.
    """
    config, plan = loaded.config, loaded.plan
    upload = config.checkpoint_config.output_dir
    folders = [plan.checkpoint_dir, *([Path(upload)] if upload else [])]
    wanted, source = config.resume_from_checkpoint, shown(loaded.source)
    problems: list[Problem] = []
    try:
        checkpoint = glance(wanted, folders)
    except (FileNotFoundError, CheckpointDamagedError) as error:
        raise ConfigError([Problem("resume_from_checkpoint", wanted, str(error), source=source)]) from error
    if checkpoint is None:
        return
    written = {path.parent.name for path in checkpoint.path.glob(f"*/{TRAINER_STATE}")}
    for role in sorted(written ^ set(plan.training)):
        rule = (
            f"{checkpoint.path} holds a trained {role}, which this run has not; it would be left behind"
            if role in written
            else f"{checkpoint.path} holds nothing of {role}; it holds {', '.join(sorted(written)) or 'no model'}"
        )
        problems.append(Problem("resume_from_checkpoint", wanted, f"{rule}. {_ANEW}", source=source))
    for role in sorted(written & set(plan.training)):
        for key, rule in _resumption_problems(checkpoint.role(role), getattr(config, role)):
            path, value = f"{role}.{key}", reduce(getattr, key.split("."), getattr(config, role))
            problems.append(Problem(path, value, f"{rule}. {_ANEW}", source=source))
    state = json.loads((checkpoint.role(STATE_FOLDER) / PIPELINE_STATE).read_text(encoding="utf-8"))
    for key, value, rule in loaded.pipeline.resumption_problems(loaded, str(checkpoint.path), state):
        problems.append(Problem(key, value, f"{rule}. {_ANEW}", source=source))
    if problems:
        raise ConfigError(problems)


_ANEW = (
    "Go on with the configuration that wrote it (config.yaml in its output_dir), or start a new run: another "
    "output_dir, or resume_from_checkpoint: false"
)


def _resumption_problems(folder: Path, section: WorkerConfig) -> Iterator[tuple[str, str]]:
    """Keys of a role's section that do not go with the checkpoint in ``folder``, and why."""
    args, strategy = section.model_args, section.strategy_args.strategy_name
    try:
        written = read_contents(read_trainer_state(folder), folder)
    except CheckpointMismatchError as error:
        yield "strategy_args.strategy_name", str(error)
        return
    if strategy not in readers_of(written.strategy):
        readers = " and ".join(readers_of(written.strategy))
        yield (
            "strategy_args.strategy_name",
            f"{folder} was written by {written.strategy}, which {readers} can go on from",
        )
        return
    had_adapters = any(".lora_" in name for name in written.trained)
    if had_adapters != uses_lora(args):
        has = "holds adapters, and this role has none" if had_adapters else "holds a model without adapters"
        yield "model_args.lora_target", f"{folder} {has}"
    elif not had_adapters:
        names = {*written.trained, *written.frozen}
        for problem in frozen_mismatches(written, trained_under(names, args.freeze_module_prefix)):
            yield "model_args.freeze_module_prefix", f"{folder}: {problem}"
    elif args.adapter_name_or_path is None:
        ranks = {shape[0] for name, shape in written.trained.items() if ".lora_A." in name}
        scalings, own = set(written.scalings.values()), (args.lora_alpha or 2 * args.lora_rank) / args.lora_rank
        if ranks != {args.lora_rank}:
            yield "model_args.lora_rank", f"{folder} holds adapters of rank {', '.join(map(str, sorted(ranks)))}"
        elif scalings != {own}:
            alphas = ", ".join(f"{scaling * args.lora_rank:g}" for scaling in sorted(scalings))
            yield (
                "model_args.lora_alpha",
                f"{folder} holds adapters whose alpha is {alphas}, here {own * args.lora_rank:g}",
            )


def check_own_functions(loaded: LoadedConfig[Any]) -> None:
    """Import every function that the configuration names by its path, and see that it takes its options.

    Raises:
        ConfigError: a function that is not there, or options that it does not have.
    """
    problems = []
    for key, value, look_up in (*loaded.pipeline.own_functions(loaded), *own_filters(loaded)):
        try:
            find_own_modules()
            look_up()
        except ValueError as error:
            problems.append(Problem(key, value, str(error), source=shown(loaded.source), has_value=True))
    if problems:
        raise ConfigError(problems)


def own_filters(loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """The same for functions that choose rows."""
    for name, section in loaded.pipeline.filtered_sections(loaded.config).items():
        chosen = section.data_args.dataset_filter
        if isinstance(chosen, str):
            yield f"{name}.data_args.dataset_filter", chosen, partial(_build_data_filter, chosen)


def _build_data_filter(path: str) -> object:
    from roll.datasets.columns import build_filter

    return build_filter(path)
