"""AdamW and Muon under Megatron, plain or distributed over data-parallel ranks, and their states by parameter.

With the distributed optimizer a rank holds float32 weights and moments of an interval of each parameter (ZeRO stage 1);
with parameters of 16 bits there are float32 master weights as well.  :class:`MasterStates` hides both: what it hands
out and takes is always a parameter's whole float32 tensor on this tensor- and pipeline-parallel rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from roll.checkpoint.tensors import MOMENTS, MUON_MOMENTS
from roll.config.roles import TrainingArguments
from roll.platforms import current_platform
from roll.strategies.megatron.correspondence import Region
from roll.strategies.megatron.cpu_compat import construction
from roll.strategies.megatron.weights import OwnParameter
from roll.strategies.training.adamw import adamw_class, moment, set_moment
from roll.strategies.training.gather import Pieces
from roll.strategies.training.muon import Matrix, MuonAndAdamW, gathered_sizes


def build_optimizer(
    chunks: list[nn.Module],
    args: TrainingArguments,
    dtype: torch.dtype,
    distributed: bool,
    on_host: bool,
    matrices: Collection[nn.Parameter],
) -> ChainedOptimizer:
    """Collective. AdamW (Loshchilov & Hutter, 2019) over the trainable parameters, or Muon over ``matrices``; vectors
    never decay. Experts with ranks of their own have an optimizer of their own in the chain. ``on_host``: AdamW's
    moments are in host memory. Raises ValueError: nothing is trainable."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    trainable = torch.tensor(sum(parameter.requires_grad for parameter in parameters), device=parameters[0].device)
    dist.all_reduce(trainable)  # a single stage may well be frozen as a whole
    if not int(trainable):
        raise ValueError("model_args.freeze_module_prefix: every parameter of the model is frozen; freeze fewer")
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_epsilon,
        clip_grad=0.0,  # done by the strategy, which must see the norm first
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # The strategy scales the loss and divides gradients by it, as under every other backend.
        loss_scale=1.0 if dtype is torch.float16 else None,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    uses_muon = args.optimizer.name == "muon"
    overrides: Any = None
    if uses_muon:  # groups of their own
        for parameter in matrices:
            parameter.is_muon = True  # type: ignore[attr-defined]
        overrides = get_standard_config_overrides(config) | {ParamKey(attr="is_muon"): {"is_muon": True}}
    with construction():
        chain = get_megatron_optimizer(config, chunks, overrides, use_gloo_process_groups=False)
    # wd_mult is applied by Megatron's OptimizerParamScheduler, which is not used: without this, biases would decay.
    for group in chain.param_groups:
        group["weight_decay"] = args.weight_decay * group["wd_mult"]
        group.setdefault("is_muon", False)
    for one in chain.chained_optimizers if uses_muon else ():
        one.optimizer = MuonAndAdamW(one.optimizer, args.optimizer.scaling, parameters[0].device)
    cls = adamw_class(args, on_host)
    if cls is not torch.optim.AdamW:
        # Megatron's own way to the host (HybridDeviceOptimizer) makes the update on its cores, and needs CUDA.
        for one in chain.chained_optimizers:
            groups = one.optimizer.param_groups
            # Made empty: shards of the distributed optimizer may be views, which no optimizer takes.
            one.optimizer = cls([{**group, "params": []} for group in groups])
            for own, group in zip(one.optimizer.param_groups, groups, strict=True):
                own["params"] = group["params"]
    return chain


MatrixShapes = Sequence[Sequence[torch.Size]]
"""For each matrix that a parameter of Muon holds, wholly or in part: the shapes of the stored tensors that make up the
matrix, stacked by rows."""


@dataclass(frozen=True, kw_only=True)
class ShardedMatrix(Matrix):
    """A tensor-parallel rank's part of a matrix, or of several that Megatron fuses."""

    own_parameter: OwnParameter
    shapes: MatrixShapes

    def wholes(self, run: Tensor) -> list[Tensor]:
        (shard,) = super().wholes(run)
        layout, shards = self.own_parameter.correspondence.layout, [shard]
        if layout.dim is not None:
            group = self.own_parameter.shards
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard.contiguous(), group=group)
        stored = iter(layout.join(shards, [shape for matrix in self.shapes for shape in matrix]))
        return [torch.cat([next(stored) for _ in matrix]) for matrix in self.shapes]

    def own(self, wholes: list[Tensor]) -> Tensor:
        layout, group = self.own_parameter.correspondence.layout, self.own_parameter.shards
        rank, size = (0, 1) if layout.dim is None else (group.rank(), group.size())
        stored = [
            rows
            for whole, shapes in zip(wholes, self.shapes, strict=True)
            for rows in whole.split([shape[0] for shape in shapes])
        ]
        return super().own([layout.split(stored, rank, size)])


