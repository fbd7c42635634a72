"""Keys of older files that change nothing: they load, and one line says what decides instead.

One table, by the class of the section (which inherits the rows of its bases). The keys are part of the schema, of
``roll explain`` and of the reference page, and are no fields of the dataclasses: nothing could read them.
"""

from __future__ import annotations

from dataclasses import Field, field, make_dataclass
from functools import cache
from typing import Any

from roll.config.reading.fields import rules

OLDER_FILES = "Accepted for older files."
NOWHERE = "Accepted for ROLL's files, where nothing reads it, either."
EXPERT_FILES = "Accepted for files of mixture-of-experts models."
TOPR_POSITIVE = "pg_variant: topr with topr_positive_weight is the working form"
TOPR = "pg_variant: topr with topr_positive_weight and topr_negative_weight is the working form"
DTYPE = "model_args.dtype decides"
BATCHES = "training_args decides"
ONE_BY_ONE = "a rank's experts are computed one after another: grouped products need a package without a CPU build"


class Legacy:
    """A key that is accepted and changes nothing.

    Args:
        decides: what decides instead, for the user; empty: nothing does.
        text: of the reference.
        options: further :class:`~roll.config.reading.fields.FieldRules`, which a value must satisfy all the same.
    """

    def __init__(
        self, name: str, hint: Any, default: Any, decides: str, *, text: str = OLDER_FILES, **options: Any
    ) -> None:
        self.name, self.hint, self.text = name, hint, text
        metadata = rules(inert=decides, **options)
        self.field: Any = (
            field(default_factory=dict, metadata=metadata)
            if default == {}
            else field(default=default, metadata=metadata)
        )


