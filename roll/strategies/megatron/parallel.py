"""Set-up of a Megatron role: parallel sizes and process groups, Megatron's configuration, the Hugging Face model.

| dimension | what is sharded                              | ranks next to each other |
|-----------|----------------------------------------------|--------------------------|
| tensor    | every matrix, by rows or columns             | 1st (rank 0, 1, ...)     |
| context   | the sequence, in contiguous chunks           | 2nd                      |
| data      | the rows of the batch                        | 3rd                      |
| pipeline  | the layers, in stages                        | last                     |

The world is their product. Experts are sharded differently: within a pipeline stage, a matrix of an expert is sharded
over ``expert_tensor`` ranks next to each other, the experts over ``expert`` such groups, and what is left repeats them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from roll.config.roles import ModelArguments
from roll.config.strategies.base import ParallelDims
from roll.config.strategies.megatron import OF_WHOLE_LAYERS, MegatronStrategyConfig
from roll.models.build import checked_config, empty_model, local_folder
from roll.models.layout_setup import head_dim
from roll.strategies.base import ModelHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_transformer_config(
    hf: PretrainedConfig, args: ModelArguments, options: MegatronStrategyConfig, dims: ParallelDims, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration. Raises ValueError: an unknown name in ``additional_configs``."""
    settings = _architecture(hf) | _parallelism(options, dims, dtype)
    # Each layer is computed again in the backward pass unless the role chooses otherwise.
    if options.recompute_granularity == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": options.recompute_modules}
    elif options.recompute_granularity == "full" or not args.disable_gradient_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    known = {name for name in TransformerConfig.__dataclass_fields__ if not name.startswith("_")}
    if unknown := options.additional_configs.keys() - known:
        raise ValueError(
            f"strategy_config.additional_configs: Megatron's TransformerConfig has no {', '.join(sorted(unknown))}; "
            "see megatron.core.transformer.TransformerConfig for its fields"
        )
    more = options.additional_configs
    if settings.get("recompute_granularity") != "full":
        more = {name: value for name, value in more.items() if name not in OF_WHOLE_LAYERS}
    if settings["num_moe_experts"] is None:
        settings |= {"expert_model_parallel_size": 1, "moe_token_dispatcher_type": "alltoall"}
    return TransformerConfig(**(settings | more))


def _architecture(hf: PretrainedConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        # Megatron would sum gradients of OLMoE's norms over tensor-parallel ranks, which hold parts of them.
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe"),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2" or (hf.model_type == "qwen2_moe" and getattr(hf, "qkv_bias", True)),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": None,
    }
    if num_experts(hf):
        # Weights over the chosen experts sum to 1 where the softmax is over them, or is normalised, which is the same.
        sums_to_one = hf.model_type == "mixtral" or hf.norm_topk_prob
        shared = hf.model_type == "qwen2_moe"
        settings |= {
            "num_moe_experts": num_experts(hf),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_pre_softmax": not sums_to_one,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
            "moe_layer_freq": [int(sparse) for sparse in sparse_layers(hf)],
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size if shared else None,
            "moe_shared_expert_gate": shared,
        }
    return settings


def num_experts(hf: PretrainedConfig) -> int:
    """0 for a dense model."""
    return int(getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None) or 0)


def sparse_layers(hf: PretrainedConfig) -> list[bool]:
    """For each layer, whether it has experts: Qwen's may be dense here and there."""
    step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or ()
    return [bool(num_experts(hf)) and i not in dense and (i + 1) % step == 0 for i in range(hf.num_hidden_layers)]


def _parallelism(options: MegatronStrategyConfig, dims: ParallelDims, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = dims.vpp > 1
    return {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": dims.vpp if interleaved else None,
        "context_parallel_size": dims.cp,
        "sequence_parallel": dims.sequence_parallel,
        "pipeline_model_parallel_layout": options.pipeline_model_parallel_layout,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # Losses come divided by global denominators: Megatron is to scale neither losses nor gradients.
        "calculate_per_token_loss": True,
        # Every weight is read from a file.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Stages exchange the shapes of micro-batches, except in the interleaved schedule, whose ranks exchange
        # in both directions at once: there all micro-batches are padded to one shape.
        "variable_seq_lengths": dims.pp > 1 and not interleaved,
        "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff or 0.0,
        "moe_router_load_balancing_type": options.moe_router_load_balancing_type,
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        # The interleaved schedule frees outputs once their send is queued: safe in the order of a CUDA stream, but gloo
        # reads the memory later.
        "deallocate_pipeline_outputs": dims.pp > 1 and (torch.cuda.is_available() or not interleaved),
        # The fused kernels need Triton or Apex.
        "bias_activation_fusion": options.bias_activation_fusion and torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


FAMILIES = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
"""Values of ``model_type`` whose layers are translated (Qwen2.5 is ``qwen2``)."""


def skeleton(args: ModelArguments, head: ModelHead) -> PreTrainedModel:
    """The Hugging Face model without weights: names, shapes, configuration, and the code that writes an export.

    Raises:
        ValueError: no path, or a model that is not translated.
        OSError: no such folder, or a folder without a model.
    """
    if args.model_name_or_path:
        local_folder(args.model_name_or_path)  # The files say whether the output matrix is the embeddings.
    config = checked_config(args, head.value)
    reasons = {
        f"model_type {config.model_type}": config.model_type not in FAMILIES,
        "sliding-window layers": set(getattr(config, "layer_types", None) or ()) - {"full_attention"},
        "biases in all linear layers": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "a sliding window": config.model_type == "mixtral" and getattr(config, "sliding_window", None) is not None,
        "clipped queries": getattr(config, "clip_qkv", None) is not None,
        "jitter in its routers": bool(getattr(config, "router_jitter_noise", 0.0)),
        "biases in MLP layers": getattr(config, "mlp_bias", False),
        f"the activation {getattr(config, 'hidden_act', '')}": getattr(config, "hidden_act", "silu") != "silu",
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"model_args.model_name_or_path: {args.model_name_or_path} has {' and '.join(found)}, which the Megatron "
            "backend does not compute; use a Qwen2, Qwen2.5, Qwen3, Llama, Mixtral or OLMoE model, or strategy_name: "
            "fsdp2_train"
        )
    return empty_model(config, head.value, dtype=torch.float32)


def rotary_frequencies(model: PreTrainedModel) -> torch.Tensor:
    """float32 (head_dim / 2,): the inverse frequencies, with the model's own scaling (Llama 3, linear ...). Raises
    ValueError: a kind of scaling that also depends on the length of the sequence, or rescales attention."""
    on_meta: Any = model.base_model.rotary_emb
    rotary = type(on_meta)(model.config)
    if "dynamic" in rotary.rope_type or rotary.rope_type == "longrope" or rotary.attention_scaling != 1.0:
        raise ValueError(
            f"model_args.model_config_kwargs: rotary embeddings of type {rotary.rope_type} are not supported by the "
            "Megatron backend; use default, linear or llama3"
        )
    frequencies: torch.Tensor = rotary.inv_freq.float()
    return frequencies
