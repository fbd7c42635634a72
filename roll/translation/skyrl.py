"""SkyRL's vocabulary, next to its table, ``skyrl.table``.

Two vocabularies: the package ``skyrl_train`` with DeepSpeed, FSDP and FSDP2, and its successor ``skyrl`` with FSDP and
Megatron. They differ in what ``fsdp`` means (FSDP1 next to ``fsdp2``, the FSDP2 API without it), in what a
mask of the off-policy correction does to the denominators, and in what two losses sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.translation.episodes import find_episodes
from roll.translation.placement import find_engines, ranks_of_a_sequence
from roll.translation.reading import Source
from roll.translation.rules import ROLES, Dialect, Draft, one_of, read_table, whole

MODEL, OVERRIDE = "trainer.policy.model.path", "trainer.override_entrypoint"
# LOOP (arXiv:2502.01600) subtracts the mean of the others of a group, which is RLOO.
ESTIMATORS = {name: name for name in ("grpo", "gae", "rloo", "reinforce++", "maxrl")} | {"loop": "rloo"}
LOSSES = {"regular": "ppo", "dual_clip": "ppo", "gspo": "gspo_token", "cispo": "cispo", "sapo": "sapo"}
COVARIANCE_LOSSES = {"clip_cov": "clip_cov", "kl_cov": "kl_cov"}
# The same in the newer package, which aggregates by weights of the advantages.
SUMMED_LOSSES = {name: f"roll.algorithms.skyrl_losses.{name}" for name in COVARIANCE_LOSSES}
# Losses of the newer package whose ratio is taken to the engine's log-probs.
ENGINE_LOSSES = {
    "rollout_is": "roll.algorithms.skyrl_losses.engine_is",
    "dppo": "roll.algorithms.skyrl_losses.engine_dppo",
}
OTHER_LOSSES = {
    **dict.fromkeys(ENGINE_LOSSES, "its ratio is taken to the engine's log-probs, in the package `skyrl` alone"),
    "cross_entropy": "it learns from demonstrations",
    "importance_sampling": "it is a sum over tokens without a mean",
}
REDUCTIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
    "token_mean_legacy": "roll.algorithms.skyrl_losses.token_mean_legacy",
}
OTHER_FILTERS = {"replace": "groups without signal are replaced by new ones here, never by copies of others"}
# KL and value are means over responses, the entropy one over tokens, whatever `loss_reduction` says; one weight of the
# KL serves loss and reward; the length that sums are divided by contains the prompt; mini-batches are rounded down to
# whole samples of a rank; data without a file's ending are of the hub; in its one turn a well-formed wrong answer of
# `gsm8k_multi_turn` has 0.2.
FACTS: dict[str, Any] = {
    "dual_names": ("dual_clip",),
    "kl_aggregation": "seq-mean-token-mean",
    "entropy_aggregation": "token-mean",
    "value_aggregation": "seq-mean-token-mean",
    "one_kl_coef": True,
    "norm_is_sequence": True,
    "ranks_round_down": True,
    "hub_names": True,
    "rule_options": {"gsm8k_multi_turn": {"format_score": 0.2}, "lcb": {"partial": False}},
}


# Environments that are no more than a reward.
ENVIRONMENTS = {"gsm8k": "gsm8k_rule", "gsm8k_multi_turn": "gsm8k_rule", "aime": "math_rule", "lcb": "code_sandbox"}


def prepare(draft: Draft) -> None:
    tokens = draft.get("tokens") or -1
    for role in ROLES if tokens > 0 else ():
        # Micro-batches by tokens, of all ranks that share a sequence together.
        draft.state(f"dynamic.{role}", True)
        draft.state(f"token_budget.{role}", max(1, tokens // ranks_of_a_sequence(draft, role)))
    find_episodes(draft)
    find_engines(draft)


def with_own_defaults(source: Source) -> Mapping[str, Any]:
    """The keys, with the defaults that ``eval_sampling_params`` has by itself once one of its keys is written: without
    the section validation is greedy and as long as training. Where a key names another program, that one alone."""
    section, keys = "generator.eval_sampling_params", source.keys
    if keys.get(OVERRIDE) is not None:
        return {OVERRIDE: keys[OVERRIDE]}
    is_whole = source.from_module or MODEL in keys
    if not is_whole or (keys.get(section) is None and not any(key.startswith(f"{section}.") for key in keys)):
        return keys
    return {f"{section}.temperature": 1.0, f"{section}.max_generate_length": 1024, **keys}


def _dialect(name: str, title: str, package: str, losses: dict[str, str], texts: dict[str, str]) -> Dialect:
    conversions = {
        "estimator": one_of(ESTIMATORS),
        "loss": one_of(losses, OTHER_LOSSES),
        "reduction": one_of(REDUCTIONS),
        "group_filter": one_of({"filter": True, None: False, "null": False}, OTHER_FILTERS),
        "environment": lambda value: ENVIRONMENTS.get(str(value), f"skyrl:{value}"),
        "positive": lambda value: whole(value) > 0,
    }
    facts = FACTS | {"masks_drop_tokens": name == "skyrl_train"}
    # Programs of its examples whose keys describe them completely.
    examples = r"examples\.train\." if name == "skyrl" else r"examples\.(?!train\.)"
    sections = read_table("skyrl", conversions, texts)
    return Dialect(
        name,
        title,
        sections,
        MODEL,
        facts,
        files=with_own_defaults if name == "skyrl" else None,
        prepare=prepare,
        programs=(
            (rf"{package}\.entrypoints\.main_(?!gen)\w+", {}),
            (rf"{examples}(?:(?:algorithms\.)?dapo\.main|tis_correction\.main_tis)_dapo", {"overlong_on": True}),
            (rf"{examples}async\.main_\w+", {"one_step_off": True}),
            (rf"{examples}fully_async\.main_\w+", {"fully_async": True}),
            (rf"{examples}(?:algorithms\.)?dapo\.main_dapo_fully_async", {"fully_async": True, "overlong_on": True}),
        ),
    )


SKYRL_TRAIN = _dialect(
    "skyrl_train",
    "SkyRL, package `skyrl_train`",
    "skyrl_train",
    LOSSES | COVARIANCE_LOSSES,
    {
        "STRATEGIES": "[deepspeed, fsdp, fsdp2, megatron]",
        "BACKEND": "fsdp2",
        "GPUS": "4",
        "OFFLOADS": "true",
        "CISPO_LOW": "0.0",
        "CISPO_HIGH": "5.0",
        "IN_PART": "",
        "FSDP": "`fsdp` stands next to `fsdp2` and DeepSpeed here: it is the legacy wrapper FSDP1 (`fsdp_train`)",
    },
)
SKYRL = _dialect(
    "skyrl",
    "SkyRL, package `skyrl`",
    "skyrl.train",
    LOSSES | SUMMED_LOSSES | ENGINE_LOSSES,
    {
        "STRATEGIES": "{fsdp: fsdp2, fsdp2: fsdp2, megatron: megatron}",
        "BACKEND": "fsdp",
        "GPUS": "1",
        "OFFLOADS": "false",
        "CISPO_LOW": "1.0",
        "CISPO_HIGH": "4.0",
        "IN_PART": "1.0 and 1024 tokens where another key of `eval_sampling_params` is written and this one is not",
        "FSDP": "`fsdp` stands next to Megatron here: it is the FSDP2 API (`fsdp2_train`)",
    },
)
