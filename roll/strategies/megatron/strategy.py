"""``megatron_train`` and ``megatron_infer``: a model parallel over tensor, pipeline, context and data ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from roll.config.roles import WorkerConfig
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.models.build import DTYPES, has_tied_embeddings
from roll.models.distributions import COMPARED
from roll.models.experts import encoded, with_shared_routes
from roll.models.invariant import check_processor, is_invariant
from roll.models.layouts import TopTokens
from roll.models.stored import StoredLayout
from roll.protocol.metrics import Metrics
from roll.strategies.base import (
    ALL_WEIGHTS,
    Comparisons,
    LossFunction,
    Output,
    Outputs,
    StateKind,
    TensorBatch,
    WeightSelection,
)
from roll.strategies.megatron import adapters as megatron_adapters
from roll.strategies.megatron import cpu_compat
from roll.strategies.megatron.micro_batches import Chunking, MicroBatch, run
from roll.strategies.megatron.optimizer import MasterStates, build_optimizer
from roll.strategies.megatron.parallel import skeleton, sparse_layers
from roll.strategies.megatron.parts import OwnPart
from roll.strategies.megatron.self_test import check_megatron
from roll.strategies.megatron.weights import FullWeights
from roll.strategies.training.gather import ADAPTER_FOLDER, EXPORT_BUCKET_BYTES
from roll.strategies.training.micro_batches import keys_of, merged_floats, replay_metrics, row_index
from roll.strategies.training.optimizer import TrainingProgress, clip_


class MegatronStrategy(OwnPart):
    """A model-parallel model in the compute dtype; where it trains, float32 gradients, master weights and moments.

    One process holds one such strategy: Megatron keeps its process groups in global variables.
    """

    config: MegatronStrategyConfig

    def _configure(self) -> None:
        self.compute_dtype = DTYPES[self.role.model_args.dtype]

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Divide the model over the ranks and read this rank's part of the weights.

        Raises:
            ValueError: optimizer steps requested of a forward-only strategy; sizes that do not fit the ranks or the
                model; an unsupported model.
            OSError: no such folder, or a folder without a model.
        """
        self._refuse_steps(num_training_steps)
        self._build()
        if not self.trains:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        if num_training_steps:
            args = self.role.training_args
            self.progress = TrainingProgress(args, num_training_steps, self.compute_dtype)
            # float32 gradient buffers, summed over data- and context-parallel ranks
            options = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=self.config.overlap_grad_reduce,
                use_distributed_optimizer=self.config.use_distributed_optimizer,
                bucket_size=self.config.ddp_bucket_size,
            )
            with cpu_compat.construction():
                # As Megatron's own training: buckets of the first chunk only. Communication of later chunks is hidden
                # by the computation of the earlier ones anyway.
                self.ddp_chunks = [
                    DistributedDataParallel(self.transformer_config, options, chunk, disable_bucketing=index > 0)
                    for index, chunk in enumerate(self.gpt_chunks)
                ]
            self.chunks = list(self.ddp_chunks)
            config = self.transformer_config
            # Given a number of tokens Megatron would divide by it; losses are divided already.
            config.finalize_model_grads_func = lambda parts, _, **options: finalize_model_grads(parts, None, **options)
            if self.config.overlap_grad_reduce:
                # As in Megatron's training loop: otherwise the hooks would reduce buckets in every micro-batch.
                functions = [chunk.no_sync for chunk in self.ddp_chunks]
                config.no_sync_func = functions if len(functions) > 1 else functions[0]
            if self.progress.loss_scale is not None:
                config.grad_scale_func = lambda loss: loss * self.progress.scale
            matrices = self._hidden_matrices() if args.optimizer.name == "muon" else {}
            self.optimizer = build_optimizer(
                self.chunks,
                args,
                self.compute_dtype,
                distributed=self.config.use_distributed_optimizer,
                on_host=self.config.optimizer_cpu_offload,
                matrices=matrices,
            )
            self.masters = MasterStates(self.optimizer, self.parameters, matrices)
            if self.compute_dtype is not torch.float32:
                # Again, now into the masters: Megatron made them from parameters already rounded to 16 bits.
                self._read_weights()
        for chunk in self.chunks:
            chunk.train(num_training_steps > 0)

    def _build(self) -> None:
        self._info = self.rank_info
        self._read_skeleton()
        for key, size, rule, example in self.config.shape_problems(
            self.role.name, self.role, self._skeleton.config.to_dict()
        ):
            raise ValueError(f"{key}: {size} {rule}; use e.g. {example}")
        dims = self.dims
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tp,
            pipeline_model_parallel_size=dims.pp,
            virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
            context_parallel_size=dims.cp,
            expert_model_parallel_size=dims.ep,
            expert_tensor_parallel_size=dims.etp,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(self.seed)
        self.platform.synchronize()
        self._read_config()
        if is_invariant(self.role.model_args):
            check_processor(self._skeleton, self.compute_dtype)
        check_megatron(self.role, self.head, self._skeleton.config, self.config, self._of_copy)
        torch.manual_seed(self.seed + self._info.dp_rank)
        self._build_chunks()
        self._full_weights = FullWeights(
            self.parameters, self._info, self._shapes, self.compute_dtype, self._stored, self.adapter_scalings()
        )

    def _of_copy(self, role: WorkerConfig, options: MegatronStrategyConfig) -> MegatronStrategy:
        part = MegatronStrategy(role, self.head, self.seed)
        part.config, part.dims, part._info = options, self.dims, self._info
        part._read_skeleton()
        part._read_config()
        part._build_chunks()
        return part

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        with megatron_adapters.disabled(self.gpt_chunks), torch.no_grad():
            held = [(parameter, parameter.clone()) for parameter, _ in self._originals]
            for parameter, original in self._originals:
                parameter.copy_(original)
            try:
                yield
            finally:
                for parameter, trained in held:
                    parameter.copy_(trained)

    def _chunking(self) -> Chunking:
        return Chunking(
            context_rank=self._info.cp_rank,
            context_size=self._info.cp_size,
            divisor=self.dims.sequence_divisor,
            same_shape=self.dims.vpp > 1,
            count_divisor=self.dims.pp,
            device=self.device,
            shares_prompts=self.role.use_prefix_sharing,
            peers=parallel_state.get_data_parallel_group() if self._experts and self.dims.exchanges_tokens else None,
            peers_share_shapes=self.config.moe_token_dispatcher_type == "allgather",
            routes=self._experts > 0,
            balances=bool(self.transformer_config.moe_aux_loss_coeff),
        )

    def forward(
        self, batch: TensorBatch, outputs: Outputs, temperature: float = 1.0, comparisons: Comparisons = ()
    ) -> TensorBatch:
        """Collective. All ranks of a replica are given the same rows and return the same outputs."""
        assert not outputs or (Output.VALUES in outputs) == self.gives_values, (self.head, outputs)
        names = [str(name) for name in outputs if name is not Output.ROUTES]
        names += [f"{one.name}/{name}" for one in comparisons for name in COMPARED]
        shape = batch["input_ids"].shape
        whole = torch.zeros(len(names), *shape, dtype=torch.float32, device=self.device)
        for router in self._routers:
            router.records = Output.ROUTES in outputs
        results = dict(zip(names, whole.unbind(), strict=True))
        chunking = replace(self._chunking(), comparisons=comparisons)
        parts = self._compute_rows(batch, chunking, names, temperature, results, [whole])
        for router in self._routers:
            router.records = False
        results = dict(zip(names, whole.to(batch["input_ids"].device).unbind(), strict=True))
        if Output.ROUTES in outputs:
            # Each rank of a replica has recorded its own layers for its own tokens; summing puts them together.
            shape, config = batch["input_ids"].shape, self.transformer_config
            layers, top_k = sum(sparse_layers(self._skeleton.config)), config.moe_router_topk
            # Counted from 1, so that ranks' parts can be summed.
            whole = torch.zeros(*shape, layers, top_k, dtype=torch.int32, device=self.device)
            for part in parts:
                if not part.rows or part.arrangement is None:
                    continue
                rows, width = part.columns["input_ids"].shape
                own = whole.new_zeros(rows * width, layers, top_k)
                for layer, (sources, chosen) in part.arrangement.recorded.items():
                    own[sources[sources >= 0], layer] = chosen[sources >= 0].int() + 1
                whole[row_index(part.rows), :width] = own.view(rows, width, layers, top_k)
            dist.all_reduce(whole, group=parallel_state.get_model_parallel_group())
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            column = encoded(whole - 1, self._experts).to(batch["input_ids"].device)
            for part in parts if self.role.use_prefix_sharing else ():
                if part.rows:
                    index, mask = row_index(part.rows), part.columns["response_mask"]
                    column[index] = with_shared_routes(column[index].clone(), keys_of(part.columns), mask)
            results[Output.ROUTES] = column
        return results

    def forward_top_tokens(self, batch: TensorBatch, wanted: TopTokens, temperature: float = 1.0) -> TensorBatch:
        assert not self.gives_values, self.head
        shape, limit = batch["input_ids"].shape, min(wanted.limit, self._skeleton.config.vocab_size)
        count = min(wanted.count or limit, limit)
        results = {
            "top_log_probs": torch.zeros(*shape, count, device=self.device),
            "top_ids": torch.zeros(*shape, count, dtype=torch.int32, device=self.device),
            "tail_log_prob": torch.zeros(*shape, device=self.device),
        }
        chunking, tensors = replace(self._chunking(), top_tokens=wanted), list(results.values())
        self._compute_rows(batch, chunking, [str(Output.LOG_PROBS)], temperature, results, tensors)
        return {name: whole.to(batch["input_ids"].device) for name, whole in results.items()}

    def _compute_rows(
        self,
        batch: TensorBatch,
        chunking: Chunking,
        outputs: list[str],
        temperature: float,
        results: TensorBatch,
        tensors: list[torch.Tensor],
    ) -> list[MicroBatch]:
        """Collective. Fill in ``results``, whose memory (``tensors``) goes from the last stage to the others."""
        modes = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        parts = chunking.micro_batches(batch, self.forward_rule)
        computed = run(self.chunks, parts, outputs, temperature)
        for chunk, mode in zip(self.chunks, modes, strict=True):
            chunk.train(mode)
        # Only the last stage has outputs, hence strict=False: the other lists are empty.
        for part, by_name in zip(parts, computed, strict=False):
            for name, whole in results.items() if part.rows else ():
                values = by_name[name].detach()
                whole[row_index(part.rows), : values.shape[1]] = values.to(whole.dtype)
        if self._info.pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            for tensor in tensors:
                dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return parts

    def named_full_weights(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. Full tensors in the compute dtype; tied weights come once."""
        return self._full_weights.buckets(bucket_bytes, selection)

    def save_hf(self, path: Path) -> None:
        """Collective. Weights are written in the compute dtype; adapters merged, and separately in ``adapter/``."""
        from transformers import GenerationConfig

        weights: dict[str, torch.Tensor] = {}
        for bucket in self.named_full_weights(EXPORT_BUCKET_BYTES):
            weights |= {name: tensor.cpu() for name, tensor in bucket}
        if self._info.rank == 0:
            model, source = skeleton(self.role.model_args, self.head), str(self.role.model_args.model_name_or_path)
            live = StoredLayout(model).joined(weights)
            names = dict(model.named_parameters())
            assert live.keys() == names.keys(), names.keys() ^ live.keys()
            model.load_state_dict(live, assign=True, strict=not has_tied_embeddings(model))
            model.tie_weights()
            if (Path(source) / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(source)
            model.config.dtype = self.compute_dtype
            path.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(path)
        if self.adapters is not None:
            held = [own for own in self.parameters if own.correspondence.sources[0] in self._live_names]
            whole: dict[str, torch.Tensor] = {}
            full = FullWeights(held, self._info, self._shapes, self.compute_dtype, self._stored)
            for bucket in full.buckets(EXPORT_BUCKET_BYTES):
                whole |= {name: tensor.cpu() for name, tensor in bucket}
            if self._info.rank == 0:
                shapes = {name: parameter.shape for name, parameter in self._skeleton.named_parameters()}
                named = self._live_names.items()
                own_tensors = self.adapters.own((name, whole[source].view(shapes[name])) for source, name in named)
                self.adapters.save(
                    path / ADAPTER_FOLDER, dict(own_tensors), str(self.role.model_args.model_name_or_path)
                )
        dist.barrier()

    def backward(
        self,
        batch: TensorBatch,
        loss_fn: LossFunction,
        outputs: Outputs,
        temperature: float = 1.0,
        comparisons: Comparisons = (),
    ) -> Metrics:
        """Collective. All ranks of a replica are given the same rows; the loss function runs on the last stage, whose
        metrics are complete."""
        assert not outputs or (Output.VALUES in outputs) == self.gives_values, (self.head, outputs)
        info = self._info
        if self.adapters is not None and self.role.model_args.lora_dropout:
            # Dropout must agree on tensor-parallel ranks, which all hold the same input, and differ elsewhere. The key
            # has the step's number, so a resumed run draws the same masks.
            key = np.random.SeedSequence((self.seed, self.progress.step, info.dp_rank, info.cp_rank, info.pp_rank))
            model_parallel_cuda_manual_seed(int(key.generate_state(1)[0]))
        self.optimizer.zero_grad()
        for chunk in self.ddp_chunks:  # the float32 gradients, which zero_grad() does not reach
            chunk.zero_grad_buffer()
        chunking = replace(self._chunking(), comparisons=comparisons)
        parts = chunking.micro_batches(batch, self.training_rule)
        for router in self._routers:
            router.counts = None
        names = [str(name) for name in outputs]
        with self._without_optimizer() if self.offloads_optimizer_in_steps else nullcontext():
            metrics: list[Metrics] = run(self.chunks, parts, names, temperature, loss_fn)
        if Output.ROUTES in batch and self._experts:
            counts = [router.counts for router in self._routers if router.counts is not None]
            total = torch.stack([torch.zeros(3, dtype=torch.int64, device=self.device), *counts]).sum(0)
            # Without sequence parallelism tensor-parallel ranks count the same tokens: all numbers grow alike.
            groups = [parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()]
            replayed = replay_metrics(total, groups)
            metrics += [replayed] if metrics else []
        return merged_floats(metrics)

    def optimizer_step(self) -> Metrics:
        self.optimizer.prepare_grads()
        scale = self.progress.scale
        norm = float(self.optimizer.get_grad_norm()) / scale
        if math.isfinite(norm):
            mains = [main for one in self.optimizer.chained_optimizers for main in one.get_parameters()]
            clip_([main.grad for main in mains if main.grad is not None], scale, norm, self.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.progress.learning_rate
            self.optimizer.step_with_ready_grads()
        return self.progress.finish_step(norm, self._info.dp_size)

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.to(self.device, copy=True)
        # The group without context-parallel ranks: those are given the same rows, which would count twice.
        if self._info.dp_size > 1:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.to(value.device)

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        if kind is StateKind.OTHER_PARAMS and self.masters is not None:
            return [buffer.grad_data for chunk in self.ddp_chunks for buffer in chunk.buffers]
        if kind is StateKind.OPTIMIZER_STATES and self.masters is not None:
            return list(self.masters.tensors())
        return [own.parameter.data for own in self.parameters] if kind is StateKind.MODEL_PARAMS else []
