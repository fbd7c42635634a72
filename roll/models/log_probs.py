r"""Log-probabilities and entropies of given tokens without a full table of float32 logits, and the
language model that computes them (or values) for response tokens alone.

For a hidden state h and the output matrix W (V x H), with z = cap(W h + b) / temperature:

    log p(y)  = z_y - logsumexp(z)
    entropy   = -sum_j p_j log p_j,            p = softmax(z)
    sum of squares = sum_j p_j^2               (without gradient)

    d log p(y) / dz_j = [j = y] - p_j
    d entropy / dz_j  = -p_j (log p_j + entropy)

    cap(x) = c tanh(x / c),   d cap(x) / dx = 1 - (cap(x) / c)^2       (x where a model has no soft cap c)

Tokens are taken in chunks: only one chunk's logits exist at a time, and the backward pass computes them again.  Where
all of them are small (a tiny vocabulary), they are kept instead, which saves that second matrix product.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roll.models import invariant
from roll.models.attention import arriving
from roll.models.distributions import Named, Vocabulary, chunked, compared, top_tokens
from roll.models.experts import RoutingRecorder, RoutingSums, routing_sums
from roll.models.invariant import computes_invariantly
from roll.models.kernels import Product, linear, matmul
from roll.models.layout_setup import choose_by_row, dependent_rotaries, logits_cap, set_row_lengths
from roll.models.layouts import TargetDistributions, TokenLayout, TopTokens
from roll.models.lora import ADAPTER
from roll.models.patterns import Uncopied
from roll.models.vision import reads_images, text_inputs
from roll.protocol.vision import vision_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class HeadMemory:
    """Memory that the head may take; bytes of float32 logits."""

    chunk_bytes: int
    """Logits computed at once. Two to three times as much is held for a moment (softmax, cast)."""
    min_chunk_tokens: int = 128
    """Lower limit of a chunk's tokens: a product of fewer rows reads the whole output matrix for little work."""
    kept_bytes: int = 64 * 2**20
    """Up to this size the log-softmax of *all* tokens is kept for the backward pass instead of recomputed."""

    @classmethod
    def for_device(cls, device: torch.device) -> HeadMemory:
        """Return limits for a device: on a CPU a chunk that stays in the cache, on an accelerator one that fills it."""
        return cls(chunk_bytes=2 * 2**20 if device.type == "cpu" else 128 * 2**20)

    def chunk_tokens(self, vocabulary: int) -> int:
        return max(self.min_chunk_tokens, self.chunk_bytes // (4 * vocabulary))


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_of_squares: bool = False,
    excluded: Tensor | None = None,
    memory: HeadMemory | None = None,
    product: Product = linear,
    adapter: tuple[Tensor | None, Tensor | None] = (None, None),
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probability of ``targets[i]`` under ``softmax(cap(weight @ hidden[i] + bias) / temperature)``.

    Args:
        hidden: (N, H), any float dtype; N may be 0.
        weight: (V, H), the dtype of ``hidden``. The matrix product runs in that dtype, all else in float32 (in
            float64 where they are float64).
        targets: int64 (N,), or (N, K): several of one distribution.
        bias: (V,) or None.
        temperature: greater than 0.
        with_entropy: also return the entropies, in nats.
        with_sum_of_squares: also return the sums of the squared probabilities of the whole vocabulary.
        excluded: int64, token ids of probability 0: what cannot be sampled. None of the targets is one of them.
        memory: None: what suits the device.
        product: computes logits from hidden states, weight and bias.
        adapter: float32 a (N, r) and B (V, r): ``B @ a[i]`` is added to the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None: they stay.

    Returns:
        float32 log-probs in the shape of ``targets``; (N,) entropies or None, sums of squares or None. The first two
        carry gradients to hidden, weight, bias and adapter.
    """
    assert hidden.ndim == 2 and len(targets) == len(hidden), (hidden.shape, targets.shape)
    assert temperature > 0, temperature
    memory = memory or HeadMemory.for_device(hidden.device)
    chunk = memory.chunk_tokens(weight.shape[0])
    # The slope of a cap is not in the log-softmax: its logits are computed again.
    keep = torch.is_grad_enabled() and softcap is None and 4 * len(hidden) * len(weight) <= memory.kept_bytes
    of_logits, wanted = (temperature, excluded, product, softcap), (with_entropy, with_sum_of_squares)
    columns = targets if targets.ndim == 2 else targets[:, None]
    found, *others = _TokenLogProbs.apply(hidden, weight, bias, *adapter, columns, of_logits, wanted, chunk, keep)
    return found.view_as(targets), *others


# Logit of a token of probability 0: finite, so that `p log p` is 0 and not a NaN.
EXCLUDED_LOGIT = -1e30


def _log_softmax(rows, hidden, weight, bias, low, up, temperature, excluded, product, softcap):  # type: ignore[no-untyped-def]
    """float32 (n, V) log-softmax of one chunk, and the slope of the cap at its logits; None without one."""
    logits, slope = _logits(hidden[rows], weight, bias, product), None
    if low is not None:
        logits.addmm_(low[rows], up.t())
    if softcap is not None:
        capped = logits.div_(softcap).tanh_()
        slope, logits = 1 - capped.square(), capped.mul_(softcap)
    # After the cap, which would bring them back.
    if excluded is not None:
        logits.index_fill_(1, excluded, EXCLUDED_LOGIT)
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return torch.log_softmax(logits, dim=-1), slope


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product = linear) -> Tensor:
    """float32 (n, V) of one chunk, before a cap."""
    return product(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, low, up, targets, of_logits, wanted, chunk, keep):  # type: ignore[no-untyped-def]
        log_probs = hidden.new_empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy, squares = (log_probs.new_empty(len(hidden)) if one else None for one in wanted)
        kept: list[Tensor] = []
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            table, _ = _log_softmax(rows, hidden, weight, bias, low, up, *of_logits)
            log_probs[rows] = table.gather(1, targets[rows])
            if entropy is not None:
                entropy[rows] = -(table.exp().mul_(table)).sum(-1)
            if squares is not None:
                squares[rows] = table.exp().square_().sum(-1)
            if keep:
                kept.append(table)
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, entropy, *kept)
        ctx.chunk, ctx.of_logits = chunk, of_logits
        ctx.set_materialize_grads(False)  # None for an unused output, whose part of the gradient is then skipped
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy, _):  # type: ignore[no-untyped-def]
        hidden, weight, bias, low, up, targets, entropy, *kept = ctx.saved_tensors
        need_hidden, need_weight, need_bias, need_low, need_up = ctx.needs_input_grad[:5]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        grad_low = torch.empty_like(low) if need_low else None
        grad_up = torch.zeros_like(up) if need_up else None
        for index, start in enumerate(range(0, hidden.shape[0], ctx.chunk)):
            rows = slice(start, start + ctx.chunk)
            table, slope = (
                (kept[index], None) if kept else _log_softmax(rows, hidden, weight, bias, low, up, *ctx.of_logits)
            )
            grad_logits = _grad_logits(
                table,
                targets[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
                None if entropy is None else entropy[rows],
            )
            if ctx.of_logits[0] != 1.0:
                grad_logits.div_(ctx.of_logits[0])
            if slope is not None:
                grad_logits.mul_(slope)
            if grad_low is not None:
                grad_low[rows] = matmul(grad_logits, up)
            if grad_up is not None:
                grad_up.addmm_(grad_logits.t(), low[rows])
            grad_logits = grad_logits.to(weight.dtype)  # the compute dtype, as in autograd's own backward of a product
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(grad_logits, weight)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(0))
        return grad_hidden, grad_weight, grad_bias, grad_low, grad_up, *(None,) * 5


def _grad_logits(
    table: Tensor, targets: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """float32 (n, V): the gradient of one chunk's logits (after the temperature), from its log-softmax ``table``."""
    probs = table.exp()
    if grad_entropy is not None:
        assert entropy is not None
        factor = (table + entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_log_probs is not None:
            factor.sub_(grad_log_probs.sum(1, keepdim=True))
        grad = probs.mul_(factor)
    elif grad_log_probs is not None:
        grad = probs.mul_(-grad_log_probs.sum(1, keepdim=True))
    else:
        return probs.zero_()
    if grad_log_probs is not None:
        grad.scatter_add_(1, targets, grad_log_probs)
    return grad


def _head_log_probs(
    head: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    outputs: Collection[str],
    wanted: TopTokens | None = None,
    comparisons: tuple[TargetDistributions, ...] = (),
) -> Named:
    """Tensors (N, ...) by name: ``outputs``, with those of the ``comparisons``, or the distributions ``wanted``."""
    ids, product = getattr(head, _EXCLUDED, ()), getattr(head, _PRODUCT, linear)
    excluded, softcap = torch.tensor(ids, device=hidden.device) if ids else None, getattr(head, _CAP, None)
    if wanted is None and not comparisons:
        adapter: tuple[Tensor | None, Tensor | None] = (None, None)
        if hasattr(head, "lora_A"):  # of an output matrix: scaling * A hidden, and B
            down, up = head.lora_A[ADAPTER].weight, head.lora_B[ADAPTER].weight
            adapter = linear(hidden.to(down.dtype), down) * head.scaling[ADAPTER], up
        computed = token_log_probs(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            temperature=temperature,
            with_entropy="entropy" in outputs,
            with_sum_of_squares="sum_of_squares" in outputs,
            excluded=excluded,
            product=product,
            adapter=adapter,
            softcap=softcap,
        )
        named = zip(("log_probs", "entropy", "sum_of_squares"), computed, strict=True)
        return {name: value for name, value in named if name in outputs and value is not None}
    whole, chunk = Vocabulary(len(head.weight)), HeadMemory.for_device(hidden.device).chunk_tokens(len(head.weight))

    def final(logits: Tensor) -> Tensor:
        capped = logits if softcap is None else (logits / softcap).tanh() * softcap
        return capped if excluded is None else capped.index_fill(1, excluded, EXCLUDED_LOGIT)

    if wanted is not None:
        with torch.no_grad():
            of_rows = lambda rows: final(_logits(hidden[rows], head.weight, head.bias, product))  # noqa: E731
            return top_tokens(whole, of_rows, hidden.shape[0], chunk, temperature, wanted)

    def of_chunk(logits: Tensor, rows: slice) -> tuple[Named, Named]:
        return compared(whole, final(logits), rows, targets, temperature, outputs, comparisons)

    return chunked(hidden, head.weight, head.bias, partial(_logits, product=product), of_chunk, chunk)


# Attribute of an output matrix: the token ids of probability 0.
_EXCLUDED = "excluded_ids"
# Attribute of an output matrix: the soft cap of its logits, if any.
_CAP = "softcap"
# Attribute of an output matrix: the function that multiplies with it, where that is not torch's.
_PRODUCT = "product"


def run_head_when_called(language_model: PreTrainedModel) -> None:
    """Compute log-probs in the output matrix's ``forward``: for a backend that acts on a module when it is called."""
    for head in output_matrices(language_model):
        head.forward = MethodType(_head_log_probs, head)
        head.log_probs = MethodType(type(head).__call__, head)


def output_matrices(language_model: PreTrainedModel) -> list[Any]:
    """The output matrix; with LoRA's ``additional_target`` the trained copy, which wraps the original."""
    head = language_model.get_output_embeddings()
    if head is None:
        return []
    copies = getattr(head, "modules_to_save", None)
    return [head] if copies is None else [head.original_module, *copies.values()]


class ResponseModel(nn.Module):
    """Runs the body of a Hugging Face model, then a head on the hidden states that predict response tokens.

    ``language_model`` is the Hugging Face model itself (a causal LM, or a token classifier with one label as value
    model), with its own parameter names.  The head runs inside this module's forward, so that a sharding root put on
    this module has the output matrix (tied to the embeddings or not) at hand.

    In a vision-language model the tower runs first, then the language model on embeddings; its vision tokens
    have probability 0, as in sampling.

    Ranks of a layout's ``context_group`` are given a chunk of it each (:meth:`TokenLayout.chunk`).
    """

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.language_model = language_model
        self.routing: RoutingRecorder | None = None
        self.records_routes = False
        self.chosen_experts: Tensor | None = None
        """int64 (T, layers, k), of the last pass with ``records_routes``."""
        self.routing_sums: RoutingSums | None = None
        """Sums of the last pass over a layout with ``token_rows``; whoever takes them sets None."""
        self.reads_images = reads_images(language_model.config)
        self.rotaries = dependent_rotaries(language_model)
        for rotary in self.rotaries:
            choose_by_row(rotary)
        for head in output_matrices(language_model):
            setattr(head, _EXCLUDED, vision_token_ids(language_model.config))
            setattr(head, _CAP, logits_cap(language_model.config))
            if computes_invariantly(language_model):
                setattr(head, _PRODUCT, invariant.linear)
            # A method of the module itself, so that a backend that shards it as a unit of its own can gather it first.
            head.log_probs = MethodType(_head_log_probs, head)

    def forward(self, layout: TokenLayout, outputs: Collection[str], temperature: float = 1.0) -> dict[str, Tensor]:
        """Float32 (N,), one for each of ``outputs``: ``log_probs``, ``entropy``, ``sum_of_squares``, ``values``.

        ``values[i]`` is the value of the state in which response token i is about to be sampled.  Without outputs there
        is no head: a pass for ``routing_sums`` alone.  Where the layout asks for whole distributions, what
        :mod:`roll.models.distributions` makes of them.
        """
        # Only with values: a model whose attention was not replaced may not accept these keywords, or misread them.
        pattern = None if layout.pattern is None else Uncopied(layout.pattern)
        keywords = {"attention_pattern": pattern, "context_group": layout.context_group}
        extra = {name: value for name, value in keywords.items() if value is not None}
        body: Any = self.language_model.base_model
        inputs = {"input_ids": layout.input_ids}
        if self.reads_images:
            inputs, body = text_inputs(body, layout), body.language_model
        routing, rows = self.routing, layout.token_rows
        if routing is not None:
            routing.routes = None if layout.routes is None else layout.routes.flatten(0, 1)
        recorded: list[tuple[Tensor, Tensor]] = []
        if self.rotaries:
            set_row_lengths(self.rotaries, layout)
        with ExitStack() as stack:
            if extra:
                stack.enter_context(arriving(layout.pattern, layout.context_group))
            if routing is not None and (rows is not None or self.records_routes):
                recorded = stack.enter_context(routing.recording())
            hidden = body(**inputs, position_ids=layout.position_ids, use_cache=False, **extra).last_hidden_state
        if self.records_routes:
            self.chosen_experts = torch.stack([choices for _, choices in recorded], 1)
        if routing is not None and rows is not None:
            self.routing_sums = routing_sums(recorded, routing.layers, rows.flatten())
        if not outputs:
            return {}
        # Only what predicts a response token: the head costs more than a layer, and prompts need none.
        hidden = hidden.flatten(0, 1).index_select(0, layout.predictors)
        if "values" in outputs:
            # Not a view: FSDP hooks what a module returns, and a view would pass by the hook when written to.
            return {"values": self.language_model.get_submodule("score")(hidden)[:, 0].float().clone()}
        head = self.language_model.get_output_embeddings()
        return head.log_probs(hidden, layout.targets, temperature, outputs, layout.top_tokens, layout.comparisons)
