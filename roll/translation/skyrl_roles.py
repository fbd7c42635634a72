"""SkyRL's keys of the roles that compute: training and its backends."""

from __future__ import annotations

from roll.config.strategies.deepspeed import numbers
from roll.translation.rules import (
    ACTOR,
    CRITIC,
    EXPERTS,
    OPTIONS,
    REFERENCE,
    REWARD_MODEL,
    STRATEGY,
    Rule,
    Section,
    flipped,
    listed,
    number,
    one_of,
    refused,
    truth,
    whole,
)

TRAINED = (ACTOR, CRITIC)
COMPUTING = (ACTOR, REFERENCE, CRITIC)
ROLES = {"policy": (ACTOR, "actor"), "ref": (REFERENCE, "reference"), "critic": (CRITIC, "critic")}
"""Their role, our section, and the name in the arithmetic."""
NO_MODEL = "rewards are rules: nothing is computed by a model"
COMPUTED_BATCH = "prompts there, samples here: prompts x samples / (micro-batch x data-parallel ranks), and must divide"
DEEPSPEED_SECTIONS = (
    "activation_checkpointing",
    "aio",
    "bf16",
    "comms_logger",
    "data_types",
    "flops_profiler",
    "zero_optimization",
)


def _passed_through(section: str, *ours: str) -> tuple[Rule, ...]:
    """``deepspeed_config.train`` and ``deepspeed_config.eval``."""
    theirs = f"deepspeed_config.{section}"
    options = tuple(f"{role}.{OPTIONS}" for role in ours)
    own = tuple(
        Rule(f"{theirs}.{name}.*", tuple(f"{option}.{name}.{{rest}}" for option in options), "passed through", numbers)
        for name in DEEPSPEED_SECTIONS
    )
    return (
        *own,
        Rule(f"{theirs}.gradient_clipping", ("max_grad_norm",), value=number),
        Rule(
            f"{theirs}.wall_clock_breakdown", tuple(f"{option}.wall_clock_breakdown" for option in options), value=truth
        ),
        Rule(f"{theirs}.steps_per_print", tuple(f"{option}.steps_per_print" for option in options), value=whole),
        Rule(
            f"{theirs}.prescale_gradient {theirs}.torch_autocast.enabled {theirs}.torch_autocast.dtype "
            f"{theirs}.disable_trace_cache",
            note="`model_args.dtype` and the strategy decide",
        ),
        Rule(
            f"{theirs}.*",
            tuple(f"{option}.deepspeed_config.{{rest}}" for option in options),
            "any other key of DeepSpeed's JSON, passed through",
            numbers,
        ),
    )


def _role(name: str) -> tuple[Rule, ...]:
    return (*_parts(name), *_megatron(name), *(_optimizer(name) if name != "ref" else ()))


def _parts(name: str) -> tuple[Rule, ...]:
    """How a role's model is shared out, and over how many devices."""
    ours, role = ROLES[name]
    theirs, options = f"trainer.{name}", f"{ours}.{OPTIONS}"
    return (
        Rule(
            f"{theirs}.fsdp_config.cpu_offload",
            (f"{options}.offload_policy",),
            "parameters in host memory during the passes too; FSDP1 refuses it for roles that train. Moving states off "
            "the devices between phases is another thing (`is_offload_states`)",
            truth,
            f"cpu_offload.{role}",
            computed=True,
        ),
        Rule(f"{theirs}.fsdp_config.reshard_after_forward", (f"{options}.reshard_after_forward",)),
        Rule(f"{theirs}.fsdp_config.fsdp_size", (f"{options}.fsdp_size",), "-1: all ranks, as there", whole),
        Rule(
            f"{theirs}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",
            (f"{options}.wrap_policy.transformer_layer_cls_to_wrap",),
            value=listed,
        ),
        Rule(
            f"{theirs}.sequence_parallel_size",
            (f"{ours}.model_args.ulysses_size",),
            "DeepSpeed takes it as 1",
            whole,
            f"ulysses.{role}",
        ),
        Rule(
            f"{theirs}.deepspeed_config.zero_optimization.*",
            (f"{options}.zero_optimization.{{rest}}",),
            "passed through",
            numbers,
        ),
        Rule(
            f"trainer.placement.{name}_num_gpus_per_node",
            (f"{ours}.device_mapping",),
            "times its nodes: a list of devices",
            whole,
            f"gpus.{role}",
            computed=True,
        ),
        Rule(
            f"trainer.placement.{name}_num_nodes",
            (f"{ours}.device_mapping",),
            "see above",
            whole,
            f"nodes.{role}",
            computed=True,
        ),
    )


