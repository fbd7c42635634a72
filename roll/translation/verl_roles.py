"""verl's keys of the training roles and their backends."""

from __future__ import annotations

from roll.config.strategies.deepspeed import numbers
from roll.translation.rules import (
    ACTOR,
    CRITIC,
    ENGINE,
    EXPERTS,
    OPTIONS,
    REFERENCE,
    STRATEGY,
    Rule,
    Section,
    flipped,
    listed,
    never_below_zero,
    number,
    one_of,
    refused,
    switched,
    truth,
    whole,
)

MODELS = (ACTOR, ENGINE, REFERENCE)
STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp2", "deepspeed": "deepspeed", "megatron": "megatron"}
FSDP_NOTE = "`fsdp` is the legacy wrapper FSDP1 here as there, `fsdp2` is `fully_shard`"
ROLLOUT, ACTOR_KEYS, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
REF_KEYS = "actor_rollout_ref.ref"
COMPUTED_BATCH = "prompts there, samples here: prompts x `n` / (micro-batch x data-parallel ranks), and must divide"
PER_DEVICE = "of one device; times the ranks that share a sequence (Ulysses, context parallel)"
BETWEEN_PHASES = "moving states off the devices between phases happens where roles share devices (`is_offload_states`)"


def _optimizer(theirs: str, ours: str) -> tuple[Rule, ...]:
    arguments = f"{ours}.training_args"
    return (
        Rule(f"{theirs}.optim.lr", (f"{arguments}.learning_rate",), value=number),
        Rule(f"{theirs}.optim.weight_decay", (f"{arguments}.weight_decay",), value=number),
        Rule(
            f"{theirs}.optim.betas",
            (f"{arguments}.adam_beta1", f"{arguments}.adam_beta2"),
            fact=f"betas.{ours}",
            computed=True,
            note="a list there, two keys here",
        ),
        Rule(
            f"{theirs}.optim.lr_warmup_steps",
            (f"{arguments}.warmup_steps",),
            value=lambda value: 0 if value is None else never_below_zero(value),
            note="-1 and null leave it to the ratio",
        ),
        Rule(f"{theirs}.optim.lr_warmup_steps_ratio", (f"{arguments}.warmup_ratio",), value=number),
        Rule(
            f"{theirs}.optim.lr_scheduler_type {theirs}.optim.warmup_style",
            (f"{arguments}.lr_scheduler_type",),
            value=one_of({"constant": "constant", "cosine": "cosine", "linear": "linear"}),
        ),
        Rule(f"{theirs}.optim.min_lr_ratio", (f"{arguments}.min_lr_ratio",), value=number),
        Rule(f"{theirs}.optim.clip_grad {theirs}.grad_clip", (f"{arguments}.max_grad_norm",), value=number),
        Rule(
            f"{theirs}.optim.total_training_steps",
            note="the schedule has as many steps as the run",
            value=refused("a schedule of its own length has no translation", -1, None),
        ),
    )


def _deepspeed(theirs: str, ours: str) -> tuple[Rule, ...]:
    options = f"{ours}.{OPTIONS}"
    spelled = " ".join(f"{theirs}.{section}.{{key}}" for section in ("deepspeed", "deepspeed_config"))
    return (
        Rule(
            spelled.format(key="zero_stage"),
            (f"{options}.zero_stage",),
            value=whole,
            note="each role has its own; both spellings of the section are read for both roles",
        ),
        Rule(
            spelled.format(key="offload"),
            (f"{options}.offload",),
            value=one_of({name: name for name in ("none", "cpu", "nvme", "auto")}),
            note="ZeRO-2: optimizer; ZeRO-3: optimizer, and parameters with `offload_param`; ZeRO-1: none, as there",
        ),
        Rule(
            f"{theirs}.deepspeed.zero_optimization.* {theirs}.deepspeed_config.zero_optimization.*",
            (f"{options}.zero_optimization.{{rest}}",),
            value=numbers,
            note="DeepSpeed's own JSON, passed through",
        ),
    )


