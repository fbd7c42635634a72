"""Rewards as services, on real connections: programs run elsewhere as they would here; wrong requests are told so."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from roll.rewards import RewardOptionError, RewardSample, build_reward
from roll.rewards import service as service_module
from roll.rewards.service import MAX_BODY, RewardPool, make_app
from roll.serving.http import HttpServer
from tests.rewards import own_rewards

RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
HALF = "```python\ndef double(x):\n    return x * x\n```"
SLOW = "```python\nimport time\ndef double(x):\n    time.sleep(60)\n```"
CASES = {"test_cases": ["assert double(2) == 4", "assert double(3) == 6"]}


@contextmanager
def service(reward: str, instances: int = 2, api_key: str = "") -> Iterator[str]:
    pool, server = RewardPool(reward, instances), HttpServer()
    server.start(lambda: make_app(pool, api_key))
    try:
        yield f"{server.url}/score"
    finally:
        server.close()
        pool.close()


def post(url: str, body: Any, token: str = "") -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.long
def test_programs_run_elsewhere_as_they_would_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_TOKEN", "secret")
    options = {"case_timeout": 2.0, "score": 2.0, "parallel": 4}
    samples = [RewardSample("p", text, row=dict(CASES)) for text in (RIGHT, HALF, "no program here!", SLOW)]
    samples.append(RewardSample("p", RIGHT))
    local = build_reward("code_sandbox", options)
    expected = local(samples)
    local.close()
    with service("code_sandbox", instances=3, api_key="secret") as url:
        there = {"service_url": url, "api_key_env": "CODE_TOKEN"}
        remote = build_reward("code_sandbox", options | there)
        found = remote(samples)
        remote.close()
        stranger = build_reward("code_sandbox", options | {"service_url": url})
        assert "status 401" in str(stranger(samples[:1])[0].error)
        stranger.close()
    assert [(one.score, one.metrics) for one in found] == [(one.score, one.metrics) for one in expected]
    assert [one.score for one in found] == [2.0, 1.0, 0.0, 0.0, None]
    assert "the row has no test cases" in str(found[4].error) or "the row has none of" in str(found[4].error)
    gone = build_reward("code_sandbox", {"service_url": url, "timeout": 0.05})
    assert gone(samples[:1])[0].score is None
    gone.close()


def test_every_set_of_options_has_instances_of_its_own_and_never_more_than_allowed() -> None:
    with service("gsm8k_rule", instances=2) as url:
        sample = {"response": "so 7", "ground_truth": "7"}

        def scores(**options: Any) -> list[float]:
            status, body = post(url, {"samples": [sample], "options": options})
            assert status == 200
            return [result["score"] for result in body["results"]]

        assert scores(method="strict") == [0.0]
        for score in (1.0, 2.0, 3.0, 2.0):
            assert scores(method="flexible", score=score) == [score]


def test_a_function_of_ones_own_is_served_too() -> None:
    with service(f"{own_rewards.__name__}.shortness") as url:
        status, body = post(url, {"samples": [{"response": "abc", "ground_truth": "1"}], "options": {}})
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
    with service("gsm8k_rule") as url:
        status, answer = post(url, body)
        assert status == 400
        assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("reward", "options", "words"),
    [
        ("code_sandbox", {"readable": ["/"]}, "readable is set by the service"),
        ("code_sandbox", {"preload": ["antigravity"]}, "preload is set by the service"),
        ("code_sandbox", {"require": []}, "the service itself requires ['network']"),
        ("code_sandbox", {"require": "network"}, "the service itself requires"),
        ("code_sandbox", {"service_url": "http://10.0.0.1/", "api_key_env": "HOME"}, "is set by the service"),
        ("code_sandbox", {"memory_mb": 1 << 40}, "memory_mb = 1099511627776: at most 8192 is granted"),
        ("code_sandbox", {"timeout": 1e9}, "at most 600 is granted"),
        ("code_sandbox", {"timeout": float("nan")}, "at most 600 is granted"),
        ("code_sandbox", {"timeout": "1e9"}, "at most 600 is granted"),
        ("code_sandbox", {"memory_mb": "100_000"}, "at most 8192 is granted"),
        ("code_sandbox", {"processes": 10**400}, "at most 256 is granted"),
        ("code_sandbox", [1], "must be an object"),
        ("http_reward", {"url": "http://169.254.169.254/latest"}, "url is set by the service"),
        ("llm_judge", {"prompt": "/etc/passwd"}, "prompt is set by the service"),
        ("llm_judge", {"base_url": "http://evil/v1", "api_key_env": "HOME"}, "is set by the service"),
        (f"{own_rewards.__name__}.shortness", {"scale": 3.0}, "scale is set by the service"),
    ],
)
def test_clients_choose_only_what_has_no_effect_outside(reward: str, options: Any, words: str) -> None:
    own: dict[str, dict[str, Any]] = {
        "code_sandbox": {"require": ["network"], "readable": ["/opt"]},
        "http_reward": {"url": "http://127.0.0.1:1/"},
        "llm_judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
    }
    with pytest.raises(RewardOptionError, match=words.replace("[", r"\[").replace("(", r"\(")):
        RewardPool(reward, own=own.get(reward)).merged(options)


def test_what_clients_may_choose() -> None:
    options = RewardPool("code_sandbox", own={"readable": ["/opt"], "require": ["network"], "timeout": 1000.0})
    asked = {"readable": ["/opt"], "case_timeout": 2.0, "require": ["network", "files"], "timeout": 900.0}
    assert options.merged(asked) == asked
    assert options.merged({}) == {"readable": ["/opt"], "require": ["network"], "timeout": 1000.0}
    assert RewardPool("code_sandbox", allowed=["readable"]).merged({"readable": ["/data"]}) == {"readable": ["/data"]}
    assert RewardPool("math_rule").merged({"score": 2.0}) == {"score": 2.0}


def test_a_subclass_opens_no_options_to_clients() -> None:
    """Its own options may read files; what its base class opens says nothing about them."""
    assert RewardPool("gsm8k_rule").merged({"score": 2.0}) == {"score": 2.0}
    with pytest.raises(RewardOptionError, match="score is set by the service"):
        RewardPool(f"{own_rewards.__name__}.OwnGsm8k").merged({"score": 2.0})


def raw(url: str, content: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", urllib.parse.urlsplit(url).port), timeout=10) as connection:
        connection.sendall(content)
        connection.settimeout(10)
        return connection.recv(1000)


def test_hostile_requests_leave_the_service_alone() -> None:
    with service("gsm8k_rule", api_key="secret") as url:
        head = b"POST /score HTTP/1.1\r\nHost: a\r\n"
        # A stranger is turned away before the body is read.
        assert b" 401 " in raw(url, head + b"Content-Length: 60000000\r\n\r\n")
        head += b"Authorization: Bearer secret\r\n"
        for length in (b"-1", b"x", b"9" * 5000, b""):
            assert b" 400 " in raw(url, head + b"Content-Length: " + length + b"\r\n\r\n")
        assert post(url, b" " * (MAX_BODY + 1), "secret")[0] == 413
        bodies = [
            b"[" * 10**6,
            b"null",
            b"1",
            b'"x"',
            b'{"samples": 1}',
            b'{"samples": [' + b"1," * 5000 + b"1]}",
            b"\xff",
        ]
        bodies += [b'{"samples": [{"response": "x"}], "options": {"score": ' + b"9" * 5000 + b"}}"]
        for body in bodies:
            status, _ = post(url, body, "secret")
            assert status == 400, body[:50]
        sample = {"response": "#### 7", "ground_truth": "7"}
        assert post(url, {"samples": [sample]}, "secret")[1]["results"][0]["score"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "ROLL_REWARD_TOKEN: no such variable in the environment"),
        (["--api-key-env", "MISSING"], "MISSING: no such variable"),
        (["--host", "0.0.0.0", "--without-token"], "set a token"),
        (["--without-token", "--options", '{"methid": 1}'], "did you mean 'method'?"),
        (["--without-token", "--options", "[1]"], "must be a JSON object"),
    ],
)
def test_the_service_does_not_start_open_to_everybody(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLL_REWARD_TOKEN", raising=False)
    with pytest.raises(SystemExit) as end:
        service_module.main(["gsm8k_rule", "--port", "0", *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
