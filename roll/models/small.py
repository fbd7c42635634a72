"""A small copy of a model: the real classes on a configuration with the same settings, fewer layers and narrow ones.

Only sizes change, so that what a family computes (changed logits, dropout, rotary scaling, windows) stays.  Matrices
are drawn wide enough for every layer to move the output.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from roll.models.build import HeadName, auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

VOCABULARY = 64
# Original length of the small copy, where the configuration has one: a row of more tokens is beyond it.
ORIGINAL_LENGTH = 16
WINDOW = 8
# Parameters of a copy that is computed in a second; a larger one is the last resort.
FEW_ELEMENTS = 2**20
# No copy has more.
MOST_ELEMENTS = 2**25

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
# Keys of sizes. One that is missing here makes a copy wider than necessary, or impossible, which the log reports.
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

_WIDENED = {*_HIDDEN, *_INNER, *_HEADS, *_EXPERTS, "moe_intermediate_size"}
_ENDINGS = {
    "heads": 4,
    "head_dim": 8,
    "ffn_dim": 48,
    "experts_per_token": 2,
    "vocab_size": VOCABULARY,
    "_vocab": VOCABULARY,
}
_OPEN = {"_heads": 4, "head_dim": 8, "_experts": 4, "experts_per_tok": 2}
_COUNTS = ("max_position_embeddings", "n_positions")
_ENDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")


@dataclass(frozen=True)
class Divided:
    """Ranks that a copy is divided over."""

    width: int = 1
    """Factor of hidden sizes, heads and experts, which ranks then divide evenly. Above 1 they may be larger than the
    model's own: nine heads on three ranks become twelve."""
    layers: int = 2
    """At least so many, a pipeline stage being a layer or more."""


WHOLE = Divided()


def small_model(
    config: PretrainedConfig,
    head: HeadName,
    implementation: str | None,
    trusted: bool = False,
    divided: Divided = WHOLE,
) -> PreTrainedModel | None:
    """A model in float32 on the CPU, in evaluation mode; None where no small one can be made. Sets torch's seed.

    Args:
        config: of the model itself, which is left as it is.
        implementation: of attention, as transformers knows it.
        trusted: code that comes with the model may run.
    """
    layers = divided.layers
    sizes = config.get_text_config().to_dict()
    whole = max((sizes[key] for key in _LAYERS if isinstance(sizes.get(key), int)), default=0)
    attempts: list[Callable[[Any], Any]] = [partial(_made_anew, divided=divided)]
    # What some families refuse: sizes out of proportion, options left open, and too few layers for their pattern.
    attempts += [
        partial(_made_anew, divided=Divided(divided.width, least), loosely=True, completely=completely)
        for least in (layers, max(layers, 8), max(layers, whole))
        for completely in (False, True)
    ]
    larger: list[tuple[int, Any]] = []
    for change in attempts:
        with _tried(config, change):
            changed = change(copy.deepcopy(config))
            changed._attn_implementation = implementation
            with torch.device("meta"):
                elements = sum(parameter.numel() for parameter in _built(changed, head, trusted).parameters())
            if elements <= FEW_ELEMENTS:
                return _drawn(changed, head, trusted)
            larger.append((elements, changed))
    for elements, changed in sorted(larger, key=itemgetter(0)):
        if elements <= MOST_ELEMENTS:
            with _tried(config, changed):
                return _drawn(changed, head, trusted)
    return None


@contextmanager
def _tried(config: PretrainedConfig, attempt: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a family's own code makes of sizes that it has never seen
        logger.debug("self-test: no copy of %s by %s: %r", config.model_type, attempt, error)


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
            # Wide enough that a layer left out, or a cap, moves log-probs by far more than rounding.
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.get_input_embeddings().weight.normal_()
    model.eval()
    model(input_ids=torch.arange(2, 2 + WINDOW)[None], use_cache=False)  # raises here, so that another copy is tried
    return model


def _made_anew(config: PretrainedConfig, divided: Divided, loosely: bool = False, completely: bool = False) -> Any:
    """Make the configuration by its constructor, which derives what depends on sizes; parts of a composite one too.

    Args:
        loosely: sizes of unknown names keep their proportion to the known ones, and a constructor that refuses entries
            of its own configuration gets the declared ones only.
        completely: numbers that the configuration leaves open are filled in.
    """
    values = {key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "dtype")}
    changed = _few_layers(values, divided.layers)
    changed |= dict(_sizes(changed, divided.width))
    for key in _ENDS:
        if key in changed and not (isinstance(changed[key], int) and changed[key] < VOCABULARY):
            changed[key] = None if changed[key] is None else 1
    _shorten_rotary(changed)
    if loosely:
        changed |= _in_proportion(values, changed, getattr(config, "attribute_map", {}))
    if completely:
        # Of other names None may be what is meant.
        changed |= {
            key: size
            for key, value in values.items()
            for ending, size in _OPEN.items()
            if value is None and key.endswith(ending)
        }
        if changed.get("layer_types", ()) is None:
            changed["layer_types"] = ["full_attention"] * changed["num_hidden_layers"]
    parts = {key: part for key, part in vars(config).items() if isinstance(part, PretrainedConfig)}
    if parts:
        text = config.get_text_config()
        small = {key: _made_anew(part, divided, loosely, completely) for key, part in parts.items()}
        changed |= small
        names = [
            key for key in values if key.endswith("_token_id") and key not in _ENDS and isinstance(values[key], int)
        ]
        for key, part in parts.items():
            if part is text:
                # The special tokens of images get ids after those of words, which the rows of the test draw from.
                changed |= {name: VOCABULARY + index for index, name in enumerate(names)}
                small[key].vocab_size += len(names)
        for part in small.values():
            if hasattr(part, "out_hidden_size"):
                part.out_hidden_size = _HIDDEN["hidden_size"] * divided.width
    try:
        return type(config)(**changed)
    except (TypeError, ValueError):
        if not loosely:
            raise
        declared = signature(type(config)).parameters
        return type(config)(**{key: value for key, value in changed.items() if key in declared})


