"""Families of models by their names: which backends and engines compute them, and what takes a backend's place.

A command is translated without the model's files, so the name replaces its ``config.json``. Which families are tested
is read from :mod:`roll.config.model_files`, as ``roll check`` does with the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.config.model_files import EXPERTS, NEEDS, OTHER_VISION, VISION, family_of, missing, needed
from roll.config.words import OPTIONS
from roll.translation.rules import Draft

# Families with experts of which no backend is tested: their attention is another one.
OTHER_FAMILY = ("deepseek_v2", "glm4_moe_lite", "glm_moe_dsa")
MOVING_BIAS = ("deepseek_v3",)  # families whose routers' bias Megatron moves unless it is told not to
MOVES = "moves the bias of the routers by their load there; here it stays as the model has it"
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MATRICES = frozenset({"gate_proj", "up_proj", "down_proj"})  # of an expert, and of a dense layer
# Backend instead of one that is not tested with a family (Megatron Core has no model of most of them here).
STANDS_IN = "fsdp2"
# Engines instead of one that is not tested with a family; the second runs transformers' own model on one device.
OTHER_ENGINE, EMBEDDED_ENGINE = "vllm", "hf_infer"
# Gigabytes of weights that an engine can hold on each device: 0.8 of 80 GB, with the rest for its cache.
WEIGHTS_PER_DEVICE = 64
# Modules that adapters leave out there: the vision tower.
LANGUAGE_PART = re.compile(r"[.*]*visual[.*]*|[.*]*vision(?:_model|_tower)?[.*]*")


def lacks(config: Mapping[str, Any] | None, strategy: str) -> list[str]:
    """The capabilities that a model of this family needs and ``strategy`` is not tested for."""
    if config is None:
        return []
    if config["model_type"] in OTHER_FAMILY or not config["model_type"]:
        return needed(config)
    return missing(config, strategy)


def find_family(draft: Draft) -> None:
    """Learn the family of the policy, before strategies and batches are decided; choose the engine for it."""
    if draft.get("engine") == "sglang" and draft.get("replay") == "R3":
        draft.facts["engine"] = OTHER_ENGINE
        text = f"sglang returns no routes here: {OTHER_ENGINE} samples from the same model and does"
        draft.remark(["engine", "engine_replay"], text)
    family = (family_of(str(draft.facts.get("model", ""))) or None) if draft.states("model") else None
    draft.facts["family"], engine = family, str(draft.get("engine"))
    fits = 0 < weights_of(draft) <= WEIGHTS_PER_DEVICE
    others = (OTHER_ENGINE, *((EMBEDDED_ENGINE,) if fits else ()))
    other = next((name for name in (engine, *others) if not lacks(family, name)), engine)
    if other != engine and draft.states("engine"):
        draft.facts["engine"] = other
        slower = ", more slowly" if other == EMBEDDED_ENGINE else ""
        draft.remark(
            ["engine"], f"{engine} is not tested with this family here: {other} samples from the same model{slower}"
        )


def weights_of(draft: Draft) -> float:
    """Gigabytes of the policy's weights in bf16, by the size in its name; 0 where the name has none."""
    # The first size of a name such as 235B-A22B is that of all experts.
    last = str(draft.get("model", default="")).lower().rpartition("/")[2]
    named = re.search(r"(\d+(?:\.\d+)?)b(?![a-z])", last)
    return 2 * float(named[1]) if named else 0.0


def written_strategy(draft: Draft, role: str) -> str:
    """The backend that their keys name. A reference without its own key follows the actor."""
    if draft.get("config_name") == "fsdp2":
        return "fsdp2"
    if draft.get("config_name") == "megatron":
        return str(draft.get(f"strategy.{role}.written", default="megatron"))
    names = (f"strategy.{role}", "strategy", *(("strategy.actor",) if role == "reference" else ()))
    return str(draft.get(*names, default="fsdp2"))


def strategy_of(draft: Draft, role: str) -> str:
    """The backend that their keys name, or FSDP2 where it alone is tested with the family."""
    strategy, family = written_strategy(draft, role), draft.facts.get("family")
    stands_in = lacks(family, f"{strategy}_train") and not lacks(family, f"{STANDS_IN}_train")
    return STANDS_IN if stands_in else strategy


