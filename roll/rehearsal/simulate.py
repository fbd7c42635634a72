"""Runs a role's own strategy on fake tensors and a fake process group, and counts what it does.

What runs is the code of a run: :class:`roll.strategies.fsdp.fsdp2.Fsdp2Strategy` builds and shards the model, plans
micro-batches, computes, differentiates, clips, steps and exports.  Left out are the weights, which are in no file here,
and the self-test of experts, which compares numbers.

Strategies whose kernels cannot be run on fake tensors are rehearsed in two parts: activations, FLOPs and the memory of
micro-batches by running the same model unsharded (:class:`RehearsedModule`), states and collectives by their arithmetic
(:mod:`roll.rehearsal.formulas`).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup

from roll.algorithms.distillation import divergence
from roll.config.lora import uses_lora
from roll.config.losses import DivergenceConfig
from roll.config.plan.plan import micro_batching
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import ParallelDims
from roll.models.build import (
    DTYPES,
    HeadName,
    attention_implementation,
    checked_config,
    empty_model,
    enable_gradient_checkpointing,
    freeze_modules,
)
from roll.models.experts import sparse_layers
from roll.models.layouts import TokenLayout, TopTokens
from roll.models.lora import add_adapters
from roll.models.self_test import Noise
from roll.protocol.metrics import Metrics
from roll.rehearsal.stand_ins import as_on_device, fake_world
from roll.rehearsal.tracker import Collective, Kind, Tally, Tracker
from roll.strategies.base import ALL_WEIGHTS, Comparison, ModelHead, Output, StateKind, TensorBatch, target_columns
from roll.strategies.fsdp.fsdp2 import Fsdp2Strategy
from roll.strategies.training.data_parallel import DataParallelStrategy
from roll.strategies.training.micro_batches import plan_micro_batches
from roll.strategies.training.optimizer import TrainingProgress, state_tensors

CUDA_GRANULARITY, CPU_GRANULARITY = 512, 64  # bytes to which the allocators round up
SENT_BUCKETS = 4  # so many buckets of a weight update are gathered; the others are alike


@dataclass
class Work(Tally):
    """One kind of pass of a role on its first rank: counts of one pipeline step; the peak includes states."""

    micro_batches: int = 1  # in one pipeline step
    tokens: int = 0  # tokens of the largest micro-batch, as computed
    kept: int = 0  # bytes of freed memory that malloc keeps at the peak

    @property
    def working(self) -> dict[Kind, int]:
        """The peak without what stays between passes."""
        return {kind: size for kind, size in self.peak.items() if kind not in (Kind.PARAMETERS, Kind.OPTIMIZER)}


@dataclass
class RoleRun:
    """A role as it was rehearsed."""

    states: dict[StateKind, int]  # bytes that stay on the device between passes, unless they are offloaded
    works: dict[str, Work]  # `train`, `forward`, `send`
    host: int = 0  # bytes of states in host memory (`offload_policy`, ZeRO-Offload)
    method: str = "executed"  # `executed`, or what of it was computed by a formula
    kept: int = 0  # bytes of freed memory that malloc keeps between passes


@dataclass(frozen=True)
class Task:
    """Work of a role in a pipeline step."""

    role: WorkerConfig
    world_size: int
    dp_size: int
    prompt: int
    response: int
    group_size: int = 1
    rows_per_update: int = 0  # rows of a rank in an optimizer step; 0: the role does not learn
    updates: int = 0  # optimizer steps of a pipeline step
    forward_rows: int = 0  # rows of a rank in passes without gradient; 0: none
    sends: bool = False  # it sends its weights to engines
    bucket_bytes: int = 2**30
    head: ModelHead = ModelHead.CAUSAL_LM
    units: int = 1  # adjacent rows that a loss compares
    more_outputs: tuple[Output, ...] = ()  # needed by the loss, besides log-probs
    compared_tokens: int | None = None  # tokens of each distribution that it is compared with; 0: all
    top_tokens: int | None = None  # tokens of each distribution that the role gives; 0: all
    cache: int = 0  # bytes of the last level of the device's cache
    on_cpu: bool = False  # count as on a CPU: its allocator, its head, its attention
    on_host: bool = False  # on this very CPU, whose kernels are timed, with what glibc keeps


class _Rehearsed(DataParallelStrategy):
    """Part of every strategy that computes without numbers."""

    tracker: Tracker
    vocabulary: int
    passes: list[Tally]  # counts of the micro-batches since they were cleared
    _meta: Any

    def _build_language_model(self, storage_dtype: torch.dtype) -> Any:
        args = self.role.model_args
        lora = uses_lora(args)
        dtype = self.compute_dtype if lora and self.mixes_types else storage_dtype
        head: HeadName = self.head.value
        config = checked_config(args, head)
        model = empty_model(config, head, dtype=dtype, attn_implementation=attention_implementation(args, config))
        freeze_modules(model, args.freeze_module_prefix)
        model = model.eval()
        self.sparse_layers, self.vocabulary = sparse_layers(model), int(model.config.get_text_config().vocab_size)
        if lora:
            with torch.device("meta"):
                self.adapters = add_adapters(model, args, self.seed, storage_dtype)
        self._meta = self
        return model

    def read(self, root: nn.Module, device: torch.device, *_: object) -> None:
        """Stand in for the files of the weights: take memory, read nothing."""
        with self.tracker:
            root.to_empty(device=device)
            if not any(hasattr(parameter, "device_mesh") for parameter in root.parameters()):
                self.model.language_model.tie_weights()
            self.tracker.mark([*root.parameters(), *root.buffers()], Kind.PARAMETERS)

    def _self_test(self, context_group: ProcessGroup | None) -> Noise:
        return Noise()  # skipped, since it compares numbers

    def _max_over_ranks(self, count: int) -> int:
        return count

    def _layout(self, *args: Any) -> TokenLayout:
        # It depends on lengths, which are known.
        with unset_fake_temporarily():
            return super()._layout(*args)

    def _backward(self, *args: Any) -> list[Metrics]:
        with self.tracker.counting() as tally:
            metrics = super()._backward(*args)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            self.tracker.mark(gradients, Kind.GRADIENTS)
        self.passes.append(tally)
        return metrics

    def _outputs(
        self, layout: TokenLayout, outputs: Collection[str], temperature: float, shape: torch.Size
    ) -> TensorBatch:
        # With gradients _backward counts the whole pass, this part of it included.
        if torch.is_grad_enabled():
            return super()._outputs(layout, outputs, temperature, shape)
        with self.tracker.counting() as tally:
            computed = super()._outputs(layout, outputs, temperature, shape)
        self.passes.append(tally)
        return computed


class RehearsedFsdp2(_Rehearsed, Fsdp2Strategy):
    """``fsdp2_*`` without weights."""


class RehearsedModule(_Rehearsed):
    """A model that no backend shards: each rank holds all of it in the compute type, and sums gradients into it."""

    @cached_property
    def dims(self) -> ParallelDims:
        # Plain data parallelism, whatever the role's own strategy.
        return ParallelDims(dist.get_world_size())

    def initialize(self, num_training_steps: int = 0) -> None:
        self.compute_dtype = DTYPES[self.role.model_args.dtype]
        self._load_model(self.compute_dtype)
        self.read(self.model, self.device)
        if num_training_steps:
            enable_gradient_checkpointing(self.model.language_model, self.role.model_args)
            self.progress = TrainingProgress(self.role.training_args, num_training_steps, self.compute_dtype)
            self._watch_balance()
        else:
            self.model.requires_grad_(False)
        self.model.train(num_training_steps > 0)

    def _gather(self, tensors: Sequence[Tensor], span: tuple[int, int] | None = None) -> list[Tensor]:
        whole = [tensor.detach().to(self._wire_dtype(tensor)) for tensor in tensors]
        return whole if span is None else [tensor.flatten()[slice(*span)] for tensor in whole]

    def _clip_and_step(self, learning_rate: float) -> float:
        self.model.zero_grad(set_to_none=True)
        return 1.0

    def save_hf(self, path: object) -> None:
        raise AssertionError("there is nothing to save")


def rehearse(task: Task, execute_sharded: bool = True) -> RoleRun:
    """Run what a role does in a pipeline step. ``execute_sharded``: as FSDP2 does it; False: the unsharded model
    alone."""
    tracker = Tracker(CPU_GRANULARITY if task.on_cpu else CUDA_GRANULARITY, task.cache, task.on_host)
    cls: type[Any] = RehearsedFsdp2 if execute_sharded else RehearsedModule
    with fake_world(task.world_size), as_on_device(tracker, task.on_cpu):
        strategy = cls(task.role, head=task.head, max_grad_norm=1.0)
        strategy.tracker, strategy.passes = tracker, []
        strategy.initialize(num_training_steps=10 if task.updates else 0)
        if task.updates and execute_sharded:
            # AdamW allocates its moments in the first step: a step of zeros, which a run never sees.
            with tracker:
                for parameter in strategy.trainable:
                    parameter.grad = torch.zeros_like(parameter)
                strategy.optimizer.step()
                strategy.optimizer.zero_grad(set_to_none=True)
                tracker.mark(state_tensors(strategy.optimizer), Kind.OPTIMIZER)
        states = {
            StateKind.MODEL_PARAMS: tracker.live[Kind.PARAMETERS],
            StateKind.OPTIMIZER_STATES: tracker.live[Kind.OPTIMIZER],
        }
        works = {}
        with tracker:
            if task.on_host:
                if task.updates and execute_sharded:
                    # Moments come after the gradients of the first step, whose memory later steps find freed.
                    strategy.optimizer.state.clear()
                tracker.follow_heap()
                if task.updates:
                    _train(strategy, task)
                if task.updates and execute_sharded:
                    tracker.mark(state_tensors(strategy.optimizer), Kind.OPTIMIZER)
            if task.sends:
                works["send"] = _send(strategy, task)
            if task.forward_rows:
                works["forward"] = _forward(strategy, task)
            if task.updates:
                works["train"] = _train(strategy, task)
            kept = max(0, tracker.heap.resident - sum(tracker.live.values())) if tracker.heap else 0
        config = strategy.config if execute_sharded and not task.on_cpu else None
        del strategy
    gc.collect()
    if config is not None and config.optimizer_cpu_offload:
        for work in works.values():
            work.peak[Kind.OPTIMIZER] = 0
        return RoleRun(states | {StateKind.OPTIMIZER_STATES: 0}, works, host=states[StateKind.OPTIMIZER_STATES])
    if config is None or not config.offload_policy:
        return RoleRun(states, works, kept=kept)
    # Shards of parameters, gradients and moments stay in host memory.
    gradients = max(work.peak.get(Kind.GRADIENTS, 0) for work in works.values())
    for work in works.values():
        work.peak |= dict.fromkeys((Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER), 0)
    return RoleRun(dict.fromkeys(states, 0), works, host=sum(states.values()) + gradients)


def _first_micro_batches(task: Task, rows: int, trains: bool, most: int = 2) -> tuple[TensorBatch, int]:
    """The rows of the first micro-batches, which are the largest, and the number of all. Samples are of full length;
    those of a group share a prompt."""
    with unset_fake_temporarily():
        columns = torch.arange(task.prompt + task.response).expand(rows, -1)
        group = torch.arange(rows)[:, None] // max(1, task.group_size)
        # Whatever the ids, prompts of different groups must differ, and so must samples: they would be computed once.
        ids = torch.where(columns == 0, group % 97, columns % 89)
        ids = torch.where(columns == 1, group // 97 % 97, ids)
        ids = torch.where(columns == task.prompt, torch.arange(rows)[:, None] % 97, ids) + 3
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "response_mask": columns >= task.prompt,
        }
        if task.units > 1:
            batch["unit_ids"] = torch.arange(rows) // task.units
        rule = micro_batching(task.role, trains)
        plan = plan_micro_batches(batch, rule, lambda count: count, task.role.use_prefix_sharing)
        chosen = sorted(row for micro_batch in plan[:most] for row in micro_batch)
        return {name: column[chosen] for name, column in batch.items()}, len(plan)


def _train(strategy: _Rehearsed, task: Task) -> Work:
    batch, count = _first_micro_batches(task, task.rows_per_update, trains=True)
    comparisons = []
    if task.compared_tokens is not None:
        # Columns of distributions, which take memory when a micro-batch is made of them.
        shape, tokens = batch["input_ids"].shape, task.compared_tokens or strategy.vocabulary
        contents = (torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros(()))
        sizes = ((*shape, tokens), (*shape, tokens), shape)
        for name, one, size in zip(target_columns("target"), contents, sizes, strict=True):
            batch[name] = one.expand(size)
        options = DivergenceConfig(logits_topk=task.compared_tokens)
        comparisons.append(Comparison("target", 1.0, partial(divergence, options=options)))
    outputs = [Output.LOG_PROBS, *task.more_outputs] if task.head is ModelHead.CAUSAL_LM else [Output.VALUES]

    def sum_of_outputs(outputs: TensorBatch, batch: TensorBatch) -> tuple[Tensor, Metrics]:
        # A loss that needs every output; what a run's own adds is as small as the batch's columns.
        return -torch.stack([values.sum() for values in outputs.values() if values.requires_grad]).sum(), {}

    step = partial(strategy.train_step, batch, sum_of_outputs, outputs, 1.0, comparisons)
    return _work(strategy, step, batch, count, task.updates)


def _forward(strategy: _Rehearsed, task: Task) -> Work:
    # Columns of distributions are gathered in host memory: more passes would count them as the device's.
    batch, count = _first_micro_batches(task, task.forward_rows, trains=False, most=2 if task.top_tokens is None else 1)
    outputs = [Output.LOG_PROBS] if task.head is ModelHead.CAUSAL_LM else [Output.VALUES]
    step: Callable[[], object] = partial(strategy.forward, batch, outputs)
    if task.top_tokens is not None:
        step = partial(strategy.forward_top_tokens, batch, TopTokens(task.top_tokens, strategy.vocabulary))
    return _work(strategy, step, batch, count)


def _work(
    strategy: _Rehearsed, step: Callable[[], object], batch: TensorBatch, micro_batches: int, repeats: int = 1
) -> Work:
    """Work of ``repeats`` times ``micro_batches``; those that the step leaves out count as its first pass."""
    strategy.passes, heap = [], strategy.tracker.heap
    if heap is not None:
        heap.peak = 0
    with strategy.tracker.counting() as tally:
        step()
    passes = strategy.passes
    tokens = int(batch["attention_mask"].sum()) // max(1, len(passes))
    kept = 0 if heap is None else max(0, heap.peak - sum(tally.peak.values()))
    work = Work(peak=tally.peak, micro_batches=micro_batches * repeats, tokens=tokens, kept=kept)
    for counted, factor in ((tally, repeats), (passes[0], (micro_batches - len(passes)) * repeats)):
        for operation, number in counted.operations.items():
            work.operations[operation] += number * factor
        for collective, number in counted.collectives.items():
            if counted is not tally and collective.name == "all_gather":  # what stays gathered is so in a later pass
                number = min(number, passes[-1].collectives[collective])
            work.collectives[collective] += number * factor
    return work


def _send(strategy: Any, task: Task) -> Work:
    """Gather buckets as the sender does, which holds one while it gathers the next."""
    buckets = strategy.named_full_weights(task.bucket_bytes)
    with strategy.tracker.counting() as tally:
        held = None
        for index, bucket in enumerate(buckets):
            held = bucket
            if index == SENT_BUCKETS:
                buckets.close()
                break
        del held, bucket
    weights = strategy._selected_weights(ALL_WEIGHTS)
    sent = sum(strategy._num_bytes(weight) for weight in weights)
    group = tuple(range(task.world_size))
    return Work(peak=tally.peak, collectives=Counter({Collective("gather", group, sent): 1}))
