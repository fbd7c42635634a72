"""verl's keys around the algorithm: reward models and functions, further options of engines and backends, measuring,
and what is not available here."""

from __future__ import annotations

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
    one_of,
    optional,
    refused,
    truth,
    whole,
)
from roll.translation.verl_roles import ACTOR_KEYS, MODEL, REF_KEYS, ROLLOUT

ROLES = ((ACTOR_KEYS, ACTOR), (REF_KEYS, REFERENCE), ("critic", CRITIC))
MODEL_KEYS = ((MODEL, (ACTOR, ENGINE, REFERENCE)), ("critic.model", (CRITIC,)))
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32", "float16": "fp16", "fp16": "fp16"}
MEASURING = "measures a run and changes nothing in it; `profiler_timeline` and `profiler_memory` measure here"
SAME_NUMBERS = "another way to compute the same: memory and speed only"
FROM_HUGGING_FACE = "weights are read from the Hugging Face folder, under Megatron too"
OWN_CODE = "names code of theirs that runs inside their trainer"
SERVED = "a reward model is computed by its own role here"
REWARD_SERVICE = (
    "scores come from a program service there, for rows that their column data_source names; here code_sandbox runs "
    "programs itself: name it in rewards.<name>.worker_cls (docs/code-rewards.md)"
)

REWARDS = Section(
    "Reward models and functions",
    (
        Rule(
            "reward_model.enable reward.reward_model.enable",
            ("rewards.<name>.worker_cls", "reward_model.strategy_args.strategy_name"),
            "true: the score of a role `reward_model` is the reward, as there",
            lambda value: value is not None and truth(value),
            "rm",
            computed=True,
        ),
        Rule(
            "reward_model.model.path reward.reward_model.model_path reward.reward_model.model.path",
            ("reward_model.model_args.model_name_or_path",),
            "a sequence-classification model with one label",
            fact="rm_path",
            computed=True,
        ),
        Rule(
            "reward_model.model.input_tokenizer",
            ("rewards.<name>.reward_kwargs",),
            "null: it reads the policy's own tokens (`input: tokens`); else its own chat template (`input: chat`)",
            fact="rm_tokenizer",
            computed=True,
        ),
        Rule(
            "reward_model.model.trust_remote_code",
            ("reward_model.model_args.trust_remote_code",),
            value=truth,
            fact="rm_remote_code",
            computed=True,
        ),
        Rule(
            "reward_model.micro_batch_size_per_gpu",
            ("reward_model.infer_batch_size",),
            value=optional(whole),
            fact="rm_micro",
            computed=True,
        ),
        Rule(
            "reward_model.micro_batch_size",
            ("reward_model.infer_batch_size",),
            "of all devices together; divided by their number",
            optional(whole),
            "rm_micro_of_all",
            computed=True,
        ),
        Rule(
            "reward_model.enable_resource_pool reward.reward_model.enable_resource_pool",
            ("reward_model.device_mapping",),
            "true: devices of its own, behind all others",
            truth,
            "rm_own",
            computed=True,
        ),
        Rule(
            "reward_model.n_gpus_per_node reward.reward_model.n_gpus_per_node",
            ("reward_model.device_mapping",),
            value=whole,
            fact="rm_gpus",
            computed=True,
        ),
        Rule(
            "reward_model.nnodes reward.reward_model.nnodes",
            ("reward_model.device_mapping",),
            value=whole,
            fact="rm_nodes",
            computed=True,
        ),
        Rule(
            "reward_model.rollout.* reward.reward_model.rollout.* reward_model.model.fsdp_config.* "
            "reward_model.strategy "
            "reward_model.model.use_remove_padding reward_model.ulysses_sequence_parallel_size reward_model.max_length "
            "reward_model.use_dynamic_bsz reward_model.forward_max_token_len_per_gpu reward_model.megatron.* "
            "reward_model.model.use_fused_kernels reward_model.model.external_lib reward_model.use_reward_loop "
            "reward_model.load_weight",
            note=SERVED,
        ),
        Rule(
            "reward_model.num_workers reward_model.launch_reward_fn_async",
            note="rewards are always computed while engines generate; `rewards.<name>.world_size` says in how many "
            "workers",
        ),
        Rule(
            "reward.custom_reward_function.path custom_reward_function.path",
            ("rewards.<name>.worker_cls", "rewards.<name>.reward_kwargs"),
            "the file is loaded as it is, and its function called as verl calls it",
            fact="reward_file",
            computed=True,
        ),
        Rule(
            "reward.custom_reward_function.name custom_reward_function.name",
            ("rewards.<name>.reward_kwargs",),
            "null: `compute_score`",
            fact="reward_function",
            computed=True,
        ),
        Rule(
            "reward.custom_reward_function.reward_kwargs.* custom_reward_function.reward_kwargs.*",
            ("rewards.<name>.reward_kwargs",),
            "under `options`: given to the function",
            fact="reward_options",
            computed=True,
        ),
        Rule(
            "reward_model.sandbox_fusion.url reward.sandbox_fusion.url",
            note="programs are run by `code_sandbox`",
            value=refused(REWARD_SERVICE, None),
        ),
        Rule("reward_model.sandbox_fusion.* reward.sandbox_fusion.*", note="goes with the service's address"),
    ),
)

