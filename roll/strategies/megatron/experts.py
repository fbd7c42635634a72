"""Mixture-of-experts layers: routers whose choices can be recorded and replayed, and the scale of their balance loss.

A layer sets its router up before each pass with what belongs to the micro-batch of that pass.  It does so when
activations are computed again in the backward pass too: what is recomputed is what was computed, whichever micro-batch
came in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from roll.models.routes import MISSING
from roll.strategies.megatron.micro_batches import Arrangement


class RoutedLayer(TransformerLayer):
    """A transformer layer with experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.arrange(kwargs["packed_seq_params"])
        return super().forward(*args, **kwargs)


class Choices:
    """The choice of experts in one pass of a router: replayed where routes are known, and noted where asked.

    Megatron asks an object of this form, and goes on with the scores of what it says: weights are always live.
    """

    def __init__(self, routes: Tensor | None, note: Callable[[Tensor], None] | None) -> None:
        self._routes, self._note = routes, note
        self.counts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices (T, k)."""
        best, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._routes is not None:
            known = (self._routes >= 0).all(-1, keepdim=True)
            live, chosen = chosen, torch.where(known, self._routes, chosen)
            best = scores.gather(1, chosen)
            changed = (chosen.sort(-1).values != live.sort(-1).values).any(-1)
            self.counts = torch.stack([known.sum(), (self._routes == MISSING).any(-1).sum(), changed.sum()])
        if self._note is not None:
            self._note(chosen)
        return best, chosen


class Router(TopKRouter):
    """Top-k routing. The balance loss of a micro-batch counts as much as every other's, whatever its tokens."""

    index = 0
    """Of the layer, among those with experts of the whole model."""
    records = False
    router_replay: Choices | None
    counts: Tensor | None = None
    """int64 (3,) of the passes since it was None: tokens replayed, missing and changed."""

    def arrange(self, arrangement: Arrangement) -> None:
        """Take what belongs to the micro-batch of the pass to come."""
        self._share = arrangement.share
        assert arrangement.is_padding is not None
        # Without any token a mean over them would be 0 / 0.
        self._is_padding = self._own(arrangement.is_padding) if arrangement.share else None
        routes = None if arrangement.routes is None else self._own(arrangement.routes)[:, :, self.index].flatten(0, 1)
        note = partial(self._note, arrangement) if self.records else None
        self.router_replay = None if routes is None and note is None else Choices(routes, note)

    def _note(self, arrangement: Arrangement, chosen: Tensor) -> None:
        assert arrangement.sources is not None
        arrangement.recorded[self.index] = (self._own(arrangement.sources).flatten(), chosen)

    def _own(self, tokens: Tensor) -> Tensor:
        """(s, b, ...): with sequence parallelism, this rank's part along s."""
        if not self.config.sequence_parallel:
            return tokens
        group = parallel_state.get_tensor_model_parallel_group()
        return tokens.chunk(group.size())[group.rank()]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's layers have no mask to give: rows are right-padded, and attention needs none."""
        routed: tuple[Tensor, Tensor] = super().forward(input, self._is_padding)
        if self.router_replay is not None and self.router_replay.counts is not None:
            own = self.router_replay.counts
            self.counts = own if self.counts is None else self.counts + own
        return routed

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, *_: Any, **__: Any
    ) -> Tensor:
        """Megatron would multiply by the number of tokens here, by which it divides all gradients later."""
        # Each of the ranks that share the tokens (tensor and context) computes its share of the same loss.
        scaled: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self._share)
        return scaled
