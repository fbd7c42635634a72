"""Data-parallel strategies (FSDP, DeepSpeed, plain models): a rank's rows in micro-batches, computed and reduced.

A backend defines how a module is sharded, differentiated and updated. All else is here and shared, so that backends
give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll.checkpoint.contents import ModelContents
from roll.checkpoint.tensors import describe_model
from roll.config.lora import uses_lora
from roll.config.plan.plan import MicroBatching
from roll.models.build import build_model, checked_config
from roll.models.expert_parallel import sum_of_parts
from roll.models.experts import (
    RoutingRecorder,
    SparseLayer,
    encoded,
    missing_mark,
    route_dtype,
    sparse_layers,
    with_shared_routes,
)
from roll.models.invariant import check_processor, is_invariant
from roll.models.kernels import compile_layers
from roll.models.layout_setup import check_context_size
from roll.models.layouts import TokenLayout, TopTokens, on_device, padded, with_token_rows
from roll.models.loading import MetaModel, build_on_meta
from roll.models.log_probs import ResponseModel
from roll.models.lora import add_adapters, base_name
from roll.models.self_test import Noise, check_role, use_own_operations
from roll.models.stored import StoredLayout
from roll.models.vision import FEATURES, ImagePool, with_images
from roll.protocol.metrics import Mean, Metrics
from roll.protocol.vision import IMAGES
from roll.strategies.base import Comparisons, LossFunction, Output, Outputs, StateKind, TensorBatch
from roll.strategies.training.experts import ExpertBalance
from roll.strategies.training.gather import GatheredWeights
from roll.strategies.training.micro_batches import (
    Rows,
    divide,
    is_empty,
    keys_of,
    lay_out,
    merged_floats,
    micro_batch,
    plan_micro_batches,
    replay_metrics,
    row_index,
    targets_of,
    with_routes,
)
from roll.strategies.training.optimizer import TrainingProgress, local_tensor, state_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


class DataParallelStrategy(GatheredWeights):
    """Every rank computes its own rows with the whole model, of which it may hold a shard only."""

    called: Callable[..., dict[str, torch.Tensor]]
    """The response model's forward pass (collective): itself, or the backend's wrapper of it."""
    progress: TrainingProgress
    optimizer: torch.optim.Optimizer | None = None
    sparse_layers: Sequence[SparseLayer] = ()
    """Layers with experts; none of a dense model."""
    balance: ExpertBalance | None = None
    _meta_dtype: torch.dtype | None = None
    """Type of a model that is built without weights; None: it is loaded whole."""
    _meta: MetaModel | None = None
    """The weights still to be read; None once they have been."""
    context_group: ProcessGroup | None = None
    """The ``ulysses_size`` ranks that are given the same rows; None: this rank alone."""
    mixes_types = True
    """A layer may hold two dtypes: a frozen base in the compute dtype next to float32 adapters (FSDP1 flattens a unit
    into one tensor of one dtype)."""
    divides_state = False
    """Parameters, or gradients and the optimizer's states, are divided over ranks."""

    def _begin_micro_batch(self, last: bool) -> None:
        """Hook before each micro-batch of a training step; ``last``: the optimizer step comes after it."""

    def _differentiate(self, loss: torch.Tensor) -> None:
        """Collective."""
        loss.backward()

    def _clip_and_step(self, learning_rate: float) -> float:
        """Collective. Clip the gradient, step unless it is not finite, clear it; its unscaled norm before clipping."""
        raise self._takes_no_steps()

    def _load_model(self, storage_dtype: torch.dtype) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.dims.cp > 1:
            check_context_size(checked_config(self.role.model_args, self.head.value), self.dims.cp)
        # The ranks that may share a row of a micro-batch with this one, by their number.
        sizes = [size for size in range(2, self.dims.cp + 1) if self.dims.cp % size == 0]
        self._sharers = {size: dist.new_subgroups(size)[0] for size in sizes}
        self.context_group = self._sharers.get(self.dims.cp)
        noise = self._self_test(self.context_group)
        torch.manual_seed(self.seed + self.rank)  # after the self-test, whose copy seeds every device
        language_model = self._build_language_model(storage_dtype)
        noise.silence(language_model)
        # No gradient reaches the row of this token through the input, and in many chat models it ends every turn. Where
        # it pads there is none to leave out.
        for module in language_model.get_input_embeddings().modules():  # with LoRA it may hold a trained copy
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        use_own_operations(language_model, self.role)
        if is_invariant(self.role.model_args):
            check_processor(language_model, self.compute_dtype)
        self._prepare_experts(language_model)
        if self.role.model_args.compile:
            compile_layers(language_model)
        # Before the backend shards the model: afterwards, parameters have the shapes of shards.
        self._shapes = {name: list(parameter.shape) for name, parameter in language_model.named_parameters()}
        live = {base_name(name): tensor.shape for name, tensor in language_model.state_dict().items()}
        self._stored = StoredLayout(language_model, live)
        self._on_the_way = self._stored.on_the_way()
        self._trained_names = {name for name, parameter in language_model.named_parameters() if parameter.requires_grad}
        self.called = self.model = ResponseModel(language_model)
        if self.sparse_layers:
            self.model.routing = RoutingRecorder(self.sparse_layers)

    def _self_test(self, context_group: ProcessGroup | None) -> Noise:
        """Collective over ranks that share rows. The parts of the model to switch off."""
        return check_role(self.role, self.head.value, self.trains, context_group)

    def _prepare_experts(self, language_model: PreTrainedModel) -> None:
        """Refuse sparse layers that this backend would compute wrong, or change them in place."""
        separate = [layer.name for layer in self.sparse_layers if not layer.is_fused]
        if separate and self.divides_state and self.world_size > 1:
            raise ValueError(
                f"{self.role.name}.strategy_args.strategy_name: {self.role.strategy_args.strategy_name}, but the "
                f"experts of {type(language_model).__name__} are modules ({separate[0]}), of which ranks would gather "
                "or reduce different ones; set a deepspeed strategy with strategy_config.zero_stage: 0"
            )

    def _watch_balance(self) -> None:
        if self.sparse_layers:
            args, config = self.role.model_args, self.model.language_model.config
            coefficient = args.moe_aux_loss_coef
            if coefficient is None:  # that of the model's own configuration
                is_enabled = getattr(config, "output_router_logits", False)
                coefficient = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if is_enabled else 0.0
            self.balance = ExpertBalance(
                self.model, self.sparse_layers, coefficient, args.moe_aux_loss_scope, self.device, self.context_group
            )

    def _build_language_model(self, storage_dtype: torch.dtype) -> PreTrainedModel:
        args = self.role.model_args
        if self._meta_dtype is not None:
            # Without weights, where that is possible: each rank later reads its own part of them.
            self._meta = build_on_meta(args, self.head.value, self._meta_dtype, self.seed)
            if self._meta is not None:
                self.sparse_layers = sparse_layers(self._meta.language_model)
                return self._meta.language_model
        # The base of adapters is frozen: float32 copies of it would only be rounded in every pass.
        is_rounded = uses_lora(args) and self.mixes_types
        dtype = self.compute_dtype if is_rounded else storage_dtype
        language_model = build_model(args, self.head.value, dtype, self.seed)
        self.sparse_layers = sparse_layers(language_model)  # before adapters wrap some of it
        if uses_lora(args):
            self.adapters = add_adapters(language_model, args, self.seed, storage_dtype)
        return language_model

    def forward(
        self, batch: TensorBatch, outputs: Outputs, temperature: float = 1.0, comparisons: Comparisons = ()
    ) -> TensorBatch:
        assert not outputs or (Output.VALUES in outputs) == self.gives_values, (self.head, outputs)
        shape, device = batch["input_ids"].shape, batch["input_ids"].device
        names = [str(name) for name in outputs if name is not Output.ROUTES]
        results = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in names}
        self.model.records_routes = Output.ROUTES in outputs
        if self.model.records_routes:
            layer = self.sparse_layers[0]
            dtype, size = route_dtype(layer.num_experts), (*shape, len(self.sparse_layers), layer.top_k)
            results[Output.ROUTES] = torch.full(size, missing_mark(dtype), dtype=dtype, device=device)
        self._compute_rows(batch, results, names, temperature, comparisons)
        self.model.records_routes = False
        return results

    def forward_top_tokens(self, batch: TensorBatch, wanted: TopTokens, temperature: float = 1.0) -> TensorBatch:
        assert not self.gives_values, self.head
        results = TensorBatch()
        self._compute_rows(batch, results, [Output.LOG_PROBS], temperature, top_tokens=wanted)
        return results

    @torch.no_grad()
    def _compute_rows(
        self,
        batch: TensorBatch,
        results: TensorBatch,
        outputs: Collection[str],
        temperature: float,
        comparisons: Comparisons = (),
        top_tokens: TopTokens | None = None,
    ) -> None:
        """Collective. Write the outputs of all rows into ``results``, (B, L, ...) each; missing ones are added."""
        images = None
        if self.model.reads_images or IMAGES in batch:
            batch, images = with_images(batch, self.model.language_model.config)
        was_training = self.model.training
        self.model.eval()
        rule, ids = self.forward_rule, batch["input_ids"]
        for rows in plan_micro_batches(batch, rule, self._max_over_ranks, self.role.use_prefix_sharing):
            part = micro_batch(batch, rows)
            shape = part["input_ids"].shape
            layout = replace(self._layout(part, rule, images, comparisons), top_tokens=top_tokens)
            # Also without rows: other ranks gather parameters in this pass, and wait for this one's shards.
            computed = self._outputs(layout, outputs, temperature, shape)
            if self.model.records_routes:
                group, chosen = layout.context_group, self.model.chosen_experts
                assert chosen is not None
                sources = (layout if group is None else layout.chunk(group.rank(), group.size())).sources.flatten()
                sources = sources.to(chosen.device)
                # Counted from 1, so that ranks' parts can be summed.
                flat = chosen.new_zeros(shape.numel(), *chosen.shape[1:])
                flat[sources[sources >= 0]] = chosen[sources >= 0] + 1
                if self.context_group is not None:
                    dist.all_reduce(flat, group=self.context_group)
                column = encoded(flat - 1, self.sparse_layers[0].num_experts).view(*shape, *chosen.shape[1:])
                if self.role.use_prefix_sharing:
                    # A shared beginning was computed for the first of its rows only.
                    column = with_shared_routes(column.cpu(), keys_of(part), part["response_mask"])
                computed[Output.ROUTES] = column
            for name, values in computed.items():
                if name not in results:
                    results[name] = torch.zeros(*ids.shape, *values.shape[2:], dtype=values.dtype, device=ids.device)
                if rows:
                    results[name][row_index(rows), : shape[1]] = values.to(ids.device)
        self._reshard()
        self.model.train(was_training)

    def _outputs(
        self, layout: TokenLayout, outputs: Collection[str], temperature: float, shape: torch.Size
    ) -> TensorBatch:
        """Collective. Each output as (B, L), on the device, whole on each rank that is given the micro-batch."""
        if (group := layout.context_group) is not None:
            layout = layout.chunk(group.rank(), group.size())
        layout = on_device(layout, self.device)
        computed = self.called(layout, outputs, temperature)
        aligned = {name: layout.scatter(values, shape) for name, values in computed.items()}
        if (group := self.context_group) is None or not aligned:
            return aligned
        if layout.top_tokens is not None:  # of several dtypes and shapes, so not stacked; never differentiated
            for values in aligned.values():
                dist.all_reduce(values, group=group)
            return aligned
        return dict(zip(aligned, sum_of_parts(torch.stack(list(aligned.values())), group).unbind(), strict=True))

    def _layout(
        self, part: TensorBatch, rule: MicroBatching, images: ImagePool | None, comparisons: Comparisons = ()
    ) -> TokenLayout:
        """Lay out this rank's rows of a micro-batch, padded so that ranks that share them get equally many columns."""
        group, length, rows = self.context_group, part["input_ids"].shape[1], list[int]()
        if group is not None:
            shares = divide(part, rule, group.size(), self.role.use_prefix_sharing)
            rows = shares[group.rank()]
            part = {name: column[rows] for name, column in part.items()}
            group = self._sharers.get(shares.count(rows))
        layout = lay_out(part, rule, self.role.use_prefix_sharing)
        if images is not None and FEATURES in part:
            layout = images.attach(layout, part)
        sequences, columns = layout.input_ids.shape
        if group is not None and columns % group.size():
            layout = padded(layout, sequences, columns + -columns % group.size())
        if comparisons:
            layout = replace(layout, comparisons=targets_of(layout, part, comparisons))
        if Output.ROUTES in part:
            layout = with_routes(layout, part[Output.ROUTES], len(self.sparse_layers), self.role.name)
        return replace(layout.within(rows, length), context_group=group) if rows else layout

    def _max_over_ranks(self, count: int) -> int:
        """The number of passes that every rank must make, so that none waits for another's collective."""
        if self.world_size == 1:
            return count
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    @cached_property
    def contents(self) -> ModelContents:
        """Description of the model in a checkpoint."""
        return describe_model(self.role, self._shapes, self._trained_names, self.adapter_scalings())

    def optimizer_step(self) -> Metrics:
        norm = self._clip_and_step(self.progress.learning_rate)
        return self.progress.finish_step(norm, self.rank_info.dp_size)

    def backward(
        self,
        batch: TensorBatch,
        loss_fn: LossFunction,
        outputs: Outputs,
        temperature: float = 1.0,
        comparisons: Comparisons = (),
    ) -> Metrics:
        """Collective. Forward and backward passes over all micro-batches."""
        assert not outputs or (Output.VALUES in outputs) == self.gives_values, (self.head, outputs)
        images = None
        if self.model.reads_images or IMAGES in batch:
            batch, images = with_images(batch, self.model.language_model.config)
        rule, balance = self.training_rule, self.balance
        plan = plan_micro_batches(batch, rule, self._max_over_ranks, self.role.use_prefix_sharing)
        metrics: list[Metrics] = []
        with self._without_optimizer() if self.offloads_optimizer_in_steps else nullcontext():
            if balance is not None:
                balance.begin(sum(not is_empty(micro_batch(batch, rows)) for rows in plan))
                if balance.coefficient and balance.is_global and len(plan) > 1:
                    self._count_choices(balance, batch, plan, rule, images)
            for index, rows in enumerate(plan):
                self._begin_micro_batch(last=index == len(plan) - 1)
                part = micro_batch(batch, rows)
                metrics += self._backward(part, rule, images, loss_fn, outputs, temperature, comparisons)
        if balance is not None:
            metrics.append(balance.metrics())
        return merged_floats(metrics)

    @torch.no_grad()
    def _count_choices(
        self,
        balance: ExpertBalance,
        batch: TensorBatch,
        plan: list[Rows],
        rule: MicroBatching,
        images: ImagePool | None,
    ) -> None:
        # Collective. The balance loss needs the choices of all micro-batches before the first is differentiated.
        self.model.eval()
        for index, rows in enumerate(plan):
            part = micro_batch(batch, rows)
            self._outputs(with_token_rows(self._layout(part, rule, images)), (), 1.0, part["input_ids"].shape)
            balance.count(last=index == len(plan) - 1)
        self._reshard()
        self.model.train()

    def _backward(
        self,
        part: TensorBatch,
        rule: MicroBatching,
        images: ImagePool | None,
        loss_fn: LossFunction,
        outputs: Collection[Output],
        temperature: float,
        comparisons: Comparisons,
    ) -> list[Metrics]:
        """Forward and backward of one micro-batch. One with nothing to predict still takes part in all collectives."""
        layout, routing = self._layout(part, rule, images, comparisons), self.model.routing
        if routing is not None:
            routing.replay_counts = None
        if self.balance is not None:
            layout = with_token_rows(layout)
        aligned = self._outputs(layout, [str(name) for name in outputs], temperature, part["input_ids"].shape)
        balance_loss = None if self.balance is None else self.balance.share()  # a collective: also for an empty part
        if is_empty(part):
            self._differentiate(_zero_loss(aligned))
            return []
        columns = {name: column.to(self.device, non_blocking=True) for name, column in part.items()}
        loss, metrics = loss_fn(aligned, columns)
        # A loss may be a constant (every token masked). Without a backward pass the others' reduce-scatter would hang.
        loss = loss if loss.requires_grad else _zero_loss(aligned)
        self._differentiate(loss if balance_loss is None else loss + balance_loss)
        replayed = None if routing is None else routing.replay_counts
        counts: Any = layout.input_ids.numel(), layout.num_padding
        if (group := layout.context_group) is not self.context_group:  # its ranks have computed different rows
            counts = torch.tensor(counts, dtype=torch.float64, device=self.device) / (group.size() if group else 1)
            dist.all_reduce(counts, group=self.context_group)
        sizes: Metrics = {"tokens_per_micro_batch": Mean(counts[0]), "padding_ratio": Mean(counts[1], counts[0])}
        return [metrics, sizes, {} if replayed is None else replay_metrics(replayed, [self.context_group])]

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        if kind is StateKind.OPTIMIZER_STATES:
            return self._on_device([] if self.optimizer is None else state_tensors(self.optimizer))
        if kind is not StateKind.MODEL_PARAMS:
            return []
        self._reshard()
        return self._on_device([*self.model.parameters(), *self.model.buffers()])

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        local = [local_tensor(tensor.detach()) for tensor in tensors]
        return [tensor for tensor in local if tensor.device.type == self.device.type]

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.to(self.device, copy=True)  # or, on a CPU, the caller's tensor would be reduced in place
        if self.rank % self.dims.cp:
            total.zero_()  # counted by the first of the ranks that share these rows
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.to(value.device)


def _zero_loss(outputs: TensorBatch) -> torch.Tensor:
    """0, with a gradient of zeros for every parameter that the outputs depend on."""
    return sum((values.sum() for values in outputs.values()), start=torch.zeros(())) * 0.0