ENGINES = Section(
    "Further options",
    (
        Rule(
            "actor_rollout_ref.hybrid_engine",
            (f"{ENGINE}.device_mapping",),
            "true: engines and trainer name the same devices; false: devices of their own",
            truth,
            "colocate",
            computed=True,
        ),
        Rule(
            "rollout.n_gpus_per_node",
            (f"{ENGINE}.device_mapping",),
            "devices of the engines alone",
            whole,
            "engine_gpus",
            computed=True,
        ),
        Rule("rollout.nnodes", (f"{ENGINE}.device_mapping",), value=whole, fact="engine_nodes", computed=True),
        Rule(f"{ROLLOUT}.stop", (f"{ENGINE}.generating_args.stop_strings",), value=optional(listed)),
        Rule(f"{ROLLOUT}.repetition_penalty", (f"{ENGINE}.generating_args.repetition_penalty",), value=number),
        Rule(f"{ROLLOUT}.min_p", (f"{ENGINE}.generating_args.min_p",), value=number),
        Rule(
            f"{ROLLOUT}.cudagraph_capture_sizes",
            (f"{ENGINE}.{OPTIONS}.cudagraph_capture_sizes",),
            value=optional(listed),
            fact="graph_sizes",
            computed=True,
        ),
        Rule(
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes {ROLLOUT}.update_weights_bucket_megabytes",
            ("model_update_buffer_size_mb",),
            value=whole,
        ),
        Rule(
            f"{ROLLOUT}.checkpoint_engine.backend {ROLLOUT}.layered_summon {ROLLOUT}.layer_name_map.* {ROLLOUT}.seed "
            f"{ROLLOUT}.trace.* {ROLLOUT}.scheduling_policy {ROLLOUT}.prometheus.* {ROLLOUT}.skip_rollout "
            f"{ROLLOUT}.enable_sleep_mode {ROLLOUT}.checkpoint_engine.engine_kwargs.* "
            f"{ROLLOUT}.expert_tensor_parallel_size "
            f"{ROLLOUT}.micro_batch_size {ROLLOUT}.use_fire_sampling {ROLLOUT}.disable_log_requests",
            note="no such choice here",
        ),
        *(
            Rule(f"{ROLLOUT}.{name}", note=f"{neutral[0]} only", value=refused(reason, *neutral))
            for name, reason, neutral in (
                (
                    "data_parallel_size",
                    "engines over data-parallel groups serve mixtures of experts; each device (or "
                    "tensor-parallel group) is an engine of its own here",
                    (1, None),
                ),
                ("expert_parallel_size", EXPERTS, (1, None)),
                (
                    "pipeline_model_parallel_size",
                    "engines in pipeline stages have no translation: set "
                    "actor_infer.strategy_args.strategy_config.pipeline_parallel_size and num_gpus_per_worker",
                    (1, None),
                ),
                ("ignore_eos", "sampling past the end of a response is not available", (False, None)),
                ("over_sample_rate", "dropping the slowest requests of a step is not available", (0, 0.0, None)),
                ("quantization", "quantised engines are not available: they would sample from another model", (None,)),
                ("quantization_config_file", "quantised engines are not available", (None,)),
                ("enable_rollout_routing_replay", EXPERTS, (False, None)),
                ("limit_images", MULTIMODAL, (None,)),
            )
        ),
        Rule(
            "data.apply_chat_template_kwargs.*",
            (f"{ACTOR}.data_args.chat_template_kwargs.{{rest}}", "validation.data_args.chat_template_kwargs.{rest}"),
            "given to the chat template, in validation too",
        ),
        *(
            Rule(
                f"{theirs}.override_config.* {theirs}.override_config.model_config.*",
                tuple(f"{role}.model_args.model_config_kwargs.{{rest}}" for role in ours),
                "written over the model's `config.json`",
            )
            for theirs, ours in MODEL_KEYS
        ),
        Rule(
            f"{MODEL}.torch_dtype",
            tuple(f"{role}.model_args.dtype" for role in (ACTOR, REFERENCE)),
            value=one_of(DTYPES),
        ),
        Rule(
            f"{MODEL}.lora_adapter_path",
            (f"{ACTOR}.model_args.adapter_name_or_path",),
            "training goes on from this adapter, which names its own rank and layers",
            fact="lora_path",
            computed=True,
        ),
        Rule(f"{MODEL}.lora.rank", (f"{ACTOR}.model_args.lora_rank",), "0: no LoRA", whole, "lora_rank", computed=True),
        Rule(f"{MODEL}.lora.alpha", (f"{ACTOR}.model_args.lora_alpha",), value=whole, fact="lora_alpha", computed=True),
        Rule(
            f"{MODEL}.lora.target_modules",
            (f"{ACTOR}.model_args.lora_target",),
            "Megatron's layers under Hugging Face's names: `linear_qkv` is `q_proj`, `k_proj` and `v_proj`",
            lambda value: hugging_face_layers(value),
            "lora_target",
            computed=True,
        ),
        Rule(f"{MODEL}.lora.merge", note="adapters reach the engines as adapters, or merged where an engine needs it"),
        Rule(
            f"{MODEL}.lora.lora_A_init_method {MODEL}.lora.lora_B_init_method {MODEL}.lora.dropout {MODEL}.lora.type "
            f"{MODEL}.lora.exclude_modules {MODEL}.lora.a2a_experimental {MODEL}.lora.dtype {MODEL}.lora.adapter_path",
            note="theirs: Kaiming for A, zero for B, no dropout",
            value=refused("has no translation", "kaiming", "xavier", "zero", 0, 0.0, "lora", False, None, []),
        ),
        Rule(
            "critic.model.lora_rank critic.model.lora.rank",
            (f"{CRITIC}.model_args.lora_rank",),
            "0: no LoRA",
            whole,
            "lora_rank.critic",
            computed=True,
        ),
        Rule(
            "critic.model.lora_alpha critic.model.lora.alpha",
            (f"{CRITIC}.model_args.lora_alpha",),
            value=whole,
            fact="lora_alpha.critic",
            computed=True,
        ),
        Rule(
            "critic.model.target_modules critic.model.lora.target_modules",
            (f"{CRITIC}.model_args.lora_target",),
            fact="lora_target.critic",
            value=lambda value: hugging_face_layers(value),
            computed=True,
        ),
        *(
            Rule(
                f"{theirs}.fsdp_config.mixed_precision.param_dtype",
                (f"{ours}.{OPTIONS}.param_dtype",),
                value=one_of(DTYPES),
            )
            for theirs, ours in ROLES
        ),
        *(
            Rule(
                f"{theirs}.fsdp_config.mixed_precision.reduce_dtype",
                (f"{ours}.{OPTIONS}.reduce_dtype",),
                value=one_of(DTYPES),
            )
            for theirs, ours in ROLES
        ),
        *(
            Rule(f"{theirs}.fsdp_config.dtype {theirs}.dtype", (f"{ours}.model_args.dtype",), value=one_of(DTYPES))
            for theirs, ours in ROLES
        ),
        *(
            Rule(
                f"{theirs}.fsdp_config.mixed_precision.buffer_dtype {theirs}.entropy_checkpointing "
                f"{theirs}.entropy_from_logits_with_chunking {theirs}.fsdp_config.entropy_from_logits_with_chunking "
                f"{theirs}.fsdp_config.entropy_checkpointing {theirs}.fsdp_config.use_torch_compile "
                f"{theirs}.use_fused_kernels "
                f"{theirs}.fsdp_config.full_determinism {theirs}.calculate_entropy "
                f"{theirs}.calculate_sum_pi_squared",
                note=SAME_NUMBERS,
            )
            for theirs, _ in ROLES
        ),
        *(
            Rule(
                f"{theirs}.megatron.use_mbridge {theirs}.megatron.vanilla_mbridge "
                f"{theirs}.megatron.use_dist_checkpointing "
                f"{theirs}.megatron.dist_checkpointing_path {theirs}.megatron.dist_checkpointing_prefix "
                f"{theirs}.load_weight {theirs}.megatron.load_weight",
                note=FROM_HUGGING_FACE,
            )
            for theirs, _ in ROLES
        ),
        *(
            Rule(
                f"{theirs}.megatron.seed {theirs}.fsdp_config.seed {theirs}.fsdp_config.forward_only "
                f"{theirs}.megatron.forward_only {theirs}.megatron.override_ddp_config.* "
                f"{theirs}.megatron.extra.* {theirs}.megatron.use_remove_padding {theirs}.rollout_n "
                f"{theirs}.megatron.override_mcore_model_config.*",
                note="no such choice here",
            )
            for theirs, _ in ROLES
        ),
        *(
            Rule(
                f"{theirs}.optim.override_optimizer_config.optimizer_cpu_offload",
                (f"{ours}.{OPTIONS}.optimizer_cpu_offload",),
                value=lambda value: False,
                note="moments stay on the devices during the step: the same numbers, more memory; Megatron does not "
                "move them to the host here yet",
            )
            for theirs, ours in ROLES
            if ours != REFERENCE
        ),
        *(
            Rule(
                f"{theirs}.optim.override_optimizer_config.* {theirs}.optim.optimizer_impl "
                f"{theirs}.optim.lr_warmup_init "
                f"{theirs}.optim.use_checkpoint_opt_param_scheduler {theirs}.optim.weight_decay_incr_style "
                f"{theirs}.optim.num_cycles",
                note="AdamW with constant weight decay; warm-up starts at 0",
            )
            for theirs, _ in ROLES
        ),
        *(
            Rule(
                f"{theirs}.optim.optimizer",
                note="AdamW",
                value=refused("AdamW only", "AdamW", "adamw", "adam", "Adam", None),
            )
            for theirs, _ in ROLES
        ),
        *(
            Rule(
                f"{theirs}.optim.lr_decay_style",
                (f"{ours}.training_args.lr_scheduler_type",),
                value=one_of({"constant": "constant", "cosine": "cosine", "linear": "linear"}),
            )
            for theirs, ours in ROLES
            if ours != REFERENCE
        ),
        *(
            Rule(
                f"{theirs}.optim.lr_decay_steps {theirs}.optim.min_lr",
                note="0 or null: the schedule has as many steps as the run",
                value=refused("a schedule that ends before the run, or above 0, has no translation", 0, 0.0, -1, None),
            )
            for theirs, _ in ROLES
        ),
        Rule(
            f"{REF_KEYS}.ulysses_sequence_parallel_size",
            (f"{REFERENCE}.model_args.ulysses_size",),
            value=whole,
            fact="ulysses.reference",
        ),
        Rule(
            f"{REF_KEYS}.model.path", (f"{REFERENCE}.model_args.model_name_or_path",), "null: `pretrain`", optional(str)
        ),
        Rule("critic.model.tokenizer_path", note="the policy's tokenizer, as there"),
        Rule("critic.model.use_shm data.use_shm", note="no such choice here"),
        Rule(
            f"{REF_KEYS}.use_torch_compile {MODEL}.fused_kernel_options.* critic.model.use_fused_kernels "
            "critic.model.enable_activation_offload critic.model.use_liger",
            note=SAME_NUMBERS,
        ),
        Rule("actor_rollout_ref.nccl_timeout critic.nccl_timeout", note="remote phases have deadlines of their own"),
        Rule("critic.kl_ctrl.*", note="belongs to the policy"),
    ),
)

