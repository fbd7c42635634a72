"""Work of the ranks of a pool, under any training or forward-only strategy. Importing it registers the model with
separate experts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from roll.config.roles import WorkerConfig
from roll.models import kernels
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.base import ModelHead, Output, create_strategy
from roll.strategies.fsdp.fsdp1 import clean_name
from roll.strategies.training import data_parallel, micro_batches
from roll.strategies.training.optimizer import local_tensor
from tests.strategies.moe_models import register_separate
from tests.strategies.samples import TensorBatch, policy_loss, value_loss

register_separate()
kernels.BACKEND = "aot_eager"  # what is compiled runs by torch's own operations, without minutes of a compiler for C++

POLICY = (Output.LOG_PROBS, Output.ENTROPY, Output.SUM_OF_SQUARES)


def new_strategy(role: WorkerConfig, value: bool = False, max_grad_norm: float | None = None) -> Any:
    """The strategy of ``role``, not yet initialised."""
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()  # it keeps one strategy's groups in global variables
    head = ModelHead.VALUE if value else ModelHead.CAUSAL_LM
    return create_strategy(role, head, max_grad_norm=max_grad_norm)


def started(role: WorkerConfig, steps: int = 0, value: bool = False, max_grad_norm: float | None = None) -> Any:
    """The strategy of ``role``, ready for ``steps`` optimizer steps (0: for forward passes only)."""
    strategy = new_strategy(role, value, max_grad_norm)
    strategy.initialize(num_training_steps=steps)
    return strategy


def trainer(role: WorkerConfig, value: bool = False, max_grad_norm: float | None = None) -> Any:
    """The training strategy of ``role``, which keeps the whole gradient of each step as it is before clipping."""
    strategy = new_strategy(role, value, max_grad_norm)
    step = strategy.optimizer_step

    def recording() -> Any:
        strategy.gradients = whole_gradients(strategy)
        return step()

    strategy.optimizer_step = recording
    strategy.initialize(num_training_steps=10)
    return strategy


def whole_gradients(strategy: Any) -> dict[str, torch.Tensor]:
    """Whole gradients by Hugging Face name; under Megatron on rank 0 only, elsewhere none."""
    if hasattr(strategy, "masters"):
        strategy.optimizer.prepare_grads()
        return whole_parameters(strategy, lambda own: _megatron_gradient(strategy, own))
    named = strategy.model.language_model.named_parameters()
    trained = {clean_name(name): parameter for name, parameter in named if parameter.requires_grad}
    if hasattr(strategy, "engine"):
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(parameter).float().clone() for name, parameter in trained.items()}
    return {name: _whole(strategy, parameter, parameter.grad) for name, parameter in trained.items()}


def _whole(strategy: Any, parameter: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    """The whole of a tensor like ``parameter`` under FSDP, of which ``local`` is this rank's part (None: no part)."""
    pieces = getattr(strategy, "_pieces", {}).get(parameter)
    if pieces is None:
        assert local is not None
        # Experts that are divided over ranks: of all of them.
        local = strategy._whole(local) if hasattr(strategy, "_whole") else local
        return local.full_tensor().clone() if hasattr(local, "full_tensor") else local.clone()
    group = strategy.mesh.get_group("fsdp")
    run = torch.zeros(pieces.shape.numel())
    if local is not None:
        start = sum(pieces.sizes[: dist.get_rank(group)])
        run[start : start + local.numel()] = local.flatten()
    dist.all_reduce(run, group=group)
    return run.view(pieces.shape)


def whole_parameters(strategy: Any, value: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """``value(own)`` of each trained parameter under Megatron, whole, float32, under Hugging Face names, on rank 0."""
    from roll.strategies.megatron.weights import FullWeights, OwnParameter

    tensors = []
    for own in strategy.parameters:
        if own.parameter.requires_grad:
            tensors.append(OwnParameter(own.correspondence, value(own)))
            tensors[-1].parameter.allreduce = getattr(own.parameter, "allreduce", True)
    gathered = FullWeights(tensors, strategy._info, strategy._shapes, torch.float32, strategy._stored)
    return {name: tensor.clone() for bucket in gathered.buckets(2**30) for name, tensor in bucket}


def _megatron_gradient(strategy: Any, own: Any) -> torch.Tensor:
    gradient = torch.zeros(own.parameter.shape)
    held = strategy.masters._held(own.parameter)
    if held is not None:
        main, interval, _ = held
        gradient.view(-1)[interval] = main.grad.flatten()
    if strategy.config.use_distributed_optimizer:
        dist.all_reduce(gradient, group=own.replicas)
    return gradient


def weights_of(strategy: Any, bucket_bytes: int = 2**30) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in strategy.named_full_weights(bucket_bytes) for name, tensor in bucket}


