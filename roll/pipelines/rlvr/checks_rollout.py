"""Checks of how samples are made: validation sets, asynchronous rollout, the engines' weight updates."""

from __future__ import annotations

import re
from pathlib import Path

from roll.config.checks.base import Checks, check_columns, check_data_files
from roll.config.lora import adapter_rank, uses_lora
from roll.config.plan.planning import shares_devices
from roll.config.rewards import section_of
from roll.config.strategies.registry import BACKENDS, backend_of
from roll.config.weight_sync import update_mode
from roll.pipelines.policy import engine_log_probs_as_old, is_async, needs_greedy_baseline, trainer_is_old
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import sharing_roles
from roll.pipelines.rlvr.planning import started_roles

KEY = "async_generation_ratio"


def check_async(config: RLVRConfig, checks: Checks) -> None:
    """What generation beside training needs, and what it means for the algorithm."""
    if checks.broken(KEY):
        return
    if not is_async(config):
        return
    check_engine_devices(config, checks)
    if needs_greedy_baseline(config):
        rule = f"must be 0 with adv_estimator {config.adv_estimator}: its greedy answers need the engines between steps"
        checks.add(KEY, config.async_generation_ratio, rule, 0)
    if trainer_is_old(config) and not config.train_infer_correction and not engine_log_probs_as_old(config):
        checks.note(
            KEY,
            "samples come from older weights, which nothing corrects for: ratios are taken against the trainer before "
            "the update; train_infer_correction: decoupled weighs them against the engine",
        )


def check_engine_devices(config: RLVRConfig, checks: Checks) -> None:
    """Engines that finish all they begin have their devices to themselves; only partial rollout takes turns."""
    key, engines = "actor_infer.device_mapping", config.actor_infer
    if checks.broken(key) or config.partial_rollout:
        return
    others = {name: role for name, role in started_roles(config).items() if name != "actor_infer"}
    sharing = [name for name, role in others.items() if shares_devices(engines, role)]
    if sharing:
        taken = {device for role in others.values() for device in role.device_mapping or ()}
        free = [device for device in range(len(taken) + len(engines.device_mapping or ())) if device not in taken]
        rule = (
            f"must share no device with {', '.join(sharing)}: with {KEY} {config.async_generation_ratio:g} and "
            "partial_rollout: false engines generate while they compute (partial_rollout: true lets them take turns)"
        )
        checks.add(key, engines.device_mapping, rule, free[: len(engines.device_mapping or ())])


SET_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


def check_validation(config: RLVRConfig, checks: Checks) -> None:
    """Files, columns, lengths and names of all sets."""
    section = config.validation
    if section is None:
        return
    if section.data_args.file_name or not section.sets:
        check_data_files("validation.data_args", section.data_args, checks)
    check_columns("validation.data_args", section.data_args, checks)
    check_concurrent(config, checks)
    for name, one in section.sets.items():
        key = f"validation.sets.{name}"
        if not SET_NAME.fullmatch(name) or name in ("sampled", "greedy"):
            rule = "a set's name is part of the metrics' names: letters, digits, - and _, and not sampled or greedy"
            checks.add(key, name, rule)
        check_data_files(f"{key}.data_args", one.data_args, checks)
        check_columns(f"{key}.data_args", one.data_args, checks)
        prompt, sequence = one.prompt_length, one.sequence_length
        if (prompt is None) != (sequence is None):
            absent, present = ("prompt_length", "sequence_length")[:: 1 if prompt is None else -1]
            checks.missing(f"{key}.{absent}", f"goes with {present}: set both or none", prompt or config.prompt_length)
        elif prompt is not None and sequence is not None and sequence <= prompt:
            rule = f"must be greater than prompt_length {prompt}, or no response fits"
            checks.add(f"{key}.sequence_length", sequence, rule, prompt * 2)


def check_concurrent(config: RLVRConfig, checks: Checks) -> None:
    """Roles that are to answer and score during training share their devices with nobody."""
    key, section = "validation.concurrent", config.validation
    if section is None or not section.concurrent:
        return
    sharing = {
        name: others
        for name, others in sharing_roles(started_roles(config)).items()
        if not checks.broken(f"{section_of(name)}.device_mapping")
    }
    for name, others in sharing.items():
        rule = f"needs devices of its own for {name}, which shares some with {', '.join(others)}"
        checks.add(key, True, rule, False)


