"""``fsdp2_infer``: a model sharded by PyTorch's ``fully_shard`` that computes log-probs, entropies or values."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from roll.config.strategies.registry import Fsdp2StrategyConfig
from roll.models.layouts import TokenLayout
from roll.models.meta_init import MetaModel, build_on_meta
from roll.models.tiled_mlp import tile_mlp_layers
from roll.strategies.fsdp2.mesh import build_mesh
from roll.strategies.fsdp2.sharding import shard_model
from roll.strategies.pieces import Pieces
from roll.strategies.sharded import ShardedStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Fsdp2InferStrategy(ShardedStrategy):
    """Shards made by ``fully_shard``."""

    config: Fsdp2StrategyConfig
    trainer = "fsdp2_train"
    _meta: MetaModel | None

    def _build(self, storage_dtype: torch.dtype) -> None:
        self._load_model(storage_dtype)
        self.mesh = build_mesh(self.device.type, self.world_size, self.config.fsdp_size)
        self.root = shard_model(self.model, self.mesh, self.role.model_args, self.config)
        if self._meta is not None:
            self._meta.read(self.model, torch.device("cpu") if self.config.offload_policy else self.device)
            self._meta = None
        elif self.root is None:
            self.model.to(self.device)

    def _build_language_model(self, storage_dtype: torch.dtype) -> PreTrainedModel:
        """Without weights where each rank can read its own shard of them later."""
        self._meta = build_on_meta(self.role.model_args, self.head.value, storage_dtype)
        model = super()._build_language_model(storage_dtype) if self._meta is None else self._meta.language_model
        if self.config.apply_tiled_mlp:
            tile_mlp_layers(model, self.config.tiled_num_shards)
        return model

    def _compute(self, layout: TokenLayout, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        return self.model(layout, outputs, temperature)

    def _reshard(self) -> None:
        """After a forward pass without a backward pass the root stays gathered, and under ``reshard_after_forward:
        false`` every unit does; what comes next expects shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor, Pieces]]] = {}
        whole: dict[int, torch.Tensor] = {}
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, DTensor):
                shard = (index, tensor.to_local(), row_pieces(tensor))
                by_dtype.setdefault(self._wire_dtype(tensor), []).append(shard)
            else:
                whole[index] = self._on_wire(tensor)
        for dtype, shards in by_dtype.items():
            gathered = self._gather_parts([(part, pieces) for _, part, pieces in shards], dtype)
            whole |= {index: tensor for (index, _, _), tensor in zip(shards, gathered, strict=True)}
        return [whole[index] for index in range(len(tensors))]


def row_pieces(tensor: DTensor) -> Pieces:
    """How the rows of a parameter lie on the ranks of its shard group: as ``torch.chunk`` divides them."""
    num_ranks = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    rows = -(-tensor.shape[0] // num_ranks)
    return Pieces.even(tensor.shape, rows * tensor.shape[1:].numel(), num_ranks)
