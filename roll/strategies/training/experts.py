r"""Mixture-of-experts in data-parallel training: the balance loss, gauges of the load, and a test of the layout.

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

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.models.experts import RoutingSums, SparseLayer
from roll.models.layouts import on_device, row_layout
from roll.models.log_probs import ResponseModel
from roll.protocol.metrics import Mean, Metrics

SHARES_SHOWN = 32
"""Up to this many experts, each expert's share is a separate metric."""
TOLERANCE = 0.02
"""Relative tolerance of the layout's test. bf16 rounds to .004; another expert's weights are off by 0.2 or more."""


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


def check_choices_may_differ(
    model: ResponseModel,
    compute: Callable[..., dict[str, Tensor]],
    differentiate: Callable[[Tensor], None] | None,
    gradients: Callable[[], list[Tensor | None]],
    clear: Callable[[], None],
    device: torch.device,
    advice: str,
) -> None:
    """Collective. Check that ranks which choose different experts compute the same as when all choose alike.

    Two rows of a few tokens: even ranks compute the first, by the first experts, while odd ranks compute the second, by
    the last.  Then all ranks compute the first, and all the second, which is right under every layout.  Results and
    ``gradients`` (this rank's shards) must agree.

    Args:
        differentiate: None where nothing is trained (or gradients cannot be read).
        clear: drops all gradients. It may raise a RuntimeError, on all ranks, if the ranks called different modules.

    Raises:
        ValueError: they do not agree, so this sharding is wrong for the model; the message ends with ``advice``.
    """
    assert model.routing is not None
    layer, rank, ranks = model.routing.layers[0], dist.get_rank(), dist.get_world_size()
    embeddings: Any = model.language_model.get_input_embeddings()
    name = "log_probs" if model.language_model.get_output_embeddings() is not None else "values"

    def results(row: int, weight: float) -> Tensor:
        ids = (torch.arange(6) * (row + 3) + row + 1)[None] % embeddings.num_embeddings
        mask = torch.arange(6)[None] > 1
        first = 0 if row == 0 else layer.num_experts - layer.top_k
        assert model.routing is not None
        with model.routing.forcing(range(first, first + layer.top_k), device):
            values = compute(on_device(row_layout(ids, mask), device), (name,), 1.0)[name]
            if differentiate is not None:
                differentiate(values.sum() * weight)
        return values.detach().float()

    own = rank % 2
    with torch.set_grad_enabled(differentiate is not None):
        try:
            apart = results(own, 1.0)
            apart_gradients = [None if gradient is None else gradient.clone() for gradient in gradients()]
            clear()
            counts = [(ranks + 1) // 2, ranks // 2]
            # ZeRO-3 compares what the ranks have gathered in a pass when the next one begins.
            together = [results(row, counts[row] / ranks) for row in (0, 1)][own]
        except RuntimeError as reason:
            raise ValueError(f"{_WRONG}: {reason}; {advice}") from reason
    error = _relative_error([apart], [together], device)
    if differentiate is not None:
        error = max(error, _relative_error(apart_gradients, gradients(), device))
        clear()
    if error > TOLERANCE:
        raise ValueError(f"{_WRONG} (a relative error of {error:.1g}); {advice}")


_WRONG = "this model computes something else when ranks choose different experts"


def _relative_error(actual: Sequence[Tensor | None], wanted: Sequence[Tensor | None], device: torch.device) -> float:
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for one, other in zip(actual, wanted, strict=True):
        # Gradients may be in host memory, and missing on one side or on both.
        have, want = (sums.new_zeros(()) if part is None else part.to(device, torch.float64) for part in (one, other))
        sums += torch.stack([(have - want).square().sum(), want.square().sum()])
    dist.all_reduce(sums)
    difference, size = sums.tolist()
    return float((difference / size) ** 0.5) if size else float(difference > 0)
