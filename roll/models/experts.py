"""Sparse layers of mixture-of-experts models: where they are, and what their routers chose.

transformers 5 holds a layer's experts as two fused tensors (experts, rows, columns), which every pass uses.  Remote
code may hold them as modules in a ``ModuleList``, of which a pass calls the chosen ones only: ranks that divide the
model's state would gather or reduce different ones, so such a model is refused there.

A router is the child of a sparse layer with a weight of (experts, hidden).  It returns its logits, or (transformers 5)
logits, weights and indices of the chosen experts.

Choices are stored with their tokens: recorded in one pass, replayed in another. A column ``routed_experts``
(B, L, layers, k) holds for each token of a batch the experts that the routers chose when it was the input, best first:
uint8 for up to 255 experts (48 layers of 8 choices are 384 bytes a token), int16 beyond. The last token of a sequence
is no input, so it has none; 255 (or -1) marks a choice that was not recorded. Only *choices* are replayed: weights come
from the live logits of the chosen experts, so routers get their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roll.models.layouts import TokenLayout
from roll.models.patterns import common_beginnings, sharers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RouterOutput = Tensor | tuple[Tensor, ...]
"""Logits, or logits, weights and indices of the chosen experts."""
EXPERTS = "experts"
"""The attribute of a sparse layer that holds its experts, in every family."""
# The buffer of routers that score by a sigmoid and balance by a bias (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2).
SELECTION_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class SparseLayer:
    """One layer's router and experts. Found before the model is sharded, when shapes are those of the whole."""

    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int

    @property
    def is_fused(self) -> bool:
        """The experts are tensors of one module; else modules of their own."""
        return not isinstance(self.experts, nn.ModuleList)

    @property
    def scores_by_sigmoid(self) -> bool:
        return hasattr(self.router, SELECTION_BIAS)


def sparse_layers(model: PreTrainedModel) -> list[SparseLayer]:
    """The sparse layers in the order of the model; none of a dense model.

    Raises:
        ValueError: experts without a router that can be recognised.
    """
    found = []
    for name, block in model.named_modules():
        experts = getattr(block, EXPERTS, None)
        if not isinstance(experts, nn.Module):
            continue
        fused = {parameter.shape[0] for parameter in experts.parameters(recurse=False) if parameter.ndim == 3}
        number = len(experts) if isinstance(experts, nn.ModuleList) else fused.pop() if len(fused) == 1 else 0
        if number < 2:
            continue
        weights = {child: getattr(child, "weight", None) for child in block.children() if child is not experts}
        routers = [
            child
            for child, weight in weights.items()
            if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == number
        ]
        if len(routers) != 1:
            raise ValueError(
                f"model_args.model_name_or_path: {name} of this {model.config.model_type} model holds {number} experts "
                f"and {len(routers)} modules with a weight of ({number}, hidden): its router cannot be recognised"
            )
        top_k = getattr(routers[0], "top_k", None) or getattr(model.config, "num_experts_per_tok", None) or 1
        # 1: a family that names no number sends a token to one expert.
        found.append(SparseLayer(name, block, routers[0], experts, number, int(top_k)))
    return found


def chosen_experts(output: RouterOutput, top_k: int) -> tuple[Tensor, Tensor]:
    """Logits (T, E) and chosen experts, int64 (T, k), from what a router returned."""
    if isinstance(output, Tensor):
        logits = output.flatten(0, -2)
        return logits, logits.detach().topk(top_k, -1).indices
    indices = next(part for part in output if not part.is_floating_point())
    return output[0].flatten(0, -2), indices.flatten(0, -2)


class RoutingRecorder:
    """Observes or replays what a model's routers choose in a forward pass, by hooks that cost nothing when unused."""

    def __init__(self, layers: Sequence[SparseLayer]) -> None:
        self.layers = layers
        self._recorded: dict[int, tuple[Tensor, Tensor]] | None = None
        self.routes: Tensor | None = None
        """int64 (T, layers, k): choices for the next pass, and for the recomputation of its layers."""
        self.replay_counts: Tensor | None = None
        """int64 (3,) of the passes since it was None: tokens (of each layer) replayed, missing and changed."""
        for index, layer in enumerate(layers):
            layer.router.register_forward_hook(partial(self._on_router, index))

    def _on_router(self, index: int, module: nn.Module, args: object, output: RouterOutput) -> RouterOutput:
        if self.routes is not None:
            layer = self.layers[index]
            output, counts = replayed(output, self.routes[:, index], module, layer.scores_by_sigmoid)
            self.replay_counts = counts if self.replay_counts is None else self.replay_counts + counts
        if self._recorded is not None:
            self._recorded[index] = chosen_experts(output, self.layers[index].top_k)
        return output

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Logits with gradient and choices of each layer, in the list after the block.

        The recomputation of a checkpointed layer comes later, and is not recorded.
        """
        recorded: list[tuple[Tensor, Tensor]] = []
        self._recorded = {}
        try:
            yield recorded
            recorded += [self._recorded[index] for index in range(len(self.layers))]
        finally:
            self._recorded = None


@dataclass(frozen=True)
class RoutingSums:
    """Sums over the tokens of a pass, of which each counts as often as rows have it (0: padding). L sparse layers."""

    counts: Tensor
    """float64 (L, E): choices of each expert; a token makes k of them."""
    probs: Tensor
    """float32 (L, E): the router's probabilities, with gradient."""
    entropy: Tensor
    """float64 (L,): entropies of those, in nats."""
    tokens: Tensor
    """float64 scalar."""


