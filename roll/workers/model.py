"""Workers that run a model: the reference policy, the reward model, and every role that learns (what is minimised
arrives with the call); and one that sends stored weights to engines in a trainer's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roll.algorithms.reward_models import end_scores, scoring_batch
from roll.checkpoint.trained_model import read_weights
from roll.config.losses import SCORE_MEAN, SCORE_STD
from roll.datasets.templates import chat_text
from roll.distributed import Dispatch, Worker, register
from roll.methods.base import LOG_PROBS, POLICY_COLUMNS, SAME_WEIGHTS, Ask, Loss, Totals
from roll.models.build import DTYPES, load_config
from roll.platforms import current_platform
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, RankInfo, merge_metrics
from roll.protocol.vision import IMAGES
from roll.rewards.base import RewardResult, failure
from roll.rollout.rewarding import ModelInput
from roll.strategies.base import (
    LossFunction,
    ModelHead,
    ModelStrategy,
    Output,
    StateKind,
    TensorBatch,
    WeightSelection,
    create_scoring_strategy,
    create_strategy,
)
from roll.strategies.engines.scoring import ScoringStrategy
from roll.strategies.training.micro_batches import merged_floats
from roll.weight_sync.encoding import LostEngines, SyncOptions, SyncReport, Update, iter_buckets
from roll.weight_sync.quantization import quantized_names, rounded
from roll.weight_sync.sender import RayEngines, WeightSender, build_transport


def columns_of(batch: DataProto) -> TensorBatch:
    """A batch as strategies take it: its tensors, and its images where rows have some."""
    images: Any = batch.non_tensor_batch.get(IMAGES)
    return TensorBatch(batch.batch) if images is None else {**batch.batch, IMAGES: images}


LEAST_LOG_PROB = -6e4


@dataclass(frozen=True)
class ModelSettings:
    """Keys of the pipeline that concern a model."""

    max_grad_norm: float | None = None  # None: that of the role
    # Optimizer states leave the device for the forward and backward passes.
    offload_optimizer_in_steps: bool = field(default=False, kw_only=True)
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
            head=self.settings.head,
            seed=self.context.seed,
            max_grad_norm=self.settings.max_grad_norm,
        )
        self.strategy.offloads_optimizer_in_steps = self.settings.offload_optimizer_in_steps
        self.strategy.initialize(num_training_steps)

    @property
    def rank_info(self) -> RankInfo:
        return self.strategy.rank_info if hasattr(self, "strategy") else super().rank_info

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
        strategy = create_scoring_strategy(self.context.role, seed=self.context.seed)
        assert isinstance(strategy, ScoringStrategy), type(strategy)
        self.strategy = strategy
        strategy.initialize(num_training_steps)

    @property
    def rank_info(self) -> RankInfo:
        return Worker.rank_info.__get__(self)

    def close(self) -> None:
        if hasattr(self, "strategy"):
            self.strategy.shutdown()


class RewardModelWorker(ModelWorker):
    """``reward_model`` on one rank: forward passes only."""

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Load model and tokenizer. Raises ``ValueError``: a model without a score."""
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
    """ValueError: no sequence-classification head, or one with several labels."""
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


# Beginnings of the names of what a strategy itself reports: these get the prefix of the loss.
STEP_METRICS = ("grad_norm", "lr", "loss_scale", "tokens_per_micro_batch", "padding_ratio", "moe_")


def loss_columns(batch: DataProto, loss: Loss, **_: object) -> tuple[str, ...]:
    return loss.columns


