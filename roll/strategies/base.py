"""The interface of a strategy: how a model is computed, hidden from the algorithms; and construction by name.

Everything above a strategy sees right-padded batches: a dict of tensors with one batch dimension B and one length L,
every per-token column of shape (B, L) and aligned to the token it describes.  ``log_probs[b, t]`` is the
log-probability of ``input_ids[b, t]`` given the tokens before it; it is 0 where ``response_mask`` is False (and always
at t = 0).  ``values[b, t]`` is the value of the state in which that token was sampled, so of the tokens before it.
Packing, padding removal, sharding and micro-batching are internal to a strategy and never change these layouts.

Every method marked *collective* must be called on all ranks of the cluster at the same time.

A backend is imported only when the YAML names it: most are optional packages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from roll.config.plan.plan import micro_batching
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import ParallelDims, StrategyConfig
from roll.config.strategies.registry import BACKENDS, train_strategies, trains, typed_strategy_config
from roll.models.layouts import TopTokens
from roll.platforms import current_platform
from roll.protocol.metrics import Metrics, RankInfo, merge_metrics

if TYPE_CHECKING:
    from roll.models.lora import Adapters
    from roll.strategies.engines.base import GenerationStrategy

TensorBatch = dict[str, torch.Tensor]
"""Columns of one batch. Always present: ``input_ids`` int64 (B, L), ``attention_mask`` bool (B, L, right-padded),
``response_mask`` bool (B, L). For a vision-language model also an optional object column of images
(:data:`roll.protocol.vision.IMAGES`)."""


class ModelHead(StrEnum):
    CAUSAL_LM = "causal_lm"
    VALUE = "value"
    SCORE = "score"
    """A reward model's: read like a critic's values."""


class Output(StrEnum):
    """Outputs of a forward pass; each but the last is float32 (B, L), 0 outside ``response_mask``."""

    LOG_PROBS = "log_probs"
    ENTROPY = "entropy"
    SUM_OF_SQUARES = "sum_of_squares"
    """Squared probabilities, summed over the whole vocabulary; without gradient."""
    VALUES = "values"
    ROUTES = "routed_experts"
    """(B, L, layers, k), the experts that tokens went to (:mod:`roll.models.experts`); not in training."""


class StateKind(StrEnum):
    """States that can be offloaded between phases; the names are those of the YAML."""

    MODEL_PARAMS = "model_params"
    OTHER_PARAMS = "other_params"
    """Gradient buffers that outlive an optimizer step."""
    OPTIMIZER_STATES = "optimizer_states"
    """Moments, and master weights where they are not the parameters themselves."""
    KV_CACHE = "kv_cache"
    """KV cache of a generation engine."""


@dataclass(frozen=True)
class WeightSelection:
    """Selection of a model's tensors, and their form."""

    trained_only: bool = False
    """Leave out the parameters that training never changes."""
    adapters_apart: bool = False
    """W, A and B of a LoRA weight as separate tensors, not W + scaling B A; see :meth:`MergedWeight.separate`."""


ALL_WEIGHTS = WeightSelection()


@dataclass(frozen=True)
class Comparison:
    """Target distributions in a batch's columns (:func:`target_columns`), and how the model is compared with them."""

    name: str
    temperature: float
    """Divides the model's logits."""
    divergence: Callable[[Tensor, Tensor, bool], Tensor]
    """See :class:`roll.models.layouts.TargetDistributions`."""


Outputs = Collection[Output]
Comparisons = Sequence[Comparison]

TOP_COLUMNS = ("top_log_probs", "top_ids", "tail_log_prob")


def target_columns(name: str) -> tuple[str, ...]:
    """Return the columns of a target, in the order of :data:`TOP_COLUMNS`, as :meth:`forward_top_tokens` gives them."""
    return tuple(f"{name}/{column}" for column in TOP_COLUMNS)


