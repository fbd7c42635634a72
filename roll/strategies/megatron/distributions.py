"""Whole distributions from an output matrix whose rows are sharded over tensor-parallel ranks: what
:mod:`roll.models.distributions` computes, without gathering logits.

Each rank has the logits of its own tokens. Ranks sum normalisers, the listed tokens' log-probs (0 except on the rank
that has the token) and the mass of the rest; from there on all compute the same. In the backward pass the normaliser's
gradient is summed over ranks, since each uses it for its own tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.models.distributions import Named, chunked
from roll.models.layouts import TargetDistributions, TopTokens
from roll.models.log_probs import EXCLUDED_LOGIT, HeadMemory


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of one rank: ids from ``start`` on, ``count`` of them, rows of its matrix; further rows are
    padding."""

    group: ProcessGroup
    start: int
    count: int

    @classmethod
    def of(cls, weight: Tensor, group: ProcessGroup, vocab_size: int) -> OwnTokens:
        start = group.rank() * weight.shape[0]
        return cls(group, start, max(0, min(weight.shape[0], vocab_size - start)))

    def logits(self, hidden: Tensor, weight: Tensor, _: Tensor | None = None) -> Tensor:
        """Return float32 (n, rows); padding gets a finite logit that makes its probability 0 (``-inf`` gives NaNs)."""
        logits = torch.nn.functional.linear(hidden, weight).float()
        logits[:, self.count :] = EXCLUDED_LOGIT
        return logits

    def table(self, logits: Tensor, temperature: float) -> Tensor:
        """(n, rows) log-probs of the own tokens, with gradient."""
        logits = logits / temperature
        peak = logits.detach().amax(1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        normaliser = peak + self.summed((logits - peak[:, None]).exp().sum(1)).log()
        return logits - copy_to_tensor_model_parallel_region(normaliser, group=self.group)[:, None]

    def summed(self, part: Tensor) -> Tensor:
        """Sum over ranks. Backward is the identity: all ranks compute the same from the sum."""
        whole: Tensor = reduce_from_tensor_model_parallel_region(part.clone(), group=self.group)
        return whole

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n, k) log-probs of tokens (n, k) from all ranks."""
        mine, places = self.places(ids)
        return self.summed(table.gather(1, places) * mine)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids are this rank's, and indices that are valid in any case."""
        own = ids.long() - self.start
        mine = (own >= 0) & (own < self.count)
        return mine, torch.where(mine, own, 0)

    def rest(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n,): log of the mass of the tokens that are not among ``ids``."""
        mine, places = self.places(ids)
        listed = torch.zeros_like(table).scatter_reduce(1, places, mine.to(table.dtype), "amax")
        mass = self.summed((table.exp() * (1.0 - listed)).sum(1))
        return mass.clamp(min=torch.finfo(mass.dtype).tiny).log()


def vocab_parallel_top_tokens(
    hidden: Tensor, weight: Tensor, *, group: ProcessGroup, vocab_size: int, temperature: float, wanted: TopTokens
) -> Named:
    """Like :func:`roll.models.distributions.top_tokens`, the same on all ranks of ``group``."""
    tokens, rows = OwnTokens.of(weight, group, vocab_size), weight.shape[0]
    limit = min(wanted.limit, vocab_size)
    count = min(wanted.count or limit, limit)
    chunk = HeadMemory.for_device(hidden.device).chunk_tokens(rows)
    parts = []
    with torch.no_grad():
        # Once without tokens too: the empty columns need their widths.
        for first in range(0, max(1, hidden.shape[0]), chunk):
            table = tokens.table(tokens.logits(hidden[first : first + chunk], weight), temperature)
            allowed = table.clone()
            allowed[:, max(0, limit - tokens.start) :] = EXCLUDED_LOGIT
            values, places = allowed.topk(min(count, rows), dim=1)
            found = [torch.empty_like(values) for _ in range(group.size())]
            ids = [torch.empty_like(places) for _ in range(group.size())]
            dist.all_gather(found, values, group=group)
            dist.all_gather(ids, places + tokens.start, group=group)
            log_probs, best = torch.cat(found, 1).topk(count, dim=1)
            chosen = torch.cat(ids, 1).gather(1, best)
            parts.append((log_probs, chosen.int(), tokens.rest(table, chosen)))
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return dict(zip(("top_log_probs", "top_ids", "tail_log_prob"), columns, strict=True))


def vocab_parallel_comparison(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    temperature: float,
    outputs: Collection[str],
    comparisons: Collection[TargetDistributions],
) -> Named:
    """Like :func:`roll.models.distributions.compared`, the same on all ranks of ``group``; the gradient of
    ``hidden`` is this rank's share."""
    tokens = OwnTokens.of(weight, group, vocab_size)

    def compare(logits: Tensor, rows: slice) -> tuple[Named, Named]:
        table = tokens.table(logits, temperature)
        learned = {"log_probs": tokens.at(table, targets[rows, None])[:, 0]}
        noted: Named = {}
        if "entropy" in outputs:
            learned["entropy"] = -tokens.summed((table.exp() * table).sum(1))
        if "sum_of_squares" in outputs:
            noted["sum_of_squares"] = tokens.summed(table.detach().exp().square().sum(1))
        for whole in comparisons:
            target, same = whole.at(rows), whole.temperature == temperature
            of_model = table if same else tokens.table(logits, target.temperature)
            q, p = tokens.at(of_model, target.ids), target.log_probs.float()
            largest = of_model.detach().amax(1)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            noted[f"{target.name}/model_mass"] = q.detach().exp().sum(-1)
            noted[f"{target.name}/target_mass"] = p.exp().sum(-1)
            noted[f"{target.name}/agreement"] = (q.detach()[:, 0] >= largest).float()
            has_tail = target.ids.shape[1] < vocab_size
            if has_tail:
                q = torch.cat([q, tokens.rest(of_model, target.ids)[:, None]], dim=1)
                p = torch.cat([p, target.tail[:, None].float()], dim=1)
            learned[f"{target.name}/divergence"] = target.divergence(q, p, has_tail)
        return learned, noted

    chunk = HeadMemory.for_device(hidden.device).chunk_tokens(weight.shape[0])
    return chunked(hidden, weight, None, tokens.logits, compare, chunk)
