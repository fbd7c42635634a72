"""Keys of ROLL's and of older files: flat names of what is an option of a loss or an estimator here, and keys that
change nothing, which load, and one line says what decides instead.

Two tables, by the key of the choice and by the class of the section (which inherits the rows of its bases). Only the
reader of files knows them: the dataclasses and the plan do not have these keys.
"""

from __future__ import annotations

from dataclasses import fields

from roll.config.choices import (
    POLICY_LOSSES,
    ClipOptions,
    DiscountOptions,
    DualClipOptions,
    GaeOptions,
    GdpoOptions,
    GigpoOptions,
    PassAtKOptions,
    PpoOptions,
    StepOptions,
    ToprOptions,
)
from roll.config.reading.fields import RULES, FlatName

RANGE, DUAL = "use_pg_clip_range", "dual_clip_loss"
# Every other name of an option of a choice, at the top or in a role's section, with its place.
FLAT_NAMES: dict[str, dict[str, FlatName]] = {
    "estimator": {
        "adv_estimator_args": FlatName(None),
        "gamma": FlatName("gamma", DiscountOptions),
        "lambd": FlatName("lambd", GaeOptions),
        "pass_k": FlatName("k", PassAtKOptions),
        "reward_weights": FlatName("weights", GdpoOptions),
        "episode_reward_weight": FlatName("episode_weight", GigpoOptions),
        "step_reward_weight": FlatName("step_weight", GigpoOptions),
        "step_reward_gamma": FlatName("step_gamma", StepOptions),
    },
    "loss": {
        "pg_variant_args": FlatName(None),
        "actor_train.pg_variant": FlatName("name"),
        "actor_train.topr_positive_weight": FlatName("positive_weight", ToprOptions),
        "actor_train.topr_negative_weight": FlatName("negative_weight", ToprOptions),
        "pg_clip": FlatName("clip", ClipOptions),
        RANGE: FlatName("clip_low", ClipOptions, RANGE),
        "pg_clip_low": FlatName("clip_low", ClipOptions, RANGE, 0.2),
        "pg_clip_high": FlatName("clip_high", ClipOptions, RANGE, 0.2),
        DUAL: FlatName("dual_clip", DualClipOptions, DUAL),
        "dual_clip_coef": FlatName("dual_clip", DualClipOptions, DUAL, True),
        "importance_sampling": FlatName("importance_sampling", PpoOptions),
        "ratio_type": FlatName("importance_sampling", PpoOptions),
        **{
            f"{row.name}_{name}": FlatName(item.name, row.options)
            for row in POLICY_LOSSES.rows
            if row.options is not None and row.options not in (ClipOptions, DualClipOptions, PpoOptions)
            for item in fields(row.options)
            if item.name in row.options.__annotations__
            for name in (item.name, *(item.metadata[RULES].aliases if item.metadata else ()))
        },
    },
}

TOPR = "loss: {name: topr, positive_weight: 1, negative_weight: 1} is the working form"
LOSS = "the policy loss is that of loss at the top, or of actor_train"
DTYPE = "model_args.dtype decides"
BATCHES = "training_args decides"
RESHARDED = "checkpoints load under any parallel sizes"

