"""Algorithms: from the facts that SkyRL's or verl's keys state to keys of ours with the same loss and gradient.

Their keys act on one another (a clip range counts for some losses, others replace the mode of aggregation), so none of
them is translated alone.  ``tests/translation/test_algorithms.py`` computes both sides on one batch.
"""

from __future__ import annotations

from roll.translation.rules import Draft
from roll.translation.sampling import put_bypass, put_correction

# Estimators in which both projects discount; the others have no gamma there.
DISCOUNTING = ("gae", "reinforce_plus_plus", "reinforce++")
# Estimators that compare a group's rewards: there with the KL inside, here before it is subtracted, or with a mean that
# must be positive.
NORMALISING = ("grpo", "reinforce_plus_plus_baseline", "maxrl")
CLIPPING = ("ppo", "gspo_token", "gspo", "raft++", "clip_cov", "engine_is")  # losses that clip the ratio
SEQUENCE_MEAN, NORM = "seq-mean-token-mean", "seq-mean-token-sum-norm"
# Our keys of a loss, and the facts that they come from.
OPTIONS_OF_LOSS: dict[str, dict[str, str]] = {
    "cispo": {"cispo_epsilon_low": "cispo_low", "cispo_epsilon_high": "cispo_high"},
    "gmpo": {"gmpo_clip_low": "clip_low", "gmpo_clip_high": "clip_high"},
    "sapo": {"sapo_tau_pos": "tau_pos", "sapo_tau_neg": "tau_neg"},
    "clip_cov": {"clip_cov_ratio": "clip_cov_ratio", "clip_cov_low": "clip_cov_low", "clip_cov_high": "clip_cov_high"},
    "kl_cov": {"kl_cov_ratio": "kl_cov_ratio", "kl_cov_coef": "kl_cov_coef"},
    "engine_dppo": {"pg_clip_low": "dppo_low", "pg_clip_high": "dppo_high", "dppo_divergence": "dppo_type"},
    "dppo": {"dppo_threshold": "clip_low", "dppo_ratio_bound": "dual_clip"},
}
# Facts for which a project without separate keys takes others.
SHARED_CLIP = {"cispo_low": "clip_low", "cispo_high": "clip_high"}
LOSS_FACTS = ("clip_low", "clip_high", "dual_clip", *(f for facts in OPTIONS_OF_LOSS.values() for f in facts.values()))


def put_advantages(draft: Draft) -> None:
    """Estimator, normalisation and discounts."""
    estimator = str(draft.get("estimator", default="gae"))
    stated = draft.states("estimator")
    if stated:
        draft.put("estimator", estimator, "estimator")
        if estimator == "gae" or not draft.whole:
            draft.put("whiten_advantages", estimator == "gae", "estimator")
    if estimator == "grpo" and (stated or draft.states("grpo_std")):
        draft.put("norm_std_type", "group" if draft.value_of("grpo_std") else None, "grpo_std")
    elif stated and not draft.whole:
        draft.put("norm_std_type", "auto", "estimator")
    if stated and not draft.whole:
        draft.put("norm_mean_type", "auto", "estimator")
    if estimator.endswith(".grpo_passk") and draft.value_of("grpo_std") is False:
        draft.put("adv_estimator_args.by_std", False, "grpo_std")
    names = draft.get("gdpo_keys", default=[])  # the rewards that verl's `gdpo` normalises apart
    weights = draft.get("gdpo_weights", default=[1.0] * len(names))
    if estimator.endswith(".gdpo") and (not names or len(names) != len(weights)):
        rule = "is needed with gdpo: the rewards to normalise apart, as many as algorithm.gdpo_reward_weights"
        draft.problems.missing("algorithm.gdpo_reward_keys", rule, "[accuracy,format]")
    elif estimator.endswith(".gdpo"):
        for name, weight in zip(names, weights, strict=True):
            draft.put(f"reward_weights.{name}", float(weight), "gdpo_keys", "gdpo_weights")
    discounts = estimator in DISCOUNTING
    if draft.states("estimator", "gamma") and (discounts or not draft.whole):
        draft.put("gamma", draft.value_of("gamma") if discounts else 1.0, "gamma")
        if not discounts:
            draft.remark(["gamma"], f"{draft.raw.get('estimator', estimator)} does not discount there")
    if estimator == "gae" and draft.states("estimator", "lam"):
        draft.put("lambd", draft.value_of("lam"), "lam")
    coef = draft.first_of("reward_kl_coef", *(("kl_loss_coef",) if draft.facts.get("one_kl_coef") else ()))
    if estimator in NORMALISING and draft.get("kl_in_reward") and coef and draft.states("estimator", "kl_in_reward"):
        rule = f"subtracts the KL there before {estimator} compares the rewards of a group, here after it"
        draft.refuse("kl_in_reward", f"{rule}; put the KL into the loss, or take rloo", False)


