"""TRL's arguments: ``trl grpo`` and ``trl sft``, by command line or by YAML file.

Defaults are those of version 1: ``loss_type: dapo``, ``beta: 0``, ``vllm_importance_sampling_mode: sequence_mask``.
"""

from __future__ import annotations

from roll.translation.rules import (
    ACTOR,
    ENGINE,
    OPTIONS,
    REFERENCE,
    TURNS,
    Dialect,
    Rule,
    Section,
    epochs,
    listed,
    number,
    one_of,
    optional,
    refused,
    truth,
    whole,
)
from roll.translation.trl_algorithm import put_trl_algorithm
from roll.translation.trl_batches import prepare, put_sft

SCHEDULERS = {name: name for name in ("linear", "cosine", "constant")} | {"constant_with_warmup": "constant"}
ATTENTION = {"flash_attention_2": "fa2", "sdpa": "sdpa", "eager": "eager", None: None}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16", None: "bf16"}
TRACKERS = {"wandb": "wandb", "tensorboard": "tensorboard", "swanlab": "swanlab", "none": "stdout", "all": "stdout"}
COMPUTED = "of one process; see the batches above"
TRAINED = "their trainer's own; the same numbers"


def _trackers(value: object) -> list[str]:
    return [str(one_of(TRACKERS)(name)) for name in listed(value)]


def _model(role: str, *others: str) -> tuple[Rule, ...]:
    """The model, its adapters and its optimizer."""
    roles = (role, *others)
    arguments = f"{role}.training_args"
    return (
        Rule("model_name_or_path", ("pretrain",), fact="model"),
        Rule("model_revision", note="main", value=refused("a revision has no translation: download it", "main", None)),
        Rule("dtype torch_dtype", tuple(f"{name}.model_args.dtype" for name in roles), value=one_of(DTYPES)),
        Rule(
            "attn_implementation",
            tuple(f"{name}.model_args.attn_implementation" for name in roles),
            value=one_of(ATTENTION),
            fact="attention",
            computed=True,
        ),
        Rule("trust_remote_code", tuple(f"{name}.model_args.trust_remote_code" for name in roles), value=truth),
        Rule(
            "gradient_checkpointing",
            (f"{role}.model_args.disable_gradient_checkpointing",),
            "the other way round",
            lambda value: not truth(value),
        ),
        Rule("use_peft", (f"{role}.model_args.lora_rank",), "true: LoRA", truth, "use_peft", computed=True),
        Rule("lora_r", (f"{role}.model_args.lora_rank",), value=whole, fact="lora_r", computed=True),
        Rule("lora_alpha", (f"{role}.model_args.lora_alpha",), value=whole, fact="peft_alpha", computed=True),
        Rule("lora_dropout", (f"{role}.model_args.lora_dropout",), value=number, fact="peft_dropout", computed=True),
        Rule(
            "lora_target_modules",
            (f"{role}.model_args.lora_target",),
            "null: the modules that PEFT takes for the model, `q_proj` and `v_proj` for most",
            optional(lambda value: value[0] if isinstance(value, list) and value == ["all-linear"] else value),
            "peft_target",
            computed=True,
        ),
        Rule(
            "lora_target_parameters lora_modules_to_save use_rslora use_dora load_in_8bit load_in_4bit",
            note="not given or false",
            value=refused("has no translation: adapters are plain LoRA on whole layers in full precision", None, False),
        ),
        Rule("lora_task_type bnb_4bit_quant_type use_bnb_nested_quant", note=TRAINED),
        Rule("learning_rate", (f"{arguments}.learning_rate",), value=number),
        Rule("weight_decay", (f"{arguments}.weight_decay",), value=number),
        Rule("adam_beta1", (f"{arguments}.adam_beta1",), value=number),
        Rule("adam_beta2", (f"{arguments}.adam_beta2",), value=number),
        Rule("adam_epsilon", (f"{arguments}.adam_epsilon",), value=number),
        Rule("max_grad_norm", ("max_grad_norm",), value=number),
        Rule("lr_scheduler_type", (f"{arguments}.lr_scheduler_type",), value=one_of(SCHEDULERS)),
        Rule("warmup_ratio", (f"{arguments}.warmup_ratio",), value=number),
        Rule("warmup_steps", (f"{arguments}.warmup_steps",), value=whole),
        Rule("optim", note="AdamW", value=refused("AdamW only", "adamw_torch", "adamw_torch_fused", "adamw_hf")),
        Rule("lr_scheduler_kwargs optim_args", note="null", value=refused("has no translation", None)),
        Rule(
            "per_device_train_batch_size",
            (f"{arguments}.per_device_train_batch_size",),
            value=whole,
            fact="micro.actor",
            computed=True,
        ),
        Rule(
            "gradient_accumulation_steps",
            (f"{arguments}.gradient_accumulation_steps",),
            COMPUTED,
            whole,
            "mini.actor",
            computed=True,
        ),
    )


