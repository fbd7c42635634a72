"""Work of ranks in the tests of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from roll.config.roles import WorkerConfig
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.base import ModelHead, Output
from roll.strategies.deepspeed import DeepSpeedStrategy
from roll.strategies.factory import create_strategy
from tests.strategies.samples import TensorBatch, policy_loss, value_loss
from tests.strategies.sharded_cases import POLICY, poisoned, weights_of
from tests.strategies.sharded_cases import forward as fsdp2_forward


class RecordingStrategy(DeepSpeedStrategy):
    """Keeps the whole gradient of each optimizer step, gathered before it is clipped."""

    gradients: dict[str, torch.Tensor]

    def _clip_and_step(self, learning_rate: float) -> float:
        from deepspeed.utils import safe_get_full_grad

        named = [(name, p) for name, p in self.model.language_model.named_parameters() if p.requires_grad]
        self.gradients = {name: safe_get_full_grad(parameter).float().clone() for name, parameter in named}
        return super()._clip_and_step(learning_rate)


def trainer(role: WorkerConfig) -> RecordingStrategy:
    strategy = RecordingStrategy(role)
    strategy.initialize(num_training_steps=10)
    return strategy


def train(
    role: WorkerConfig, batch: TensorBatch, steps: int = 1, max_grad_norm: float | None = None, value: bool = False
) -> dict[str, Any]:
    """``steps`` optimizer steps; the metrics, gradients and outputs before the last one, and the weights after it."""
    head = ModelHead.VALUE if value else ModelHead.CAUSAL_LM
    outputs = (Output.VALUES,) if value else POLICY
    strategy = RecordingStrategy(role, head, max_grad_norm=max_grad_norm)
    strategy.initialize(num_training_steps=10)
    for _ in range(steps):
        before = strategy.forward(batch, outputs)
        metrics = strategy.train_step(batch, value_loss if value else policy_loss, outputs)
    return {
        "metrics": to_floats(metrics),
        "gradients": strategy.gradients,
        "outputs": before,
        "weights": weights_of(strategy),
        "masters": masters_of(strategy),
        "plan": strategy.plan,
        "offloads": (strategy.engine.zero_use_cpu_optimizer(), strategy.engine.zero_offload_param() is not None),
        "partitioned": any(p.numel() == 0 for p in strategy.model.parameters()),
    }


def masters_of(strategy: DeepSpeedStrategy) -> dict[str, torch.Tensor]:
    """The optimizer's own float32 weights, whole."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = strategy.model.language_model.named_parameters()
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    if strategy.plan.stage > 0:
        return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in trained.items()}
    masters = plain_masters(strategy)
    return {name: masters[id(parameter)].detach().clone() for name, parameter in trained.items()}


def plain_masters(strategy: DeepSpeedStrategy) -> dict[int, torch.Tensor]:
    """ZeRO-0's float32 weights by the id of the parameter: in float32 the parameters themselves."""
    optimizer = strategy.engine.optimizer
    if optimizer is strategy.engine.basic_optimizer:
        return {id(parameter): parameter for parameter in strategy.model.parameters()}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {id(p): master for group, copies in pairs for p, master in zip(group, copies, strict=True)}


