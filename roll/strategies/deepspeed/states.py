"""Parameters, float32 weights and moments that ZeRO shards over ranks, and training checkpoints of them.

Of every trained parameter rank r writes the run of elements whose float32 weight and moments it keeps
(:mod:`roll.checkpoint.tensors`).  DeepSpeed's own files are pickles, which run code when they are read, and tied to the
stage that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from roll.checkpoint.tensors import MOMENTS, MUON_MOMENTS
from roll.strategies.training.gather import Pieces
from roll.strategies.training.muon import Matrix, MuonAndAdamW, gathered_sizes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    class PartitionedTensor(Tensor):
        """A parameter that ZeRO-3 has sharded."""

        ds_tensor: Tensor
        ds_shape: torch.Size


def is_partitioned(tensor: Tensor) -> TypeGuard[PartitionedTensor]:
    return hasattr(tensor, "ds_tensor")


def full_shape(tensor: Tensor) -> torch.Size:
    """Shape of the whole tensor, partitioned or not."""
    return torch.Size(tensor.ds_shape) if is_partitioned(tensor) else tensor.shape


@dataclass(frozen=True)
class Run:
    """The consecutive elements of a trained parameter, flattened, whose float32 weight and moments this rank keeps."""

    name: str
    """Name of the parameter in the Hugging Face model."""
    parameter: Any
    start: int
    length: int


class MasterStates:
    """Float32 weights and moments by parameter, the same for every ZeRO stage."""

    # Four ways to keep them: ZeRO-3 shards every parameter; ZeRO-1 and 2 shard a flat tensor of all of a group's
    # parameters; ZeRO-0 has a float32 copy of each on every rank, or in float32 the parameters themselves.

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._stage = int(engine.zero_optimization_stage())
        self._optimizer = engine.optimizer
        self._adam: torch.optim.Optimizer = engine.basic_optimizer
        self._copies: dict[int, Tensor] = {}
        if self._stage == 0 and self._optimizer is not self._adam:
            for rounded, masters in zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True):
                self._copies |= {id(parameter): master for parameter, master in zip(rounded, masters, strict=True)}
        self._groups: dict[int, int] = {}
        if self._stage in (1, 2):
            # A rank without any element of a parameter has no mapping. Under ZeRO-1 in bf16 they have another name.
            groups = getattr(self._optimizer, "bit16_groups", None) or self._optimizer.bf16_groups
            self._groups = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
        matrices = self._adam.matrices if isinstance(self._adam, MuonAndAdamW) else ()
        self._of_muon = {id(one.main) for one in matrices}

    def runs(self) -> list[Run]:
        """One for each trained parameter; of length 0 where other ranks keep it."""
        runs = []
        for name, parameter in self._engine.module.language_model.named_parameters():
            if not parameter.requires_grad:
                continue
            size = full_shape(parameter).numel()
            start, length = 0, size if self._stage == 0 else 0
            if is_partitioned(parameter):
                part = parameter.ds_tensor.numel()
                start = min(dist.get_rank() * part, size)
                length = min(part, size - start)
            elif self._stage > 0 and parameter._hp_mapping is not None:
                place = parameter._hp_mapping.lp_fragment_address
                start, length = place.start, place.numel
            runs.append(Run(name, parameter, start, length))
        return runs

    @property
    def updates(self) -> int:
        """Updates made so far, the same for all parameters; 0 before the first."""
        steps = [float(state["step"]) for state in self._adam.state.values() if "step" in state]
        return int(max(steps, default=0.0))

    def moments(self, run: Run) -> Sequence[str]:
        """Names of the moments that there are of a trained parameter; none before the first update."""
        master, _ = self._master(run)
        return [name for name in (*MOMENTS, *MUON_MOMENTS) if name in self._adam.state.get(master, {})]

    def get(self, run: Run, moment: str | None) -> Tensor:
        """float32 (length,): the moment of the run, or (None) its weight."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        parameter = run.parameter
        if self._stage == 3:
            if moment is None:
                part = safe_get_local_fp32_param(parameter)
            else:
                part = safe_get_local_optimizer_state(parameter, moment)
            return part.detach().flatten()[: run.length]
        master, begin = self._master(run)
        # DeepSpeed's own link to the moments is made after the first of the groups has stepped, for that group only.
        whole = master if moment is None else self._adam.state[master][moment]
        return whole.detach().flatten()[begin : begin + run.length]

    def _master(self, run: Run) -> tuple[Tensor, int]:
        """The tensor that the optimizer updates, and the first element of the run in it, flattened."""
        parameter, optimizer = run.parameter, self._optimizer
        if self._stage == 0:
            return self._copies.get(id(parameter), parameter), 0
        if self._stage == 3:
            group, begin, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            return optimizer.fp32_partitioned_groups_flat[group], begin
        (master,) = self._adam.param_groups[self._groups[id(parameter)]]["params"]
        return master, parameter._hp_mapping.hp_fragment_address.start if run.length else 0

    def matrices(self, parameters: set[Tensor]) -> list[Matrix]:
        """Collective. Those of ``parameters`` that are trained, for Muon."""
        runs = [run for run in self.runs() if run.parameter in parameters]
        group = None if self._stage == 0 else dist.group.WORLD
        of_ranks: list[tuple[int, ...]] = [(run.length,) for run in runs]
        if group is not None:
            of_ranks = gathered_sizes([run.length for run in runs], group)
        found = []
        for run, sizes in zip(runs, of_ranks, strict=True):
            master, begin = self._master(run)
            found.append(Matrix(master, Pieces(full_shape(run.parameter), sizes), group, begin))
        return found

    @torch.no_grad()
    def set_weight(self, run: Run, weight: Tensor) -> None:
        """Give the parameter and its float32 master the values of ``weight``: float32, of the whole parameter where
        every rank has it, else of the run."""
        parameter = run.parameter
        if is_partitioned(parameter):
            self.set_master(run, weight)
            parameter.ds_tensor.copy_(_fitted(weight, parameter.ds_tensor).view_as(parameter.ds_tensor))
            return
        parameter.data.copy_(weight.view(parameter.shape))
        if run.length and (self._stage > 0 or self._copies):
            self.get(run, None).copy_(weight[run.start : run.start + run.length])

    @torch.no_grad()
    def set_master(self, run: Run, values: Tensor) -> None:
        """Give the float32 master alone the ``values`` of the run."""
        if self._stage == 3:
            from deepspeed.utils import safe_set_local_fp32_param

            partition = run.parameter.ds_tensor
            safe_set_local_fp32_param(run.parameter, _fitted(values, partition).to(partition.device))
        else:
            self.get(run, None).copy_(values)

    @torch.no_grad()
    def set_moment(self, run: Run, moment: str, values: Tensor) -> None:
        """Give the optimizer the ``values`` (float32, of the run) of a moment; :meth:`make_moments` comes first."""
        if self._stage == 3:
            from deepspeed.utils import safe_set_local_optimizer_state

            safe_set_local_optimizer_state(run.parameter, _fitted(values, run.parameter.ds_tensor), moment)
        elif run.length:
            self.get(run, moment).copy_(values)

    def make_moments(self, updates: int) -> None:
        """Create missing moments as the optimizer does in its first step: zeros; AdamW has made ``updates``."""
        if self._stage == 3:  # the groups are filled during a step only
            masters = list(self._optimizer.fp32_partitioned_groups_flat)
        else:
            masters = [master for group in self._adam.param_groups for master in group["params"]]
        for index, master in enumerate(masters):
            # A group of ZeRO-3 that is kept on a disk comes from there, and goes back.
            if swaps := self._stage == 3 and self._optimizer._swappable_optimizer_subgroup(index):
                self._optimizer._optimizer_states_and_gradient_swap_in(index)
            state: dict[str, Any] = self._adam.state[master]
            of_muon = id(master) in self._of_muon
            for name in MUON_MOMENTS if of_muon else MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(master)
            if not of_muon:
                # The fused AdamW counts where the weights are, others on the host; keep it where it is.
                counter = state.get("step")
                device = counter.device if isinstance(counter, Tensor) else master.device
                state["step"] = torch.full((), float(updates), device=device)
            if swaps:
                self._optimizer._optimizer_states_and_gradient_swap_out(index)


def _fitted(values: Tensor, partition: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, partition.numel() - values.numel()))


@torch.no_grad()
def set_masters(engine: DeepSpeedEngine, elements: Callable[[str, torch.Size, int, int], Tensor]) -> None:
    """Replace the float32 weights that DeepSpeed made of rounded ones by ``elements(name, shape, begin, end)``: of each
    parameter, flattened."""
    masters = MasterStates(engine)
    if engine.zero_optimization_stage() == 0:
        # DeepSpeed created the moments by a step with zero gradients, which AdamW counts in its bias correction.
        engine.basic_optimizer.state.clear()
    for run in masters.runs():
        if run.length:
            masters.set_master(run, elements(run.name, full_shape(run.parameter), run.start, run.start + run.length))
