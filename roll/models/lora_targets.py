"""Targets of LoRA in a model: ``lora_target`` and the configuration of a loaded adapter, in peft's terms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from roll.config.lora import ALL_LINEAR, VISION_TOWER, is_pattern, names_of
from roll.models.build import VALUE_HEAD, has_tied_embeddings
from roll.models.experts import EXPERTS, SparseLayer, sparse_layers

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedModel

    from roll.config.roles import ModelArguments

# The fused tensors of a sparse layer's experts, both adapted or neither; of peft's two wrappers the first's is the
# inner one.
EXPERT_TENSORS = ("gate_up_proj", "down_proj")
_VALUE_HEAD = VALUE_HEAD.removesuffix(".")

# Options of an adapter beyond the formula above; merging such an adapter takes other arithmetic.
_PLAIN_CONFIG: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "init_lora_weights": (True, False, "gaussian"),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}


def new_config(peft: ModuleType, model: PreTrainedModel, args: ModelArguments) -> Any:
    whole = list(names_of(args.additional_target))
    if _is_value_model(model) and _VALUE_HEAD not in whole:
        whole.append(_VALUE_HEAD)
    _check_whole_modules(model, whole, "model_args.additional_target")
    modules, experts = _targets(model, args.lora_target, whole, "model_args.lora_target")
    classifies = "SEQ_CLS" if type(model).__name__.endswith("ForSequenceClassification") else "TOKEN_CLS"
    return peft.LoraConfig(
        task_type=classifies if _is_value_model(model) else "CAUSAL_LM",  # the class of peft that loads it again
        target_modules=modules,
        target_parameters=experts,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha or 2 * args.lora_rank,
        lora_dropout=args.lora_dropout,
        modules_to_save=whole or None,
    )


def loaded_config(peft: ModuleType, model: PreTrainedModel, args: ModelArguments) -> Any:
    """The configuration of the adapter that training starts from; it decides target, rank and scale."""
    where = f"model_args.adapter_name_or_path: {args.adapter_name_or_path}"
    config = peft.PeftConfig.from_pretrained(args.adapter_name_or_path)
    if not isinstance(config, peft.LoraConfig):
        raise ValueError(f"{where} is a {config.peft_type} adapter; only LoRA is supported")
    for key, allowed in _PLAIN_CONFIG.items():
        value = getattr(config, key, None)
        if value not in allowed:
            raise ValueError(
                f"{where} has {key}={value!r}, which is not supported; start from one with {key}={allowed[0]!r}"
            )
    whole = config.modules_to_save or []
    if _is_value_model(model) and _VALUE_HEAD not in whole:
        raise ValueError(f"{where} has no value head ({_VALUE_HEAD}); start from the adapter of a critic")
    _check_whole_modules(model, whole, f"{where} (modules_to_save)")
    target = config.target_modules
    if target:
        target = target if isinstance(target, str) else sorted(target)
        _target_modules(model, target, whole, f"{where} (target_modules)")
    _check_target_parameters(model, config.target_parameters or (), where)
    config.inference_mode = False
    config.lora_dropout = args.lora_dropout
    return config


def _is_value_model(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is None


def _check_whole_modules(model: PreTrainedModel, names: Sequence[str], where: str) -> None:
    """ValueError: a name that no module has, or the matrix that a model uses both as embeddings and as output."""
    modules = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for target in names:
        found = [modules[name] for name in modules if _is_named(name, target)]
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in modules} - {""}))
            raise ValueError(f"{where}: no module of the model is named {target!r}; its modules are {known}")
        if has_tied_embeddings(model) and any(module in ends for module in found):
            raise ValueError(
                f"{where}: {target!r} cannot be trained alongside adapters in this model, which ties its output matrix "
                "to its embeddings; leave it out"
            )


def _targets(
    model: PreTrainedModel, target: str | Sequence[str] | None, whole: Sequence[str], where: str
) -> tuple[str | list[str] | None, list[str] | None]:
    """``lora_target`` in peft's terms: modules, and tensors of fused experts."""
    if is_pattern(target):
        return _target_modules(model, target, whole, where), None
    names = names_of(target)
    fused = [layer for layer in sparse_layers(model) if layer.is_fused]
    meant = {name: [one for one in fused if _is_named(f"{one.name}.{EXPERTS}", name)] for name in names}
    others = [name for name in names if not meant[name]]
    layers = [layer for found in meant.values() for layer in found]
    for layer in layers:
        _check_adaptable(layer, where)
    tensors = [f"{layer.name}.{EXPERTS}.{tensor}" for layer in layers for tensor in EXPERT_TENSORS] or None
    named = [name for name in others if name != ALL_LINEAR]
    modules = _target_modules(model, named, whole, where) if named else None
    if ALL_LINEAR in others:
        linear = _target_modules(model, ALL_LINEAR, whole, where)
        modules = linear if modules is None else sorted({*linear, *modules})
    return modules, tensors


