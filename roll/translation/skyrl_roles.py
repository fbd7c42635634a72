"""SkyRL's keys of the roles: training, its backends, and generation."""

from __future__ import annotations

from roll.config.deepspeed import numbers
from roll.translation.rules import (
    ACTOR,
    CRITIC,
    ENGINE,
    OPTIONS,
    REFERENCE,
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
    ours, role = ROLES[name]
    theirs, options, arguments = f"trainer.{name}", f"{ours}.{OPTIONS}", f"{ours}.training_args"
    rules = [
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
        *(
            Rule(f"{theirs}.megatron_config.{size}", (f"{options}.{size}",), fact=f"{fact}.{role}")
            for size, fact in (
                ("tensor_model_parallel_size", "tensor"),
                ("pipeline_model_parallel_size", "pipeline"),
                ("context_parallel_size", "context"),
                ("expert_model_parallel_size", "expert"),
            )
        ),
        Rule(f"{theirs}.megatron_config.torch_profiler_config.*", note="profiles are not available yet"),
        Rule(f"{theirs}.use_torch_compile {theirs}.record_memory", note="no such choice here"),
        Rule(f"{theirs}.megatron_config.transformer_config_kwargs.*", (f"{options}.additional_configs.{{rest}}",)),
    ]
    if name != "ref":
        rules += [
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
        ]
    return tuple(rules)


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
            Rule(
                "trainer.reward.model.path", value=refused("reward models are not available yet", None), note=NO_MODEL
            ),
            Rule("trainer.reward.*", note=NO_MODEL),
            *_role("policy"),
            *_role("ref"),
            *_role("critic"),
            *_passed_through("train", ACTOR, CRITIC),
            *_passed_through("eval", REFERENCE),
        ),
    )


def generation() -> Section:
    engine, sampling = f"{ENGINE}.{OPTIONS}", "generator.sampling_params"
    validation = "validation.generating_args"
    return Section(
        "Generation",
        (
            Rule(
                "generator.backend generator.inference_engine.backend",
                (f"{ENGINE}.{STRATEGY}",),
                value=one_of({"vllm": "vllm", "sglang": "sglang"}),
                fact="engine",
            ),
            Rule("generator.n_samples_per_prompt", ("num_return_sequences_in_group",), value=whole, fact="samples"),
            Rule(
                "generator.num_inference_engines generator.inference_engine.num_engines",
                (f"{ENGINE}.device_mapping",),
                "engines x tensor-parallel ranks: devices",
                whole,
                "engines",
                computed=True,
            ),
            Rule(
                "generator.inference_engine_tensor_parallel_size generator.inference_engine.tensor_parallel_size",
                (f"{engine}.tensor_parallel_size", f"{ENGINE}.num_gpus_per_worker"),
                value=whole,
                fact="engine_tensor",
                computed=True,
            ),
            Rule(
                "generator.gpu_memory_utilization generator.inference_engine.gpu_memory_utilization",
                (f"{engine}.gpu_memory_utilization",),
                value=number,
            ),
            Rule(
                "generator.max_num_seqs generator.inference_engine.max_num_seqs",
                (f"{engine}.max_num_seqs",),
                value=whole,
            ),
            Rule(
                "generator.max_num_batched_tokens generator.inference_engine.max_num_batched_tokens",
                (f"{engine}.max_num_batched_tokens",),
                value=whole,
            ),
            Rule(
                "generator.enforce_eager generator.inference_engine.enforce_eager",
                (f"{engine}.enforce_eager",),
                value=truth,
            ),
            Rule(
                "generator.enable_prefix_caching generator.inference_engine.enable_prefix_caching",
                (f"{engine}.enable_prefix_caching",),
                value=truth,
            ),
            Rule(
                "generator.enable_chunked_prefill generator.inference_engine.enable_chunked_prefill",
                (f"{engine}.engine_args.enable_chunked_prefill",),
                value=truth,
            ),
            Rule(
                "generator.engine_init_kwargs.* generator.inference_engine.engine_init_kwargs.*",
                (f"{engine}.engine_args.{{rest}}",),
            ),
            Rule(f"{sampling}.max_generate_length", ("response_length",), value=whole, fact="response_length"),
            *(
                Rule(f"{sampling}.{name}", (f"{ENGINE}.generating_args.{name}",), value=kind)
                for name, kind in (("temperature", number), ("top_p", number), ("min_p", number), ("top_k", whole))
            ),
            *(
                Rule(f"generator.eval_sampling_params.{name}", (f"{validation}.{name}",), value=kind)
                for name, kind in (("temperature", number), ("top_p", number), ("min_p", number), ("top_k", whole))
            ),
            Rule("generator.eval_sampling_params.max_generate_length", (f"{validation}.max_new_tokens",), value=whole),
            Rule("generator.eval_n_samples_per_prompt", (f"{validation}.num_return_sequences",), value=whole),
            Rule(
                "generator.run_engines_locally generator.inference_engine.run_engines_locally",
                note="engines are this run's own",
                value=refused("engines on other hosts are not available", True),
            ),
            Rule(
                "generator.async_engine generator.batched generator.weight_sync_backend generator.model_dtype "
                "generator.inference_engine.async_engine generator.inference_engine.weight_sync_backend "
                "generator.inference_engine.distributed_executor_backend "
                "generator.vllm_v1_disable_multiproc generator.override_existing_update_group "
                "generator.remote_inference_engine_urls generator.use_conversation_multi_turn "
                "generator.step_wise_training",
                note="no such choice here",
            ),
        ),
    )
