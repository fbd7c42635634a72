"""Checks of roles that all pipelines share: devices, strategies, sequence lengths, and each role's model, from what
lies on disk of it. Torch-free, and without network: a hub name that is not in the local cache is looked up when the run
starts. A check is silent about keys that were wrong by themselves already, so that one mistake gives one message."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config import model_files
from roll.config.checks.base import Checks
from roll.config.installation import install_command
from roll.config.lora import check_lora, uses_lora
from roll.config.model_files import (
    CONFIG,
    GGUF,
    HUB_NAME,
    OFFLINE,
    TRUE_WORDS,
    family_of,
    gguf_file,
    gguf_files,
    is_installed,
    lacks_flash_attention,
    looks_like_folder,
    model_folder,
    model_number,
    read_model_config,
)
from roll.config.pipelines import COMPUTES_LOG_PROBS, GENERATES, TEACHES, TRAINS
from roll.config.plan.plan import check_micro_batching
from roll.config.plan.planning import devices_per_worker, world_size
from roll.config.rewards import CLASSIFIER, JUDGE_ROLE, OWN_PREFIX
from roll.config.roles import KERNELS, WorkerConfig
from roll.config.run import UNPUBLISHED_TRACKERS, RunConfig
from roll.config.strategies.base import StrategyConfig
from roll.config.strategies.registry import (
    BACKENDS,
    backend_of,
    generation_strategies,
    is_sized_engine,
    read_strategy_config,
)
from roll.config.weight_files import SINGLE, weights_problem

MOST_DEVICES_OF_A_HOST = 8  # with more device ids several nodes are meant


def check_model(
    config: RunConfig, name: str, role: WorkerConfig, options: StrategyConfig | None, checks: Checks
) -> None:
    """The model is given and there, of a family that the role's strategy has, and of a shape that its ranks can share.
    ``options``: the strategy's; None where they have a mistake."""
    key, named = checks.pipeline.model(config, name, role)
    if named is None:
        checks.missing("pretrain", "is needed: the folder or hub name of the model to start from", "Qwen/Qwen2.5-0.5B")
        return
    path = named
    if not checks.check_files:
        return
    _check_place(key, path, checks)
    try:
        found = read_model_config(path)
    except ValueError as error:
        checks.add(key, path, str(error) if gguf_file(path) else f"is not a model folder: {error}")
        return
    if checks.broken(key):
        return
    # The family of a hub model that is not on this machine may show in its name.
    known = found or (None if looks_like_folder(path) else family_of(path))
    if known is None:
        checks.note(key, f"{path} cannot be checked without its config.json, which is not on this machine")
    lacking = None if known is None else family_problem(known, name, role)
    local = model_folder(path)
    if lacking is None and found is not None and local is not None:
        own_heads = {one.name for one in checks.pipeline.roles if one.has_own_head}
        without_head = name in own_heads or role.model_args.model_type == CLASSIFIER
        lacking = weights_problem(local, role.model_args.model_config_kwargs, without_head)
    if lacking is not None:
        checks.add(key, path, lacking)
    if lacking is not None or found is None:
        return
    if local is not None and gguf_file(path) and not os.path.isfile(local / SINGLE):
        checks.note(key, f"{path} will be dequantised to float32 in {local}, once")
    section = checks.pipeline.section_key(name)
    for wrong, value, rule, example in options.shape_problems(section, role, found) if options is not None else ():
        checks.add(wrong, value, f"{rule} ({path})", example)


def _check_place(key: str, path: str, checks: Checks) -> None:
    """The folder or hub name leads to a model."""
    if looks_like_folder(path):
        folder, files = Path(path).expanduser(), gguf_files(path)
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            checks.add(key, path, f"holds {len(files)} GGUF files, of which one must be named: {names}", str(files[0]))
        elif files:
            return
        elif os.path.isfile(folder):
            checks.add(key, path, f"is neither a model folder nor a {GGUF} file")
        elif not os.path.isdir(folder):
            checks.add(key, path, "no such file" if folder.suffix == GGUF else "no such folder")
        elif not os.path.isfile(folder / CONFIG):
            checks.add(key, path, f"is not a model folder: it has no {CONFIG}")
    elif HUB_NAME.fullmatch(path) is None:
        checks.add(key, path, "is neither a folder nor a hub name", "Qwen/Qwen2.5-0.5B")
    elif model_folder(path) is None and any(os.environ.get(one, "").upper() in TRUE_WORDS for one in OFFLINE):
        rule = f"is not in the local cache, and {' or '.join(OFFLINE)} is set: give a folder, or download it beforehand"
        checks.add(key, path, rule)