MEASURES = Section(
    "Measuring and surroundings",
    (
        Rule(
            f"global_profiler.* {ACTOR_KEYS}.profiler.* {REF_KEYS}.profiler.* critic.profiler.* {ROLLOUT}.profiler.* "
            "actor_rollout_ref.profiler.* reward_model.profiler.* trainer.profile_steps trainer.npu_profile.* "
            "trainer.profile_continuous_steps trainer.worker_nsight_options.* trainer.controller_nsight_options.*",
            note=MEASURING,
        ),
        Rule("ray_kwargs.* ray_init.* transfer_queue.*", note="how their processes find each other"),
        Rule(
            "VERL_LOGGING_LEVEL VERL_PPO_LOGGING_LEVEL VERL_SFT_LOGGING_LEVEL VERL_AUTO_PADDING VERL_USE_GPT_OSS "
            "VERL_RAY_NSIGHT VERL_QUEUE_LOGGING_LEVEL VERL_FILE_LOGGER_PATH VERL_FILE_LOGGER_ROOT",
            note="of their program alone",
        ),
        Rule(
            "VERL_USE_MODELSCOPE",
            ("model_download_type",),
            "true: models come from ModelScope",
            lambda value: "MODELSCOPE" if truth(str(value).strip().lower() in ("1", "true")) else None,
        ),
    ),
)

