"""Several turns as an agentic run: a prompt's samples are a group of episodes.

SkyRL's environments are played as ``skyrl:ID``. With ``use_conversation_multi_turn`` an observation is a message
after the response; without it all turns are one message of the assistant (``context: response``).
verl's tools and interactions are played by ``agent: verl``, the loop of its ``tool_agent``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.translation.algorithms import NORM
from roll.translation.rules import Draft

AGGREGATIONS = [f"{term}loss_agg_mode" for term in ("", "kl_", "entropy_", "value_")]
VALIDATION = "_val"  # ending of the entry that is played in validation
OF_ROWS = (
    "rewards.",
    "validation.",
    *(
        f"actor_train.data_args.{name}"
        for name in ("file_name", "messages", "filter_overlong", "truncation", "shuffle")
    ),
)
# Keys of a run of single turns that an agentic one does not have.
OF_SINGLE_TURNS = ("prompt_length", "response_length", "num_return_sequences_in_group")
ALL_ROWS = "val_batch_size episodes of them are played; there all rows are"
# The reason why whole families of configurations are refused.
TURNS = "several turns, tools and agents have no translation: the agentic pipeline has keys of its own"
BY_ROW = "a row's column agent_name names its loop; without it, and without default_agent_loop, a row has one turn"
SUMMED = "the advantage there comes from the reward of the last turn, here from the sum: the same unless others pay"
LIMIT = "an episode ends there; here with the tokens of its last prompt and response together"


def find_episodes(draft: Draft) -> None:
    """Decide whether the environment is played, and refuse what a conversation here is not."""
    turns, name = int(draft.get("turns", default=1)), str(draft.raw.get("reward", ""))
    wanted = turns > 1 or str(draft.facts.get("reward")).startswith("skyrl:")
    if not wanted:
        return
    if draft.get("turn_rows"):
        # Where something counts rows of turns there: here an episode counts once.
        counting = "counts turns there; here an episode counts once, whatever its turns"
        if draft.facts.get("masks_drop_tokens"):
            rule = "makes mini-batches of turns there; here an optimizer step has whole episodes"
            draft.refuse("turn_rows", rule, False)
        elif draft.get("aggregation") not in ("token-mean", "prompt-mean"):
            draft.refuse("aggregation", f"{counting}: token_mean is the same")
        elif draft.get("kl_loss"):
            draft.refuse("kl_loss", f"is a mean over rows, which {counting}", False)
        draft.remark(["turn_rows"], SUMMED)
    if not draft.whole or not name:
        draft.refuse("turns" if turns > 1 else "reward", TURNS)
        return
    draft.facts["episodes"] = True
    if draft.get("max_input") is not None:
        draft.facts["prompt_length"] = draft.facts["max_input"]


TOOLS_TAG = "tools"
# Facts of verl's `multi_turn`, and the options of the agent that they become.
OF_TOOLS = {
    "tool_file": "tool_config_path",
    "interaction_file": "interaction_config_path",
    "agent_loop": "default_agent_loop",
    "assistant_turns": "max_assistant_turns",
    "user_turns": "max_user_turns",
    "parallel_calls": "max_parallel_calls",
    "tool_result": "max_tool_response_length",
    "truncate_side": "tool_response_truncate_side",
    "prompt_key": "prompt_key",
    "image_key": "image_key",
}


def find_tool_episodes(draft: Draft) -> None:
    """Decide whether verl's tool agent is played, and refuse what it is not here."""
    wanted = ("turns_on", "tool_file", "interaction_file")
    found = [fact for fact in wanted if draft.get(fact)]
    if draft.get("agent_loop") == "tool_agent":
        found.append("agent_loop")
    if draft.get("shown_tools") not in (None, draft.get("tool_file")):
        draft.refuse("shown_tools", "must be that of multi_turn.tool_config_path, or left out")
    if not found:
        return
    if not draft.whole:
        draft.refuse(found[0], TURNS)
        return
    for name, value in draft.get("turns_other", default={}).items():
        draft.problems.add(f"actor_rollout_ref.rollout.multi_turn.{name}", value, "is no key of multi_turn here")
    if draft.get("rm"):
        draft.refuse("rm", "is asked for single responses here: a reward function scores episodes", False)
    if draft.get("overlong_on"):
        draft.refuse("overlong_on", "counts tokens of tool results too, there; here those of single responses", False)
    draft.facts["episodes"] = True