def _megatron(name: str) -> tuple[Rule, ...]:
    """A role under Megatron."""
    ours, role = ROLES[name]
    theirs, options = f"trainer.{name}", f"{ours}.{OPTIONS}"
    return (
        *(
            Rule(f"{theirs}.megatron_config.{size}", (f"{options}.{size}",), fact=f"{fact}.{role}")
            for size, fact in (
                ("tensor_model_parallel_size", "tensor"),
                ("pipeline_model_parallel_size", "pipeline"),
                ("context_parallel_size", "context"),
            )
        ),
        Rule(f"{theirs}.megatron_config.expert_model_parallel_size", note="1", value=refused(EXPERTS, 1, None)),
        Rule(f"{theirs}.megatron_config.torch_profiler_config.*", note="profiles are not available yet"),
        Rule(f"{theirs}.use_torch_compile {theirs}.record_memory", note="no such choice here"),
        Rule(f"{theirs}.megatron_config.transformer_config_kwargs.*", (f"{options}.additional_configs.{{rest}}",)),
    )


def _optimizer(name: str) -> tuple[Rule, ...]:
    """A role that learns."""
    ours, _ = ROLES[name]
    theirs, arguments = f"trainer.{name}", f"{ours}.training_args"
    return (
        Rule(f"{theirs}.optimizer_config.lr", (f"{arguments}.learning_rate",), value=number),
        Rule(f"{theirs}.optimizer_config.weight_decay", (f"{arguments}.weight_decay",), value=number),
        Rule(f"{theirs}.optimizer_config.max_grad_norm", (f"{arguments}.max_grad_norm",), value=number),
        Rule(f"{theirs}.optimizer_config.num_warmup_steps", (f"{arguments}.warmup_steps",), value=whole),
        Rule(
            f"{theirs}.optimizer_config.scheduler",
            (f"{arguments}.lr_scheduler_type",),
            value=one_of(
                {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
            ),
        ),
        Rule(
            f"{theirs}.optimizer_config.adam_betas",
            (f"{arguments}.adam_beta1", f"{arguments}.adam_beta2"),
            "a list there, two keys here",
            fact=f"betas.{ours}",
            computed=True,
        ),
        Rule(f"{theirs}.optimizer_config.offload_after_step", note="happens where roles share devices"),
        Rule(
            f"{theirs}.gradient_checkpointing",
            (f"{ours}.model_args.disable_gradient_checkpointing",),
            "the other way round",
            flipped,
        ),
    )


def training(strategies: dict[str, str], note: str) -> Section:
    return Section(
        "Training roles and backends",
        (
            Rule(
                "trainer.strategy",
                tuple(f"{role}.{STRATEGY}" for role in COMPUTING),
                note,
                one_of(strategies),
                "strategy",
                computed=True,
                about="fsdp",
            ),
            Rule("trainer.policy.model.path", ("pretrain",), fact="model"),
            Rule("trainer.critic.model.path", (f"{CRITIC}.model_args.model_name_or_path",), "null: `pretrain`"),
            Rule("trainer.ref.model.path", (f"{REFERENCE}.model_args.model_name_or_path",)),
            Rule(
                "trainer.policy_mini_batch_size",
                (f"{ACTOR}.training_args.gradient_accumulation_steps",),
                COMPUTED_BATCH,
                whole,
                "mini.actor",
                computed=True,
            ),
            Rule(
                "trainer.critic_mini_batch_size",
                (f"{CRITIC}.training_args.gradient_accumulation_steps",),
                COMPUTED_BATCH,
                whole,
                "mini.critic",
                computed=True,
            ),
            Rule(
                "trainer.micro_train_batch_size_per_gpu",
                tuple(f"{role}.training_args.per_device_train_batch_size" for role in TRAINED),
                "`gradient_accumulation_steps` follows, so that an optimizer step keeps its samples",
                whole,
                "micro",
                computed=True,
            ),
            Rule(
                "trainer.micro_forward_batch_size_per_gpu",
                tuple(f"{role}.infer_batch_size" for role in COMPUTING),
                value=whole,
            ),
            Rule(
                "trainer.use_sample_packing trainer.remove_microbatch_padding",
                tuple(f"{role}.use_remove_padding" for role in COMPUTING),
                "one key under two names",
                truth,
                "packing",
            ),
            Rule(
                "trainer.gradient_checkpointing",
                tuple(f"{role}.model_args.disable_gradient_checkpointing" for role in TRAINED),
                "the other way round",
                flipped,
            ),
            Rule(
                "trainer.gradient_checkpointing_use_reentrant",
                tuple(f"{role}.model_args.gradient_checkpointing_use_reentrant" for role in TRAINED),
                value=truth,
            ),
            Rule(
                "trainer.flash_attn",
                tuple(f"{role}.model_args.attn_implementation" for role in COMPUTING),
                "true: `fa2`",
                lambda value: "fa2" if truth(value) else "sdpa",
            ),
            Rule("trainer.reward.model.path", value=refused(REWARD_MODEL, None), note=NO_MODEL),
            Rule("trainer.reward.*", note=NO_MODEL),
            *_role("policy"),
            *_role("ref"),
            *_role("critic"),
            *_passed_through("train", ACTOR, CRITIC),
            *_passed_through("eval", REFERENCE),
        ),
    )