def put_family(draft: Draft) -> None:
    """Refuse families that nothing here computes; set what a family needs."""
    if draft.states("rm_path") and (scorer := family_of(str(draft.facts["rm_path"]))):
        kinds = " and ".join(NEEDS[name] for name in needed(scorer))
        draft.refuse("rm_path", f"is {kinds} by its name, and no reward model of that kind is tested")
    name = "actor_infer.strategy_args.strategy_name"
    if draft.keys.get(name) not in (None, draft.get("engine")):
        draft.put(name, draft.facts["engine"], "engine")
        for key in [key for key in draft.keys if key.startswith(f"actor_infer.{OPTIONS}.engine_args.")]:
            del draft.keys[key]  # of the other engine
    # Parallel experts are stated by their size where the name says nothing.
    has_experts = any(int(draft.get(f"expert.{role}", default=1)) > 1 for role, _ in draft.sections())
    family = draft.facts.get("family")
    users_lack = family is not None and lacks(family, f"{strategy_of(draft, 'actor')}_train")
    if draft.get("expert_bias.actor") and not users_lack:
        draft.refuse("expert_bias.actor", MOVES, False)
    if family is None:
        put_adapters_of_family(draft, sees=False, has_experts=has_experts)
        return
    strategies = {role: strategy_of(draft, role) for role, _ in draft.sections()}
    # Strategies that compute the policy's model.
    users = sorted({f"{name}_{'infer' if role == 'reference' else 'train'}" for role, name in strategies.items()})
    users += [] if draft.get("engine") is None else [str(draft.get("engine"))]
    lacking = {name: found for name in users if (found := lacks(family, name))}
    if lacking:
        kinds = " and ".join(
            NEEDS[kind] for kind in dict.fromkeys(kind for found in lacking.values() for kind in found)
        )
        rule = f"is {kinds} by its name, and {', '.join(lacking)} is tested with none of this family"
        draft.refuse("model", f"{rule} (docs/moe.md, docs/vision-language.md)")
    elif written_strategy(draft, "actor") == "megatron" and family.get("model_type") in MOVING_BIAS:
        draft.remark(["model"], f"{MOVES}: 0.001 an optimizer step")
    if any(draft.facts.get(f"stands_in.{role}") for role in strategies):
        text = "the backend is not tested with this family here: fsdp2 computes the same, over all ranks of the role"
        draft.remark(["model"], text)
    has_experts |= EXPERTS in needed(family)
    for role, section in draft.sections():
        tensor = int(draft.get(f"tensor.{role}", default=1))
        if strategies[role] == "megatron" and has_experts and tensor > 1:
            draft.put(f"{section}.{OPTIONS}.sequence_parallel", True, f"tensor.{role}")
    if not lacking:
        put_adapters_of_family(draft, VISION in needed(family), has_experts)
    if OTHER_VISION in needed(family) and not lacking:
        for fact in [fact for fact in ("image_key", "video_key") if draft.states(fact)]:
            draft.refuse(fact, "names images, and this family is computed without its vision tower here, on text alone")


def put_adapters_of_family(draft: Draft, sees: bool, has_experts: bool) -> None:
    """Put adapters on experts as well; refuse those on the vision tower, and on a part of an expert."""
    rank = draft.get("lora_rank", default=0)
    if not draft.states("lora_rank") or not rank:
        return
    left_out = str(draft.get("lora_exclude", default=""))
    if sees and not LANGUAGE_PART.fullmatch(left_out):
        rule = "puts adapters on the vision tower too, there; here they go on the language model alone: "
        draft.refuse("lora_rank", f"{rule}exclude_modules='.*visual.*' is the same")
    targets = draft.get("lora_target", default="all-linear")
    if not has_experts or (isinstance(targets, list) and ATTENTION.issuperset(targets)):
        return
    if (draft.facts.get("family") or {}).get("model_type") == "gpt_oss":
        rule = "puts adapters on the experts too, there; here those of gpt-oss take none (docs/moe.md): "
        draft.refuse("lora_rank", f"{rule}target_modules=[q_proj,k_proj,v_proj,o_proj] is the same")
    elif "all-linear" in targets or (ATTENTION | MATRICES).issubset(targets):
        draft.facts["lora_target"] = "all-linear,experts"
        text = "every expert has adapters, as there, of another form: one pair for gate_up_proj and one for down_proj; "
        draft.remark(["lora_rank"], f"{text}Megatron shares a pair among experts, others divide gate and up")
    else:
        rule = "puts adapters on a part of the experts' matrices, or on them and a part of attention; lora_target "
        rule += "experts adapts them all (docs/moe.md): [q_proj,k_proj,v_proj,o_proj], or all-linear, is the same"
        draft.refuse("lora_target", rule)


def put_routes(draft: Draft) -> None:
    """Replay of the experts that were chosen, and what is frozen."""
    mode = draft.get("replay", default="disabled")
    if mode != "disabled":
        draft.put("actor_train.router_replay.mode", mode, "replay")
    if mode == "R2":
        draft.put("enable_old_logprobs_recompute", True, "replay")
    if mode == "R3":
        draft.put("actor_infer.router_replay.mode", mode, "replay", "engine_replay")
    frozen = next((fact for fact in ("freeze_vision", "text_alone.actor") if draft.get(fact)), None)
    if frozen is not None and VISION in needed(draft.facts.get("family") or {}):
        draft.put("actor_train.model_args.freeze_module_prefix", "vision_model", frozen)
