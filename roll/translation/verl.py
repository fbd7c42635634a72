"""verl's vocabulary, next to its table, ``verl.table``: names of algorithms, and conversions that need a program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.translation.distillation import find_distillation
from roll.translation.episodes import find_tool_episodes
from roll.translation.reading import CONFIG_NAME, Source, read_yaml
from roll.translation.rules import Dialect, Draft, one_of, read_table, whole
from roll.translation.sampling import bounds

# The last three differ from the papers' of the same name.
ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "optimal_token_baseline")},
    "tir_optimal_token_baseline": "optimal_token_baseline",
    **{name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")},
    **{name: f"roll.algorithms.verl_estimators.{name}" for name in ("gpg", "grpo_passk", "gdpo")},
}
KL_TYPES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_TYPES |= {f"{theirs}+": ours if ours == "k2" else f"{ours}+" for theirs, ours in KL_TYPES.items()}
DISTILLATION = {name: kind for name, kind in KL_TYPES.items() if "+" not in name} | {"forward_kl_topk": "topk"}
OTHER_KL_TYPES = {"full": "it is not implemented in verl either"}
LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo_token",
    "geo_mean": "gmpo",
    **{name: name.replace("-", "_") for name in ("clip_cov", "clip-cov", "kl_cov", "kl-cov", "cispo", "sapo")},
    "gpg": "vanilla",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
# Behaviour of its losses whatever the keys say: negative advantages are bounded, the mean is over responses.
FACTS: dict[str, Any] = {"dual_names": ("vanilla",), "sequence_mean_losses": ("gspo_token", "gmpo", "sapo")}
NULLS = (None, "null", "none", "None", "")
BASES = ("ppo_trainer", "ppo_megatron_trainer")  # verl's files of defaults, under FSDP and under Megatron
TURNS = "actor_rollout_ref.rollout.multi_turn"


def _turns(length: int, **turns: object) -> dict[str, Any]:
    """Settings of one of the files next to verl's scripts of several turns."""
    return {
        "data.max_prompt_length": length,
        "data.max_response_length": length,
        "data.train_batch_size": 256,
        "actor_rollout_ref.rollout.name": "sglang",
        f"{TURNS}.enable": True,
        **{f"{TURNS}.{name}": value for name, value in turns.items()},
    }


GSM8K = _turns(1024, max_assistant_turns=5)
# Qwen2.5's format of tools, with images: verl's Geometry3K files set it, as Qwen2.5-VL's own template has no tools.
TOOL_TEMPLATE = (Path(__file__).parent / "tools.jinja").read_text(encoding="utf-8")
GEO3K = _turns(2048, max_assistant_turns=5) | {"actor_rollout_ref.model.custom_chat_template": TOOL_TEMPLATE}
DAPO = {"reward_model.reward_manager": "dapo"}
# Files that come with verl and its recipes: their backend, and what they set beyond the defaults.
CONFIG_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_trainer": ("fsdp", {}),
    "ppo_megatron_trainer": ("megatron", {}),
    "transfer_queue_ppo_trainer": ("fsdp", {}),
    "one_step_off_ppo_trainer": ("fsdp", {}),
    "one_step_off_ppo_megatron_trainer": ("megatron", {}),
    "dapo_trainer": ("fsdp", DAPO),
    "dapo_megatron_trainer": ("megatron", DAPO),
    "dapo_transfer_queue_trainer": ("fsdp", DAPO),
    "gsm8k_multiturn_grpo": ("fsdp", GSM8K),
    "gsm8k_multiturn_grpo_server": ("fsdp", GSM8K),
    "gsm8k_multiturn_megatron_grpo": ("megatron", GSM8K),
    "gsm8k_multiturn_grpo_w_interaction": ("fsdp", _turns(1024, max_user_turns=5)),
    "geo3k_multiturn_grpo": ("fsdp", GEO3K),
    "geo3k_multiturn_megatron_grpo": ("megatron", GEO3K),
    "search_multiturn_grpo": ("fsdp", {**_turns(1024, max_assistant_turns=2), "data.shuffle": False}),
}


def with_file(source: Source) -> Mapping[str, Any]:
    """The keys, which override those of the file that ``--config-name`` names, or without it the program: an existing
    file, else a known one. Raises ``ConfigError``: a file that is no YAML section."""
    keys, folder = source.keys, source.config_path
    own_file = "dapo_trainer" if re.fullmatch(r"recipe\.dapo\.(?:src\.)?main_\w+", source.launcher) else BASES[0]
    name = str(keys.get(CONFIG_NAME, own_file))
    # hydra looks for a relative folder beside the module.
    beside = Path(*source.launcher.split(".")[:-1]) if source.from_module else Path()
    file = next((path for base in (beside, Path()) if (path := base / folder / f"{name}.yaml").is_file()), None)
    if name in BASES or not folder or file is None:
        return {**CONFIG_FILES.get(name, ("", {}))[1], **sizes_of_reference(keys), **keys}
    text = file.read_text(encoding="utf-8")
    written = read_yaml(text, file.name).keys
    groups = [str(group) for group in yaml.safe_load(text).get("defaults", ())]
    if any(group not in (*BASES, "_self_") and "model_engine" not in group for group in groups):
        return keys  # further files, which are not here
    own = {key: value for key, value in written.items() if not key.startswith("hydra.")}
    own |= sizes_of_reference({**own, **keys})
    return {**own, **keys, CONFIG_NAME: BASES["megatron" in " ".join(groups)]}


