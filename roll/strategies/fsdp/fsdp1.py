"""``fsdp_train`` and ``fsdp_infer``: a model sharded by ``FullyShardedDataParallel``, PyTorch's older wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import MethodType

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy

from roll.config.strategies.fsdp import Fsdp1StrategyConfig
from roll.models.build import DTYPES
from roll.models.loading import ModuleReader
from roll.models.log_probs import output_matrices, run_head_when_called
from roll.models.vision import vision_modules
from roll.strategies.fsdp.fsdp2 import ShardedStrategy, wrapped_units
from roll.strategies.training.gather import Pieces

WRAPPER = "_fsdp_wrapped_module."
"""Part that the wrapper of a module adds to the names of its parameters."""


class FsdpStrategy(ShardedStrategy):
    """Shards made by ``FullyShardedDataParallel``."""

    config: Fsdp1StrategyConfig
    mixes_types = False

    def _shard(self) -> None:
        self.root: FullyShardedDataParallel | None = None
        shapes = {name: tensor.shape for name, tensor in self._named_tensors()}
        self._names = list(shapes)
        # On a CPU everything is in host memory already.
        offload = self.config.offload_policy and self.device.type != "cpu"
        if self.mesh.size() > 1 or self.compute_dtype is not torch.float32 or offload:
            self.called = self.root = self._wrap_model(offload)
        elif self._meta is None:  # one rank in float32: nothing is sharded or cast, and the module pays for no hooks
            self.model.to(self.device)
        else:
            self._meta.read(self.model, self.device)
        self._meta = None
        self._pieces: dict[torch.Tensor, Pieces] = {}
        if self.root is not None:
            parameters = {clean_name(name): value for name, value in self.model.language_model.named_parameters()}
            group, own = self.mesh.get_group("fsdp"), [value.numel() for value in parameters.values()]
            table = torch.empty(dist.get_world_size(group), len(own), dtype=torch.int64, device=self.device)
            dist.all_gather(list(table.unbind()), torch.tensor(own, device=self.device), group=group)
            for (name, parameter), sizes in zip(parameters.items(), table.T.tolist(), strict=True):
                assert sum(sizes) == shapes[name].numel(), (name, sizes)
                self._pieces[parameter] = Pieces(shapes[name], tuple(sizes))

    def _wrap_model(self, offload: bool) -> FullyShardedDataParallel:
        """Wrap the model and its units over the mesh; gradients become means over all ranks.

        A model without weights reads those of each unit when it is wrapped.
        """
        model, config, meta, device = self.model, self.config, self._meta, self.device
        tower = vision_modules(model.language_model)
        precision = MixedPrecision(
            # Token ids and positions are all that goes in, so there is nothing to cast; an image is cast where it is
            # cut.
            param_dtype=self.compute_dtype,
            reduce_dtype=DTYPES[config.reduce_dtype],
            cast_root_forward_inputs=False,
        )

        # The angles that rotate patches stay in float32.
        of_tower = {"mixed_precision": replace(precision, cast_forward_inputs=False)}
        units = wrapped_units(model, config.wrap_policy, self.sparse_layers)
        options = {id(unit): of_tower if id(unit) in tower else True for unit in units}
        head = model.language_model.get_output_embeddings()
        if config.wrap_policy.wrap_lm_output:
            if len(output_matrices(model.language_model)) > 1:
                raise ValueError(
                    "strategy_config.wrap_policy.wrap_lm_output: does not go with additional_target (the output matrix "
                    "trained in full alongside adapters) under FSDP1; set it to false"
                )
            run_head_when_called(model.language_model)
        freeing, keeping = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        if self.mesh.ndim == 2:
            freeing, keeping = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
        kind = freeing if config.reshard_after_forward else keeping
        if self.mesh.size() == 1:
            kind = ShardingStrategy.NO_SHARD
        with warnings.catch_warnings():
            # On one rank there is no other strategy.
            warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy", category=FutureWarning)
            root = FullyShardedDataParallel(
                model,
                device_mesh=self.mesh,
                sharding_strategy=kind,
                cpu_offload=CPUOffload(offload_params=True) if offload else None,
                auto_wrap_policy=CustomPolicy(lambda module: options.get(id(module), False)),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                mixed_precision=precision,
                device_id=device,
                use_orig_params=True,
                param_init_fn=None if meta is None else ModuleReader(meta, device),
            )
        if config.wrap_policy.wrap_lm_output:
            # The output matrix has its own wrapper now: its log-probs are computed by calling that.
            wrapper = model.language_model.get_output_embeddings()
            assert isinstance(wrapper, FullyShardedDataParallel) and wrapper.module is head
            wrapper.__dict__["log_probs"] = MethodType(FullyShardedDataParallel.__call__, wrapper)
        return root

    def _reshard(self) -> None:
        """Give back parameters that are still gathered; a no-op before the first forward pass."""
        if self.root is None or not self.root._is_root:
            return
        for unit in FullyShardedDataParallel.fsdp_modules(self.root):
            handle = unit._handle
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                # Private: torch has no public way to free what a forward pass without a backward pass leaves gathered.
                _reshard(unit, handle, True)

    def _num_dims(self, parameter: torch.Tensor) -> int:
        # With use_orig_params a sharded parameter is a flat view: only its whole shape tells a matrix from a vector.
        return len(self._pieces[parameter].shape) if parameter in self._pieces else parameter.ndim

    def _begin_micro_batch(self, last: bool) -> None:
        self._reduces = last or self.config.reduce_scatter_during_grad_accumulation

    def _differentiate(self, loss: torch.Tensor) -> None:
        """FSDP1 averages over ranks, but the loss is this rank's share of a sum: hence the factor."""
        if self.root is None:
            super()._differentiate(loss)
            return
        with nullcontext() if self._reduces else self.root.no_sync():
            super()._differentiate(loss * self.world_size)

    def _sharded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Pieces] | None:
        return (tensor, self._pieces[tensor]) if tensor in self._pieces else None

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.root is None:
            yield from super()._named_tensors()
            return
        self._reshard()
        language_model = self.model.language_model
        named = [*language_model.named_parameters(), *language_model.named_buffers()]
        tensors: dict[str, torch.Tensor] = {clean_name(name): tensor for name, tensor in named}
        yield from ((name, tensors[name]) for name in self._names)


def clean_name(name: str) -> str:
    """The Hugging Face name of a parameter of a wrapped model."""
    return name.replace(WRAPPER, "")