LEGACY_KEYS: dict[str, tuple[Legacy, ...]] = {
    "RunConfig": (
        Legacy("base_dir", str, "./output", "output_dir and logging_dir decide"),
        Legacy(
            "model_download_type",
            str | None,
            None,
            "models come from the Hugging Face hub or from a folder",
            choices=("HUGGINGFACE_HUB", "MODELSCOPE"),
        ),
        Legacy("local_rank", int, -1, ""),
        Legacy("offload_nccl", bool, False, ""),
    ),
    "OlderRLVRKeys": (
        Legacy("save_logging_board_dir", str | None, None, "the tracker's own options decide"),
        Legacy("reward_norm", str | None, None, "norm_mean_type and norm_std_type decide"),
        Legacy("reward_shift", bool, False, "norm_mean_type decides"),
        Legacy("reward_scale", bool, False, "norm_std_type decides"),
        Legacy("positive_loss_coef", float | str | None, None, TOPR_POSITIVE, aliases=("postive_loss_coef",)),
        Legacy("use_topr_neg_loss_coef", float | str | None, None, TOPR),
        Legacy("use_topr_loss", bool | None, None, TOPR),
        Legacy("use_policy_loss_type", str | None, None, "pg_variant decides"),
        Legacy("l2", float | None, None, "training_args.weight_decay decides"),
        Legacy("use_reward_scaling", bool | None, None, "norm_std_type decides"),
        Legacy("use_reward_norm", bool | None, None, "norm_mean_type decides"),
        Legacy("add_len_reward", bool | None, None, ""),
        Legacy(
            "dataset_filter",
            str | list[Any] | dict[str, Any] | None,
            None,
            "actor_train.data_args.dataset_filter decides",
        ),
        Legacy("val_greedy", bool | None, None, "validation.greedy decides"),
        Legacy("val_n_sample", int | None, None, "validation.generating_args.num_return_sequences decides"),
        Legacy("mask_type", str | None, None, ""),
        Legacy("balance_length", bool | None, None, ""),
        Legacy("minibatch_data_iter_num", int | None, None, "ppo_epochs decides"),
        Legacy("report_length_and_rewards", bool | None, None, "lengths and rewards are always in the metrics"),
        Legacy("length_profiler_dir", str | None, None, ""),
        Legacy("data_seed", int | None, None, "seed decides"),
        Legacy("generate_opt_level", int, 1, "requests are always scheduled one by one", ge=0, le=1),
        Legacy("reward_system_config", dict[str, Any], {}, ""),
    ),
    "AgenticConfig": (
        Legacy("render_save_dir", str | None, None, "", text=NOWHERE),
        Legacy("dirty_data_mask", bool | None, None, "", text=NOWHERE),
        Legacy("open_feedback_turn", bool | None, None, "", text=NOWHERE),
        Legacy("use_token_reward", bool | None, None, "", text=NOWHERE),
        Legacy("exp_mode", str | None, None, "", text=NOWHERE),
        Legacy("model_name", str | None, None, "exp_name and output_dir decide"),
        Legacy(
            "parse_tool_call_parameter_to_dict", bool, False, "tool arguments have the form that the template takes"
        ),
        Legacy("skip_mock_system_prompt", bool, False, "the text between turns is read off the chat template"),
        Legacy("env_monitor", dict[str, Any], {}, "reset_timeout, step_timeout and time_limit end what hangs"),
    ),
    "EnvManagerConfig": (
        Legacy("format_penalty", float, 0.0, "custom_envs.<tag>.env_config.format_penalty decides", text=NOWHERE),
    ),
    "RewardNormalizationConfig": (
        Legacy("global_scale_factor", float | None, None, "", text=NOWHERE),
        Legacy("global_shift_value", float | None, None, "", text=NOWHERE),
    ),
    "DistillConfig": (
        Legacy("logits_transfer_backend", str, "ipc+nccl", "the teacher's log-probs travel as columns of their batch"),
    ),
    "RLVRConfig": (
        Legacy("is_num_return_sequences_expand", bool, False, "a prompt is computed once for all of its samples"),
    ),
    "ModelArguments": (
        Legacy("device_map", str, "balanced", "device_mapping decides"),
        Legacy("autocast_adapter_dtype", bool, True, "adapters are trained in the type of master weights"),
    ),
    "TrainingArguments": (
        Legacy("fp16", bool | None, None, DTYPE),
        Legacy("bf16", bool | None, None, DTYPE),
        Legacy("dataloader_num_workers", int, 0, "the driver reads the data", ge=0),
    ),
    "GeneratingArguments": (
        Legacy("length_penalty", float, 1.0, "it belongs to beam search"),
        Legacy("logprobs", int, 0, "the log-prob of each sampled token always comes with it", ge=0),
    ),
    "WorkerConfig": (
        Legacy("logits_in_fp32", bool, True, "softmax arithmetic is always float32"),
        Legacy("apply_loss_scale", bool, True, "loss denominators are always global"),
        Legacy("offload_nccl", bool, False, ""),
    ),
    "DataArguments": (
        Legacy("eval_file_name", str | list[str] | None, None, "validation.data_args.file_name decides"),
        Legacy("dataset_type", str, "json", "the file's extension decides"),
        Legacy("interleave_probs", str | float | None, None, "domain_interleave_probs decides"),
    ),
    "DeepSpeedStrategyConfig": (
        Legacy("optimizer", dict[str, Any], {}, BATCHES),
        Legacy("scheduler", dict[str, Any], {}, BATCHES),
        Legacy("fp16", dict[str, Any], {}, DTYPE),
        Legacy("gradient_clipping", float | str | None, None, "max_grad_norm decides"),
        Legacy("train_batch_size", int | str | None, None, BATCHES),
        Legacy("train_micro_batch_size_per_gpu", int | str | None, None, BATCHES),
        Legacy("gradient_accumulation_steps", int | str | None, None, BATCHES),
        Legacy("prescale_gradients", bool, False, "gradients are plain sums"),
        Legacy("zero_allow_untested_optimizer", bool, True, "the optimizer is AdamW"),
    ),
    "MegatronStrategyConfig": (
        Legacy("max_grad_norm", float | None, None, "max_grad_norm of training_args or at the top decides"),
        Legacy("moe_grouped_gemm", bool, False, ONE_BY_ONE, text=EXPERT_FILES),
        Legacy("moe_permute_fusion", bool, False, "tokens are permuted by PyTorch", text=EXPERT_FILES),
        Legacy("moe_layer_recompute", bool, False, "recompute_granularity decides", text=EXPERT_FILES),
        Legacy("moe_shared_expert_overlap", bool, False, "shared experts come before the others", text=EXPERT_FILES),
        Legacy("apply_rope_fusion", bool, False, "rotary embeddings are computed by PyTorch"),
        Legacy("cross_entropy_loss_fusion", bool, False, "log-probs have a head of their own"),
        Legacy("overlap_param_gather", bool, False, "updated parameters are gathered after each optimizer step"),
        Legacy("delay_grad_reduce", bool, False, "all stages reduce alike"),
        Legacy("distrib_optim_fully_reshardable", bool, True, "checkpoints load under any parallel sizes"),
        Legacy("ckpt_format", str | None, None, "checkpoints load under any parallel sizes"),
        Legacy("save_hf_model", bool, False, "training_args.save_hf_model decides"),
        Legacy("save_merged_model", bool, False, "exports are always merged"),
        Legacy("use_batched_model_update", bool, False, "weights travel in buckets"),
        Legacy("compile_warmup", bool, False, "nothing is compiled"),
        Legacy("bf16", bool, False, DTYPE),
        Legacy("fp16", bool, False, DTYPE),
    ),
    "VllmStrategyConfig": (
        Legacy("distributed_executor_backend", str | None, None, "ranks of an engine are processes of its worker"),
        Legacy("disable_log_stats", bool, True, "the run's own metrics tell what an engine does"),
        Legacy("disable_mm_preprocessor_cache", bool, False, "prompts are token ids"),
        Legacy("VLLM_USE_V1", int | str | bool | None, None, "there is no other engine than V1"),
    ),
    "SglangStrategyConfig": (
        Legacy("grpc_mode", bool, False, "the engine is in its worker; nothing is served over gRPC"),
    ),
}
"""Rows by the name of the section's class."""


@cache
def legacy_of(cls: type) -> dict[str, Legacy]:
    """The legacy keys of a section."""
    return {row.name: row for base in reversed(cls.__mro__) for row in LEGACY_KEYS.get(base.__name__, ())}


@cache
def legacy_fields(cls: type) -> tuple[Field[Any], ...]:
    """Their fields, in the order of the table."""
    rows = [(row.name, row.hint, row.field) for row in legacy_of(cls).values()]
    made: Any = make_dataclass("LegacyKeys", rows)
    return tuple(made.__dataclass_fields__.values())
