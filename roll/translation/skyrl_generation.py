"""SkyRL's keys of generation: engines and sampling."""

from __future__ import annotations

from roll.translation.rules import ENGINE, OPTIONS, STRATEGY, Rule, Section, number, one_of, refused, truth, whole


def _engines() -> tuple[Rule, ...]:
    """The engines and their options."""
    engine = f"{ENGINE}.{OPTIONS}"
    return (
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
        *(
            Rule(f"generator.{name} generator.inference_engine.{name}", (f"{engine}.{ours}",), value=kind)
            for name, ours, kind in (
                ("gpu_memory_utilization", "gpu_memory_utilization", number),
                ("max_num_seqs", "max_num_seqs", whole),
                ("max_num_batched_tokens", "max_num_batched_tokens", whole),
                ("enforce_eager", "enforce_eager", truth),
                ("enable_prefix_caching", "enable_prefix_caching", truth),
                ("enable_chunked_prefill", "engine_args.enable_chunked_prefill", truth),
            )
        ),
        Rule(
            "generator.engine_init_kwargs.* generator.inference_engine.engine_init_kwargs.*",
            (f"{engine}.engine_args.{{rest}}",),
        ),
    )


def _sampling() -> tuple[Rule, ...]:
    """How training and validation sample."""
    sampling, evaluation = "generator.sampling_params", "generator.eval_sampling_params"
    validation = "validation.generating_args"
    return (
        Rule(f"{sampling}.max_generate_length", ("response_length",), value=whole, fact="response_length"),
        *(
            Rule(f"{theirs}.{name}", (f"{ours}.{name}",), value=kind)
            for theirs, ours in ((sampling, f"{ENGINE}.generating_args"), (evaluation, validation))
            for name, kind in (("temperature", number), ("top_p", number), ("min_p", number), ("top_k", whole))
        ),
        Rule(f"{evaluation}.max_generate_length", (f"{validation}.max_new_tokens",), value=whole),
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
    )


def generation() -> Section:
    return Section("Generation", (*_engines(), *_sampling()))
