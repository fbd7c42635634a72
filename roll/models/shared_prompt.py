"""Attention for tokens laid out by :func:`roll.models.layouts.shared_prompt_layout`.

Prompts attend to themselves; each response part attends to its prompt's keys and its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roll.models.layouts import PromptParts


def shared_prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, prompt_parts: PromptParts, scaling: float | None
) -> Tensor:
    """(1, T, heads, head_dim) for queries, keys and values (1, heads, T, head_dim) of T tokens.

    Args:
        scaling: of the scores; None: head_dim ** -0.5.
    """
    heads, head_dim = query.shape[1], query.shape[3]
    num_prompts, prompt_width = prompt_parts.prompts.shape
    num_parts, part_width = prompt_parts.parts.shape
    prompt_query, part_query = _split(query, prompt_parts)
    prompt_key, part_key = _split(key, prompt_parts)
    prompt_value, part_value = _split(value, prompt_parts)

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
    return output.view(1, -1, heads, head_dim)


def _split(tensor: Tensor, prompt_parts: PromptParts) -> tuple[Tensor, Tensor]:
    """(1, heads, N, head_dim) -> prompts (G, P, heads * head_dim) and parts (B, R, heads * head_dim)."""
    rows = tensor[0].transpose(0, 1).flatten(1)
    prompts, parts = prompt_parts.prompts, prompt_parts.parts
    return (
        rows.index_select(0, prompts.flatten()).view(*prompts.shape, -1),
        rows.index_select(0, parts.flatten()).view(*parts.shape, -1),
    )