def put_kl(draft: Draft) -> None:
    """KL in the loss and in the reward."""
    in_loss, in_reward = bool(draft.get("kl_loss")), bool(draft.get("kl_in_reward"))
    if draft.states("kl_loss"):
        draft.put("use_kl_loss", in_loss, "kl_loss")
    if in_loss and draft.states("kl_loss", "kl_loss_coef", "kl_loss_type", "kl_type"):
        draft.put("kl_loss_coef", draft.value_of("kl_loss_coef"), "kl_loss_coef")
        draft.put("kl_loss_type", draft.first_of("kl_loss_type", "kl_type"), "kl_loss_type", "kl_type")
    if draft.states("kl_in_reward"):
        draft.put("add_token_level_kl", in_reward, "kl_in_reward")
    facts = ("kl_in_reward", "reward_kl_coef", "reward_kl_type", "kl_type", "kl_control", "target_kl", "kl_horizon")
    if in_reward and draft.states(*facts, "kl_loss_coef"):
        # SkyRL has one weight for both places.
        weights = ("reward_kl_coef", "kl_loss_coef") if draft.facts.get("one_kl_coef") else ("reward_kl_coef",)
        draft.put("init_kl_coef", draft.first_of(*weights), *weights)
        draft.put("kl_penalty", draft.first_of("reward_kl_type", "kl_type"), "reward_kl_type", "kl_type")
        if draft.value_of("kl_control") == "adaptive":
            draft.put("target_kl", draft.value_of("target_kl"), "target_kl", "kl_control")
            draft.put("kl_horizon", draft.value_of("kl_horizon"), "kl_horizon")
        elif not draft.whole:
            draft.put("target_kl", None, "kl_control")


def put_loss(draft: Draft) -> None:
    """The policy loss with every option that it has."""
    variant = str(draft.get("loss", default="ppo"))
    if draft.states("loss"):
        draft.put("loss", variant, "loss")
    if draft.states("loss", *LOSS_FACTS):
        kind = variant.rpartition(".")[2]  # SkyRL's own variants are found by a path
        put_loss_options(draft, kind)
    # verl's `clip_ratio`: its losses read the two sides, which its files set to 0.2.
    both = {"clip_low", "clip_high"} <= draft.explicit
    is_read = variant in (*CLIPPING, "cispo", "gmpo", "dppo") and not both
    if is_read and "clip" in draft.explicit and draft.facts["clip"] != 0.2:
        rule = "has no effect in verl since clip_ratio_low and clip_ratio_high are 0.2 in its own files, and was all "
        draft.refuse("clip", f"{rule}there was before: write clip_ratio_low and clip_ratio_high")
    if draft.states("entropy_coef", "entropy_on"):
        on = draft.value_of("entropy_on") is not False
        draft.put("entropy_loss_coef", draft.value_of("entropy_coef") if on else 0.0, "entropy_coef", "entropy_on")


