"""Workers that run a model on a batch: the reference policy, the base of those that learn, and the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roll.algorithms.reward_models import end_scores, scoring_batch
from roll.config.losses import SCORE_MEAN, SCORE_STD
from roll.datasets.templates import chat_text
from roll.distributed import Dispatch, Worker, register
from roll.methods.base import LOG_PROBS, POLICY_COLUMNS, Ask
from roll.models.build import load_config
from roll.protocol import DataProto
from roll.protocol.metrics import RankInfo
from roll.protocol.vision import IMAGES
from roll.rewards.base import RewardResult, failure
from roll.rollout.rewarding import ModelInput
from roll.strategies.base import ModelHead, ModelStrategy, Output, StateKind, TensorBatch
from roll.strategies.engines.scoring import ScoringStrategy
from roll.strategies.factory import create_scoring_strategy, create_strategy


def columns_of(batch: DataProto) -> TensorBatch:
    """A batch as strategies take it: its tensors, and its images where rows have some."""
    images: Any = batch.non_tensor_batch.get(IMAGES)
    return TensorBatch(batch.batch) if images is None else {**batch.batch, IMAGES: images}


LEAST_LOG_PROB = -6e4
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSettings:
    """Keys of the pipeline that concern a model."""

    max_grad_norm: float | None = None
    """None: that of the role."""
    offload_optimizer_in_steps: bool = field(default=False, kw_only=True)
    """Optimizer states leave the device for the forward and backward passes."""
    head: ModelHead = field(default=ModelHead.CAUSAL_LM, kw_only=True)


class ModelWorker(Worker):
    """A forward-only model on one rank (the reference policy)."""

    settings_class = ModelSettings
    settings: ModelSettings
    strategy: ModelStrategy

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Join the process group, build and load the model, and its optimizer where it is to be trained."""
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self.init_process_group()
        self.strategy = create_strategy(
            self.context.role,
            head=self.head,
            seed=self.context.seed,
            max_grad_norm=self.settings.max_grad_norm,
        )
        self.strategy.offloads_optimizer_in_steps = self.settings.offload_optimizer_in_steps
        self.strategy.initialize(num_training_steps)

    @property
    def rank_info(self) -> RankInfo:
        return self.strategy.rank_info if hasattr(self, "strategy") else super().rank_info

    @property
    def head(self) -> ModelHead:
        return self.settings.head

    @register(Dispatch.DP_MP_COMPUTE, columns=POLICY_COLUMNS)
    def forward(self, batch: DataProto, ask: Ask = LOG_PROBS) -> DataProto:
        """The columns that ``ask`` names, without gradient: float32 (B, L) each, 0 outside the response mask."""
        rows, top = columns_of(batch), ask.top
        with self.strategy.without_adapters() if ask.without_adapters else nullcontext():
            if top is None:
                return DataProto(self.strategy.forward(rows, ask.outputs, ask.temperature))
            columns = self.strategy.forward_top_tokens(rows, top, ask.temperature)
        # Probability 0 either way, and finite in float16: 0 times minus infinity is no number.
        columns["top_log_probs"] = columns["top_log_probs"].clamp(min=LEAST_LOG_PROB).to(DTYPES[ask.dtype])
        return DataProto(columns)

    @register(Dispatch.ONE_TO_ALL)
    def offload_states(self, include: list[StateKind]) -> None:
        self.strategy.offload_states(include)

    @register(Dispatch.ONE_TO_ALL)
    def load_states(self, include: list[StateKind]) -> None:
        self.strategy.load_states(include)

    @register(Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Collective. Write the model in Hugging Face format to ``path``."""
        self.strategy.save_hf(Path(path))


class ScoringWorker(ModelWorker):
    """A model that only gives log-probs of given tokens (an engine, a service): its ranks have no process group."""

    strategy: ScoringStrategy

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self, num_training_steps: int = 0) -> None:
        """Build the engine, or find the service."""
        strategy = create_scoring_strategy(self.context.role, seed=self.context.seed)
        assert isinstance(strategy, ScoringStrategy), type(strategy)
        self.strategy = strategy
        self.strategy.initialize(num_training_steps)

    @property
    def rank_info(self) -> RankInfo:
        """Plain data parallelism."""
        return Worker.rank_info.__get__(self)

    def close(self) -> None:
        if hasattr(self, "strategy"):
            self.strategy.shutdown()


class RewardModelWorker(ModelWorker):
    """``reward_model`` on one rank: forward passes only."""

    @property
    def head(self) -> ModelHead:
        return ModelHead.VALUE

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Load model and tokenizer.

        Raises:
            ValueError: a model without a score.
        """
        from transformers import AutoTokenizer

        args = self.context.role.model_args
        config = load_config(args)
        # Before the weights load, which takes minutes for a large model.
        check_has_score(config.architectures, config.num_labels, str(args.model_name_or_path))
        self._longest = getattr(config, "max_position_embeddings", None)
        self._image_token = getattr(config, "image_token_id", None)
        found = {name: float(getattr(config, name, 0.0) or 0.0) for name in (SCORE_MEAN, SCORE_STD)}
        self._statistics = found if found[SCORE_STD] > 0 else {}
        self._tokenizer = AutoTokenizer.from_pretrained(
            args.model_name_or_path, trust_remote_code=args.trust_remote_code
        )
        super().initialize(num_training_steps)

    @register(Dispatch.ONE_TO_ALL)
    def score(self, inputs: Sequence[ModelInput]) -> tuple[int, list[RewardResult]]:
        """Collective. The data-parallel rank, and the results of every ``dp_size``-th input from that rank on."""
        info = self.rank_info
        own = inputs[info.dp_rank :: info.dp_size]
        sequences = [self._read(one) for one in own]
        usable = [sequence for sequence in sequences if not isinstance(sequence, RewardResult)]
        # A rank with nothing to score takes part in the others' collectives with a row whose score is not used.
        scores = iter(last_token_scores(self.strategy, usable or [[0]]))
        results = [
            one if isinstance(one, RewardResult) else RewardResult(next(scores), self._statistics) for one in sequences
        ]
        return info.dp_rank, results

    def _read(self, sample: ModelInput) -> list[int] | RewardResult:
        """Token ids, or why there are none."""
        if sample.error is not None:
            return failure(sample.error)
        token_ids = sample.token_ids
        if token_ids is None:
            text = chat_text(self._tokenizer, sample.messages or (), sample.response)
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._image_token is not None and self._image_token in token_ids:
            return failure("the prompt has images, and a reward model inside a run is given text alone")
        if self._longest is not None and len(token_ids) > self._longest:
            return failure(f"{len(token_ids)} tokens are more than the reward model's {self._longest} positions")
        return list(token_ids)


def check_has_score(architectures: Sequence[str] | None, num_labels: int | None, path: str) -> None:
    """
    Raises:
        ValueError: no sequence-classification head, or one with several labels.
    """
    kinds = architectures or ()
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds) or num_labels != 1:
        kind = ", ".join(kinds) or "of no kind"
        raise ValueError(
            f"reward_model.model_args.model_name_or_path: {path} is {kind} with {num_labels} labels; a reward model "
            "is a ...ForSequenceClassification with one label"
        )


def last_token_scores(strategy: ModelStrategy, sequences: Sequence[list[int]]) -> list[float]:
    """Collective. The score at the last token of each sequence."""
    batch = scoring_batch(sequences)
    mask = batch.pop("score_mask")
    scores: list[float] = end_scores(strategy.forward(batch, [Output.VALUES])[Output.VALUES], mask).tolist()
    return scores