def _fsdp(theirs: str, ours: str, role: str) -> tuple[Rule, ...]:
    options = f"{ours}.{OPTIONS}"
    return (
        Rule(f"{theirs}.fsdp_config.fsdp_size", (f"{options}.fsdp_size",), value=whole, note="-1: all ranks, as there"),
        Rule(f"{theirs}.fsdp_config.reshard_after_forward", (f"{options}.reshard_after_forward",)),
        Rule(
            f"{theirs}.fsdp_config.offload_policy",
            (f"{options}.offload_policy",),
            value=truth,
            fact=f"cpu_offload.{role}",
            computed=True,
            note="parameters stay in host memory during the passes too",
        ),
        Rule(
            f"{theirs}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",
            (f"{options}.wrap_policy.transformer_layer_cls_to_wrap",),
            value=listed,
        ),
        Rule(
            f"{theirs}.fsdp_config.forward_prefetch {theirs}.fsdp_config.use_orig_params "
            f"{theirs}.fsdp_config.wrap_policy.min_num_params",
            note="the strategy decides",
        ),
        Rule(
            f"{theirs}.fsdp_config.model_dtype",
            note="master weights are float32",
            value=refused("master weights are float32 here", "fp32", "float32", None),
        ),
    )


def _batches(theirs: str, ours: str, role: str) -> tuple[Rule, ...]:
    arguments = f"{ours}.training_args"
    return (
        Rule(
            f"{theirs}.ppo_mini_batch_size",
            (f"{arguments}.gradient_accumulation_steps",),
            COMPUTED_BATCH,
            value=whole,
            fact=f"mini.{role}",
            computed=True,
        ),
        Rule(
            f"{theirs}.ppo_micro_batch_size_per_gpu",
            (f"{arguments}.per_device_train_batch_size",),
            value=whole,
            fact=f"micro.{role}",
            computed=True,
        ),
        Rule(
            f"{theirs}.ppo_micro_batch_size",
            (f"{arguments}.per_device_train_batch_size",),
            "of all devices together; divided by their number",
            lambda value: None if value is None else whole(value),
            fact=f"micro_of_all.{role}",
            computed=True,
        ),
        Rule(
            f"{theirs}.use_dynamic_bsz",
            (f"{ours}.use_dynamic_batching_in_train", f"{ours}.use_dynamic_batching_in_infer"),
            "critic and reference have it from the actor",
            truth,
            f"dynamic.{role}",
            computed=True,
        ),
        Rule(
            f"{theirs}.ppo_max_token_len_per_gpu",
            (f"{ours}.max_tokens_per_microbatch_in_train",),
            value=whole,
            fact=f"token_budget.{role}",
            computed=True,
            note=f"{PER_DEVICE}; counts with `use_dynamic_bsz` only",
        ),
        Rule(
            f"{theirs}.ulysses_sequence_parallel_size",
            (f"{ours}.model_args.ulysses_size",),
            value=whole,
            fact=f"ulysses.{role}",
            note="DeepSpeed takes it as 1, with a note",
        ),
        Rule(
            f"{theirs}.shuffle",
            ("shuffle_mini_batches",),
            "one key for actor and critic",
            truth,
            f"shuffle.{role}",
            computed=True,
        ),
        Rule(f"{theirs}.data_loader_seed", note="counts with `shuffle`"),
        Rule(
            f"{theirs}.use_torch_compile {theirs}.checkpoint.save_contents {theirs}.checkpoint.load_contents",
            note="no such choice here: checkpoints are whole",
        ),
    )


def _megatron(theirs: str, ours: str, role: str) -> tuple[Rule, ...]:
    options = f"{ours}.{OPTIONS}"
    sizes = ("tensor", "pipeline", "context", "virtual_pipeline")
    names = {"context": "context_parallel_size"}
    rules = [
        Rule(
            f"{theirs}.megatron.{names.get(size, f'{size}_model_parallel_size')}",
            (f"{options}.{names.get(size, f'{size}_model_parallel_size')}",),
            fact=f"{size}.{role}",
        )
        for size in sizes
    ]
    return (
        *rules,
        Rule(
            f"{theirs}.megatron.expert_model_parallel_size",
            (f"{options}.expert_model_parallel_size",),
            value=refused(EXPERTS, 1, None),
            note="1",
        ),
        Rule(f"{theirs}.megatron.sequence_parallel", (f"{options}.sequence_parallel",), value=truth),
        Rule(f"{theirs}.megatron.use_distributed_optimizer", (f"{options}.use_distributed_optimizer",), value=truth),
        Rule(f"{theirs}.megatron.override_transformer_config.*", (f"{options}.additional_configs.{{rest}}",)),
        Rule(
            f"{theirs}.megatron.param_offload {theirs}.megatron.grad_offload {theirs}.megatron.optimizer_offload",
            note=BETWEEN_PHASES,
        ),
    )


