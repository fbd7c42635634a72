"""A DeepSpeed checkpoint on another number of ranks: every parameter's state is put together and cut anew.

DeepSpeed's own converter takes the files of all ranks apart into one file a parameter (master weights and moments,
whole); rank 0 runs it into a folder of its own host and hands the tensors round.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.strategies.deepspeed.partitions import is_partitioned, set_optimizer_part

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_resharded(folder: Path, engine: Any) -> None:
    """Collective. Fill master weights, moments and parameters from what other ranks wrote.

    Args:
        folder: DeepSpeed's own checkpoint, of the same ZeRO stage.
    """
    masters = _masters(engine)
    for master in masters:
        state = engine.basic_optimizer.state[master]
        if not state:
            # As AdamW makes them in its first step.
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state |= {name: torch.zeros_like(master) for name in MOMENTS}
    if engine.zero_optimization_stage() < 3:
        # DeepSpeed does this after its first step: parameters find their moments from now on.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    named = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    steps = torch.zeros((), device=engine.device)
    with TemporaryDirectory() as whole:
        if dist.get_rank() == 0:
            _convert(folder, Path(whole))
            steps += _steps(folder)
        dist.broadcast(steps, src=0)
        for parameter, key, tensor in _whole_tensors(Path(whole), named, engine.device):
            set_optimizer_part(parameter, tensor, key)
    for master in masters:
        engine.basic_optimizer.state[master]["step"].fill_(float(steps))


def _masters(engine: Any) -> list[Tensor]:
    """The float32 tensors that the optimizer updates."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [master for group in engine.basic_optimizer.param_groups for master in group["params"]]


def _convert(folder: Path, whole: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    arguments = Namespace(
        input_folder=str(folder),
        output_folder=str(whole),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main(arguments)


def _steps(folder: Path) -> float:
    """AdamW's count of updates, the same for all parameters."""
    files = sorted(folder.glob("*_optim_states.pt"))
    states = torch.load(files[0], map_location="cpu", weights_only=False)["optimizer_state_dict"]
    for section in ("base_optimizer_state", "optimizer_state_dict"):
        if section in states:
            return float(next(iter(states[section]["state"].values()))["step"])
    raise ValueError(f"{files[0]} holds no optimizer state")


def _whole_tensors(
    whole: Path, named: list[tuple[str, Any]], device: torch.device
) -> Iterator[tuple[Any, str | None, Tensor]]:
    """Collective. Parameter, ``None`` for its master weights or the name of a moment, and the tensor on every rank."""
    for name, parameter in named:
        shape = parameter.ds_shape if is_partitioned(parameter) else parameter.shape
        for key in (None, *MOMENTS):
            tensor = torch.empty(shape, dtype=torch.float32, device=device)
            if dist.get_rank() == 0:
                file = whole / "zero" / name / f"{key or 'fp32'}.pt"
                written = torch.load(file, map_location="cpu", weights_only=True)
                # Stages 1 and 2 are written with a description beside the tensor.
                tensor.copy_((written["param"] if isinstance(written, dict) else written).view(shape))
            dist.broadcast(tensor, src=0)
            yield parameter, key, tensor
