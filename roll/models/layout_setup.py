"""Models of transformers made to compute over layouts: attention replaced by
:func:`roll.models.attention.layout_attention`, and rotary angles that depend on a row's length (``longrope``,
``dynamic``) chosen for each row.

transformers chooses angles by the largest position of a whole batch: a short row beside a long one, or beside padding,
gets other ones than alone.  Here each token gets those of its own row's length, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.models.attention import layout_attention
from roll.models.layouts import TokenLayout
from roll.models.patterns import PackedSequences, PrefixTree

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_NAME = "roll_layouts"
FULL, SLIDING = "full_attention", "sliding_attention"
_REPLACEABLE = ("sdpa", "flash_attention_2")


def attention_cap(config: PretrainedConfig) -> float | None:
    """The soft cap c of a model's attention scores, ``c * tanh(scores / c)`` (Gemma 2); None: it has none."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None)


def logits_cap(config: PretrainedConfig) -> float | None:
    """The soft cap of a model's logits (Gemma 2, Gemma 3n), likewise."""
    return getattr(config.get_text_config(), "final_logit_softcapping", None)


def head_dim(config: PretrainedConfig) -> int:
    """Numbers of a head's key, from the configuration of a language model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def use_layout_attention(model: PreTrainedModel, key: str) -> None:
    """Make ``model`` compute attention by :func:`layout_attention`.

    Args:
        key: the configuration key that needs it, for messages.

    Raises:
        ValueError: a model with layers other than causal attention, full or in a window, or that does not take an
            attention function.
    """
    replace_attention(model, key, ATTENTION_NAME, layout_attention, (FULL, SLIDING))


def replace_attention(
    model: PreTrainedModel, key: str, name: str, function: Callable[..., Any], known: Sequence[str]
) -> None:
    """Make ``model`` compute attention by ``function``, which transformers will know as ``name``.

    Args: as :func:`use_layout_attention`; ``known`` are the types of layers that ``function`` computes.

    Raises: as :func:`use_layout_attention`.
    """
    from transformers import AttentionInterface

    text_config, neutral = model.config.get_text_config(), "1" if key.endswith("ulysses_size") else "false"
    kinds = getattr(text_config, "layer_types", None)
    replaceable = (*_REPLACEABLE, "eager") if attention_cap(text_config) is not None else _REPLACEABLE
    # Families older than `layer_types` have one window for all layers, or none.
    if kinds is None:
        kinds = [SLIDING] if getattr(text_config, "sliding_window", None) else []
    if other := set(kinds) - set(known):
        raise ValueError(
            f"{key}: this {text_config.model_type} model has layers of type {', '.join(sorted(other))}; it works "
            f"only where every layer is {' or '.join(known)}. Set {key}: {neutral}"
        )
    if not getattr(model, "_supports_attention_backend", False) or (
        text_config._attn_implementation not in replaceable
    ):
        raise ValueError(
            f"{key}: needs a model whose attention can be replaced, with model_args.attn_implementation: sdpa; "
            f"{type(model).__name__} runs {text_config._attn_implementation}. Set {key}: {neutral}"
        )
    AttentionInterface.register(name, function)
    # Unknown to the registry of masks, this name also keeps the model from building a mask.
    # A vision tower keeps its own: patches of an image see each other both ways.
    model.set_attn_implementation(name if text_config is model.config else {"text_config": name})
    # A value model's body has a configuration of its own; none may be left out, or it would ignore the layout.
    body: Any = model if text_config is model.config else model.base_model.language_model
    configs: list[Any] = [module.config for module in body.modules() if hasattr(module, "config")]
    assert all(config._attn_implementation == name for config in configs)


def check_context_size(config: PretrainedConfig, context_size: int) -> None:
    """
    Raises:
        ValueError: heads that so many ranks cannot share evenly.
    """
    heads = config.get_text_config().num_attention_heads
    if heads % context_size:
        divisors = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ValueError(
            f"model_args.ulysses_size: {context_size} does not divide the model's {heads} attention heads; use one of "
            f"{', '.join(map(str, divisors))}"
        )


_LENGTHS = "row_lengths"


def dependent_rotaries(model: nn.Module) -> list[Any]:
    """Return the modules whose angles transformers' ``dynamic_rope_update`` changes, by its own rule."""
    found = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            found.append(module)
    return found


