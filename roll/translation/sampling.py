"""Keys between sampling and loss: corrections of the engine's mismatch, dynamic sampling, over-long responses."""

from __future__ import annotations

import math
import re
from typing import Any

from roll.translation.rules import Draft

# Estimators that divide by a spread or a mean, so that a factor of all scores changes nothing.
WHITENED = ("gae", "maxrl", "reinforce++", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
# DAPO's mathematics is scored with -1 and 1 in verl, with 0 and 1 here: half the distance between right and wrong.
DAPO_SCORES = 0.5
BINARY_RULES = {"gsm8k_rule", "math_rule"}  # rewards whose scores are 0 and 1
# Metrics of `filter_groups` that contain the over-long punishment.
WITH_PENALTY = ("score", "seq_reward", "seq_final_reward")
WEIGHTS = ("is_level", "is_bound", "is_normalized")


def put_bypass(draft: Draft) -> None:
    """verl's ``bypass_mode``: the engine's log-probs replace the old ones, and a separate key names the loss."""
    if not draft.get("bypass"):
        return
    if draft.raw.get("loss", "vanilla") != "vanilla":
        draft.refuse("loss", "is replaced by rollout_correction.loss_type with bypass_mode: leave it out", "vanilla")
    if draft.value_of("bypass_loss") == "reinforce":
        draft.state("loss", "vanilla")
    else:
        draft.put("force_disable_old_logprobs_recompute", True, "bypass", "bypass_loss")


def put_correction(draft: Draft) -> None:
    """Weights and masks against the mismatch of engine and trainer."""
    rules = [*verl_rules(draft), *skyrl_rules(draft)]
    if rules:
        because = ("rejection", "rejection_bound", "bypass_loss", "tis_type", "use_tis", "tis_cap", "mask_metric")
        draft.put("train_infer_correction", rules, *WEIGHTS, *because)


LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}
# Our levels by the prefixes of verl's rejection criteria, and by its older names for three of them.
OLDER_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
# Estimators whose advantages are the same with and without the tokens that are rejected.
OUTCOMES = ("grpo", "rloo", "roll.algorithms.verl_estimators.gpg", "roll.algorithms.verl_estimators.grpo_passk")


def verl_rules(draft: Draft) -> list[dict[str, Any]]:
    """verl's ``rollout_correction``: weights, truncated (TIS) or 0 outside a band (IcePop), and rejection."""
    cap = draft.get("actor_tis_cap")
    if cap is not None and cap > 0:
        return [{"level": "token", "action": "truncate", "high": float(cap)}]
    level, bypass = draft.get("is_level"), bool(draft.get("bypass"))
    if draft.get("estimator") == "optimal_token_baseline" and bypass:
        rule = "leaves the optimal token baseline no sums of squared probabilities, in verl either"
        draft.refuse("bypass", rule, False)
    elif draft.get("estimator") == "optimal_token_baseline" and level is not None:
        rule = "also weighs the optimal token baseline there, by the square of the weights; here the loss alone"
        draft.refuse("is_level", rule, None)
    rejections = rejection_rules(draft, level, bypass)
    if level is None:
        return rejections
    if bypass and draft.value_of("bypass_loss") != "reinforce":  # ppo_clip, which has its ratio and no weights
        return rejections
    bound = draft.value_of("is_bound")
    if bound is None:
        draft.refuse("is_bound", "is needed with rollout_is", 2.0)
        return rejections
    low, high = bounds(bound)
    band = {"action": "truncate", "high": high} if low is None else {"action": "both", "low": low, "high": high}
    if bypass and draft.get("is_normalized"):
        rule = "divides by the mean of each micro-batch in bypass_mode there; here by the batch's, without bypass_mode"
        draft.refuse("is_normalized", rule, False)
    more = {"policy": "current"} if bypass else {"normalize": True} if draft.get("is_normalized") else {}
    return [{"level": level, **band, **more}, *rejections]


