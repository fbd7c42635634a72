"""``fsdp2_train`` and ``fsdp2_infer``, a model sharded by ``fully_shard``; and what FSDP1 has in common with it: mesh,
wrapped units, AdamW on shards, clipping by the global norm, checkpoints.

| ``fsdp_size``      | mesh                                | dimensions       |
|--------------------|-------------------------------------|------------------|
| <= 1, or >= world  | (world,)                            | ``fsdp``         |
| a divisor of world | (world / fsdp_size, fsdp_size)      | ``ddp``, ``fsdp``|
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from roll.checkpoint.tensors import MOMENTS, MUON_MOMENTS, WEIGHT, Piece, resumed, save_training
from roll.config.strategies.fsdp import Fsdp2StrategyConfig, ShardedStrategyConfig, WrapPolicy, frees_gathered
from roll.models.build import DTYPES, enable_gradient_checkpointing, has_tied_embeddings, tile_mlp_layers
from roll.models.expert_parallel import ExpertMesh, row_runs
from roll.models.experts import EXPERTS, SparseLayer
from roll.models.log_probs import ResponseModel, output_matrices
from roll.models.vision import vision_modules
from roll.strategies.fsdp.exchange import choose_exchange
from roll.strategies.training.adamw import adamw, moment, set_moment
from roll.strategies.training.data_parallel import DataParallelStrategy
from roll.strategies.training.gather import Pieces
from roll.strategies.training.muon import Matrix, MuonAndAdamW, hidden_matrices, muon_groups
from roll.strategies.training.optimizer import (
    TrainingProgress,
    clip_,
    decay_groups,
    global_norm,
    local_tensor,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def wrapped_units(
    model: ResponseModel, policy: WrapPolicy, sparse_layers: Sequence[SparseLayer] = ()
) -> list[nn.Module]:
    """The modules to shard as units of their own, innermost first. Raises ValueError: a wrap policy that names no
    module of this model."""
    language_model = model.language_model
    chosen = policy.transformer_layer_cls_to_wrap
    # An empty list is valid: one unit for everything is cheapest for a very small model.
    names = set(getattr(language_model, "_no_split_modules", None) or () if chosen is None else chosen)
    units = _expert_units(sparse_layers, set(policy.moe_experts or ()))
    units += [module for module in model.modules() if type(module).__name__ in names]
    if names and not units:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"strategy_config.wrap_policy: the model has no module of class {', '.join(sorted(names))}; "
            f"its classes are {', '.join(known)}"
        )
    if policy.wrap_embeddings or policy.wrap_lm_output:
        if has_tied_embeddings(language_model):
            raise ValueError(
                "strategy_config.wrap_policy: wrap_embeddings and wrap_lm_output need two matrices, but this model "
                "ties its output matrix to its embeddings; set both to false"
            )
        if policy.wrap_embeddings:
            units.append(language_model.get_input_embeddings())
        if policy.wrap_lm_output:
            units += output_matrices(language_model)
    return units


def _expert_units(layers: Sequence[SparseLayer], names: set[str]) -> list[nn.Module]:
    """The modules inside sparse layers that ``moe_experts`` names; all fused experts for a name without a match."""
    inside = [module for layer in layers for module in layer.block.modules()]
    units = [module for module in inside if type(module).__name__ in names]
    other = names - {type(unit).__name__ for unit in units}
    if other and layers:
        # Configurations name transformers 4's class of a single expert; transformers 5 fuses a layer's into one module.
        experts = [layer.experts for layer in layers if layer.is_fused]
        logger.info(
            "strategy_config.wrap_policy.moe_experts: no module of a sparse layer is a %s; taken for %s",
            ", ".join(sorted(other)),
            ", ".join(sorted({type(one).__name__ for one in experts})),
        )
        units += [one for one in experts if one not in units]
    # peft's wrapper of fused experts adds A and B to their tensors in its own forward: they must be gathered for that.
    wrapped = {id(layer.experts): getattr(layer.block, EXPERTS) for layer in layers}
    return [wrapped.get(id(unit), unit) for unit in units]


class ShardedStrategy(DataParallelStrategy):
    """A model sharded over ranks: parameters in the compute dtype, or in ``master_dtype`` where it trains, with AdamW
    moments likewise and forward and backward in the compute dtype."""

    config: ShardedStrategyConfig
    mesh: DeviceMesh
    divides_state = True

    def _configure(self) -> None:
        self.compute_dtype = DTYPES[self.config.param_dtype or self.role.model_args.dtype]
        self._background: ThreadPoolExecutor | None = None
        self._writing: Future[Any] | None = None

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Build and shard the model, and make its optimizer; see :meth:`ModelStrategy.initialize`."""
        self._refuse_steps(num_training_steps)
        self._meta_dtype = DTYPES[self.config.master_dtype] if self.trains else self.compute_dtype
        self._load_model(self._meta_dtype)
        # The ranks by copy of the parameters (where there are several) and shard.
        copies, shards = self.dims.dp_replicate, self.dims.dp_shard
        sizes, names = ((shards,), ("fsdp",)) if copies == 1 else ((copies, shards), ("ddp", "fsdp"))
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self._shard()
        if not self.trains:
            self.model.requires_grad_(False)
        if num_training_steps:
            args = self.role.training_args
            enable_gradient_checkpointing(self.model.language_model, self.role.model_args)
            self.progress = TrainingProgress(args, num_training_steps, self.compute_dtype)
            groups = self._decay_groups()
            if args.optimizer.name != "muon":
                self.optimizer = adamw(groups, args, self.config.optimizer_cpu_offload)
            else:
                matrices = hidden_matrices(self.model.language_model, self.sparse_layers, self._num_dims)
                groups = muon_groups(groups, matrices)
                self.optimizer = MuonAndAdamW(adamw(groups, args), args.optimizer.scaling, self.device)
                updated = [one for group in groups if group["is_muon"] for one in group["params"]]
                self.optimizer.matrices = [self._matrix(parameter) for parameter in updated]
            self.trainable = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self._watch_balance()
        self.model.train(num_training_steps > 0)

    def _prepare_experts(self, language_model: PreTrainedModel) -> None:
        super()._prepare_experts(language_model)
        if self.sparse_layers and (grouped := self.config.moe_use_grouped_mm) is not None:
            language_model.set_experts_implementation("grouped_mm" if grouped else "eager")

    @abstractmethod
    def _shard(self) -> None:
        """Collective. Shard the model over :attr:`mesh`, and read its weights if they have not been."""

    def _shards(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        """This rank's part of each trained parameter, a run of elements: name, parameter, and the run's first one."""
        tensors = dict(self._named_tensors())
        for name in self._shapes:
            parameter = tensors[name]
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
                shard = self._sharded(parameter)
                before = () if shard is None else shard[1].sizes[: self.mesh.get_local_rank("fsdp")]
                yield name, parameter, sum(before)

    def _num_dims(self, parameter: torch.Tensor) -> int:
        return parameter.ndim

    def _decay_groups(self) -> list[dict[str, Any]]:
        return decay_groups(self.model, self.role.training_args.weight_decay, self._num_dims)

    def _shard_group(self) -> ProcessGroup | None:
        # None on the ranks of any copy of the parameters but the first.
        is_copy = self.mesh.ndim == 2 and self.mesh.get_local_rank("ddp") > 0
        return None if is_copy else self.mesh.get_group("fsdp")

    def _matrix(self, parameter: torch.Tensor) -> Matrix:
        if (shard := self._sharded(parameter)) is None:
            return Matrix(parameter, Pieces(parameter.shape, (parameter.numel(),)), None)
        return Matrix(parameter, shard[1], self.mesh.get_group("fsdp"))

    def _differentiate(self, loss: torch.Tensor) -> None:
        scale = self.progress.scale
        (loss if scale == 1.0 else loss * scale).backward()

    def _clip_and_step(self, learning_rate: float) -> float:
        assert self.optimizer is not None
        gradients = [local_tensor(parameter.grad) for parameter in self.trainable if parameter.grad is not None]
        scale = self.progress.scale
        # Over the shards only: replicas hold the same summed gradient, which would count once for each.
        shard_group = self.mesh.get_group("fsdp") if self.mesh["fsdp"].size() > 1 else None
        norm = float(global_norm(gradients, shard_group, self.device)) / scale
        if math.isfinite(norm):  # the same number on all ranks, so all step or none does
            clip_(gradients, scale, norm, self.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, path: Path) -> None:
        self.saved()  # at most one checkpoint is held in host memory at a time
        if self.config.async_save_ckpt and self._background is None:
            self._background = ThreadPoolExecutor(1, "checkpoint")
        has_moments = not self.config.save_only_model
        state = {**self.progress.state(), "has_optimizer": has_moments}
        pieces = self._written_pieces(has_moments)
        self._writing = save_training(path, self.contents, pieces, state, self._buffers(), self._background)

    def _written_pieces(self, has_moments: bool) -> Iterator[Piece]:
        assert self.optimizer is not None
        for name, parameter, start in self._shards() if self._shard_group() is not None else ():
            local = local_tensor(parameter.detach())
            if not local.numel():
                continue
            state = self.optimizer.state.get(parameter, {}) if has_moments else {}
            kinds = [kind for kind in (*MOMENTS, *MUON_MOMENTS) if kind in state]
            moments = {kind: moment(self.optimizer, parameter, kind).flatten() for kind in kinds}
            updates = int(state["step"]) if "step" in state else 0
            yield Piece(name, {WEIGHT: local.flatten(), **moments}, start, updates=updates)

    def saved(self, wait: bool = True) -> bool:
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing, self._writing = self._writing, None  # before result(): an error is raised once, not at every call
        writing.result()
        return True

    @torch.no_grad()
    def load(self, path: Path) -> None:
        assert self.optimizer is not None
        self.saved()
        with resumed(path, self.contents, self._buffers()) as (state, stored):
            for name, parameter, begin in self._shards():
                local = local_tensor(parameter.detach())
                end = begin + local.numel()
                local.copy_(stored.read(WEIGHT, name, begin, end).view(local.shape))
                self.optimizer.state.pop(parameter, None)
                is_absent = not local.numel() and not isinstance(parameter, DTensor)  # FSDP1 gives it no gradient
                kinds = stored.moments(name)
                if is_absent or not kinds:  # moments that the checkpoint lacks start new
                    continue
                own: dict[str, Any] = self.optimizer.state[parameter]
                if MOMENTS[0] in kinds:
                    # As AdamW makes them when it first steps; the fused one counts on the device.
                    own["step"] = torch.full((), float(stored.updates(name)), device=parameter.device)
                for kind in kinds:
                    set_moment(self.optimizer, parameter, kind, stored.read(kind, name, begin, end))
        self.progress.restore(state)


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
            if isinstance(module, FSDPModule):
                choose_exchange(module, mesh.get_group(-1))
                if mesh.size() > 1:
                    # The loss is already divided by global denominators, so no mean over ranks. gloo has no reduction
                    # with a factor (ReduceOp.PREMUL_SUM), hence the plain sum.
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
