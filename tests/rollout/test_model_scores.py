"""Samples go to the reward model first, then with its score to the workers of their domain."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from roll.config.roles import DataArguments
from roll.rewards import RewardOptionError, RewardResult, RewardSample, build_reward
from roll.rewards.base import failure
from roll.rollout.rewarding import ModelInput, ModelScorer, RewardClient, ScoringWorker
from tests.rollout.fake_clusters import FakeCall, FakeRewards, on_clock
from tests.support.sample_groups import make_group


@dataclass
class FakeModel:
    """Two ranks whose score is the last token, or the last character of the response."""

    ranks: int = 2
    seen: list[ModelInput] = field(default_factory=list)

    def call_all(self, method: Any, inputs: list[ModelInput]) -> Any:
        assert method is ScoringWorker.score
        self.seen += inputs
        shares = [(rank, [self._result(one) for one in inputs[rank :: self.ranks]]) for rank in range(self.ranks)]
        # Ranks that share sequences answer alike.
        return FakeCall(0, "score", inputs, lambda: [*reversed(shares), *shares], random.Random(1))

    def _result(self, one: ModelInput) -> RewardResult:
        if one.error is not None:
            return failure(one.error)
        return RewardResult(float(one.token_ids[-1] if one.token_ids else one.response[-1]))


def groups_of(domain: str, row: dict[str, Any] | None = None) -> list[Any]:
    groups = [make_group(i, [7, 8], [[i, 3 * i + j] for j in range(3)], domain=domain) for i in range(3)]
    for group in groups:
        group.item.row.update(row or {})
    return groups


def raw_score(sample: RewardSample) -> float:
    assert sample.model_result is not None and sample.model_result.score is not None
    return sample.model_result.score


@pytest.mark.parametrize("kind", ["tokens", "chat"])
@on_clock
async def test_the_model_is_asked_first(kind: str) -> None:
    model = FakeModel()
    scorer: Any = ModelScorer(model, {"a": kind}, [DataArguments(prompt="question")])  # type: ignore[arg-type]
    rng = random.Random(2)
    clusters: Any = {"a": FakeRewards(raw_score, world_size=2, rng=rng), "b": FakeRewards(lambda s: -1.0, rng=rng)}
    client = RewardClient(clusters, scorer)
    asked, other = groups_of("a", {"question": "why?"}), groups_of("b")
    scored = [asyncio.ensure_future(client.score(group)) for group in (*asked, *other)]
    await asyncio.sleep(0)
    assert client.num_pending == 6
    assert await asyncio.gather(*scored) == [*asked, *other]
    assert client.num_pending == 0
    for group in asked:
        assert group.scores().tolist() == [3 * group.order + j for j in range(3)]
    assert all(one.score == -1.0 for group in other for one in group.members)
    assert len(model.seen) == 9
    first = model.seen[0]
    if kind == "tokens":
        assert first.token_ids == [7, 8, 0, 0] and first.messages is None
    else:
        assert first.messages == [{"role": "user", "content": "why?"}] and first.response == "0 0"


@on_clock
async def test_a_row_without_its_messages_is_an_error_of_its_samples() -> None:
    model = FakeModel()
    scorer: Any = ModelScorer(model, {"a": "chat"}, [DataArguments(prompt="question")])  # type: ignore[arg-type]
    (group, *_) = groups_of("a")
    await scorer.score([group])
    assert all("column 'question' expected" in one.model_result.error for one in group.members)


@pytest.mark.parametrize(
    ("options", "raw", "expected"),
    [
        ({}, 2.5, 2.5),
        ({"scale": 0.5, "shift": 1.0}, 2.0, 2.0),
        ({"clip": 1.0}, -7.0, -1.0),
        ({"squash": "sigmoid"}, 0.0, 0.5),
        ({"squash": "sigmoid"}, 1.0, 0.7310586),
        ({"squash": "sigmoid"}, -2000.0, 0.0),
        ({"squash": "tanh", "scale": 2.0}, 0.5, 0.7615942),
    ],
)
def test_the_score_is_shaped(options: dict[str, Any], raw: float, expected: float) -> None:
    reward = build_reward("reward_model", options)
    (result,) = reward([RewardSample("", "", model_result=RewardResult(raw))])
    assert result.score == pytest.approx(expected)
    assert result.metrics == {"raw": raw}


def test_without_a_score_there_is_an_error() -> None:
    reward = build_reward("reward_model")
    given = (None, failure("too long"), RewardResult(float("nan")))
    results = reward([RewardSample("", "", model_result=one) for one in given])
    assert [result.score for result in results] == [None, None, None]
    assert [
        "not given" in str(results[0].error),
        "too long" in str(results[1].error),
        "nan" in str(results[2].error),
    ] == [True] * 3
    with pytest.raises(RewardOptionError, match="greater than 0"):
        build_reward("reward_model", {"clip": 0.0})
