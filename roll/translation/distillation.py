"""On-policy distillation of verl: a teacher as the reference of a KL loss, or as ``teacher`` with ``opd_form``.

verl's loss is c D, alone or in addition to that of the rewards, where D is of each sampled token

- an estimate of the KL, differentiated (k2, k3, abs): our KL loss, whose reference is the teacher;
- the same as a separate advantage (``use_policy_gradient``), from the policy of each update: our ``advantage``, from
  the policy before the update, which is the same where a batch has one update;
- sum p log(p/q) over the teacher's ``topk`` tokens, without the rest: our ``topk`` with ``opd_topk_tail: ignored``.
"""

from __future__ import annotations

from roll.translation.placement import device_count, devices
from roll.translation.rules import Draft

DUAL_CLIP = 3.0  # bound of negative advantages in its own policy loss, which has no key for it
K3_CLAMP = 10.0  # both projects hold k3 within this bound anyway
# Estimators whose advantages are whitened: there without the teacher's part.
WHITENING = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
# Keys of a teacher's section, next to `inference`, which configures the engine that computes its log-probs.
OPTIONS = ("model_path", "key", "num_replicas", "enable_resource_pool", "n_gpus_per_node", "nnodes")


def find_distillation(draft: Draft) -> None:
    """Decide the form, and state what follows for the KL and the policy loss."""
    if not draft.get("distill"):
        return
    if not draft.whole:
        draft.refuse("distill", "belongs to a whole run: give the command, with its model and devices")
        return
    options = draft.get("teacher", default={})
    for name in options:
        if name not in OPTIONS and not name.startswith("inference."):
            draft.problems.add(f"distillation.teacher_model.{name}", options[name], "is no key of a teacher")
    if options.get("model_path") is None:
        draft.problems.missing("distillation.teacher_model.model_path", "is needed with distillation", "my/teacher")
    if draft.value_of("temperature") != 1.0:
        rule = "must be 1 with distillation: its teacher's log-probs are at temperature 1, the student's at this one"
        draft.refuse("temperature", rule, 1.0)
    form = "topk" if draft.value_of("distill_mode") == "topk" else "advantage" if draft.get("distill_pg") else "loss"
    draft.facts["distill_form"] = form
    if form == "topk" and draft.get("distill_pg"):
        rule = "as an advantage of the sampled token, a divergence of top-k tokens has no equal"
        draft.refuse("distill_pg", rule, False)
    with_rewards = draft.get("distill_rewards", default=True)
    # The weight of the divergence, whose key verl reads next to rewards only.
    draft.facts["distill_weight"] = float(draft.value_of("distill_coef")) if with_rewards else 1.0
    if with_rewards:
        _check_with_rewards(draft, form)
    else:
        _state_alone(draft, form)
    if form == "advantage":
        _check_single_update(draft)
    if form != "loss":
        return
    # The KL loss to the teacher.
    kind = str(draft.value_of("distill_mode"))
    if kind == "k1":
        draft.refuse("distill_mode", "is refused by verl too: its gradient does not depend on the teacher", "k3")
    for fact, value in (("kl_loss", True), ("kl_loss_coef", draft.facts["distill_weight"]), ("kl_loss_type", kind)):
        draft.state(fact, value)
    if draft.get("distill_clamp") is not None and kind != "k3":
        draft.refuse("distill_clamp", f"bounds {kind} there; here a KL loss is bounded with k3 only")


def _check_with_rewards(draft: Draft, form: str) -> None:
    """Refuse settings under which verl's two terms are not the one policy loss here, whose parts add up."""
    if form == "loss" and draft.get("kl_loss"):
        draft.refuse("kl_loss", "has a reference of its own, next to the teacher; here a run has one", False)
    if form == "topk" and draft.get("loss") in draft.facts.get("sequence_mean_losses", ()):
        draft.refuse("loss", "takes the mean over responses, distillation that of loss_agg_mode; here both have one")
    if draft.get("kl_in_reward") and form != "topk":
        draft.refuse("kl_in_reward", "has an estimator of its own, next to the teacher's; here a run has one", False)
    if form == "advantage":
        if draft.get("loss", default="ppo") != "ppo":
            rule = "next to distillation's own, vanilla: here both advantages go into one loss"
            draft.refuse("loss", rule, "vanilla")
        if str(draft.get("estimator", default="gae")).rpartition(".")[2] in WHITENING:
            draft.refuse("estimator", "whitens its advantages there without the teacher's part, here with it", "grpo")


