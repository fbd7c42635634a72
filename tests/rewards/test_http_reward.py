"""The reward behind HTTP, against the example's own server and against services that fail."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.rewards import RewardSample, build_reward, failure_rates
from tests.rewards.http_service import Answer, in_turn, serving

EXAMPLE = Path(__file__).parents[2] / "examples/rewards/reward_server.py"
QUICK: dict[str, Any] = {"backoff": 0.001, "max_backoff": 0.01, "max_retries": 1}


def samples(count: int) -> list[RewardSample]:
    return [
        RewardSample(f"p{i}", f"#### {i}", str(i), row={"id": i, "array": np.arange(2), "x": object})
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def example_url() -> Iterator[str]:
    spec = importlib.util.spec_from_file_location("reward_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = ThreadingHTTPServer(("127.0.0.1", 0), module.Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.shutdown()
    server.server_close()


def test_the_example_server(example_url: str) -> None:
    reward = build_reward("http_reward", {"url": example_url, "batch_size": 3, "options": {"limit": 8}})
    wrong = RewardSample("p", "#### 5", "6")
    long = RewardSample("p", "so it is\n#### 7", "7")
    unknown = RewardSample("p", "7")
    results = reward([*samples(4), wrong, long, unknown])
    reward.close()
    assert [result.score for result in results] == [1.0] * 4 + [0.0, 0.5, None]
    assert results[5].metrics == {"right": 1.0, "too_long": 1.0}
    assert results[6].error == "http_reward: the row has no ground_truth"


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_TOKEN", "top-secret")
    with serving(lambda number, body: Answer({"results": [1] * len(body["samples"])})) as service:
        reward = build_reward("http_reward", {"url": service.url, "batch_size": 4, "api_key_env": "SCORE_TOKEN"})
        assert [result.score for result in reward(samples(10))] == [1.0] * 10
        reward.close()
        assert sorted(len(body["samples"]) for body in service.bodies) == [2, 4, 4]
        first = next(body["samples"][0] for body in service.bodies if body["samples"][0]["prompt"] == "p0")
        assert {
            "prompt": "p0",
            "response": "#### 0",
            "ground_truth": "0",
            "finish_reason": "stop",
        }.items() <= first.items()
        assert first["row"]["id"] == 0
        assert first["row"]["array"] == [0, 1]
        assert service.headers[0]["Authorization"] == "Bearer top-secret"
        chosen = build_reward("http_reward", {"url": service.url, "columns": ["id"]})
        chosen(samples(1))
        chosen.close()
        assert service.bodies[-1]["samples"][0]["row"] == {"id": 0}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer({}, 500), "status 500"),
        (Answer([1, 2]), "must have a list 'results' of 2; it has no list"),
        (Answer({"results": [1]}), "must have a list 'results' of 2; it has 1"),
        (Answer({"results": [None, "high"]}), "score must be a finite number"),
        (Answer({"results": [{"score": 1, "metrics": {"x": None}}, {"metrics": {}}]}), "must be a finite number"),
        (Answer(raw=b'{"results": [NaN, Infinity]}'), "score must be a finite number"),
        (Answer(raw=b'{"results": [1e999, ' + b"9" * 400 + b"]}"), "score must be a finite number"),
        (
            Answer({"results": [{"score": 1, "metrics": [1]}, {"score": 1, "metrics": "x"}]}),
            "metrics must be an object",
        ),
    ],
)
def test_failures_are_errors_and_never_zero(answer: Answer, words: str) -> None:
    with serving(in_turn(answer)) as service:
        reward = build_reward("http_reward", {"url": service.url, **QUICK})
        results = reward(samples(2))
        reward.close()
    assert [result.score for result in results] == [None, None]
    assert all(words in (result.error or "") for result in results)


@pytest.mark.long
def test_one_batch_fails_alone_and_a_stall_is_a_timeout() -> None:
    def answer(number: int, body: Any) -> Answer:
        stalls = body["samples"][0]["prompt"] == "p2"
        return Answer(stall=True) if stalls else Answer({"results": [0.5, {"score": 1}]})

    with serving(answer) as service:
        reward = build_reward("http_reward", {"url": service.url, "batch_size": 2, "timeout": 2.0, "max_retries": 0})
        results = reward(samples(6))
        reward.close()
    assert [result.score for result in results] == [0.5, 1.0, None, None, 0.5, 1.0]
    assert failure_rates(results[2:4]) == {"error_rate": 1.0, "timeout_rate": 1.0}
