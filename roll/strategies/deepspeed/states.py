"""Parameters, float32 weights and moments that ZeRO shards over ranks, and training checkpoints of them.

A checkpoint can be read by any number of ranks under any ZeRO stage.  It holds
``model_and_optimizer/rank<r>.safetensors``: of every trained parameter the run of elements whose float32 weight and
moments rank r keeps, flat, with the place where it begins.  A reader takes the elements that it keeps itself from
whichever files have them.  Alongside is what :func:`roll.strategies.training.checkpoint.save_trainer_state` writes.
Whoever calls makes the folder appear at once or not at all.

DeepSpeed's own files are pickles, which run code when they are read, and tied to the stage that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint import CheckpointDamagedError
from roll.checkpoint.contents import ModelContents
from roll.strategies.training.checkpoint import load_trainer_state, restore_rng_states, save_trainer_state
from roll.strategies.training.gather import Pieces, gather_to_rank0

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_partitioned(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")


def full_size(tensor: Any) -> int:
    """Elements of the whole tensor, partitioned or not."""
    return int(tensor.ds_numel) if is_partitioned(tensor) else tensor.numel()


def set_master_weights(parameter: Any, whole: Tensor) -> None:
    """Put float32 ``whole`` into the optimizer's own weights of ``parameter``, of which each rank has a part.

    Under ZeRO-3 by parts: DeepSpeed's function for whole tensors fails where ranks' parts are not of equal size (the
    single bias of a value head on two ranks).
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if is_partitioned(parameter):
        safe_set_local_fp32_param(parameter, _own_part(parameter, whole))
    else:
        safe_set_full_fp32_param(parameter, whole)


@dataclass(frozen=True)
class Run:
    """The consecutive elements of a trained parameter, flattened, whose float32 weight and moments this rank keeps."""

    name: str
    """Name of the parameter in the Hugging Face model."""
    parameter: Any
    start: int
    length: int

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return full_size(self.parameter)

    @property
    def has_whole_parameter(self) -> bool:
        """Every stage but 3 leaves the whole parameter, in the compute type, on every rank."""
        return not is_partitioned(self.parameter)