def routing_sums(
    recorded: Sequence[tuple[Tensor, Tensor]], layers: Sequence[SparseLayer], token_rows: Tensor
) -> RoutingSums:
    """
    Args:
        recorded: of :meth:`RoutingRecorder.recording`.
        token_rows: float32 (T,), how many rows share each token of the pass.
    """
    counts, probs, entropies = [], [], []
    token_rows = token_rows.float()  # FSDP2 casts what a pass is given; such small numbers are exact in any type
    for (logits, indices), layer in zip(recorded, layers, strict=True):
        scores = logits.float()
        # DeepSeek-V3 (arXiv:2412.19437, equation 19): affinities are normalised over the experts.
        table = (
            torch.nn.functional.normalize(scores.sigmoid(), p=1.0, dim=-1)
            if layer.scores_by_sigmoid
            else scores.softmax(-1)
        )
        probs.append(token_rows @ table)
        known = table.detach()
        entropies.append((token_rows @ torch.special.entr(known)).sum())
        weights = token_rows.double().repeat_interleave(indices.shape[-1])
        counts.append(weights.new_zeros(layer.num_experts).index_add_(0, indices.flatten().long(), weights))
    return RoutingSums(
        torch.stack(counts), torch.stack(probs), torch.stack(entropies).double(), token_rows.double().sum()
    )


# In a layout: a padding token, and one whose choices were not recorded.
PADDING, MISSING = -2, -1


def route_dtype(num_experts: int) -> torch.dtype:
    return torch.uint8 if num_experts <= 255 else torch.int16


def missing_mark(dtype: torch.dtype) -> int:
    return 255 if dtype is torch.uint8 else MISSING


def encoded(routes: Tensor, num_experts: int) -> Tensor:
    """Convert int (..., layers, k) with ``MISSING`` to the values of a column."""
    dtype = route_dtype(num_experts)
    return torch.where(routes < 0, missing_mark(dtype), routes).to(dtype)


def routes_of(layout: TokenLayout, column: Tensor) -> Tensor:
    """int64 (S, T, layers, k): the choices of a layout's tokens, or the marks above.

    Args:
        column: (B, L, layers, k), of the rows that were laid out.
    """
    # uint8 has no -1: its mark is converted before anything indexes with it.
    flat = column.flatten(0, 1).long()
    if column.dtype is torch.uint8:
        flat = torch.where(flat == missing_mark(torch.uint8), MISSING, flat)
    routes = flat[layout.sources.clamp(min=0)]
    routes[layout.sources < 0] = PADDING
    return routes


def with_shared_routes(column: Tensor, keys: Tensor, response_mask: Tensor) -> Tensor:
    """Give each row the choices of the beginning that was computed for an earlier row, in place.

    Args:
        column: (B, L, ...), of rows that were laid out as a tree.
        keys, response_mask: see :func:`~roll.models.patterns.common_beginnings`.
    """
    for row, (parent, length) in enumerate(zip(*sharers(common_beginnings(keys, response_mask)), strict=True)):
        column[row, :length] = column[parent, :length]
    return column


def replayed(output: object, routes: Tensor, router: nn.Module, by_sigmoid: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """A router's output with recorded choices, and (replayed, missing, changed) tokens, int64 (3,).

    Args:
        output: logits (T, E), weights (T, k) and chosen experts (T, k), in this order.
        routes: int64 (T, k), with the marks above.

    Raises:
        ValueError: a router of another kind: it returns logits only, or weighs its choices in a way of its own.
    """
    if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
        raise ValueError(
            "router_replay: this model's routers return logits only, and its layers choose by themselves: their "
            "choices cannot be replaced; set router_replay.mode: disabled"
        )
    logits, weights, live = output
    known = (routes >= 0).all(-1, keepdim=True)
    chosen = torch.where(known, routes, live.long())
    # Gathered from the scores of all experts: those of the live choice alone would give the replayed ones no gradient.
    scores = logits.float().sigmoid() if by_sigmoid else logits.float().softmax(-1)
    again = scores.gather(-1, chosen)
    # Mixtral's and gpt-oss's always sum to 1; the latter's softmax over the chosen logits is the same.
    if getattr(router, "norm_topk_prob", True):
        again = again / again.sum(-1, keepdim=True)
    again = again * float(getattr(router, "routed_scaling_factor", 1.0))
    same = (chosen == live).all(-1)
    # Tokens whose choice is the live one must get the router's own weights: else its formula is another than ours.
    with torch.no_grad():
        if not torch.allclose(again[same].float(), weights[same].float(), rtol=2e-2, atol=1e-3):
            raise ValueError(
                f"router_replay: {type(router).__name__} weighs its choices in a way that is not known here; set "
                "router_replay.mode: disabled"
            )
        missing = (routes == MISSING).any(-1)
        # Changed: another set of experts, in whatever order.
        changed = (chosen.sort(-1).values != live.long().sort(-1).values).any(-1)
        counts = torch.stack([known.sum(), missing.sum(), changed.sum()])
    return (logits, again.to(weights.dtype), chosen.to(live.dtype)), counts