# Keys by section, each with what decides instead (empty: nothing does). None: nothing need be said, for the key only
# serves `${...}`, or a value that would change something is refused (`roll.config.checks.keys.REFUSALS`).
DEAD_KEYS: dict[str, dict[str, str | None]] = {
    "RunConfig": {
        "base_dir": "output_dir and logging_dir decide",
        "model_download_type": "models come from the Hugging Face hub or from a folder",
        "local_rank": "",
        "offload_nccl": "",
        "num_nodes": "as many nodes are used as the device ids need",
        **dict.fromkeys(
            ("lora_rank", "lora_alpha", "lora_target"),
            "a role's own model_args.lora_target, lora_rank and lora_alpha decide, and nothing here refers to this one",
        ),
        "transfer_backend": None,
    },
    "PolicyRunConfig": {
        "save_logging_board_dir": "the tracker's own options decide",
        "reward_norm": "norm_mean_type and norm_std_type decide",
        "reward_shift": "norm_mean_type decides",
        "reward_scale": "norm_std_type decides",
        "positive_loss_coef": TOPR,
        "postive_loss_coef": TOPR,
        "use_topr_neg_loss_coef": TOPR,
        "use_topr_loss": TOPR,
        "use_policy_loss_type": "loss decides",
        "l2": "training_args.weight_decay decides",
        "use_reward_scaling": "norm_std_type decides",
        "use_reward_norm": "norm_mean_type decides",
        "add_len_reward": "",
        "dataset_filter": "actor_train.data_args.dataset_filter decides",
        "val_greedy": "validation.greedy decides",
        "val_n_sample": "validation.generating_args.num_return_sequences decides",
        "mask_type": "",
        "balance_length": "",
        "minibatch_data_iter_num": "ppo_epochs decides",
        "report_length_and_rewards": "lengths and rewards are always in the metrics",
        "length_profiler_dir": "",
        "data_seed": "seed decides",
        "generate_opt_level": "requests are always scheduled one by one",
        "reward_system_config": "",
    },
    "RLVRConfig": {"is_num_return_sequences_expand": "a prompt is computed once for all of its samples"},
    "AgenticConfig": {
        "render_save_dir": "",
        "dirty_data_mask": "",
        "open_feedback_turn": "",
        "use_token_reward": "",
        "exp_mode": "",
        "model_name": "exp_name and output_dir decide",
        "parse_tool_call_parameter_to_dict": "tool arguments have the form that the template takes",
        "skip_mock_system_prompt": "the text between turns is read off the chat template",
        "env_monitor": "step_timeout and time_limit end what hangs",
        "response_length": "custom_envs.<tag>.max_tokens_per_step decides",
        "batch_adjust_mode": "a step trains on every sample once, in optimizer steps as equal as their number allows",
    },
    "CustomEnvConfig": {
        "agent_runner_cls": "the environment is played without a proxy",
        "http_timeout": "time_limit ends an episode, rpc_timeout a call",
    },
    "EnvManagerConfig": {
        "llm_proxy": None,
        "format_penalty": "custom_envs.<tag>.env_config.format_penalty decides",
        "max_traj_per_env": "rollout_batch_size decides: a place is taken by the next episode as soon as it is free",
    },
    "RewardNormalizationConfig": {"global_scale_factor": "", "global_shift_value": ""},
    "RewardConfig": {"reward_manager_config": None},
    "DistillConfig": {"logits_transfer_backend": "log-probs travel as columns of their batch"},
    "WorkerConfig": {
        "logits_in_fp32": "softmax arithmetic is always float32",
        "apply_loss_scale": "loss denominators are always global",
        "offload_nccl": "",
        **dict.fromkeys(("pg_variant", "topr_positive_weight", "topr_negative_weight"), LOSS),
        **dict.fromkeys(("model_update_frequency", "mtp_training_mode")),
    },
    "ModelArguments": {
        "device_map": "device_mapping decides",
        "autocast_adapter_dtype": "adapters are trained in the type of master weights",
        "num_labels": None,
    },
    "TrainingArguments": {
        "fp16": DTYPE,
        "bf16": DTYPE,
        "dataloader_num_workers": "the driver reads the data",
        "max_steps": "the run's max_steps and the batch sizes decide",
        "seed": "the run's seed decides",
    },
    "GeneratingArguments": {
        "length_penalty": "it belongs to beam search",
        "logprobs": "the log-prob of each sampled token always comes with it",
        "seed": "the run's seed decides",
        "num_beams": None,
    },
    "DataArguments": {
        "eval_file_name": "validation.data_args.file_name decides",
        "dataset_type": "the file's extension decides",
        "interleave_probs": "domain_interleave_probs decides",
        "dataset_dir": "file names start from the working directory",
        **dict.fromkeys(("audio_folder", "custom_data_kwargs_func")),
    },
    "ShardedStrategyConfig": {"apply_expert_patch": "experts are fused, and every pass uses all of them"},
    "Fsdp1StrategyConfig": {"use_orig_params": "parameters keep their names and weight decay"},
    "Fsdp2StrategyConfig": {
        "tp_size": None,
        "efsdp_size": "experts are sharded over the role's ranks / ep_size",
        "model_type": "config.json of the model says its family",
    },
    "RouterConfig": {"max_running_requests": "max_running_requests at the top decides"},
    "CheckpointConfig": {"type": "output_dir decides: a folder, or the URL of a store"},
    "DeepSpeedStrategyConfig": {
        "optimizer": BATCHES,
        "scheduler": BATCHES,
        "fp16": DTYPE,
        "gradient_clipping": "max_grad_norm decides",
        "train_batch_size": BATCHES,
        "train_micro_batch_size_per_gpu": BATCHES,
        "gradient_accumulation_steps": BATCHES,
        "prescale_gradients": "gradients are plain sums",
        "zero_allow_untested_optimizer": "the optimizer is AdamW",
    },
    "MegatronStrategyConfig": {
        "max_grad_norm": "max_grad_norm of training_args or at the top decides",
        "moe_grouped_gemm": "a rank's experts are computed one after another",
        "moe_permute_fusion": "tokens are permuted by PyTorch",
        "moe_layer_recompute": "recompute_granularity decides",
        "moe_shared_expert_overlap": "shared experts come before the others",
        "apply_rope_fusion": "rotary embeddings are computed by PyTorch",
        "cross_entropy_loss_fusion": "log-probs have a head of their own",
        "overlap_param_gather": "updated parameters are gathered after each optimizer step",
        "delay_grad_reduce": "all stages reduce alike",
        "distrib_optim_fully_reshardable": RESHARDED,
        "ckpt_format": RESHARDED,
        "save_hf_model": "training_args.save_hf_model decides",
        "save_merged_model": "exports are always merged",
        "use_batched_model_update": "weights travel in buckets",
        "compile_warmup": "nothing is compiled",
        "bf16": DTYPE,
        "fp16": DTYPE,
        **dict.fromkeys(("mtp_num_layers", "fp8", "fp8_recipe", "optimizer")),
    },
    "VllmStrategyConfig": {
        "data_parallel_size": None,
        "distributed_executor_backend": "ranks of an engine are processes of its worker",
        "disable_log_stats": "the run's own metrics tell what an engine does",
        "disable_mm_preprocessor_cache": "prompts are token ids",
        "VLLM_USE_V1": "there is no other engine than V1",
    },
    "SglangStrategyConfig": {
        "grpc_mode": "the engine is in its worker; nothing is served over gRPC",
        **dict.fromkeys(("pp_size", "dp_size")),
    },
}


def dead_keys(cls: type) -> dict[str, str | None]:
    """The keys of a section that change nothing."""
    return {name: text for base in reversed(cls.__mro__) for name, text in DEAD_KEYS.get(base.__name__, {}).items()}


def dead_words(decides: str | None) -> str:
    """``has no effect; seed decides``."""
    return f"has no effect; {decides}" if decides else "has no effect"
