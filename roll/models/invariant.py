"""Operations whose result for a token does not depend on what else is computed with it, for ``strict_on_policy``.

An engine computes a token in a prompt or in a decoding step, a trainer in padded, packed or shared rows.  Both sum the
same products, but kernels choose the order of a sum by the shape of the whole batch, so log-probs differ by rounding
("Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025).  What was measured on x86 CPUs (torch 2.13):

* Norms, rotary angles, softmax and log-softmax give each row the same bits in every batch.  So does SiLU where a row
  has a multiple of 32 elements: what is left at the end of a tensor is computed by other code.
* A matrix product gives a row the same bits for 8 rows or more, in float32 and bfloat16, if it is oneDNN's; the BLAS of
  ``F.linear`` does not with several threads.  Few rows take another kernel.  In bfloat16 with the matrix instructions
  of Intel's processors (AMX) any number of rows may take another one: a row has the same bits among equally many.
* In the product of queries and keys a column is the same where their number is a multiple of 16; a sum over keys is the
  same, with zeros after the last key, up to 128 keys.  The fused attention kernels of torch divide rows and keys by the
  lengths of the whole call.

So there are two operations here: :func:`linear`, with a minimal number of rows, and :func:`attention`, in float32,
whose keys are padded to a multiple of 16 and whose values are summed in blocks of 128 keys, in order; activations are
torch's, on padded rows.  Routers choose by the same operations, so engine and trainer send a token to the same experts;
each is computed for its tokens alone, and a token's results are added in the order of its experts.  Gradients flow
through all of them and need no fixed order.  :func:`check_processor` repeats the measurement on the processor of the
run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.config.roles import INVARIANT_ATTENTION
from roll.models.attention import Scores, layout_attention
from roll.models.experts import sparse_layers
from roll.models.kernels import HAS_ONEDNN, differentiable, onednn_product
from roll.models.layout_setup import FULL, attention_cap, head_dim, logits_cap, replace_attention
from roll.models.patterns import AttentionPattern, PackedSequences, PrefixTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.config.roles import ModelArguments

KEY = "strict_on_policy"
# Rows of a product are padded to a multiple of this in attention, elsewhere to at least this.
ROWS = 8
# Rows of a product in bfloat16 by matrix instructions. Of a thousand rows this takes three times as long as one product
# of all, and vector instructions take eleven times as long.
MATRIX_ROWS = 64
# Keys are padded to a multiple of this.
KEYS = 16
# A decoding step with up to this many query heads for a key head is padded to this number.
FEW_ROWS = 4
# Elements of a row of activations are padded to a multiple of this.
ELEMENTS = 32
# Keys whose values are summed by one product.
BLOCK = 128


def is_invariant(args: ModelArguments) -> bool:
    """Return True for a role that computes with the operations of this module."""
    return args.attn_implementation == INVARIANT_ATTENTION


def computes_invariantly(model: PreTrainedModel) -> bool:
    """Return True if :func:`make_invariant` has changed the model."""
    return model.config.get_text_config()._attn_implementation == INVARIANT_ATTENTION


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x of shape (..., in) and weight (out, in), float32 or bfloat16."""
    return differentiable(_product, x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # On processors without bf16 oneDNN has no such product; rounded once, as those of others are.
        return _product(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    count = len(rows)
    by_blocks = x.dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    more = (-count % MATRIX_ROWS if count else MATRIX_ROWS) if by_blocks else max(ROWS - count, 0)
    rows = F.pad(rows, (0, 0, 0, more)) if more else rows
    # Not F.linear, which calls a BLAS for float32: with several threads its sums depend on the number of rows.
    if by_blocks:
        product = torch.cat([onednn_product(block, weight, bias) for block in rows.split(MATRIX_ROWS)])
    else:
        product = onednn_product(rows, weight, bias)
    return product[:count].view(*x.shape[:-1], len(weight))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    starts: Tensor | int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention, computed in float32.

    Args:
        query: (S, heads, Q, head_dim).
        key: (S, key-value heads, T, head_dim); consecutive query heads share a key head.
        value: (S, key-value heads, T, value_dim).
        scaling: of the scores; None: head_dim ** -0.5.
        starts: query q sees the keys up to number ``starts + q``: a number, or int64 (S,).
        bias: (S or 1, 1, 1, T), added to the scores in place of what ``starts`` says.

    Returns:
        (S, heads, Q, value_dim), in the type of the queries.
    """
    sequences, heads, count, dim = query.shape
    kv_heads, length = key.shape[1:3]
    # float32 throughout: half-precision products of scores round by the shape of the batch.
    more, group = -length % KEYS, heads // kv_heads
    key, value = (F.pad(part, (0, 0, 0, more)) if more else part for part in (key.float(), value.float()))
    rows = (query.float() * (dim**-0.5 if scaling is None else scaling)).reshape(sequences, kv_heads, group, count, dim)
    # Rows of zeros: query heads in a decoding step, else queries.
    more_heads = -group % (ROWS if group > FEW_ROWS else FEW_ROWS) if count == 1 else 0
    more_queries = 0 if count == 1 else -count % ROWS
    rows = F.pad(rows, (0, 0, 0, more_queries, 0, more_heads)) if more_heads or more_queries else rows
    shape = rows.shape[:4]
    scores = torch.bmm(rows.flatten(0, 1).flatten(1, 2), key.flatten(0, 1).transpose(1, 2)).view(*shape, -1)
    if bias is None:
        last = torch.as_tensor(starts, device=query.device).view(-1, 1) + torch.arange(shape[3], device=query.device)
        hidden = torch.arange(length + more, device=query.device) > last[..., None]
        weights = scores.masked_fill_(hidden[:, None, None], -torch.inf).softmax(-1)
    else:
        seen = F.pad(bias, (0, more), value=-torch.inf) if more else bias
        weights = F.pad((scores[:, :, :group] + seen[:, None]).softmax(-1), (0, 0, 0, 0, 0, more_heads))
    # Blocks of a fixed size, added in order: a block of zeros after the last key changes no bit of the sum.
    weights, values = weights.flatten(0, 1).flatten(1, 2), value.flatten(0, 1)
    out = torch.bmm(weights[..., :BLOCK], values[:, :BLOCK])
    for begin in range(BLOCK, length + more, BLOCK):
        block = slice(begin, begin + BLOCK)
        out = torch.baddbmm(out, weights[..., block], values[:, block])
    return out.view(*shape, -1)[:, :, :group, :count].reshape(sequences, heads, count, -1).to(query.dtype)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute a layer, as transformers calls it: an engine's step with its own mask, or a pass over a layout."""
    if attention_mask is not None:
        return attention(query, key, value, scaling, bias=attention_mask).transpose(1, 2).contiguous(), None
    return layout_attention(module, query, key, value, None, scaling, attend=in_layout, **keywords)


def in_layout(query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern | None, how: Scores) -> Tensor:
    """(S, Q, heads, head_dim); the keys may begin with those of a prefix."""
    assert how.window is None, "layers with a window are refused"
    scaling = how.scaling
    match pattern:
        case None:
            out = attention(query, key, value, scaling, key.shape[2] - query.shape[2])
        case PackedSequences():
            lengths = list(pattern.lengths)
            parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
            out = torch.cat([attention(*part, scaling) for part in parts], 2)
        case PrefixTree():
            out = _in_tree(query, key, value, pattern, scaling)
    return out.transpose(1, 2).contiguous()


def _in_tree(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float | None) -> Tensor:
    """Each run attends to a row of its context's keys and its own, with no gap between them."""

    def taken(tensor: Tensor, index: Tensor) -> Tensor:
        return tensor[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)

    outputs = []
    for batch in tree.batches:
        rows, starts = batch.own, batch.context_lengths
        if width := batch.contexts.shape[1]:
            before = starts[:, None]
            places = torch.arange(width + rows.shape[1], device=query.device)[None]
            in_context = batch.contexts[batch.context_of_run].gather(
                1, places.clamp(max=width - 1).expand(len(before), -1)
            )
            in_run = rows.gather(1, (places - before).clamp(0, rows.shape[1] - 1))
            rows = torch.where(places < before, in_context, in_run)
        outputs.append(attention(taken(query, batch.own), taken(key, rows), taken(value, rows), scaling, starts=starts))
    flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
    return flat.index_select(0, tree.restore)[None].transpose(1, 2)


def make_invariant(model: PreTrainedModel) -> None:
    """Compute attention, linear layers (adapters included), activations, routers and experts of ``model`` with the
    operations of this module, in place.

    Raises:
        ValueError: a model with other layers than full causal attention, with soft caps, whose attention cannot be
            replaced, or whose experts are of another form.
    """
    text = model.config.get_text_config()
    if attention_cap(text) is not None or logits_cap(text) is not None:
        raise ValueError(
            f"{KEY}: this {text.model_type} model caps its scores or logits, by operations that engine and trainer "
            f"round differently. Set {KEY}: false"
        )
    replace_attention(model, KEY, INVARIANT_ATTENTION, _attend, (FULL,))
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_linear_forward, module)  # type: ignore[method-assign]
        elif hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            module.forward = MethodType(_adapted_forward, module)
        elif type(module).__module__ in _ACTIVATIONS:
            module.forward = partial(filled, module.forward)
    for layer in sparse_layers(model):
        experts: Any = layer.experts
        layer.block.forward = partial(_by_functions, layer.block.forward)
        if layer.is_fused and (experts.has_bias or experts.is_transposed or not experts.has_gate):
            raise ValueError(f"{KEY}: the experts of this {text.model_type} model have another form. Set {KEY}: false")
        if layer.is_fused:
            experts.forward = MethodType(_experts_forward, experts)


_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def filled(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    more = -x.shape[-1] % ELEMENTS
    return activation(F.pad(x, (0, more)))[..., : x.shape[-1]] if more else activation(x)


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)


def _adapted_forward(self: Any, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """With ``W + scaling * B A``, as the engine is sent it: ``W x + scaling * B (A x)`` is rounded otherwise."""
    from roll.models.lora import ADAPTER, merged_weight

    base = self.get_base_layer()
    if self.disable_adapters:
        return linear(x, base.weight, base.bias)
    down, up = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
    return linear(x, merged_weight(base.weight, down, up, self.scaling[ADAPTER]), base.bias)


class _Sigmoid(TorchFunctionMode):
    """Sigmoids by the operation of activations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.sigmoid, Tensor.sigmoid):
            return filled(torch.sigmoid, *args)
        return func(*args, **(kwargs or {}))


def _by_functions(forward: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Compute a sparse layer, whose router and gate of shared experts call functions instead of modules."""
    # By its name, since ZeRO-3 has put a product of its own there, which no mode sees.
    functional: Any = F
    before, functional.linear = F.linear, linear
    try:
        with _Sigmoid():
            return forward(*args, **kwargs)
    finally:
        functional.linear = before


def _experts_forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """(T, H) tokens, (T, k) experts and (T, k) weights to (T, H)."""
    order = chosen.flatten().argsort(stable=True)
    tokens = order // chosen.shape[-1]
    counts = chosen.flatten().bincount(minlength=len(self.down_proj)).tolist()
    # Unbound at once: the gradient of each matrix taken by its number would be as large as all of them.
    of_experts = zip(hidden[tokens].split(counts), self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
    rows = [linear(self._apply_gate(linear(own, up)), down) for own, up, down in of_experts if len(own)]
    weighted = torch.cat(rows) * weights.flatten()[order, None].to(hidden.dtype)
    return torch.zeros_like(hidden).index_add(0, tokens, weighted)


@torch.no_grad()
def check_processor(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compute rows of random numbers in batches of several sizes: with the shape of every matrix of ``model``, and in
    its attention, in the type that it is computed in.

    Raises:
        ValueError: a row that is not the same in all of them; the message has the operation and the sizes.
    """
    threads = f"{torch.get_num_threads()} threads (system_envs: {{OMP_NUM_THREADS: '1'}} sets them)"
    where = f"{KEY}: true does not work on this processor with {threads}: "
    if not HAS_ONEDNN:
        raise ValueError(f"{where}this build of torch has no oneDNN")
    random = torch.Generator().manual_seed(0)
    # With the embeddings, which have the output matrix's shape; those of an expert are two dimensions of three.
    shapes = {tuple(parameter.shape[-2:]) for parameter in model.parameters() if parameter.ndim in (2, 3)}
    for outputs, inputs in sorted(shapes):
        x = torch.randn(96, inputs, generator=random).to(dtype)
        weight = (torch.randn(outputs, inputs, generator=random) * inputs**-0.5).to(dtype)
        whole = linear(x, weight)
        for count in (1, 3, 9, 40, 65):
            if not torch.equal(linear(x[-count:], weight), whole[-count:]):
                raise ValueError(f"{where}a row times a matrix of {inputs} x {outputs} is another one in {count} rows")
    config = model.config.get_text_config()
    width = getattr(config, "intermediate_size", None) or config.hidden_size
    x = torch.randn(2**17 // width + 9, width + -width % ELEMENTS, generator=random).to(dtype)
    if not torch.equal(F.silu(x)[-3:], F.silu(x[-3:].clone())):
        raise ValueError(f"{where}the activation of a row is another one in {len(x)} rows")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = head_dim(config)
    length = 2 * BLOCK + 9
    query = torch.randn(2, heads, length, dim, generator=random).to(dtype)
    key, value = torch.randn(2, 2, kv_heads, length, dim, generator=random).to(dtype).unbind()
    whole = attention(query, key, value)
    for end in (1, 5, KEYS + 1, BLOCK, BLOCK + 1, length - 1):
        for begin in {0, end // 2, end - 1}:
            some = slice(begin, end)
            found = attention(query[1:, :, some], key[1:, :, :end], value[1:, :, :end], starts=begin)
            if not torch.equal(found, whole[1:, :, some]):
                raise ValueError(f"{where}attention of tokens {begin} to {end} is another one than in a longer row")