class MasterStates:
    """Float32 weights and moments by parameter."""

    def __init__(
        self, optimizer: ChainedOptimizer, parameters: list[OwnParameter], matrices: Mapping[nn.Parameter, MatrixShapes]
    ) -> None:
        """Collective. ``matrices`` are Muon's."""
        self._optimizers = optimizer.chained_optimizers
        self._replicas = {own.parameter: own.replicas for own in parameters}
        self._is_distributed = isinstance(self._optimizers[0], DistributedOptimizer)
        adams: list[torch.optim.Optimizer] = [one.optimizer for one in self._optimizers]
        self._adams = {id(main): adam for adam in adams for group in adam.param_groups for main in group["params"]}
        self._matrices = matrices
        for adam in adams:
            if isinstance(adam, MuonAndAdamW):
                is_expert = any(group["is_expert_parallel"] for group in adam.param_groups)
                own = [one for one in parameters if one.parameter in matrices and one.has_expert_ranks == is_expert]
                adam.matrices = self._parts(own)

    def _parts(self, parameters: list[OwnParameter]) -> list[ShardedMatrix]:
        """Collective. Of matrices that the same ranks repeat."""
        held = [self._held(own.parameter) or (None, slice(0, 0), None) for own in parameters]
        own_sizes = [interval.stop - interval.start for _, interval, _ in held]
        sizes: list[tuple[int, ...]] = [(size,) for size in own_sizes]
        if self._is_distributed and parameters:
            sizes = gathered_sizes(own_sizes, parameters[0].replicas)
        return [
            ShardedMatrix(
                main=main,
                pieces=Pieces(own.parameter.shape, of_ranks),
                group=own.replicas if self._is_distributed else None,
                own_parameter=own,
                shapes=self._matrices[own.parameter],
            )
            for own, (main, _, _), of_ranks in zip(parameters, held, sizes, strict=True)
        ]

    def moments(self, parameter: nn.Parameter) -> Sequence[str]:
        """Names of its moments."""
        return MUON_MOMENTS if parameter in self._matrices else MOMENTS

    @property
    def step(self) -> int:
        """Updates made so far; 0 before the first."""
        states = [state for one in self._optimizers for state in one.optimizer.state.values()]
        steps = [float(state["step"]) for state in states if "step" in state]
        return int(max(steps, default=0.0))

    def get(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Collective over data-parallel ranks. ``key``: ``weight`` or one of :meth:`moments`; float32, whole."""
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if (held := self._held(parameter)) is not None:
            main, interval, adam = held
            if key == "weight" or key in adam.state.get(main, {}):
                part = main if key == "weight" else moment(adam, main, key)
                whole.view(-1)[interval] = part.detach().flatten()
        if self._is_distributed:
            # Ranks hold disjoint intervals and zeros elsewhere, so this sum is a gather, exact in every bit.
            dist.all_reduce(whole, group=self._replicas[parameter])
        return whole

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        """Give the parameter, and its float32 master where there is one, the values of ``weight`` (float32, whole)."""
        parameter.copy_(weight)
        if (held := self._held(parameter)) is not None:
            main, interval, _ = held
            main.copy_(weight.flatten()[interval].view_as(main))

    @torch.no_grad()
    def set_moments(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: int) -> None:
        """Give the optimizer moments (float32, whole), and AdamW the number of updates that they are the result of."""
        if (held := self._held(parameter)) is None:
            return
        main, interval, adam = held
        state: dict[str, Any] = adam.state[main]
        if parameter not in self._matrices:
            state["step"] = torch.tensor(float(step))
        for key, value in moments.items():
            set_moment(adam, main, key, value.flatten()[interval])

    def tensors(self) -> list[Tensor]:
        """Master weights that are not the model's own parameters, and moments, without those in host memory."""
        adams = [one.optimizer for one in self._optimizers]
        groups = [group for adam in adams for group in adam.param_groups]
        masters = [main for group in groups for main in group["params"] if main.dtype is torch.float32]
        states = [state for adam in adams for state in adam.state.values()]
        moments = [value for state in states for key, value in state.items() if key != "step"]
        return masters + [moment for moment in moments if moment.device.type == current_platform().device_type]

    def _held(self, parameter: nn.Parameter) -> tuple[Tensor, slice, torch.optim.Optimizer] | None:
        """The float32 tensor that an optimizer updates, its interval in the flattened parameter, and that optimizer."""
        if not parameter.requires_grad:
            return None
        if self._is_distributed:
            for one in self._optimizers:
                if (place := one.model_param_group_index_map.get(parameter)) is not None:
                    group, order = place
                    interval = one._get_model_param_range_map(parameter)["param"]
                    main = one.optimizer.param_groups[group]["params"][order]
                    return main, slice(interval.start, interval.end), one.optimizer
            return None
        main = getattr(parameter, "main_param", parameter)
        return main, slice(0, parameter.numel()), self._adams[id(main)]


@dataclass(frozen=True)
class Named:
    """A tensor of the Hugging Face model, as a checkpoint names it, and where a Megatron source is in it."""

    name: str
    begin: int
    """The first row of the source in it."""
    shape: torch.Size
    """Shape of the source."""

    @property
    def width(self) -> int:
        """Elements of a row; a vector's rows are its elements."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def place(self, region: Region) -> tuple[int, int, int, int]:
        """First row, end, first column and end of a region, in the whole tensor as a matrix."""
        rows, columns = region
        height = self.shape[:-1].numel() if len(self.shape) > 1 else self.shape[0]
        first, last, _ = rows.indices(height)
        left, right, _ = columns.indices(self.width)
        return self.begin + first, self.begin + last, left, right
