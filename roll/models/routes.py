"""Router choices, stored with their tokens: recorded in one pass, replayed in another.

A column ``routed_experts`` (B, L, layers, k) holds for each token of a batch the experts that the routers chose when it
was the input, best first: uint8 for up to 255 experts (48 layers of 8 choices are 384 bytes a token), int16 beyond.
The last token of a sequence is no input, so it has none; 255 (or -1) marks a choice that was not recorded.

Only *choices* are replayed: weights come from the live logits of the chosen experts, so routers get their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roll.models.layouts import TokenLayout
from roll.models.patterns import common_beginnings, sharers

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
    again = _weights(logits, chosen, router, by_sigmoid)
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


def _weights(logits: Tensor, chosen: Tensor, router: nn.Module, by_sigmoid: bool) -> Tensor:
    """Weights of chosen experts, gathered from the scores of all experts: those of the live choice alone would give the
    replayed experts no gradient."""
    scores = logits.float().sigmoid() if by_sigmoid else logits.float().softmax(-1)
    weights = scores.gather(-1, chosen)
    # Mixtral's and gpt-oss's always sum to 1; the latter's softmax over the chosen logits is the same.
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * float(getattr(router, "routed_scaling_factor", 1.0))