def _sizes(values: dict[str, Any], width: int) -> Iterator[tuple[str, Any]]:
    def sized(size: int, own: int, widened: bool) -> int:
        return size * width if widened and width > 1 and own else min(size, own)

    for key, size in SIZES.items():
        widened = key in _WIDENED
        if isinstance(values.get(key), int) and not isinstance(values.get(key), bool) and values[key] > 0:
            yield key, sized(size, values[key], widened)
        elif isinstance(values.get(key), list):  # of each layer
            yield key, [sized(size, value, widened) if isinstance(value, int) else value for value in values[key]]
    heads = next((values[key] for key in _HEADS if isinstance(values.get(key), int)), None)
    shared = values.get("num_key_value_heads")
    if isinstance(shared, int) and heads is not None:
        own = sized(4, heads, True)
        yield "num_key_value_heads", own if shared == heads else 1 if shared == 1 else own // 2
    if isinstance(values.get("moe_k"), int):
        yield "moe_k", 2
    if isinstance(values.get("expand"), int) and heads is not None and isinstance(values.get("head_dim"), int):
        yield "head_dim", 32 * values["expand"] // 4  # of Mamba 2: heads x width = hidden size x expand


def _in_proportion(values: dict[str, Any], changed: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Sizes that :data:`SIZES` does not name, by transformers' own names for them (``attribute_map``), as multiples of
    the hidden size (of all heads or of each), and by what their names end with."""
    found: dict[str, Any] = {}
    others = {
        key: value
        for key, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool) and key not in SIZES and changed[key] == value
    }
    for name, key in aliases.items():
        if name in SIZES and key in others:
            found[key] = min(others[key], SIZES[name])
    for key, value in others.items():
        if key.endswith("heads"):
            found.setdefault(key, min(value, _ENDINGS["heads"]))
    changed = changed | found
    pairs = {key: (value, changed[key]) for key, value in values.items() if isinstance(value, int) and value > 0}
    hidden = next((pairs[key] for key in (*_HIDDEN, aliases.get("hidden_size")) if key in pairs), None)
    layers = next((pairs[key] for key in _LAYERS if key in pairs), None)
    heads = sorted({pair for key, pair in pairs.items() if key.endswith("heads")})
    for key, value in others.items():
        if key in found or key in _COUNTS:
            continue
        if layers is not None and value == layers[0] and ("block" in key or "layer" in key):
            found[key] = layers[1]
        if hidden is not None and value >= 16 and any(word in key for word in ("size", "dim", "channels")):
            multiples = [(value * before, after) for before, after in ((1, 1), *heads)]
            sizes = [
                whole // hidden[0] * hidden[1] // after
                for whole, after in multiples
                if whole % hidden[0] == 0 and whole <= 8 * hidden[0]
            ]
            if sizes:
                found[key] = sizes[0]
        ending = next((size for name, size in _ENDINGS.items() if key.endswith(name)), None)
        if ending is not None and key not in found:
            found[key] = min(value, ending)
    return found


def _few_layers(values: dict[str, Any], least: int) -> dict[str, Any]:
    """Keep at least ``least`` layers, the first of each kind among them: every kind is to be tested."""
    changed = dict(values)
    count = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), 0)
    if not count:
        return changed
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 2}
    # `deepstack_visual_indexes`, `mlp_only_layers` and the like: ascending numbers of layers.
    numbers = {key: value for key, value in values.items() if ("layer" in key or "index" in key) and value}
    chosen = {
        key: value
        for key, value in numbers.items()
        if isinstance(value, list)
        and all(type(one) is int and 0 <= one < count for one in value)
        and value == sorted(set(value))
    }
    marks = [*lists.values(), *([index in value for index in range(count)] for value in chosen.values())]
    kinds = list(zip(*(map(str, value) for value in marks), strict=True)) or [("",)] * count
    kept = sorted({kinds.index(kind) for kind in kinds})[:4]
    kept = sorted({*kept, *[index for index in range(count) if index not in kept][: max(0, least - len(kept))]})
    for key in _LAYERS:
        if isinstance(values.get(key), int):
            changed[key] = min(count, len(kept))
    for key, value in values.items():
        # Options of layers by their numbers.
        if not (isinstance(value, dict) and value and all(str(index).isdecimal() for index in value)):
            continue
        own = {int(index): options for index, options in value.items()}
        changed[key] = {place: own[index] for place, index in enumerate(kept) if index in own}
    changed |= {key: [value[index] for index in kept] for key, value in lists.items()}
    return changed | {
        key: [place for place, index in enumerate(kept) if index in value] for key, value in chosen.items()
    }


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
            if isinstance(one.get("mrope_section"), list):
                one["mrope_section"] = _shared_out(width // 2, one["mrope_section"])
    if "original_max_position_embeddings" in values and original is not None:
        values["original_max_position_embeddings"] = ORIGINAL_LENGTH
    for key, scaling in zip(
        [key for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), dict)], scalings, strict=True
    ):
        values[key] = scaling


def _shared_out(total: int, shares: list[int]) -> list[int]:
    """``total`` in whole parts nearly proportional to ``shares``."""
    ends = [round(total * sum(shares[: index + 1]) / sum(shares)) for index in range(len(shares))]
    return [end - begin for begin, end in pairwise([0, *ends])]


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
