"""Causal attention for tokens laid out by :mod:`roll.models.layouts`: in rows, packed, as a tree, or in sequence
shards.

All other layers of a transformer work on each token alone and do not depend on the layout.

Sequence parallelism (Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509): each rank holds a contiguous chunk of
the sequence.  Attention is the only layer that needs all of it, and each rank can compute it for some of the heads.  An
all-to-all before attention turns a chunk of the sequence with all heads into the whole sequence with some heads, and
one after it turns it back.  Ranks exchange queries, keys, values and outputs once each; masks and the order of chunks
do not matter to the exchange.

Trees: the tokens of a run attend to what comes before the run in its rows, and to the run itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from roll.models.expert_parallel import exchange
from roll.models.patterns import AttentionPattern, PackedSequences, PrefixTree, RunBatch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from transformers import PretrainedConfig, PreTrainedModel


def _heads_for_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(b, heads, s / n, dim) of each of n ranks to (b, heads / n, s, dim): the whole sequence, some heads."""
    rows, heads, chunk, dim = tensor.shape
    ranks = group.size()
    parts = tensor.permute(2, 0, 1, 3).reshape(chunk, rows, ranks, heads // ranks, dim).permute(2, 0, 1, 3, 4)
    return exchange(parts, None, None, group).view(ranks * chunk, rows, heads // ranks, dim).permute(1, 2, 0, 3)


def sum_of_parts(part: Tensor, group: ProcessGroup) -> Tensor:
    """Collective. The sum over ranks, the same on each; a gradient flows back to each rank's own part only.

    Ranks that all compute the same loss from the sum thus differentiate it once, not once each.
    """
    return _SumOfParts.apply(part, group)


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float | None) -> Tensor:
    """(1, T, heads, head_dim) for queries, keys and values (1, heads, T, head_dim) of T tokens.

    Args:
        scaling: of the scores; None: head_dim ** -0.5.
    """
    one_by_one = query.device.type == "cpu" and (not tree.only_prompts or tree.most_parts <= MOST_PARTS)
    return (_run_by_run if one_by_one else _all_at_once)(query, key, value, tree, scaling)


def _all_at_once(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float | None) -> Tensor:
    """:func:`tree_attention` with a call for each batch of runs."""
    heads, head_dim = query.shape[1], query.shape[3]
    queries, keys, values = (tensor[0].transpose(0, 1).flatten(1) for tensor in (query, key, value))

    def by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(2, (heads, head_dim)).transpose(1, 2)

    def own(tensor: Tensor, batch: RunBatch) -> Tensor:
        return tensor.index_select(0, batch.own.flatten()).view(*batch.own.shape, -1)

    def seen(tensor: Tensor, batch: RunBatch) -> Tensor:
        if batch.mask is None:
            return own(tensor, batch)
        contexts = tensor.index_select(0, batch.contexts.flatten()).view(*batch.contexts.shape, -1)
        return torch.cat([contexts.index_select(0, batch.context_of_run), own(tensor, batch)], dim=1)

    outputs = []
    for batch in tree.batches:
        output = _fused_attention(
            by_head(own(queries, batch)),
            by_head(seen(keys, batch)),
            by_head(seen(values, batch)),
            scaling,
            batch.mask,
            causal=batch.mask is None and batch.own.shape[1] > 1,
        )
        outputs.append(output.transpose(1, 2).reshape(-1, heads * head_dim))
    return torch.cat(outputs).index_select(0, tree.restore).view(1, -1, heads, head_dim)


MOST_PARTS = 2
"""Up to this many responses to each prompt (those of a pair) a CPU computes one after another, and the runs of a deeper
tree always. Without padding and with fewer copies, the backward pass takes a third less time than for all at once."""


def _run_by_run(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float | None) -> Tensor:
    """:func:`tree_attention` with a call for each run, without padding."""
    lengths = [run.length for run in tree.runs] + [tree.num_padding]
    # split, not slices: its backward pass joins the pieces once instead of adding up as many full-size gradients.
    queries, keys, values = (tensor.split(lengths, 2) for tensor in (query, key, value))

    def path(pieces: Sequence[Tensor], index: int) -> Tensor:
        before = [
            pieces[place] if count == lengths[place] else pieces[place][:, :, :count]
            for place, count in tree.runs[index].before
        ]
        return torch.cat([*before, pieces[index]], 2) if before else pieces[index]

    outputs = []
    for index, run in enumerate(tree.runs):
        context, masked = run.context, not tree.is_whole(run)
        mask = None
        if masked:
            size = (run.length, context + run.length)
            mask = torch.ones(size, dtype=torch.bool, device=query.device).tril_(context)
        asked = queries[index] if masked else path(queries, index)
        causal = mask is None and asked.shape[2] > 1
        output = _fused_attention(asked, path(keys, index), path(values, index), scaling, mask, causal)
        outputs.append(output if masked else output[:, :, context:])
    outputs.append(torch.zeros_like(queries[-1]))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


SHORT = 512
"""Up to this many keys a CPU computes attention of half-precision rows in float32: the backward pass of its
half-precision kernel takes 5 times as long for 16 keys, 2 times for 64, as long for 512."""


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Torch's kernel for shapes as in :func:`causal_attention`, with as many key heads as query heads."""
    if query.device.type == "cpu" and query.dtype in _HALF_PRECISION and key.shape[2] <= SHORT:
        wide = (query.float(), key.float(), value.float())
        return torch_attention(*wide, attn_mask=mask, is_causal=causal, scale=scaling).to(query.dtype)
    return torch_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling)