def rejection_rules(draft: Draft, weight_level: object, bypass: bool) -> list[dict[str, Any]]:
    """verl's ``rollout_rs``: criteria that a token or its response must fulfil, all of them.

    Before the update it takes what it rejects out of the mask, in ``bypass_mode`` (which compares the policy under
    training) out of the numerators alone; numbers of responses stay as they are in both.
    """
    names = [name.strip() for name in str(draft.get("rejection", default="")).split(",") if name.strip()]
    thresholds = str(draft.get("rejection_bound", default="")).split(",")
    if not names:
        return []
    if len(thresholds) not in (1, len(names)) or not thresholds[0]:
        draft.refuse("rejection", "needs rollout_rs_threshold: one for all criteria, or one for each")
        return []
    rules = [
        rejection_rule(draft, name, bound.strip())
        for name, bound in zip(names, thresholds * len(names) if len(thresholds) == 1 else thresholds, strict=True)
    ]
    if any(rule is None for rule in rules):
        return []
    of_tokens = any(rule["level"] == "token" for rule in rules if rule)
    by_response = draft.get("loss") in draft.facts.get("sequence_mean_losses", ())
    mode = "seq-mean-token-mean" if by_response else str(draft.value_of("aggregation"))
    if of_tokens and mode == "seq-mean-token-mean":
        rule = "divides by the tokens of a response that are left, and by all responses, there; no rule here does"
        draft.refuse("rejection", f"{rule}: loss_agg_mode token-mean is the same")
    if bypass:
        return [{**rule, "action": "mask", "policy": "current"} for rule in rules if rule]
    if draft.get("estimator") not in OUTCOMES or draft.get("kl_in_reward"):
        rule = (
            "also takes what it rejects out of the advantages of this estimator and out of the KL in the reward there"
        )
        draft.refuse("rejection", f"{rule}; with grpo, rloo and gpg without use_kl_in_reward it is the same")
    if mode in ("token-mean", "token-sum"):
        if of_tokens and weight_level == "sequence":
            draft.refuse("rejection", "leaves the weights of sequences as they were there; here they lose its tokens")
        return [{**rule, "action": "reject"} for rule in rules if rule]
    if draft.get("kl_loss") or draft.get("entropy_coef"):
        rule = "takes what it rejects out of the KL and the entropy, and leaves the number of responses as it is, there"
        draft.refuse("rejection", f"{rule}: loss_agg_mode token-mean, or no such term, is the same")
    return [{**rule, "action": "mask"} for rule in rules if rule]


def rejection_rule(draft: Draft, name: str, bound: str) -> dict[str, Any] | None:
    """One criterion: level, metric and bounds; None where it is refused."""
    low, high = bounds(bound)
    if (name in OLDER_LEVELS or name.endswith("_k1")) and (high <= 0 or (low is not None and low <= 0)):
        draft.refuse("rejection_bound", f"must be greater than 0: {name} has bounds of ratios", "0.5_2.0")
        return None
    if name in OLDER_LEVELS:
        least = draft.get("rejection_low", default=1 / high if low is None else low)
        return {"level": OLDER_LEVELS[name], "metric": "ratio", "low": float(least), "high": high}
    level, _, metric = name.rpartition("_")
    if level not in LEVELS or metric not in ("k1", "k2", "k3") or name == "seq_max_k1":
        known = ", ".join(f"{level}_k1, {level}_k2, {level}_k3" for level in ("token", "seq_sum", "seq_mean"))
        draft.refuse("rejection", f"names a criterion without an equal here; known: {known}, seq_max_k2, seq_max_k3")
        return None
    if metric != "k1":
        return {"level": LEVELS[level], "metric": metric, "high": high}
    band = {"low": -math.log(high) if low is None else math.log(low), "high": math.log(high)}
    return {"level": LEVELS[level], "metric": metric, **band}


def bounds(threshold: object) -> tuple[float | None, float]:
    """Lower and upper bound: (None, 2.0) of ``2.0``, (0.5, 5.0) of ``"0.5_5.0"``."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


def skyrl_rules(draft: Draft) -> list[dict[str, Any]]:
    """SkyRL's ``off_policy_correction``, and its older ``use_tis``."""
    level, metric = draft.get("tis_type"), draft.get("mask_metric")
    if "_cov" in str(draft.get("loss")):  # which does not read it
        return []
    if draft.get("use_tis"):
        cap = draft.get("tis_cap", default=-1.0)
        if cap <= 0 or draft.get("loss", default="ppo") != "ppo":
            draft.refuse("use_tis", "needs a positive tis_imp_ratio_cap, and the losses regular or dual_clip")
            return []
        return [{"level": "token", "action": "truncate", "high": float(cap)}]
    rules: list[dict[str, Any]] = []
    if level is not None:
        rules.append({"level": level, "action": "truncate", "high": draft.value_of(f"tis_{level}_cap")})
    masks = mask_rules(draft, level, metric)
    if masks and draft.facts.get("masks_drop_tokens") and draft.value_of("aggregation") == "token-mean":
        rule = "takes what it masks out of the number of tokens in this version; here the denominators stay as they are"
        rule += ": loss_reduction sequence_mean counts responses and is the same"
        draft.refuse("mask_metric" if metric else "tis_type", rule)
    return rules + masks


def mask_rules(draft: Draft, level: object, metric: object) -> list[dict[str, Any]]:
    """Masks of responses with an outlier among their tokens, of responses by their own ratio, and of tokens; the first
    and the last count only together with another correction."""
    low, high = draft.get("outlier_low"), draft.get("outlier_high")
    band = {side: bound for side in ("low", "high") if (bound := draft.get(f"token_mask_{side}")) is not None}
    facts = tuple(f"token_mask_{side}" for side in band)
    if level is None and metric is None:
        return []
    rules: list[dict[str, Any]] = [] if high is None else [{"level": "max", "action": "mask", "high": high}]
    if low is not None:  # the largest k1 is minus the logarithm of the smallest ratio
        rules.append({"level": "max", "action": "mask", "metric": "k1", "high": -math.log(low)})
    if metric is not None:
        name, ours = ("geo", "geometric") if metric == "geometric" else ("product", "sequence")
        sides = {side: draft.value_of(f"{name}_{side}") for side in ("low", "high")}
        rules.append({"level": ours, "action": "mask", **sides})
    if band:
        if level == "sequence" or metric is not None:
            draft.refuse(facts[0], "leaves masked tokens out of the ratio of the sequence there; here it does not")
        rules.append({"level": "token", "action": "mask", **band})
    return rules


