"""Rewards computed elsewhere: by a service over HTTP (format: docs/rewards.md) or by the role reward_model."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.config.losses import SCORE_INPUT_DEFAULT, SCORE_MEAN, SCORE_STD, ScoreInput
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure
from roll.rewards.http_client import JsonClient, Reply, ServiceOptions, ServiceRule

MAX_SHOWN = 500  # characters of a service's words in an error


@dataclass
class HttpReward(ServiceOptions, ServiceRule):
    """Asks a service for the scores of up to ``batch_size`` samples at a time."""

    url: str = ""  # address that samples are posted to
    api_key_env: str = ""  # environment variable with the token that is sent as `Authorization: Bearer ...`
    batch_size: int = 64  # most samples of one request
    columns: list[str] | None = None  # columns of the data row that are sent; null: all
    options: dict[str, Any] = field(default_factory=dict)  # sent along with every request, for the service

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RewardOptionError(
                f"url = {self.url!r}: must be the service's address, as http://127.0.0.1:9000/score"
            )
        if self.batch_size < 1:
            raise RewardOptionError(f"batch_size = {self.batch_size}: must be at least 1")
        if self.api_key_env and self.api_key_env not in os.environ:
            raise RewardOptionError(f"api_key_env = {self.api_key_env!r}: no such variable in the environment")
        self._client = JsonClient(self.url, self, os.environ.get(self.api_key_env, ""))

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        names = ("prompt", "response", "ground_truth", "finish_reason")
        contents = []
        for sample in samples:
            row = sample.row if self.columns is None else {name: sample.row.get(name) for name in self.columns}
            content = {name: getattr(sample, name) for name in names} | {"row": row}
            # Arrays become lists; what else JSON does not know becomes its text.
            plain = json.dumps(content, default=lambda one: one.tolist() if hasattr(one, "tolist") else str(one))
            contents.append(json.loads(plain))
        batches = [contents[begin : begin + self.batch_size] for begin in range(0, len(contents), self.batch_size)]
        replies = self._client.post([{"samples": batch, "options": self.options} for batch in batches])
        return [result for batch, reply in zip(batches, replies, strict=True) for result in read(reply, len(batch))]


def read(reply: Reply, count: int) -> list[RewardResult]:
    """The results of one request's ``count`` samples; all of them fail where the answer as a whole cannot be used."""
    if reply.error is not None:
        return [failure(f"http_reward: {reply.error}")] * count
    results = reply.body.get("results") if isinstance(reply.body, Mapping) else None
    if not isinstance(results, list) or len(results) != count:
        found = f"{len(results)}" if isinstance(results, list) else "no list"
        return [failure(f"http_reward: the answer must have a list 'results' of {count}; it has {found}")] * count
    return [_read_one(result) for result in results]


def _read_one(result: object) -> RewardResult:
    """A number, or an object with ``score`` and perhaps ``metrics``, or with ``error``."""
    entry = result if isinstance(result, Mapping) else {"score": result}
    if entry.get("error") is not None:
        return failure(f"http_reward: {str(entry['error'])[:MAX_SHOWN]}")
    metrics = entry.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        return failure(f"http_reward: metrics must be an object, not {type(metrics).__name__}")
    numbers = {"score": entry.get("score"), **metrics}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return failure(f"http_reward: {name} must be a finite number, not {repr(value)[:MAX_SHOWN]}")
    score = float(numbers.pop("score"))
    return RewardResult(score, {name: float(value) for name, value in numbers.items()})


@dataclass
class RewardModelScore(RewardRule):
    """``scale * raw + shift``, perhaps squashed; ``raw`` is what a sequence-classification model with one label says.

    The model is computed before this rule is called (:mod:`roll.rollout.rewarding`).
    """

    numbers: ClassVar[tuple[str, ...]] = ("raw",)
    input: ScoreInput = SCORE_INPUT_DEFAULT
    """``chat``: the row's messages and the response through the reward model's own tokenizer and chat template;
    ``tokens``: the tokens of prompt and response as the policy has them, for a model with the same vocabulary."""
    scale: float = 1.0
    shift: float = 0.0
    squash: Literal["none", "sigmoid", "tanh"] = "none"  # applied last; `sigmoid` gives 0..1
    normalize: bool = False
    """Subtract the mean and divide by the standard deviation that the ``rm`` pipeline saved with the model."""
    clip: float | None = None  # raw scores (normalised, if they are) are clipped to plus and minus this

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise RewardOptionError(f"clip = {self.clip}: must be greater than 0, or null for none")

    def judge(self, sample: RewardSample) -> RewardResult:
        given = sample.model_result
        if given is None:
            return failure("reward_model: the sample was not given to the role reward_model")
        if given.score is None:
            return failure(f"reward_model: {given.error}")
        raw = given.score
        if not math.isfinite(raw):
            return failure(f"reward_model: the model's score is {raw}")
        value = raw
        if self.normalize:
            if SCORE_STD not in given.metrics:
                return failure(f"reward_model: normalize is set, and the model's config.json has no {SCORE_STD}")
            value = (raw - given.metrics[SCORE_MEAN]) / given.metrics[SCORE_STD]
        value = value if self.clip is None else max(-self.clip, min(self.clip, value))
        value = self.scale * value + self.shift
        if self.squash == "sigmoid":
            # By tanh: math.exp(-value) overflows for raw scores below -709.
            value = 0.5 * (1.0 + math.tanh(value / 2.0))
        elif self.squash == "tanh":
            value = math.tanh(value)
        return RewardResult(value, {"raw": raw})
