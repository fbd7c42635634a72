"""verl's keys: what each becomes here."""

from __future__ import annotations

from roll.translation.reading import CONFIG_NAME
from roll.translation.rules import (
    ACTOR,
    ENGINE,
    OPTIONS,
    PROJECT,
    STRATEGY,
    TURNS,
    Dialect,
    Rule,
    Section,
    epochs,
    listed,
    loggers,
    never_below_zero,
    number,
    one_of,
    refused,
    truth,
    whole,
)
from roll.translation.verl_algorithm import ALGORITHM, FACTS
from roll.translation.verl_algorithm import DEFAULTS as ALGORITHM_DEFAULTS
from roll.translation.verl_roles import ACTOR_KEYS, MODEL, ROLLOUT, TRAINING
from roll.translation.verl_surroundings import SURROUNDINGS


def engine(value: object) -> str:
    """
    Raises:
        ValueError: an engine that is not available here.
    """
    if value == "trtllm":
        raise ValueError(
            "is not available; vllm samples from the same model: write actor_rollout_ref.rollout.name=vllm behind"
        )
    return str(one_of({"vllm": "vllm", "hf": "hf_infer", "sglang": "sglang"})(value))


CONFIG_FILES = {"ppo_trainer": "fsdp", "ppo_megatron_trainer": "megatron", "transfer_queue_ppo_trainer": "fsdp"}


def config_name(value: object) -> str:
    """
    Raises:
        ValueError: a file of settings beyond their defaults.
    """
    if value in CONFIG_FILES:
        return CONFIG_FILES[str(value)]
    if "multiturn" in str(value) or "tool" in str(value):
        raise ValueError(TURNS)
    raise ValueError(
        "names a file of settings of theirs that is not in the command: translate a script that states them, or give "
        f"the file itself; known: {', '.join(CONFIG_FILES)}"
    )


RUN = Section(
    "Run",
    (
        Rule(
            "trainer.n_gpus_per_node",
            ("num_gpus_per_node", f"{ACTOR}.device_mapping", f"{ENGINE}.device_mapping"),
            "times `nnodes`: the list of devices that all roles share",
            whole,
            "gpus",
            computed=True,
        ),
        Rule("trainer.nnodes", (f"{ACTOR}.device_mapping",), "see `n_gpus_per_node`", whole, "nodes", computed=True),
        Rule("trainer.total_training_steps", ("max_steps",), value=whole, fact="steps"),
        epochs("trainer.total_epochs"),
        Rule("trainer.save_freq", ("save_steps",), "0 and -1: never", never_below_zero),
        Rule("trainer.test_freq", ("eval_steps",), "0 and -1: never", never_below_zero),
        Rule("trainer.val_before_train", ("validation.before_train",), value=truth),
        Rule("trainer.val_only", note="`roll` trains", value=refused("there is no run that validates only", False)),
        Rule("trainer.logger", ("track_with",), "`console` is `stdout`, `file` is `jsonl`", loggers, "loggers"),
        PROJECT,
        Rule("trainer.experiment_name", ("exp_name",)),
        Rule("trainer.default_local_dir", ("output_dir",), "checkpoints stand in `checkpoints/` below it"),
        Rule("trainer.rollout_data_dir", ("rollout_dump_dir",)),
        Rule(
            "trainer.resume_mode",
            ("resume_from_checkpoint",),
            "`auto`: the newest checkpoint; `disable`: none",
            one_of({"auto": True, "disable": False, "resume_path": None}),
            "resume",
            computed=True,
        ),
        Rule(
            "trainer.resume_from_path",
            ("resume_from_checkpoint",),
            "with `resume_mode: resume_path`",
            fact="resume_path",
            computed=True,
        ),
        Rule(
            "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
            ("max_ckpt_to_keep",),
            "one number for all roles; null: all",
            lambda value: 0 if value is None else whole(value),
        ),
        Rule("trainer.critic_warmup", ("critic_warmup",), value=whole),
        Rule("trainer.balance_batch", note="rows are ordered by length where that helps; same numbers"),
        Rule("trainer.use_legacy_worker_impl", note="there is one implementation of workers"),
        Rule("trainer.device", note="found out: the accelerator, or the CPU"),
        Rule(
            "trainer.log_val_generations trainer.validation_data_dir trainer.del_local_ckpt_after_load "
            "trainer.default_hdfs_dir trainer.ray_wait_register_center_timeout trainer.esi_redundant_time",
            note="no such choice here",
        ),
        Rule(
            CONFIG_NAME,
            note="`ppo_trainer`: the keys of this table; `ppo_megatron_trainer`: Megatron for all roles",
            value=config_name,
            fact="config_name",
            computed=True,
        ),
        Rule(
            "CUDA_VISIBLE_DEVICES",
            note="stays in the environment: devices are counted within it, from 0",
            fact="visible",
            computed=True,
        ),
    ),
)

