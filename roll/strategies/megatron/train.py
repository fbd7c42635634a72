"""``megatron_train``: the cut model that learns."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import nn

from roll.checkpoint.contents import ModelContents, trained_under
from roll.config.plan.micro_batching import micro_batching
from roll.models.tensor_files import fingerprint
from roll.protocol.metrics import Mean, Metrics, Sum
from roll.strategies.base import LossFunction, Output, StateKind, TensorBatch, TrainStrategy
from roll.strategies.gradients import clip_factor, scale_
from roll.strategies.loss_scale import DynamicLossScale
from roll.strategies.megatron import checkpoint, cpu_compat
from roll.strategies.megatron.optimizer import MasterStates, build_optimizer
from roll.strategies.megatron.schedule import run_training
from roll.strategies.megatron.strategy import MegatronInferStrategy
from roll.strategies.megatron.weights import OwnParameter
from roll.strategies.micro_batches import merged_floats
from roll.strategies.schedule import LearningRateSchedule

logger = logging.getLogger(__name__)


class MegatronTrainStrategy(TrainStrategy, MegatronInferStrategy):
    """Float32 master weights and AdamW moments; forward and backward in the compute dtype, gradients in float32."""

    masters: MasterStates | None = None
    loss_scale: DynamicLossScale | None = None

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. With ``num_training_steps`` 0 the model can be computed and saved, but not trained."""
        self._build()
        self.step = 0
        if not num_training_steps:
            for chunk in self.chunks:
                chunk.eval()
            return
        args = self.role.training_args
        self.schedule = LearningRateSchedule.from_arguments(args, num_training_steps)
        self.ddp_chunks = [self._with_gradients(chunk, index) for index, chunk in enumerate(self.gpt_chunks)]
        self.chunks: list[nn.Module] = list(self.ddp_chunks)
        self._set_reductions()
        if self.compute_dtype is torch.float16:
            self.loss_scale = scale = DynamicLossScale()
            self.transformer_config.grad_scale_func = lambda loss: loss * scale.value
        distributed = self.config.use_distributed_optimizer
        self.optimizer = build_optimizer(self.chunks, args, self.compute_dtype, distributed)
        self.masters = MasterStates(self.optimizer)
        if self.compute_dtype is not torch.float32:
            self._read_weights()  # master weights as the files have them, not rounded
        for chunk in self.chunks:
            chunk.train()

    def _with_gradients(self, chunk: nn.Module, index: int) -> DistributedDataParallel:
        """Wrap a chunk with float32 gradient buffers that are summed over data- and context-parallel ranks."""
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.config.overlap_grad_reduce,
            use_distributed_optimizer=self.config.use_distributed_optimizer,
            bucket_size=self.config.ddp_bucket_size,
        )
        with cpu_compat.construction():
            return DistributedDataParallel(self.transformer_config, options, chunk, disable_bucketing=index > 0)

    def _set_reductions(self) -> None:
        config = self.transformer_config
        config.finalize_model_grads_func = _sum_gradients
        if self.config.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.ddp_chunks]
            config.no_sync_func = functions if len(functions) > 1 else functions[0]

    def _set_weight(self, own: OwnParameter, weight: torch.Tensor) -> None:
        if self.masters is None:
            super()._set_weight(own, weight)
        else:
            self.masters.set_weight(own.parameter, weight.to(self.device))

    def train_step(
        self,
        batch: TensorBatch,
        loss_fn: LossFunction,
        outputs: Collection[Output],
        temperature: float = 1.0,
    ) -> Metrics:
        """Collective. All ranks of a replica are given the same rows; the loss function runs on the last stage, whose
        metrics are complete (other stages return ``grad_norm`` and ``lr``)."""
        self._check_outputs(outputs)
        self.optimizer.zero_grad()
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        parts = self._chunking().micro_batches(batch, micro_batching(self.role, trains=True))
        metrics = run_training(self.chunks, parts, [str(name) for name in outputs], temperature, loss_fn)
        metrics.append(self._update())
        return merged_floats(metrics)

    def _update(self) -> Metrics:
        """Clip and step. A gradient that is not finite is dropped: the step counts, the weights stay."""
        self.optimizer.prepare_grads()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        norm = float(self.optimizer.get_grad_norm()) / scale
        learning_rate = self.schedule(self.step)
        metrics: Metrics = {"grad_norm": Mean(norm), "lr": Mean(learning_rate)}
        finite = math.isfinite(norm)
        if finite:
            gradients = [main.grad for main in self.optimizer.get_parameters() if main.grad is not None]
            scale_(gradients, clip_factor(norm, self.max_grad_norm) / scale)
            for group in self.optimizer.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step_with_ready_grads()
        else:
            logger.warning("optimizer step %d: gradient norm is %s; the update is skipped", self.step, norm)
            metrics["skipped_updates"] = Sum(1.0 / self._info.dp_size)
        if self.loss_scale is not None:
            metrics["loss_scale"] = Mean(scale)
            self.loss_scale.adapt(finite)
        self.step += 1
        return metrics

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.to(self.device, copy=True)
        if self._info.dp_size > 1:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.to(value.device)

    def save(self, path: Path) -> None:
        assert self.masters is not None
        state: dict[str, Any] = {"step": self.step}
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state()
        checkpoint.save(path, self.parameters, self.masters, self._info, self.contents, state)

    def load(self, path: Path) -> None:
        assert self.masters is not None
        state = checkpoint.load(path, self.parameters, self.masters, self._info, self.contents)
        self.step = int(state["step"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.restore(state["loss_scale"])

    @cached_property
    def contents(self) -> ModelContents:
        """What a checkpoint says of the model."""
        args = self.role.model_args
        named = dict(self._skeleton.named_parameters())
        shapes = {name: list(parameter.shape) for name, parameter in named.items()}
        if self.adapters is None:
            trained = trained_under(shapes, args.freeze_module_prefix)
        else:
            trained = {name for name, parameter in named.items() if parameter.requires_grad}
        frozen = [name for name in shapes if name not in trained]
        return ModelContents(
            strategy=self.role.strategy_args.strategy_name,
            trained={name: shape for name, shape in shapes.items() if name in trained},
            frozen=frozen,
            scalings=self.adapter_scalings(),
            base=fingerprint(args.model_name_or_path) if frozen else None,
        )

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        if kind is StateKind.OTHER_PARAMS and self.masters is not None:
            return [buffer.grad_data for chunk in self.ddp_chunks for buffer in chunk.buffers]
        if kind is StateKind.OPTIMIZER_STATES and self.masters is not None:
            return list(self.masters.tensors())
        return super()._device_tensors(kind)


def _sum_gradients(chunks: list[nn.Module], num_tokens: torch.Tensor | None, **options: object) -> None:
    """Megatron would divide by a number of tokens here; losses are divided already."""
    finalize_model_grads(chunks, None, **options)
