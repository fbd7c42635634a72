"""Typed options of each strategy (``<role>.strategy_args.strategy_config``).

``StrategyArguments.strategy_config`` holds what the user wrote; :func:`typed_strategy_config` gives the checked
dataclass of the chosen strategy.  A key that belongs to another strategy is left out (the loader says so in one line),
so that one changed ``strategy_name`` is a whole switch of backend; a key that no strategy knows is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.reading.errors import ConfigError, Problems, closest
from roll.config.reading.fields import rules, setting
from roll.config.reading.schema import SchemaReader, build, known_keys
from roll.config.roles import StrategyArguments
from roll.config.strategies.base import StrategyConfig as StrategyConfig
from roll.config.strategies.fsdp import Fsdp1StrategyConfig as Fsdp1StrategyConfig
from roll.config.strategies.fsdp import Fsdp2StrategyConfig as Fsdp2StrategyConfig
from roll.config.strategies.fsdp import ShardedStrategyConfig as ShardedStrategyConfig
from roll.config.strategies.fsdp import WrapPolicy as WrapPolicy
from roll.config.strategies.sglang import SglangStrategyConfig
from roll.config.strategies.vllm import VllmStrategyConfig


@dataclass(frozen=True)
class HfInferStrategyConfig(StrategyConfig):
    """``hf_infer``: the embedded generation engine on transformers models; these are the engine's options.

    A reference under ``hf_infer`` is the plain model on each device, and needs none of them.
    """

    max_num_seqs: int = setting(256, ge=1)
    """Samples that are generated at the same time; further ones wait."""
    max_model_len: int | None = setting(None, ge=2)
    """Longest prompt plus response, which sizes the KV cache; null: the pipeline's longest sequence."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy``: random weights, for an engine that gets its weights from a trainer before it is used."""
    prefix_cache_tokens: int = setting(0, ge=0, example=65536)
    """Most tokens of finished samples whose keys and values are kept, so that a prompt that begins with them, the next
    turn of a conversation, is not computed from its start. Emptied at every weight update; 0: none are kept."""
    in_flight_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the KV cache of samples that are in flight when new weights arrive: computed again with them, or
    kept as the old weights left it, which costs nothing and makes the next tokens those of a mixture of both."""


@dataclass(frozen=True)
class DeepSpeedStrategyConfig(StrategyConfig):
    """``deepspeed_train`` and ``deepspeed_infer``: shorthands for the usual choices, and DeepSpeed's own JSON keys."""

    zero_stage: int | None = setting(None, ge=0, le=3, example=2)
    """0: every rank holds everything; 1: optimizer states sharded; 2: gradients too; 3: parameters too. null:
    ``zero_optimization.stage``, else 3. Forward-only roles shard under 3 only."""
    offload: Literal["none", "cpu", "nvme", "auto"] | None = None
    """Keep optimizer states in host memory or on a disk (ZeRO-2 and 3). ``auto``: cpu where there is an accelerator."""
    offload_param: bool | None = None
    """With ZeRO-3 and ``offload``: parameters too. null: the variable ``VERL_ENABLE_PARAM_OFFLOAD``, else false."""
    nvme_path: str | None = setting(None, read_if={"offload": ("nvme",)})
    """Folder on the disk, with ``offload: nvme``."""
    fp32_grad_accumulation: bool | None = None
    """Sum gradients of micro-batches in float32 under bf16 (ZeRO-1 to 3). null: the variable
    ``VERL_DS_ZERO2_FP32_ACCUM_PATCH``, else true."""
    step_each_micro_batch: bool | None = None
    """Call the engine's step after every micro-batch instead of the last one only; same numbers. null: the variable
    ``VERL_DS_ZERO2_STEP_EACH_MICRO``, else false."""
    zero_optimization: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through; numbers such as ``1e8`` reach DeepSpeed as the ints that it needs."""
    activation_checkpointing: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, with nothing switched on: PyTorch checkpoints the layers of transformers models, and
    ``model_args.disable_gradient_checkpointing`` says whether to."""
    aio: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section for disk offload, passed through."""
    bf16: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through except ``enabled``: ``model_args.dtype`` decides."""
    data_types: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through; ``grad_accum_dtype`` goes before ``fp32_grad_accumulation``."""
    comms_logger: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through."""
    flops_profiler: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through."""
    communication_data_type: str | None = None
    """Type in which gradients are summed over ranks; null: DeepSpeed's choice."""
    wall_clock_breakdown: bool = False
    """Log the times of forward, backward and step."""
    steps_per_print: int | None = setting(None, ge=1)
    """Optimizer steps between two progress lines of DeepSpeed; null: none."""
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    """Any further key of DeepSpeed's JSON, passed through; names are checked against DeepSpeed's own."""
    optimizer: dict[str, Any] = field(default_factory=dict, metadata=rules(inert="training_args decides"))
    """Accepted for older files."""
    scheduler: dict[str, Any] = field(default_factory=dict, metadata=rules(inert="training_args decides"))
    """Accepted for older files."""
    fp16: dict[str, Any] = field(default_factory=dict, metadata=rules(inert="model_args.dtype decides"))
    """Accepted for older files."""
    gradient_clipping: float | str | None = setting(None, inert="max_grad_norm decides")
    """Accepted for older files."""
    train_batch_size: int | str | None = setting(None, inert="training_args decides")
    """Accepted for older files."""
    train_micro_batch_size_per_gpu: int | str | None = setting(None, inert="training_args decides")
    """Accepted for older files."""
    gradient_accumulation_steps: int | str | None = setting(None, inert="training_args decides")
    """Accepted for older files."""
    prescale_gradients: bool = setting(False, inert="gradients are plain sums")
    """Accepted for older files."""
    zero_allow_untested_optimizer: bool = setting(True, inert="the optimizer is AdamW")
    """Accepted for older files."""


