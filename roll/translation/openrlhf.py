"""OpenRLHF's arguments: ``python3 -m openrlhf.cli.train_ppo_ray``."""

from __future__ import annotations

from roll.translation.openrlhf_algorithm import prepare, put_openrlhf_algorithm
from roll.translation.rules import (
    ACTOR,
    CRITIC,
    ENGINE,
    OPTIONS,
    REFERENCE,
    TURNS,
    Dialect,
    Rule,
    Section,
    epochs,
    number,
    one_of,
    optional,
    refused,
    truth,
    whole,
)

TRAINED, ALL = (ACTOR, CRITIC), (ACTOR, REFERENCE, CRITIC)
SCHEDULERS = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant"}
SCHEDULERS |= {"constant_with_warmup": "constant"}
ATTENTION = {"flash_attention_2": "fa2", "sdpa": "sdpa", "eager": "eager"}
ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}


def _computed(theirs: str, ours: tuple[str, ...], fact: str, value: object = whole, note: str = "") -> Rule:
    return Rule(theirs, ours, note, value, fact, computed=True)  # type: ignore[arg-type]


DEVICES = Section(
    "OpenRLHF: devices and engines",
    (
        *(
            _computed(f"{theirs}_num_{what}", (f"{ours}.device_mapping",), f"{fact}.{role}")
            for theirs, ours, role in (
                ("actor", ACTOR, "actor"),
                ("ref", REFERENCE, "reference"),
                ("critic", CRITIC, "critic"),
            )
            for what, fact in (("nodes", "nodes"), ("gpus_per_node", "gpus"))
        ),
        _computed("reward_num_nodes", ("reward_model.device_mapping",), "rm_nodes"),
        _computed("reward_num_gpus_per_node", ("reward_model.device_mapping",), "rm_gpus"),
        _computed(
            "colocate_all_models", (f"{ENGINE}.device_mapping",), "colocate", truth, "all roles name the same devices"
        ),
        _computed("colocate_actor_ref", (f"{REFERENCE}.device_mapping",), "colocate_reference", truth),
        _computed("vllm_num_engines", (f"{ENGINE}.device_mapping",), "vllm_engines", optional(whole), "0: `hf_infer`"),
        _computed("vllm_tensor_parallel_size", (f"{ENGINE}.{OPTIONS}.tensor_parallel_size",), "engine_tensor"),
        Rule("vllm_gpu_memory_utilization", (f"{ENGINE}.{OPTIONS}.gpu_memory_utilization",), value=number),
        Rule("enable_prefix_caching", (f"{ENGINE}.{OPTIONS}.enable_prefix_caching",), value=truth),
        Rule("enforce_eager", (f"{ENGINE}.{OPTIONS}.enforce_eager",), value=truth),
        Rule(
            "colocate_critic_reward vllm_sync_backend vllm_sync_with_ray vllm_enable_sleep deepspeed_enable_sleep "
            "rollout_tasks_per_gpu vllm_generate_batch_size ref_reward_offload actor_init_on_gpu local_rank "
            "enable_vllm_v1 reward_num_gpus",
            note="no such choice here: roles that share devices move their states off between phases",
        ),
        Rule(
            "async_train",
            note="false",
            value=refused("has no translation: async_generation_ratio says how far generation runs ahead", False),
        ),
        Rule("async_queue_size partial_rollout", note="count with `async_train`"),
    ),
)
RUN = Section(
    "OpenRLHF: run and data",
    (
        epochs("num_episodes"),
        Rule("rollout_batch_size", ("rollout_batch_size",), "prompts", whole, "prompts"),
        Rule("n_samples_per_prompt", ("num_return_sequences_in_group",), value=whole, fact="samples"),
        _computed(
            "train_batch_size",
            (f"{ACTOR}.training_args.gradient_accumulation_steps",),
            "mini.actor",
            note="samples of an optimizer step, of all devices",
        ),
        Rule(
            "micro_train_batch_size",
            (f"{ACTOR}.training_args.per_device_train_batch_size",),
            "",
            whole,
            "micro",
            computed=True,
        ),
        Rule("micro_rollout_batch_size", tuple(f"{role}.infer_batch_size" for role in ALL), value=whole),
        _computed("use_dynamic_batch", (f"{ACTOR}.use_dynamic_batching_in_train",), "dynamic.actor", truth),
        _computed("train_max_tokens_per_gpu", (f"{ACTOR}.max_tokens_per_microbatch_in_train",), "token_budget.actor"),
        _computed(
            "rollout_max_tokens_per_gpu",
            (f"{ACTOR}.max_tokens_per_microbatch_in_infer",),
            "rollout_budget",
            optional(whole),
        ),
        Rule("max_epochs", ("ppo_epochs",), value=whole),
        Rule("prompt_max_len", ("prompt_length",), value=whole, fact="prompt_length"),
        Rule("generate_max_len", ("response_length",), value=whole, fact="response_length"),
        Rule(
            "max_len",
            (f"{ENGINE}.{OPTIONS}.max_model_len",),
            "null: prompt and response",
            fact="max_model_len",
            computed=True,
        ),
        Rule(
            "max_samples",
            note="all rows",
            value=refused("a number of rows has no translation: data_args.dataset_filter", 1e8, 100000000, None),
        ),
        Rule("seed", ("seed",), value=whole),
        Rule("temperature", (f"{ENGINE}.generating_args.temperature",), value=number),
        Rule("top_p", (f"{ENGINE}.generating_args.top_p",), value=number),
        Rule("save_steps", ("save_steps",), "-1: never", lambda value: max(0, whole(value))),
        Rule("eval_steps", ("eval_steps",), "-1: never", lambda value: max(0, whole(value))),
        Rule("logging_steps", ("logging_steps",), value=whole),
        Rule("ckpt_path", ("output_dir",), "checkpoints stand in `checkpoints/` below it"),
        Rule(
            "save_path",
            (f"{ACTOR}.training_args.save_hf_model",),
            "the model at the end, below `output_dir`",
            lambda value: True,
        ),
        Rule("max_ckpt_num", ("max_ckpt_to_keep",), value=whole),
        Rule("load_checkpoint", ("resume_from_checkpoint",), value=truth),
        Rule(
            "use_wandb",
            ("track_with",),
            "a key stays in the environment (WANDB_API_KEY)",
            fact="use_wandb",
            computed=True,
        ),
        Rule("use_tensorboard", ("track_with",), fact="use_tensorboard", computed=True),
        Rule("wandb_project", ("tracker_kwargs.project",), fact="project", computed=True),
        Rule("wandb_run_name", ("exp_name",)),
        Rule(
            "prompt_data",
            (f"{ACTOR}.data_args.file_name",),
            "of the hub: `hub:OWNER/NAME`",
            fact="train_files",
            computed=True,
        ),
        Rule("prompt_split", (f"{ACTOR}.data_args.file_name",), fact="train_split", computed=True),
        Rule("eval_dataset", ("validation.data_args.file_name",), fact="val_files", computed=True),
        Rule("eval_split", ("validation.data_args.file_name",), fact="eval_split", computed=True),
        Rule("eval_temperature", ("validation.generating_args.temperature",), value=number),
        Rule("eval_n_samples_per_prompt", ("validation.generating_args.num_return_sequences",), value=whole),
        Rule(
            "input_key",
            (f"{ACTOR}.data_args.prompt",),
            "a column of text or of messages",
            fact="text_key",
            computed=True,
        ),
        Rule(
            "label_key",
            note="rows have their answer in `ground_truth`: rename the column",
            fact="label_key",
            computed=True,
        ),
        Rule(
            "apply_chat_template",
            (f"{ACTOR}.data_args.template",),
            "false: the text as it is",
            truth,
            "templated",
            computed=True,
        ),
        Rule(
            "input_template",
            note="null",
            value=refused("has no translation: data_args.template names a template", None),
        ),
        Rule(
            "prompt_data_probs",
            note="null",
            value=refused("has no translation: domain_interleave_probs mixes files", None),
        ),
        Rule("reward_pretrain", ("reward_model.model_args.model_name_or_path",), fact="rm_path", computed=True),
        Rule("remote_rm_url", ("rewards.<name>.worker_cls",), fact="remote", computed=True),
        Rule("agent_func_path", note="null", value=refused(TURNS, None)),
        Rule(
            "save_hf_ckpt disable_ds_ckpt max_ckpt_mem use_ds_universal_ckpt save_value_network wandb_org "
            "wandb_group perf "
            "full_determinism disable_fast_tokenizer value_head_prefix",
            note="no such choice here",
        ),
        Rule(
            "use_ms", ("model_download_type",), "true: ModelScope", lambda value: "MODELSCOPE" if truth(value) else None
        ),
    ),
)
TRAINING = Section(
    "OpenRLHF: training and DeepSpeed",
    (
        Rule("pretrain", ("pretrain",), fact="model"),
        Rule(
            "critic_pretrain",
            (f"{CRITIC}.model_args.model_name_or_path",),
            "null: the reward model, or `pretrain`",
            fact="critic_path",
            computed=True,
        ),
        _computed("zero_stage", tuple(f"{role}.{OPTIONS}.zero_stage" for role in ALL), "zero_stage"),
        _computed("adam_offload", tuple(f"{role}.{OPTIONS}.offload" for role in TRAINED), "adam_offload", truth),
        Rule(
            "gradient_checkpointing",
            tuple(f"{role}.model_args.disable_gradient_checkpointing" for role in TRAINED),
            "the other way round",
            lambda value: not truth(value),
        ),
        Rule(
            "gradient_checkpointing_use_reentrant",
            tuple(f"{role}.model_args.gradient_checkpointing_use_reentrant" for role in TRAINED),
            value=truth,
        ),
        Rule(
            "attn_implementation",
            tuple(f"{role}.model_args.attn_implementation" for role in ALL),
            value=one_of(ATTENTION),
        ),
        Rule("packing_samples", tuple(f"{role}.use_remove_padding" for role in ALL), value=truth),
        Rule(
            "bf16 param_dtype use_liger_kernel deepcompile overlap_comm grad_accum_dtype zpg",
            note="bf16 over float32 master weights; the same numbers by other means",
        ),
        Rule("enable_ema", note="false", value=refused("an average of the weights is not available", False)),
        Rule("ema_beta", note="counts with `enable_ema`"),
        Rule(
            "ds_tensor_parallel_size",
            note="1",
            value=refused("tensor parallelism under DeepSpeed is not available: megatron_train has it", 1),
        ),
        Rule(
            "ring_attn_size",
            note="1",
            value=refused("ring attention is not available: ulysses_size or context_parallel_size share a sequence", 1),
        ),
        Rule("ring_head_stride", note="counts with `ring_attn_size`"),
        Rule("load_in_4bit", note="false", value=refused("models are trained in full precision", False)),
        _computed("lora_rank", (f"{ACTOR}.model_args.lora_rank",), "lora_rank"),
        _computed("lora_alpha", (f"{ACTOR}.model_args.lora_alpha",), "lora_alpha"),
        _computed("target_modules", (f"{ACTOR}.model_args.lora_target",), "lora_target", lambda value: value),
        Rule("lora_dropout", (f"{ACTOR}.model_args.lora_dropout",), value=number, fact="lora_dropout", computed=True),
        Rule("max_norm", ("max_grad_norm",), value=number),
        Rule("l2", tuple(f"{role}.training_args.weight_decay" for role in TRAINED), value=number),
        Rule("actor_learning_rate", (f"{ACTOR}.training_args.learning_rate",), value=number),
        Rule("critic_learning_rate", (f"{CRITIC}.training_args.learning_rate",), value=number),
        Rule("lr_warmup_ratio", tuple(f"{role}.training_args.warmup_ratio" for role in TRAINED), value=number),
        Rule(
            "lr_scheduler",
            tuple(f"{role}.training_args.lr_scheduler_type" for role in TRAINED),
            "`cosine_with_min_lr` ends at a tenth of the rate",
            one_of(SCHEDULERS),
            "scheduler",
        ),
        _computed(
            "adam_betas",
            tuple(f"{role}.training_args.adam_beta1" for role in TRAINED),
            "adam_betas",
            lambda value: value,
        ),
        Rule("freezing_actor_steps", ("critic_warmup",), value=lambda value: max(0, whole(value))),
    ),
)
ALGORITHM = Section(
    "OpenRLHF: algorithm",
    (
        Rule(
            "advantage_estimator",
            ("adv_estimator",),
            "`group_norm` and `dr_grpo` are `grpo`, the second without the spread",
            one_of(ESTIMATORS),
            "estimator",
            computed=True,
        ),
        _computed("use_kl_loss", ("use_kl_loss",), "in_loss", truth),
        _computed("init_kl_coef", ("init_kl_coef", "kl_loss_coef"), "kl_coef", number),
        _computed(
            "kl_estimator", ("kl_penalty", "kl_loss_type"), "kl_estimator", one_of({"k1": "k1", "k2": "k2", "k3": "k3"})
        ),
        _computed("kl_target", ("target_kl",), "kl_target", optional(number)),
        Rule("kl_horizon", ("kl_horizon",), value=whole, fact="horizon", computed=True),
        _computed("policy_loss_type", ("pg_variant",), "policy", one_of({"ppo": "ppo", "gspo": "gspo"})),
        _computed("eps_clip", ("pg_clip_low", "pg_clip_high"), "eps", number),
        _computed("eps_clip_low_high", ("pg_clip_low", "pg_clip_high"), "eps_both", lambda value: value),
        _computed("dual_clip", ("dual_clip_coef",), "dual", optional(number)),
        Rule("value_clip", ("value_clip",), value=number, fact="value_clip", computed=True),
        _computed("gamma", ("gamma",), "gamma", number),
        _computed("lambd", ("lambd",), "lam", number),
        _computed(
            "entropy_loss_coef",
            ("entropy_loss_coef",),
            "entropy",
            lambda value: 0.0 if value is None else number(value),
        ),
        Rule(
            "no_advantage_std_norm",
            note="false",
            value=refused(
                "a mean over the batch without its spread has no translation: dr_grpo compares a group", False
            ),
        ),
        _computed("reward_clip_range", ("reward_clip",), "reward_range", lambda value: value),
        Rule(
            "normalize_reward",
            note="false",
            value=refused("has no translation: the reward `reward_model` has scale and shift", False),
        ),
        Rule(
            "overlong_buffer_len",
            ("overlong_buffer_length",),
            value=optional(lambda value: int(number(value))),
            fact="overlong",
            computed=True,
        ),
        Rule(
            "overlong_penalty_factor", ("overlong_penalty_factor",), value=number, fact="overlong_share", computed=True
        ),
        _computed("dynamic_filtering", ("rewards.<name>.query_filter_config",), "filtering", truth),
        _computed(
            "dynamic_filtering_reward_range",
            ("rewards.<name>.query_filter_config",),
            "filter_range",
            lambda value: value,
        ),
        _computed("enable_vllm_is_correction", ("train_infer_correction",), "corrects", truth),
        _computed("vllm_is_truncated_threshold", ("train_infer_correction",), "is_cap", number),
        Rule(
            "ptx_coef pretrain_data",
            note="counts with `pretrain_data`",
            value=refused("a pre-training loss is not available", 0.05, None),
        ),
        Rule("aux_loss_coef", note="0", value=refused("mixtures of experts are not supported yet", 0, 0.0)),
    ),
)
DEFAULTS = (
    *(
        (f"{role}_num_{what}", value)
        for role in ("actor", "ref", "critic")
        for what, value in (("nodes", 1), ("gpus_per_node", 8))
    ),
    ("colocate_all_models", False),
    ("colocate_actor_ref", False),
    ("vllm_tensor_parallel_size", 1),
    ("vllm_gpu_memory_utilization", 0.95),
    ("enable_prefix_caching", False),
    ("save_steps", -1),
    ("eval_steps", -1),
    ("max_ckpt_num", 3),
    ("ckpt_path", "./ckpt/checkpoints_ppo_ray"),
    ("save_path", "./ckpt"),
    ("zero_stage", 2),
    ("gradient_checkpointing", False),
    ("packing_samples", False),
    ("num_episodes", 1),
    ("rollout_batch_size", 1024),
    ("micro_rollout_batch_size", 8),
    ("micro_train_batch_size", 4),
    ("train_batch_size", 128),
    ("train_max_tokens_per_gpu", 16192),
    ("max_epochs", 1),
    ("prompt_max_len", 1024),
    ("generate_max_len", 1024),
    ("max_norm", 1.0),
    ("l2", 0.0),
    ("temperature", 1.0),
    ("top_p", 1.0),
    ("n_samples_per_prompt", 1),
    ("actor_learning_rate", 1e-6),
    ("critic_learning_rate", 9e-6),
    ("lr_warmup_ratio", 0.03),
    ("lr_scheduler", "cosine_with_min_lr"),
    ("adam_betas", [0.9, 0.95]),
    ("advantage_estimator", "gae"),
    ("init_kl_coef", 0.01),
    ("kl_estimator", "k1"),
    ("policy_loss_type", "ppo"),
    ("eps_clip", 0.2),
    ("value_clip", 0.5),
    ("gamma", 1.0),
    ("lambd", 1.0),
    ("reward_clip_range", [-10, 10]),
    ("prompt_split", "train"),
    ("input_key", "input"),
    ("apply_chat_template", False),
)
OPENRLHF = Dialect(
    "openrlhf",
    "OpenRLHF",
    (DEVICES, RUN, TRAINING, ALGORITHM),
    DEFAULTS,
    "pretrain",
    programs=((r"openrlhf\.cli\.train_ppo_ray", {}),),
    prepare=prepare,
    algorithm=put_openrlhf_algorithm,
)
