"""Whole distributions from an output matrix whose rows are sharded over tensor-parallel ranks: what
:mod:`roll.models.distributions` computes, without gathering logits.

Each rank has the logits of its own tokens. Ranks sum normalisers, the listed tokens' log-probs (0 except on the rank
that has the token) and the mass of the rest; from there on all compute the same. In the backward pass the normaliser's
gradient is summed over ranks, since each uses it for its own tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.models.distributions import Vocabulary
from roll.models.log_probs import EXCLUDED_LOGIT


class OwnTokens(Vocabulary):
    """The tokens of one rank: ids from ``start`` on, ``count`` of them, rows of its matrix; further rows are
    padding."""

    def __init__(self, weight: Tensor, group: ProcessGroup, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.group, self.start = group, group.rank() * weight.shape[0]
        self.count = max(0, min(weight.shape[0], vocab_size - self.start))

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

    def best(self, table: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
        allowed = table.clone()
        allowed[:, max(0, limit - self.start) :] = EXCLUDED_LOGIT
        values, places = allowed.topk(min(count, table.shape[1]), dim=1)
        found = [torch.empty_like(values) for _ in range(self.group.size())]
        ids = [torch.empty_like(places) for _ in range(self.group.size())]
        dist.all_gather(found, values, group=self.group)
        dist.all_gather(ids, places + self.start, group=self.group)
        log_probs, best = torch.cat(found, 1).topk(count, dim=1)
        return log_probs, torch.cat(ids, 1).gather(1, best)

    def is_best(self, table: Tensor, ids: Tensor, of_ids: Tensor) -> Tensor:
        largest = table.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return of_ids >= largest

    def rest(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n,): log of the mass of the tokens that are not among ``ids``."""
        mine, places = self.places(ids)
        listed = torch.zeros_like(table).scatter_reduce(1, places, mine.to(table.dtype), "amax")
        mass = self.summed((table.exp() * (1.0 - listed)).sum(1))
        return mass.clamp(min=torch.finfo(mass.dtype).tiny).log()