@dataclass(frozen=True)
class MegatronStrategyConfig(StrategyConfig):
    """``megatron_train`` and ``megatron_infer``: Megatron Core, for tensor- and pipeline-parallel models."""

    tensor_model_parallel_size: int = setting(1, ge=1)
    """Ranks over which every matrix is sharded."""
    pipeline_model_parallel_size: int = setting(1, ge=1)
    """Stages into which the layers are divided."""
    virtual_pipeline_model_parallel_size: int | None = setting(None, ge=1)
    """Chunks of layers on each pipeline rank, taken in turn (shorter pipeline bubbles); null: one."""
    context_parallel_size: int = setting(1, ge=1)
    """Ranks over which the sequence is sharded, in attention and everywhere else."""
    sequence_parallel: bool = False
    """Spread norms and residuals over the tensor-parallel ranks too, along the sequence (less memory)."""
    use_distributed_optimizer: bool = False
    """Shard float32 weights and moments over data-parallel ranks (ZeRO stage 1)."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the backward pass still runs."""
    ddp_bucket_size: int | None = setting(None, ge=1, read_if={"overlap_grad_reduce": (True,)})
    """Elements of gradient summed at once with ``overlap_grad_reduce``; null: Megatron's choice."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in the backward pass: whole layers or ``recompute_modules``. null: whole layers,
    unless ``model_args.disable_gradient_checkpointing``."""
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, read_if={"recompute_granularity": ("full", None)}
    )
    """With ``full``: all layers in groups of ``recompute_num_layers``, or the first so many; null: ``uniform``."""
    recompute_num_layers: int | None = setting(None, ge=1, read_if={"recompute_granularity": ("full", None)})
    """See ``recompute_method``; null: 1."""
    recompute_modules: list[str] | None = field(
        default=None, metadata=rules(read_if={"recompute_granularity": ("selective",)})
    )
    """With ``selective``: Megatron's names (``core_attn``, ``mlp``, ``layernorm``); null: ``core_attn``."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embeddings as a layer when layers are dealt out to stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output matrix as a layer when layers are dealt out to stages."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's own description of which layers are on which stage, such as ``Et*3|t*3L``."""
    bias_activation_fusion: bool = False
    """Fused activation kernel, on CUDA."""
    additional_configs: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's ``TransformerConfig``, passed through."""
    expert_model_parallel_size: int = setting(1, ge=1)
    """Expert-parallel ranks."""
    expert_tensor_parallel_size: int | None = setting(None, ge=1)
    """Tensor-parallel ranks of experts."""
    moe_token_dispatcher_type: str = setting("alltoall", inert="experts are not available yet; dense models have none")
    """Accepted for files of mixture-of-experts models."""
    moe_grouped_gemm: bool = setting(False, inert="experts are not available yet; dense models have none")
    """Accepted for files of mixture-of-experts models."""
    moe_permute_fusion: bool = setting(False, inert="experts are not available yet; dense models have none")
    """Accepted for files of mixture-of-experts models."""
    moe_layer_recompute: bool = setting(False, inert="experts are not available yet; dense models have none")
    """Accepted for files of mixture-of-experts models."""
    moe_aux_loss_coeff: float | None = setting(None, inert="experts are not available yet; dense models have none")
    """Accepted for files of mixture-of-experts models."""
    moe_shared_expert_overlap: bool = setting(False, inert="experts are not available yet; dense models have none")
    """Accepted for files of mixture-of-experts models."""
    mtp_num_layers: int | None = None
    """Multi-token-prediction layers."""
    fp8: str | None = None
    """fp8 computation."""
    fp8_recipe: str | None = None
    """Scaling of fp8."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer states in host memory and update there."""
    optimizer: Literal["adam"] = "adam"
    """AdamW; ``training_args`` has its options."""
    apply_rope_fusion: bool = setting(False, inert="rotary embeddings are computed by PyTorch")
    """Accepted for older files."""
    cross_entropy_loss_fusion: bool = setting(False, inert="log-probs have a head of their own")
    """Accepted for older files."""
    overlap_param_gather: bool = setting(False, inert="updated parameters are gathered after each optimizer step")
    """Accepted for older files."""
    delay_grad_reduce: bool = setting(False, inert="all stages reduce alike")
    """Accepted for older files."""
    distrib_optim_fully_reshardable: bool = setting(True, inert="checkpoints load under any parallel sizes")
    """Accepted for older files."""
    ckpt_format: str | None = setting(None, inert="checkpoints load under any parallel sizes")
    """Accepted for older files."""
    save_hf_model: bool = setting(False, inert="training_args.save_hf_model decides")
    """Accepted for older files."""
    save_merged_model: bool = setting(False, inert="exports are always merged")
    """Accepted for older files."""
    use_batched_model_update: bool = setting(False, inert="weights travel in buckets")
    """Accepted for older files."""
    compile_warmup: bool = setting(False, inert="nothing is compiled")
    """Accepted for older files."""
    bf16: bool = setting(False, inert="model_args.dtype decides")
    """Accepted for older files."""
    fp16: bool = setting(False, inert="model_args.dtype decides")
    """Accepted for older files."""