def put_loss_options(draft: Draft, variant: str) -> None:
    """Clip range and dual clip of the losses that have them, and the options that belong to one loss."""
    if variant in CLIPPING:
        low, high = float(draft.value_of("clip_low")), float(draft.value_of("clip_high"))
        draft.put("use_pg_clip_range", True, "clip_low", "clip_high")
        draft.put("pg_clip_low", min(low, 1.0), "clip_low")  # ratios are positive: 1 is as good as no bound
        draft.put("pg_clip_high", high, "clip_high")
        # Their loss bounds negative advantages: verl's `vanilla` always, SkyRL's `dual_clip`.
        if variant == "ppo" and draft.raw.get("loss", "vanilla") in draft.facts.get("dual_names", ()):
            draft.put("dual_clip_loss", True, "dual_clip", "loss")
            draft.put("dual_clip_coef", float(draft.value_of("dual_clip")), "dual_clip")
        elif draft.states("loss") and not draft.whole:
            draft.put("dual_clip_loss", False, "loss")
    for key, fact in OPTIONS_OF_LOSS.get(variant, {}).items():
        source = fact if draft.value_of(fact) is not None else SHARED_CLIP.get(fact, fact)
        draft.put(key, draft.value_of(source), source)
    if variant == "engine_dppo":
        draft.put("use_pg_clip_range", True, "dppo_low", "dppo_high")
    if variant == "dppo":
        if draft.value_of("clip_low") != draft.value_of("clip_high"):
            draft.refuse("clip_high", "must equal clip_ratio_low with this loss: dppo has one threshold here")
        divergence = "kl" if str(draft.raw.get("loss")).endswith("kl") else "tv"
        draft.put("dppo_divergence", divergence, "loss")


def put_aggregation(draft: Draft) -> None:
    """Aggregation of each term of the actor's loss into one number."""
    facts = ("aggregation", "loss", "kl_loss", "entropy_coef", "entropy_on", "norm_length")
    if not draft.states(*facts):
        return
    written, variant = str(draft.get("aggregation")), str(draft.get("loss", default="ppo"))
    forced = variant in draft.facts.get("sequence_mean_losses", ())
    policy = SEQUENCE_MEAN if forced else written
    if draft.states("aggregation") or forced:
        draft.put("loss_agg_mode", policy, "aggregation", *(("loss",) if forced else ()))
    if forced and policy != written:
        text = f"{draft.raw.get('loss', variant)} always takes the mean over responses there"
        draft.remark(["aggregation"], f"{text}; it counts for the other terms")
    modes, has_entropy = {policy}, draft.get("entropy_coef") and draft.facts.get("entropy_on") is not False
    for term, fact, used in (("kl", "kl_loss", draft.get("kl_loss")), ("entropy", "entropy_coef", has_entropy)):
        mode = str(draft.facts.get(f"{term}_aggregation", written))
        if used:
            modes.add(mode)
            if mode != policy:
                draft.put(f"{term}_loss_agg_mode", mode, "aggregation", fact)
    length = draft.value_of("norm_length")
    if length is None and draft.facts.get("norm_is_sequence"):
        length = draft.get("prompt_length", default=0) + draft.get("response_length", default=0)
    if NORM in modes and length is not None:
        draft.put("loss_norm_length", int(length), "norm_length", "aggregation")


def put_critic(draft: Draft) -> None:
    """The critic's loss: clip range and mode."""
    if "critic" not in draft.roles:
        if wait := draft.get("critic_wait"):
            text = f"the first {wait} steps train nothing there, and the actor here: 0 leaves them out"
            draft.remark(["critic_wait"], text)
        return
    if draft.states("value_clip"):
        draft.put("value_clip", draft.facts["value_clip"], "value_clip")
    if draft.states("aggregation", "value_aggregation", "estimator"):
        mode = str(draft.facts.get("value_aggregation") or draft.get("aggregation"))
        draft.put("value_loss_agg_mode", mode, "value_aggregation", "aggregation")
        if mode == NORM and draft.facts.get("norm_length") is not None and not draft.facts.get("norm_is_sequence"):
            draft.refuse("norm_length", "counts for the actor alone there; here actor and critic have one length")


def put_passes(draft: Draft) -> None:
    """Passes over a batch and their order, the same for both roles."""
    if draft.states("shuffle.actor"):
        draft.put("shuffle_mini_batches", draft.facts["shuffle.actor"], "shuffle.actor", "shuffle.critic")
    if draft.states("passes"):
        draft.put("ppo_epochs", draft.facts["passes"], "passes")
    of_actor = {
        "shuffle.critic": (draft.get("shuffle.actor", default=False), "there is one key for both"),
        "passes.critic": (draft.first_of("passes"), "there is one number of passes here"),
    }
    for fact, (value, why) in of_actor.items() if "critic" in draft.roles else ():
        if fact in draft.explicit and draft.facts[fact] != value:
            draft.refuse(fact, f"must equal the actor's: {why}")


# Steps for the keys of the algorithm that are one for all rewards, in order.
ALGORITHM = (put_bypass, put_advantages, put_kl, put_loss, put_aggregation, put_critic, put_passes, put_correction)