def train(
    role: WorkerConfig, batch: TensorBatch, steps: int = 1, max_grad_norm: float | None = None, value: bool = False
) -> dict[str, Any]:
    """``steps`` optimizer steps; the outputs before the first one, metrics, gradients and outputs before the last one,
    and the weights after it."""
    outputs = (Output.VALUES,) if value else POLICY
    strategy = trainer(role, value, max_grad_norm)
    history = []
    for _ in range(steps):
        history.append(strategy.forward(batch, outputs))
        metrics = strategy.train_step(batch, value_loss if value else policy_loss, outputs)
    model = getattr(strategy, "model", None)
    return {
        "metrics": to_floats(metrics),
        "gradients": strategy.gradients,
        "first_outputs": history[0],
        "outputs": history[-1],
        "weights": weights_of(strategy),
        "dtypes": {str(local_tensor(parameter).dtype) for parameter in model.parameters()} if model else None,
        "rank_info": strategy.rank_info,
        "zero": _zero_facts(strategy) if hasattr(strategy, "engine") else None,
        "replicas": float(strategy.all_reduce_sum(torch.tensor([1.0]))),
    }


def train_divided(role: WorkerConfig, batch: TensorBatch, sharing: float, *args: Any) -> dict[str, Any]:
    """:func:`train` where ranks that share a row exchange for so long; also ``plans``, the rows that each rank of a
    Ulysses group has of each micro-batch."""
    plans = []

    def recording(*arguments: Any) -> list[list[int]]:
        plans.append(micro_batches.divide(*arguments))
        return plans[-1]

    with mock.patch.object(micro_batches, "SHARING", sharing), mock.patch.object(data_parallel, "divide", recording):
        return train(role, batch, *args) | {"plans": plans}


def _zero_facts(strategy: Any) -> tuple[int, bool, bool, bool]:
    """Stage; whether the optimizer and the parameters are in host memory, and whether parameters are partitioned."""
    engine = strategy.engine
    partitioned = any(parameter.numel() == 0 for parameter in strategy.model.parameters())
    offloads_parameters = engine.zero_offload_param() is not None
    return strategy.plan.stage, engine.zero_use_cpu_optimizer(), offloads_parameters, partitioned


def graphs(role: WorkerConfig, batches: list[TensorBatch]) -> list[int]:
    """The number of compiled graphs after an optimizer step on each of the batches."""
    torch.compiler.reset()
    strategy, counted = started(role, 10), []
    torch._dynamo.utils.counters.clear()
    for batch in batches:
        strategy.train_step(batch, policy_loss, POLICY)
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counted


def forward(role: WorkerConfig, batch: TensorBatch, temperature: float = 1.0) -> TensorBatch:
    strategy = started(role)
    first = strategy.forward(batch, POLICY, temperature)
    again = strategy.forward(batch, POLICY, temperature)
    assert all(torch.equal(first[name], again[name]) for name in first)
    return first


def buckets(role: WorkerConfig, bucket_bytes: int) -> list[dict[str, torch.Tensor]]:
    strategy = started(role, 2 if role.strategy_args.strategy_name.endswith("_train") else 0)
    return [{name: tensor.clone() for name, tensor in bucket} for bucket in strategy.named_full_weights(bucket_bytes)]


def count_collectives(role: WorkerConfig, bucket_bytes: int) -> tuple[int, int]:
    """The number of buckets, and of the collectives that it took to gather them."""
    strategy = started(role, 2 if role.strategy_args.strategy_name.endswith("_train") else 0)
    with counted(dist, "batch_isend_irecv") as calls:
        num_buckets = sum(1 for _ in map(list, strategy.named_full_weights(bucket_bytes)))
    return num_buckets, len(calls)