AVAILABLE: dict[str, type[StrategyConfig]] = {
    "fsdp2_train": Fsdp2StrategyConfig,
    "fsdp2_infer": Fsdp2StrategyConfig,
    "fsdp_train": Fsdp1StrategyConfig,
    "fsdp_infer": Fsdp1StrategyConfig,
    "deepspeed_train": DeepSpeedStrategyConfig,
    "deepspeed_infer": DeepSpeedStrategyConfig,
    "megatron_train": MegatronStrategyConfig,
    "megatron_infer": MegatronStrategyConfig,
    "hf_infer": HfInferStrategyConfig,
    "vllm": VllmStrategyConfig,
    "sglang": SglangStrategyConfig,
}
"""Strategies that run today, and the dataclass of their options."""

TRAIN_STRATEGIES = ("fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train")
INFER_STRATEGIES = (
    "fsdp2_infer",
    "fsdp2_train",
    "fsdp_infer",
    "fsdp_train",
    "deepspeed_infer",
    "deepspeed_train",
    "megatron_infer",
    "megatron_train",
    "hf_infer",
)
GENERATION_STRATEGIES = ("hf_infer", "vllm", "sglang")


def strategy_keys(strategy_name: str) -> frozenset[str]:
    """The option names of a strategy; empty for an unknown one."""
    options: type | None = AVAILABLE.get(strategy_name)
    return frozenset() if options is None else frozenset(known_keys(options))


def owners_of(key: str) -> list[str]:
    """Every strategy that has an option of this name."""
    return [name for name in AVAILABLE if key in strategy_keys(name)]


def read_strategy_config(arguments: StrategyArguments, path: str, problems: Problems) -> StrategyConfig | None:
    """The typed options, with every mistake added to ``problems`` under ``path``; None for a strategy without any."""
    name = arguments.strategy_name
    if name not in AVAILABLE:
        rule = f"must be one of {', '.join(AVAILABLE)}"
        problems.add(f"{path}.strategy_name", name, rule, closest(name, tuple(AVAILABLE)))
        return None
    own = strategy_keys(name)
    foreign = [key for key in arguments.strategy_config if key not in own and owners_of(key)]
    section = f"{path}.strategy_config"
    for key in foreign:
        problems.note(f"{section}.{key}", f"belongs to {', '.join(owners_of(key))}; no effect under {name}")
    data = {key: value for key, value in arguments.strategy_config.items() if key not in foreign}
    return build(AVAILABLE[name], SchemaReader(problems).read(AVAILABLE[name], data, section))


def typed_strategy_config(arguments: StrategyArguments) -> StrategyConfig:
    """The checked options of ``arguments.strategy_name``.

    Raises:
        ConfigError: an unknown strategy, an unknown option, a value of a wrong type.
    """
    problems = Problems()
    config = read_strategy_config(arguments, "strategy_args", problems)
    if config is None or problems.errors:
        raise ConfigError(problems.errors)
    return config
