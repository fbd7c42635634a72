"""Updates of a LoRA policy's adapter alone, for every engine that is an optional package; in the engine's process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from roll.models.lora import DOWN_PART, UP_PART, merged_weight
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationRequest
from roll.weight_sync.encoding import SyncReport, Update, WeightSyncError
from roll.weight_sync.sender import WeightSender
from tests.strategies.engine_cases import Advance, log_prob_gap
from tests.strategies.engine_models import jolt, load
from tests.strategies.hf_infer import helpers
from tests.weight_sync.local_engines import LocalEngines, local_sender

TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")  # parts of fused layers, and one that is cut by columns
WEIGHTS = tuple(f"{target}.weight" for target in TARGETS)
RANK, SCALING = 3, 1.5


class Policy:
    """A base model with an adapter, and the model that both make."""

    def __init__(self, folder: Path) -> None:
        self.base = load(folder)
        jolt(self.base, 1)
        self.weights = dict(self.base.named_parameters())
        self.scalings = {name: SCALING for name in self.weights if name.endswith(WEIGHTS)}
        self.adapter: dict[str, torch.Tensor] = {}

    def train(self, seed: int) -> None:
        """Another adapter."""
        generator = torch.Generator().manual_seed(seed)
        for name in self.scalings:
            rows, columns = self.weights[name].shape
            self.adapter[name + DOWN_PART] = 0.2 * torch.randn(RANK, columns, generator=generator)
            self.adapter[name + UP_PART] = 0.2 * torch.randn(rows, RANK, generator=generator)

    @property
    def merged(self) -> Any:
        model = copy.deepcopy(self.base)
        for name, scaling in self.scalings.items():
            down, up = self.adapter[name + DOWN_PART], self.adapter[name + UP_PART]
            model.get_parameter(name).copy_(merged_weight(self.weights[name], down, up, scaling))
        return model

    def buckets(self, with_base: bool, size: int = 3) -> list[list[tuple[str, torch.Tensor]]]:
        tensors = list((self.weights | self.adapter if with_base else self.adapter).items())
        return [tensors[begin : begin + size] for begin in range(0, len(tensors), size)]


class World:
    """One engine and the sender of its weights."""

    def __init__(self, engine: GenerationStrategy, policy: Policy, folder: Path) -> None:
        self.engine, self.policy = engine, policy
        self.engines = LocalEngines([engine])
        self.sender = WeightSender(local_sender("object_store", folder))

    def send(self, version: int) -> SyncReport:
        base = version - 1 if version > 1 else None
        update = Update(version, 60, base, self.policy.scalings)
        return self.sender.send(self.policy.buckets(base is None), self.engines, update)

    def complaint(self, version: int) -> str:
        try:
            self.send(version)
        except WeightSyncError as error:
            return str(error)
        return ""


def adapters_alone(world: World, folder: Path) -> dict[str, Any]:
    """The base once, then adapters alone: samples compared with those of the merged model, before and after."""
    policy, prompts = world.policy, helpers.random_prompts([5, 33, 60], seed=4)
    requests = [GenerationRequest(str(i), prompt, helpers.greedy(16)) for i, prompt in enumerate(prompts)]
    found: dict[str, Any] = {"same": [], "gaps": [], "sent": []}
    plain = load(folder)
    for version in range(4):
        if version:
            policy.train(version)
            report = world.send(version)
            found["sent"].append((report.num_tensors, report.num_bytes))
        outputs, model = helpers.run(world.engine, requests), policy.merged if version else plain
        for i, prompt in enumerate(prompts):
            sample = outputs[str(i), 0]
            found["same"].append(sample.token_ids == helpers.generate_greedy(model, prompt, 16))
            found["gaps"].append(log_prob_gap(model, prompt, sample.token_ids, sample.log_probs))
    found["adapter bytes"] = sum(tensor.nbytes for tensor in policy.adapter.values())
    return found


def in_flight(world: World, advance: Advance) -> tuple[int, bool]:
    """A sample that is half done when a new adapter arrives: where it changed, and whether it went on as the new
    policy does."""
    (prompt,) = helpers.random_prompts([33], seed=4)
    world.engine.add_requests([GenerationRequest("r", prompt, helpers.greedy(30, min_new_tokens=30))])
    advance(world.engine, ["r"])
    world.policy.train(4)
    world.send(4)
    outputs = helpers.run_out(world.engine)
    (_, _, split), _ = outputs[0].weight_versions
    tokens = outputs[0].token_ids
    rest = helpers.generate_greedy(world.policy.merged, prompt + tokens[:split], 30 - split, min_new_tokens=30 - split)
    return split, tokens[split:] == rest


def spoilt_on_the_way(world: World) -> str:
    """The message of an update in which an element of A changed."""
    receiver = world.engines.receivers[0]
    whole_tensors, spoilt = receiver._whole_tensors, next(iter(world.policy.scalings)) + DOWN_PART
    receiver._whole_tensors = lambda tensors: whole_tensors(
        {key: tensor + 1e-3 * (key == spoilt) for key, tensor in tensors.items()}
    )
    message = world.complaint(5)
    receiver._whole_tensors = whole_tensors
    return message
