"""Every key that the five source documents name, by the number of its row in the list of what they promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from roll.translation.engine import Translation
from roll.translation.reading import read_yaml
from tests.translation import commands
from tests.translation.conftest import Translate

ACTOR, ENGINE, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"
NAME, OPTIONS = "strategy_args.strategy_name", "strategy_args.strategy_config"
HOME = "${oc.env:HOME}/data/gsm8k"


@dataclass(frozen=True)
class Row:
    """A row's key in the translation of a text."""

    name: str
    text: str
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of ours with their values; ``...`` for a key that must not be there."""
    says: dict[str, str] = field(default_factory=dict)
    """A key of theirs, and words of what is said about it."""


ZERO1, ZERO1_CPU = commands.VERL_CASES["zero1_no_offload"], commands.VERL_CASES["zero1_cpu_offload"]
ZERO3_CPU, GRPO = commands.VERL_CASES["zero3_cpu_offload"], commands.VERL_GRPO

SKYRL_ROWS = (
    Row(
        "A5 A6",
        commands.SWITCH["deepspeed"],
        {f"{ACTOR}.{NAME}": "deepspeed_train", f"{REFERENCE}.{NAME}": "deepspeed_infer"},
    ),
    Row(
        "A7 C11",
        commands.SWITCH["fsdp"],
        {f"{ACTOR}.{NAME}": "fsdp_train", f"{REFERENCE}.{NAME}": "fsdp_infer"},
        {"trainer.strategy": "FSDP1"},
    ),
    Row("A8", commands.SWITCH["fsdp2"], {f"{ACTOR}.{NAME}": "fsdp2_train", f"{REFERENCE}.{NAME}": "fsdp2_infer"}),
    Row("A9", commands.SKYRL_TRAIN, {f"{ACTOR}.{NAME}": "fsdp2_train"}),
    Row(
        "B1 B3 B9", commands.SWITCH["fsdp of skyrl"], {f"{ACTOR}.{NAME}": "fsdp2_train"}, {"trainer.strategy": "FSDP2"}
    ),
    Row("B3 default", commands.SKYRL, {f"{ACTOR}.{NAME}": "fsdp2_train"}),
    Row(
        "B2",
        commands.SWITCH["megatron"],
        {f"{ACTOR}.{NAME}": "megatron_train", f"{REFERENCE}.{NAME}": "megatron_infer"},
    ),
    Row("A20 B8", commands.SKYRL_TRAIN, {"estimator": "grpo"}),
    Row("A21", commands.SKYRL_TRAIN, {f"{ACTOR}.data_args.file_name": [f"{HOME}/train.parquet"]}),
    Row("A22", commands.SKYRL_TRAIN, {"validation.data_args.file_name": [f"{HOME}/validation.parquet"]}),
    Row("A23", commands.SKYRL_TRAIN, {"pretrain": "Qwen/Qwen2.5-1.5B-Instruct"}),
    Row("A24 A28", commands.TUNING["deepspeed"], {f"{ACTOR}.{OPTIONS}.zero_optimization.offload_param.device": "cpu"}),
    Row("A25", commands.TUNING["deepspeed"], {f"{ACTOR}.{OPTIONS}.zero_optimization.offload_optimizer.device": "cpu"}),
    Row("A26", commands.TUNING["deepspeed"], {f"{ACTOR}.{OPTIONS}.zero_optimization.sub_group_size": 100_000_000}),
    Row("A27", commands.TUNING["deepspeed"], {f"{ACTOR}.{OPTIONS}.zero_optimization.reduce_bucket_size": 100_000_000}),
    Row(
        "A28 any key",
        "deepspeed_config.train.sparse_gradients=true",
        {f"{ACTOR}.{OPTIONS}.deepspeed_config.sparse_gradients": True},
    ),
    Row(
        "A29",
        "deepspeed_config.eval.zero_optimization.stage3_prefetch_bucket_size=5e7",
        {f"{REFERENCE}.{OPTIONS}.zero_optimization.stage3_prefetch_bucket_size": 50_000_000},
    ),
    Row("A32 B10", commands.TUNING["fsdp"], {f"{REFERENCE}.{OPTIONS}.offload_policy": True}),
    Row("A33 B11", commands.TUNING["fsdp"], says={"trainer.ref.fsdp_config.cpu_offload": "is_offload_states"}),
    Row(
        "A37 fsdp",
        "trainer.strategy=fsdp trainer.ref.fsdp_config.cpu_offload=true",
        {f"{REFERENCE}.{OPTIONS}.offload_policy": True},
    ),
)
README_ROWS = (
    Row(
        "C5",
        commands.README_YAML["no packing"],
        {f"{ACTOR}.use_remove_padding": False, f"{REFERENCE}.use_remove_padding": False},
    ),
    Row(
        "C6",
        commands.README_YAML["no packing"],
        {
            f"{ACTOR}.training_args.per_device_train_batch_size": 8,
            f"{ACTOR}.training_args.gradient_accumulation_steps": 8,
        },
    ),
    Row(
        "C7", commands.README_YAML["no packing"], {f"{ACTOR}.infer_batch_size": 32, f"{REFERENCE}.infer_batch_size": 32}
    ),
    Row("C11 fsdp2", commands.README_YAML["fsdp2"], {f"{ACTOR}.{NAME}": "fsdp2_train"}),
    Row("C11 fsdp", commands.README_YAML["fsdp"], {f"{ACTOR}.{NAME}": "fsdp_train"}, {"trainer.strategy": "FSDP1"}),
    Row("C15", commands.README_YAML["memory"], {f"{ACTOR}.{OPTIONS}.offload_policy": False}),
    Row("C16", commands.README_YAML["memory"], {f"{REFERENCE}.{OPTIONS}.offload_policy": True}),
    Row("C17", commands.README_YAML["memory"], {f"{ACTOR}.model_args.disable_gradient_checkpointing": False}),
)
PPO_ROWS = (
    Row("D2", ZERO1, {"estimator.name": "gae", f"{CRITIC}.{NAME}": "deepspeed_train", "whiten_advantages": True}),
    Row("D7", ZERO1, {f"{ENGINE}.{NAME}": "vllm"}, {"actor_rollout_ref.rollout.mode": "always scheduled one by one"}),
    Row(
        "D14 D15 D21 D61",
        ZERO3_CPU,
        {f"{ACTOR}.{OPTIONS}.offload_param": True, f"{CRITIC}.{OPTIONS}.offload_param": True},
    ),
    Row(
        "D22 D65",
        ZERO1,
        {f"{ACTOR}.{OPTIONS}.fp32_grad_accumulation": True, f"{CRITIC}.{OPTIONS}.fp32_grad_accumulation": True},
    ),
    Row(
        "D23 D65",
        ZERO1,
        {f"{ACTOR}.{OPTIONS}.step_each_micro_batch": False, f"{CRITIC}.{OPTIONS}.step_each_micro_batch": False},
    ),
    Row("D24", ZERO1, says={"--config-name": "ppo_trainer"}),
    Row(
        "D25 D27", ZERO1, {f"{ACTOR}.{NAME}": "deepspeed_train"}, {"actor@actor_rollout_ref.actor": "names the backend"}
    ),
    Row("D26", ZERO1, {f"{CRITIC}.{NAME}": "deepspeed_train"}, {"critic": "names the backend"}),
    Row("D28", ZERO1, says={"trainer.use_legacy_worker_impl": "one implementation"}),
    Row("D29", ZERO1, {f"{ENGINE}.{OPTIONS}.load_format": "auto"}),
    Row("D30", ZERO1, {f"{ENGINE}.{OPTIONS}.tensor_parallel_size": 1}),
    Row(
        "D31",
        ZERO1,
        {f"{ENGINE}.{OPTIONS}.max_model_len": 512, "prompt_length": 511, "response_length": 512},
        {"actor_rollout_ref.rollout.max_model_len": "less than prompt 512 + response 512"},
    ),
    Row("D32", ZERO1, {f"{ENGINE}.{OPTIONS}.max_num_seqs": 8}),
    Row("D33", ZERO1, {f"{ENGINE}.{OPTIONS}.max_num_batched_tokens": 1024}),
    Row("D34", ZERO1, {f"{ACTOR}.infer_batch_size": 1}),
    Row("D35", ZERO1, {f"{ENGINE}.{OPTIONS}.gpu_memory_utilization": 0.2}),
    Row("D36", ZERO1, {"pretrain": "Qwen/Qwen3-0.6B", f"{CRITIC}.model_args.model_name_or_path": "Qwen/Qwen3-0.6B"}),
    Row(
        "D37",
        ZERO1,
        {f"{role}.model_args.trust_remote_code": True for role in (ACTOR, ENGINE, CRITIC)},
        {"data.trust_remote_code": "model_args.trust_remote_code"},
    ),
    Row("D38", ZERO1, {f"{ACTOR}.model_args.disable_gradient_checkpointing": False}),
    Row("D39", ZERO1, {f"{ACTOR}.use_remove_padding": True}),
    Row(
        "D40 D41",
        ZERO1,
        {
            f"{role}.training_args.{key}": value
            for role in (ACTOR, CRITIC)
            for key, value in (("per_device_train_batch_size", 2), ("gradient_accumulation_steps", 8))
        },
        {
            "critic.ppo_mini_batch_size": "32 prompts x 1 = 32 samples an optimizer step = 8 micro-batches of 2 on 2",
        },
    ),
    Row(
        "D42",
        ZERO1,
        {f"{ACTOR}.max_tokens_per_microbatch_in_train": ..., f"{CRITIC}.max_tokens_per_microbatch_in_train": ...},
        {"critic.ppo_max_token_len_per_gpu": "without use_dynamic_bsz it has no effect"},
    ),
    Row("D43", ZERO1, {"use_kl_loss": False, f"{REFERENCE}.{NAME}": ...}),
    Row("D44", ZERO1, {"add_token_level_kl": False}),
    Row(
        "D45",
        ZERO1,
        {
            f"{ACTOR}.data_args.file_name": ["../data/gsm8k_ppo/train.parquet"],
            "validation.data_args.file_name": ["../data/gsm8k_ppo/test.parquet"],
        },
    ),
    Row("D46", ZERO1, {"rollout_batch_size": 64}),
    Row("D47", ZERO1, {"response_length": 512}),
    Row(
        "D48",
        ZERO1,
        {f"{role}.device_mapping": "list(range(0,2))" for role in (ACTOR, ENGINE, CRITIC)} | {"num_gpus_per_node": 2},
    ),
    Row("D49", ZERO1, {"save_steps": 0}),
    Row("D50", ZERO1, {"eval_steps": 0}),
    Row("D51", ZERO1, {"validation.before_train": False}),
    Row("D52", ZERO1, {"max_steps": 60}),
    Row("D53", ZERO1, {"track_with": ["stdout"]}),
    Row("D54", ZERO1, says={"CUDA_VISIBLE_DEVICES": "counted within it, from 0"}),
    Row("D59", ZERO1_CPU, {f"{ACTOR}.{OPTIONS}.offload": "cpu"}, {"critic.deepspeed_config.offload": "ZeRO-1: none"}),
    Row("D62 D63", ZERO3_CPU, {f"{ACTOR}.{OPTIONS}.zero_stage": 3, f"{CRITIC}.{OPTIONS}.zero_stage": 3}),
    Row(
        "D63 other spelling",
        "actor_rollout_ref.actor.deepspeed_config.offload=cpu",
        {f"{ACTOR}.{OPTIONS}.offload": "cpu"},
    ),
    Row("D64", ZERO1, {"exp_name": "zero1_no_offload"}),
)
GRPO_ROWS = (
    Row(
        "D3 critic.enable",
        GRPO,
        {f"{CRITIC}.{NAME}": ...},
        {"critic": "left out: no critic in this run", "critic.enable": "left out"},
    ),
    Row("D55 D68", GRPO, {"rewards.gsm8k_rule.reward_kwargs.method": "flexible"}),
    Row("D66", GRPO, {"estimator": "grpo"}),
    Row("D67", GRPO, {"norm_std_type": "group"}),
    Row("D67 false", "algorithm.norm_adv_by_std_in_grpo=False", {"norm_std_type": None}),
    Row("D69 D71", GRPO, {"rewards.gsm8k_rule.reward_kwargs.format_score": 0.1}),
    Row("D70", GRPO, {"rewards.gsm8k_rule.reward_kwargs.score": 1.0}),
    Row("D72", GRPO, {"rewards.gsm8k_rule.world_size": 1}),
    Row("D73", GRPO, {"num_return_sequences_in_group": 4}),
    Row(
        "D74",
        GRPO,
        {
            f"{ENGINE}.{OPTIONS}.max_model_len": 1024,
            f"{ENGINE}.{OPTIONS}.max_num_batched_tokens": 2048,
            f"{ENGINE}.{OPTIONS}.max_num_seqs": 8,
        },
    ),
    Row(
        "D75",
        GRPO,
        {
            f"{ACTOR}.training_args.per_device_train_batch_size": 1,
            f"{ACTOR}.training_args.gradient_accumulation_steps": 64,
        },
    ),
    Row("D76", GRPO, {"prompt_length": 256, "response_length": 512}),
    Row("D77", GRPO, {"actor_train.data_args.filter_overlong_prompts": True}),
    Row("D78", GRPO, {f"{ACTOR}.{OPTIONS}.zero_stage": 2, f"{ACTOR}.{OPTIONS}.offload": "none"}),
)
ROWS = (*SKYRL_ROWS, *PPO_ROWS, *GRPO_ROWS)


def check(row: Row, translation: Translation) -> None:
    for key, value in row.keys.items():
        assert translation.keys.get(key, ...) == value, key
    said = {note.theirs: note.text for note in translation.notes}
    for key, words in row.says.items():
        assert words in said[key], key


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row, translated: Translate) -> None:
    check(row, translated(row.text))


@pytest.mark.parametrize("row", README_ROWS, ids=lambda row: row.name)
def test_row_of_a_yaml_file(row: Row, translated: Translate) -> None:
    check(row, translated(read_yaml(row.text, "theirs.yaml")))


@pytest.mark.parametrize("name", commands.VERL_CASES)
def test_stage_and_offload_of_the_six_cases(name: str, translated: Translate) -> None:
    """D56 to D61: stage and offload as asked for, for each role."""
    keys = translated(commands.VERL_CASES[name]).keys
    for role in (ACTOR, CRITIC):
        assert keys[f"{role}.{OPTIONS}.zero_stage"] == int(name[4])
        assert keys[f"{role}.{OPTIONS}.offload"] == ("cpu" if "cpu" in name else "none")
        assert keys.get(f"{role}.{OPTIONS}.offload_param", False) == (name == "zero3_cpu_offload")