def train_and_save(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    """Train, save halfway, train on; the state at the end, and a random number drawn there."""
    torch.manual_seed(7)
    strategy = DeepSpeedStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    for step in range(2 * steps):
        if step == steps:
            strategy.save(path)
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    return state_of(strategy, metrics)


def whole_state(strategy: DeepSpeedStrategy) -> dict[str, torch.Tensor]:
    """Master weights and moments by parameter, whole, and AdamW's step count."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    named = dict(strategy.model.language_model.named_parameters())
    adam, optimizer = strategy.engine.basic_optimizer, strategy.engine.optimizer
    steps = {float(state["step"]) for state in adam.state.values()}
    counts = {"steps": torch.tensor(sorted(steps)), "step": torch.tensor(float(strategy.progress.step))}
    if strategy.plan.stage == 0:
        masters, whole = plain_masters(strategy), {}
        for name, parameter in named.items():
            master = masters[id(parameter)]
            whole[name] = master.detach().clone()
            whole |= {f"{name}.{moment}": adam.state[master][moment].clone() for moment in ("exp_avg", "exp_avg_sq")}
        return whole | counts
    if strategy.plan.stage < 3:
        # DeepSpeed links parameters to their moments when the first of its groups has stepped, and then never again.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    state: dict[str, torch.Tensor] = {}
    for name, parameter in named.items():
        state[name] = safe_get_full_fp32_param(parameter).clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{moment}"] = safe_get_full_optimizer_state(parameter, moment).clone()
    return state | counts


def between_stages(roles: dict[str, WorkerConfig], batch: TensorBatch, path: Path) -> dict[tuple[str, str], Any]:
    """Two steps and a checkpoint under each role, loaded under every role: states and weights by writer and reader;
    the writer's own under its name twice, before it is saved."""
    results: dict[tuple[str, str], Any] = {}
    for name, role in roles.items():
        strategy = started(role)
        for _ in range(2):
            strategy.train_step(batch, policy_loss, POLICY)
        results[name, name] = {"state": whole_state(strategy), "weights": weights_of(strategy)}
        strategy.save(path / name)
    for reader, role in roles.items():
        for writer in roles:
            if writer != reader:
                strategy = started(role)
                strategy.load(path / writer)
                results[writer, reader] = {"state": whole_state(strategy), "weights": weights_of(strategy)}
                metrics = to_floats(strategy.train_step(batch, policy_loss, POLICY))
                assert 0 < metrics["grad_norm"] < 1e3 and strategy.progress.step == 3
    return results


def started(role: WorkerConfig) -> DeepSpeedStrategy:
    strategy = DeepSpeedStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    return strategy


def train_save_and_show(role: WorkerConfig, batch: TensorBatch, path: Path, after: TensorBatch) -> dict[str, Any]:
    """Two steps, a checkpoint, and one more step: the state at the checkpoint, and the weights at the end."""
    strategy = DeepSpeedStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    for _ in range(2):
        strategy.train_step(batch, policy_loss, POLICY)
    strategy.save(path)
    saved = whole_state(strategy)
    strategy.train_step(after, policy_loss, POLICY)
    return {"state": saved, "weights": weights_of(strategy)}


def load_and_show(role: WorkerConfig, batch: TensorBatch, path: Path) -> dict[str, Any]:
    """The state that a checkpoint gives, the log-probs under it, and the weights after one more step."""
    strategy = DeepSpeedStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    strategy.load(path)
    loaded = whole_state(strategy)
    strategy.train_step(batch, policy_loss, POLICY)
    return {"state": loaded, "weights": weights_of(strategy)}


def load_and_train(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    strategy.load(path)
    for _ in range(steps):
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    return state_of(strategy, metrics)


def _optimizer_shards(strategy: DeepSpeedStrategy) -> dict[str, torch.Tensor]:
    """This rank's part of float32 weights, moments and Adam's step counts."""
    shards = {}
    for index, (master, state) in enumerate(strategy.engine.basic_optimizer.state.items()):
        shards |= {f"{index}.{key}": value.clone() for key, value in state.items()}
        shards[f"{index}.weights"] = master.detach().clone()
    return shards


def state_of(strategy: DeepSpeedStrategy, metrics: Metrics) -> dict[str, Any]:
    return {
        "metrics": to_floats(metrics),
        "weights": weights_of(strategy),
        "optimizer": _optimizer_shards(strategy),
        "step": strategy.progress.step,
        "random": torch.rand(4),
    }


def train_each(
    roles: dict[str, WorkerConfig], batch: TensorBatch, steps: int = 1, value: bool = False
) -> dict[str, dict[str, Any]]:
    return {name: train(role, batch, steps, value=value) for name, role in roles.items()}


def poison_each(roles: dict[str, WorkerConfig], batch: TensorBatch) -> dict[str, dict[str, Any]]:
    return {name: _poison(role, batch) for name, role in roles.items()}


def _poison(role: WorkerConfig, batch: TensorBatch) -> dict[str, Any]:
    """A step whose gradient is infinite on one rank only, then a good one."""
    strategy = DeepSpeedStrategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10)
    return poisoned(strategy, batch)


def forward_each(roles: dict[str, WorkerConfig], batch: TensorBatch) -> dict[str, TensorBatch]:
    return {name: fsdp2_forward(role, batch) for name, role in roles.items()}


def train_and_save_each(
    roles: dict[str, WorkerConfig], batch: TensorBatch, path: Path, steps: int
) -> dict[str, dict[str, Any]]:
    return {name: train_and_save(role, batch, path / name, steps) for name, role in roles.items()}


def load_and_train_each(
    roles: dict[str, WorkerConfig], batch: TensorBatch, path: Path, steps: int
) -> dict[str, dict[str, Any]]:
    return {name: load_and_train(role, batch, path / name, steps) for name, role in roles.items()}


def buckets_each(
    roles: dict[str, WorkerConfig], bucket_bytes: int
) -> dict[str, tuple[list[dict[str, torch.Tensor]], int]]:
    """The buckets of each role, and the collectives that it took to gather them."""
    results = {}
    for name, role in roles.items():
        strategy = create_strategy(role)
        strategy.initialize(num_training_steps=2 if name.startswith("deepspeed_train") else 0)
        with _counted(torch.distributed, "batch_isend_irecv") as calls:
            buckets = [
                {key: tensor.clone() for key, tensor in bucket} for bucket in strategy.named_full_weights(bucket_bytes)
            ]
        results[name] = buckets, len(calls)
    return results


def count_gathers_each(roles: dict[str, WorkerConfig], batch: TensorBatch) -> dict[str, int]:
    """Gathers of a forward pass of one micro-batch (the second one: DeepSpeed has seen the order of modules then)."""
    from deepspeed.runtime.zero import partition_parameters

    results = {}
    for name, role in roles.items():
        strategy = create_strategy(role)
        strategy.initialize()
        strategy.forward(batch, POLICY)
        with _counted(partition_parameters, "_dist_allgather_fn") as calls:
            strategy.forward(batch, POLICY)
        results[name] = len(calls)
    return results


@contextmanager
def _counted(module: Any, name: str) -> Iterator[list[str]]:
    """Calls of a function of a module."""
    original, calls = getattr(module, name), []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return original(*args, **options)

    setattr(module, name, counting)
    try:
        yield calls
    finally:
        setattr(module, name, original)


def export(role: WorkerConfig, path: Path) -> None:
    strategy = create_strategy(role)
    strategy.initialize(num_training_steps=2)
    strategy.save_hf(path)


def loaded_and_left(role: WorkerConfig) -> tuple[int, int]:
    """Bytes of weights that were read, and of those still there when DeepSpeed has put them into its flat tensor."""
    strategy = DeepSpeedStrategy(role)
    read: dict[int, tuple[StorageWeakRef, int]] = {}
    left: list[int] = []
    start, following = strategy._start_engine, strategy._watch_balance

    def noting(*args: Any, **options: Any) -> Any:
        for parameter in strategy.model.parameters():
            storage = parameter.data.untyped_storage()
            read[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return start(*args, **options)

    def counting() -> None:
        left.append(sum(size for reference, size in read.values() if not reference.expired()))
        following()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "_start_engine", noting)
        patch.setattr(strategy, "_watch_balance", counting)
        strategy.initialize(num_training_steps=1)
    return sum(size for _, size in read.values()), left[0]
