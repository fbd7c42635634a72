"""verl's vocabulary, next to its table, ``verl.table``: names of algorithms, and conversions that need a program."""

from __future__ import annotations

from typing import Any

from roll.translation.families import LANGUAGE_PART
from roll.translation.rules import Dialect
from roll.translation.tables import TEXTS, one_of, read_table

ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    **{name: f"roll.algorithms.verl_estimators.{name}" for name in ("gpg", "grpo_passk", "gdpo")},
}
"""The last three differ from the papers' of the same name."""
KL_TYPES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_TYPES |= {f"{theirs}+": ours if ours == "k2" else f"{ours}+" for theirs, ours in KL_TYPES.items()}
OTHER_KL_TYPES = {"full": "it is not implemented in verl either"}
LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo_token",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "clip-cov": "clip_cov",
    "kl_cov": "kl_cov",
    "kl-cov": "kl_cov",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "vanilla",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
FACTS: dict[str, Any] = {
    "dual_names": ("vanilla",),
    "sequence_mean_losses": ("gspo_token", "gmpo", "sapo"),
}
"""Behaviour of its losses whatever the keys say: negative advantages are bounded, the mean is over responses."""


NULLS = (None, "null", "none", "None", "")


CONFIG_FILES = {"ppo_trainer": "fsdp", "ppo_megatron_trainer": "megatron", "transfer_queue_ppo_trainer": "fsdp"}


def config_name(value: object) -> str:
    """
    Raises:
        ValueError: a file of settings beyond their defaults.
    """
    if value in CONFIG_FILES:
        return CONFIG_FILES[str(value)]
    if "multiturn" in str(value) or "tool" in str(value):
        raise ValueError(TEXTS["TURNS"])
    raise ValueError(
        "names a file of settings of theirs that is not in the command: translate a script that states them, or give "
        f"the file itself; known: {', '.join(CONFIG_FILES)}"
    )


def nullable(value: Any) -> Any:
    """Null in its spellings."""
    return None if value in NULLS else value


def level(value: Any) -> Any:
    """``token``, ``sequence``, or null in its spellings and false."""
    return None if value in (*NULLS, False) else one_of({"token": "token", "sequence": "sequence"})(value)


_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def hugging_face_layers(value: object) -> object:
    """Names of layers as Hugging Face's models have them; other values as they are."""
    if not isinstance(value, list):
        return value
    return [name for layer in value for name in _LAYERS.get(str(layer), (layer,))]


def exclude_modules(value: object) -> object:
    """
    Raises:
        ValueError: other modules than the vision tower.
    """
    if value is None or LANGUAGE_PART.fullmatch(str(value)):
        return value
    raise ValueError("has no translation: lora_target names the layers that adapters are put on")


PROGRAMS: tuple[tuple[str, dict[str, bool]], ...] = (
    (r"verl\.trainer\.main_ppo\w*|verl\.experimental\.(?:transfer_queue|separation)\.main_\w+", {}),
    (
        r"verl\.experimental\.one_step_off_policy\.(?:\w+\.)*main_\w+|recipe\.one_step_off_policy\.main_\w+",
        {"one_step_off": True},
    ),
    (r"recipe\.(?:dapo|entropy|char_count)\.(?:src\.)?main_\w+", {}),
)
"""Of the recipes those whose keys say all that they do."""
CONVERSIONS = {
    "estimator": one_of(ESTIMATORS),
    "kl_type": one_of(KL_TYPES, OTHER_KL_TYPES),
    "loss": one_of(LOSSES),
    **{f.__name__: f for f in (config_name, nullable, level, hugging_face_layers, exclude_modules)},
}
VERL = Dialect(
    "verl",
    "verl",
    read_table("verl", CONVERSIONS),
    "actor_rollout_ref.model.path",
    FACTS,
    PROGRAMS,
)