def family_problem(config: Mapping[str, Any], name: str, role: WorkerConfig) -> str | None:
    """Why a role cannot have this model; None: it can."""
    strategy = role.strategy_args.strategy_name
    is_judge = name == JUDGE_ROLE or name.startswith(OWN_PREFIX)
    if is_judge and role.model_args.model_type != CLASSIFIER and is_sized_engine(role):
        return None  # The engine computes it, and nothing here has to agree with it.
    lacking = model_files.missing(config, strategy)
    if lacking:
        rule = f"{model_files.describe(config, lacking)} is not available yet under {strategy}"
        if model_files.VISION in lacking and strategy.startswith("megatron"):
            trainer = strategy.replace("megatron", "fsdp2")
            rule += f": Megatron Core has no vision tower of these families; strategy_name: {trainer} has"
        reason = model_files.REASONS.get((str(config.get("model_type")), strategy))
        return f"{rule}: {reason}; strategy_name: hf_infer computes it" if reason else rule
    needs = model_files.needed(config)
    if role.model_args.compile and needs and backend_of(strategy).computes is not None:
        rule = "does not go with model_args.compile: true, which is for dense models of text; set it to false"
        return f"{model_files.describe(config, needs)} {rule}"
    return None


def note_positions(key: str, path: str | None, length: int, checks: Checks) -> None:
    """A sequence longer than what the model was made for."""
    positions = model_number(path, "max_position_embeddings")
    if positions is not None and length > positions:
        checks.note(key, f"sequences of {length} tokens are longer than the model's {positions} positions ({path})")


def check_roles(config: RunConfig, checks: Checks) -> dict[str, StrategyConfig]:
    """Devices, strategy and model of every role that holds one; the strategies' typed options."""
    strategies = {}
    pipeline = checks.pipeline
    for role_name, role in pipeline.models(config).items():
        name = pipeline.section_key(role_name)
        check_devices(name, role, checks)
        options = check_strategy(name, role, checks)
        check_model(config, role_name, role, options, checks)
        check_lora(name, role, pipeline.task_of(name, role) is TRAINS, pipeline.compares_log_probs, checks)
        if options is not None:
            strategies[name] = options
            trains, optimizer = pipeline.task_of(name, role) is TRAINS, role.training_args.optimizer.name
            options.check(name, role, world_size(role), trains, checks.problems)
            if trains and optimizer not in options.optimizers:
                strategy, known = role.strategy_args.strategy_name, tuple(options.optimizers)
                rule = f"is not available under {strategy}, which has {', '.join(known)}; fsdp2_train has {optimizer}"
                checks.add(f"{name}.training_args.optimizer", optimizer, rule, known[0])
            check_rows(config, name, role, checks)
        note_packages(name, role, checks)
        check_kernels(name, role, checks)
    check_nodes(config, checks)
    for tracker in [config.track_with] if isinstance(config.track_with, str) else config.track_with:
        if tracker in UNPUBLISHED_TRACKERS:
            checks.note("track_with", f"{tracker} is not public: metrics go to {UNPUBLISHED_TRACKERS[tracker]}")
    return strategies


def check_devices(name: str, role: WorkerConfig, checks: Checks) -> None:
    key, devices = f"{name}.device_mapping", role.device_mapping
    if devices is None and backend_of(role.strategy_args.strategy_name).is_remote:
        return
    if devices is None:
        checks.missing(key, "is needed: the devices (CPU slots on a host without accelerators) of this role", "[0]")
        return
    per_worker = role.num_gpus_per_worker
    if checks.pipeline.task_of(name, role) is not GENERATES and not is_sized_engine(role) and per_worker != 1:
        checks.add(f"{name}.num_gpus_per_worker", per_worker, "must be 1: every device is a rank of its own here", 1)
        return
    size = devices_per_worker(role)
    if len(devices) % size and size == per_worker:
        rule = f"must divide the {len(devices)} devices of device_mapping"
        checks.add(f"{name}.num_gpus_per_worker", per_worker, rule, 1)
    elif len(devices) % size:
        rule = f"must be a multiple of {size} devices: strategy_config makes engines of {size} ranks"
        checks.add(key, devices, rule, f"list(range(0, {size * max(1, len(devices) // size)}))")
    if role.world_size is not None and role.world_size != world_size(role):
        rule = f"device_mapping gives {world_size(role)} workers; leave world_size out, or make them agree"
        checks.add(f"{name}.world_size", role.world_size, rule, world_size(role))


