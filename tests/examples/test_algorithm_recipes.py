"""The recipes of ``examples/algorithms`` choose what their papers say: the options that reach the functions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from roll.algorithms.losses import actor_loss_options
from roll.algorithms.policy_losses import clip_range
from roll.algorithms.samples import resolve_norm_types
from roll.config.algorithm import CORRECTION_PRESETS
from roll.config.loader import LoadedConfig
from tests.support.recipes import EXAMPLES, loaded

FOLDER = EXAMPLES / "algorithms"
BASES = ("base_config", "with_reference")
RECIPES = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem not in BASES)

GROUP, RAW = ("group", "group"), (None, None)
MEAN, TOKEN, NORM = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"

# Estimator, norm types, policy loss, aggregation, optimizer steps a batch; then options of the loss, or keys.
EXPECTED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "ppo": (("gae", RAW, "ppo", MEAN, 2), {"clip_range": (0.2, 0.2), "value_clip": 0.5, "lambd": 0.95}),
    "grpo": (("grpo", GROUP, "ppo", MEAN, 2), {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "k3"}),
    "dr_grpo": (("grpo", ("group", None), "ppo", NORM, 2), {}),
    "dapo": (
        ("grpo", GROUP, "ppo", TOKEN, 2),
        {"clip_low": 0.2, "clip_high": 0.28, "overlong_buffer_length": 7, "overlong_penalty_factor": 1.0},
    ),
    "gspo": (("grpo", GROUP, "gspo", MEAN, 2), {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_token": (("grpo", GROUP, "gspo_token", MEAN, 2), {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": (("grpo", GROUP, "cispo", TOKEN, 2), {"epsilon_low": 1.0, "epsilon_high": 2.0}),
    "m2po": (("grpo", GROUP, "m2po", TOKEN, 2), {"threshold": 0.04}),
    "vespo": (
        ("grpo", GROUP, "vespo", TOKEN, 2),
        {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    ),
    "maxrl": (("maxrl", RAW, "ppo", TOKEN, 2), {"num_return_sequences_in_group": 8}),
    "luspo": (("grpo", GROUP, "gspo", "seq-mean-token-sum", 2), {"clip_low": 3e-4, "clip_high": 4e-4}),
    "sapo": (("grpo", GROUP, "sapo", MEAN, 2), {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": (("grpo", GROUP, "gmpo", MEAN, 2), {"clip_low": 0.4, "clip_high": 0.4}),
    "topr": (
        ("reinforce", ("group", None), "topr", NORM, 2),
        {"lower_bound": 0.0, "upper_bound": 1.0, "positive_weight": 1.0, "negative_weight": 1.0},
    ),
    "raft_pp": (("reinforce", RAW, "raft++", MEAN, 2), {"clip_range": (0.2, 0.2)}),
    "reinforce_pp": (
        ("reinforce++", RAW, "ppo", MEAN, 2),
        {"add_token_level_kl": True, "init_kl_coef": 0.001, "kl_penalty": "k1", "num_return_sequences_in_group": 1},
    ),
    "reinforce_pp_baseline": (
        ("reinforce++_baseline", ("group", None), "ppo", MEAN, 2),
        {"use_kl_loss": True, "kl_loss_type": "k2"},
    ),
    "rloo": (("rloo", RAW, "vanilla", NORM, 1), {}),
    "remax": (("remax", RAW, "vanilla", NORM, 1), {"num_return_sequences_in_group": 1}),
    "opo": (("opo", RAW, "vanilla", TOKEN, 1), {}),
    "optimal_token_baseline": (("optimal_token_baseline", RAW, "ppo", TOKEN, 2), {}),
    "gpg": (("gpg", RAW, "vanilla", TOKEN, 1), {}),
    "lite_ppo": (("reinforce", ("group", "batch"), "ppo", TOKEN, 2), {}),
    "kimi15": (("grpo", ("group", None), "kimi15", NORM, 2), {"tau": 0.1}),
    "tis": (("grpo", GROUP, "tis", MEAN, 2), {"lower_bound": 0.0, "upper_bound": 1.0}),
    "dro": (("grpo", ("group", None), "dro", NORM, 2), {"tau": 0.1, "enable_reference": True}),
    "dppo": (("grpo", ("group", None), "dppo", NORM, 2), {"divergence": "tv", "threshold": 0.15}),
    "clip_cov": (
        ("grpo", GROUP, "clip_cov", TOKEN, 2),
        {"ratio": 2e-4, "low": 1.0, "high": 5.0},
    ),
    "kl_cov": (("grpo", GROUP, "kl_cov", TOKEN, 2), {"ratio": 2e-3, "coef": 1.0}),
    "pass_at_k": (("pass@k", RAW, "ppo", TOKEN, 2), {"k": 4, "num_return_sequences_in_group": 8}),
    "gdpo": (("gdpo", RAW, "ppo", MEAN, 2), {"weights": {"correct": 1.0, "answered": 0.5}}),
    "decoupled_ppo": (("grpo", GROUP, "ppo", MEAN, 2), {"train_infer_correction": "decoupled"}),
    "high_entropy_tokens": (("grpo", GROUP, "ppo", TOKEN, 2), {"clip_high": 0.28, "top_entropy_quantile": 0.2}),
}


def recipe(name: str) -> LoadedConfig[Any]:
    return loaded(FOLDER / f"{name}.yaml")


@pytest.mark.parametrize("name", sorted({*RECIPES, *EXPECTED}))
def test_effective_options(name: str) -> None:
    choice, values = EXPECTED[name]
    config, plan = recipe(name).config, recipe(name).plan
    options = actor_loss_options(config)
    norm_types = resolve_norm_types(config.estimator, *plan.norm_types)
    steps = plan.training["actor_train"].optimizer_steps_per_step
    assert (config.estimator.name, norm_types, options.loss.name, options.loss_agg_mode, steps) == choice
    read = (options.pg, config.estimator.options, config)
    found = {key: next(getattr(one, key) for one in read if hasattr(one, key)) for key in values if key != "clip_range"}
    if "clip_range" in values:
        found["clip_range"] = clip_range(options.pg)
    assert found == values
    in_loss = options.use_kl_loss and options.kl_loss_coef != 0.0
    assert plan.needs_reference == (in_loss or config.add_token_level_kl or config.enable_reference)
    assert plan.needs_critic == (name == "ppo")
    assert plan.needs_greedy_baseline == (name == "remax")
    assert plan.samples_per_step == 256


def test_recipes_are_short_name_their_source_and_say_nothing_in_vain() -> None:
    for name in RECIPES:
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        assert re.search(r"arXiv \d{4}\.\d{5}", header), f"the header of {name} names the paper"
        assert len(text.splitlines()) <= 40, name
        assert recipe(name).config.exp_name == name
        assert [str(warning) for warning in recipe(name).warnings] == [], name


def test_dapo_replaces_groups_without_a_contrast() -> None:
    reward = recipe("dapo").config.rewards["word_problems"]
    assert reward.query_filter_config.type == "mean_filter"
    assert reward.query_filter_config.filter_args == {"threshold_down": 0.0, "threshold_up": 1.0}
    assert reward.worker_cls == "gsm8k_rule", "the rest of the section is the base's"


def test_decoupled_ppo_weighs_by_the_policy_before_the_update_over_the_engine() -> None:
    options = actor_loss_options(recipe("decoupled_ppo").config)
    assert options.correction == CORRECTION_PRESETS["decoupled"]
    assert recipe("decoupled_ppo").plan.needs_old_log_probs
