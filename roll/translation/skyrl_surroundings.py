"""SkyRL's keys around the algorithm: adapters, further options of engines and Megatron, measuring, and what is not
available here."""

from __future__ import annotations

from typing import Any

from roll.translation.rules import (
    ACTOR,
    CRITIC,
    ENGINE,
    EXPERTS,
    MULTIMODAL,
    OPTIONS,
    REFERENCE,
    TURNS,
    Rule,
    Section,
    listed,
    number,
    optional,
    refused,
    whole,
)

ENGINE_KEYS = "generator.inference_engine"
SAMPLING, EVALUATION = "generator.sampling_params", "generator.eval_sampling_params"
MEASURING = "measures a run and changes nothing in it; `profiler_timeline` and `profiler_memory` measure here"
ROLES = (("policy", ACTOR), ("ref", REFERENCE), ("critic", CRITIC))


def _adapters() -> tuple[Rule, ...]:
    """LoRA of the policy and the critic."""
    rules: list[Rule] = []
    for name, ours, suffix in (("policy", ACTOR, ""), ("critic", CRITIC, ".critic")):
        theirs, arguments = f"trainer.{name}.model.lora", f"{ours}.model_args"
        rules += [
            Rule(
                f"{theirs}.rank", (f"{arguments}.lora_rank",), "0: no LoRA", whole, f"lora_rank{suffix}", computed=True
            ),
            Rule(
                f"{theirs}.alpha", (f"{arguments}.lora_alpha",), value=whole, fact=f"lora_alpha{suffix}", computed=True
            ),
            Rule(f"{theirs}.target_modules", (f"{arguments}.lora_target",), fact=f"lora_target{suffix}", computed=True),
            Rule(f"{theirs}.dropout", (f"{arguments}.lora_dropout",), value=number),
            Rule(
                f"{theirs}.exclude_modules {theirs}.lora_sync_path {theirs}.max_loras {theirs}.max_cpu_loras",
                note="no such choice here",
            ),
            Rule(
                f"{theirs}.init_method",
                note="`kaiming`: A as PEFT draws it, B zero",
                value=refused("adapters begin as PEFT draws them (kaiming)", "kaiming", None),
            ),
        ]
    return tuple(rules)


def _engines() -> tuple[Rule, ...]:
    """Stop strings, and what engines are asked for beyond their sizes."""
    only: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
        ("data_parallel_size", "engines over data-parallel groups serve mixtures of experts", (1, None)),
        ("expert_parallel_size", EXPERTS, (1, None)),
        (
            "pipeline_parallel_size",
            "engines in pipeline stages have no translation: set "
            "actor_infer.strategy_args.strategy_config.pipeline_parallel_size and num_gpus_per_worker",
            (1, None),
        ),
        ("external_proxy_url", "engines on other hosts are not available", (None,)),
        ("external_server_urls", "engines on other hosts are not available", (None, [])),
        ("remote_urls", "engines on other hosts are not available", (None, [])),
        ("language_model_only", "the language part of a model of images is not supported yet", (False, None)),
        ("enable_return_routed_experts", EXPERTS, (False, None)),
        ("fp8", "quantised engines are not available: they would sample from another model", (False, None)),
    )
    return (
        Rule(
            f"{SAMPLING}.stop",
            (f"{ENGINE}.generating_args.stop_strings", f"{ENGINE}.generating_args.include_stop_str_in_output"),
            "the stop string stays in the response, as there",
            optional(listed),
            "stop.train",
            computed=True,
        ),
        Rule(
            f"{EVALUATION}.stop",
            ("validation.generating_args.stop_strings", "validation.generating_args.include_stop_str_in_output"),
            "the stop string stays in the response, as there",
            optional(listed),
            "stop.validation",
            computed=True,
        ),
        *(
            Rule(f"{theirs}.repetition_penalty", (f"{ours}.repetition_penalty",), value=number)
            for theirs, ours in ((SAMPLING, f"{ENGINE}.generating_args"), (EVALUATION, "validation.generating_args"))
        ),
        Rule(
            f"{SAMPLING}.logprobs {EVALUATION}.logprobs",
            note="the log-prob of each sampled token always comes with it",
        ),
        Rule(
            f"{SAMPLING}.additional_kwargs.* {EVALUATION}.additional_kwargs.*",
            note="none",
            value=refused("further sampling parameters have no translation", None),
        ),
        Rule(
            "generator.chat_template_kwargs.*",
            (f"{ACTOR}.data_args.chat_template_kwargs.{{rest}}", "validation.data_args.chat_template_kwargs.{rest}"),
            "given to the chat template, in validation too",
        ),
        *(
            Rule(
                f"generator.{name} {ENGINE_KEYS}.{name}",
                note=f"`{neutral[0]}` only".lower(),
                value=refused(reason, *neutral),
            )
            for name, reason, neutral in only
        ),
        Rule(
            f"{ENGINE_KEYS}.delta_weight_sync.* generator.delta_weight_sync.*",
            note="weights go to the engines directly, not over storage",
        ),
        Rule(
            "generator.max_input_length",
            note="counts over several turns; a single prompt is limited by `trainer.max_prompt_length`",
            value=whole,
        ),
        Rule(
            f"{ENGINE_KEYS}.enable_http_endpoint {ENGINE_KEYS}.http_endpoint_host {ENGINE_KEYS}.http_endpoint_port "
            f"{ENGINE_KEYS}.model_dtype {ENGINE_KEYS}.vllm_v1_disable_multiproc {ENGINE_KEYS}.served_model_name "
            f"{ENGINE_KEYS}.override_existing_update_group {ENGINE_KEYS}.enable_ray_prometheus_stats "
            f"{ENGINE_KEYS}.vllm_stats_interval "
            f"{ENGINE_KEYS}.weight_transfer_threshold_cuda_ipc_GB {ENGINE_KEYS}.fully_sharded_loras "
            "generator.enable_http_endpoint generator.http_endpoint_host generator.http_endpoint_port "
            "generator.weight_transfer_threshold_cuda_ipc_GB generator.fully_sharded_loras "
            "generator.enable_ray_prometheus_stats "
            "generator.vllm_stats_interval generator.append_eos_token_after_stop_str_in_multi_turn "
            "generator.trajectory_logging.*",
            note="no such choice here",
        ),
    )