DATA = Section(
    "Data and reward",
    (
        Rule(
            "data.train_files",
            (f"{ACTOR}.data_args.file_name", f"{ACTOR}.data_args.messages"),
            "their Parquet is read as it is: conversation in `prompt`, ground truth in `reward_model`",
            listed,
            "train_files",
            computed=True,
        ),
        Rule("data.val_files", ("validation.data_args.file_name",), value=listed, fact="val_files", computed=True),
        Rule("data.train_batch_size", ("rollout_batch_size",), "prompts", whole, "prompts"),
        Rule("data.val_batch_size", ("val_batch_size",), "null: ours", fact="val_batch", computed=True),
        Rule("data.max_prompt_length", ("prompt_length",), value=whole, fact="prompt_length"),
        Rule("data.max_response_length", ("response_length",), value=whole, fact="response_length"),
        Rule(
            "data.filter_overlong_prompts",
            (f"{ACTOR}.data_args.filter_overlong_prompts",),
            "what is left out is counted",
            truth,
        ),
        Rule(
            "data.truncation",
            (f"{ACTOR}.data_args.truncation",),
            "of prompts that are not left out; cuts the question, and keeps the template around it whole",
        ),
        Rule("data.shuffle", (f"{ACTOR}.data_args.shuffle",), value=truth),
        Rule(
            "data.filter_overlong_prompts_workers data.dataloader_num_workers data.return_raw_chat "
            "data.validation_shuffle data.reward_fn_key data.return_raw_input_ids",
            note="no such choice here",
        ),
        Rule("data.prompt_key", (f"{ACTOR}.data_args.messages",), fact="prompt_key", computed=True),
        Rule("data.seed", ("seed",), "null: ours", fact="seed", computed=True),
        Rule("data.trust_remote_code", note="tokenizers are loaded as the models are: `model_args.trust_remote_code`"),
        Rule(
            "reward.reward_kwargs.* reward_model.reward_kwargs.*",
            ("rewards.gsm8k_rule.reward_kwargs.{rest}",),
            "`method`, `score`, `format_score` mean the same; add `compare: string` to compare characters",
        ),
        Rule("reward.num_workers", ("rewards.gsm8k_rule.world_size",), value=whole, fact="reward_workers"),
    ),
)

GENERATION = Section(
    "Generation",
    (
        Rule(
            f"{ROLLOUT}.name",
            (f"{ENGINE}.{STRATEGY}",),
            "`hf` is `hf_infer`",
            engine,
            "engine",
        ),
        Rule(
            f"{ROLLOUT}.mode",
            note="requests are always scheduled one by one",
            value=one_of({"async": "async", "sync": "sync"}),
        ),
        Rule(f"{ROLLOUT}.n", ("num_return_sequences_in_group",), value=whole, fact="samples"),
        Rule(
            f"{ROLLOUT}.tensor_model_parallel_size",
            (f"{ENGINE}.{OPTIONS}.tensor_parallel_size", f"{ENGINE}.num_gpus_per_worker"),
            value=whole,
            fact="engine_tensor",
            computed=True,
        ),
        Rule(
            f"{ROLLOUT}.load_format",
            (f"{ENGINE}.{OPTIONS}.load_format",),
            "weights arrive before the first step",
            one_of({"auto": "auto", "dummy": "dummy", "safetensors": "auto", "hf": "auto"}),
        ),
        Rule(
            f"{ROLLOUT}.max_model_len",
            (f"{ENGINE}.{OPTIONS}.max_model_len",),
            fact="max_model_len",
            computed=True,
            note="responses end there, whatever `response_length` allows",
        ),
        Rule(f"{ROLLOUT}.max_num_seqs", (f"{ENGINE}.{OPTIONS}.max_num_seqs",), value=whole),
        Rule(f"{ROLLOUT}.max_num_batched_tokens", (f"{ENGINE}.{OPTIONS}.max_num_batched_tokens",), value=whole),
        Rule(f"{ROLLOUT}.gpu_memory_utilization", (f"{ENGINE}.{OPTIONS}.gpu_memory_utilization",), value=number),
        Rule(f"{ROLLOUT}.enforce_eager", (f"{ENGINE}.{OPTIONS}.enforce_eager",), value=truth),
        Rule(f"{ROLLOUT}.enable_prefix_caching", (f"{ENGINE}.{OPTIONS}.enable_prefix_caching",), value=truth),
        Rule(
            f"{ROLLOUT}.enable_chunked_prefill",
            (f"{ENGINE}.{OPTIONS}.engine_args.enable_chunked_prefill",),
            value=truth,
        ),
        Rule(f"{ROLLOUT}.engine_kwargs.vllm.*", (f"{ENGINE}.{OPTIONS}.engine_args.{{rest}}",)),
        Rule(f"{ROLLOUT}.engine_kwargs.sglang.*", (f"{ENGINE}.{OPTIONS}.engine_args.{{rest}}",)),
        Rule(f"{ROLLOUT}.temperature", (f"{ENGINE}.generating_args.temperature",), value=number),
        Rule(f"{ROLLOUT}.top_p", (f"{ENGINE}.generating_args.top_p",), value=number),
        Rule(f"{ROLLOUT}.top_k", (f"{ENGINE}.generating_args.top_k",), value=whole),
        Rule(f"{ROLLOUT}.do_sample", (f"{ENGINE}.generating_args.do_sample",), value=truth),
        Rule(
            f"{ROLLOUT}.val_kwargs.temperature",
            ("validation.generating_args.temperature",),
            value=number,
            fact="val_temperature",
        ),
        Rule(f"{ROLLOUT}.val_kwargs.top_p", ("validation.generating_args.top_p",), value=number),
        Rule(f"{ROLLOUT}.val_kwargs.top_k", ("validation.generating_args.top_k",), value=whole),
        Rule(f"{ROLLOUT}.val_kwargs.n", ("validation.generating_args.num_return_sequences",), value=whole),
        Rule(f"{ROLLOUT}.val_kwargs.do_sample", ("validation.generating_args.do_sample",), value=truth),
        Rule(
            f"{ROLLOUT}.dtype", (f"{ENGINE}.model_args.dtype",), value=one_of({"bfloat16": "bf16", "float32": "fp32"})
        ),
        Rule(f"{ROLLOUT}.free_cache_engine", note="engines sleep where their devices are shared"),
        Rule(
            f"{ROLLOUT}.calculate_log_probs {ROLLOUT}.disable_log_stats {ROLLOUT}.skip_tokenizer_init "
            f"{ROLLOUT}.logprobs_mode",
            note="engines always give log-probs of what they sampled",
        ),
        Rule(f"{ROLLOUT}.agent.num_workers {ROLLOUT}.multi_stage_wake_up", note="no such choice here"),
        Rule(f"{ROLLOUT}.prompt_length {ROLLOUT}.response_length", note="as `data.max_*_length`"),
    ),
)

