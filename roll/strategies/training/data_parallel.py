"""Data-parallel strategies (FSDP, DeepSpeed, plain models): a rank's rows in micro-batches, computed and reduced.

A backend says how a module is sharded, differentiated and updated; everything here is the same under each of them, so
that they give the same numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from roll.checkpoint.contents import ModelContents
from roll.config.lora import uses_lora
from roll.config.plan.micro_batching import MicroBatching, micro_batching
from roll.models.attention import check_context_size, sum_of_parts, use_layout_attention
from roll.models.build import build_model, has_tied_embeddings
from roll.models.experts import RoutingRecorder, SparseLayer, run_every_expert, sparse_layers
from roll.models.layouts import TokenLayout, TopTokens, padded, with_token_rows
from roll.models.log_probs import ResponseModel
from roll.models.lora import Adapters, MergedWeight, add_adapters, base_name, merged_rows
from roll.models.routes import encoded, missing_mark, route_dtype, routes_of, with_prompts_of_leaders
from roll.models.stored import StoredLayout
from roll.models.vision import FEATURES, ImagePool, with_images
from roll.protocol.columns import flat_view
from roll.protocol.metrics import Metrics
from roll.strategies.base import (
    ALL_WEIGHTS,
    Comparison,
    LossFunction,
    ModelStrategy,
    Output,
    RankInfo,
    TensorBatch,
    WeightSelection,
)
from roll.strategies.training.checkpoint import describe_model
from roll.strategies.training.experts import ExpertBalance, balance_coefficient
from roll.strategies.training.gather import ADAPTER_FOLDER, EXPORT_BUCKET_BYTES, in_buckets, runs_of
from roll.strategies.training.micro_batches import (
    Rows,
    is_empty,
    lay_out,
    layout_metrics,
    merged_floats,
    micro_batch,
    plan_micro_batches,
    replay_metrics,
    row_index,
    targets_of,
)
from roll.strategies.training.optimizer import TrainingProgress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DataParallelStrategy(ModelStrategy):
    """Every rank computes its own rows with the whole model, of which it may hold a shard only."""

    model: ResponseModel
    adapters: Adapters | None = None
    progress: TrainingProgress
    sparse_layers: Sequence[SparseLayer] = ()
    """Layers with experts; none of a dense model."""
    balance: ExpertBalance | None = None
    mixes_types = True
    """A layer may hold parameters of two types: a frozen base and what is trained."""
    _comparisons: Sequence[Comparison] = ()
    """Teachers of the step that is being taken."""
    context_size = 1
    """Consecutive ranks that share each sequence, and so are given the same rows."""

    @abstractmethod
    def _compute(self, layout: TokenLayout, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        """Collective. The response model's forward pass."""

    @abstractmethod
    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. The tensors whole, on the device, in :meth:`_wire_dtype` (other ranks may return empty ones)."""

    def _gather_span(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Collective. ``tensor.flatten()[begin:end]`` on the device of rank 0, in :meth:`_wire_dtype`, without the rest
        of it (other ranks may return an empty one)."""
        return flat_view(tensor)[begin:end].to(self.device, self._wire_dtype(tensor))

    def _reshard(self) -> None:
        """Give gathered parameters back, where the backend keeps some after a forward pass."""

    def _full_size(self, tensor: torch.Tensor) -> int:
        """The number of elements of a tensor of which this rank may hold a shard."""
        return tensor.numel()

    def _begin_micro_batch(self, last: bool) -> None:
        """Called before each micro-batch of a training step; ``last``: the optimizer step follows it."""

    def _differentiate(self, loss: torch.Tensor) -> None:
        """Collective. Add the gradient of ``loss`` to what the step has so far."""
        loss.backward()

    def _clip_and_step(self, learning_rate: float) -> float:
        """Collective. Clip, step unless the gradient is not finite, and clear it; its norm, unscaled, before that."""
        raise self._takes_no_steps()

    def _load_model(self, storage_dtype: torch.dtype) -> None:
        """The response model on the host, not yet sharded; seeds this rank's random numbers."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(self.seed + self.rank)
        language_model = self._build_language_model(storage_dtype)
        layout_keys = ("use_prefix_sharing", "use_sequence_packing", "use_remove_padding")
        needed_by = [key for key in layout_keys if getattr(self.role, key)]
        if self.context_size > 1:
            check_context_size(language_model, self.context_size)
            use_layout_attention(language_model, "model_args.ulysses_size", neutral="1")
        elif needed_by:
            use_layout_attention(language_model, needed_by[0])
        self._prepare_experts(language_model)
        self._shapes = {name: list(parameter.shape) for name, parameter in language_model.named_parameters()}
        live = {base_name(name): tensor.shape for name, tensor in language_model.state_dict().items()}
        self._stored = StoredLayout(language_model, live)
        self._on_the_way = self._stored.on_the_way()
        self._trained_names = {name for name, parameter in language_model.named_parameters() if parameter.requires_grad}
        self.model = ResponseModel(language_model, self._context_group())
        if self.sparse_layers:
            self.model.routing = RoutingRecorder(self.sparse_layers)

    def _prepare_experts(self, language_model: PreTrainedModel) -> None:
        """Refuse, or change in place, sparse layers that this backend would compute wrong (or slowly)."""
        if any(not layer.is_fused for layer in self.sparse_layers):
            run_every_expert(self.sparse_layers)

    def _watch_balance(self) -> None:
        """Of a role that trains: add the balance loss and the gauges of the experts' load."""
        if self.sparse_layers:
            args = self.role.model_args
            coefficient = balance_coefficient(args, self.model.language_model.config)
            self.balance = ExpertBalance(
                self.model, self.sparse_layers, coefficient, args.moe_aux_loss_scope, self.device
            )

    def _context_group(self) -> ProcessGroup | None:
        """Collective. The ranks that share this rank's rows; None where it has its own."""
        if self.context_size == 1:
            return None
        if self.world_size % self.context_size:
            raise ValueError(
                f"{self.role.name}.model_args.ulysses_size: {self.context_size} does not divide the role's "
                f"{self.world_size} ranks; 1 would do"
            )
        group, _ = dist.new_subgroups(self.context_size)
        return group

    def _build_language_model(self, storage_dtype: torch.dtype) -> PreTrainedModel:
        """With adapters where the role has them. Their base is frozen: float32 copies of weights that never change
        would only be rounded to the compute dtype in every pass, so it is held in that."""
        args = self.role.model_args
        if not uses_lora(args):
            language_model = build_model(args, self.head.value, storage_dtype, self.seed)
            self.sparse_layers = sparse_layers(language_model)
            return language_model
        base_dtype = self.compute_dtype if self.mixes_types else storage_dtype
        language_model = build_model(args, self.head.value, base_dtype, self.seed)
        self.sparse_layers = sparse_layers(language_model)  # before adapters wrap some of it
        self.adapters = add_adapters(language_model, args, self.seed, storage_dtype)
        return language_model

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        with self.adapters.disabled() if self.adapters else nullcontext():
            yield

    @property
    def rank_info(self) -> RankInfo:
        rank, world_size, shared = dist.get_rank(), dist.get_world_size(), self.context_size
        return RankInfo(
            rank=rank,
            world_size=world_size,
            dp_rank=rank // shared,
            dp_size=world_size // shared,
            cp_rank=rank % shared,
            cp_size=shared,
        )

    @torch.no_grad()
    def forward(
        self,
        batch: TensorBatch,
        outputs: Collection[Output],
        temperature: float = 1.0,
        teachers: Sequence[Comparison] = (),
    ) -> TensorBatch:
        self._check_outputs(outputs)
        self._comparisons = teachers
        batch, images = with_images(batch, self.model.language_model.config)
        was_training = self.model.training
        self.model.eval()
        shape = batch["input_ids"].shape
        device = batch["input_ids"].device
        names = [str(name) for name in outputs if name is not Output.ROUTES]
        results = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in names}
        self.model.records_routes = Output.ROUTES in outputs
        if self.model.records_routes:
            results[Output.ROUTES] = self._no_routes(shape, device)
        rule = micro_batching(self.role, trains=False)
        for rows in self._rows_of_passes(batch, rule):
            part = micro_batch(batch, rows)
            shape_of_part = part["input_ids"].shape
            layout = self._layout(part, rule, images)
            computed = self._outputs(layout, names, temperature, shape_of_part)
            if self.model.records_routes:
                computed[Output.ROUTES] = self._chosen(layout, part)
            if rows:
                for name, values in computed.items():
                    whole = results.setdefault(name, torch.zeros(shape, dtype=torch.float32, device=device))
                    whole[row_index(rows), : shape_of_part[1]] = values.to(device)
        self.model.records_routes = False
        self._comparisons = ()
        self._reshard()
        self.model.train(was_training)
        return results

    @torch.no_grad()
    def forward_top_tokens(self, batch: TensorBatch, wanted: TopTokens, temperature: float = 1.0) -> TensorBatch:
        self._check_outputs([Output.LOG_PROBS])
        batch, images = with_images(batch, self.model.language_model.config)
        was_training = self.model.training
        self.model.eval()
        rule, results = micro_batching(self.role, trains=False), TensorBatch()
        for rows in self._rows_of_passes(batch, rule):
            part = micro_batch(batch, rows)
            shape = part["input_ids"].shape
            layout = replace(self._layout(part, rule, images), top_tokens=wanted)
            for name, values in self._outputs(layout, [Output.LOG_PROBS], temperature, shape).items():
                size = (*batch["input_ids"].shape, *values.shape[2:])
                whole = results.setdefault(name, torch.zeros(size, dtype=values.dtype))
                if rows:
                    whole[row_index(rows), : shape[1]] = values.cpu()
        self._reshard()
        self.model.train(was_training)
        return results

    def _no_routes(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        layer = self.sparse_layers[0]
        dtype = route_dtype(layer.num_experts)
        size = (*shape, len(self.sparse_layers), layer.top_k)
        return torch.full(size, missing_mark(dtype), dtype=dtype, device=device)

    def _chosen(self, layout: TokenLayout, part: TensorBatch) -> torch.Tensor:
        """Collective over ranks that share sequences. The choices of the last pass by the tokens of ``part``."""
        group, chosen = self.model.context_group, self.model.chosen_experts
        assert chosen is not None
        sources = (layout if group is None else layout.chunk(group.rank(), group.size())).sources.flatten()
        sources, shape = sources.to(chosen.device), part["input_ids"].shape
        # Counted from 1, so that ranks' parts can be summed.
        flat = chosen.new_zeros(shape.numel(), *chosen.shape[1:])
        flat[sources[sources >= 0]] = chosen[sources >= 0] + 1
        if group is not None:
            dist.all_reduce(flat, group=group)
        column = encoded(flat - 1, self.sparse_layers[0].num_experts).view(*shape, *chosen.shape[1:])
        if self.role.use_prefix_sharing:
            column = with_prompts_of_leaders(column.cpu(), part["input_ids"].cpu(), part["response_mask"].cpu())
        return column

    def named_full_weights(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. Full tensors in the compute dtype (float32 master weights stay here); tied weights come once.

        What is gathered at a time is a bucket, or one tensor as engines name it where that is larger: the experts of a
        layer, which are one tensor here, come in stretches of as many matrices as fit.
        """
        for bucket in in_buckets(self._selected_weights(selection), bucket_bytes, self._num_bytes):
            (first, *others) = bucket
            if not others and self._num_bytes(first) > bucket_bytes and self._comes_in_stretches(first):
                yield from self._stretches(first, bucket_bytes)
                continue
            weights = self._whole_weights(bucket)
            parts = [part for name, tensor in weights for part in self._on_the_way.split(name, tensor)]
            whole = [(name, part.contiguous()) for name, part in parts]
            yield from [whole] if len(whole) <= len(bucket) else runs_of(whole, bucket_bytes)

    def _comes_in_stretches(self, weight: MergedWeight) -> bool:
        """Several stored tensors, none of which needs more than a stretch of the live one."""
        return len(self._on_the_way.parts(weight.name)) > 1

    def _stretches(self, weight: MergedWeight, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. The stored tensors of a weight that is larger than a bucket, in runs that are not, one gather
        each; adapters, which are small, come whole."""
        tensor, *adapter = weight.parts
        itemsize = self._wire_dtype(tensor).itemsize
        down_up = self._gather(adapter)
        for stretch in self._on_the_way.stretches(weight.name, bucket_bytes // itemsize):
            flat = self._gather_span(tensor, stretch.begin, stretch.end)
            found = list(stretch.of(flat)) if self.rank == 0 else []
            if found and down_up:
                (down, up), shape = down_up, self._on_the_way.live_shape(weight.name)
                firsts = [begin // shape[-1] for _, begin, _ in stretch.parts]
                found = [
                    (name, merged_rows(part, first, shape, down, up, weight.scaling))
                    for (name, part), first in zip(found, firsts, strict=True)
                ]
            yield found

    def _live_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. All weights whole, as the model computes with them."""
        for bucket in in_buckets(self._selected_weights(ALL_WEIGHTS), bucket_bytes, self._num_bytes):
            yield self._whole_weights(bucket)

    def _whole_weights(self, bucket: list[MergedWeight]) -> list[tuple[str, torch.Tensor]]:
        """Collective. Nothing on other ranks than 0."""
        whole = iter(self._gather([part for weight in bucket for part in weight.parts]))
        parts = [[next(whole) for _ in weight.parts] for weight in bucket]
        is_sender = self.rank == 0
        return [(w.name, w.merge(p)) for w, p in zip(bucket, parts, strict=True)] if is_sender else []

    def adapter_scalings(self) -> dict[str, float]:
        return {} if self.adapters is None else self.adapters.scalings

    def _selected_weights(self, selection: WeightSelection) -> Iterator[MergedWeight]:
        for weight in self._merged_weights():
            for part in weight.separate() if selection.adapters_apart else [weight]:
                if part.is_trained or not selection.trained_only:
                    yield part

    def _merged_weights(self) -> Iterator[MergedWeight]:
        if self.adapters is None:
            return (MergedWeight(name, (tensor,)) for name, tensor in self._named_tensors())
        return self.adapters.merged(self._named_tensors())

    def _num_bytes(self, weight: MergedWeight) -> int:
        return sum(self._full_size(part) * self._wire_dtype(part).itemsize for part in weight.parts)

    def save_hf(self, path: Path) -> None:
        """Collective. Weights are written in the compute dtype; adapters merged, and by themselves in ``adapter/``."""
        weights: dict[str, torch.Tensor] = {}
        for bucket in self._live_weights(EXPORT_BUCKET_BYTES):
            weights |= {name: tensor.cpu() for name, tensor in bucket}
        if self.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            self._write_hf(path, weights)
        if self.adapters is not None:
            names, tensors = zip(*self.adapters.own(self._named_tensors()), strict=True)
            whole = [tensor.cpu() for tensor in self._gather(list(tensors))]
            if self.rank == 0:
                base = str(self.role.model_args.model_name_or_path)
                self.adapters.save(path / ADAPTER_FOLDER, dict(zip(names, whole, strict=True)), base)
        dist.barrier()

    def _write_hf(self, path: Path, weights: dict[str, torch.Tensor]) -> None:
        language_model: Any = self.model.language_model
        if has_tied_embeddings(language_model):
            names = {id(parameter): name for name, parameter in language_model.named_parameters()}
            embeddings = names[id(language_model.get_input_embeddings().weight)]
            for name, parameter in language_model.named_parameters(remove_duplicate=False):
                if names[id(parameter)] == embeddings:
                    weights[name] = weights[embeddings]
        if self._stored.transposes:
            # transformers would look at the shapes of what this rank holds, and those may be shards.
            split = (part for name, tensor in weights.items() for part in self._stored.split(name, tensor))
            weights = {name: tensor.contiguous() for name, tensor in split}
            language_model._weight_conversions = []
        language_model.save_pretrained(path, state_dict=weights)
        # The model wrote the type of the weights it holds (float32 master weights), not of those it was given.
        language_model.config.dtype = self.compute_dtype
        language_model.config.save_pretrained(path)

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, tied ones once, then persistent buffers, under their Hugging Face names."""
        self._reshard()
        language_model = self.model.language_model
        yield from language_model.named_parameters()
        persistent = language_model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in language_model.named_buffers() if name in persistent)

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Buffers keep theirs: what balances experts by a bias does so in float32."""
        is_weight = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
        return self.compute_dtype if is_weight else tensor.dtype

    def _rows_of_passes(self, batch: TensorBatch, rule: MicroBatching) -> list[Rows]:
        """Collective. The rows of each micro-batch; as many micro-batches on every rank."""
        return plan_micro_batches(batch, rule, self._max_over_ranks, self.role.use_prefix_sharing)

    def _outputs(
        self, layout: TokenLayout, outputs: Collection[str], temperature: float, shape: torch.Size
    ) -> TensorBatch:
        """Collective. Each output as (B, L), on the device, whole on each rank that shares its sequences."""
        group = self.model.context_group
        if group is not None:
            layout = layout.chunk(group.rank(), group.size())
        layout = layout.to(self.device)
        computed = self._compute(layout, outputs, temperature)
        aligned = {name: layout.scatter(values, shape) for name, values in computed.items()}
        if group is None or not aligned:
            return aligned
        if layout.top_tokens is not None:
            for values in aligned.values():
                dist.all_reduce(values, group=group)
            return aligned
        summed = sum_of_parts(torch.stack(list(aligned.values())), group)
        return dict(zip(aligned, summed.unbind(), strict=True))

    def _layout(self, part: TensorBatch, rule: MicroBatching, images: ImagePool | None) -> TokenLayout:
        """With as many columns for each of the ranks that share them."""
        layout = lay_out(part, rule, self.role.use_prefix_sharing)
        if images is not None and FEATURES in part:
            layout = images.attach(layout, part)
        sequences, length = layout.input_ids.shape
        layout = padded(layout, sequences, length + -length % self.context_size)
        if self._comparisons:
            layout = replace(layout, teachers=targets_of(layout, part, self._comparisons))
        if Output.ROUTES not in part:
            return layout
        recorded, own = part[Output.ROUTES].shape[2], len(self.sparse_layers)
        if recorded != own:
            raise ValueError(
                f"{self.role.name}.router_replay: the engine has recorded {recorded} layers, and the model has {own} "
                "with experts; set router_replay.mode: R2 or disabled"
            )
        return replace(layout, routes=routes_of(layout, part[Output.ROUTES]))

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

    def train_step(
        self,
        batch: TensorBatch,
        loss_fn: LossFunction,
        outputs: Collection[Output],
        temperature: float = 1.0,
        teachers: Sequence[Comparison] = (),
    ) -> Metrics:
        self._check_outputs(outputs)
        self._comparisons = teachers
        batch, images = with_images(batch, self.model.language_model.config)
        rule = micro_batching(self.role, trains=True)
        plan = self._rows_of_passes(batch, rule)
        metrics: list[Metrics] = []
        with self._without_optimizer():
            if self.balance is not None:
                self._begin_balance(self.balance, batch, plan, rule, images)
            for index, rows in enumerate(plan):
                self._begin_micro_batch(last=index == len(plan) - 1)
                metrics += self._backward(micro_batch(batch, rows), rule, images, loss_fn, outputs, temperature)
        self._comparisons = ()
        if self.balance is not None:
            metrics.append(self.balance.metrics())
        norm = self._clip_and_step(self.progress.learning_rate)
        metrics.append(self.progress.finish_step(norm, self.rank_info.dp_size))
        return merged_floats(metrics)

    def _begin_balance(
        self,
        balance: ExpertBalance,
        batch: TensorBatch,
        plan: list[Rows],
        rule: MicroBatching,
        images: ImagePool | None,
    ) -> None:
        """Collective. Before a step's first micro-batch; where the balance loss needs the choices of all of them, a
        forward pass counts those."""
        balance.begin(sum(not is_empty(micro_batch(batch, rows)) for rows in plan))
        if not balance.looks_ahead(len(plan)):
            return
        self.model.eval()
        with torch.no_grad():
            for index, rows in enumerate(plan):
                part = micro_batch(batch, rows)
                layout = with_token_rows(self._layout(part, rule, images))
                self._outputs(layout, (), 1.0, part["input_ids"].shape)
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
    ) -> list[Metrics]:
        """Forward and backward of one micro-batch. One with nothing to predict still takes part in all collectives."""
        layout = self._layout(part, rule, images)
        if self.model.routing is not None:
            self.model.routing.replay_counts = None
        if self.balance is not None:
            layout = with_token_rows(layout)
        aligned = self._outputs(layout, [str(name) for name in outputs], temperature, part["input_ids"].shape)
        balance_loss = None if self.balance is None else self.balance.share()
        if is_empty(part):
            self._differentiate(_zero_loss(aligned))
            return []
        columns = {name: column.to(self.device, non_blocking=True) for name, column in part.items()}
        loss, metrics = loss_fn(aligned, columns)
        loss = loss if loss.requires_grad else _zero_loss(aligned)
        self._differentiate(loss if balance_loss is None else loss + balance_loss)
        return [metrics, layout_metrics(layout), self._replay_metrics()]

    def _replay_metrics(self) -> Metrics:
        """Number of tokens of the last micro-batch that took recorded routes; empty without any."""
        routing = self.model.routing
        if routing is None or routing.replay_counts is None:
            return {}
        counts, routing.replay_counts = routing.replay_counts, None
        return replay_metrics(counts)

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.to(self.device, copy=True)
        if self.rank % self.context_size:
            total.zero_()  # counted by the first of the ranks that share these rows
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.to(value.device)


def _zero_loss(outputs: TensorBatch) -> torch.Tensor:
    """0, with a gradient of zeros to every parameter."""
    return sum((values.sum() for values in outputs.values()), start=torch.zeros(())) * 0.0
