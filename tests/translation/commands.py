"""Commands as the documents of SkyRL and verl have them, written as their users paste them."""

from __future__ import annotations

SKYRL_TRAIN = """
uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \\
    trainer.algorithm.advantage_estimator="grpo" \\
    data.train_data="['$HOME/data/gsm8k/train.parquet']" \\
    data.val_data="['$HOME/data/gsm8k/validation.parquet']" \\
    trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\
    ... # others
"""

SKYRL = """
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
    trainer.algorithm.advantage_estimator="grpo" \\
    data.train_data="['$HOME/data/gsm8k/train.parquet']" \\
    data.val_data="['$HOME/data/gsm8k/validation.parquet']" \\
    trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\
    ... # others
"""

SKYRL_PPO = (
    "python -m skyrl_train.entrypoints.main_base trainer.algorithm.advantage_estimator=gae trainer.policy.model.path=m "
    "data.train_data=[gsm8k.parquet] data.val_data=[gsm8k.parquet]"
)
"""PPO with a critic, everything else by default."""

SWITCH = {
    "deepspeed": "bash examples/gsm8k/run_gsm8k.sh trainer.strategy=deepspeed",
    "fsdp": "# bash examples/training_backends/fsdp/run_fsdp.sh (or just)\n"
    "bash examples/gsm8k/run_gsm8k.sh trainer.strategy=fsdp",
    "fsdp2": "bash examples/gsm8k/run_gsm8k.sh trainer.strategy=fsdp2",
    "fsdp of skyrl": "bash examples/train/gsm8k/run_gsm8k.sh trainer.strategy=fsdp",
    "megatron": "bash examples/train/gsm8k/run_gsm8k.sh trainer.strategy=megatron",
}

TUNING = {
    "deepspeed": """
# parameters
deepspeed_config.train.zero_optimization.offload_param.device=cpu \\

# optimizer
deepspeed_config.train.zero_optimization.offload_optimizer.device=cpu \\

# default: 1e9
deepspeed_config.train.zero_optimization.sub_group_size=1e8 \\

# default: 5e8
deepspeed_config.train.zero_optimization.reduce_bucket_size=1e8 \\
""",
    "fsdp": """
# reference in host memory
trainer.ref.fsdp_config.cpu_offload=true \\
""",
}

README_YAML = {
    "no packing": """
# no packing
trainer.use_sample_packing: false

# sizes
trainer.micro_train_batch_size_per_gpu: 8
trainer.micro_forward_batch_size_per_gpu: 32
""",
    "memory": """
# offload
trainer.policy.fsdp_config.cpu_offload: false  # policy
trainer.ref.fsdp_config.cpu_offload: true  # reference

# recomputation
trainer.policy.gradient_checkpointing: true
""",
    "fsdp2": "trainer.strategy: fsdp2\n",
    "fsdp": "trainer.strategy: fsdp\n",
}

NO_SEQ_PACK = """
# data
python examples/gsm8k/gsm8k_dataset.py

# run
export WANDB_API_KEY=<your_key_here>
bash examples/training_backends/run_no_seq_pack.sh
"""

DATA_VARIABLES = """
export DATA_TRAIN=../data/gsm8k_ppo/train.parquet
export DATA_VAL=../data/gsm8k_ppo/test.parquet
"""

