"""Models whose attention is replaced by :func:`roll.models.attention.layout_attention`: which can be, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from roll.models.attention import layout_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_NAME = "roll_layouts"
FULL, SLIDING = "full_attention", "sliding_attention"
_REPLACEABLE = ("sdpa", "flash_attention_2")


def attention_cap(config: PretrainedConfig) -> float | None:
    """The soft cap c of a model's attention scores, ``c * tanh(scores / c)`` (Gemma 2); None: it has none."""
    cap: float | None = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return cap


def logits_cap(config: PretrainedConfig) -> float | None:
    """The soft cap of a model's logits (Gemma 2, Gemma 3n), likewise."""
    cap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return cap


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
