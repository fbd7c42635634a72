r"""Mixture-of-experts in data-parallel training: the balance loss, and gauges of the load.

Balance loss (Switch Transformer, Fedus et al., 2021, arXiv:2101.03961, equations 4 to 6, pooled over layers as
transformers does it), for E experts of which a token chooses k:

    loss = coefficient * E * sum_e f_e P_e
    f_e: choices of expert e per token and layer (their sum is k; no gradient)
    P_e: mean probability of expert e over tokens and layers

It is not linear in the tokens.  ``moe_aux_loss_scope: global`` takes f and P over the whole batch of the optimizer step
("global-batch balance loss", Qiu et al., 2025, arXiv:2501.11873): the gradient of P is a sum over micro-batches and
ranks once f is known, so the choices are counted first.  With one micro-batch a rank that is one collective of E
numbers between the forward and the backward pass; with several, a forward pass over all of them comes before.
``micro_batch`` is the mean of each micro-batch's own loss, which depends on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.models.experts import RoutingSums, SparseLayer
from roll.models.log_probs import ResponseModel
from roll.protocol.metrics import Mean, Metrics

SHARES_SHOWN = 32
"""Up to this many experts, each expert's share is a separate metric."""


class ExpertBalance:
    """The balance loss and the load gauges of each optimizer step in turn."""

    def __init__(
        self,
        model: ResponseModel,
        layers: Sequence[SparseLayer],
        coefficient: float,
        scope: str,
        device: torch.device,
        context_group: ProcessGroup | None,
    ) -> None:
        self.context_group = context_group
        self.model, self.layers, self.device = model, layers, device
        self.coefficient, self.is_global = coefficient, scope == "global"
        self.num_experts = layers[0].num_experts
        assert all(layer.num_experts == self.num_experts for layer in layers), "layers of one size"

    def begin(self, num_micro_batches: int) -> None:
        """Collective. Start a step with ``num_micro_batches`` non-empty micro-batches on this rank."""
        self._totals: RoutingSums | None = None
        self._counts: Tensor | None = None
        self._micro_batches = 1.0
        if self.coefficient and not self.is_global:
            sharers = 1 if self.context_group is None else self.context_group.size()
            self._micro_batches = max(1.0, float(self._sum(torch.tensor(float(num_micro_batches))) / sharers))

    def count(self, last: bool) -> None:
        """After a pass without gradient; collective where ``last``."""
        counts = self._pop_sums().counts
        self._counts = counts if self._counts is None else self._counts + counts
        if last:
            self._counts = self._sum(self._counts)

    def share(self) -> Tensor | None:
        """Collective. The last pass's share of the balance loss, with gradient; None without a coefficient."""
        sums = self._pop_sums()
        own, names = replace(sums, probs=sums.probs.detach()), [item.name for item in fields(sums)]
        if self._totals is not None:
            own = RoutingSums(*(getattr(self._totals, name) + getattr(own, name) for name in names))
        self._totals = own
        if not self.coefficient:
            return None
        if self.is_global:
            if self._counts is None:
                self._counts = self._sum(sums.counts)
            counts = self._counts
        else:
            counts = sums.counts.clone()
            if self.context_group is not None:
                dist.all_reduce(counts, group=self.context_group)
        choices = float(counts.sum())
        if not choices:
            return sums.probs.sum() * 0.0
        # Each token chooses k in each layer, so `choices / k` is tokens times layers.
        tokens = choices / self.layers[0].top_k
        chosen = (counts.sum(0) / tokens).float()
        return self.coefficient * self.num_experts / (tokens * self._micro_batches) * (chosen @ sums.probs.sum(0))

    def metrics(self) -> Metrics:
        """Collective. Gauges of the whole batch of the step, the same on every rank."""
        assert self._totals is not None
        totals = self._totals
        shape, layers = totals.counts.shape, len(self.layers)
        flat = [totals.counts.flatten(), totals.probs.double().flatten(), totals.entropy, totals.tokens[None]]
        counts, probs, entropy, tokens = self._sum(torch.cat(flat)).cpu().split([part.numel() for part in flat])
        counts, number = counts.view(shape), max(1.0, float(tokens) * layers)
        load = counts / counts.mean(1, keepdim=True).clamp(min=1e-12)
        pooled = counts.sum(0)
        values = {
            "moe_aux_loss": float(self.num_experts * (pooled @ probs.view(shape).sum(0)) / number**2),
            "moe_load_max_over_mean": float(load.max()),
            "moe_load_min_over_mean": float(load.min()),
            "moe_dead_experts": float((counts == 0).sum()),
            "moe_router_entropy": float(entropy.sum()) / number,
        }
        if self.num_experts <= SHARES_SHOWN:
            shares = (pooled / pooled.sum().clamp(min=1e-12)).tolist()
            values |= {f"moe_share/expert_{index:02d}": share for index, share in enumerate(shares)}
        return {name: Mean(value) for name, value in values.items()}

    def _pop_sums(self) -> RoutingSums:
        sums, self.model.routing_sums = self.model.routing_sums, None
        assert sums is not None
        return sums

    def _sum(self, value: Tensor) -> Tensor:
        """Over all ranks. Ranks that share sequences hold parts of them, so nothing is counted twice."""
        # float64: counts of tokens are exact to 2**53, in float32 only to 16.8 million.
        total = value.to(self.device, torch.float64, copy=True)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total
