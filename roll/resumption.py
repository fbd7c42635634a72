"""Checks that a configuration goes on with all of the checkpoint that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from roll.checkpoint.contents import STATE_NAME as TRAINER_STATE
from roll.checkpoint.contents import (
    CheckpointMismatchError,
    frozen_mismatches,
    read_contents,
    read_trainer_state,
    strategy_problem,
)
from roll.checkpoint.folders import CheckpointDamagedError
from roll.checkpoint.manager import probable_checkpoint
from roll.checkpoint.store import ObjectStore, is_url, store_problem
from roll.config.loader import LoadedConfig
from roll.config.lora import frozen_by, names_of, uses_lora
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import WorkerConfig

STATE_FOLDER, PIPELINE_STATE = "pipeline", "state.json"  # where a checkpoint has the state of its pipeline

_ANEW = (
    "Go on with the configuration that wrote it (config.yaml in its output_dir), or start a new run: another "
    "output_dir, or resume_from_checkpoint: false"
)


def check_resumption(loaded: LoadedConfig[Any]) -> None:
    """Check by the description in a checkpoint that this configuration resumes all of it.

    Its tensors are compared with the model when that is built; what the configuration alone shows is refused here.

    Raises:
        ConfigError: no such checkpoint, one that another strategy wrote, or one of which something would be lost.
    """
    config, plan = loaded.config, loaded.plan
    upload = config.checkpoint_config.output_dir
    folders = [plan.checkpoint_dir, *([Path(upload)] if upload and not is_url(upload) else [])]
    store = ObjectStore(upload, config.checkpoint_config.storage_options) if upload and is_url(upload) else None
    wanted = config.resume_from_checkpoint
    problems: list[Problem] = []
    try:
        for key, place in {"checkpoint_config.output_dir": upload, "resume_from_checkpoint": wanted}.items():
            if isinstance(place, str) and is_url(place) and (cannot := store_problem(place)):
                raise ConfigError([loaded.problem(key, place, cannot)])
        checkpoint = probable_checkpoint(wanted, folders, store, (TRAINER_STATE, PIPELINE_STATE))
    except (OSError, CheckpointDamagedError) as error:
        raise ConfigError([loaded.problem("resume_from_checkpoint", wanted, str(error))]) from error
    if checkpoint is None:
        return
    # Roles by what they have written: a role that this run does not train would be lost without a word.
    written = {path.parent.name for path in checkpoint.path.glob(f"*/{TRAINER_STATE}")}
    for role in sorted(written ^ set(plan.training)):
        rule = (
            f"{checkpoint.path} holds a trained {role}, which this run has not; it would be left over"
            if role in written
            else f"{checkpoint.path} holds nothing of {role}; it holds {', '.join(sorted(written)) or 'no model'}"
        )
        problems.append(loaded.problem("resume_from_checkpoint", wanted, f"{rule}. {_ANEW}"))
    for role in sorted(written & set(plan.training)):
        for key, rule in _resumption_problems(checkpoint.role(role), getattr(config, role)):
            path, value = f"{role}.{key}", reduce(getattr, key.split("."), getattr(config, role))
            problems.append(loaded.problem(path, value, f"{rule}. {_ANEW}"))
    state = json.loads((checkpoint.role(STATE_FOLDER) / PIPELINE_STATE).read_text(encoding="utf-8"))
    for key, value, rule in loaded.pipeline.resumption_problems(loaded, str(checkpoint.path), state):
        problems.append(loaded.problem(key, value, f"{rule}. {_ANEW}"))
    if problems:
        raise ConfigError(problems)


def _resumption_problems(folder: Path, section: WorkerConfig) -> Iterator[tuple[str, str]]:
    """Keys of a role's section that do not go with the checkpoint in ``folder``, and why."""
    args, strategy = section.model_args, section.strategy_args.strategy_name
    try:
        state = read_trainer_state(folder)
        written = read_contents(state, folder)
    except CheckpointMismatchError as error:
        yield "strategy_args.strategy_name", str(error)
        return
    problem = strategy_problem(written, strategy)
    if problem is not None:
        yield "strategy_args.strategy_name", f"{folder} {problem}"
        return
    had_adapters = any(".lora_" in name for name in written.trained)
    if had_adapters != uses_lora(args):
        has = "holds adapters, and this role has none" if had_adapters else "holds a model without adapters"
        yield "model_args.lora_target", f"{folder} {has}"
    elif not had_adapters:
        names = {*written.trained, *written.frozen}
        trained = names.difference(*(frozen_by(prefix, names) for prefix in names_of(args.freeze_module_prefix)))
        for problem in frozen_mismatches(written, trained):
            yield "model_args.freeze_module_prefix", f"{folder}: {problem}"
    elif args.adapter_name_or_path is None:
        ranks = {shape[0] for name, shape in written.trained.items() if ".lora_A." in name}
        scalings, own = set(written.scalings.values()), (args.lora_alpha or 2 * args.lora_rank) / args.lora_rank
        if ranks != {args.lora_rank}:
            yield "model_args.lora_rank", f"{folder} holds adapters of rank {', '.join(map(str, sorted(ranks)))}"
        elif scalings != {own}:
            alphas = ", ".join(f"{scaling * args.lora_rank:g}" for scaling in sorted(scalings))
            what = f"holds adapters whose alpha is {alphas}, here {own * args.lora_rank:g}"
            yield "model_args.lora_alpha", f"{folder} {what}"
