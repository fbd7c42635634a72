"""AdamW under Megatron, plain or distributed over data-parallel ranks, its states by parameter, and their checkpoints.

With the distributed optimizer a rank holds float32 weights and moments of an interval of each parameter (ZeRO stage 1);
with parameters of 16 bits there are float32 master weights as well.  :class:`MasterStates` hides both: what it hands
out and takes is always a parameter's whole float32 tensor on this tensor- and pipeline-parallel rank.

A checkpoint, which other tensor-, pipeline- and data-parallel sizes can read, holds
``model_and_optimizer/stage<p>_tensor<t>.safetensors``: the float32 weights and moments of what tensor-parallel rank t
of pipeline stage p holds, under names that do not depend on how the model is sharded; experts with ranks of their own
are in ``stage<p>_experts<e>_tensor<t>.safetensors``.  A reader takes a parameter's parts from the files of all t, joins
them and splits them its own way.  Alongside is the trainer's state.  Whoever calls
makes the folder appear at once or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from roll.checkpoint import CheckpointDamagedError
from roll.checkpoint.contents import ModelContents
from roll.config.roles import TrainingArguments
from roll.protocol.metrics import RankInfo
from roll.strategies.megatron.cpu_compat import construction
from roll.strategies.megatron.weights import OwnParameter
from roll.strategies.training.checkpoint import load_trainer_state, restore_rng_states, save_trainer_state

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    chunks: list[nn.Module], args: TrainingArguments, dtype: torch.dtype, distributed: bool
) -> ChainedOptimizer:
    """Collective. AdamW (Loshchilov & Hutter, 2019) over the trainable parameters; vectors never decay.

    Experts with ranks of their own have an optimizer of their own in the chain.

    Raises:
        ValueError: nothing is trainable.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    trainable = torch.tensor(sum(parameter.requires_grad for parameter in parameters), device=parameters[0].device)
    dist.all_reduce(trainable)  # a stage of its own may well be frozen as a whole
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
    with construction():
        chain = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for group in chain.param_groups:
        group["weight_decay"] = args.weight_decay * group["wd_mult"]
    return chain


class MasterStates:
    """Float32 weights and moments by parameter."""

    def __init__(self, optimizer: ChainedOptimizer, parameters: list[OwnParameter]) -> None:
        self._optimizers = optimizer.chained_optimizers
        self._replicas = {own.parameter: own.replicas for own in parameters}
        self._is_distributed = isinstance(self._optimizers[0], DistributedOptimizer)
        adams: list[torch.optim.Optimizer] = [one.optimizer for one in self._optimizers]
        self._adams = {id(main): adam for adam in adams for group in adam.param_groups for main in group["params"]}

    @property
    def step(self) -> int:
        """Updates made so far; 0 before the first."""
        states = [state for one in self._optimizers for state in one.optimizer.state.values()]
        steps = [float(state["step"]) for state in states if "step" in state]
        return int(max(steps, default=0.0))

    def get(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Collective over data-parallel ranks. ``key``: ``weight`` or one of :data:`MOMENTS`; float32, whole."""
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        held = self._held(parameter)
        if held is not None:
            main, interval, adam = held
            part = main if key == "weight" else adam.state.get(main, {}).get(key)
            if part is not None:
                whole.view(-1)[interval] = part.detach().flatten()
        if self._is_distributed:
            # Intervals of the ranks do not overlap: their sum is exact.
            dist.all_reduce(whole, group=self._replicas[parameter])
        return whole

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        """Give the parameter, and its float32 master where there is one, the values of ``weight`` (float32, whole)."""
        parameter.copy_(weight)
        held = self._held(parameter)
        if held is not None:
            main, interval, _ = held
            main.copy_(weight.flatten()[interval].view_as(main))

    @torch.no_grad()
    def set_moments(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: int) -> None:
        """Give AdamW its moments (float32, whole) and the number of updates that they are the result of."""
        held = self._held(parameter)
        if held is None:
            return
        main, interval, adam = held
        state: dict[str, Any] = adam.state[main]
        state["step"] = torch.tensor(float(step))
        for key, value in moments.items():
            state[key] = value.flatten()[interval].view_as(main).to(main.device, copy=True)

    def tensors(self) -> list[Tensor]:
        """Master weights that are not the model's own parameters, and moments."""
        adams = [one.optimizer for one in self._optimizers]
        groups = [group for adam in adams for group in adam.param_groups]
        masters = [main for group in groups for main in group["params"] if main.dtype is torch.float32]
        states = [state for adam in adams for state in adam.state.values()]
        return masters + [value for state in states for key, value in state.items() if key in MOMENTS]

    def _held(self, parameter: nn.Parameter) -> tuple[Tensor, slice, torch.optim.Optimizer] | None:
        """The float32 tensor that an optimizer updates, its interval in the flattened parameter, and that optimizer."""
        if not parameter.requires_grad:
            return None
        if self._is_distributed:
            for one in self._optimizers:
                place = one.model_param_group_index_map.get(parameter)
                if place is not None:
                    group, order = place
                    interval = one._get_model_param_range_map(parameter)["param"]
                    main = one.optimizer.param_groups[group]["params"][order]
                    return main, slice(interval.start, interval.end), one.optimizer
            return None
        main = getattr(parameter, "main_param", parameter)
        return main, slice(0, parameter.numel()), self._adams[id(main)]


_FOLDER = "model_and_optimizer"
_KINDS = ("weight", *MOMENTS)


def save_states(
    path: Path,
    parameters: list[OwnParameter],
    masters: MasterStates,
    info: RankInfo,
    contents: ModelContents,
    state: dict[str, Any],
) -> None:
    """Collective. Write weights, moments, ``state`` (JSON values) and RNG states."""
    folder = path / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Tensor]] = {}
    if info.dp_rank == 0 and info.cp_rank == 0:
        files[f"stage{info.pp_rank:03d}_tensor{info.tp_rank:03d}"] = {}
    for own in parameters:
        for kind in _KINDS if own.parameter.requires_grad else ():
            whole = masters.get(own.parameter, kind)
            if not own.replicas.rank() and not own.correspondence.is_copy:
                files.setdefault(_file_of(own, info), {})[f"{kind}/{own.correspondence.name}"] = whole.cpu()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    save_trainer_state(path, contents, {**state, "updates": masters.step})


