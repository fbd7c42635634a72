"""States that leave the device between the calls of a step, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.strategies.base import OffloadedStorages, Output, StateKind, storages_of
from tests.strategies import jobs
from tests.strategies.comparison import assert_same_bits
from tests.strategies.samples import TensorBatch, policy_loss

OUTPUTS = (Output.LOG_PROBS, Output.ENTROPY)
MODEL = [StateKind.MODEL_PARAMS]
TRAINING = [StateKind.MODEL_PARAMS, StateKind.OTHER_PARAMS, StateKind.OPTIMIZER_STATES]


@pytest.mark.parametrize("keep", [True, False])
def test_offloaded_storages_come_back_under_their_views(keep):
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
    strategy = jobs.new_strategy(role)
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
        weights = jobs.weights_of(strategy)
        strategy.offload_states(MODEL)
    return {"outputs": outputs, "weights": weights, "held": max([held, *held_in_steps])}


def train_in_place(role: WorkerConfig, batch: TensorBatch) -> dict[str, Any]:
    strategy = jobs.started(role, 3)
    outputs = []
    for _ in range(3):
        outputs.append(strategy.forward(batch, OUTPUTS))
        strategy.train_step(batch, policy_loss, OUTPUTS)
    weights = jobs.weights_of(strategy)
    return {"outputs": outputs, "weights": weights}


def leave(strategy: Any) -> int:
    """Offload everything; bytes of parameters, gradients and optimizer states that are left."""
    tensors = [tensor for kind in TRAINING for tensor in strategy._device_tensors(kind)]
    tensors = [tensor for tensor in tensors if tensor.untyped_storage().resizable()]  # not files mapped to host memory
    strategy.offload_states(TRAINING)
    strategy.offload_states(TRAINING)  # what is away already stays as it is
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


STRATEGIES = {
    "fsdp2-bf16": ("fsdp2", {"param_dtype": "bf16"}),
    "fsdp-bf16": ("fsdp", {"param_dtype": "bf16", "reshard_after_forward": False}),
    **{name: (name, {}) for name in ("zero0", "zero2", "zero3")},
    "megatron-distributed": ("megatron", {"dist_opt": True}),
}


@pytest.mark.long
@pytest.mark.default_rows("zero3", "megatron-distributed")
@pytest.mark.parametrize("name", STRATEGIES)
def test_moved_states_change_nothing(run, name):
    strategy, config = STRATEGIES[name]
    results = [run(job, 2, strategy, "tied", config=config) for job in (train_with_moves, train_in_place)]
    for moved, in_place in zip(*results, strict=True):
        assert moved["held"] == 0
        assert_same_bits(moved["weights"], in_place["weights"])
        for got, wanted in zip(moved["outputs"], in_place["outputs"], strict=True):
            assert_same_bits(got, wanted)


def states_around_a_failure(role: WorkerConfig, batch: TensorBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Optimizer states before a step whose loss raises, and after it."""
    strategy = jobs.new_strategy(role)
    strategy.offloads_optimizer_in_steps = True
    strategy.initialize(num_training_steps=2)
    strategy.train_step(batch, policy_loss, OUTPUTS)
    before = [state.clone() for state in strategy._device_tensors(StateKind.OPTIMIZER_STATES)]

    def failing(outputs: TensorBatch, part: TensorBatch) -> Any:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        strategy.train_step(batch, failing, OUTPUTS)
    return before, [state.clone() for state in strategy._device_tensors(StateKind.OPTIMIZER_STATES)]


def test_optimizer_states_come_back_after_a_failed_step(run):
    ((before, after),) = run(states_around_a_failure, 1, "fsdp2", "tied")
    assert before and sum(int(state.numel()) for state in before) > 0
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
