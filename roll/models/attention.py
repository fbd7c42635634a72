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
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch.utils.checkpoint import checkpoint

from roll.config.model_files import is_installed
from roll.models.expert_parallel import exchange
from roll.models.patterns import (
    AttentionPattern,
    PackedSequences,
    PrefixTree,
    RunBatch,
    Uncopied,
    VarlenCall,
    visible,
)


@dataclass(frozen=True)
class Scores:
    """The scores of queries and keys, as in :func:`layout_attention`."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None


def _heads_for_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(b, heads, s / n, dim) of each of n ranks to (b, heads / n, s, dim): the whole sequence, some heads."""
    rows, heads, chunk, dim = tensor.shape
    ranks = group.size()
    parts = tensor.permute(2, 0, 1, 3).reshape(chunk, rows, ranks, heads // ranks, dim).permute(2, 0, 1, 3, 4)
    return exchange(parts, None, None, group).view(ranks * chunk, rows, heads // ranks, dim).permute(1, 2, 0, 3)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, how: Scores) -> Tensor:
    """(1, T, heads, head_dim) of T tokens; shapes and arguments as :func:`layout_attention`."""
    if takes_varlen(query, value, how.softcap):
        return varlen_attention(query, key, value, tree.varlen, how)
    if _widens(query, tree.longest):  # once: piece by piece these are 9,000 casts a step on SmolLM2
        return tree_attention(query.float(), key.float(), value.float(), tree, how).to(query.dtype)
    key, value = _repeated(query, key, value)
    alike = tree.only_prompts and tree.most_parts > MOST_PARTS and tree.rows.numel() < LONG * len(tree.runs)
    bare = how.window is None and how.softcap is None
    if not bare or (query.device.type == "cpu" and not alike):
        return _run_by_run(query, key, value, tree, how)
    return _all_at_once(query, key, value, tree, how)


def _all_at_once(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, how: Scores) -> Tensor:
    """:func:`tree_attention` without a window, with a call for each batch of runs."""
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
            how,
            batch.mask,
            causal=batch.mask is None and batch.own.shape[1] > 1,
        )
        outputs.append(output.transpose(1, 2).reshape(-1, heads * head_dim))
    return torch.cat(outputs).index_select(0, tree.restore).view(1, -1, heads, head_dim)


# A CPU computes runs all at once only where prompts have more than `MOST_PARTS` responses and runs average fewer than
# `LONG` tokens. One after another there is no padding and less copying: forward and backward pass take a third less
# time for runs of 256 tokens, as long for 32, and twice as long for 16.
MOST_PARTS, LONG = 2, 32


def _run_by_run(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, how: Scores) -> Tensor:
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
        skipped = run.context if tree.is_whole(run) else 0
        asked = path(queries, index) if skipped else queries[index]
        mask = tree.seen(index, how.window) if run.context and not skipped else None
        output = causal_attention(asked, path(keys, index), path(values, index), how, mask)
        outputs.append(output[:, :, skipped:])
    # Padding at the end of the tokens: some value, which nothing reads.
    outputs.append(torch.zeros_like(queries[-1]))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


# Capped scores that exist at a time; 64 MiB in float32, and as much again for each of three intermediate results.
SCORES = 2**24


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, how: Scores, mask: Tensor) -> Tensor:
    """Shapes as in :func:`causal_attention`: ``softmax(c tanh(scores / c))`` in float32, since no kernel of torch caps.
    ``mask``: bool (T, K), the keys that each query sees."""
    cap = how.softcap
    assert cap is not None

    def of(some: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (some.to(wide) * (query.shape[3] ** -0.5 if how.scaling is None else how.scaling)) @ key.to(wide).mT
        capped = (scores / cap).tanh() * cap
        return (capped.masked_fill(~seen, -torch.inf).softmax(-1) @ value.to(wide)).to(query.dtype)

    size = max(1, SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    if query.shape[2] <= size:
        return of(query, key, value, mask)
    # A block's scores are computed again in the backward pass, so that those of all queries never exist together.
    blocks = zip(query.split(size, 2), mask.split(size), strict=True)
    return torch.cat([checkpoint(of, some, key, value, seen, use_reentrant=False) for some, seen in blocks], 2)


# Up to this many keys a CPU computes attention of half-precision rows in float32: the backward pass of its half-
# precision kernel takes 5 times as long for 16 keys, 2 times for 64, as long for 512.
SHORT = 512


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, how: Scores, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """Torch's kernel for shapes as in :func:`causal_attention`, with as many key heads as query heads."""
    if _widens(query, key.shape[2]):
        wide = (query.float(), key.float(), value.float())
        return torch_attention(*wide, attn_mask=mask, is_causal=causal, scale=how.scaling).to(query.dtype)
    return torch_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=how.scaling)


def _widens(query: Tensor, num_keys: int) -> bool:
    return query.device.type == "cpu" and query.dtype in HALF_PRECISION and num_keys <= SHORT


Attend = Callable[[Tensor, Tensor, Tensor, AttentionPattern | None, Scores], Tensor]
HALF_PRECISION = (torch.bfloat16, torch.float16)


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


_WITHOUT = "set use_sequence_packing, use_remove_padding and use_prefix_sharing: false, model_args.ulysses_size: 1"


def layout_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_pattern: Uncopied | None = None,
    context_group: ProcessGroup | None = None,
    dropout: float = 0.0,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention in which ``attention_pattern`` says who sees whom. No dropout, no mask of the caller's.

    With ``context_group`` T is this rank's chunk of n T tokens, and the pattern is that of all of them.

    Args:
        query: (S, heads, T, head_dim); with a pattern S is 1 and T the number of tokens.
        key, value: (S, key-value heads, T, head_dim).
        scaling: of the scores; None: head_dim ** -0.5.
        attention_pattern: None: each of the S sequences is causal.
        attend: computes attention of queries, keys, values, pattern and scores, and knows no cap; None: torch's
            kernels.
        sliding_window: a token sees itself and this number of tokens less one before it; None: all before it.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: they stay.
        others: keywords that transformers passes to every layer have no effect; any other one, which would change the
            result, is refused.

    Returns:
        (S, T, heads, head_dim), and None for the weights.
    """
    sent = _ARRIVING.get()
    if (sent[0] is not None and attention_pattern is None) or (sent[1] is not None and context_group is None):
        raise ValueError(
            f"{type(module).__name__} is not given the layout, since layers of this model do not pass keywords on; "
            f"{_WITHOUT}"
        )
    # Encoders of transformers say so by an attribute of the layer, not by a keyword.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    faults = {
        "a mask of its own": attention_mask is not None,
        f"dropout of {dropout}": dropout,
        "no causal mask": not causal,
        "softcap": attend is not None and softcap is not None,
    }
    added = {name for name, given in others.items() if given is not None and given is not False} - _passed_down()
    faults |= dict.fromkeys(sorted(added), True)
    if found := [what for what, holds in faults.items() if holds]:
        raise ValueError(
            f"{type(module).__name__} computes attention with {', '.join(found)}, which no layout without padding has; "
            f"{_WITHOUT}"
        )
    attend, how = attend or _attend, Scores(scaling, sliding_window, softcap)
    pattern = None if attention_pattern is None else attention_pattern.pattern
    if context_group is None:
        return attend(query, key, value, pattern, how), None
    ranks, (rows, heads, chunk, dim) = context_group.size(), query.shape
    if key.shape[1] % ranks:  # such as fewer key-value heads than ranks: repeated to one for each query head
        key, value = _repeated(query, key, value)
    whole = [_heads_for_sequence(tensor, context_group) for tensor in (query, key, value)]
    output = attend(whole[0], whole[1], whole[2], pattern, how).transpose(0, 1)
    # Back: (s, b, heads / n, dim) of some heads to (s / n, b, heads, dim), this rank's chunk of the sequence.
    received = exchange(output.reshape(ranks, chunk, rows, heads // ranks, dim), None, None, context_group)
    own = received.permute(1, 2, 0, 3, 4).reshape(chunk, rows, heads, dim)
    return own.transpose(0, 1).contiguous(), None


@cache
def _passed_down() -> frozenset[str]:
    """Keywords of the call of a model, not of a layer."""
    from transformers.utils.generic import TransformersKwargs

    return frozenset(TransformersKwargs.__annotations__) | {"use_cache"}


def _attend(query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern | None, how: Scores) -> Tensor:
    match pattern:
        case None:
            key, value = _repeated(query, key, value)
            return causal_attention(query, key, value, how).transpose(1, 2).contiguous()
        case PackedSequences():
            return packed_attention(query, key, value, pattern, how)
        case PrefixTree():
            return tree_attention(query, key, value, pattern, how)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, how: Scores, mask: Tensor | None = None) -> Tensor:
    """(S, heads, T, head_dim) for queries of that shape, the last tokens of sequences of keys and values
    (S, heads, K, head_dim); ``mask``: what :func:`visible` returns for them, if the caller has it."""
    length, whole = query.shape[2], key.shape[2]
    if length == whole and how.softcap is None and (how.window is None or how.window >= whole):
        return _fused_attention(query, key, value, how, None, causal=length > 1)
    mask = visible(length, whole - length, how.window, query.device) if mask is None else mask
    if how.softcap is None:
        return _fused_attention(query, key, value, how, mask)
    return _capped_attention(query, key, value, how, mask)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, how: Scores) -> Tensor:
    """(1, T, heads, head_dim): each sequence attends to itself, causally; as :func:`layout_attention`.

    Where there is no kernel for it a call for each sequence, which (on a CPU) is two to three times faster than padding
    them.
    """
    if takes_varlen(query, value, how.softcap):
        return varlen_attention(query, key, value, sequences.varlen, how)
    if _widens(query, max(sequences.lengths, default=0)):  # once, not for each piece
        return packed_attention(query.float(), key.float(), value.float(), sequences, how).to(query.dtype)
    lengths = list(sequences.lengths)
    # split, not slices: its backward pass joins the parts once instead of adding up as many full-size gradients.
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [causal_attention(part[0], *_repeated(*part), how) for part in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def has_varlen(device: torch.device) -> bool:
    """Return True for a GPU with FlashAttention's kernel, for sequences of different lengths in one call."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def takes_varlen(query: Tensor, value: Tensor, softcap: float | None = None) -> bool:
    """Return True where that kernel computes the attention: half precision, heads that it knows, and no cap unless
    the package flash_attn, whose kernel has one, is installed (torch's copy has none)."""
    if softcap is not None and not is_installed("flash_attn"):
        return False
    head_dim = query.shape[-1]
    fits = query.dtype in HALF_PRECISION and head_dim % 8 == 0 and value.shape[-1] == head_dim <= 256
    return fits and has_varlen(query.device)


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, how: Scores) -> Tensor:
    """(1, T, heads, head_dim) by one kernel, where :func:`takes_varlen`; as :func:`layout_attention`."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if call.keys is not None:
        key, value = key.index_select(0, call.keys), value.index_select(0, call.keys)
    return _kernel(query.contiguous(), key.contiguous(), value.contiguous(), call, how)[None]


def _kernel(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, how: Scores) -> Tensor:
    """(T, heads, head_dim) for queries of that shape, and keys and values (K, key-value heads, head_dim)."""
    from torch.nn.attention.varlen import varlen_attn

    where = (call.query_offsets, call.key_offsets)
    longest = [max(lengths) for lengths in zip(*call.lengths, strict=True)]
    # -1: no limit to the left; nothing to the right.  A window's left part does not count the token itself.
    limits = (-1 if how.window is None else how.window - 1, 0)
    if how.softcap is not None:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            *(query, key, value, *where, *longest),
            softmax_scale=how.scaling,
            causal=True,
            window_size=limits,
            softcap=how.softcap,
        )
    grouped: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        # Before torch 2.12, which hosts have whose PyTorch cannot be replaced.
        (key, value), grouped = _repeated(query, key, value), {}
    # Query i of q sees keys up to i + k - q of k: FlashAttention aligns the mask to the bottom right since 2.1 (its
    # README, "Changes"; col_idx_limit_right in mask.h, which torch has a copy of).
    output = varlen_attn(query, key, value, *where, *longest, scale=how.scaling, window_size=limits, **grouped)
    assert isinstance(output, Tensor)
    return output


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each key and value head (dimension 1) for the query heads that share it."""
    times = query.shape[1] // key.shape[1]
    return (key, value) if times == 1 else (key.repeat_interleave(times, 1), value.repeat_interleave(times, 1))