class MasterStates:
    """Float32 weights and AdamW moments by parameter, the same for every ZeRO stage."""

    # Four ways to keep them: ZeRO-3 shards every parameter; ZeRO-1 and 2 shard a flat tensor of all of a group's
    # parameters; ZeRO-0 has a float32 copy of each on every rank, or in float32 the parameters themselves.

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stage = int(engine.zero_optimization_stage())
        self._optimizer = engine.optimizer
        self._adam: torch.optim.Optimizer = engine.basic_optimizer
        self._copies: dict[int, Tensor] = {}
        if self._stage == 0 and self._optimizer is not self._adam:
            for rounded, masters in zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True):
                self._copies |= {id(parameter): master for parameter, master in zip(rounded, masters, strict=True)}

    def runs(self) -> list[Run]:
        """One for each trained parameter; of length 0 where other ranks keep it."""
        named = self._engine.module.language_model.named_parameters()
        return [self._run(name, parameter) for name, parameter in named if parameter.requires_grad]

    @property
    def updates(self) -> int:
        """Updates made so far, the same for all parameters; 0 before the first."""
        steps = [float(state["step"]) for state in self._adam.state.values() if "step" in state]
        return int(max(steps, default=0.0))

    def writes(self, run: Run) -> bool:
        """True where this rank writes the run: under ZeRO-0 all ranks have all of it."""
        return bool(run.length) and (self._stage > 0 or dist.get_rank() == 0)

    def get(self, run: Run, moment: str | None) -> Tensor:
        """float32 (length,): the moment of the run, or (None) its weight."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        parameter = run.parameter
        if self._stage == 3:
            part = (
                safe_get_local_fp32_param(parameter)
                if moment is None
                else safe_get_local_optimizer_state(parameter, moment)
            )
            return part.detach().flatten()[: run.length]
        if self._stage == 0:
            master = self._copies.get(id(parameter), parameter)
            return (master if moment is None else self._adam.state[master][moment]).detach().flatten()
        mapping = parameter._hp_mapping
        (master,) = self._adam.param_groups[mapping.param_group_index]["params"]
        # DeepSpeed's own link to the moments is made after the first of the groups has stepped, for that group only.
        whole = master if moment is None else self._adam.state[master][moment]
        place = mapping.hp_fragment_address
        return whole.detach().flatten()[place.start : place.start + place.numel]

    @torch.no_grad()
    def set_weight(self, run: Run, weight: Tensor) -> None:
        """Give the parameter and its float32 master the values of ``weight``.

        Args:
            weight: float32, of the whole parameter where every rank has it, else of the run.
        """
        parameter = run.parameter
        if not run.has_whole_parameter:
            from deepspeed.utils import safe_set_local_fp32_param

            part = _fitted(weight, parameter.ds_tensor).to(parameter.ds_tensor.device)
            safe_set_local_fp32_param(parameter, part)
            parameter.ds_tensor.copy_(part.view_as(parameter.ds_tensor))
            return
        parameter.data.copy_(weight.view(parameter.shape))
        if run.length and (self._stage > 0 or self._copies):
            self.get(run, None).copy_(weight[run.start : run.start + run.length])

    @torch.no_grad()
    def set_moment(self, run: Run, moment: str, values: Tensor) -> None:
        """Give AdamW the ``values`` (float32, of the run) of a moment; :meth:`make_moments` comes first."""
        if self._stage == 3:
            from deepspeed.utils import safe_set_local_optimizer_state

            safe_set_local_optimizer_state(run.parameter, _fitted(values, run.parameter.ds_tensor), moment)
        elif run.length:
            self.get(run, moment).copy_(values)

    def make_moments(self, updates: int) -> None:
        """Moments of zeros after ``updates`` updates, where there are none yet: as AdamW makes them when it steps."""
        for index, master in enumerate(self._masters()):
            with self._on_device(index):
                state: dict[str, Any] = self._adam.state[master]
                for name in MOMENTS:
                    if name not in state:
                        state[name] = torch.zeros_like(master)
                state["step"] = torch.full((), float(updates), device=_device_of_step(state, master))

    def _run(self, name: str, parameter: Any) -> Run:
        size = full_size(parameter)
        if self._stage == 3:
            part = parameter.ds_tensor.numel()
            start = min(dist.get_rank() * part, size)
            return Run(name, parameter, start, min(part, size - start))
        if self._stage == 0:
            return Run(name, parameter, 0, size)
        mapping = parameter._hp_mapping
        if mapping is None:
            return Run(name, parameter, 0, 0)
        return Run(name, parameter, mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)

    def _masters(self) -> list[Tensor]:
        """The float32 tensors that the optimizer updates."""
        if self._stage == 3:
            # Its groups are filled during a step only.
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [master for group in self._adam.param_groups for master in group["params"]]

    @contextmanager
    def _on_device(self, index: int) -> Iterator[None]:
        """A group of ZeRO-3 that is kept on a disk comes from there, and goes back at the end of the block."""
        if self._stage == 3 and self._optimizer._swappable_optimizer_subgroup(index):
            self._optimizer._optimizer_states_and_gradient_swap_in(index)
            yield
            self._optimizer._optimizer_states_and_gradient_swap_out(index)
        else:
            yield


def _device_of_step(state: dict[str, Any], master: Tensor) -> torch.device:
    """The fused AdamW counts where the weights are, others on the host; keep it where it is."""
    return state["step"].device if isinstance(state.get("step"), Tensor) else master.device


def _fitted(values: Tensor, partition: Tensor) -> Tensor:
    """``values`` with zeros behind them, as many as ZeRO-3 pads the last rank's part with."""
    return torch.nn.functional.pad(values, (0, partition.numel() - values.numel()))


