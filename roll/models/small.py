"""A small copy of a model: the real classes on a configuration with the same settings, fewer layers and narrow ones.

Only sizes change, so that what a family computes (changed logits, dropout, rotary scaling, windows) stays.  Matrices
are drawn wide enough for every layer to move the output.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from roll.models.build import HeadName, auto_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

VOCABULARY = 64
ORIGINAL_LENGTH = 16
"""Original length of the small copy, where the configuration has one: a row of more tokens is beyond it."""
WINDOW = 8
MOST_ELEMENTS = 2**25
"""Parameters of a copy; a larger one is not made."""

_HIDDEN = dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32)
_INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "ffn_hidden_size", "shared_expert_intermediate_size", "n_inner"), 48
)
_HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
_WIDTHS = dict.fromkeys(
    ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim", "q_lora_rank"), 8
)
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}
SIZES: dict[str, int] = {
    **_HIDDEN,
    **_INNER,
    **_HEADS,
    **_WIDTHS,
    **_EXPERTS,
    **_MAMBA,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), WINDOW),
    "vocab_size": VOCABULARY,
    "kv_lora_rank": 8,
    **dict.fromkeys(("n_words", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "n_groups"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    "qk_head_dim": 16,
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    "num_attention_groups": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "layers_block_type": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Keys of sizes. One that is missing here makes a copy wider than it need be, or impossible, which is said."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def small_model(
    config: PretrainedConfig, head: HeadName, implementation: str | None, trusted: bool = False
) -> PreTrainedModel | None:
    """A model in float32 on the CPU, in evaluation mode; None where no small one can be made. Sets torch's seed.

    Args:
        config: of the model itself, which is left as it is.
        implementation: of attention, as transformers knows it.
        trusted: code that comes with the model may run.
    """
    for change in (_made_anew, _with_sizes, _with_few_layers):
        try:
            changed = change(copy.deepcopy(config))
            changed._attn_implementation = implementation
            with torch.device("meta"):
                elements = sum(parameter.numel() for parameter in _built(changed, head, trusted).parameters())
            if elements <= MOST_ELEMENTS:
                return _drawn(changed, head, trusted)
        except Exception as error:  # whatever a family's own code makes of sizes that it has never seen
            logger.debug("self-test: no copy of %s by %s: %r", config.model_type, change.__name__, error)
    return None


def _built(config: PretrainedConfig, head: HeadName, trusted: bool) -> Any:
    cls, options = auto_class(config, head), {"dtype": torch.float32}
    options["attn_implementation"] = config._attn_implementation
    if hasattr(cls, "from_config"):
        return cls.from_config(config, trust_remote_code=trusted, **options)
    return cls._from_config(config, **options)


@torch.no_grad()
def _drawn(config: PretrainedConfig, head: HeadName, trusted: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = _built(config, head, trusted)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.get_input_embeddings().weight.normal_()
    model.eval()
    model(input_ids=torch.arange(2, 2 + WINDOW)[None], use_cache=False)  # a copy that cannot be computed is none
    found: PreTrainedModel = model
    return found


def _made_anew(config: Any) -> Any:
    """By the constructor, which derives what depends on sizes."""
    values = {key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "dtype")}
    return type(config)(**_changed(values, lambda key: key in values))


def _with_sizes(config: Any) -> Any:
    """By assignment, for constructors that refuse the values of their own configuration."""
    for key, value in _changed(config.to_dict(), lambda key: hasattr(config, key)).items():
        if key in SIZES or key in _LAYERS or isinstance(value, list | dict):
            setattr(config, key, value)
    return config


def _with_few_layers(config: Any) -> Any:
    values = _few_layers(config.to_dict())
    for key, value in values.items():
        if key in _LAYERS or isinstance(value, list):
            setattr(config, key, value)
    return config


def _changed(values: dict[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    changed = _few_layers(values)
    for key, size in _sizes(values, has):
        changed[key] = size
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if key in changed and not (isinstance(changed[key], int) and changed[key] < VOCABULARY):
            changed[key] = None if changed[key] is None else 1
    _shorten_rotary(changed)
    return changed


def _sizes(values: dict[str, Any], has: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    for key, size in SIZES.items():
        if has(key) and isinstance(values.get(key), int) and not isinstance(values.get(key), bool) and values[key] > 0:
            yield key, min(size, values[key])
    heads = next((values[key] for key in _HEADS if isinstance(values.get(key), int)), None)
    shared = values.get("num_key_value_heads")
    if isinstance(shared, int) and heads is not None:
        yield "num_key_value_heads", 4 if shared == heads else 1 if shared == 1 else 2
    if isinstance(values.get("moe_k"), int):
        yield "moe_k", 2
    if isinstance(values.get("expand"), int) and heads is not None and isinstance(values.get("head_dim"), int):
        yield "head_dim", 32 * values["expand"] // 4  # of Mamba 2: heads x width = hidden size x expand


def _few_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Two layers, or the first of each kind where there are more kinds."""
    changed = dict(values)
    count = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), 0)
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 2}
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True)) or [("",)] * count
    kept = sorted({kinds.index(kind) for kind in kinds})[:4]
    kept = kept if len(kept) > 1 else [0, 1]
    for key in _LAYERS:
        if isinstance(values.get(key), int):
            changed[key] = min(count, len(kept))
    by_layer = {key: value for key, value in values.items() if isinstance(value, dict) and _names_layers(value)}
    for key, value in by_layer.items():
        own = {int(index): options for index, options in value.items()}
        changed[key] = {place: own[index] for place, index in enumerate(kept) if index in own}
    return changed | {key: [value[index] for index in kept] for key, value in lists.items()}