DEFAULTS = (
    *ALGORITHM_DEFAULTS,
    ("data.train_batch_size", 1024),
    ("data.max_prompt_length", 512),
    ("data.max_response_length", 512),
    ("data.filter_overlong_prompts", False),
    (f"{ACTOR_KEYS}.strategy", "fsdp"),
    ("critic.strategy", "fsdp"),
    (f"{ACTOR_KEYS}.ppo_mini_batch_size", 256),
    (f"{ACTOR_KEYS}.ppo_max_token_len_per_gpu", 16384),
    ("critic.ppo_max_token_len_per_gpu", 32768),
    (f"{ACTOR_KEYS}.optim.lr", 1e-6),
    (f"{ACTOR_KEYS}.optim.weight_decay", 0.01),
    (f"{ACTOR_KEYS}.optim.lr_scheduler_type", "constant"),
    ("critic.optim.lr", 1e-5),
    ("critic.optim.weight_decay", 0.01),
    ("critic.optim.lr_scheduler_type", "constant"),
    (f"{MODEL}.enable_gradient_checkpointing", True),
    (f"{MODEL}.use_remove_padding", True),
    (f"{ROLLOUT}.n", 1),
    (f"{ROLLOUT}.temperature", 1.0),
    (f"{ROLLOUT}.top_p", 1.0),
    (f"{ROLLOUT}.top_k", -1),
    (f"{ROLLOUT}.gpu_memory_utilization", 0.5),
    (f"{ROLLOUT}.max_num_seqs", 1024),
    (f"{ROLLOUT}.max_num_batched_tokens", 8192),
    (f"{ROLLOUT}.val_kwargs.temperature", 0),
    ("trainer.n_gpus_per_node", 8),
    ("trainer.nnodes", 1),
    ("trainer.total_epochs", 30),
    ("trainer.save_freq", -1),
    ("trainer.test_freq", -1),
    ("trainer.logger", ["console", "wandb"]),
    ("trainer.resume_mode", "auto"),
)

PROGRAMS: tuple[tuple[str, dict[str, bool]], ...] = (
    (r"verl\.trainer\.main_ppo\w*|verl\.experimental\.(?:transfer_queue|separation)\.main_\w+", {}),
    (
        r"verl\.experimental\.one_step_off_policy\.(?:\w+\.)*main_\w+|recipe\.one_step_off_policy\.main_\w+",
        {"one_step_off": True},
    ),
    (r"recipe\.(?:dapo|entropy|char_count)\.(?:src\.)?main_\w+", {}),
)
"""Of the recipes those whose keys say all that they do."""
VERL = Dialect(
    "verl",
    "verl",
    (RUN, DATA, ALGORITHM, TRAINING, GENERATION, *SURROUNDINGS),
    DEFAULTS,
    f"{MODEL}.path",
    FACTS,
    PROGRAMS,
)