def _own_part(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's elements of the flattened whole, the last rank's padded."""
    size, rank = parameter.ds_tensor.numel(), dist.get_rank()
    own = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(own, (0, size - own.numel()))


def gather_partitions(parameters: list[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Collective. The whole parameters on rank 0; empty tensors elsewhere.

    Args:
        parameters: partitioned parameters. Rank r holds the r-th part of a flattened parameter in ``ds_tensor``,
            the last part padded.
        dtype: of the result.
    """
    parts = [parameter.ds_tensor for parameter in parameters]
    num_ranks = dist.get_world_size()
    pieces = [Pieces.even(p.ds_shape, p.ds_tensor.numel(), num_ranks) for p in parameters]
    group = dist.group.WORLD
    assert group is not None
    return gather_to_rank0(parts, pieces, group, dtype, device)


_FOLDER = "model_and_optimizer"
_WEIGHT = "weight"
_STARTS = "starts"
"""Metadata of a file: for each parameter the number of the first element that it holds."""


def save_states(path: Path, engine: Any, contents: ModelContents, state: dict[str, Any]) -> None:
    """Collective. Write trained parameters' float32 weights, moments, ``state`` (JSON values) and RNG states."""
    folder = path / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    masters = MasterStates(engine)
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for run in masters.runs():
        if masters.writes(run):
            starts[run.name] = run.start
            for kind in (_WEIGHT, *(MOMENTS if masters.updates else ())):
                held = masters.get(run, None if kind == _WEIGHT else kind)
                tensors[f"{kind}/{run.name}"] = held.float().to("cpu", copy=True).contiguous()
    if tensors:
        save_file(tensors, folder / f"rank{dist.get_rank():05d}.safetensors", metadata={_STARTS: json.dumps(starts)})
    save_trainer_state(path, contents, {**state, "updates": masters.updates})


def load_states(path: Path, engine: Any, contents: ModelContents) -> dict[str, Any]:
    """Collective. Put back what :func:`save_states` wrote, for any ranks and any stage; returns its ``state``.

    RNG states are put back where as many ranks run as wrote them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: something of it would be left behind by a model with ``contents``.
    """
    state = load_trainer_state(path, contents)
    updates = int(state["updates"])
    masters = MasterStates(engine)
    if updates:
        masters.make_moments(updates)
    with _opened(path / _FOLDER) as written:
        for run in masters.runs():
            # A parameter that is whole on this rank is its master rounded, also where another rank keeps the master.
            begin, end = (0, run.size) if run.has_whole_parameter else (run.start, run.start + run.length)
            weight = written.read(_WEIGHT, run.name, begin, end)
            masters.set_weight(run, weight)
            for moment in MOMENTS if updates else ():
                masters.set_moment(run, moment, written.read(moment, run.name, run.start, run.start + run.length))
    restore_rng_states(path, state)
    return state


@dataclass
class _WrittenRuns:
    """Opened files, and for every parameter the runs of elements in them: start and file."""

    runs: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)

    def read(self, kind: str, name: str, begin: int, end: int) -> Tensor:
        """float32: elements ``begin`` to ``end`` of the flattened parameter.

        Raises:
            CheckpointDamagedError: the files lack some of them.
        """
        wanted = torch.empty(end - begin)
        found = 0
        for start, file in self.runs.get(name, ()):
            held = file.get_slice(f"{kind}/{name}")
            low, high = max(begin, start), min(end, start + held.get_shape()[0])
            if low < high:
                wanted[low - begin : high - begin] = held[low - start : high - start]
                found += high - low
        if found != end - begin:
            raise CheckpointDamagedError(
                f"the checkpoint has {found} of elements {begin} to {end} of {kind}/{name}; files are missing"
            )
        return wanted


@contextmanager
def _opened(folder: Path) -> Iterator[_WrittenRuns]:
    written = _WrittenRuns()
    with ExitStack() as stack:
        for path in sorted(folder.glob("rank*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            starts = (file.metadata() or {}).get(_STARTS)
            if starts is None:
                raise CheckpointDamagedError(f"{path} does not say which elements it holds")
            for name, start in json.loads(starts).items():
                written.runs.setdefault(name, []).append((int(start), file))
        yield written