TRAINING = Section(
    "Training roles and backends",
    (
        Rule(
            f"{ACTOR_KEYS}.strategy",
            (f"{ACTOR}.{STRATEGY}", f"{REFERENCE}.{STRATEGY}"),
            FSDP_NOTE,
            one_of(STRATEGIES),
            "strategy.actor",
            computed=True,
            about="fsdp",
        ),
        Rule(
            f"{REF_KEYS}.strategy",
            (f"{REFERENCE}.{STRATEGY}",),
            FSDP_NOTE,
            one_of(STRATEGIES),
            "strategy.reference",
            computed=True,
            about="fsdp",
        ),
        Rule(
            "critic.strategy",
            (f"{CRITIC}.{STRATEGY}",),
            FSDP_NOTE,
            one_of(STRATEGIES),
            "strategy.critic",
            computed=True,
            about="fsdp",
        ),
        Rule(
            f"actor@{ACTOR_KEYS}",
            (f"{ACTOR}.{STRATEGY}",),
            "the group names the backend",
            one_of({"ds_actor": "deepspeed", "dp_actor": "fsdp", "megatron_actor": "megatron"}),
            "strategy.actor",
            computed=True,
        ),
        Rule(
            "critic",
            (f"{CRITIC}.{STRATEGY}",),
            "the group names the backend",
            one_of({"ds_critic": "deepspeed", "dp_critic": "fsdp", "megatron_critic": "megatron"}),
            "strategy.critic",
            computed=True,
        ),
        Rule(f"{MODEL}.path", ("pretrain",), fact="model"),
        Rule("critic.model.path", (f"{CRITIC}.model_args.model_name_or_path",), "with a value head"),
        Rule(
            f"{MODEL}.trust_remote_code", tuple(f"{role}.model_args.trust_remote_code" for role in MODELS), value=truth
        ),
        Rule("critic.model.trust_remote_code", (f"{CRITIC}.model_args.trust_remote_code",), value=truth),
        Rule(
            f"{MODEL}.enable_gradient_checkpointing",
            (f"{ACTOR}.model_args.disable_gradient_checkpointing",),
            "the other way round",
            flipped,
        ),
        Rule(
            "critic.model.enable_gradient_checkpointing",
            (f"{CRITIC}.model_args.disable_gradient_checkpointing",),
            "the other way round",
            flipped,
        ),
        Rule(
            f"{MODEL}.use_remove_padding",
            (f"{ACTOR}.use_remove_padding", f"{REFERENCE}.use_remove_padding"),
            value=truth,
        ),
        Rule("critic.model.use_remove_padding", (f"{CRITIC}.use_remove_padding",), value=truth),
        Rule(
            f"{MODEL}.lora_rank",
            (f"{ACTOR}.model_args.lora_rank", f"{ACTOR}.model_args.lora_target"),
            "0: no LoRA",
            whole,
            "lora_rank",
            computed=True,
        ),
        Rule(f"{MODEL}.lora_alpha", (f"{ACTOR}.model_args.lora_alpha",), value=whole, fact="lora_alpha", computed=True),
        Rule(f"{MODEL}.target_modules", (f"{ACTOR}.model_args.lora_target",), fact="lora_target", computed=True),
        Rule(
            f"{MODEL}.use_shm {MODEL}.use_liger {MODEL}.use_fused_kernels {MODEL}.enable_activation_offload",
            note="the same numbers by other means: log-probs have a fused head of their own, and activations are "
            "computed again rather than moved",
        ),
        *_optimizer(ACTOR_KEYS, ACTOR),
        *_optimizer("critic", CRITIC),
        *_batches(ACTOR_KEYS, ACTOR, "actor"),
        *_batches("critic", CRITIC, "critic"),
        *_deepspeed(ACTOR_KEYS, ACTOR),
        *_deepspeed("critic", CRITIC),
        Rule(
            "VERL_ENABLE_PARAM_OFFLOAD",
            (f"{ACTOR}.{OPTIONS}.offload_param", f"{CRITIC}.{OPTIONS}.offload_param"),
            "the variable itself works too; the key counts where it is written",
            switched,
            "env.offload_param",
            computed=True,
        ),
        Rule(
            "VERL_DS_ZERO2_FP32_ACCUM_PATCH",
            (f"{ACTOR}.{OPTIONS}.fp32_grad_accumulation", f"{CRITIC}.{OPTIONS}.fp32_grad_accumulation"),
            "as above",
            switched,
            "env.fp32_grad_accumulation",
            computed=True,
        ),
        Rule(
            "VERL_DS_ZERO2_STEP_EACH_MICRO",
            (f"{ACTOR}.{OPTIONS}.step_each_micro_batch", f"{CRITIC}.{OPTIONS}.step_each_micro_batch"),
            "as above",
            switched,
            "env.step_each_micro_batch",
            computed=True,
        ),
        *_fsdp(ACTOR_KEYS, ACTOR, "actor"),
        *_fsdp(REF_KEYS, REFERENCE, "reference"),
        *_fsdp("critic.model", CRITIC, "critic"),
        Rule(
            f"{ACTOR_KEYS}.fsdp_config.param_offload {ACTOR_KEYS}.fsdp_config.optimizer_offload "
            "critic.model.fsdp_config.param_offload critic.model.fsdp_config.optimizer_offload "
            f"{ACTOR_KEYS}.fsdp_config.grad_offload critic.model.fsdp_config.grad_offload "
            f"{REF_KEYS}.fsdp_config.optimizer_offload",
            note=BETWEEN_PHASES,
        ),
        Rule(
            f"{REF_KEYS}.fsdp_config.param_offload",
            (f"{REFERENCE}.{OPTIONS}.offload_policy",),
            "parameters in host memory during the pass too, as FSDP does it for a forward-only role",
            truth,
            "cpu_offload.reference",
            computed=True,
        ),
        *_megatron(ACTOR_KEYS, ACTOR, "actor"),
        *_megatron("critic", CRITIC, "critic"),
        *_megatron(REF_KEYS, REFERENCE, "reference"),
        Rule(f"{REF_KEYS}.log_prob_micro_batch_size_per_gpu", (f"{REFERENCE}.infer_batch_size",), value=whole),
        *(
            Rule(
                theirs,
                (f"{ours}.infer_batch_size",),
                "of all devices together; divided by their number",
                lambda value: None if value is None else whole(value),
                fact=f"forward_of_all.{role}",
                computed=True,
            )
            for theirs, ours, role in (
                (f"{ROLLOUT}.log_prob_micro_batch_size", ACTOR, "actor"),
                (f"{REF_KEYS}.log_prob_micro_batch_size", REFERENCE, "reference"),
                ("critic.forward_micro_batch_size", CRITIC, "critic"),
            )
        ),
        Rule("critic.forward_micro_batch_size_per_gpu", (f"{CRITIC}.infer_batch_size",), value=whole),
        Rule(
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            (f"{ACTOR}.infer_batch_size",),
            "the pass that computes old log-probs runs in the trainer",
            whole,
        ),
        *(
            Rule(
                f"{theirs}.log_prob_use_dynamic_bsz",
                (f"{ours}.use_dynamic_batching_in_infer",),
                "not given: as the actor's `use_dynamic_bsz`",
                truth,
                f"forward_dynamic.{role}",
                computed=True,
            )
            for theirs, ours, role in ((REF_KEYS, REFERENCE, "reference"), (ROLLOUT, ACTOR, "actor"))
        ),
        *(
            Rule(
                theirs,
                (f"{ours}.max_tokens_per_microbatch_in_infer",),
                PER_DEVICE,
                whole,
                f"forward_budget.{role}",
                computed=True,
            )
            for theirs, ours, role in (
                (f"{REF_KEYS}.log_prob_max_token_len_per_gpu", REFERENCE, "reference"),
                (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", ACTOR, "actor"),
                ("critic.forward_max_token_len_per_gpu", CRITIC, "critic"),
            )
        ),
    ),
)
