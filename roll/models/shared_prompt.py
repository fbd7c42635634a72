"""Attention for tokens laid out by :func:`roll.models.layouts.shared_prompt_layout`.

Prompts attend to themselves; each response part attends to its prompt's keys and its own.  All other layers of a
transformer work on each token alone, so they need not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roll.models.layouts import PromptParts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_NAME = "roll_shared_prompt"


def use_shared_prompt_attention(model: PreTrainedModel, key: str) -> None:
    """Make ``model`` compute attention by :func:`shared_prompt_attention`.

    Args:
        key: the configuration key that asks for it, for messages.

    Raises:
        ValueError: a model with layers other than full causal attention, or that does not take an attention function.
    """
    from transformers import AttentionInterface

    _check_full_attention(model.config, key)
    if not getattr(model, "_supports_attention_backend", False) or model.config._attn_implementation != "sdpa":
        raise ValueError(
            f"{key}: needs a model whose attention can be replaced, with model_args.attn_implementation: sdpa; "
            f"{type(model).__name__} runs {model.config._attn_implementation}. Set {key}: false"
        )
    AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)
    # Unknown to the registry of masks, this name also keeps the model from building a mask.
    model.set_attn_implementation(ATTENTION_NAME)
    # A value model's body has a configuration of its own; none may be left behind, or it would ignore the layout.
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    assert all(config._attn_implementation == ATTENTION_NAME for config in configs)


def shared_prompt_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    prompt_parts: PromptParts | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, or with ``prompt_parts`` that of shared prompts. No dropout, no mask of the caller's.

    Args:
        query: (S, heads, T, head_dim); with ``prompt_parts`` S is 1 and T the number of tokens.
        key, value: (S, key-value heads, T, head_dim).
        scaling: of the scores; None: head_dim ** -0.5.

    Returns:
        (S, T, heads, head_dim), and None for the weights.
    """
    assert attention_mask is None, "the layout alone says who sees whom"
    groups = query.shape[1] // key.shape[1]
    if prompt_parts is None:
        key, value = _repeat_heads(key, 1, groups), _repeat_heads(value, 1, groups)
        output = scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    heads, head_dim = query.shape[1], query.shape[3]
    num_prompts, prompt_width = prompt_parts.prompts.shape
    num_parts, part_width = prompt_parts.parts.shape
    prompt_query, part_query = _split(query, prompt_parts)
    prompt_key, part_key = _split(_repeat_heads(key, 1, groups), prompt_parts)
    prompt_value, part_value = _split(_repeat_heads(value, 1, groups), prompt_parts)

    def by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(2, (heads, head_dim)).transpose(1, 2)

    def with_prompt(prompts: Tensor, parts: Tensor) -> Tensor:
        return by_head(torch.cat([prompts.index_select(0, prompt_parts.prompt_of_part), parts], dim=1))

    prompt_output = scaled_dot_product_attention(
        by_head(prompt_query), by_head(prompt_key), by_head(prompt_value), is_causal=prompt_width > 1, scale=scaling
    )
    part_output = scaled_dot_product_attention(
        by_head(part_query),
        with_prompt(prompt_key, part_key),
        with_prompt(prompt_value, part_value),
        attn_mask=prompt_parts.part_mask,
        scale=scaling,
    )
    output = torch.cat(
        [
            prompt_output.transpose(1, 2).reshape(num_prompts * prompt_width, heads * head_dim),
            part_output.transpose(1, 2).reshape(num_parts * part_width, heads * head_dim),
        ]
    ).index_select(0, prompt_parts.restore)
    return output.view(1, -1, heads, head_dim), None


def _split(tensor: Tensor, prompt_parts: PromptParts) -> tuple[Tensor, Tensor]:
    """(1, heads, N, head_dim) -> prompts (G, P, heads * head_dim) and parts (B, R, heads * head_dim)."""
    rows = tensor[0].transpose(0, 1).flatten(1)
    prompts, parts = prompt_parts.prompts, prompt_parts.parts
    return (
        rows.index_select(0, prompts.flatten()).view(*prompts.shape, -1),
        rows.index_select(0, parts.flatten()).view(*parts.shape, -1),
    )


def _repeat_heads(tensor: Tensor, dim: int, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, dim)


def _check_full_attention(config: PretrainedConfig, key: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if kinds:
        raise ValueError(
            f"{key}: this {config.model_type} model has layers of type {', '.join(sorted(kinds))}; prompts can be "
            f"shared only where every layer is full_attention. Set {key}: false"
        )
