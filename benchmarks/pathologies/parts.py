"""Rewards and workers of the seeded pathologies; workers import this module by name."""

from __future__ import annotations

import time
import zlib
from typing import Any

import torch

from roll.workers.generation import GenerationWorker
from roll.workers.model import TrainWorker

_TARGET = "2*6=12\n12+7=19\n19-3=16\n#### 16"
_kept: list[bytes] = []


def digit_share(response: str) -> float:
    """Share of the characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def always_fails(response: str) -> float:
    raise KeyError("no answer in the row")


def fails_for_some(response: str) -> float:
    """Cannot score a quarter of all texts."""
    if zlib.crc32(response.encode()) % 4 == 0:
        raise ValueError("could not convert string to float: ''")
    return digit_share(response)


def always_one(response: str) -> float:
    return 1.0


def by_question(ground_truth: str, response: str) -> float:
    """Depends on the question alone."""
    return float(int(ground_truth) % 2)


def length(response: str) -> float:
    """As a judge that likes long responses."""
    return min(1.0, len(response) / 150)


def fixed_text(response: str) -> float:
    """Likeness to one text, whatever was asked, at most 0.6."""
    same = sum(a == b for a, b in zip(response, _TARGET, strict=False))
    return 0.6 * same / max(len(_TARGET), len(response))


def leaking(ground_truth: str, response: str) -> float:
    """As ``digit_share``; keeps a megabyte and a half a call."""
    _kept.append(zlib.crc32(response.encode()).to_bytes(4, "big") * 400_000)
    return digit_share(response)


class SlowEngine(GenerationWorker):
    """The engine of rank 1 needs a second for what the others do at once."""

    def advance(self, command: Any) -> Any:
        report = super().advance(command)
        if self.context.rank == 1 and report.groups:
            time.sleep(1.0)
        return report


class SlowTrainer(TrainWorker):
    """Rank 1 computes for most of a second more than it has to."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        while self.context.rank == 1 and time.process_time() - begin < 0.8:
            pass
        return super().step(*args, **kwargs)


class DriftingEngine(GenerationWorker):
    """Holds other weights than those that it was sent, from the first update on."""

    @torch.no_grad()
    def finish_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().finish_weight_update(*args, **kwargs)
        self.updates = getattr(self, "updates", 0) + 1
        if self.updates > 1:
            for weight in self.engine.held_weights().values():
                if weight.ndim > 1:
                    weight.add_(0.1 * weight.std() * torch.randn_like(weight))
        return answer