def check_nodes(config: RunConfig, checks: Checks) -> None:
    """No worker spans two nodes, and a node with fewer devices than any host has is perhaps a slip."""
    per_node = config.num_gpus_per_node
    last = max((max(role.device_mapping or [0]) for role in checks.pipeline.models(config).values()), default=0)
    if checks.written("num_gpus_per_node") and per_node <= last < MOST_DEVICES_OF_A_HOST:
        checks.note(
            "num_gpus_per_node",
            f"{per_node}, and device ids up to {last}: a run over {last // per_node + 1} nodes; for one node write "
            f"num_gpus_per_node: {last + 1}",
        )
    for name, role in checks.pipeline.models(config).items():
        devices = role.device_mapping or []
        key = f"{checks.pipeline.section_key(name)}.device_mapping"
        size = devices_per_worker(role)
        # check_devices reports a group that is not complete.
        for start in range(0, len(devices) - size + 1, size):
            group = devices[start : start + size]
            if len({device // per_node for device in group}) > 1:
                rule = f"the worker on devices {group} would span two nodes of num_gpus_per_node {per_node}"
                checks.add(key, devices, rule)
                break


def check_strategy(name: str, role: WorkerConfig, checks: Checks) -> StrategyConfig | None:
    path, strategy = f"{name}.strategy_args", role.strategy_args.strategy_name
    if checks.broken(path):
        return None
    task, key = checks.pipeline.task_of(name, role), f"{path}.strategy_name"
    able = task.able()
    if strategy in BACKENDS and strategy not in able:
        if task in (COMPUTES_LOG_PROBS, TEACHES) and strategy in generation_strategies():
            checks.problems.not_available(key, strategy, "log-probs by an engine", able[0])
        else:
            checks.add(key, strategy, f"{name} {task.name}; that needs {' or '.join(able)}", able[0])
        return None
    return read_strategy_config(role.strategy_args, path, checks.problems)


def check_rows(config: RunConfig, name: str, role: WorkerConfig, checks: Checks) -> None:
    """Micro-batches and packs against the longest row."""
    task = checks.pipeline.task_of(name, role)
    if task is GENERATES or checks.broken("prompt_length", "response_length", "sequence_length"):
        return
    longest = checks.pipeline.longest_row(config)
    arguments = role.training_args
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    check_micro_batching(name, role, longest, rows if task is TRAINS else None, checks.problems)


def note_packages(name: str, role: WorkerConfig, checks: Checks) -> None:
    """Flash attention without its package, and a backend whose package is not on this host: a run here would be
    refused."""
    written, strategy = role.model_args.attn_implementation, role.strategy_args.strategy_name
    if lacks_flash_attention(written) and strategy.startswith(("fsdp", "deepspeed", "hf_")):
        rule = (
            f"{written}: flash_attn is not installed, so the model runs sdpa; on a GPU that is torch's own flash "
            "kernel, and packed rows use its kernel for sequences of different lengths"
        )
        checks.note(f"{name}.model_args.attn_implementation", rule)
    package = backend_of(strategy).package
    if checks.check_files and package is not None and not is_installed(package.module):
        key = f"{name}.strategy_args.strategy_name"
        checks.note(key, f"{package.title or package.module} is not installed on this host: {package.install}")


def check_kernels(name: str, role: WorkerConfig, checks: Checks) -> None:
    """Kernels of the model's layers go to a role that computes with transformers' layers, and do not pile up."""
    args, backend = role.model_args, backend_of(role.strategy_args.strategy_name)
    if checks.pipeline.task_of(name, role) is GENERATES or backend.computes is None:
        for key in (key for key in KERNELS if getattr(args, key)):
            checks.note(f"{name}.model_args.{key}", "has no effect: an engine has kernels of its own")
        return
    if args.use_liger_kernel and args.compile:
        rule = "must be false with use_liger_kernel: both make kernels of the same operations"
        checks.add(f"{name}.model_args.compile", True, rule, False)
    if args.use_liger_kernel and checks.check_files and not is_installed("liger_kernel"):
        rule = f"liger-kernel is not installed on this host: {install_command('liger')}"
        checks.note(f"{name}.model_args.use_liger_kernel", rule)


def note_needless_reference(config: Any, reference: WorkerConfig, checks: Checks) -> None:
    """A second copy of what a policy with adapters has already."""
    trainer = config.actor_train
    models = [checks.pipeline.model(config, *role)[1] for role in (("reference", reference), ("actor_train", trainer))]
    if uses_lora(trainer.model_args) and models[0] == models[1] and not uses_lora(reference.model_args):
        text = "actor_train without its adapters gives the same log-probs: leave the section out to save its memory"
        checks.note("reference", text)


def check_engine_length(
    options: dict[str, StrategyConfig], role: WorkerConfig, path: str | None, prompt: int, sequence: int, checks: Checks
) -> None:
    """An engine shorter than the longest sequence cuts responses; one without room for a prompt, or longer than the
    model, does not start."""
    engine = options.get("actor_infer")
    longest: int | None = getattr(engine, "max_model_len", None)
    if longest is None:
        return
    key = "actor_infer.strategy_args.strategy_config.max_model_len"
    positions = role.model_args.model_config_kwargs.get("max_position_embeddings")
    positions = positions or model_number(path, "max_position_embeddings")
    if positions is not None and longest > positions:
        checks.add(key, longest, f"the model has {positions} positions ({path})", min(positions, sequence))
        return
    if longest <= prompt:
        rule = f"leaves no room for a response after prompts of {prompt} tokens"
        checks.add(key, longest, rule, sequence)
    elif longest < sequence:
        checks.note(key, f"{longest} is less than prompt plus response ({sequence}): responses end there")
