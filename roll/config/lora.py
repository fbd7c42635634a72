"""The LoRA keys of a role: their meaning and their checks. Imports neither torch nor peft."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll.config.checks.base import Checks
from roll.config.data import json_object
from roll.config.installation import install_command
from roll.config.roles import ModelArguments, WorkerConfig
from roll.config.strategies.registry import backend_of

ALL_LINEAR = "all-linear"  # every linear layer but the output matrix
EXPERTS = "experts"  # in `lora_target`, alone or after a path: the fused experts of sparse layers

_PATTERN_MARKS = frozenset("*+?|()[]{}^$\\")
_ADAPTER_CONFIG = "adapter_config.json"


def uses_lora(args: ModelArguments) -> bool:
    """True if the role's model is a frozen base with adapters."""
    return bool(args.lora_target or args.adapter_name_or_path)


def adapter_rank(args: ModelArguments) -> int:
    """The rank of a role's adapter: that of the adapter to start from where it is a folder, else ``lora_rank``."""
    return int(_adapter_config(args).get("r") or args.lora_rank)


def adapts_experts(args: ModelArguments) -> bool:
    """True if adapters are wanted on tensors of experts, as far as can be read without the model."""
    if args.adapter_name_or_path is not None:
        return bool(_adapter_config(args).get("target_parameters"))
    return not is_pattern(args.lora_target) and any(
        name.rpartition(".")[2] == EXPERTS for name in names_of(args.lora_target)
    )


def is_pattern(target: str | Sequence[str] | None) -> bool:
    """True for a regular expression: one string with characters that no module name has."""
    return isinstance(target, str) and bool(_PATTERN_MARKS & set(target))


def names_of(target: str | Sequence[str] | None) -> tuple[str, ...]:
    """Module names from a list, or from a string with commas."""
    parts = target.split(",") if isinstance(target, str) else target or ()
    return tuple(part.strip() for part in parts if part.strip())


VISION_TOWER = "model.visual"
# Names of the vision tower of a vision-language model in Megatron and other projects.
_VISION_NAMES = ("vision_model", "vision_tower", "visual", "model.vision_model", "model.vision_tower")


def frozen_by(prefix: str, names: Iterable[str]) -> list[str]:
    """Those of a model's parameters that a prefix of ``freeze_module_prefix`` means. In a vision-language model the
    tower goes by any of its usual names, and ``model.`` may be left out."""
    every = list(names)
    spellings = [prefix]
    if any(name.startswith(f"{VISION_TOWER}.") for name in every):
        spellings += [
            VISION_TOWER + prefix[len(other) :] for other in _VISION_NAMES if f"{prefix}.".startswith(f"{other}.")
        ]
        spellings.append(f"model.{prefix}")
    found = ([name for name in every if name.startswith(spelling)] for spelling in spellings)
    return next(filter(None, found), [])


def check_lora(name: str, role: WorkerConfig, trains: bool, in_rl: bool, checks: Checks) -> None:
    """Mistakes and notices of a role's LoRA keys; ``in_rl``: its log-probs or values are compared with those of an
    earlier pass."""
    args, path = role.model_args, f"{name}.model_args"
    strategy = role.strategy_args.strategy_name
    if name == "actor_infer":
        for key in ("lora_target", "adapter_name_or_path", "lora_rank", "lora_alpha", "lora_dropout"):
            if checks.written(f"{path}.{key}") and getattr(args, key) is not None:
                reason = "the engine gets the trainer's weights, with the adapters merged in"
                checks.note(f"{path}.{key}", f"has no effect: {reason}")
        return
    if not uses_lora(args):
        if args.additional_target:
            rule = "goes with lora_target: it names modules trained in full in addition to adapters"
            checks.add(f"{path}.additional_target", args.additional_target, rule, "~")
        return
    key = f"{path}.lora_target" if args.lora_target else f"{path}.adapter_name_or_path"
    value = args.lora_target or args.adapter_name_or_path
    others = [one for one in names_of(args.additional_target) if not is_trained_whole_everywhere(one)]
    if others and backend_of(strategy).only_plain_adapters:
        rule = (
            f"{strategy} trains embed_tokens, lm_head and norms in full, not {', '.join(others)}, which it keeps "
            f"together with others or divides; leave it out, or use strategy_name: "
            f"{strategy.replace(backend_of(strategy).name, 'fsdp2')}"
        )
        checks.add(f"{path}.additional_target", args.additional_target, rule, "lm_head")
    if adapts_experts(args) and args.lora_dropout:
        rule = "must be 0 with adapters of the experts: they are added to the weights, which see no input to drop"
        checks.add(f"{path}.lora_dropout", args.lora_dropout, rule, 0.0)
    if checks.check_files and find_spec("peft") is None:
        checks.add(key, value, f"needs peft, an optional package: {install_command('peft')}")
    if args.freeze_module_prefix:
        rule = "goes with full training: under LoRA the whole base is frozen; leave one of them out"
        checks.add(f"{path}.freeze_module_prefix", args.freeze_module_prefix, rule, "~")
    if args.lora_dropout and in_rl:
        rule = (
            "must be 0 in reinforcement learning: with dropout the policy would not reproduce its own log-probs, and "
            "the ratio of an on-policy update would not be 1"
        )
        checks.add(f"{path}.lora_dropout", args.lora_dropout, rule, 0.0)
    if not trains and not args.adapter_name_or_path:
        checks.note(f"{path}.lora_target", "has no effect: a new adapter changes nothing until it is trained")
    _check_adapter(path, args, checks)


def is_trained_whole_everywhere(name: str) -> bool:
    """True for the name of a module, or the end of it, that every backend can train in full alongside adapters:
    embeddings, output matrix, norms."""
    last = name.rpartition(".")[2]
    return last in ("embed_tokens", "lm_head") or last.endswith("norm")


def _check_adapter(path: str, args: ModelArguments, checks: Checks) -> None:
    """An adapter to start from is there, and what is written next to it agrees with its own configuration."""
    key, adapter = f"{path}.adapter_name_or_path", args.adapter_name_or_path
    if adapter is None:
        return
    if args.additional_target:
        rule = "is decided by the adapter of adapter_name_or_path (its modules_to_save); leave it out"
        checks.add(f"{path}.additional_target", args.additional_target, rule, "~")
    folder = Path(adapter).expanduser()
    if not os.path.isdir(folder):
        if checks.check_files and adapter.startswith(("/", "./", "../", "~")):
            checks.add(key, adapter, "no such folder")
        return
    if not os.path.isfile(folder / _ADAPTER_CONFIG):
        checks.add(key, adapter, f"is not a peft adapter: it has no {_ADAPTER_CONFIG}")
        return
    config = _adapter_config(args)
    for name, theirs in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        written, held = getattr(args, name), config.get(theirs, getattr(args, name))
        if checks.written(f"{path}.{name}") and written is not None and written != held:
            rule = f"disagrees with the adapter of adapter_name_or_path, which has {held}; leave it out"
            checks.add(f"{path}.{name}", written, rule, held)


def _adapter_config(args: ModelArguments) -> dict[str, Any]:
    """peft's configuration of the adapter to start from; empty where it cannot be read."""
    folder = args.adapter_name_or_path
    return {} if folder is None else json_object(Path(folder).expanduser() / _ADAPTER_CONFIG)
