"""The frame of a translated run: roles, models, data, rewards, tracking, and the order in which all is put together."""

from __future__ import annotations

import re
from collections.abc import Callable

from roll.translation.algorithms import ALGORITHM
from roll.translation.distillation import put_distillation
from roll.translation.episodes import put_episodes
from roll.translation.families import LANGUAGE_PART, put_family, put_routes
from roll.translation.placement import (
    check_experts,
    device_count,
    devices,
    fit_engines,
    put_batches,
    put_devices,
    put_engine,
    put_forward_batches,
    put_optimizers,
    put_options,
    put_run_ahead,
    put_strategies,
    put_token_budgets,
)
from roll.translation.rules import Draft
from roll.translation.sampling import (
    ignores_scale,
    is_signed,
    put_group_filter,
    put_overlong,
    put_truncated,
    put_zero_variance,
)

FILE = re.compile(r"\.\w+$|[*?\[}]$|/$|^hub:")
HUB = re.compile(r"\w[\w.-]*/[\w.-]+(?::\w+)?")
TRACKERS_WITH_PROJECT = {"wandb", "swanlab", "trackio", "mlflow"}
GSM8K = "gsm8k"
FUNCTION_FILE = "roll.rewards.function_file.score"
# Rules by the values of `data_source` that verl scores so, where programs are among the rows.
BY_SOURCE = {
    "gsm8k_rule": ["openai/gsm8k"],
    "math_rule": [
        *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo"),
        *(f"numina_{name}" for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12")),
        "numina_olympiads",
    ],
    "code_sandbox": ["codecontests", "apps", "codeforces", "taco"],
}
REWARD, ROLE = "rewards.reward_model", "reward_model"


def find_roles(draft: Draft) -> None:
    """Find the sections of the run: a critic for ``gae``, a reference for a KL."""
    estimator, critic = draft.get("estimator"), draft.facts.get("critic")
    if draft.states("estimator", "critic"):
        wanted = estimator == "gae" and critic is not False
        draft.roles = (draft.roles | {"critic"}) if wanted else (draft.roles - {"critic"})
        if estimator == "gae" and critic is False:
            draft.problems.missing("critic.enable", "is false, but estimator: gae needs values", "grpo")
        if critic is False:
            draft.remark(["critic"], "no critic: keys of the critic are left out")
    if draft.states("kl_loss", "kl_in_reward"):
        used = bool(draft.get("kl_loss")) or bool(draft.get("kl_in_reward"))
        draft.roles = (draft.roles | {"reference"}) if used else (draft.roles - {"reference"})


def put_steps(draft: Draft) -> None:
    """Passes over the data become steps where the number of rows is known; what comes first ends the run there."""
    if not draft.states("epochs"):
        return
    epochs, rows, prompts, most = (draft.get(fact) for fact in ("epochs", "rows", "prompts", "steps"))
    if rows is None or prompts is None:
        text = "give --train-rows, or max_steps yourself: its default holds otherwise"
        if most is not None:
            text = f"{epochs} passes over the data end the run there, if that is sooner: give --train-rows"
        draft.remark(["epochs"] if most is None or "epochs" in draft.explicit else [], text)
        return
    steps = max(1, rows // prompts * epochs)
    if most is None or steps < most:
        draft.put("max_steps", steps, "epochs")
        draft.remark(["epochs"], f"{rows} rows // {prompts} prompts x {epochs} = {steps} steps")


def named(name: object, of_hub: bool) -> object:
    """A name of theirs as it is written here: without an ending it is a data set of the hub, or a folder."""
    if not isinstance(name, str) or FILE.search(name):
        return name
    return f"hub:{name}" if of_hub and HUB.fullmatch(name) else f"{name}/"


def put_data(draft: Draft) -> None:
    """Files, columns, template, seed, and what ends a response."""
    for fact, section in (("train_files", "actor_train"), ("val_files", "validation")):
        if draft.states(fact) and draft.facts[fact] is not None:
            names = [named(one, bool(draft.facts.get("hub_names"))) for one in draft.facts[fact]]
            draft.put(f"{section}.data_args.file_name", names, fact)
    if draft.states("train_files", "prompt_key"):
        column = draft.get("prompt_key", default="prompt")
        draft.put("actor_train.data_args.messages", column, "train_files", "prompt_key")
    if draft.get("chat_template") is not None:
        for section in ("actor_train", "validation"):
            key = f"{section}.data_args.chat_template_kwargs.chat_template"
            draft.put(key, str(draft.facts["chat_template"]), "chat_template")
    for fact, key in (("seed", "seed"), ("val_batch", "val_batch_size")):
        if draft.states(fact) and draft.get(fact) is not None and key not in draft.keys:
            draft.put(key, int(draft.facts[fact]), fact)
    if draft.whole and draft.states("val_files"):
        draft.put("validation.greedy", False, "val_temperature")  # each prompt is asked in one way there
    for fact, section in (("stop.train", "actor_infer"), ("stop.validation", "validation")):
        if draft.get(fact):
            draft.put(f"{section}.generating_args.stop_strings", draft.facts[fact], fact)
            draft.put(f"{section}.generating_args.include_stop_str_in_output", True, fact)  # as there


def put_tracking(draft: Draft) -> None:
    used = TRACKERS_WITH_PROJECT & set(draft.get("loggers", default=[]))
    if draft.states("project") and draft.facts["project"] is not None:
        if used:
            draft.put("tracker_kwargs.project", draft.facts["project"], "project")
        else:
            draft.remark(["project"], "left out: no tracker with projects is used")
    resume = draft.get("resume")
    named = draft.raw.get("resume") in ("resume_path", "from_path") or not draft.states("resume")
    if draft.states("resume_path") and draft.get("resume_path") is not None and named:
        draft.put("resume_from_checkpoint", draft.facts["resume_path"], "resume_path")
    elif draft.states("resume") and resume is not None:
        draft.put("resume_from_checkpoint", resume, "resume")


def put_adapters(draft: Draft) -> None:
    """LoRA of the policy and of the critic."""
    left_out = draft.get("lora_exclude")
    if left_out and draft.get("lora_rank", default=0) and not LANGUAGE_PART.fullmatch(str(left_out)):
        draft.refuse("lora_exclude", "has no translation: lora_target names the layers that adapters are put on")
    for suffix, section in (("", "actor_train"), (".critic", "critic")):
        rank_fact, alpha_fact, target_fact = (f"lora_{part}{suffix}" for part in ("rank", "alpha", "target"))
        rank, arguments = draft.get(rank_fact, default=0), f"{section}.model_args"
        if draft.get(f"lora_path{suffix}") is not None:
            draft.put(f"{arguments}.adapter_name_or_path", str(draft.facts[f"lora_path{suffix}"]), f"lora_path{suffix}")
        elif draft.states(rank_fact) and rank > 0:
            draft.put(f"{arguments}.lora_rank", rank, rank_fact)
            draft.put(f"{arguments}.lora_target", draft.get(target_fact, default="all-linear"), rank_fact, target_fact)
            draft.put(f"{arguments}.lora_alpha", draft.get(alpha_fact, default=16), alpha_fact, rank_fact)


def put_reward(draft: Draft) -> None:
    """The reward of a whole run; options of a rule that scores no row go."""
    played = draft.facts.get("episodes") and "reward" in draft.raw
    is_scored = played or put_reward_model(draft) or put_function(draft)
    if not is_scored and draft.get("sandbox_url"):
        for name, sources in BY_SOURCE.items():
            draft.put(f"rewards.{name}.worker_cls", name, "sandbox_url")
            draft.put(f"rewards.{name}.tag_included", sources, "sandbox_url")
            put_workers(draft, name)
        # A program's score is the share of the cases that it passes.
        draft.put("rewards.code_sandbox.reward_kwargs.partial", True, "sandbox_url")
        text = "rows of another data_source are refused when the data are read: add it to tag_included of their rule"
        draft.remark(["sandbox_url"], text)
    elif not is_scored:
        put_rule(draft)
    if draft.whole and "rewards.gsm8k_rule.worker_cls" not in draft.keys:
        for key in [key for key in draft.keys if key.startswith("rewards.gsm8k_rule.")]:
            del draft.keys[key]


def put_rule(draft: Draft) -> None:
    """The rule that the environment names, or that follows from the files' names."""
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
        for option, value in draft.facts.get("rule_options", {}).get(draft.raw.get("reward"), {}).items():
            draft.put(f"rewards.{reward}.reward_kwargs.{option}", value, "reward")
        if reward == "math_rule" and is_signed(draft) and not ignores_scale(draft):
            draft.put("rewards.math_rule.reward_kwargs.score", 2.0, "reward", "train_files")
            draft.remark(["reward" if draft.states("reward") else "train_files"], "-1 and 1 there are 0 and 2 here")
        put_workers(draft, reward)


def put_workers(draft: Draft, reward: str) -> None:
    if draft.get("reward_workers") is not None:
        draft.put(f"rewards.{reward}.world_size", max(1, draft.facts["reward_workers"]), "reward_workers")


def put_function(draft: Draft) -> bool:
    """A function in one of their files; returns False where none is named."""
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
    put_workers(draft, "custom")
    return True


def put_reward_model(draft: Draft) -> bool:
    """A classifier on the trainer's devices, or on separate ones; returns False where the run has none."""
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
    trainers = device_count(draft, "actor")
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
    if "rm_tokenizer" in draft.facts:
        read = "tokens" if draft.facts["rm_tokenizer"] is None else "chat"
        draft.put(f"{REWARD}.reward_kwargs.input", read, "rm_tokenizer")
    micro, of_all = draft.get("rm_micro"), draft.get("rm_micro_of_all")
    if micro is not None or of_all is not None:
        draft.put(f"{ROLE}.infer_batch_size", micro or max(1, of_all // count), "rm_micro", "rm_micro_of_all")
    return True


# Steps of an RLVR run, in order.
STEPS: tuple[Callable[[Draft], None], ...] = (
    put_strategies,
    put_options,
    fit_engines,
    put_engine,
    put_devices,
    check_experts,
    put_run_ahead,
    put_batches,
    put_forward_batches,
    put_token_budgets,
    put_optimizers,
    *ALGORITHM,
    put_family,
    put_routes,
    put_adapters,
    put_distillation,
    put_steps,
    put_data,
    put_reward,
    put_group_filter,
    put_zero_variance,
    put_overlong,
    put_truncated,
    put_tracking,
    put_episodes,
)