Attend = Callable[[Tensor, Tensor, Tensor, AttentionPattern | None, float | None], Tensor]
ATTENTION_NAME = "roll_layouts"
_REPLACEABLE = ("sdpa", "flash_attention_2")
_HALF_PRECISION = (torch.bfloat16, torch.float16)


def use_layout_attention(model: PreTrainedModel, key: str) -> None:
    """Make ``model`` compute attention by :func:`layout_attention`.

    Args:
        key: the configuration key that needs it, for messages.

    Raises:
        ValueError: a model with layers other than full causal attention, or that does not take an attention function.
    """
    replace_attention(model, key, ATTENTION_NAME, layout_attention)


def replace_attention(model: PreTrainedModel, key: str, name: str, function: Callable[..., Any]) -> None:
    """Make ``model`` compute attention by ``function``, which transformers will know as ``name``.

    Args and raises as :func:`use_layout_attention`.
    """
    from transformers import AttentionInterface

    text_config, neutral = model.config.get_text_config(), "1" if key.endswith("ulysses_size") else "false"
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(text_config, "layer_types", None) is None and getattr(text_config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if kinds:
        raise ValueError(
            f"{key}: this {text_config.model_type} model has layers of type {', '.join(sorted(kinds))}; it works "
            f"only where every layer is full_attention. Set {key}: {neutral}"
        )
    if not getattr(model, "_supports_attention_backend", False) or (
        text_config._attn_implementation not in _REPLACEABLE
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


_Sent = tuple[AttentionPattern | None, ProcessGroup | None]
_ARRIVING: ContextVar[_Sent] = ContextVar("arriving", default=(None, None))


@contextmanager
def arriving(pattern: AttentionPattern | None, context_group: ProcessGroup | None) -> Iterator[None]:
    """Let :func:`layout_attention` refuse calls without these arguments inside the block: layers that drop unknown
    keywords would silently let packed rows attend to each other."""
    token = _ARRIVING.set((pattern, context_group))
    try:
        yield
    finally:
        _ARRIVING.reset(token)


def layout_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_pattern: AttentionPattern | None = None,
    context_group: ProcessGroup | None = None,
    dropout: float = 0.0,
    attend: Attend | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention in which ``attention_pattern`` says who sees whom. No dropout, no mask of the caller's.

    With ``context_group`` T is this rank's chunk of n T tokens, and the pattern is that of all of them.

    Args:
        query: (S, heads, T, head_dim); with a pattern S is 1 and T the number of tokens.
        key, value: (S, key-value heads, T, head_dim).
        scaling: of the scores; None: head_dim ** -0.5.
        attention_pattern: None: each of the S sequences is causal.
        attend: computes attention of queries, keys, values and pattern, with this scaling; None: torch's kernels.

    Returns:
        (S, T, heads, head_dim), and None for the weights.
    """
    sent = _ARRIVING.get()
    if (sent[0] is not None and attention_pattern is None) or (sent[1] is not None and context_group is None):
        raise ValueError(
            f"{type(module).__name__} is not given the layout, since layers of this model do not pass keywords on; "
            "set use_sequence_packing, use_remove_padding and use_prefix_sharing: false, model_args.ulysses_size: 1"
        )
    if attention_mask is not None or dropout:
        what = "a mask of its own" if attention_mask is not None else f"dropout of {dropout}"
        raise ValueError(f"{type(module).__name__} computes attention with {what}, which no layout without padding has")
    attend = attend or _attend
    if context_group is None:
        return attend(query, key, value, attention_pattern, scaling), None
    ranks, (rows, heads, chunk, dim) = context_group.size(), query.shape
    if key.shape[1] % ranks:  # such as fewer key-value heads than ranks: repeated to one for each query head
        key, value = _repeated(query, key, value)
    whole = [_heads_for_sequence(tensor, context_group) for tensor in (query, key, value)]
    output = attend(whole[0], whole[1], whole[2], attention_pattern, scaling).transpose(0, 1)
    # Back: (s, b, heads / n, dim) of some heads to (s / n, b, heads, dim), this rank's chunk of the sequence.
    received = exchange(output.reshape(ranks, chunk, rows, heads // ranks, dim), None, None, context_group)
    own = received.permute(1, 2, 0, 3, 4).reshape(chunk, rows, heads, dim)
    return own.transpose(0, 1).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern | None, scaling: float | None
) -> Tensor:
    match pattern:
        case None:
            return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous()
        case PackedSequences():
            return packed_attention(query, key, value, pattern, scaling)
        case PrefixTree():
            return tree_attention(query, *_repeated(query, key, value), pattern, scaling)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """(S, heads, T, head_dim) for queries of that shape and (S, key-value heads, T, head_dim) keys and values."""
    key, value = _repeated(query, key, value)
    return _fused_attention(query, key, value, scaling, causal=query.shape[2] > 1)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None
) -> Tensor:
    """(1, T, heads, head_dim): each sequence attends to itself, causally; shapes as :func:`layout_attention`.

    One kernel on CUDA in half precision; elsewhere a call for each sequence, which (on a CPU) is two to three times
    faster than padding them.
    """
    if query.is_cuda and query.dtype in _HALF_PRECISION:
        return _varlen_attention(query, key, value, sequences, scaling)
    lengths = list(sequences.lengths)
    # split, not slices: its backward pass joins the parts once instead of adding up as many full-size gradients.
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([causal_attention(*part, scaling) for part in parts], dim=2).transpose(1, 2).contiguous()


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # Before torch 2.12.
        key, value = _repeated(query, key, value)
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    offsets, longest = sequences.offsets, max(sequences.lengths)
    grouped: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    output = varlen_attn(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),  # causal: no limit to the left, nothing to the right
        **grouped,
    )
    assert isinstance(output, Tensor)
    return output[None]


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each key and value head (dimension 1) for the query heads that share it."""
    times = query.shape[1] // key.shape[1]
    return (key, value) if times == 1 else (key.repeat_interleave(times, 1), value.repeat_interleave(times, 1))
