"""``fsdp_infer``: a model sharded by FSDP1 that computes log-probs, entropies or values."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from roll.config.strategies.registry import Fsdp1StrategyConfig
from roll.models.layouts import TokenLayout
from roll.strategies.fsdp.wrapping import clean_name, free_gathered, wrap_model
from roll.strategies.fsdp2.mesh import build_mesh
from roll.strategies.pieces import Pieces, exchange_sizes
from roll.strategies.sharded import ShardedStrategy


class FsdpInferStrategy(ShardedStrategy):
    """Shards made by ``FullyShardedDataParallel``."""

    config: Fsdp1StrategyConfig
    trainer = "fsdp_train"
    mixes_types = False

    def _build(self, storage_dtype: torch.dtype) -> None:
        self._load_model(storage_dtype)
        self.root = None
        shapes = {name: tensor.shape for name, tensor in self._named_tensors()}
        self._names = list(shapes)
        self.mesh = build_mesh(self.device.type, self.world_size, self.config.fsdp_size)
        self.root = wrap_model(self.model, self.mesh, self.role.model_args, self.config)
        self._pieces: dict[torch.Tensor, Pieces] = {}
        if self.root is not None:
            parameters = {clean_name(name): value for name, value in self.model.language_model.named_parameters()}
            held = [(value, shapes[name]) for name, value in parameters.items()]
            pieces = exchange_sizes(held, self.mesh.get_group("fsdp"), self.device)
            self._pieces = dict(zip(parameters.values(), pieces, strict=True))

    def _compute(self, layout: TokenLayout, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        return (self.root or self.model)(layout, outputs, temperature)

    def _reshard(self) -> None:
        if self.root is not None:
            free_gathered(self.root)

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.root is None:
            yield from super()._named_tensors()
            return
        self._reshard()
        language_model = self.model.language_model
        named = [*language_model.named_parameters(), *language_model.named_buffers()]
        tensors: dict[str, torch.Tensor] = {clean_name(name): tensor for name, tensor in named}
        yield from ((name, tensors[name]) for name in self._names)

    def _full_size(self, tensor: torch.Tensor) -> int:
        return self._pieces[tensor].shape.numel() if tensor in self._pieces else tensor.numel()

    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [tensor for tensor in tensors if tensor in self._pieces]
        whole = iter(self._gather_parts([(part, self._pieces[part]) for part in parts], self.compute_dtype))
        return [next(whole) if tensor in self._pieces else self._on_wire(tensor) for tensor in tensors]
