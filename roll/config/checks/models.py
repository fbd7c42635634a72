"""Checks of a role's model, from what lies on disk of it: its family, and its sizes against the ranks that share it.

Torch-free, and without network: a hub name that is not in the local cache is looked up when the run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config import model_files
from roll.config.model_files import (
    CONFIG,
    HUB_NAME,
    OFFLINE,
    is_offline,
    layer_classes,
    looks_like_folder,
    model_folder,
    model_number,
    read_model_config,
)
from roll.config.plan.plan import divisors
from roll.config.rewards import CLASSIFIER, JUDGE_ROLE, OWN_PREFIX
from roll.config.strategies.registry import (
    MegatronStrategyConfig,
    ShardedStrategyConfig,
    StrategyConfig,
    is_sized_engine,
)

if TYPE_CHECKING:
    from roll.config.checks.base import Checks
    from roll.config.roles import WorkerConfig
    from roll.config.run import RunConfig


def check_model(
    config: RunConfig, name: str, role: WorkerConfig, options: StrategyConfig | None, checks: Checks
) -> None:
    """The model is given and there, of a family that the role's strategy has, and of a shape that its ranks can share.

    Args:
        name: of the role.
        options: the strategy's; None where they have a mistake.
    """
    key, named = checks.pipeline.model(config, name, role)
    if named is None:
        checks.missing("pretrain", "is needed: the folder or hub name of the model to start from", "Qwen/Qwen2.5-0.5B")
        return
    path = named
    if not checks.check_files:
        return
    if looks_like_folder(path):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            checks.add(key, path, "no such folder")
        elif not (folder / CONFIG).is_file():
            checks.add(key, path, f"is not a model folder: it has no {CONFIG}")
    elif HUB_NAME.fullmatch(path) is None:
        checks.add(key, path, "is neither a folder nor a hub name", "Qwen/Qwen2.5-0.5B")
    elif model_folder(path) is None and is_offline():
        rule = f"is not in the local cache, and {' or '.join(OFFLINE)} is set: give a folder, or download it beforehand"
        checks.add(key, path, rule)
    try:
        found = read_model_config(path)
    except ValueError as error:
        checks.add(key, path, f"is not a model folder: {error}")
        return
    if found is None or checks.broken(key):
        return
    lacking = family_problem(found, name, role)
    if lacking is not None:
        checks.add(key, path, lacking)
        return
    for wrong, value, rule, example in shape_problems(checks.pipeline.section_key(name), role, options, found):
        checks.add(wrong, value, f"{rule} ({path})", example)


def family_problem(config: Mapping[str, Any], name: str, role: WorkerConfig) -> str | None:
    """Why a role cannot have this model; None: it can."""
    strategy = role.strategy_args.strategy_name
    is_judge = name == JUDGE_ROLE or name.startswith(OWN_PREFIX)
    if is_judge and role.model_args.model_type != CLASSIFIER and is_sized_engine(role):
        return None  # The engine computes it, and nothing here has to agree with it.
    lacking = model_files.missing(config, strategy)
    if lacking:
        return f"{model_files.describe(config, lacking)} is not available yet under {strategy}"
    return None


def shape_problems(
    name: str, role: WorkerConfig, options: StrategyConfig | None, model: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str, Any]]:
    """Key, value, rule and a value that works of every size that does not fit the model.

    Args:
        name: of the role's section.
    """
    path, size = f"{name}.strategy_args.strategy_config", role.model_args.ulysses_size
    heads = _number(model, "num_attention_heads")
    if isinstance(options, ShardedStrategyConfig):
        if size > 1 and heads and heads % size:
            rule = f"must divide the model's {heads} attention heads"
            yield f"{name}.model_args.ulysses_size", size, rule, _divisor(size, heads)
        yield from _unknown_layers(path, options, model)
    if isinstance(options, MegatronStrategyConfig):
        yield from _megatron_problems(path, options, model)
    if is_sized_engine(role) and options is not None:
        yield from _engine_problems(path, options, model)


def _unknown_layers(
    path: str, options: ShardedStrategyConfig, model: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str, Any]]:
    classes = frozenset[str]() if model.get("auto_map") else layer_classes(str(model.get("model_type", "")))
    policy = options.wrap_policy
    for key in ("transformer_layer_cls_to_wrap", "moe_experts"):
        for written in getattr(policy, key) or () if classes else ():
            if written not in classes:
                layers = sorted(one for one in classes if one.endswith(("Layer", "Block")))
                rule = f"is no class of model_type {model['model_type']}; its layers are {', '.join(layers)}"
                yield f"{path}.wrap_policy.{key}", written, rule, f"[{layers[0]}]" if layers else None


def _megatron_problems(
    path: str, options: MegatronStrategyConfig, model: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str, Any]]:
    tensor, context = options.tensor_model_parallel_size, options.context_parallel_size
    heads, layers = _number(model, "num_attention_heads"), _number(model, "num_hidden_layers")
    groups = _number(model, "num_key_value_heads") or heads
    for count, what in ((groups, "key-value heads"), (_number(model, "intermediate_size"), "intermediate_size")):
        if count and count % tensor:
            yield (
                f"{path}.tensor_model_parallel_size",
                tensor,
                f"must divide the model's {count} {what}",
                _divisor(tensor, count),
            )
            return
    if heads and heads % (tensor * context):
        rule = f"x tensor_model_parallel_size {tensor} must divide the model's {heads} attention heads"
        yield f"{path}.context_parallel_size", context, rule, _divisor(context, heads // tensor or 1)
    if not layers or options.pipeline_model_parallel_layout is not None:
        return
    virtual = options.virtual_pipeline_model_parallel_size or 1
    stages = options.pipeline_model_parallel_size * virtual
    shares = layers + options.account_for_embedding_in_pipeline_split + options.account_for_loss_in_pipeline_split
    if shares % stages:
        times = f" x virtual_pipeline_model_parallel_size {virtual}" if virtual > 1 else ""
        counted = f"{layers} layers" if shares == layers else f"{layers} layers and {shares - layers} for its ends"
        rule = f"{times.lstrip()}{' ' if times else ''}must divide the model's {counted}"
        pipeline = options.pipeline_model_parallel_size
        example = _divisor(pipeline, 1 if shares % virtual else shares // virtual)
        yield f"{path}.pipeline_model_parallel_size", pipeline, rule, example


def _engine_problems(
    path: str, options: StrategyConfig, model: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str, Any]]:
    """Tensor-parallel ranks take whole heads; a key-value head may be held by several ranks."""
    key = "tensor_parallel_size" if hasattr(options, "tensor_parallel_size") else "tp_size"
    size: int = getattr(options, key)
    heads = _number(model, "num_attention_heads")
    groups = _number(model, "num_key_value_heads") or heads
    if heads and heads % size:
        rule = f"must divide the model's {heads} attention heads"
    elif groups and groups % size and size % groups:
        rule = f"must divide the model's {groups} key-value heads, or be a multiple of them"
    else:
        return
    yield f"{path}.{key}", size, rule, _divisor(size, gcd(heads, groups))


def _number(model: Mapping[str, Any], key: str) -> int:
    value = model.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _divisor(size: int, count: int) -> int:
    """The largest number up to ``size`` that divides ``count``."""
    return max(number for number in divisors(count) if number <= size)


def note_positions(key: str, path: str | None, length: int, checks: Checks) -> None:
    """A sequence longer than what the model was made for."""
    positions = model_number(path, "max_position_embeddings")
    if positions is not None and length > positions:
        checks.note(key, f"sequences of {length} tokens are longer than the model's {positions} positions ({path})")