def export(role: WorkerConfig, path: Path, value: bool = False) -> None:
    started(role, value=value).save_hf(path)


def started_with_messages(role: WorkerConfig, logger: str, **options: Any) -> tuple[Any, list[str]]:
    """The strategy, and what a logger said from INFO on while it started."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    source = logging.getLogger(logger)
    source.setLevel(logging.INFO)
    source.addHandler(handler)
    strategy = started(role, **options)
    source.removeHandler(handler)
    return strategy, messages


def train_and_save(role: WorkerConfig, batch: TensorBatch, path: Path, steps: int = 2) -> dict[str, Any]:
    """Train, save into ``path``, train on; the end, whose checkpoint goes into ``path/end``."""
    torch.manual_seed(7)
    strategy = started(role, 10, max_grad_norm=1.0)
    for step in range(2 * steps):
        if step == steps:
            strategy.save(path)
            # What happens between saving and going on must not matter.
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    assert strategy.saved() and strategy.saved(wait=False)
    return _end(strategy, metrics, path / "end")


def load_and_train(
    role: WorkerConfig, batch: TensorBatch, path: Path, steps: int = 2, out: Path | None = None
) -> dict[str, Any]:
    """The last steps of :func:`train_and_save`; what was loaded goes into ``out/loaded``, the end into
    ``out/resumed`` (``out``: ``path`` by default)."""
    strategy = started(role, 10, max_grad_norm=1.0)
    strategy.load(path)
    out = out or path
    strategy.save(out / "loaded")
    assert strategy.saved()
    for _ in range(steps):
        torch.rand(3)
        metrics = strategy.train_step(batch, policy_loss, POLICY)
    return _end(strategy, metrics, out / "resumed")


def _end(strategy: Any, metrics: Metrics, path: Path) -> dict[str, Any]:
    end = {
        "metrics": to_floats(metrics),
        "weights": weights_of(strategy),
        "step": strategy.progress.step,
        "random": torch.rand(4),
    }
    strategy.save(path)
    assert strategy.saved()
    return end


def poison(role: WorkerConfig, batch: TensorBatch) -> dict[str, Any]:
    """A step whose gradient is infinite on one rank only, then a good one."""
    strategy = trainer(role, max_grad_norm=1.0)
    before = weights_of(strategy)
    first = strategy.train_step(batch, _exploding_loss, POLICY)
    after = weights_of(strategy)
    second = strategy.train_step(batch, policy_loss, POLICY)
    return {
        "skipped": first["skipped_updates"].value() * strategy.rank_info.dp_size,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "second": to_floats(second),
        "step": strategy.progress.step,
    }


def _exploding_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = policy_loss(outputs, batch)
    return loss * (float("inf") if dist.get_rank() == 0 else 1.0), metrics


def refused(role: WorkerConfig, steps: int = 0) -> str:
    """The message of the ValueError that building the strategy raises."""
    try:
        started(role, steps)
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def count_gathers(role: WorkerConfig, batch: TensorBatch) -> int:
    """Gathers of a forward pass under ZeRO-3 (the second one: DeepSpeed has seen the order of modules then)."""
    from deepspeed.runtime.zero import partition_parameters

    strategy = started(role)
    strategy.forward(batch, POLICY)
    with counted(partition_parameters, "_dist_allgather_fn") as calls:
        strategy.forward(batch, POLICY)
    return len(calls)


def unit_gathers(role: WorkerConfig, batch: TensorBatch) -> tuple[int, list[int], dict[str, torch.Tensor]]:
    """Units of a model under FSDP2, gathers of any in each of three steps, and the weights after them."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor

    strategy, gathers = trainer(role), list[int]()
    for _ in range(3):
        with counted(FSDPParamGroup, "_to_unsharded") as calls:
            strategy.train_step(batch, policy_loss, POLICY)
        # Between steps nothing is gathered, so that no copy is older than its weights and offloading frees all.
        assert all(isinstance(parameter, DTensor) for parameter in strategy.model.parameters())
        gathers.append(len(calls))
    return sum(isinstance(module, FSDPModule) for module in strategy.model.modules()), gathers, weights_of(strategy)


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of the calls of a function of a module."""
    original, calls = getattr(module, name), []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    setattr(module, name, counting)
    try:
        yield calls
    finally:
        setattr(module, name, original)
