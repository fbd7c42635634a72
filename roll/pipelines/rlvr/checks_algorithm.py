"""Checks of the algorithm's keys against one another."""

from __future__ import annotations

from roll.config.algorithm import estimator
from roll.config.checks.base import Checks
from roll.pipelines.policy import (
    needs_critic,
    needs_old_entropy,
    needs_sum_of_squares,
    policy_training_plans,
    uses_old_log_probs,
)
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.planning import max_new_tokens


def check_algorithm(config: RLVRConfig, checks: Checks) -> None:
    group = config.num_return_sequences_in_group
    if estimator(config.adv_estimator).works_in_turns:
        rule = "looks at the turns of episodes, which only the agentic pipeline (custom_envs, train_env_manager) has"
        checks.add("adv_estimator", config.adv_estimator, rule, "grpo")
    if estimator(config.adv_estimator).leaves_one_out and group < 2:
        rule = f"must be at least 2 with {config.adv_estimator}: a sample is compared with the others of its prompt"
        checks.add("num_return_sequences_in_group", group, rule, 8)
    if config.adv_estimator == "grpo" and group < 2:
        checks.note("num_return_sequences_in_group", "1 with grpo: a group of one keeps its raw score")
    if config.difficulty_low_threshold > config.difficulty_high_threshold:
        rule = f"must not be greater than difficulty_high_threshold {config.difficulty_high_threshold}"
        checks.add("difficulty_low_threshold", config.difficulty_low_threshold, rule, 0.0)
    check_pass_k(config, checks)
    check_passes(config, checks)
    check_rewards_of_estimator(config, checks)
    check_overlong(config, checks)
    if config.critic_warmup >= config.max_steps and needs_critic(config):
        rule = f"must be less than max_steps {config.max_steps}, or the policy never learns"
        checks.add("critic_warmup", config.critic_warmup, rule, 0)
    if config.adv_estimator == "grpo" and config.norm_mean_type is None:
        checks.note("norm_mean_type", "null with grpo: rewards are not compared within their group")
    note_without_effect(config, checks)
    note_zero_advantages(config, checks)