def put_episodes(draft: Draft) -> None:
    """Turn the keys of a run of single turns into those of episodes; the last step."""
    if not draft.get("episodes"):
        return
    tag = str(draft.raw["reward"]) if "reward" in draft.raw else TOOLS_TAG
    put = put_entry if "reward" in draft.raw else put_tools
    keys = dict(draft.keys)
    files = keys.get("actor_train.data_args.file_name")
    if files is None:
        name = "data.train_data" if put is put_entry else "data.train_files"
        draft.problems.missing(name, "is needed: its rows are the tasks of the episodes", "[train.parquet]")
        return
    group, prompts = int(draft.get("samples", default=1)), int(draft.get("prompts", default=1))
    for key in keys:
        if key.startswith(OF_ROWS) or key in OF_SINGLE_TURNS:
            del draft.keys[key]
    draft.put("pipeline", "agentic")
    draft.put("rollout_batch_size", prompts * group, "prompts", "samples")
    draft.put("train_env_manager.num_env_groups", prompts, "prompts")
    draft.put("train_env_manager.group_size", group, "samples")
    draft.put("train_env_manager.tags", [tag], "reward", "turns_on")
    if draft.get("filter_on"):
        draft.put("train_env_manager.group_filter_config.type", "std_filter", "filter_on")
    length = int(draft.get("prompt_length", default=0)) + int(draft.get("response_length", default=0))
    draft.put("sequence_length", length, "max_input", "prompt_length", "response_length")
    draft.remark(["max_input"], LIMIT)
    if "critic" in draft.roles:
        draft.put("bootstrap_truncated", False, "estimator")
    if NORM in (draft.keys.get(name) for name in AGGREGATIONS) and "loss_norm_length" not in draft.keys:
        draft.put("loss_norm_length", int(draft.get("response_length", default=0)), "response_length")
    put(draft, tag, files, "train_files", keys)
    if "validation.data_args.file_name" in keys:
        put(draft, f"{tag}{VALIDATION}", keys["validation.data_args.file_name"], "val_files", keys)
        draft.put("val_env_manager.tags", [f"{tag}{VALIDATION}"], "val_files")
        draft.put("val_env_manager.num_env_groups", int(keys.get("val_batch_size", prompts)), "val_batch")
        draft.remark(["val_files"], ALL_ROWS)
        if "validation.before_train" in keys:
            draft.put("val_before_train", keys["validation.before_train"])
        for key in [key for key in keys if key.startswith("validation.generating_args.")]:
            draft.put(f"val_env_manager.{key.removeprefix('validation.')}", keys[key])
        several = draft.keys.pop("val_env_manager.generating_args.num_return_sequences", None)
        if several is not None:
            draft.put("val_env_manager.group_size", several, "val_samples")
            draft.put("val_batch_size", several * max(1, keys.get("val_batch_size", prompts) // several), "val_samples")


def put_tools(draft: Draft, tag: str, files: object, fact: str, keys: Mapping[str, Any]) -> None:
    """An entry of ``custom_envs`` that verl's tool agent plays."""
    entry, response = f"custom_envs.{tag}", int(draft.get("response_length", default=0))
    draft.put(f"{entry}.agent", "verl", "turns_on", "tool_file")
    draft.remark(["turns_on" if "turns_on" in draft.explicit else "tool_file"], BY_ROW)
    for name, option in OF_TOOLS.items():
        if draft.get(name) is not None:
            draft.put(f"{entry}.agent_config.{option}", draft.facts[name], name)
    draft.put(f"{entry}.agent_config.response_length", response, "response_length")
    if keys.get("actor_train.data_args.filter_overlong_prompts"):
        draft.put(f"{entry}.agent_config.filter_overlong_prompts", True, "filter_long")
        draft.put(f"{entry}.agent_config.prompt_length", int(draft.get("prompt_length")), "prompt_length")
    for key, value in keys.items():
        # The reward of a run of single turns as that of episodes.
        option = key.removeprefix("rewards.").partition(".")[2]
        if key.startswith("rewards.") and (option == "worker_cls" or option.startswith("reward_kwargs.")):
            draft.put(f"{entry}.verifier.{option}", value, "reward_file", "train_files")
    turns = [int(most) for most in (draft.get("assistant_turns"), draft.get("user_turns")) if most]
    most = draft.get("assistant_turns") or (int(draft.get("user_turns")) + 1 if turns else response)
    draft.put(f"{entry}.max_steps", int(most), "assistant_turns", "user_turns")
    draft.put(f"{entry}.max_tokens_per_step", response, "response_length")
    if draft.get("tool_file"):
        draft.put(f"{entry}.tool_format", draft.get("tool_format"), "tool_format")
    draft.put(f"{entry}.data_args.file_name", files, fact)
    if keys.get("actor_train.data_args.shuffle") is False and fact == "train_files":
        draft.put(f"{entry}.data_args.shuffle", False, "shuffle_rows")


def put_entry(draft: Draft, tag: str, files: object, fact: str, keys: Mapping[str, Any]) -> None:
    """An entry of ``custom_envs`` that plays an environment of SkyRL's."""
    entry, name, turns = f"custom_envs.{tag}", str(draft.raw["reward"]), int(draft.get("turns", default=1))
    draft.put(f"{entry}.env_type", f"skyrl:{name}", "reward")
    draft.put(f"{entry}.env_config.extras.max_turns", turns, "turns")
    if draft.get("conversation") is False:
        draft.put(f"{entry}.context", "response", "conversation")
    elif draft.get("turn_rows"):
        for option, value in (("context", "last"), ("history_length", turns), ("thinking", "new_sample")):
            draft.put(f"{entry}.{option}", value, "turn_rows")
    for key, value in draft.get("gym_options", default={}).items():
        section, _, option = key.partition(".")
        if section == name:
            draft.put(f"{entry}.env_config.env_config.{option}", value, "gym_options")
    draft.put(f"{entry}.max_steps", turns, "turns")
    text = "the environment alone ends an episode there, and may not read max_turns; here it ends after max_turns too"
    draft.remark(["reward"], text)
    draft.put(f"{entry}.max_tokens_per_step", int(draft.get("response_length", default=0)), "response_length")
    draft.put(f"{entry}.data_args.file_name", files, fact)