class TrainWorker(ModelWorker):
    """A model that learns, on one rank; the policy sends its weights to the engines."""

    _sender: WeightSender | None = None
    _quantized: frozenset[str] = frozenset()

    @register(Dispatch.DP_MP_COMPUTE, columns=loss_columns)
    def step(self, batch: DataProto, loss: Loss, *, mini_batches: int = 1, epochs: int = 1) -> Metrics:
        """Collective. ``epochs`` passes over the rows, with an optimizer step on each of ``mini_batches`` equal parts.

        What the strategy itself reports has the loss's prefix. A loss that is not finite on any rank drops the step on
        all, as a gradient does.
        """
        shares = equal_parts(columns_of(batch), mini_batches)
        totals = self.totals(loss, shares)
        metrics = []
        for _ in range(epochs):
            for share, total in zip(shares, totals, strict=True):
                minimised = partial(watched_loss, loss=partial(loss, totals=total))
                found = self.strategy.backward(share, minimised, loss.outputs, loss.temperature, loss.comparisons)
                metrics.append(prefixed(found | self.strategy.optimizer_step(), loss.prefix))
                for later in shares:  # later mini-batches are computed with other weights
                    later.pop(SAME_WEIGHTS, None)
        return merge_metrics(metrics)

    @register(Dispatch.DP_MP_COMPUTE, columns=loss_columns)
    def backward(self, batch: DataProto, loss: Loss) -> Metrics:
        """Collective. The first half of a :meth:`step`: add the gradient to those since the last optimizer step."""
        rows = columns_of(batch)
        (total,) = self.totals(loss, [rows])
        minimised = partial(watched_loss, loss=partial(loss, totals=total))
        found = self.strategy.backward(rows, minimised, loss.outputs, loss.temperature, loss.comparisons)
        return prefixed(found, loss.prefix)

    @register(Dispatch.DP_MP_COMPUTE)
    def optimizer_step(self, prefix: str) -> Metrics:
        """Collective. The second half; ``prefix`` begins the names of the metrics."""
        return prefixed(self.strategy.optimizer_step(), prefix)

    @register(Dispatch.DP_MP_COMPUTE, columns=loss_columns)
    def measure(self, batch: DataProto, loss: Loss) -> Metrics:
        rows = columns_of(batch)
        outputs = self.strategy.forward(rows, loss.outputs, loss.temperature, loss.comparisons)
        return merged_floats([loss(outputs, rows, loss.counts(rows))[1]])

    def totals(self, loss: Loss, shares: list[TensorBatch]) -> list[Totals]:
        """Collective. The denominators of each mini-batch, in one sum over the ranks."""
        counts = [loss.counts(share) for share in shares]
        shapes = {name: part.shape for name, part in counts[0].items()}
        # Float64: float32 counts tokens exactly up to 2**24 only. All mini-batches at once: one all-reduce a call
        # instead of one for each optimizer step.
        flat = torch.stack([torch.cat([part.double().reshape(-1) for part in own.values()]) for own in counts])
        sizes = [shape.numel() for shape in shapes.values()]
        return [
            {name: part.view(shape) for (name, shape), part in zip(shapes.items(), row.split(sizes), strict=True)}
            for row in self.strategy.all_reduce_sum(flat)
        ]

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Collective. Everything needed to continue, written into the folder ``path``; see :meth:`checkpoint_saved`."""
        self.strategy.save(Path(path))

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_saved(self, wait: bool) -> bool:
        """True when this rank's part of the last :meth:`save_checkpoint` is on disk; ``wait`` until it is."""
        return self.strategy.saved(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Collective. The inverse of :meth:`save_checkpoint`."""
        self.strategy.load(Path(path))

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines | None:
        """Collective. Rank 0 sends the policy to ``engines`` and verifies it; the others help to gather.

        Args:
            base_version: what all of the engines hold; None: they are sent everything.
        """
        selection = WeightSelection(base_version is not None, options.adapters_apart)
        # A generator whose steps are collectives: all ranks have to exhaust it, whatever happens on rank 0.
        buckets = self.strategy.named_full_weights(options.bucket_bytes, selection)
        if self.context.rank == 0:
            if options.quantization is not None:
                self._quantized = self._quantized or quantized_names(self.context.role.model_args)
                form, names = options.quantization, self._quantized
                buckets = (
                    [(name, rounded(tensor, form) if name in names else tensor) for name, tensor in bucket]
                    for bucket in buckets
                )
            scalings = self.strategy.adapter_scalings() if options.adapters_apart else {}
            update = Update(version, options.deadline, base_version, scalings, options.patience)
            # Made at the first update; it stays, with its connections and what it remembers.
            if self._sender is None:
                backend, host = current_platform().collective_backend, self.context.master_addr
                transport = build_transport(options.transport, options.directory, backend, host)
                self._sender = WeightSender(transport, options.bucket_bytes, delta=options.mode == "delta")
            return self._sender.try_send(buckets, RayEngines(engines), update)
        for _ in buckets:
            pass
        return None


class StoredWeightsWorker(Worker):
    """Stands in for a trainer, so that one engine start serves many models: :meth:`open` chooses the model folder or
    training checkpoint whose weights :meth:`send_weights` sends."""

    _sender: WeightSender | None = None
    _weights: Mapping[str, torch.Tensor]

    @register(Dispatch.ONE_TO_ALL)
    def open(self, base: str, checkpoint: str | None) -> None:
        """Read a model.

        Args:
            base: its folder or hub name.
            checkpoint: the role's folder of a training checkpoint; what was trained replaces what ``base`` has.

        Raises:
            OSError: no such model. CheckpointMismatchError, CheckpointDamagedError: the checkpoint cannot be read.
        """
        arguments = self.context.role.model_args
        plain = replace(arguments, model_name_or_path=base, lora_target=None, adapter_name_or_path=None)
        self._weights = read_weights(plain, None if checkpoint is None else Path(checkpoint))

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines:
        """Like :meth:`TrainWorker.send_weights`."""
        if self._sender is None:
            transport = build_transport(options.transport, options.directory, "gloo", self.context.master_addr)
            self._sender = WeightSender(transport, options.bucket_bytes)
        buckets = iter_buckets(self._weights.items(), options.bucket_bytes)
        update = Update(version, options.deadline, base_version, patience=options.patience)
        return self._sender.try_send(buckets, RayEngines(engines), update)


def prefixed(metrics: Metrics, prefix: str) -> Metrics:
    return {prefix + name if name.startswith(STEP_METRICS) else name: metric for name, metric in metrics.items()}


def watched_loss(outputs: TensorBatch, batch: TensorBatch, loss: LossFunction) -> tuple[torch.Tensor, Metrics]:
    """``loss``, whose gradient is nan where its value is not finite."""
    # Such a loss may have a finite gradient (the infinity of a masked term, say), and only on one rank. The norm of the
    # gradient is what all ranks know and agree on.
    value, metrics = loss(outputs, batch)
    if value.requires_grad:
        # Without a wait for the device, and exact where the value is finite.
        factor = torch.ones_like(value.detach()).masked_fill(~value.isfinite(), torch.nan)
        value.register_hook(lambda gradient: gradient * factor)
    return value, metrics


def equal_parts(batch: TensorBatch, count: int) -> list[TensorBatch]:
    total = len(batch["input_ids"])
    assert total % count == 0, f"{total} rows do not divide into {count} mini-batches"
    rows = total // count
    return [{k: v[begin : begin + rows] for k, v in batch.items()} for begin in range(0, total, rows)]
