"""States that leave the device between the calls of a step, and come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.strategies.base import OffloadedStorages, Output, StateKind, storages_of
from roll.strategies.factory import create_strategy
from tests.strategies.samples import TensorBatch, make_batch, make_role, policy_loss, split_rows

RunRanks = Callable[..., list[Any]]
OUTPUTS = (Output.LOG_PROBS, Output.ENTROPY)
MODEL = [StateKind.MODEL_PARAMS]
TRAINING = [StateKind.MODEL_PARAMS, StateKind.OTHER_PARAMS, StateKind.OPTIMIZER_STATES]


@pytest.mark.parametrize("keep", [True, False])
def test_offloaded_storages_come_back_under_their_views(keep: bool) -> None:
    buffer = torch.arange(6.0)
    views = [buffer[:2], buffer[2:].view(2, 2)]
    offloaded = OffloadedStorages(views, keep_contents=keep)
    assert buffer.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert torch.equal(buffer, torch.arange(6.0) if keep else torch.zeros(6))
    views[1].fill_(9.0)
    assert buffer[2:].tolist() == [9.0] * 4


def train_with_moves(role: WorkerConfig, batch: TensorBatch) -> dict[str, Any]:
    """Three optimizer steps with log-probs before and weights after each; all states leave after every call, those of
    the optimizer also while gradients are computed."""
    strategy = create_strategy(role)
    strategy.offloads_optimizer_in_steps = True
    strategy.initialize(num_training_steps=3)
    held_in_steps: list[int] = []

    def loss(outputs: TensorBatch, part: TensorBatch) -> Any:
        parameters = storages_of(strategy._device_tensors(StateKind.MODEL_PARAMS))
        states = storages_of(strategy._device_tensors(StateKind.OPTIMIZER_STATES))
        held_in_steps.append(sum(one.nbytes() for key, one in states.items() if key not in parameters))
        return policy_loss(outputs, part)

    held = leave(strategy)
    outputs: list[TensorBatch] = []
    weights: dict[str, torch.Tensor] = {}
    for _ in range(3):
        strategy.load_states(MODEL)
        outputs.append(strategy.forward(batch, OUTPUTS))
        strategy.load_states(TRAINING)
        strategy.train_step(batch, loss, OUTPUTS)
        held = leave(strategy)
        strategy.load_states(MODEL)
        weights = {n: t.clone() for bucket in strategy.named_full_weights(2**30) for n, t in bucket}
        strategy.offload_states(MODEL)
    return {"outputs": outputs, "weights": weights, "held": max([held, *held_in_steps])}


def train_in_place(role: WorkerConfig, batch: TensorBatch) -> dict[str, Any]:
    strategy = create_strategy(role)
    strategy.initialize(num_training_steps=3)
    outputs = []
    for _ in range(3):
        outputs.append(strategy.forward(batch, OUTPUTS))
        strategy.train_step(batch, policy_loss, OUTPUTS)
    weights = {n: t.clone() for bucket in strategy.named_full_weights(2**30) for n, t in bucket}
    return {"outputs": outputs, "weights": weights}


def leave(strategy: Any) -> int:
    """Offload everything; bytes of parameters, gradients and optimizer states that are left."""
    tensors = [tensor for kind in TRAINING for tensor in strategy._device_tensors(kind)]
    tensors = [tensor for tensor in tensors if tensor.untyped_storage().resizable()]  # not files mapped to host memory
    strategy.offload_states(TRAINING)
    strategy.offload_states(TRAINING)  # what is away already stays as it is
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


STRATEGIES = {
    "fsdp2": ("fsdp2_train", {}),
    "fsdp2-bf16": ("fsdp2_train", {"param_dtype": "bf16"}),
    "fsdp": ("fsdp_train", {}),
    "fsdp-bf16": ("fsdp_train", {"param_dtype": "bf16", "reshard_after_forward": False}),
    "zero0": ("deepspeed_train", {"zero_stage": 0}),
    "zero2": ("deepspeed_train", {"zero_stage": 2}),
    "zero3": ("deepspeed_train", {"zero_stage": 3, "zero_optimization": {"stage3_param_persistence_threshold": 40}}),
    "megatron": ("megatron_train", {"tensor_model_parallel_size": 2}),
    "megatron-distributed": ("megatron_train", {"use_distributed_optimizer": True}),
}
PACKAGES = {"deepspeed_train": "deepspeed", "megatron_train": "megatron"}


@pytest.mark.default_rows("fsdp2-bf16", "fsdp", "zero3", "megatron-distributed")
@pytest.mark.parametrize("name", STRATEGIES)
def test_moved_states_change_nothing(run_ranks: RunRanks, tied_model: Path, name: str) -> None:
    strategy, config = STRATEGIES[name]
    if strategy in PACKAGES and find_spec(PACKAGES[strategy]) is None:
        pytest.skip(f"{PACKAGES[strategy]} is not installed")
    role = make_role(tied_model, strategy, config=config)
    batch = make_batch()
    shares = [batch, batch] if "tensor_model_parallel_size" in config else split_rows(batch, (7, 5))
    results = run_ranks(2, train_with_moves, role, shares), run_ranks(2, train_in_place, role, shares)
    for moved, in_place in zip(*results, strict=True):
        assert moved["held"] == 0
        assert moved["weights"].keys() == in_place["weights"].keys()
        assert all(torch.equal(moved["weights"][key], tensor) for key, tensor in in_place["weights"].items())
        for got, wanted in zip(moved["outputs"], in_place["outputs"], strict=True):
            assert all(torch.equal(got[key], tensor) for key, tensor in wanted.items())


def states_around_a_failure(role: WorkerConfig, batch: TensorBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Optimizer states before a step whose loss raises, and after it."""
    strategy = create_strategy(role)
    strategy.offloads_optimizer_in_steps = True
    strategy.initialize(num_training_steps=2)
    strategy.train_step(batch, policy_loss, OUTPUTS)
    before = [state.clone() for state in strategy._device_tensors(StateKind.OPTIMIZER_STATES)]

    def failing(outputs: TensorBatch, part: TensorBatch) -> Any:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        strategy.train_step(batch, failing, OUTPUTS)
    return before, [state.clone() for state in strategy._device_tensors(StateKind.OPTIMIZER_STATES)]


def test_optimizer_states_come_back_after_a_failed_step(run_ranks: RunRanks, tied_model: Path) -> None:
    role = make_role(tied_model, "fsdp2_train")
    ((before, after),) = run_ranks(1, states_around_a_failure, role, [make_batch()])
    assert before and sum(int(state.numel()) for state in before) > 0
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