def _run(role: str) -> tuple[Rule, ...]:
    """Length, places and times of a run, and its processes."""
    return (
        epochs("num_train_epochs"),
        Rule(
            "max_steps", ("max_steps",), "optimizer steps there; -1: by epochs", whole, "optimizer_steps", computed=True
        ),
        Rule("seed", ("seed",), value=whole),
        Rule("output_dir", ("output_dir",)),
        Rule("run_name", ("exp_name",)),
        Rule("report_to", ("track_with",), "`none` is `stdout`", _trackers, "loggers"),
        Rule("logging_steps", ("logging_steps",), value=lambda value: max(1, round(number(value)))),
        Rule(
            "save_strategy",
            ("save_steps",),
            value=one_of({"steps": "steps", "no": "no", "epoch": "epoch"}),
            fact="save_strategy",
            computed=True,
        ),
        Rule("save_steps", ("save_steps",), "optimizer steps there", whole, "save_interval", computed=True),
        Rule("save_total_limit", ("max_ckpt_to_keep",), value=lambda value: 0 if value is None else whole(value)),
        Rule(
            "eval_strategy",
            ("eval_steps",),
            value=one_of({"steps": "steps", "no": "no", "epoch": "epoch"}),
            fact="eval_strategy",
            computed=True,
        ),
        Rule("eval_steps", ("eval_steps",), "optimizer steps there", optional(whole), "eval_interval", computed=True),
        Rule("resume_from_checkpoint", ("resume_from_checkpoint",)),
        Rule(
            "num_processes", (f"{role}.device_mapping",), "processes: one a device", whole, "processes", computed=True
        ),
        Rule("num_machines", ("num_gpus_per_node",), value=whole, fact="machines", computed=True),
        Rule(
            "accelerate_config config_file",
            (f"{role}.strategy_args.strategy_name",),
            "`zero1`, `zero2`, `zero3`: DeepSpeed; `fsdp1`, `fsdp2`; others: `fsdp2_train`, which gives DDP's numbers",
            fact="accelerate",
            computed=True,
        ),
        Rule(
            "deepspeed",
            (f"{role}.strategy_args.strategy_name",),
            "the stage by the file's name",
            optional(str),
            "accelerate",
            computed=True,
        ),
        Rule(
            "dataset_name",
            (f"{role}.data_args.file_name",),
            "of the hub: `hub:OWNER/NAME`",
            fact="train_files",
            computed=True,
        ),
        Rule("dataset_config", (f"{role}.data_args.file_name",), fact="hub_config", computed=True),
        Rule("dataset_train_split", (f"{role}.data_args.file_name",), fact="train_split", computed=True),
        Rule(
            "dataset_test_split",
            ("validation.data_args.file_name",),
            "with `eval_strategy` only",
            fact="test_split",
            computed=True,
        ),
        Rule(
            "dataset_streaming datasets",
            note="null",
            value=refused("has no translation: name files in file_name", False, None),
        ),
        Rule("shuffle_dataset", (f"{role}.data_args.shuffle",), value=truth),
        Rule("chat_template_kwargs.*", (f"{role}.data_args.chat_template_kwargs.{{rest}}",)),
        Rule(
            "bf16 fp16 tf32 gradient_checkpointing_kwargs use_cpu ddp_timeout dataloader_num_workers "
            "remove_unused_columns "
            "disable_tqdm log_level log_completions num_completions_to_print log_unique_prompts push_to_hub "
            "hub_model_id "
            "hub_strategy ddp_find_unused_parameters dataloader_pin_memory save_only_model overwrite_output_dir "
            "do_eval do_train "
            "logging_first_step logging_strategy logging_dir per_device_eval_batch_size average_tokens_across_devices "
            "disable_dropout use_liger_kernel use_liger_loss torch_compile dataset_num_proc save_safetensors "
            "config main_process_port "
            "num_generations_eval ds3_gather_for_generation use_transformers_paged cache_implementation "
            "mixed_precision "
            "dynamo_backend machine_rank same_network num_cpu_threads_per_process trackio_space_id project",
            note="no such choice here, or the same numbers by other means",
        ),
    )