def check_pass_k(config: RLVRConfig, checks: Checks) -> None:
    """One of k has a chance to differ from one of all only while k is below the group's size."""
    group, k = config.num_return_sequences_in_group, config.pass_k
    if not estimator(config.adv_estimator).is_pass_at_k:
        return
    if group < 2:
        rule = f"must be greater than pass_k {k} with {config.adv_estimator}, or every advantage is 0"
        checks.add("num_return_sequences_in_group", group, rule, 2 * k)
    elif k >= group:
        rule = (
            f"must be less than num_return_sequences_in_group {group} with {config.adv_estimator}, or every advantage "
            f"is 0; or set num_return_sequences_in_group to {2 * k}"
        )
        checks.add("pass_k", k, rule, group // 2)


def note_zero_advantages(config: RLVRConfig, checks: Checks) -> None:
    """Settings under which every advantage is 0, or no sample is used, whatever the scores."""
    samples = config.rollout_batch_size * config.num_return_sequences_in_group
    if config.norm_mean_type == "batch" and samples == 1:
        checks.note("norm_mean_type", "batch with one sample a step: its advantage is always 0, so nothing is learnt")
    if config.reward_weights and not any(config.reward_weights.values()):
        checks.note("reward_weights", "all are 0: every advantage is 0, so nothing is learnt")
    if config.difficulty_mask and config.difficulty_low_threshold == config.difficulty_high_threshold:
        rule = "equals difficulty_low_threshold: no mean score lies between them, so nothing is learnt"
        checks.note("difficulty_high_threshold", rule)
    arguments = config.actor_infer.generating_args
    if estimator(config.adv_estimator).needs_greedy and (arguments.temperature == 0 or not arguments.do_sample):
        key = "actor_infer.generating_args.temperature"
        checks.note(
            key, f"greedy decoding with {config.adv_estimator}: a sample is its own baseline, nothing is learnt"
        )


def check_passes(config: RLVRConfig, checks: Checks) -> None:
    """What the pass before the update is forbidden and needed for."""
    key = "force_disable_old_logprobs_recompute"
    if not config.force_disable_old_logprobs_recompute:
        return
    if config.enable_old_logprobs_recompute:
        checks.add(key, True, "contradicts enable_old_logprobs_recompute: true; keep one of them", False)
    if needs_old_entropy(config):
        user = "target_entropy" if config.target_entropy is not None else "top_entropy_quantile"
        checks.add(key, True, f"leaves no entropies for {user} {getattr(config, user):g}", False)
    if needs_sum_of_squares(config):
        rule = f"leaves no sums of squared probabilities for adv_estimator: {config.adv_estimator}"
        checks.add(key, True, rule, False)
    if config.train_infer_correction and uses_old_log_probs(config):
        checks.note("train_infer_correction", f"has no effect with {key}: old and engine log-probs are the same")


def check_rewards_of_estimator(config: RLVRConfig, checks: Checks) -> None:
    """Rewards in the form that the estimator compares them in."""
    name, row = config.adv_estimator, estimator(config.adv_estimator)
    if row.needs_greedy:
        for key, value in (("norm_mean_type", config.norm_mean_type), ("norm_std_type", config.norm_std_type)):
            if value not in (None, "auto"):
                rule = f"must be null with {name}: the greedy response's reward is subtracted as it is"
                checks.add(key, value, rule, "~")
    if row.weighs_rewards and not config.reward_weights:
        rule = f"is needed by adv_estimator: {name}: the numbers of the reward to normalise apart, and their weights"
        checks.missing("reward_weights", rule, "{correct: 1.0, answered: 0.5}")
    if config.reward_weights and not row.weighs_rewards and "." not in name:
        checks.note("reward_weights", f"has no effect with adv_estimator: {name}")
    if row.weighs_rewards:
        for key in ("norm_mean_type", "norm_std_type", "reward_clip", "overlong_buffer_length", "add_token_level_kl"):
            if checks.written(key) and getattr(config, key) not in (None, False, "auto"):
                checks.note(key, f"has no effect with {name}: it normalises the rewards of reward_weights itself")


def check_overlong(config: RLVRConfig, checks: Checks) -> None:
    buffer, key = config.overlong_buffer_length, "overlong_buffer_length"
    if buffer is None:
        return
    if checks.broken("response_length", "sequence_length", "actor_infer.generating_args.max_new_tokens"):
        return
    limit = max_new_tokens(config)
    if buffer > limit:
        rule = f"must be at most the length limit of a response, {limit} tokens"
        checks.add(key, buffer, rule, max(1, limit // 5))


def note_without_effect(config: RLVRConfig, checks: Checks) -> None:
    """Keys that are written and have no effect beside the others."""
    if config.use_kl_loss and config.kl_loss_coef == 0:
        checks.note("use_kl_loss", "has no effect with kl_loss_coef 0")
    if config.add_token_level_kl and config.init_kl_coef == 0:
        checks.note("add_token_level_kl", "has no effect with init_kl_coef 0")
    note_unused_aggregations(config, checks)
    for key in ("entropy_coef_delta", "entropy_coef_max"):
        if checks.written(key) and config.target_entropy is None:
            checks.note(key, "has no effect without target_entropy")
    if needs_sum_of_squares(config) and config.train_infer_correction:
        checks.note("train_infer_correction", f"weighs the loss alone, not the baseline of {config.adv_estimator}")
    if config.shuffle_mini_batches and policy_training_plans(config)["actor_train"].optimizer_steps_per_step == 1:
        checks.note("shuffle_mini_batches", "has no effect: a batch is one mini-batch, passed over once")
    if config.rl_loss_coef == 0 and config.entropy_loss_coef == 0 and not (config.use_kl_loss or config.target_entropy):
        checks.note("rl_loss_coef", "0 with no other loss term: the policy does not learn")


def note_unused_aggregations(config: RLVRConfig, checks: Checks) -> None:
    """Modes of a term that the loss does not have, and a length that no mode divides by."""
    terms = {
        "kl_loss_agg_mode": (config.use_kl_loss, "use_kl_loss: true"),
        "entropy_loss_agg_mode": (
            config.entropy_loss_coef > 0 or config.target_entropy is not None,
            "entropy_loss_coef above 0",
        ),
        "value_loss_agg_mode": (needs_critic(config), "a critic"),
    }
    for key, (used, what) in terms.items():
        if checks.written(key) and getattr(config, key) is not None and not used:
            checks.note(key, f"has no effect without {what}")
    modes = {config.loss_agg_mode, *(getattr(config, key) for key, (used, _) in terms.items() if used)}
    if config.loss_norm_length is not None and "seq-mean-token-sum-norm" not in modes:
        checks.note("loss_norm_length", "has no effect without the mode seq-mean-token-sum-norm")