def _check_adaptable(layer: SparseLayer, where: str) -> None:
    """ValueError: experts whose tensors are not (E, out, in)."""
    tensors = tuple(name for name, tensor in layer.experts.named_parameters(recurse=False) if tensor.ndim == 3)
    if tensors != EXPERT_TENSORS or getattr(layer.experts, "is_transposed", False):
        raise ValueError(
            f"{where}: {EXPERTS!r} means {layer.name}.{EXPERTS}, whose tensors {' and '.join(tensors)} are not laid "
            f"out as (experts, out, in) matrices {' and '.join(EXPERT_TENSORS)}: adapters of such experts (gpt-oss) "
            f"could not be merged for the engines; {ALL_LINEAR} adapts attention"
        )


def _check_target_parameters(model: PreTrainedModel, targets: Sequence[str], where: str) -> None:
    """ValueError: a loaded adapter without both tensors of the experts of every layer that it adapts."""
    adapted: set[str] = set()
    for layer in sparse_layers(model):
        own = [f"{layer.name}.{EXPERTS}.{tensor}" for tensor in EXPERT_TENSORS] if layer.is_fused else []
        found = [target for target in targets for name in own if _is_named(name, target)]
        if found:
            _check_adaptable(layer, where)
            if len(set(found)) != len(EXPERT_TENSORS):
                break
            adapted |= set(found)
    if adapted != set(targets):
        raise ValueError(
            f"{where} has target_parameters={sorted(targets)}; supported are both tensors of fused experts, "
            f"{' and '.join(EXPERT_TENSORS)}, and nothing else"
        )


def _target_modules(
    model: PreTrainedModel, target: str | Sequence[str] | None, whole: Sequence[str], where: str
) -> str | list[str]:
    """``lora_target`` resolved for this model, in peft's terms, beside modules that are trained ``whole``. ValueError:
    something that is not there, or is no linear layer, or is the output matrix."""
    names = [name for name, _ in model.named_modules()]
    # Without the output matrix, whose weight is used without calling it, and without the gates of sparse layers (the
    # router, in Qwen2-MoE also the shared expert's): a router stays what it was, unless `additional_target` names it.
    gates = (child for layer in sparse_layers(model) for child in layer.block.children())
    left_out = {model.get_output_embeddings(), *gates}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module not in left_out and not any(_is_named(name, one) for one in whole)
    ]
    known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    if target == ALL_LINEAR:
        return [name for name in linear if not _in_tower(name)]
    if is_pattern(target):
        matches = {str(target): [name for name in names if re.fullmatch(str(target), name)]}
    else:
        matches = {}
        for wanted in names_of(target):
            # Modules of the vision tower are meant only where the target says so.
            in_tower = "visual" in wanted.split(".")
            matches[wanted] = [n for n in names if _is_named(n, wanted) and (in_tower or not _in_tower(n))]
    for wanted, found in matches.items():
        _refuse_experts(model, wanted, found, where)
        if not found:
            raise ValueError(
                f"{where}: no module of the model matches {wanted!r}; its linear layers are {known}, or all of them: "
                f"{ALL_LINEAR}"
            )
        other = next((name for name in found if name not in linear), None)
        if other is not None:
            raise ValueError(
                f"{where}: {wanted!r} matches {other}, which cannot have an adapter (linear layers can: {known}); "
                "additional_target trains a module in full"
            )
    if is_pattern(target):
        return str(target)
    # peft matches by suffix, which modules of a vision tower may share: so with a tower every module is named in full.
    return [name for found in matches.values() for name in found] if any(map(_in_tower, names)) else list(matches)


def _refuse_experts(model: PreTrainedModel, wanted: str, found: Sequence[str], where: str) -> None:
    """ValueError: one tensor of all experts of a layer, or their module by a pattern."""
    for layer in sparse_layers(model):
        tensors = [name for name, _ in layer.experts.named_parameters(recurse=False)] if layer.is_fused else []
        module = f"{layer.name}.{EXPERTS}"
        is_tensor = not found and any(_is_named(f"{module}.{name}", wanted) for name in tensors)
        if tensors and (module in found or is_tensor):
            raise ValueError(
                f"{where}: {wanted!r} means the experts of {layer.name}, which are {' and '.join(tensors)}, one tensor "
                f"each for all experts; adapters go with both of them, by the name {EXPERTS}, as in "
                f"lora_target: {ALL_LINEAR},{EXPERTS}"
            )


def _in_tower(name: str) -> bool:
    return name.startswith(f"{VISION_TOWER}.")


def _is_named(name: str, target: str) -> bool:
    """A module is meant by its full name or by the end of it, as in peft."""
    return name == target or name.endswith(f".{target}")
