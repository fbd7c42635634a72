"""Rewards as services, on real connections: programs run elsewhere as they would here; wrong requests are told so."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from roll.rewards import RewardOptionError, RewardSample, build_reward
from roll.rewards.service import RewardPool, RewardServer
from tests.rewards import own_rewards

RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
HALF = "```python\ndef double(x):\n    return x * x\n```"
SLOW = "```python\nimport time\ndef double(x):\n    time.sleep(60)\n```"
CASES = {"test_cases": ["assert double(2) == 4", "assert double(3) == 6"]}


@contextmanager
def service(reward: str, instances: int = 2, api_key: str = "") -> Iterator[RewardServer]:
    pool = RewardPool(reward, instances)
    server = RewardServer(pool, "127.0.0.1", 0, api_key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        pool.close()


def post(server: RewardServer, body: Any, token: str = "") -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url, content, {"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_programs_run_elsewhere_as_they_would_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_TOKEN", "secret")
    options = {"case_timeout": 2.0, "score": 2.0, "parallel": 4}
    samples = [RewardSample("p", text, row=dict(CASES)) for text in (RIGHT, HALF, "no program here!", SLOW)]
    samples.append(RewardSample("p", RIGHT))
    local = build_reward("code_sandbox", options)
    expected = local(samples)
    local.close()
    with service("code_sandbox", instances=3, api_key="secret") as server:
        there = {"service_url": server.url, "api_key_env": "CODE_TOKEN"}
        remote = build_reward("code_sandbox", options | there)
        found = remote(samples)
        remote.close()
        stranger = build_reward("code_sandbox", options | {"service_url": server.url})
        assert "status 401" in str(stranger(samples[:1])[0].error)
        stranger.close()
    assert [(one.score, one.metrics) for one in found] == [(one.score, one.metrics) for one in expected]
    assert [one.score for one in found] == [2.0, 1.0, 0.0, 0.0, None]
    assert "the row has no test cases" in str(found[4].error) or "the row has none of" in str(found[4].error)
    gone = build_reward("code_sandbox", {"service_url": server.url, "timeout": 0.05})
    assert gone(samples[:1])[0].score is None
    gone.close()


def test_every_set_of_options_has_instances_of_its_own_and_never_more_than_allowed() -> None:
    with service("gsm8k_rule", instances=2) as server:
        sample = {"response": "so 7", "ground_truth": "7"}

        def scores(**options: Any) -> list[float]:
            status, body = post(server, {"samples": [sample], "options": options})
            assert status == 200
            return [result["score"] for result in body["results"]]

        assert scores(method="strict") == [0.0]
        for score in (1.0, 2.0, 3.0, 2.0):
            assert scores(method="flexible", score=score) == [score]
        assert len(server.pool._idle) == 2


def test_a_function_of_ones_own_is_served_too() -> None:
    with service(f"{own_rewards.__name__}.shortness") as server:
        status, body = post(server, {"samples": [{"response": "abc", "ground_truth": "1"}], "options": {}})
        assert status == 200
        assert "score" in body["results"][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"no json", "JSONDecodeError"),
        ({"options": {}}, "samples"),
        ({"samples": [{"prompt": "p"}]}, "response"),
        ({"samples": [1]}, "AttributeError"),
        ({"samples": [{"response": "x"}], "options": {"methid": "strict"}}, "did you mean 'method'?"),
    ],
)
def test_requests_that_cannot_be_understood(body: Any, words: str) -> None:
    with service("gsm8k_rule") as server:
        status, answer = post(server, body)
        assert status == 400
        assert words in answer["error"]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(RewardOptionError, match="must be the service's address"):
        build_reward("code_sandbox", {"service_url": "localhost"})