class LossFunction(Protocol):
    """A micro-batch's share of the loss of the whole optimizer step.

    ``outputs`` holds the requested :class:`Output` tensors (with gradient), ``batch`` the micro-batch's columns.  The
    returned scalar is already divided by the *global* denominators (tokens or samples over all ranks and micro-batches
    of the optimizer step), so the strategy makes the gradient the plain SUM over micro-batches and ranks.
    """

    def __call__(self, outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]: ...


class ModelStrategy(ABC):
    """A model on one rank of a cluster. ``torch.distributed`` is initialised before ``initialize`` is called.

    One class a backend: under ``<backend>_train`` it takes optimizer steps, under ``<backend>_infer`` it holds
    parameters in the compute dtype, which never change, and no optimizer.
    """

    config: StrategyConfig
    """The role's ``strategy_config``."""
    compute_dtype: torch.dtype
    adapters: Adapters | None = None

    def __init__(
        self,
        role: WorkerConfig,
        head: ModelHead = ModelHead.CAUSAL_LM,
        seed: int = 42,
        max_grad_norm: float | None = None,
    ) -> None:
        """``max_grad_norm`` is the pipeline's, used unless the role sets its own."""
        self.role, self.config = role, typed_strategy_config(role.strategy_args)
        self.head, self.gives_values = head, head is not ModelHead.CAUSAL_LM
        self.seed = seed
        self.trains = trains(role.strategy_args.strategy_name)
        self.training_rule, self.forward_rule = (micro_batching(role, trains=one) for one in (True, False))
        own = role.training_args.max_grad_norm
        self.max_grad_norm = max_grad_norm if own is None else own
        self.platform = current_platform()
        self.platform.set_device()
        self.device = self.platform.device()
        self._offloaded: dict[StateKind, OffloadedStorages] = {}
        self.offloads_optimizer_in_steps = False
        """Optimizer states leave the device for the forward and backward passes of a step."""
        self._configure()

    def _configure(self) -> None:
        """Read the backend's options from the role; nothing is built yet."""

    @abstractmethod
    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Build and load the model; with ``num_training_steps`` > 0 also optimizer and schedule.

        Without steps a model that could train can be computed and exported, with weights as the optimizer would have
        them. Raises ValueError: optimizer steps requested of a forward-only strategy; an unsupported model or sizes.
        """

    @cached_property
    def dims(self) -> ParallelDims:
        """Degrees of parallelism; ``cp`` consecutive ranks share each sequence, and so are given the same rows."""
        dims = self.config.parallel_dims(self.role, dist.get_world_size())
        dims.validate(self.role.name)
        return dims

    @cached_property
    def rank_info(self) -> RankInfo:
        return self.dims.rank_info(dist.get_rank())

    @abstractmethod
    def forward(
        self, batch: TensorBatch, outputs: Outputs, temperature: float = 1.0, comparisons: Comparisons = ()
    ) -> TensorBatch:
        """Collective. Outputs without gradient, in the batch's own layout.

        Log-probs, entropies and sums of squares are those of ``softmax(logits / temperature)``. With ``comparisons``
        there is also, for each of them, what :func:`roll.models.distributions.compared` says.
        """

    def forward_top_tokens(self, batch: TensorBatch, wanted: TopTokens, temperature: float = 1.0) -> TensorBatch:
        """Collective. The most probable tokens at each response position, of ``softmax(logits / temperature)``.

        Returns:
            ``top_log_probs`` float32 (B, L, k), descending; ``top_ids`` int32 (B, L, k); ``tail_log_prob`` float32
            (B, L), of all other tokens together; 0 outside ``response_mask``.
        """
        raise AssertionError(f"{self.role.strategy_args.strategy_name} gives no distributions")

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute forward passes inside the block without the model's LoRA adapters, if it has any."""
        return nullcontext() if self.adapters is None else self.adapters.disabled()

    @abstractmethod
    def named_full_weights(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. The whole model's tensors under their Hugging Face names, in buckets of at most ``bucket_bytes``
        (a larger tensor alone). Rank 0 yields the tensors; other ranks yield empty lists in step with it."""

    def adapter_scalings(self) -> dict[str, float]:
        """The factor of ``B A`` for every weight that has an adapter."""
        return {} if self.adapters is None else self.adapters.scalings

    @abstractmethod
    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        """This rank's tensors of a kind, those in host memory left out."""

    def offload_states(self, include: Collection[StateKind]) -> None:
        """Move states to host memory, until :meth:`load_states`; the model must not be computed in between.

        On a CPU device this frees nothing, but does the same.
        """
        for kind in include:
            if kind in self._offloaded:
                continue
            tensors = self._device_tensors(kind)
            if kind is StateKind.OPTIMIZER_STATES and tensors:
                # Some backends step the parameters themselves, without master copies. Those go with the model: the
                # forward pass needs them while the optimizer's states are away.
                parameters = storages_of(self._device_tensors(StateKind.MODEL_PARAMS))
                tensors = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in parameters]
            # Gradient buffers are zero between optimizer steps, so they need no copy in host memory.
            self._offloaded[kind] = OffloadedStorages(tensors, keep_contents=kind is not StateKind.OTHER_PARAMS)
        current_platform().empty_cache()  # or the allocator keeps the freed blocks from the engine on this device

    def load_states(self, include: Collection[StateKind]) -> None:
        """Bring states back that :meth:`offload_states` moved."""
        for kind in include:
            if kind in self._offloaded:
                self._offloaded.pop(kind).restore()
        current_platform().synchronize()

    @contextmanager
    def _without_optimizer(self) -> Iterator[None]:
        """Offload the optimizer's states for a step's forward and backward passes."""
        self.offload_states([StateKind.OPTIMIZER_STATES])
        try:
            yield
        finally:  # also when the block raises: a checkpoint written on the way out has them
            self.load_states([StateKind.OPTIMIZER_STATES])

    @abstractmethod
    def save_hf(self, path: Path) -> None:
        """Collective. Write the model in Hugging Face format (safetensors, config, generation config)."""

    def train_step(
        self,
        batch: TensorBatch,
        loss_fn: LossFunction,
        outputs: Outputs,
        temperature: float = 1.0,
        comparisons: Comparisons = (),
    ) -> Metrics:
        """Collective. :meth:`backward` on this rank's rows, then :meth:`optimizer_step`; the metrics of both."""
        metrics = self.backward(batch, loss_fn, outputs, temperature, comparisons)
        return merge_metrics([metrics, self.optimizer_step()])

    def backward(
        self,
        batch: TensorBatch,
        loss_fn: LossFunction,
        outputs: Outputs,
        temperature: float = 1.0,
        comparisons: Comparisons = (),
    ) -> Metrics:
        """Collective. Add the gradient of a loss to those of earlier calls since the last step, where the backend can
        (``accumulates``), in micro-batches as the role's keys say.

        With ``comparisons`` the outputs include, for each, what :func:`roll.models.distributions.compared` says.

        Returns the loss function's metrics merged over micro-batches; data-parallel strategies add
        ``tokens_per_micro_batch`` (as computed, padding included) and ``padding_ratio`` (the share of them on which no
        result depends).
        """
        raise self._takes_no_steps()

    def optimizer_step(self) -> Metrics:
        """Collective. One step on the sum of the gradients; ``grad_norm`` (before clipping, of the whole model) and
        ``lr``."""
        raise self._takes_no_steps()

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Collective. Sum over data-parallel ranks (used for loss denominators)."""
        raise self._takes_no_steps()

    def save(self, path: Path) -> None:
        """Collective. Everything needed to continue: parameters, optimizer, schedule, RNG states of every rank.

        It may return when all of it is copied, and write while training goes on; see :meth:`saved`.
        """
        raise self._takes_no_steps()

    def saved(self, wait: bool = True) -> bool:
        """Return True once this rank's part of the last :meth:`save` is on disk; with ``wait``, block until it is. What
        went wrong with writing it is raised."""
        return True

    def load(self, path: Path) -> None:
        """Collective. The inverse of :meth:`save`; the rank count may differ."""
        raise self._takes_no_steps()

    def _takes_no_steps(self) -> AssertionError:
        return AssertionError(f"{self.role.strategy_args.strategy_name} computes only")

    def _refuse_steps(self, num_training_steps: int) -> None:
        """Raise ValueError where a forward-only strategy is to take optimizer steps."""
        name = self.role.strategy_args.strategy_name
        if num_training_steps and not self.trains:
            trainer = name.replace("_infer", "_train")
            use = trainer if trains(trainer) else train_strategies()[0]
            raise ValueError(f"{self.role.name}.strategy_args.strategy_name: {name} cannot train; use {use}")


class OffloadedStorages:
    """Device storages of some tensors, with their contents in (page-locked) host memory. ``keep_contents``: False for
    what is rewritten before it is read (gradients); it comes back as zeros."""

    def __init__(self, tensors: Iterable[Tensor], keep_contents: bool = True) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        # By storage, not by tensor: parameters that are views of one flat buffer share it, and a view frees nothing.
        for storage in storages_of(tensors).values():
            if not storage.resizable():  # a file mapped into host memory, as freshly loaded weights are
                continue
            size, copy = storage.nbytes(), None
            if keep_contents:
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=current_platform().pin_memory)
                copy = memory.untyped_storage().copy_(storage)
            storage.resize_(0)  # frees the memory; the tensors, and whoever holds them, stay the same objects
            self._held.append((storage, size, copy))

    def restore(self) -> None:
        while self._held:
            storage, size, copy = self._held.pop()
            storage.resize_(size)
            if copy is None:
                storage.fill_(0)  # type: ignore[attr-defined]
            else:
                storage.copy_(copy)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors by address, each once; empty ones (all at address 0) are left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def create_strategy(
    role: WorkerConfig, head: ModelHead = ModelHead.CAUSAL_LM, seed: int = 42, max_grad_norm: float | None = None
) -> ModelStrategy:
    """The strategy that ``role.strategy_args.strategy_name`` names, not yet initialised. ``max_grad_norm``: the
    pipeline's; a training strategy uses it unless the role sets its own. Raises ValueError: an unknown name or one that
    cannot compute batches."""
    return _import(role, "computes", "compute batches")(role, head=head, seed=seed, max_grad_norm=max_grad_norm)


def create_scoring_strategy(role: WorkerConfig, seed: int = 42) -> ModelStrategy:
    """The scorer of given tokens (:class:`roll.strategies.engines.scoring.ScoringStrategy`) that
    ``role.strategy_args.strategy_name`` names, not yet initialised. Raises ValueError: an unknown name or one that has
    no such scorer."""
    return _import(role, "scores", "give log-probs of given tokens only")(role, seed=seed)


def create_generation_strategy(role: WorkerConfig, seed: int = 42) -> GenerationStrategy:
    """The generation engine that ``role.strategy_args.strategy_name`` names, not yet initialised. Raises ValueError: an
    unknown name or one that cannot generate."""
    return _import(role, "generates", "generate")(role, seed=seed)


def _import(role: WorkerConfig, kind: Literal["computes", "generates", "scores"], purpose: str) -> Any:
    name = role.strategy_args.strategy_name
    paths = {strategy: getattr(backend, kind) for strategy, backend in BACKENDS.items() if getattr(backend, kind)}
    if name not in paths:
        rule = f"is not a strategy that can {purpose}; use one of {', '.join(paths)}"
        raise ValueError(f"{role.name}.strategy_args.strategy_name: {name!r} {rule}")
    module, _, attribute = paths[name].rpartition(".")
    return getattr(import_module(module), attribute)
