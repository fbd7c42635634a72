"""``deepspeed_train``: a DeepSpeed engine that learns."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from roll.config.roles import WorkerConfig
from roll.config.strategies.deepspeed import switch
from roll.models.build import enable_gradient_checkpointing
from roll.protocol.metrics import Mean, Metrics, Sum
from roll.strategies.base import ModelHead, StateKind
from roll.strategies.data_parallel import DataParallelTrainStrategy
from roll.strategies.deepspeed import checkpoint
from roll.strategies.deepspeed.partitions import set_master_weights
from roll.strategies.deepspeed.strategy import DeepSpeedInferStrategy
from roll.strategies.loss_scale import DynamicLossScale
from roll.strategies.optimizer import build_adamw, state_tensors
from roll.strategies.schedule import LearningRateSchedule

logger = logging.getLogger(__name__)


class DeepSpeedTrainStrategy(DataParallelTrainStrategy, DeepSpeedInferStrategy):
    """Float32 master weights and AdamW moments; forward and backward in the compute dtype."""

    trains = True

    def __init__(
        self,
        role: WorkerConfig,
        head: ModelHead = ModelHead.CAUSAL_LM,
        seed: int = 42,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(role, head, seed, max_grad_norm)
        self.loss_scale = DynamicLossScale() if self.compute_dtype is torch.float16 else None
        self.steps_each_micro_batch = switch(self.config, "step_each_micro_batch", self.environ)

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. With ``num_training_steps`` 0 the model can be computed and exported, but not trained.

        Raises:
            ImportError: DeepSpeed is not installed.
        """
        self.step = 0
        if not num_training_steps:
            self.plan = self._plan(trains=False)
            self._load_for_forward_passes()
            return
        self._load_model(torch.float32)
        enable_gradient_checkpointing(self.model.language_model, self.role.model_args)
        self.schedule = LearningRateSchedule.from_arguments(self.role.training_args, num_training_steps)
        parameters = {name: p.data for name, p in self.model.named_parameters() if p.requires_grad}
        self.engine = self._start_engine(
            build_adamw(self.model, self.role.training_args),
            fp32_accumulation=switch(self.config, "fp32_grad_accumulation", self.environ),
            max_grad_norm=self.max_grad_norm,
        )
        if self.compute_dtype is not torch.float32:
            self._restore_master_weights(parameters)
        self.model.train()

    def _restore_master_weights(self, loaded: dict[str, torch.Tensor]) -> None:
        """DeepSpeed made its float32 weights from those it had just rounded; put the loaded ones in."""
        if self.plan.stage == 0:
            optimizer = self.engine.optimizer
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            for rounded, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, master in zip(rounded, masters, strict=True):
                    master.data.copy_(loaded[names[id(parameter)]])
            # It also made a step of zeros to create the moments; AdamW would count it.
            self.engine.basic_optimizer.state.clear()
            return
        for name, parameter in self.model.named_parameters():
            if name in loaded:
                set_master_weights(parameter, loaded[name].to(self.device))

    def _begin_micro_batch(self, last: bool) -> None:
        self._is_last = last
        self.engine.set_gradient_accumulation_boundary(last)

    def _differentiate(self, loss: torch.Tensor) -> None:
        """DeepSpeed takes the mean over ranks; the loss is this rank's share of a sum."""
        share = loss * self.world_size
        if self.loss_scale is not None and self.plan.stage == 0:
            share = share * self.loss_scale.value  # the higher stages' optimizers multiply by it themselves
        self.engine.backward(share, scale_wrt_gas=False)
        if self.steps_each_micro_batch and not self._is_last:
            self.engine.step()

    def _update(self) -> Metrics:
        """Clip, step and clear. A gradient that is not finite is dropped: the step counts, the weights stay."""
        learning_rate = self.schedule(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._step_plain() if self._is_plain() else self._step_zero()
        metrics: Metrics = {"grad_norm": Mean(norm), "lr": Mean(learning_rate)}
        finite = math.isfinite(norm)
        if not finite:
            logger.warning("optimizer step %d: gradient norm is %s; the update is skipped", self.step, norm)
            metrics["skipped_updates"] = Sum(1.0 / self.world_size)
        if self.loss_scale is not None:
            metrics["loss_scale"] = Mean(self.loss_scale.value)
            self.loss_scale.adapt(finite)
            self.engine.optimizer.loss_scale = self.loss_scale.value
        self.step += 1
        return metrics

    def _is_plain(self) -> bool:
        """ZeRO-0 in float32: DeepSpeed sums the gradients, and torch's optimizer does the rest."""
        return self.engine.optimizer is self.engine.basic_optimizer

    def _step_plain(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm

    def _step_zero(self) -> float:
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        # ZeRO-0 tells the norm of the scaled gradient.
        return norm / self.loss_scale.value if self.loss_scale is not None and self.plan.stage == 0 else norm

    def save(self, path: Path) -> None:
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        checkpoint.save(path, self.engine, self.contents, {"step": self.step, **scale})

    def load(self, path: Path) -> None:
        state = checkpoint.load(path, self.engine, self.contents)
        self.step = int(state["step"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.restore(state["loss_scale"])
            self.engine.optimizer.loss_scale = self.loss_scale.value

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        optimizer = self.engine.basic_optimizer if hasattr(self, "engine") else None
        if kind is not StateKind.OPTIMIZER_STATES or optimizer is None:
            return super()._device_tensors(kind)
        masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Under ZeRO-3 the groups are filled during a step only.
        masters += getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", [])
        return self._on_device([*masters, *state_tensors(optimizer)])
