"""SkyRL's keys: what each becomes here.

Two vocabularies: the package ``skyrl_train`` with DeepSpeed, FSDP and FSDP2, and its successor ``skyrl`` with FSDP and
Megatron. They differ in what ``fsdp`` means: FSDP1 beside ``fsdp2``, and the FSDP2 API where it stands alone.
"""

from __future__ import annotations

from typing import Any

from roll.translation.rules import (
    ACTOR,
    ENGINE,
    PROJECT,
    REFERENCE,
    TURNS,
    Dialect,
    Rule,
    Section,
    epochs,
    listed,
    loggers,
    never_below_zero,
    one_of,
    refused,
    truth,
    whole,
)
from roll.translation.skyrl_algorithm import DEFAULTS as ALGORITHM_DEFAULTS
from roll.translation.skyrl_algorithm import FACTS, algorithm
from roll.translation.skyrl_generation import generation
from roll.translation.skyrl_roles import training
from roll.translation.skyrl_surroundings import surroundings

ENVIRONMENTS = {"gsm8k": "gsm8k_rule", "gsm8k_multi_turn": "gsm8k_rule", "aime": "math_rule", "lcb": "code_sandbox"}


def environment(value: object) -> str:
    """
    Raises:
        ValueError: an environment that is more than a rule.
    """
    if value in ENVIRONMENTS:
        return ENVIRONMENTS[str(value)]
    known = ", ".join(ENVIRONMENTS)
    raise ValueError(f"is an environment of theirs, and {TURNS}; as rewards: {known}")


OLDER = {"deepspeed": "deepspeed", "fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron"}
NEWER = {"fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron"}
OLDER_NOTE = "`fsdp` stands next to `fsdp2` and DeepSpeed here: it is the legacy wrapper FSDP1 (`fsdp_train`)"
NEWER_NOTE = "`fsdp` stands next to Megatron here: it is the FSDP2 API (`fsdp2_train`)"


def _steps_and_logs() -> tuple[Rule, ...]:
    """How long a run is, and where it writes what."""
    return (
        epochs("trainer.epochs"),
        Rule("trainer.max_training_steps", ("max_steps",), value=whole, fact="steps"),
        Rule("trainer.seed", ("seed",), value=whole),
        Rule(
            "trainer.logger",
            ("track_with",),
            "`console` is `stdout`; keys such as WANDB_API_KEY stay in the environment",
            loggers,
            "loggers",
        ),
        PROJECT,
        Rule("trainer.run_name", ("exp_name",)),
        Rule("trainer.ckpt_path", ("output_dir",), "checkpoints stand in `checkpoints/` below it"),
        Rule("trainer.log_path", ("logging_dir",)),
        Rule("trainer.export_path", note="the trained model is written to `model/` below `output_dir`"),
    )


def _checkpoints_and_validation() -> tuple[Rule, ...]:
    """When a run saves, validates, and goes on from."""
    return (
        Rule("trainer.ckpt_interval", ("save_steps",), "0 and -1: never", never_below_zero),
        Rule(
            "trainer.hf_save_interval",
            (f"{ACTOR}.training_args.save_hf_model",),
            "the model at the end of the run",
            lambda value: whole(value) > 0,
        ),
        Rule("trainer.max_ckpts_to_keep", ("max_ckpt_to_keep",), "-1 there is 0 here: all", never_below_zero),
        Rule("trainer.eval_interval", ("eval_steps",), "0 and -1: never", never_below_zero),
        Rule("trainer.eval_before_train", ("validation.before_train",), value=truth),
        Rule("trainer.eval_batch_size", ("val_batch_size",), value=whole),
        Rule(
            "trainer.resume_mode",
            ("resume_from_checkpoint",),
            "`latest`: the newest checkpoint; null: none",
            one_of({"latest": True, "none": False, None: False, "from_path": None}),
            "resume",
            computed=True,
        ),
        Rule(
            "trainer.resume_path",
            ("resume_from_checkpoint",),
            "with `resume_mode: from_path`",
            fact="resume_path",
            computed=True,
        ),
        Rule(
            "trainer.dump_data_batch trainer.dump_eval_results trainer.disable_fast_tokenizer "
            "trainer.update_ref_every_epoch trainer.bf16 trainer.sequence_parallel_backend trainer.target_modules "
            "trainer.use_orm_score",
            note="no such choice here",
        ),
    )


def _placement() -> tuple[Rule, ...]:
    """Who shares devices with whom."""
    return (
        Rule(
            "trainer.placement.colocate_all",
            (f"{ENGINE}.device_mapping",),
            "true: engines and trainer name the same devices; false: devices of their own",
            truth,
            "colocate",
            computed=True,
        ),
        Rule(
            "trainer.placement.colocate_policy_ref",
            (f"{REFERENCE}.device_mapping",),
            "true: the same devices",
            truth,
            "colocate_reference",
            computed=True,
        ),
        Rule(
            "trainer.placement.colocate_critic_reward trainer.placement.reward_num_nodes "
            "trainer.placement.reward_num_gpus_per_node",
            note="rewards are rules: they take no devices",
        ),
        Rule(
            "CUDA_VISIBLE_DEVICES",
            note="stays in the environment: devices are counted within it, from 0",
            fact="visible",
            computed=True,
        ),
    )