def _state_alone(draft: Draft, form: str) -> None:
    """State what holds without rewards, where verl computes no policy loss and so no KL or entropy of it."""
    for fact, value in (("kl_loss", False), ("kl_in_reward", False), ("entropy_coef", 0.0), ("loss", "ppo")):
        draft.state(fact, value)
        if fact in draft.explicit:
            draft.remark([fact], "left out: without use_task_rewards there is no such term")
    draft.raw["loss"] = "vanilla"
    if form == "advantage":
        for fact, own in (("clip_low", "distill_low"), ("clip_high", "distill_high")):
            draft.state(fact, draft.value_of(own))
        draft.state("dual_clip", DUAL_CLIP)


def _check_single_update(draft: Draft) -> None:
    """Refuse several updates of a batch: verl recomputes this advantage from the policy of each update."""
    rule = "with distillation as an advantage, which is taken anew from the policy of each update there"
    if draft.get("mini.actor") != draft.get("prompts"):
        prompts = draft.get("prompts")
        draft.refuse("mini.actor", f"must be data.train_batch_size, {prompts}, {rule}", prompts)
    if draft.value_of("passes") not in (None, 1):
        draft.refuse("passes", f"must be 1 {rule}", 1)
    if draft.get("bypass"):
        rule = "would compare the engine's log-probs with the teacher's here, there the policy's"
        draft.refuse("bypass", rule, False)


def put_distillation(draft: Draft) -> None:
    """The teacher's section and the keys of its form."""
    form = draft.facts.get("distill_form")
    if form is None:
        return
    with_rewards, clamp = bool(draft.get("distill_rewards", default=True)), draft.get("distill_clamp")
    if form == "loss":
        draft.put("kl_loss_clamp", min(K3_CLAMP, float(clamp)) if clamp else K3_CLAMP, "distill_clamp")
        if not with_rewards:
            draft.put("rl_loss_coef", 0.0, "distill_rewards")
    else:
        draft.put("use_opd" if with_rewards else "is_pure_opd", True, "distill", "distill_rewards")
        draft.put("opd_form", form, "distill_mode", "distill_pg")
        draft.put("opd_kl_coef", draft.facts["distill_weight"], "distill_coef")
        if clamp is not None:
            draft.put("opd_clamp", float(clamp), "distill_clamp")
    if form == "advantage":
        draft.put("kl_penalty", str(draft.value_of("distill_mode")), "distill_mode")
    if form == "topk":
        draft.put("opd_objective", "forward_kl", "distill_mode")
        draft.put("opd_topk_tail", "ignored", "distill_mode")
        draft.put("opd_topk", int(draft.value_of("distill_topk")), "distill_topk")
        if draft.get("distill_floor") is not None:
            draft.put("opd_log_prob_floor", float(draft.facts["distill_floor"]), "distill_floor")
    section, options = "reference" if form == "loss" else "teacher", draft.get("teacher", default={})
    draft.put(f"{section}.model_args.model_name_or_path", str(options.get("model_path")), "teacher")
    if section == "teacher":
        draft.put("teacher.strategy_args.strategy_name", "fsdp2_infer", "teacher")
    draft.remark(["teacher"], "its log-probs are computed without an engine: the same, at temperature 1")
    # Its devices: the pool after all others, or the trainer's where it has none.
    trainers = device_count(draft, "actor")
    nodes = int(options.get("nnodes", draft.get("distill_nodes", default=0)))
    own = options.get("enable_resource_pool", draft.get("distill_pool"))
    count, start = trainers, 0
    if nodes and own is not False:
        count = nodes * int(options.get("n_gpus_per_node", draft.get("distill_gpus", default=8)))
        start = int(draft.facts.get("devices", trainers))
        draft.facts["devices"] = start + count
    draft.put(f"{section}.device_mapping", devices(start, count), "distill_gpus", "distill_nodes", "teacher")