BASE_ARGUMENTS = (
    DATA_VARIABLES
    + """
export BASE_ARGS="\\
actor@actor_rollout_ref.actor=ds_actor \\
critic=ds_critic \\
actor_rollout_ref.actor.strategy=deepspeed \\
trainer.use_legacy_worker_impl=enable \\
actor_rollout_ref.rollout.name=vllm \\
actor_rollout_ref.rollout.mode=async \\
actor_rollout_ref.rollout.load_format=auto \\
actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
actor_rollout_ref.rollout.max_model_len=512 \\
actor_rollout_ref.rollout.max_num_seqs=8 \\
actor_rollout_ref.rollout.max_num_batched_tokens=1024 \\
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \\
actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \\
actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
critic.model.path=Qwen/Qwen3-0.6B \\
actor_rollout_ref.model.trust_remote_code=True \\
critic.model.trust_remote_code=True \\
actor_rollout_ref.model.enable_gradient_checkpointing=True \\
actor_rollout_ref.model.use_remove_padding=True \\
actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
critic.ppo_mini_batch_size=32 \\
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
critic.ppo_micro_batch_size_per_gpu=2 \\
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \\
critic.ppo_max_token_len_per_gpu=2048 \\
actor_rollout_ref.actor.use_kl_loss=False \\
algorithm.use_kl_in_reward=False \\
data.train_files=${DATA_TRAIN} \\
data.val_files=${DATA_VAL} \\
data.train_batch_size=64 \\
data.max_prompt_length=512 \\
data.max_response_length=512 \\
data.trust_remote_code=True \\
trainer.n_gpus_per_node=2 \\
trainer.nnodes=1 \\
trainer.save_freq=0 \\
trainer.test_freq=-1 \\
trainer.val_before_train=False \\
trainer.total_training_steps=60 \\
trainer.logger=[console]"
"""
)


def verl_case(stage: int, offload: str) -> str:
    """One of the six cases of PPO under DeepSpeed."""
    name = f"zero{stage}_{offload}_offload"
    device = "cpu" if offload == "cpu" else "none"
    gate = "VERL_ENABLE_PARAM_OFFLOAD=1 \\\n" if (stage, device) == (3, "cpu") else ""
    return f"""{BASE_ARGUMENTS}
CUDA_VISIBLE_DEVICES=0,1 \\
{gate}VERL_DS_ZERO2_FP32_ACCUM_PATCH=1 \\
VERL_DS_ZERO2_STEP_EACH_MICRO=0 \\
python3 -m verl.trainer.main_ppo -cn ppo_trainer \\
  ${{BASE_ARGS}} \\
  trainer.experiment_name={name} \\
  actor_rollout_ref.actor.deepspeed.zero_stage={stage} \\
  critic.deepspeed_config.zero_stage={stage} \\
  actor_rollout_ref.actor.deepspeed.offload={device} \\
  critic.deepspeed_config.offload={device}
"""


VERL_CASES = {
    f"zero{stage}_{offload}_offload": verl_case(stage, offload) for stage in (1, 2, 3) for offload in ("no", "cpu")
}

VERL_GRPO = (
    DATA_VARIABLES
    + """
CUDA_VISIBLE_DEVICES=4,5 \\
python3 -m verl.trainer.main_ppo -cn ppo_trainer \\
  actor@actor_rollout_ref.actor=ds_actor \\
  critic=ds_critic \\
  actor_rollout_ref.actor.strategy=deepspeed \\
  actor_rollout_ref.actor.deepspeed.zero_stage=2 \\
  actor_rollout_ref.actor.deepspeed.offload=none \\
  critic.enable=False \\
  algorithm.adv_estimator=grpo \\
  algorithm.norm_adv_by_std_in_grpo=True \\
  algorithm.use_kl_in_reward=False \\
  +reward.reward_kwargs.method=flexible \\
  +reward.reward_kwargs.format_score=0.1 \\
  +reward.reward_kwargs.score=1.0 \\
  reward.num_workers=1 \\
  actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.mode=async \\
  actor_rollout_ref.rollout.n=4 \\
  actor_rollout_ref.rollout.max_model_len=1024 \\
  actor_rollout_ref.rollout.max_num_seqs=8 \\
  actor_rollout_ref.rollout.max_num_batched_tokens=2048 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \\
  actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
  actor_rollout_ref.model.trust_remote_code=True \\
  actor_rollout_ref.model.enable_gradient_checkpointing=True \\
  actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \\
  data.train_files=${DATA_TRAIN} \\
  data.val_files=${DATA_VAL} \\
  data.train_batch_size=64 \\
  data.max_prompt_length=256 \\
  data.max_response_length=512 \\
  data.filter_overlong_prompts=True \\
  data.trust_remote_code=True \\
  trainer.experiment_name=grpo_fix_60 \\
  trainer.n_gpus_per_node=2 \\
  trainer.nnodes=1 \\
  trainer.total_training_steps=60 \\
  trainer.save_freq=0 \\
  trainer.test_freq=-1 \\
  trainer.val_before_train=False \\
  trainer.logger=[console]
"""
)
