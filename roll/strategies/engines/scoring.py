"""Scorers that give log-probs of given tokens and nothing else: an engine's, and those of a service
(:mod:`roll.strategies.remote`).

Both report, for every position of a sequence, the log-prob of the token there and the most probable tokens in its
place, at temperature 1. Position t of a report is about token t given the tokens before it; the columns of a batch are
laid out the same way, so nothing is shifted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import log

import numpy as np
import torch

from roll.models.layouts import TopTokens
from roll.protocol.metrics import RankInfo
from roll.protocol.vision import IMAGES
from roll.strategies.base import (
    ALL_WEIGHTS,
    Comparisons,
    ModelStrategy,
    Output,
    Outputs,
    StateKind,
    TensorBatch,
    WeightSelection,
)
from roll.strategies.engines.requests import PromptScore

ALL = -1  # number of most probable tokens that means the whole vocabulary
LEAST_MASS = 1e-38  # smallest positive number of float32


class ScoringStrategy(ModelStrategy):
    """Columns of a batch from :class:`PromptScore` of its rows. Ranks share rows and nothing else."""

    @abstractmethod
    def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """One score a prompt, with the ``top`` most probable tokens, descending (:data:`ALL`: every token)."""

    def shutdown(self) -> None:
        """Free what the strategy holds."""

    @property
    def rank_info(self) -> RankInfo:
        return RankInfo()

    def forward(
        self, batch: TensorBatch, outputs: Outputs, temperature: float = 1.0, comparisons: Comparisons = ()
    ) -> TensorBatch:
        """Log-probs of the response tokens, at temperature 1 only."""
        assert set(outputs) <= {Output.LOG_PROBS} and not comparisons and temperature == 1.0, (outputs, temperature)
        log_probs = torch.zeros(batch["response_mask"].shape)
        for row, (positions, score) in enumerate(self._scored(batch, 0)):
            log_probs[row, positions] = torch.tensor([score.log_probs[at - 1] for at in positions.tolist()])
        return {str(Output.LOG_PROBS): log_probs}

    def forward_top_tokens(self, batch: TensorBatch, wanted: TopTokens, temperature: float = 1.0) -> TensorBatch:
        """Like :meth:`ModelStrategy.forward_top_tokens`; another temperature than 1 with the whole vocabulary only. The
        tail is one minus the listed mass. Raises ValueError: fewer tokens than requested, for instance where the most
        probable ones have ids that the student does not know."""
        assert temperature == 1.0 or not wanted.count, (wanted, temperature)
        mask = batch["response_mask"]
        scored = self._scored(batch, wanted.count or ALL)
        places = [score.top[at - 1] for positions, score in scored for at in positions.tolist()]
        parts = [listed_tokens(entries, wanted, temperature) for entries in places]
        width = len(parts[0][0]) if parts else 0
        columns = {
            "top_log_probs": torch.zeros(*mask.shape, width),
            "top_ids": torch.zeros(*mask.shape, width, dtype=torch.int32),
            "tail_log_prob": torch.zeros(mask.shape),
        }
        if parts:
            log_probs, ids, tails = zip(*parts, strict=True)
            columns["top_log_probs"][mask] = torch.from_numpy(np.stack(log_probs)).float()
            columns["top_ids"][mask] = torch.from_numpy(np.stack(ids)).int()
            columns["tail_log_prob"][mask] = torch.tensor(tails, dtype=torch.float32)
        return columns

    def _scored(self, batch: TensorBatch, top: int) -> Iterator[tuple[torch.Tensor, PromptScore]]:
        """Yield each row's response positions and its score; nothing after the last of them is computed."""
        images = batch.get(IMAGES)
        if images is not None and any(one is not None for one in images):
            raise ValueError(
                f"{self.role.name}: {self.role.strategy_args.strategy_name} scores token ids here, and takes no images"
            )
        places = [own.nonzero()[:, 0] for own in batch["response_mask"]]
        prompts = [
            row[: int(own.max()) + 1].tolist() for row, own in zip(batch["input_ids"], places, strict=True) if len(own)
        ]
        scores = iter(self.scores(prompts, top) if prompts else ())
        for own in places:
            yield own, next(scores) if len(own) else PromptScore([], [])

    def named_full_weights(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        raise AssertionError("a scorer gives no weights")

    def save_hf(self, path: object) -> None:
        raise AssertionError("a scorer gives no weights")

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        return []


def listed_tokens(
    entries: Sequence[tuple[int, float]], wanted: TopTokens, temperature: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Log-probs (k,), descending, ids (k,), and the log of the mass of all other tokens. ``entries``: id and log-prob
    of the most probable tokens; of all of them where ``temperature`` is not 1."""
    ids = np.fromiter((token for token, _ in entries), dtype=np.int64, count=len(entries))
    log_probs = np.fromiter((value for _, value in entries), dtype=np.float64, count=len(entries))
    if temperature != 1.0:
        tempered = log_probs / temperature
        highest = float(tempered.max())
        log_probs = tempered - highest - np.log(np.exp(tempered - highest).sum())
    order = np.argsort(np.negative(log_probs), kind="stable")
    order = order[ids[order] < wanted.limit]
    size = min(wanted.count or len(order), wanted.limit)
    if len(order) < size:
        raise ValueError(
            f"{len(order)} of {size} most probable tokens have an id below {wanted.limit}; the student has no others"
        )
    order = order[:size]
    # Rounding may make the listed mass more than 1.
    rest = max(0.0, 1.0 - float(np.exp(log_probs[order]).sum()))
    return log_probs[order], ids[order], log(max(rest, LEAST_MASS))


class EngineScoring(ScoringStrategy):
    """A generation engine in this worker's process that only scores given tokens."""

    def _configure(self) -> None:
        from roll.strategies.factory import create_generation_strategy

        arguments = self.role.strategy_args
        own = arguments.strategy_config.get("engine_args") or {}
        options = {**arguments.strategy_config, "engine_args": {"max_logprobs": ALL, **own}}
        sized = replace(self.role, strategy_args=replace(arguments, strategy_config=options))
        self._engine = create_generation_strategy(sized, self.seed)

    def initialize(self, num_training_steps: int = 0) -> None:
        self._refuse_steps(num_training_steps)
        self._engine.initialize()

    def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        return self._engine.prompt_scores(prompts, top)

    def offload_states(self, include: Collection[StateKind]) -> None:
        self._engine.sleep()

    def load_states(self, include: Collection[StateKind]) -> None:
        self._engine.wake()

    def shutdown(self) -> None:
        self._engine.shutdown()