UNAVAILABLE = Section(
    "Not available",
    (
        Rule("data.image_key data.video_key data.audio_key", note="text only", value=refused(MULTIMODAL, None)),
        Rule("data.image_patch_size data.return_multi_modal_inputs", note="text only"),
        Rule(
            f"{ROLLOUT}.multi_turn.enable {ROLLOUT}.multi_turn.interaction_config_path "
            f"{ROLLOUT}.multi_turn.tool_config_path "
            f"{ROLLOUT}.agent.agent_loop_config_path {ROLLOUT}.agent.custom_async_server.path data.tool_config_path "
            f"{ROLLOUT}.agent.agent_loop_manager_class",
            note="one turn",
            value=refused(TURNS, False, None),
        ),
        Rule(
            f"{ROLLOUT}.agent.default_agent_loop",
            note="one turn",
            value=refused(TURNS, "single_turn_agent", None),
        ),
        Rule(f"{ROLLOUT}.multi_turn.*", note="has no effect without `multi_turn.enable`"),
        Rule(
            "data.custom_cls.path data.custom_cls.name data.sampler.class_path data.sampler.class_name "
            "data.datagen.path",
            note="`data_args` reads the file; `data_args.curriculum` orders it",
            value=refused(f"{OWN_CODE}; data_args.curriculum orders rows by a column", None),
        ),
        Rule(
            "data.train_max_samples data.val_max_samples",
            note="all rows; `data_args.dataset_filter` keeps some",
            value=refused(
                "a number of rows has no translation: data_args.dataset_filter keeps rows by a condition", -1, None
            ),
        ),
        Rule(
            f"{MODEL}.external_lib critic.model.external_lib {MODEL}.custom_chat_template {MODEL}.tokenizer_path "
            f"{MODEL}.hf_config_path data.tokenizer {MODEL}.exclude_modules critic.model.exclude_modules",
            note="null only",
            value=refused("has no translation: models bring their own code, tokenizer and template", None),
        ),
        *(
            Rule(
                f"{theirs}.megatron.expert_tensor_parallel_size",
                note="1 or null",
                value=refused(EXPERTS, 1, None),
            )
            for theirs, _ in ROLES
        ),
        Rule(f"{ACTOR_KEYS}.router_replay.mode", note="`disabled`", value=refused(EXPERTS, "disabled", None)),
        Rule(f"{ACTOR_KEYS}.router_replay.*", note="belongs to mixtures of experts"),
        Rule(
            f"{ACTOR_KEYS}.qat.enable", note="false", value=refused("training for quantisation is not available", False)
        ),
        Rule(f"{ROLLOUT}.engine_kwargs.trtllm.*", note="goes with the engine"),
        Rule("env.*", note="belongs to simulated worlds", value=refused("simulated worlds are not supported yet")),
        Rule("data.gen_batch_size", note="groups are filled up until `rollout_batch_size` remain"),
    ),
)

_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def hugging_face_layers(value: object) -> object:
    """Names of layers as Hugging Face's models have them; other values as they are."""
    if not isinstance(value, list):
        return value
    return [name for layer in value for name in _LAYERS.get(str(layer), (layer,))]


SURROUNDINGS = (REWARDS, ENGINES, MEASURES, UNAVAILABLE)
