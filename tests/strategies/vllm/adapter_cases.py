"""Functions that the tests of LoRA adapters run in the engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.strategies.vllm import adapter_engine_args
from tests.strategies.adapter_cases import RANK, Policy, World, adapters_alone, in_flight, spoilt_on_the_way
from tests.strategies.engine_cases import steps
from tests.strategies.vllm import cases


def adapters(folder: Path, **options: Any) -> dict[str, Any]:
    """Adapters alone, one of them in flight; then faults of the adapter and of the base."""
    with cases.engine(folder, engine_args=adapter_engine_args(RANK), **options) as started:
        world = World(started, Policy(folder), folder)
        found = adapters_alone(world, folder)
        found["in flight"] = in_flight(world, steps(10))
        found["faults"] = faults(world)
        world.engines.close()
    return found


def faults(world: World) -> list[str]:
    """Messages of updates with a changed element of A, an adapter that its layer does not get, a plain parameter and a
    packed one that changed on their own, and of one that puts the adapter right."""
    found = [spoilt_on_the_way(world)]
    if world.engine._num_ranks > 1:
        return found
    world.send(1)
    rank = world.engine._engine.model_executor.driver_worker.model_runner
    layer = next(layer for name, layer in rank.lora_manager._adapter_manager.modules.items() if "down_proj" in name)
    set_lora, layer.set_lora = layer.set_lora, lambda *arguments: None
    world.policy.train(5)
    found.append(world.complaint(2))
    layer.set_lora = set_lora
    world.send(1)
    rank.model.model.norm.weight.data[3] += 1
    found.append(world.complaint(2))
    world.send(1)
    packed = layer.base_layer.cpu_linear
    layer.base_layer.cpu_linear = lambda x, weight, bias: packed(x, weight, bias) * 1.01
    found.append(world.complaint(2))
    layer.base_layer.cpu_linear = packed
    world.send(1)
    return [*found, world.complaint(2)]
