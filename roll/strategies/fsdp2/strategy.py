"""``fsdp2_infer``: a model sharded by PyTorch's ``fully_shard`` that computes log-probs, entropies or values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from roll.config.roles import WorkerConfig
from roll.config.strategy import Fsdp2StrategyConfig, typed_strategy_config
from roll.models.layouts import TokenLayout
from roll.models.unread import UnreadModel, build_unread
from roll.strategies.base import ModelHead, StateKind
from roll.strategies.data_parallel import DataParallelStrategy
from roll.strategies.fsdp2.gradients import local_tensor
from roll.strategies.fsdp2.mesh import build_mesh
from roll.strategies.fsdp2.sharding import compute_dtype, shard_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Fsdp2InferStrategy(DataParallelStrategy):
    """Forward passes only: parameters are held sharded in the compute dtype and never change."""

    _unread: UnreadModel | None

    def __init__(self, role: WorkerConfig, head: ModelHead = ModelHead.CAUSAL_LM, seed: int = 42) -> None:
        super().__init__(role, head, seed)
        config = typed_strategy_config(role.strategy_args)
        assert isinstance(config, Fsdp2StrategyConfig), config
        self.config = config
        self.compute_dtype = compute_dtype(role.model_args, config)

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Build and shard the model.

        Raises:
            ValueError: optimizer steps asked of a forward-only strategy; see also :func:`build_model`, ``build_mesh``.
        """
        self._refuse_training(num_training_steps, "fsdp2_train")
        self._build(storage_dtype=self.compute_dtype)
        self.model.requires_grad_(False)
        self.model.eval()

    def _build(self, storage_dtype: torch.dtype) -> None:
        self._load_model(storage_dtype)
        self.mesh = build_mesh(self.device.type, self.world_size, self.config.fsdp_size)
        self.root = shard_model(self.model, self.mesh, self.role.model_args, self.config)
        if self._unread is not None:
            self._unread.read(self.model, torch.device("cpu") if self.config.offload_policy else self.device)
            self._unread = None
        elif self.root is None:
            self.model.to(self.device)

    def _build_language_model(self, storage_dtype: torch.dtype) -> PreTrainedModel:
        """Without weights where each rank can read its own shard of them later."""
        self._unread = build_unread(self.role.model_args, self.head.value, storage_dtype)
        return super()._build_language_model(storage_dtype) if self._unread is None else self._unread.language_model

    def _compute(self, layout: TokenLayout, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        return self.model(layout, outputs, temperature)

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        """Shards; none where ``offload_policy`` keeps them in host memory."""
        if kind is not StateKind.MODEL_PARAMS:
            return []
        self._reshard()
        return self._on_device([*self.model.parameters(), *self.model.buffers()])

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        local = [local_tensor(tensor.detach()) for tensor in tensors]
        return [tensor for tensor in local if tensor.device.type == self.device.type]

    def _reshard(self) -> None:
        """A root stays gathered after a forward pass without a backward pass; what comes next expects shards."""
        if self.root is not None:
            self.root.reshard()

    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._gather_one(tensor) for tensor in tensors]

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(self.device, self._wire_dtype(tensor))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor if self.rank == 0 else tensor.new_empty(0)