def longest_alike(rotary: Any) -> int:
    """Return the length up to which all rows have the same angles."""
    parameters = rotary.config.rope_parameters
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    longropes = [part for part in parts if part.get("rope_type") == "longrope"]
    lengths = [part.get("original_max_position_embeddings") for part in longropes]
    return int(min([*filter(None, lengths), rotary.original_max_seq_len]))


def choose_by_row(rotary: Any) -> None:
    """Make ``rotary`` use the lengths that :func:`set_row_lengths` gives it, in place."""
    if hasattr(rotary, _LENGTHS):
        return
    setattr(rotary, _LENGTHS, None)
    rotary.of_batch = rotary.forward
    rotary.forward = MethodType(_forward, rotary)


def set_row_lengths(rotaries: list[Any], layout: TokenLayout) -> None:
    """Before a forward pass over ``layout``.

    Raises:
        ValueError: a layout in which some tokens would need the angles of two lengths, or ranks know no lengths.
    """
    alike, parts = min(map(longest_alike, rotaries)), layout.context_group.size() if layout.context_group else 1
    if parts > 1 and layout.input_ids.shape[1] * parts > alike:
        raise ValueError(
            f"model_args.ulysses_size: {parts}, but rotary angles of this model depend on a row's length beyond "
            f"{alike} tokens; set it to 1, or shorten rows"
        )
    lengths = None if parts > 1 else _row_lengths(layout, alike).clamp(min=alike)
    for rotary in rotaries:
        setattr(rotary, _LENGTHS, lengths)


def _row_lengths(layout: TokenLayout, alike: int) -> Tensor:
    """int64 (S, T): tokens of each token's row, the last one, which predicts nothing, included."""
    sequences, length = layout.input_ids.shape
    device, pattern = layout.input_ids.device, layout.pattern
    if pattern is None:
        last = torch.full((sequences,), -2, device=device)
        last = last.scatter_reduce(0, layout.predictors // length, layout.predictors % length, "amax")
        return (last + 2)[:, None].expand(-1, length)
    if isinstance(pattern, PackedSequences):
        counts = torch.tensor(pattern.lengths, device=device)
        return (counts + 1).repeat_interleave(counts)[None]
    assert isinstance(pattern, PrefixTree)
    shared = pattern.row_lengths[pattern.rows > 1]
    if len(shared) and (longest := int(shared.max())) > alike:
        raise ValueError(
            f"use_prefix_sharing: a row of {longest} tokens, but rotary angles of this model depend on a row's "
            f"length beyond {alike} tokens, and rows that share a beginning share its angles; set "
            "use_prefix_sharing: false"
        )
    return pattern.row_lengths[None]


def _forward(rotary: Any, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    lengths = getattr(rotary, _LENGTHS)
    if lengths is None:
        return rotary.of_batch(x, position_ids, *args, **kwargs)
    # One pass of the model's own code for each length that occurs: batches have few beyond the original one.
    positions = position_ids.expand(lengths.shape)
    chosen: tuple[Tensor, Tensor] | None = None
    for length in lengths.unique().tolist():
        # dynamic_rope_update keeps the angles of the longest row so far until a short batch resets them: reset here.
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        if hasattr(rotary, "original_inv_freq"):  # one for each kind of layer otherwise
            rotary.register_buffer("inv_freq", rotary.original_inv_freq.to(x.device), persistent=False)
        # It reads the length off the largest position: an extra column has that of this length, and positions beyond it
        # (padding, longer rows) are clamped.
        marked = torch.cat([positions.clamp(max=length - 1), positions.new_full((len(positions), 1), length - 1)], 1)
        cos, sin = (part[:, :-1] for part in rotary.of_batch(x, marked, *args, **kwargs))
        own = (lengths == length)[..., None]
        chosen = (cos, sin) if chosen is None else (torch.where(own, cos, chosen[0]), torch.where(own, sin, chosen[1]))
    assert chosen is not None
    return chosen
