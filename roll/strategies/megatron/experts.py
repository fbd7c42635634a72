"""Mixture-of-experts layers: routers whose choices can be recorded and replayed, and the scale of their balance loss.

A layer sets its router up before each pass with what belongs to the micro-batch of that pass.  It does so when
activations are computed again in the backward pass too: what is recomputed is what was computed, whichever micro-batch
came in between.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from roll.strategies.megatron.micro_batches import Arrangement


class RoutedLayer(TransformerLayer):
    """A transformer layer with experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.arrange(kwargs["packed_seq_params"])
        return super().forward(*args, **kwargs)


class Router(TopKRouter):
    """Top-k routing. The balance loss of a micro-batch counts as much as every other's, whatever its tokens."""

    def arrange(self, arrangement: Arrangement) -> None:
        """Take what belongs to the micro-batch of the pass to come."""
        self._share = arrangement.share
        # Without any token a mean over them would be 0 / 0.
        self._is_padding = self._own(arrangement.is_padding) if arrangement.share else None

    def _own(self, tokens: Tensor) -> Tensor:
        """(s, b, ...): with sequence parallelism, this rank's part along s."""
        if not self.config.sequence_parallel:
            return tokens
        group = parallel_state.get_tensor_model_parallel_group()
        return tokens.chunk(group.size())[group.rank()]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's layers have no mask to give: rows are right-padded, and attention needs none."""
        routed: tuple[Tensor, Tensor] = super().forward(input, self._is_padding)
        return routed

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, *_: Any, **__: Any
    ) -> Tensor:
        """Megatron would multiply by the number of tokens here, by which it divides all gradients later."""
        # Each of the ranks that share the tokens (tensor and context) computes its share of the same loss.
        scaled: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self._share)
        return scaled