def _run() -> Section:
    return Section("Run", (*_steps_and_logs(), *_checkpoints_and_validation(), *_placement()))


def _data() -> Section:
    return Section(
        "Data and reward",
        (
            Rule(
                "data.train_data",
                (f"{ACTOR}.data_args.file_name", f"{ACTOR}.data_args.messages"),
                "their Parquet is read as it is: conversation in `prompt`, ground truth in `reward_spec`",
                listed,
                "train_files",
                computed=True,
            ),
            Rule("data.val_data", ("validation.data_args.file_name",), value=listed, fact="val_files", computed=True),
            Rule("trainer.train_batch_size", ("rollout_batch_size",), "prompts", whole, "prompts"),
            Rule(
                "trainer.max_prompt_length",
                ("prompt_length",),
                value=whole,
                fact="prompt_length",
            ),
            Rule(
                "environment.env_class",
                ("rewards.<name>.worker_cls",),
                "`gsm8k` is `gsm8k_rule`; several turns are not available yet",
                environment,
                "reward",
                computed=True,
            ),
            Rule(
                "environment.skyrl_gym.max_env_workers environment.max_env_workers",
                ("rewards.<name>.world_size",),
                value=whole,
                fact="reward_workers",
                computed=True,
            ),
            Rule("generator.max_turns", note="one turn", value=refused(TURNS, 1)),
            Rule(
                "generator.zero_reward_on_non_stop",
                ("max_len_mask",),
                "here such responses can be left out of the loss",
                refused(
                    "scoring cut-off responses 0 is not available; `max_len_mask: true` leaves them out of the loss",
                    False,
                ),
            ),
        ),
    )


def _dialect(name: str, title: str, strategies: dict[str, str], note: str, *own: tuple[str, Any]) -> Dialect:
    newer = name == "skyrl"
    sections = (_run(), _data(), algorithm(newer), training(strategies, note), generation(), *surroundings())
    facts = FACTS | {"masks_drop_tokens": not newer}
    programs: tuple[tuple[str, dict[str, Any]], ...] = (
        (rf"{'skyrl.train' if newer else 'skyrl_train'}\.entrypoints\.main_\w+", {}),
    )
    return Dialect(name, title, sections, (*DEFAULTS, *own), "trainer.policy.model.path", facts, programs)


DEFAULTS: tuple[tuple[str, Any], ...] = (
    *ALGORITHM_DEFAULTS,
    ("trainer.placement.colocate_all", True),
    ("trainer.placement.colocate_policy_ref", True),
    ("trainer.placement.policy_num_gpus_per_node", 4),
    ("trainer.placement.policy_num_nodes", 1),
    ("trainer.placement.ref_num_gpus_per_node", 4),
    ("trainer.placement.ref_num_nodes", 1),
    ("trainer.placement.critic_num_gpus_per_node", 4),
    ("trainer.placement.critic_num_nodes", 1),
    ("trainer.policy.optimizer_config.lr", 1e-6),
    ("trainer.policy.optimizer_config.weight_decay", 0.01),
    ("trainer.policy.optimizer_config.scheduler", "constant_with_warmup"),
    ("trainer.critic.optimizer_config.lr", 5e-6),
    ("trainer.critic.optimizer_config.weight_decay", 0.01),
    ("trainer.critic.optimizer_config.scheduler", "constant_with_warmup"),
    ("trainer.ref.fsdp_config.cpu_offload", True),
    ("trainer.epochs", 1),
    ("trainer.train_batch_size", 1024),
    ("trainer.policy_mini_batch_size", 256),
    ("trainer.critic_mini_batch_size", 256),
    ("trainer.micro_train_batch_size_per_gpu", 1),
    ("trainer.micro_forward_batch_size_per_gpu", 1),
    ("trainer.use_sample_packing", True),
    ("trainer.gradient_checkpointing", True),
    ("trainer.eval_batch_size", 1024),
    ("trainer.eval_interval", 5),
    ("trainer.ckpt_interval", 10),
    ("trainer.resume_mode", "latest"),
    ("trainer.max_prompt_length", 512),
    ("trainer.logger", "wandb"),
    ("trainer.project_name", "skyrl"),
    ("generator.backend", "vllm"),
    ("generator.n_samples_per_prompt", 5),
    ("generator.gpu_memory_utilization", 0.8),
    ("generator.max_num_seqs", 1024),
    ("generator.max_num_batched_tokens", 8192),
    ("generator.sampling_params.max_generate_length", 1024),
    ("generator.sampling_params.temperature", 1.0),
    ("generator.sampling_params.top_p", 1.0),
    ("generator.sampling_params.top_k", -1),
    ("generator.eval_sampling_params.temperature", 1.0),
    ("generator.eval_sampling_params.top_p", 1.0),
    ("generator.eval_sampling_params.top_k", -1),
)

SKYRL_TRAIN = _dialect("skyrl_train", "SkyRL, package `skyrl_train`", OLDER, OLDER_NOTE, ("trainer.strategy", "fsdp2"))
SKYRL = _dialect("skyrl", "SkyRL, package `skyrl`", NEWER, NEWER_NOTE, ("trainer.strategy", "fsdp"))
