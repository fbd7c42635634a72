"""What only the parts themselves can check, before anything starts: rewards, own functions, a checkpoint, trackers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

from roll.algorithms.registry import Registry
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
from roll.config.fields import DOTTED_PATH
from roll.config.loader import LoadedConfig
from roll.config.lora import uses_lora
from roll.config.masking import masked
from roll.config.packages import require_trackers
from roll.config.plan import RLVRPlan
from roll.config.planning import actor_keys, pg_variant
from roll.config.rlvr import RLVRConfig, RouterConfig
from roll.config.roles import WorkerConfig
from roll.config.sources import shown

STATE_FOLDER, PIPELINE_STATE = "pipeline", "state.json"
"""Where a checkpoint has the state of its pipeline."""

OWN_FUNCTION_KEYS = (
    "adv_estimator",
    "entropy_loss_agg_mode",
    "kl_loss_agg_mode",
    "kl_loss_type",
    "kl_penalty",
    "loss_agg_mode",
    "sample_weighting",
    "train_infer_correction",
    "value_loss_agg_mode",
    "value_loss_type",
)
"""Keys at the top that take the dotted path of a function; ``pg_variant`` and filters bring options along."""


def check_parts(loaded: LoadedConfig[Any]) -> None:
    """All checks of this module.

    Raises:
        ConfigError: a reward that cannot be built, a function that is not there, or options that they or trackers do
            not have.
    """
    require_trackers(loaded)
    check_rewards(loaded)
    check_own_functions(loaded)
    check_transport(loaded)
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
    if isinstance(plan, RLVRPlan) and not plan.is_async and has_samples_ahead(checkpoint.role(STATE_FOLDER)):
        rule = f"{checkpoint.path} holds samples that were generated ahead, which a synchronous run has no use for"
        problems.append(
            Problem("async_generation_ratio", config.async_generation_ratio, f"{rule}. {_ANEW}", source=source)
        )
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


def has_samples_ahead(folder: Path) -> bool:
    """Whether the state of a pipeline in ``folder`` has samples for later steps."""
    ahead = json.loads((folder / PIPELINE_STATE).read_text(encoding="utf-8")).get("rollout", {}).get("ahead", {})
    return bool(ahead.get("unfinished") or ahead.get("complete"))


def check_rewards(loaded: LoadedConfig[Any]) -> None:
    """Build each domain's reward once: a wrong ``reward_kwargs``, or a host that gives too little, is found early.

    Raises:
        ConfigError: a reward that cannot be built, an option that it does not have, or numbers in ``reward_weights``
            that it does not return.
    """
    if not isinstance(loaded.config, RLVRConfig):
        return
    find_own_modules()
    from roll.rewards import RewardOptionError, build_section

    problems = []
    for name, section in loaded.config.rewards.items():
        try:
            reward = build_section(name, section)
            reward.check_host()
            reward.close()
            problems += unknown_numbers(name, reward, loaded)
        except RewardOptionError as error:
            inside = f"components.{error.component}." if error.component is not None else ""
            part = section if error.component is None else section.components[error.component]
            key, value = f"rewards.{name}.{inside}{error.key}", getattr(part, error.key)
            rule = str(error).removeprefix(f"worker_cls {value!r}: ")
            problems.append(Problem(key, masked(value), rule, source=shown(loaded.source), has_value=bool(value)))
    if problems:
        raise ConfigError(problems)


def check_transport(loaded: LoadedConfig[Any]) -> None:
    """Weights can only travel through memory that there is.

    Raises:
        ConfigError: ``cuda_ipc`` on a host without CUDA.
    """
    if not isinstance(loaded.config, RLVRConfig) or loaded.config.weight_sync.transport != "cuda_ipc":
        return
    from roll.platforms import current_platform

    device_type = current_platform().device_type
    if device_type != "cuda":
        rule = f"needs CUDA devices, this host's are of type {device_type}; object_store works everywhere"
        source = shown(loaded.source)
        raise ConfigError([Problem("weight_sync.transport", "cuda_ipc", rule, source=source, has_value=True)])


def unknown_numbers(domain: str, reward: object, loaded: LoadedConfig[RLVRConfig]) -> list[Problem]:
    """A mistake where ``reward_weights`` names what a rule is known not to return."""
    known = getattr(reward, "numbers", ())
    for number in loaded.config.reward_weights:
        if known and number not in (*known, "score"):
            rule = f"rewards.{domain} returns no such number; it returns {', '.join((*known, 'score'))}"
            return [Problem(f"reward_weights.{number}", None, rule, source=shown(loaded.source), has_value=False)]
    return []


def check_own_functions(loaded: LoadedConfig[Any]) -> None:
    """Import every function that the configuration names by its path, and see that it takes its options.

    Raises:
        ConfigError: a function that is not there, or options that it does not have.
    """
    problems = []
    for key, value, look_up in (*own_functions(loaded.config), *own_filters(loaded)):
        try:
            find_own_modules()
            look_up()
        except ValueError as error:
            problems.append(Problem(key, value, str(error), source=shown(loaded.source), has_value=True))
    if problems:
        raise ConfigError(problems)


def own_filters(loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """The same for functions that choose rows."""
    is_rlvr = isinstance(loaded.config, RLVRConfig)
    sections = {
        name: getattr(loaded.config, name) for name in ("actor_train" if is_rlvr else "sft_train", "validation")
    }
    if is_rlvr and sections["validation"] is not None:
        sections |= {f"validation.sets.{name}": one for name, one in sections["validation"].sets.items()}
    for name, section in sections.items():
        chosen = None if section is None else section.data_args.dataset_filter
        if isinstance(chosen, str):
            yield f"{name}.data_args.dataset_filter", chosen, partial(_build_data_filter, chosen)


def own_functions(config: Any) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """(key, value, look-up) of what a user may have written a function for; nothing is imported for the known names."""
    if not isinstance(config, RLVRConfig):
        return
    for key in OWN_FUNCTION_KEYS:
        value = getattr(config, key)
        if isinstance(value, str) and DOTTED_PATH.fullmatch(value):
            yield key, value, partial(Registry(key).resolve, value)
    variant = pg_variant(config)
    if config.pg_variant_args or DOTTED_PATH.fullmatch(variant):
        yield "pg_variant_args" if config.pg_variant_args else "pg_variant", variant, partial(_loss_options, config)
    router = config.router_args
    if router.router_config or DOTTED_PATH.fullmatch(router.router_name or ""):
        key = "router_config" if router.router_config else "router_name"
        yield f"router_args.{key}", getattr(router, key), partial(_build_router, router)
    for name, section in config.rewards.items():
        for key in ("query_filter_config", "response_filter_config"):
            own = getattr(section, key)
            if DOTTED_PATH.fullmatch(own.type):
                yield f"rewards.{name}.{key}", own.type, partial(_build_filter, own.type, own.filter_args)


def _build_data_filter(path: str) -> object:
    from roll.datasets.selection import build_filter

    return build_filter(path)


def _loss_options(config: RLVRConfig) -> object:
    from roll.algorithms.actor_loss import actor_loss_options

    return actor_loss_options(actor_keys(config))


def _build_filter(kind: str, arguments: dict[str, Any]) -> object:
    from roll.rollout.filters import build_filter

    return build_filter(kind, arguments)


def _build_router(section: RouterConfig) -> object:
    from roll.rollout.routing import build_router

    return build_router(section.router_name, section.router_config)


def find_own_modules() -> None:
    """Let a user's rewards be found in the working directory, as Ray's workers and ``python -m`` do.

    An installed command and a script start with their own folder on the path instead.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
