"""Work of the ranks of a pool in the tests of weight sync from every training strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll.config.roles import StrategyArguments, WorkerConfig
from roll.strategies.base import WeightSelection, create_generation_strategy, create_strategy
from roll.strategies.hf_infer import HfInferStrategy
from roll.weight_sync.encoding import Update
from roll.weight_sync.sender import WeightSender
from tests.strategies.jobs import POLICY, weights_of
from tests.strategies.samples import TensorBatch, policy_loss
from tests.weight_sync.local_engines import LocalEngines, local_sender

BUCKET_BYTES = 2**13


def engine_for(role: WorkerConfig) -> HfInferStrategy:
    """An engine of the trainer's model, in the process of its rank 0."""
    own = StrategyArguments("hf_infer", {"max_num_seqs": 2, "max_model_len": 32, "load_format": "dummy"})
    model_args = replace(role.model_args, lora_target=None, lora_rank=None, freeze_module_prefix=None)
    engine = create_generation_strategy(WorkerConfig("actor_infer", model_args=model_args, strategy_args=own))
    assert isinstance(engine, HfInferStrategy)
    engine.initialize()
    return engine


def train_and_sync(
    role: WorkerConfig,
    batch: TensorBatch,
    folder: Path,
    updates: Sequence[tuple[str, str]],
    adapters_apart: bool = False,
) -> list[tuple[int, int]]:
    """An optimizer step before each update, which is given as transport and mode; the engine holds the trainer's
    weights after each. Every mode follows a full update.

    Returns:
        On rank 0 the tensors and bytes sent, update by update: each full one and the one that builds on it.
    """
    strategy: Any = create_strategy(role)
    strategy.initialize(num_training_steps=20)
    is_sender = dist.get_rank() == 0
    engines = LocalEngines([engine_for(role)]) if is_sender else None
    sent = []
    version = 0
    for transport, mode in updates:
        sender = WeightSender(local_sender(transport, folder), BUCKET_BYTES, delta=mode == "delta")
        for base in (None, version):
            strategy.train_step(batch, policy_loss, POLICY)
            partial = base is not None and mode != "full"
            buckets = strategy.named_full_weights(BUCKET_BYTES, WeightSelection(partial, adapters_apart))
            version += base is not None
            update = Update(
                version, 60, base if partial else None, strategy.adapter_scalings() if adapters_apart else {}
            )
            if engines is not None:
                report = sender.send(buckets, engines, update)
                sent.append((report.num_tensors, report.num_bytes))
            else:
                assert not any(buckets)
            assert_same_weights(strategy, engines)
        version += 1
    if engines is not None:
        engines.close()
    return sent


def assert_same_weights(strategy: Any, engines: LocalEngines | None) -> None:
    """Collective."""
    expected = weights_of(strategy)
    if engines is not None:
        held = engines.workers[0].held_weights()
        for name, tensor in expected.items():
            assert torch.equal(held[name], tensor), name
