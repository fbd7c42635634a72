"""Work of the ranks of a pool in the tests of checkpoints that another strategy goes on from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from roll.checkpoint.contents import read_trainer_state
from roll.checkpoint.tensors import MOMENTS, WEIGHT, stored_tensors
from roll.config.roles import WorkerConfig
from roll.strategies.factory import create_strategy
from tests.strategies.samples import TensorBatch, policy_loss
from tests.strategies.sharded_cases import POLICY, weights_of

STEPS = 2


def started(role: WorkerConfig) -> Any:
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()  # a process has one such strategy at a time
    strategy = create_strategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    return strategy


def own_rows(strategy: Any, batch: TensorBatch) -> TensorBatch:
    info = strategy.rank_info
    return {name: column.chunk(info.dp_size)[info.dp_rank] for name, column in batch.items()}


def learn(strategy: Any, batch: TensorBatch) -> None:
    for _ in range(STEPS):
        strategy.train_step(own_rows(strategy, batch), policy_loss, POLICY)


def write(roles: dict[str, WorkerConfig], batch: TensorBatch, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Under each role some steps, a checkpoint, and as many steps again; the weights then, by role."""
    ends = {}
    for name, role in roles.items():
        strategy = started(role)
        learn(strategy, batch)
        strategy.save(folder / name)
        strategy.saved()
        learn(strategy, batch)
        ends[name] = weights_of(strategy)
    return ends


def go_on(
    role: WorkerConfig, batch: TensorBatch, folder: Path, writers: list[str], again: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """From each writer's checkpoint: what was loaded is saved again, then the steps that the writer went on with; the
    weights then, by writer."""
    ends = {}
    for writer in writers:
        strategy = started(role)
        strategy.load(folder / writer)
        strategy.save(again / writer)
        strategy.saved()
        learn(strategy, batch)
        ends[writer] = weights_of(strategy)
    return ends


def contents_of(path: Path) -> dict[str, torch.Tensor]:
    """Every weight and moment of a role's checkpoint, whole, and the number of updates of each."""
    state = read_trainer_state(path)
    found = {}
    with stored_tensors(path) as stored:
        for name, shape in state["model"]["trained"].items():
            size = torch.Size(shape).numel()
            for kind in (WEIGHT, *MOMENTS):
                found[f"{kind}/{name}"] = stored.read(kind, name, 0, size).view(shape)
            found[f"updates/{name}"] = torch.tensor(stored.updates(name))
    return found
