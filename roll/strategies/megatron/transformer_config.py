"""From a Hugging Face configuration and the role's options to Megatron's ``TransformerConfig``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from roll.config.roles import ModelArguments
from roll.config.strategies.registry import MegatronStrategyConfig
from roll.strategies.megatron.parallel import ParallelSizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_transformer_config(
    hf: PretrainedConfig,
    args: ModelArguments,
    options: MegatronStrategyConfig,
    sizes: ParallelSizes,
    dtype: torch.dtype,
) -> TransformerConfig:
    """
    Raises:
        ValueError: sizes that do not fit the model, or an unknown name in ``additional_configs``.
    """
    _check_heads(hf, sizes)
    settings = _architecture(hf) | _parallelism(options, sizes, dtype) | _recomputation(args, options)
    known = {name for name in TransformerConfig.__dataclass_fields__ if not name.startswith("_")}
    unknown = options.additional_configs.keys() - known
    if unknown:
        raise ValueError(
            f"strategy_config.additional_configs: Megatron's TransformerConfig has no {', '.join(sorted(unknown))}; "
            "see megatron.core.transformer.TransformerConfig for its fields"
        )
    return TransformerConfig(**(settings | options.additional_configs))


def head_dim(hf: PretrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def _architecture(hf: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type == "qwen3",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _parallelism(options: MegatronStrategyConfig, sizes: ParallelSizes, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = sizes.virtual > 1
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if interleaved else None,
        "context_parallel_size": sizes.context,
        "sequence_parallel": sizes.sequence_parallel,
        "pipeline_model_parallel_layout": options.pipeline_model_parallel_layout,
        "account_for_embedding_in_pipeline_split": options.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": options.account_for_loss_in_pipeline_split,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # Losses come divided by global denominators: Megatron is to scale neither losses nor gradients.
        "calculate_per_token_loss": True,
        # Every weight is read from a file.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Stages tell each other the shapes of micro-batches, except in the interleaved schedule, whose ranks exchange
        # in both directions at once: there all micro-batches are padded to one shape.
        "variable_seq_lengths": sizes.pipeline > 1 and not interleaved,
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths asks for it, also without experts
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        # The interleaved schedule frees outputs that are still being sent: right with CUDA streams, wrong with gloo.
        "deallocate_pipeline_outputs": sizes.pipeline > 1 and (torch.cuda.is_available() or not interleaved),
        # The fused kernels are Triton's or Apex's.
        "bias_activation_fusion": options.bias_activation_fusion and torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def _recomputation(args: ModelArguments, options: MegatronStrategyConfig) -> dict[str, Any]:
    """Each layer is computed again in the backward pass unless the role chooses otherwise."""
    if options.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": options.recompute_modules}
    if options.recompute_granularity == "full" or not args.disable_gradient_checkpointing:
        return {
            "recompute_granularity": "full",
            "recompute_method": options.recompute_method or "uniform",
            "recompute_num_layers": options.recompute_num_layers or 1,
        }
    return {}


def _check_heads(hf: PretrainedConfig, sizes: ParallelSizes) -> None:
    for key, count in (("num_key_value_heads", hf.num_key_value_heads), ("intermediate_size", hf.intermediate_size)):
        if count % sizes.tensor:
            raise ValueError(
                f"strategy_config.tensor_model_parallel_size: {sizes.tensor} does not divide the model's {key} "
                f"{count}; use a size that does"
            )
    if hf.num_attention_heads % (sizes.tensor * sizes.context):
        raise ValueError(
            f"strategy_config.context_parallel_size: {sizes.context} x tensor_model_parallel_size {sizes.tensor} does "
            f"not divide the model's {hf.num_attention_heads} attention heads; use a smaller one"
        )
    stages = sizes.pipeline * sizes.virtual
    if hf.num_hidden_layers < stages:
        raise ValueError(
            f"strategy_config.pipeline_model_parallel_size: {stages} stages for {hf.num_hidden_layers} layers; use at "
            f"most {hf.num_hidden_layers}"
        )
