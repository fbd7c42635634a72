"""Rewards of a translated run: a rule by the data's name, a reward model with its role, or a function in a file."""

from __future__ import annotations

from roll.translation.draft import Draft
from roll.translation.placement import devices

GSM8K = "gsm8k"
FUNCTION_FILE = "roll.rewards.function_file.score"
REWARD, ROLE = "rewards.reward_model", "reward_model"


def put_reward(draft: Draft) -> None:
    """The reward of a whole run: named by its environment, or told by the files' names."""
    if draft.facts.get("rewards_set") or put_reward_model(draft) or put_function(draft):
        return
    files = [str(name) for name in draft.get("train_files", default=[])]
    reward = draft.get("reward") or ("gsm8k_rule" if files and all(GSM8K in name.lower() for name in files) else None)
    own = [key for key in draft.keys if key.startswith("rewards.gsm8k_rule.")]
    if draft.whole or draft.states("reward"):
        if reward is None:
            reward = "gsm8k_rule" if own else "math_rule"
            text = f"{reward} is assumed for every row: their files name the reward by their column data_source"
            draft.remark(["train_files"], text)
        draft.put(f"rewards.{reward}.worker_cls", reward, "reward", "train_files")
        draft.put(f"rewards.{reward}.tag_included", None, "reward", "train_files")
        if reward == "code_sandbox":
            draft.put(f"rewards.{reward}.reward_kwargs.partial", False, "reward")
        if draft.get("reward_workers") is not None:
            draft.put(f"rewards.{reward}.world_size", max(1, draft.facts["reward_workers"]), "reward_workers")


def put_function(draft: Draft) -> bool:
    """A function in a file of theirs; False: there is none."""
    path = draft.get("reward_file")
    if path is None:
        return False
    draft.put("rewards.custom.worker_cls", FUNCTION_FILE, "reward_file")
    draft.put("rewards.custom.tag_included", None, "reward_file")
    draft.put("rewards.custom.reward_kwargs.path", str(path), "reward_file")
    if draft.get("reward_function") is not None:
        draft.put("rewards.custom.reward_kwargs.name", str(draft.facts["reward_function"]), "reward_function")
    for name, value in draft.get("reward_options", default={}).items():
        draft.put(f"rewards.custom.reward_kwargs.options.{name}", value, "reward_options")
    if draft.get("reward_workers") is not None:
        draft.put("rewards.custom.world_size", max(1, draft.facts["reward_workers"]), "reward_workers")
    return True


def put_reward_model(draft: Draft) -> bool:
    """A classifier on the trainer's devices, or on its own; False: there is none."""
    if not draft.get("rm"):
        draft.remark(["rm_path"], "left out: no reward model in this run")
        return False
    if draft.get("reward_file") is not None:
        rule = (
            "cannot go with a reward model: such a function asks their server of it; rewards.<name>.components combines"
        )
        draft.problems.add("custom_reward_function.path", draft.facts["reward_file"], rule)
        return True
    path = draft.get("rm_path")
    if path is None:
        draft.problems.missing("reward_model.model.path", "is needed with reward_model.enable", "owner/reward-model")
        return True
    own = bool(draft.get("rm_own"))
    trainers = int(draft.get("gpus.actor", "gpus", default=1)) * int(draft.get("nodes.actor", "nodes", default=1))
    count = int(draft.get("rm_gpus", default=8)) * int(draft.get("rm_nodes", default=1)) if own else trainers
    draft.put(f"{REWARD}.worker_cls", ROLE, "rm")
    draft.put(f"{REWARD}.tag_included", None, "rm")
    draft.put(f"{ROLE}.model_args.model_name_or_path", str(path), "rm_path")
    draft.put(f"{ROLE}.model_args.model_type", "auto_sequence_classification", "rm")
    draft.put(f"{ROLE}.model_args.dtype", "bf16", "rm")
    draft.put(f"{ROLE}.strategy_args.strategy_name", "hf_infer", "rm")
    mapping = devices(int(draft.facts.get("devices", trainers)) if own else 0, count)
    draft.put(f"{ROLE}.device_mapping", mapping, "rm", "rm_own", "rm_gpus", "rm_nodes")
    if draft.get("rm_remote_code"):
        draft.put(f"{ROLE}.model_args.trust_remote_code", True, "rm_remote_code")
    if "rm_tokenizer" in draft.facts and draft.facts["rm_tokenizer"] is None:
        draft.put(f"{REWARD}.reward_kwargs.input", "tokens", "rm_tokenizer")
    micro, of_all = draft.get("rm_micro"), draft.get("rm_micro_of_all")
    if micro is not None or of_all is not None:
        draft.put(f"{ROLE}.infer_batch_size", micro or max(1, of_all // count), "rm_micro", "rm_micro_of_all")
    return True