def _file_of(own: OwnParameter, info: RankInfo) -> str:
    """Name of the file for this rank's part of a parameter."""
    if not own.correspondence.of_expert or getattr(own.parameter, "allreduce", True):
        return f"stage{info.pp_rank:03d}_tensor{info.tp_rank:03d}"
    expert = parallel_state.get_expert_model_parallel_rank()
    return f"stage{info.pp_rank:03d}_experts{expert:03d}_tensor{own.shards.rank():03d}"


def load_states(
    path: Path, parameters: list[OwnParameter], masters: MasterStates, contents: ModelContents
) -> dict[str, Any]:
    """Collective. Put back what :func:`save_states` wrote, under any parallel sizes; returns its ``state``.

    Frozen parameters are not in a checkpoint: they are as the model folder has them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: something of it would be left behind by a model with ``contents``.
        CheckpointDamagedError: the files lack something that it should have.
    """
    state = load_trainer_state(path, contents)
    with _open(path / _FOLDER) as files:
        for own in parameters:
            if own.parameter.requires_grad:
                _load_parameter(own, masters, files, state)
    restore_rng_states(path, state)
    return state


def _load_parameter(
    own: OwnParameter, masters: MasterStates, files: dict[str, list[Any]], state: dict[str, Any]
) -> None:
    values = {}
    for kind in _KINDS:
        key = f"{kind}/{_ORIGINALS[own.correspondence.name] if own.correspondence.is_copy else own.correspondence.name}"
        if key not in files:
            raise CheckpointDamagedError(f"the checkpoint's files have no {key}")
        rank, size = own.shards.rank(), own.shards.size()
        if len(files[key]) == size:
            values[kind] = files[key][rank].get_tensor(key)
        else:
            whole = own.correspondence.layout.join([file.get_tensor(key) for file in files[key]])
            values[kind] = own.correspondence.layout.split(whole, rank, size)
    masters.set_weight(own.parameter, values.pop("weight").to(own.parameter.device))
    if state["updates"]:
        moments = {kind: value.to(own.parameter.device) for kind, value in values.items()}
        masters.set_moments(own.parameter, moments, state["updates"])


_ORIGINALS = {"output_layer.weight": "embedding.word_embeddings.weight"}


@contextmanager
def _open(folder: Path) -> Iterator[dict[str, list[Any]]]:
    """For each key, the opened files that hold its parts, by tensor-parallel rank."""
    with ExitStack() as stack:
        by_key: dict[str, list[Any]] = {}
        for name in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                by_key.setdefault(key, []).append(file)
        yield by_key