def longest_in_validation(config: RLVRConfig) -> tuple[int, int]:
    """Longest prompt and longest sequence that a set asks for; 0 where none says so."""
    sets = config.validation.sets.values() if config.validation is not None else ()
    prompts = [config.val_prompt_length, *(one.prompt_length for one in sets)]
    sequences = [config.val_sequence_length, *(one.sequence_length for one in sets)]
    return max(length or 0 for length in prompts), max(length or 0 for length in sequences)


def check_weight_sync(config: RLVRConfig, checks: Checks) -> None:
    """Mistakes that do not depend on the hosts."""
    options = config.weight_sync
    if options.directory is not None and options.transport != "safetensors":
        checks.note("weight_sync.directory", f"has no effect: weight_sync.transport is {options.transport}")
    if options.transport == "cuda_ipc":
        _check_cuda_ipc(config, checks)
    engine = config.actor_infer.strategy_args.strategy_name
    modes = backend_of(engine).updates
    if options.lora == "adapter":
        _check_adapter(config, checks)
    elif options.mode not in ("auto", *modes):
        least = "tensors" if "trained" in modes else "layers"
        others = ", ".join(BACKENDS.where(lambda backend: options.mode in backend.updates))
        rule = f"{engine} takes whole {least} only; engines that take parts: {others}"
        checks.add("weight_sync.mode", options.mode, rule, "full")
    sleep_level = config.actor_infer.strategy_args.strategy_config.get("sleep_level")
    if sleep_level == 2 and update_mode(options, engine) == "trained":
        rule = "drops weights that updates do not bring back with "
        rule += "weight_sync.lora: adapter" if options.lora == "adapter" else "weight_sync.mode: trained"
        checks.add("actor_infer.strategy_args.strategy_config.sleep_level", sleep_level, rule, 1)


def _check_adapter(config: RLVRConfig, checks: Checks) -> None:
    options = config.weight_sync
    if not uses_lora(config.actor_train.model_args):
        rule = "actor_train has no adapters (model_args.lora_target)"
        checks.add("weight_sync.lora", options.lora, rule, "merged")
    elif options.mode in ("full", "delta"):
        rule = "with lora: adapter, A and B are sent whole and nothing else changes"
        checks.add("weight_sync.mode", options.mode, rule, "trained")
    elif backend_of(config.actor_infer.strategy_args.strategy_name).adapter_ranks:
        _check_adapter_of_engine(config, checks)


def _check_adapter_of_engine(config: RLVRConfig, checks: Checks) -> None:
    """An engine that computes with the adapter itself makes room for its rank when it starts."""
    args, backend = config.actor_train.model_args, backend_of(config.actor_infer.strategy_args.strategy_name)
    engine, most = backend.package.title if backend.package else backend.name, backend.adapter_ranks[-1]
    if args.additional_target:
        rule = f"goes with weight_sync.lora: merged: of a policy in {engine} only the adapter is exchanged"
        checks.add("actor_train.model_args.additional_target", args.additional_target, rule, "~")
    key, rank = "actor_train.model_args.lora_rank", adapter_rank(args)
    on_hub = args.adapter_name_or_path is not None and not Path(args.adapter_name_or_path).expanduser().is_dir()
    if on_hub and not checks.written(key):
        rule = f"is needed: the rank of adapter_name_or_path, for which {engine} makes room when it starts"
        checks.missing(key, rule, 32)
    elif rank > most:
        rule = f"must be at most {most} for {engine}; with weight_sync.lora: merged it may be more"
        checks.add(key, rank, rule, most)


def _check_cuda_ipc(config: RLVRConfig, checks: Checks) -> None:
    sender = (config.actor_train.device_mapping or [0])[0]
    elsewhere = sorted(set(config.actor_infer.device_mapping or []) - {sender})
    if elsewhere:
        rule = (
            f"needs every engine on the GPU of actor_train's first rank, device {sender}: "
            f"actor_infer.device_mapping has {elsewhere}, whose processes do not see that GPU"
        )
        checks.add("weight_sync.transport", "cuda_ipc", rule, "object_store")