def _names_layers(value: dict[Any, Any]) -> bool:
    return bool(value) and all(str(index).isdecimal() for index in value)


def _shorten_rotary(values: dict[str, Any]) -> None:
    """Positions and original length in their proportion, and as many factors as the narrow heads have frequencies."""
    parts = [values.get(key) for key in ("rope_parameters", "rope_scaling")]
    scalings = [copy.deepcopy(part) for part in parts if isinstance(part, dict)]
    longest = values.get("max_position_embeddings")
    original = original_length(values)
    for key in ("max_position_embeddings", "n_positions", "seq_length"):
        if isinstance(values.get(key), int):
            values[key] = min(values[key], 256)
    if original is not None and isinstance(longest, int):
        values["max_position_embeddings"] = max(ORIGINAL_LENGTH * longest // original, ORIGINAL_LENGTH)
    if original is None and any("dynamic" in str(scaling) for scaling in scalings):
        values["max_position_embeddings"] = ORIGINAL_LENGTH
    head = values.get("head_dim") or values.get("qk_rope_head_dim") or 8
    for scaling in scalings:
        nested = [scaling, *(one for one in scaling.values() if isinstance(one, dict))]
        for one in nested:
            if "original_max_position_embeddings" in one:
                one["original_max_position_embeddings"] = ORIGINAL_LENGTH
            width = int(head * float(one.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1))
            for key in ("short_factor", "long_factor"):
                if isinstance(one.get(key), list):
                    one[key] = one[key][: width // 2]
    if "original_max_position_embeddings" in values and original is not None:
        values["original_max_position_embeddings"] = ORIGINAL_LENGTH
    for key, scaling in zip(
        [key for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), dict)], scalings, strict=True
    ):
        values[key] = scaling


def original_length(values: dict[str, Any]) -> int | None:
    """Tokens up to which rotary positions are those of the first training; None where nothing is scaled.

    Args:
        values: of a text configuration.
    """
    for part in (values, values.get("rope_parameters"), values.get("rope_scaling")):
        if not isinstance(part, dict):
            continue
        for one in (part, *(inner for inner in part.values() if isinstance(inner, dict))):
            length = one.get("original_max_position_embeddings")
            if isinstance(length, int):
                return length
    return None