GRPO_RUN = Section("TRL: run, model and data", (*_run(ACTOR), *_model(ACTOR, ENGINE, REFERENCE)))
GRPO = Section(
    "TRL: GRPO",
    (
        Rule("num_generations", ("num_return_sequences_in_group",), value=whole, fact="samples"),
        Rule("max_prompt_length", ("prompt_length",), "not given: 1024", optional(whole), "trl_prompt", computed=True),
        Rule("max_completion_length", ("response_length",), value=whole, fact="response_length"),
        Rule(
            "steps_per_generation",
            ("rollout_batch_size",),
            "prompts = completions of a generation / `num_generations`",
            optional(whole),
            "steps_per_generation",
            computed=True,
        ),
        Rule(
            "generation_batch_size",
            ("rollout_batch_size",),
            value=optional(whole),
            fact="generation_batch",
            computed=True,
        ),
        Rule("num_iterations", ("ppo_epochs",), value=whole, fact="iterations", computed=True),
        Rule("temperature", (f"{ENGINE}.generating_args.temperature",), value=number),
        Rule("top_p", (f"{ENGINE}.generating_args.top_p",), value=number),
        Rule(
            "top_k",
            (f"{ENGINE}.generating_args.top_k",),
            "0 and null: all tokens",
            lambda value: whole(value or 0) or -1,
        ),
        Rule(
            "min_p", (f"{ENGINE}.generating_args.min_p",), value=lambda value: 0.0 if value is None else number(value)
        ),
        Rule("repetition_penalty", (f"{ENGINE}.generating_args.repetition_penalty",), value=number),
        Rule("generation_kwargs", note="null", value=refused("has no translation: generating_args has keys", None)),
        Rule("use_vllm", (f"{ENGINE}.strategy_args.strategy_name",), value=truth, fact="use_vllm", computed=True),
        Rule(
            "vllm_mode",
            (f"{ENGINE}.device_mapping",),
            "`colocate`: on the trainer's devices; `server`: on one behind them",
            one_of({"colocate": True, "server": False}),
            "trl_colocate",
            computed=True,
        ),
        Rule("vllm_gpu_memory_utilization", (f"{ENGINE}.{OPTIONS}.gpu_memory_utilization",), value=number),
        Rule(
            "vllm_tensor_parallel_size",
            (f"{ENGINE}.{OPTIONS}.tensor_parallel_size",),
            value=whole,
            fact="engine_tensor",
            computed=True,
        ),
        Rule("vllm_max_model_length vllm_max_model_len", (f"{ENGINE}.{OPTIONS}.max_model_len",), value=optional(whole)),
        Rule(
            "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_server_base_url "
            "vllm_model_impl "
            "vllm_enable_sleep_mode",
            note="engines are this run's own",
        ),
        Rule(
            "vllm_structured_outputs_regex vllm_guided_decoding_regex",
            note="null",
            value=refused("has no translation", None),
        ),
        Rule("beta", ("use_kl_loss", "kl_loss_coef"), "0: no reference", number, "beta", computed=True),
        Rule("epsilon", ("pg_clip_low",), value=number, fact="epsilon", computed=True),
        Rule("epsilon_high", ("pg_clip_high",), "null: as `epsilon`", optional(number), "epsilon_high", computed=True),
        Rule(
            "delta",
            ("dual_clip_coef",),
            "bounds the ratio of negative advantages",
            optional(number),
            "delta",
            computed=True,
        ),
        Rule(
            "loss_type",
            ("pg_variant", "loss_agg_mode"),
            "`grpo`: mean of responses; `dapo`: mean of tokens; `dr_grpo`: sum over `max_completion_length`",
            fact="loss_type",
            computed=True,
        ),
        Rule(
            "importance_sampling_level",
            ("pg_variant",),
            "`sequence` is GSPO",
            one_of({"token": "token", "sequence": "sequence"}),
            "level",
            computed=True,
        ),
        Rule("sapo_temperature_pos", ("sapo_tau_pos",), value=number, fact="sapo_pos", computed=True),
        Rule("sapo_temperature_neg", ("sapo_tau_neg",), value=number, fact="sapo_neg", computed=True),
        Rule(
            "scale_rewards",
            ("norm_std_type",),
            "1e-4 is added to the spread there, 1e-6 here: one part in 5,000 for rewards of 0 and 1",
            one_of({True: "group", "group": "group", "batch": "batch", False: None, "none": None, "true": "group"}),
            "scale",
            computed=True,
        ),
        Rule("mask_truncated_completions", ("max_len_mask",), value=truth),
        Rule("top_entropy_quantile", ("top_entropy_quantile",), value=number),
        Rule(
            "vllm_importance_sampling_correction", ("train_infer_correction",), value=truth, fact="is_on", computed=True
        ),
        Rule(
            "vllm_importance_sampling_mode",
            ("train_infer_correction",),
            value=one_of(
                {name: name for name in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")}
            ),
            fact="is_mode",
            computed=True,
        ),
        Rule(
            "vllm_importance_sampling_cap",
            ("train_infer_correction",),
            value=number,
            fact="is_cap",
            computed=True,
        ),
        Rule("reward_funcs", ("rewards.<name>.components",), value=listed, fact="reward_funcs", computed=True),
        Rule(
            "reward_weights",
            ("rewards.<name>.components",),
            value=optional(listed),
            fact="reward_weights",
            computed=True,
        ),
        Rule(
            "reward_model_name_or_path", ("reward_model.model_args.model_name_or_path",), fact="rm_path", computed=True
        ),
        Rule(
            "multi_objective_aggregation",
            note="`sum_then_normalize`",
            value=refused("rewards are added before they are compared", "sum_then_normalize"),
        ),
        Rule("sync_ref_model", note="false", value=refused("the reference stays as it was", False)),
        Rule("ref_model_mixup_alpha ref_model_sync_steps", note="count with `sync_ref_model` only"),
        Rule("off_policy_mask_threshold", note="null", value=refused("has no translation", None)),
        Rule("use_bias_correction_kl", ("kl_loss_importance_weighted",), value=truth),
        Rule("max_tool_calling_iterations tools environment_factory", note="null", value=refused(TURNS, None)),
        Rule("cast_lm_head_to_fp32", note="the softmax is computed in float32", value=truth),
    ),
)
SFT_TRAIN = "sft_train"
SFT = Section(
    "TRL: SFT",
    (
        *_run(SFT_TRAIN),
        *_model(SFT_TRAIN),
        Rule("max_length max_seq_length", ("sequence_length",), "longer rows are left out here, cut there", whole),
        Rule("packing", (f"{SFT_TRAIN}.use_sequence_packing",), value=truth),
        Rule("packing_strategy padding_free eval_packing pad_to_multiple_of", note="no such choice here"),
        Rule(
            "assistant_only_loss",
            note="true: only answers are learned",
            value=truth,
            fact="assistant_only",
            computed=True,
        ),
        Rule(
            "completion_only_loss",
            note="answers are learned",
            value=refused("the whole text is learned there", True, None),
        ),
        Rule(
            "dataset_text_field eos_token pad_token chat_template_path dataset_kwargs",
            note="null",
            value=refused("has no translation", None, "text", "messages"),
        ),
        Rule("loss_type", note="nll", value=refused("negative log-likelihood only", "nll")),
    ),
)
COMMON_DEFAULTS = (
    ("max_grad_norm", 1.0),
    ("num_train_epochs", 3.0),
    ("per_device_train_batch_size", 8),
    ("gradient_accumulation_steps", 1),
    ("lr_scheduler_type", "linear"),
    ("save_steps", 500),
    ("save_strategy", "steps"),
    ("eval_strategy", "no"),
    ("gradient_checkpointing", True),
    ("use_peft", False),
    ("dataset_train_split", "train"),
    ("report_to", "none"),
)
GRPO_DEFAULTS = (
    ("learning_rate", 1e-6),
    *COMMON_DEFAULTS,
    ("num_generations", 8),
    ("max_completion_length", 256),
    ("temperature", 1.0),
    ("top_p", 1.0),
    ("top_k", 0),
    ("num_iterations", 1),
    ("beta", 0.0),
    ("epsilon", 0.2),
    ("loss_type", "dapo"),
    ("importance_sampling_level", "token"),
    ("scale_rewards", "group"),
    ("use_vllm", False),
    ("vllm_mode", "colocate"),
    ("vllm_gpu_memory_utilization", 0.3),
    ("vllm_importance_sampling_correction", True),
    ("vllm_importance_sampling_mode", "sequence_mask"),
    ("vllm_importance_sampling_cap", 3.0),
)
TRL_GRPO = Dialect(
    "trl",
    "TRL",
    (GRPO_RUN, GRPO),
    GRPO_DEFAULTS,
    "model_name_or_path",
    programs=((r"(?:.*\.)?(?:trl\.(?:scripts\.)?grpo|scripts\.grpo)", {}),),
    prepare=prepare,
    algorithm=put_trl_algorithm,
)
TRL_SFT = Dialect(
    "trl_sft",
    "TRL",
    (SFT,),
    (("learning_rate", 2e-5), *COMMON_DEFAULTS, ("max_length", 1024)),
    "model_name_or_path",
    programs=((r"(?:.*\.)?(?:trl\.(?:scripts\.)?sft|scripts\.sft)", {}),),
    prepare=prepare,
    steps=(put_sft,),
    pipeline="sft",
)
