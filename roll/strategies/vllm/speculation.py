"""Speculative decoding in vLLM: its counts, and repairs of its sampler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import rejection_sampler


class DraftCounts(StatLoggerBase):
    """A logger for vLLM, called after each of its steps. Counts since the start, under the names of
    :attr:`~roll.strategies.engines.base.GenerationStrategy.counts`."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, scheduler_stats: Any, *further: Any, **named: Any) -> None:
        stats = scheduler_stats and scheduler_stats.spec_decoding_stats
        if stats is not None:
            self.counts["drafts"] += stats.num_drafts
            self.counts["drafted_tokens"] += stats.num_draft_tokens
            self.counts["accepted_tokens"] += stats.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Nothing: the strategy logs what the engine has."""


def repair_sampling(on_cpu: bool) -> None:
    """Repair, in this process, what vLLM 0.32 does with drafts.

    - Where no request of a batch has one, filtering by ``top_k`` fails on the empty rows.
    - On a CPU, what gives each drafted token the temperature, ``top_k`` and ``top_p`` of its request writes them into a
      converted copy of its output: sampling then reads memory which nobody has written, and log-probs are of no
      distribution at all.
    """
    rejection_sampler.apply_sampling_constraints = _constrained
    if on_cpu:
        rejection_sampler.expand_batch_to_tokens = _expanded


_apply_sampling_constraints = rejection_sampler.apply_sampling_constraints


def _constrained(logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
    return _apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits


def _expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Values (requests,), each repeated for its request's drafted tokens, which end at ``cu_num_tokens``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)
