"""``deepspeed_infer``: a model that computes log-probs, entropies or values, in parts over the ranks under ZeRO-3."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from typing import Any

import torch

from roll.config.roles import WorkerConfig
from roll.config.strategies.deepspeed import ZeroPlan, plan_zero
from roll.config.strategies.registry import DeepSpeedStrategyConfig, typed_strategy_config
from roll.models.build import DTYPES
from roll.models.layouts import TokenLayout
from roll.models.log_probs import run_head_when_called
from roll.strategies.base import ModelHead, StateKind
from roll.strategies.data_parallel import DataParallelStrategy
from roll.strategies.deepspeed.options import engine_options
from roll.strategies.deepspeed.partitions import full_size, gather_partitions, is_partitioned
from roll.strategies.deepspeed.runtime import import_deepspeed, join_process_group

logger = logging.getLogger(__name__)


class DeepSpeedInferStrategy(DataParallelStrategy):
    """Forward passes only. ZeRO-3 shards the parameters; any other stage leaves the whole model on each rank."""

    trains = False

    def __init__(self, role: WorkerConfig, head: ModelHead = ModelHead.CAUSAL_LM, seed: int = 42) -> None:
        super().__init__(role, head, seed)
        config = typed_strategy_config(role.strategy_args)
        assert isinstance(config, DeepSpeedStrategyConfig), config
        self.config = config
        self.compute_dtype = DTYPES[role.model_args.dtype]
        self.environ = {**os.environ, **role.system_envs}
        self.plan = self._plan(self.trains)

    def _plan(self, trains: bool) -> ZeroPlan:
        has_accelerator = self.platform.device_type != "cpu"
        return plan_zero(self.config, self.environ, trains=trains, has_accelerator=has_accelerator)

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Build the model, and under ZeRO-3 partition it.

        Raises:
            ValueError: optimizer steps asked of a forward-only strategy; see also :func:`build_model`.
            ImportError: DeepSpeed is not installed.
        """
        self._refuse_training(num_training_steps, "deepspeed_train")
        self._load_for_forward_passes()

    def _load_for_forward_passes(self) -> None:
        """An engine where parameters are to be partitioned; a plain module on the device otherwise."""
        self._load_model(self.compute_dtype)
        self.model.requires_grad_(False)
        self.model.eval()
        if self.plan.stage == 3:
            self.engine = self._start_engine(None)
        else:
            self.model.to(self.device)

    def _start_engine(self, optimizer: torch.optim.Optimizer | None, **options: Any) -> Any:
        deepspeed = import_deepspeed(self.platform)
        join_process_group(deepspeed, self.platform)
        if self.plan.stage == 3:
            self._use_units(deepspeed)
        config = engine_options(
            self.config,
            self.plan,
            dtype=self.role.model_args.dtype,
            pin_memory=self.platform.pin_memory,
            micro_batch_rows=self.role.training_args.per_device_train_batch_size,
            **options,
        )
        engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        return engine

    def _use_units(self, deepspeed: Any) -> None:
        """Gather a decoder layer's parameters together, and the output matrix when it is used.

        DeepSpeed gathers what a module is about to use when the module is called; one gather for each small module of a
        layer would be a dozen of them.
        """
        language_model = self.model.language_model
        run_head_when_called(language_model)
        trained = [parameter.requires_grad for parameter in language_model.parameters()]
        if "leaf_module" in self.config.zero_optimization or any(trained) != all(trained):
            # Behind frozen modules a layer's input needs no gradient, and DeepSpeed would free it before its backward.
            return
        names = set(getattr(language_model, "_no_split_modules", None) or ())
        layers = {type(module) for module in language_model.modules() if type(module).__name__ in names}
        if layers:
            deepspeed.utils.set_z3_leaf_modules(language_model, list(layers))

    def _compute(self, layout: TokenLayout, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        module = self.engine if hasattr(self, "engine") else self.model
        return module(layout, outputs, temperature)

    def _full_size(self, tensor: torch.Tensor) -> int:
        return full_size(tensor)

    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        partitioned = [tensor for tensor in tensors if is_partitioned(tensor)]
        gathered = iter(gather_partitions(partitioned, self.compute_dtype, self.device) if partitioned else [])
        return [next(gathered) if is_partitioned(tensor) else self._whole(tensor) for tensor in tensors]

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, self._wire_dtype(tensor))

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        """Parameters, this rank's parts of them under ZeRO-3; none where ZeRO keeps them in host memory."""
        if kind is not StateKind.MODEL_PARAMS:
            return []
        parameters: list[Any] = [*self.model.parameters(), *self.model.buffers()]
        parts = [parameter.ds_tensor for parameter in parameters if is_partitioned(parameter)]
        return self._on_device([*parameters, *parts])

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in tensors if tensor.device.type == self.device.type]
