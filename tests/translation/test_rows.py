"""Every key that the five source documents name, by the number of its row in the list of what they promise.

A line of the table: row numbers | text | our keys with their values | their keys with words of their notes. ``@N`` is
``strategy_args.strategy_name``, ``@O`` ``strategy_args.strategy_config``, ``@T`` ``training_args``; a key without a
value must not be there.
"""

from __future__ import annotations

import re

import pytest
import yaml

from roll.config.words.rows import expanded
from roll.translation.reading import read_yaml
from tests.translation import commands
from tests.translation.conftest import Translate

TEXTS = {
    "skyrl_train": commands.SKYRL_TRAIN,
    "skyrl": commands.SKYRL,
    "zero1": commands.VERL_CASES["zero1_no_offload"],
    "zero1 cpu": commands.VERL_CASES["zero1_cpu_offload"],
    "zero3 cpu": commands.VERL_CASES["zero3_cpu_offload"],
    "grpo": commands.VERL_GRPO,
    **{f"switch {name}": text for name, text in commands.SWITCH.items()},
    **{f"tuning {name}": text for name, text in commands.TUNING.items()},
}
SHORT = {
    "@N": "strategy_args.strategy_name",
    "@O": "strategy_args.strategy_config",
    "@T": "training_args",
    "@Z": "strategy_args.strategy_config.zero_optimization",
}
TABLE = """
A5 A6 | switch deepspeed | actor_train.@N=deepspeed_train; reference.@N=deepspeed_infer
A7 C11 | switch fsdp | actor_train.@N=fsdp_train; reference.@N=fsdp_infer | trainer.strategy: FSDP1
A8 | switch fsdp2 | actor_train.@N=fsdp2_train; reference.@N=fsdp2_infer
A9 | skyrl_train | actor_train.@N=fsdp2_train
B1 B3 B9 | switch fsdp of skyrl | actor_train.@N=fsdp2_train | trainer.strategy: FSDP2
B3 default | skyrl | actor_train.@N=fsdp2_train
B2 | switch megatron | actor_train.@N=megatron_train; reference.@N=megatron_infer
A20 B8 | skyrl_train | estimator=grpo
A21 | skyrl_train | actor_train.data_args.file_name=["${oc.env:HOME}/data/gsm8k/train.parquet"]
A22 | skyrl_train | validation.data_args.file_name=["${oc.env:HOME}/data/gsm8k/validation.parquet"]
A23 | skyrl_train | pretrain=Qwen/Qwen2.5-1.5B-Instruct
A24 A25 A28 | tuning deepspeed | actor_train.@Z.{offload_param.device,offload_optimizer.device}=cpu
A26 A27 | tuning deepspeed | actor_train.@Z.{sub_group_size,reduce_bucket_size}=100000000
A28 any key | deepspeed_config.train.sparse_gradients=true | actor_train.@O.deepspeed_config.sparse_gradients=true
A29 | deepspeed_config.eval.zero_optimization.stage3_prefetch_bucket_size=5e7 | \
    reference.@Z.stage3_prefetch_bucket_size=50000000
A32 B10 | tuning fsdp | reference.@O.offload_policy=true
A33 B11 | tuning fsdp | | trainer.ref.fsdp_config.cpu_offload: is_offload_states
A37 fsdp | trainer.strategy=fsdp trainer.ref.fsdp_config.cpu_offload=true | reference.@O.offload_policy=true
C5 | yaml no packing | {actor_train,reference}.use_remove_padding=false
C6 | yaml no packing | actor_train.@T.{per_device_train_batch_size,gradient_accumulation_steps}=8
C7 | yaml no packing | {actor_train,reference}.infer_batch_size=32
C11 fsdp2 | yaml fsdp2 | actor_train.@N=fsdp2_train
C11 fsdp | yaml fsdp | actor_train.@N=fsdp_train | trainer.strategy: FSDP1
C15 C16 | yaml memory | actor_train.@O.offload_policy=false; reference.@O.offload_policy=true
C17 | yaml memory | actor_train.model_args.disable_gradient_checkpointing=false
D2 | zero1 | estimator.name=gae; critic.@N=deepspeed_train; whiten_advantages=true
D7 | zero1 | actor_infer.@N=vllm | actor_rollout_ref.rollout.mode: always scheduled one by one
D14 D15 D21 D61 | zero3 cpu | {actor_train,critic}.@O.offload_param=true
D22 D65 | zero1 | {actor_train,critic}.@O.fp32_grad_accumulation=true
D23 D65 | zero1 | {actor_train,critic}.@O.step_each_micro_batch=false
D24 | zero1 | | --config-name: ppo_trainer
D25 D27 | zero1 | actor_train.@N=deepspeed_train | actor@actor_rollout_ref.actor: names the backend
D26 | zero1 | critic.@N=deepspeed_train | critic: names the backend
D28 | zero1 | | trainer.use_legacy_worker_impl: one implementation
D29 D30 | zero1 | actor_infer.@O.load_format=auto; actor_infer.@O.tensor_parallel_size=1
D31 | zero1 | actor_infer.@O.max_model_len=512; prompt_length=511; response_length=512 | \
    actor_rollout_ref.rollout.max_model_len: less than prompt 512 + response 512
D32 D33 | zero1 | actor_infer.@O.max_num_seqs=8; actor_infer.@O.max_num_batched_tokens=1024
D34 | zero1 | actor_train.infer_batch_size=1
D35 | zero1 | actor_infer.@O.gpu_memory_utilization=0.2
D36 | zero1 | pretrain=Qwen/Qwen3-0.6B; critic.model_args.model_name_or_path=Qwen/Qwen3-0.6B
D37 | zero1 | {actor_train,actor_infer,critic}.model_args.trust_remote_code=true | \
    data.trust_remote_code: model_args.trust_remote_code
D38 D39 | zero1 | actor_train.model_args.disable_gradient_checkpointing=false; actor_train.use_remove_padding=true
D40 D41 | zero1 | {actor_train,critic}.@T.per_device_train_batch_size=2; \
    {actor_train,critic}.@T.gradient_accumulation_steps=8 | \
    critic.ppo_mini_batch_size: 32 prompts x 1 = 32 samples an optimizer step = 8 micro-batches of 2 on 2
D42 | zero1 | {actor_train,critic}.max_tokens_per_microbatch_in_train | \
    critic.ppo_max_token_len_per_gpu: without use_dynamic_bsz it has no effect
D43 D44 | zero1 | use_kl_loss=false; reference.@N; add_token_level_kl=false
D45 | zero1 | actor_train.data_args.file_name=[../data/gsm8k_ppo/train.parquet]; \
    validation.data_args.file_name=[../data/gsm8k_ppo/test.parquet]
D46 D47 | zero1 | rollout_batch_size=64; response_length=512
D48 | zero1 | {actor_train,actor_infer,critic}.device_mapping=list(range(0,2)); num_gpus_per_node=2
D49 D50 D51 D52 | zero1 | save_steps=0; eval_steps=0; validation.before_train=false; max_steps=60
D53 | zero1 | track_with=[stdout]
D54 | zero1 | | CUDA_VISIBLE_DEVICES: counted within it, from 0
D59 | zero1 cpu | actor_train.@O.offload=cpu | critic.deepspeed_config.offload: ZeRO-1: none
D62 D63 | zero3 cpu | {actor_train,critic}.@O.zero_stage=3
D63 other spelling | actor_rollout_ref.actor.deepspeed_config.offload=cpu | actor_train.@O.offload=cpu
D64 | zero1 | exp_name=zero1_no_offload
D3 critic.enable | grpo | critic.@N | critic: left out: no critic in this run; critic.enable: left out
D55 D68 | grpo | rewards.gsm8k_rule.reward_kwargs.method=flexible
D66 D67 | grpo | estimator=grpo; norm_std_type=group
D67 false | algorithm.norm_adv_by_std_in_grpo=False | norm_std_type=null
D69 D70 D71 | grpo | rewards.gsm8k_rule.reward_kwargs.format_score=0.1; rewards.gsm8k_rule.reward_kwargs.score=1.0
D72 D73 | grpo | rewards.gsm8k_rule.world_size=1; num_return_sequences_in_group=4
D74 | grpo | actor_infer.@O.max_model_len=1024; actor_infer.@O.max_num_batched_tokens=2048; \
    actor_infer.@O.max_num_seqs=8
D75 | grpo | actor_train.@T.per_device_train_batch_size=1; actor_train.@T.gradient_accumulation_steps=64
D76 D77 | grpo | prompt_length=256; response_length=512; actor_train.data_args.filter_overlong_prompts=true
D78 | grpo | actor_train.@O.zero_stage=2; actor_train.@O.offload=none
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines(), ids=lambda row: row.partition(" |")[0])
def test_row(row: str, translated: Translate) -> None:
    for short, full in SHORT.items():
        row = row.replace(short, full)
    _, text, ours, says = (cell.strip() for cell in re.split(r" \|(?= )", f"{row} | | ")[:4])
    if text.startswith("yaml "):
        translation = translated(read_yaml(commands.README_YAML[text.removeprefix("yaml ")], "theirs.yaml"))
    else:
        translation = translated(TEXTS.get(text, text))
    for pair in filter(None, ours.split("; ")):
        keys, equals, value = pair.partition("=")
        for key in expanded(keys):
            assert translation.keys.get(key, ...) == (yaml.safe_load(value) if equals else ...), key
    said = {note.theirs: note.text for note in translation.notes}
    for pair in filter(None, says.split("; ")):
        key, _, words = pair.partition(": ")
        assert words in said[key], key


@pytest.mark.parametrize("name", commands.VERL_CASES)
def test_stage_and_offload_of_the_six_cases(name: str, translated: Translate) -> None:
    """D56 to D61: stage and offload as asked for, for each role."""
    keys = translated(commands.VERL_CASES[name]).keys
    for options in ("actor_train.strategy_args.strategy_config", "critic.strategy_args.strategy_config"):
        assert keys[f"{options}.zero_stage"] == int(name[4])
        assert keys[f"{options}.offload"] == ("cpu" if "cpu" in name else "none")
        assert keys.get(f"{options}.offload_param", False) == (name == "zero3_cpu_offload")