MEANS = ("loss_agg_mode", "kl_loss_agg_mode", "value_loss_agg_mode")
COUNTING_MEAN = "roll.algorithms.skyrl_losses.sequence_mean"


def put_group_filter(draft: Draft) -> None:
    """Dynamic sampling: groups whose scores are all the same are replaced."""
    if not draft.get("filter_on"):
        return
    metric, rule = draft.get("filter_metric", default="acc"), "there; groups are judged by their scores here"
    if metric in WITH_PENALTY and draft.get("overlong_on"):
        draft.refuse("filter_metric", f"contains the over-long punishment {rule}", "acc")
    if metric == "seq_final_reward" and draft.get("kl_in_reward"):
        draft.refuse("filter_metric", f"contains the KL {rule}", "acc")
    own = [key.split(".")[1] for key in draft.keys if key.startswith("rewards.") and key.endswith(".worker_cls")]
    for name in own or draft.get("reward_names", default=[]):
        draft.put(f"rewards.{name}.query_filter_config.type", "std_filter", "filter_on")


def put_zero_variance(draft: Draft) -> None:
    """SkyRL's filter of groups without spread: ``difficulty_mask`` where scores are 0 and 1, so that the mean tells."""
    if not draft.get("zero_variance"):
        return
    rules = {str(value) for key, value in draft.keys.items() if re.fullmatch(r"rewards\.\w+\.worker_cls", key)}
    # There it also looks at the responses that are left in the loss alone, and keeps groups of a single one.
    others = draft.facts.get("episodes") or draft.get("mask_truncated") or int(draft.get("samples", default=1)) < 2
    others = others or any(key.endswith((".format_score", ".reward_kwargs.score")) for key in draft.keys)
    if others or not rules or not rules <= BINARY_RULES:
        rule = "looks at the spread of a group, and difficulty_mask at its mean: the same for two or more scores of 0 "
        rule += "and 1, without apply_overlong_filtering"
        draft.refuse("zero_variance", rule, False)
    draft.put("difficulty_mask", True, "zero_variance")


def is_signed(draft: Draft) -> bool:
    """Return true for mathematics that is scored with -1 and 1 there."""
    files = [str(name).lower() for name in draft.get("train_files", default=[])]
    is_dapo = draft.raw.get("reward") == "aime" or (bool(files) and all("dapo" in name for name in files))
    return is_dapo and draft.get("reward_file") is None


def ignores_scale(draft: Draft) -> bool:
    """Return true where scores of 0 and 1 give the advantages of -1 and 1; elsewhere they are 0 and 2."""
    estimator = str(draft.get("estimator"))
    divides = draft.value_of("grpo_std") is not False if estimator == "grpo" else estimator in WHITENED
    return divides and not draft.get("kl_in_reward")


def put_overlong(draft: Draft) -> None:
    """DAPO's soft punishment of responses near the length limit."""
    if not draft.get("overlong_on"):
        return
    if draft.get("reward_manager", default="dapo") != "dapo":
        draft.refuse("overlong_on", "counts with reward_manager dapo only")
    limit, response = draft.get("max_response"), draft.get("response_length")
    if limit is not None and limit != response:
        rule = f"must be the longest response, {response} tokens: the punishment ends there"
        draft.refuse("max_response", rule, response)
    if draft.value_of("overlong_len") is None:
        draft.problems.missing("overlong_buffer_cfg.len", "is needed with overlong_buffer_cfg.enable", 4096)
        return
    factor = float(draft.value_of("overlong_factor"))
    if is_signed(draft) and ignores_scale(draft):
        factor *= DAPO_SCORES
        draft.remark(["overlong_factor"], "halved: this data is scored with -1 and 1 there, with 0 and 1 by math_rule")
    draft.put("overlong_buffer_length", int(draft.value_of("overlong_len")), "overlong_on", "overlong_len")
    draft.put("overlong_penalty_factor", factor, "overlong_factor")


def put_truncated(draft: Draft) -> None:
    """SkyRL's over-long filtering: responses that were cut off stay out of the loss."""
    if not draft.states("mask_truncated"):
        return
    masks = bool(draft.facts["mask_truncated"])
    for key in [key for key in draft.keys if masks and key in MEANS]:
        if draft.keys[key] == "seq-mean-token-mean":  # that there counts the responses that are left out
            draft.put(key, COUNTING_MEAN, "mask_truncated", "aggregation")
        elif draft.keys[key] in ("seq-mean-token-sum-norm", "prompt-mean"):
            rule = "counts such responses in the number of responses or prompts there; here max_len_mask leaves them "
            draft.refuse("mask_truncated", f"{rule}out of it: token_mean and sequence_mean are the same", False)
    if masks or not draft.whole:
        draft.put("max_len_mask", masks, "mask_truncated")