def _megatron() -> tuple[Rule, ...]:
    """What Megatron is told beyond its sizes."""
    rules: list[Rule] = []
    for name, ours in ROLES:
        theirs = f"trainer.{name}.megatron_config"
        rules += [
            Rule(
                f"{theirs}.expert_tensor_parallel_size {theirs}.moe_router_enable_expert_bias "
                f"{theirs}.moe_per_layer_logging {theirs}.moe_enable_routing_replay",
                note="dense models",
                value=refused(EXPERTS, 1, None, False),
            ),
            Rule(
                f"{theirs}.moe_token_dispatcher_type {theirs}.moe_router_load_balancing_type {theirs}.moe_grouped_gemm "
                f"{theirs}.moe_router_score_function {theirs}.moe_router_dtype {theirs}.moe_aux_loss_coeff "
                f"{theirs}.moe_router_topk_scaling_factor {theirs}.moe_permute_fusion",
                note="has no effect without experts",
            ),
            Rule(
                f"{theirs}.empty_cuda_cache {theirs}.ddp_config.* {theirs}.lora_config.* "
                f"{theirs}.model_config_kwargs.* "
                f"{theirs}.dist_ckpt_optim_fully_reshardable {theirs}.freeze_moe_router",
                note="no such choice here",
            ),
            Rule(f"trainer.{name}.torch_profiler_config.*", note=MEASURING),
            Rule(
                f"trainer.{name}.language_model_only",
                note="false",
                value=refused("the language part of a model of images is not supported yet", False, None),
            ),
            Rule(
                f"trainer.{name}.model_config_kwargs.*",
                (f"{ours}.model_args.model_config_kwargs.{{rest}}",),
                "written over the model's `config.json`",
            ),
        ]
        if ours != REFERENCE:
            rules += [
                Rule(
                    f"{theirs}.optimizer_config_kwargs.optimizer_cpu_offload",
                    (f"{ours}.{OPTIONS}.optimizer_cpu_offload",),
                    "moments stay on the devices during the step: the same numbers, more memory; Megatron does not "
                    "move them "
                    "to the host here yet",
                    lambda value: False,
                ),
                Rule(f"{theirs}.optimizer_config_kwargs.*", note="memory and speed of the same AdamW"),
            ]
    return tuple(rules)


def surroundings() -> tuple[Section, ...]:
    return (
        Section("Adapters and further options", (*_adapters(), *_engines(), *_megatron())),
        Section(
            "Measuring, surroundings, and what is not available",
            (
                Rule(
                    "SKYRL_DUMP_INFRA_LOG_TO_STDOUT SKYRL_PYTHONPATH_EXPORT SKYRL_LD_LIBRARY_PATH_EXPORT "
                    "SKYRL_RAY_PG_TIMEOUT_IN_S SKYRL_WORKER_NCCL_TIMEOUT_IN_S SKYRL_LOG_LEVEL SKYRL_LOG_FILE "
                    "SKYRL_LOG_DIR SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S",
                    note="of their program alone",
                ),
                Rule(
                    "trainer.tracker_commit_each_step trainer.hf_hub_repo trainer.enable_ray_gpu_monitor "
                    "trainer.dump_data_batch_path "
                    "trainer.policy.record_memory_path trainer.micro_eval_batch_size trainer.tracker.*",
                    note="no such choice here",
                ),
                Rule(
                    "trainer.max_tokens_per_microbatch",
                    note="-1; `use_dynamic_batching_in_train` forms micro-batches by tokens",
                    value=refused(
                        "micro-batches by tokens have no translation: use_dynamic_batching_in_train forms them",
                        -1,
                        None,
                    ),
                ),
                Rule(
                    "trainer.override_entrypoint",
                    note="null",
                    value=refused("names a program of its own: what it trains is in its code", None),
                ),
                Rule(
                    "trainer.arctic_rl.*",
                    note="options of another program",
                    value=refused("belongs to ArcticRL's own program"),
                ),
                Rule(
                    "trainer.fully_async.*",
                    note="`async_generation_ratio` runs generation ahead",
                    value=refused("has no translation: async_generation_ratio says how far generation runs ahead"),
                ),
                Rule(
                    "trainer.rope_scaling trainer.rope_theta generator.rope_scaling generator.rope_theta",
                    note="null",
                    value=refused(
                        "has no translation: model_args.model_config_kwargs changes a model's config.json", None
                    ),
                ),
                Rule("environment.skyrl_gym.*", note="belongs to environments", value=refused(TURNS)),
                Rule(
                    "generator.step_wise_trajectories generator.use_conversation_multi_turn_tools",
                    note="false",
                    value=refused(TURNS, False, None),
                ),
                Rule(
                    "generator.vision_language_generator generator.is_multimodal",
                    value=refused(MULTIMODAL, False),
                    note="false",
                ),
            ),
        ),
    )