def sizes_of_reference(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's parallel sizes of the reference that are not written: its file takes them from the actor's."""
    found = ((re.fullmatch(r"(actor_rollout_ref)\.actor(\..+_parallel_size)", key), keys[key]) for key in keys)
    sizes = {f"{match[1]}.ref{match[2]}": value for match, value in found if match and "ulysses" not in match[2]}
    return {key: value for key, value in sizes.items() if key not in keys}


def config_name(value: object) -> str:
    """The backend of one of their files; ``ValueError`` for a file of settings beyond their defaults."""
    if value in CONFIG_FILES:
        return CONFIG_FILES[str(value)][0]
    raise ValueError(
        "names a file of settings of theirs that is not here: start where --config-path leads to it, or give the keys "
        f"themselves; known: {', '.join(CONFIG_FILES)}"
    )


def level(value: object) -> Any:
    """``token``, ``sequence``, or null in its spellings and false."""
    return None if value in (*NULLS, False) else one_of({"token": "token", "sequence": "sequence"})(value)


def bands(value: object) -> str:
    """Bounds as ``2.0`` or ``0.5_5.0``, several with commas between them. Raises ``ValueError``: text that holds no
    such bounds."""
    try:
        for band in str(value).split(","):
            bounds(band)
    except ValueError:
        raise ValueError("must be a number, or two as 0.5_5.0") from None
    return str(value)


# Patterns of modules and their facts; of the recipes only those whose keys describe them completely.
PROGRAMS: tuple[tuple[str, dict[str, bool]], ...] = (
    (r"verl\.trainer\.main_ppo\w*|verl\.experimental\.(?:transfer_queue|separation)\.main_\w+", {}),
    (r"verl\.experimental\.one_step_off_policy\.(?:\w+\.)*main_\w+", {"one_step_off": True, "bypass": True}),
    (r"recipe\.one_step_off_policy\.main_\w+", {"one_step_off": True}),
    (r"recipe\.(?:dapo|entropy|char_count)\.(?:src\.)?main_\w+", {}),
)
CONVERSIONS = {
    "estimator": one_of(ESTIMATORS),
    "kl_type": one_of(KL_TYPES, OTHER_KL_TYPES),
    "distill_mode": one_of(DISTILLATION),
    "loss": one_of(LOSSES),
    "load_format": one_of(
        {
            **dict.fromkeys(("dummy", "dummy_dtensor", "dummy_megatron", "dummy_hf"), "dummy"),
            **dict.fromkeys(("auto", "safetensors", "hf", "dtensor", "megatron"), "auto"),
        },
        {"flash_rl": "FlashRL quantises the engine, which would sample from another model"},
    ),
    **{f.__name__: f for f in (config_name, level, bands)},
    "but_one": lambda value: max(0, whole(value) - 1),
    "nullable": lambda value: None if value in NULLS else value,
}


def prepare(draft: Draft) -> None:
    """Steps ahead, engines on separate nodes under the names that the engines' section has, tools, and distillation."""
    if draft.get("v1_mode", default="sync") != "sync" and draft.get("use_v1") is not False:
        draft.facts["runs_ahead"] = True
        draft.state("staleness", draft.get("warmup", default=1))
        if draft.get("v1_mode") == "separate_async":
            draft.facts["colocate"] = False
    if draft.get("pool_nodes") and draft.get("colocate", default=True):
        draft.refuse("pool_nodes", "goes with actor_rollout_ref.hybrid_engine=false", 0)
    elif draft.get("pool_nodes"):
        for name in ("nodes", "gpus"):
            draft.state(f"engine_{name}", draft.value_of(f"pool_{name}"))
            draft.remark([f"pool_{name}"], "devices of the engines alone")
    if draft.get("older_is") and "is_bound" in draft.explicit:
        draft.state("is_level", draft.get("older_level", default="token"))
        draft.reasons["older_is"] = draft.reasons["older_level"] = {"train_infer_correction"}
    for suffix in ("", ".critic"):
        if draft.names.get(f"lora_rank{suffix}", "").endswith(".lora.rank"):
            draft.facts.setdefault(f"lora_alpha{suffix}", 32)  # of Megatron's section; the other has 16
    if draft.get("eval_steps") == 0 and draft.get("val_first") is not False and "val_files" in draft.explicit:
        draft.remark(["eval_steps"], "nor before the first step, where they validate once: a number of steps does both")
    if draft.get("gpg_loss"):
        draft.state("loss", LOSSES["gpg"])
        draft.raw["loss"], draft.reasons["gpg_loss"] = "gpg", {"loss"}
    if draft.get("mtp") and draft.get("mtp_learns"):
        draft.refuse(
            "mtp_learns", "is not available: the loss of further tokens reaches the policy's output layer", False
        )
    if isinstance(draft.raw.get("aggregation"), bool):  # the older name was there before the other terms had modes
        terms = ("kl_aggregation", "entropy_aggregation", "value_aggregation")
        draft.facts = dict.fromkeys(terms, "token-mean") | draft.facts
    if draft.raw.get("config_name") == "torchtitan" and not draft.states("titan_floor.actor"):
        key = "actor_rollout_ref.actor.optim.min_lr_factor"
        rule = f"decays the learning rate to 0 by a formula of its own there: {key}=1.0 keeps it constant"
        draft.refuse("config_name", rule, "fsdp")
    find_tool_episodes(draft)
    find_distillation(draft)


VERL = Dialect(
    "verl",
    "verl",
    read_table("verl", CONVERSIONS),
    "actor_rollout_ref.model.path",
    FACTS,
    PROGRAMS,
    files=with_file,
    prepare=prepare,
    empty_is_false=True,
)
