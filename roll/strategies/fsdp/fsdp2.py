"""``fsdp2_train`` and ``fsdp2_infer``: a model sharded by PyTorch's ``fully_shard``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from roll.config.strategies.fsdp import Fsdp2StrategyConfig, frees_gathered
from roll.models.build import DTYPES, tile_mlp_layers
from roll.models.expert_parallel import ExpertMesh, row_runs
from roll.models.log_probs import output_matrices
from roll.models.vision import vision_modules
from roll.strategies.fsdp.sharded import ShardedStrategy, wrapped_units
from roll.strategies.training.gather import Pieces


class Fsdp2Strategy(ShardedStrategy):
    """Shards made by ``fully_shard``."""

    config: Fsdp2StrategyConfig
    _expert_mesh: ExpertMesh | None = None
    """None: experts are not divided over ranks."""

    def _shard(self) -> None:
        if self.config.apply_tiled_mlp:
            tile_mlp_layers(self.model.language_model, self.config.tiled_num_shards)
        if self.dims.ep > 1:
            self._expert_mesh = ExpertMesh.build(self.device.type, self.world_size, self.dims.ep)
        self.root = self._shard_model()
        if self._meta is not None:
            device = torch.device("cpu") if self.config.offload_policy else self.device
            # After sharding, so that each rank allocates and reads its own rows only.
            self._meta.read(self.model, device, self._whole)
            self._meta = None
        elif self.root is None:
            self.model.to(self.device)

    def _shard_model(self) -> FSDPModule | None:
        """Turn the model into an FSDP root, in place; gradients become plain sums over ranks. None: left as it is."""
        model, mesh, config = self.model, self.mesh, self.config
        if mesh.size() == 1 and self.compute_dtype is torch.float32 and not config.offload_policy:
            return None
        self._frees = config.reshard_after_forward
        if self._frees == "auto":
            # The same on all ranks, whose devices may differ.
            size = sum(parameter.numel() for parameter in model.parameters()) * self.compute_dtype.itemsize
            memory = self.platform.free_memory()[1]
            if self.device.type == "cpu":  # of which all ranks have a part
                memory //= self.world_size
            self._frees = bool(self._max_over_ranks(frees_gathered(size, memory)))
        precision = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=DTYPES[config.reduce_dtype])
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self._frees, "mp_policy": precision}
        if config.offload_policy:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.platform.pin_memory)
        tower = vision_modules(model.language_model)
        divided: list[torch.nn.Module] = []
        if self._expert_mesh is not None:
            divided = self._expert_mesh.divide(self.sparse_layers)
            # The inputs include the routing weights, which transformers keeps in the router's dtype (float32 in some).
            own = {"mesh": self._expert_mesh.sharding, "mp_policy": replace(precision, cast_forward_inputs=False)}
            for experts in divided:
                fully_shard(experts, **(options | own))
        for unit in wrapped_units(model, config.wrap_policy, self.sparse_layers):
            if unit in divided:
                continue
            # The angles that rotate patches stay in float32.
            casts = {"mp_policy": replace(precision, cast_forward_inputs=False)} if id(unit) in tower else {}
            fully_shard(unit, **(options | casts))
        if config.wrap_policy.wrap_lm_output:
            # A unit is gathered by the hooks of its forward(), but the output matrix is entered by log_probs().
            for head in output_matrices(model.language_model):
                register_fsdp_forward_method(head, "log_probs")
        root = fully_shard(model, **options)  # last: the root takes the parameters that no unit has
        for module in model.modules():
            if isinstance(module, FSDPModule) and mesh.size() > 1:
                # The loss is already divided by global denominators, so no mean over ranks. gloo has no reduction with
                # a factor (ReduceOp.PREMUL_SUM), hence the plain sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return root

    def _reshard(self) -> None:
        # After a forward pass without a backward pass the root stays gathered, and under `reshard_after_forward: false`
        # every unit does; what comes next expects shards.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _begin_micro_batch(self, last: bool) -> None:
        """Sum gradients over shards at every micro-batch or at the last one only; over replicas at the last one."""
        if self.root is None:
            return
        if self._frees is False:
            # Weights change after the last micro-batch only: until then, what is gathered stays so for the next.
            self.root.set_reshard_after_backward(last)
        if self.world_size == 1:
            return
        if not self.config.reduce_scatter_during_grad_accumulation:
            self.root.set_requires_gradient_sync(last)
        elif self.mesh.ndim == 2:
            self.root.set_requires_all_reduce(last)

    def _decay_groups(self) -> list[dict[str, Any]]:
        groups = super()._decay_groups()
        # Each on one mesh: a fused step refuses DTensors of two.
        if self._expert_mesh is None:
            return groups
        experts = {id(one) for layer in self.sparse_layers for one in layer.experts.parameters()}
        divided = [
            {**group, "params": [one for one in group["params"] if (id(one) in experts) == is_expert]}
            for group in groups
            for is_expert in (False, True)
        ]
        return [group for group in divided if group["params"]]

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._expert_mesh is None else self._expert_mesh.whole(tensor)

    def _sharded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Pieces] | None:
        whole = self._whole(tensor)
        if not isinstance(whole, DTensor):
            return None
        size = whole.shape[1:].numel()
        return whole.to_local(), Pieces(whole.shape, tuple((run.stop - run.start) * size for run in row_runs(whole)))
