"""Several turns of SkyRL as an agentic run: its environments behind ``skyrl:ID``, a prompt's samples as a group.

With ``use_conversation_multi_turn`` an observation is a message behind the response, as it is here; without it all
turns are one message of the assistant, which no run here writes.
"""

from __future__ import annotations

from typing import Any

from roll.translation.rules import Draft
from roll.translation.tables import TURNS

VALIDATION = "_val"
"""Ending of the entry that is played in validation."""
OF_ROWS = ("rewards.", "validation.", "actor_train.data_args.file_name", "actor_train.data_args.messages")
OF_SINGLE_TURNS = ("prompt_length", "response_length", "num_return_sequences_in_group")
"""Keys of a run of single turns that an agentic one does not have."""
LIMIT = "an episode ends there; here with the tokens of its last prompt and response together"


def find_episodes(draft: Draft) -> None:
    """Decide whether the environment is played, and refuse what a conversation here is not."""
    turns, name = int(draft.get("turns", default=1)), str(draft.raw.get("reward", ""))
    wanted = turns > 1 or str(draft.facts.get("reward")).startswith("skyrl:")
    if not wanted:
        draft.without_effect("one turn", "max_input", "gym_options")
        return
    if not draft.whole or not name:
        draft.refuse("turns" if turns > 1 else "reward", TURNS)
        return
    if draft.get("conversation") is False:
        rule = "writes all turns into one message of the assistant there; here each turn is a message, as with true"
        draft.refuse("conversation", rule, True)
    draft.facts["episodes"] = True
    if draft.get("max_input") is not None:
        draft.facts["prompt_length"] = draft.facts["max_input"]


def put_episodes(draft: Draft) -> None:
    """Turn the keys of a run of single turns into those of episodes; the last step."""
    if not draft.get("episodes"):
        return
    tag, keys = str(draft.raw["reward"]), dict(draft.keys)
    group, prompts = int(draft.get("samples", default=1)), int(draft.get("prompts", default=1))
    for key in keys:
        if key.startswith(OF_ROWS) or key in OF_SINGLE_TURNS:
            del draft.keys[key]
    draft.put("pipeline", "agentic")
    draft.put("rollout_batch_size", prompts * group, "prompts", "samples")
    draft.put("train_env_manager.num_env_groups", prompts, "prompts")
    draft.put("train_env_manager.group_size", group, "samples")
    draft.put("train_env_manager.tags", [tag], "reward")
    if draft.get("filter_on"):
        draft.put("train_env_manager.group_filter_config.type", "std_filter", "filter_on")
    length = int(draft.get("prompt_length", default=0)) + int(draft.get("response_length", default=0))
    draft.put("sequence_length", length, "max_input", "prompt_length", "response_length")
    draft.remark(["max_input"], LIMIT)
    put_entry(draft, tag, keys["actor_train.data_args.file_name"], "train_files")
    if "validation.data_args.file_name" in keys:
        put_entry(draft, f"{tag}{VALIDATION}", keys["validation.data_args.file_name"], "val_files")
        draft.put("val_env_manager.tags", [f"{tag}{VALIDATION}"], "val_files")
        draft.put("val_env_manager.num_env_groups", int(keys.get("val_batch_size", prompts)), "val_batch")
        for key in [key for key in keys if key.startswith("validation.generating_args.")]:
            draft.put(f"val_env_manager.{key.removeprefix('validation.')}", keys[key])


def put_entry(draft: Draft, tag: str, files: Any, fact: str) -> None:
    """An entry of ``custom_envs``."""
    entry, name, turns = f"custom_envs.{tag}", str(draft.raw["reward"]), int(draft.get("turns", default=1))
    draft.put(f"{entry}.env_type", f"skyrl:{name}", "reward")
    draft.put(f"{entry}.env_config.extras.max_turns", turns, "turns")
    for key, value in draft.get("gym_options", default={}).items():
        section, _, option = key.partition(".")
        if section == name:
            draft.put(f"{entry}.env_config.env_config.{option}", value, "gym_options")
    draft.put(f"{entry}.max_steps", turns, "turns")
    draft.put(f"{entry}.max_tokens_per_step", int(draft.get("response_length", default=0)), "response_length")
    draft.put(f"{entry}.data_args.file_name", files, fact)
