"""The reward behind HTTP, against the example's own server and against services that fail, and its client against a
real server that fails in every way."""

from __future__ import annotations

import importlib.util
import resource
import threading
import zlib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.rewards import RewardSample, build_reward, failure_rates
from roll.rewards.http_reward import MAX_REPLY, JsonClient, Reply, ServiceOptions
from tests.rewards.http_service import Answer, in_turn, serving

EXAMPLE = Path(__file__).parents[2] / "examples/rewards/reward_server.py"
ONE_RETRY: dict[str, Any] = {"backoff": 0.001, "max_backoff": 0.01, "max_retries": 1}


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
        reward = build_reward("http_reward", {"url": service.url, **ONE_RETRY})
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


QUICK: dict[str, Any] = {"backoff": 0.001, "max_backoff": 0.01, "request_timeout": 5.0, "timeout": 10.0}
GOOD = Answer({"score": 1})


def ask(answer: Any, bodies: list[Any] | None = None, **settings: Any) -> tuple[list[Reply], Any]:
    with serving(answer) as service:
        client = JsonClient(service.url, ServiceOptions(**{**QUICK, **settings}), api_key="top-secret")
        try:
            return client.post([{"q": 1}] if bodies is None else bodies), service
        finally:
            client.close()


@pytest.mark.long
def test_replies_come_in_the_order_of_the_requests() -> None:
    bodies = [{"q": number} for number in range(40)]
    replies, service = ask(lambda number, body: Answer({"echo": body["q"]}), bodies, concurrency=8)
    assert [reply.body["echo"] for reply in replies] == list(range(40))
    assert service.headers[0]["Authorization"] == "Bearer top-secret"
    assert ask(GOOD, [])[0] == []


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_may_get_better_is_tried_again(status: int) -> None:
    (reply,), service = ask(in_turn(Answer({}, status), Answer({}, status), GOOD))
    assert reply == Reply({"score": 1}, tries=3)
    assert len(service.bodies) == 3


def test_hang_ups_and_answers_that_are_no_json_are_tried_again() -> None:
    (reply,), _ = ask(in_turn(Answer({"a": "long answer"}, hang_up=True), Answer(raw=b"<html>busy"), GOOD))
    assert reply == Reply({"score": 1}, tries=3)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer({"error": {"message": "no such model"}}, 404), ["status 404", "no such model"]),
        (Answer({"error": "who are you?"}, 401), ["status 401", "who are you?"]),
    ],
)
def test_what_never_gets_better_is_not_tried_again(answer: Answer, words: list[str]) -> None:
    (reply,), service = ask(in_turn(answer))
    assert reply.error is not None
    assert len(service.bodies) == 1
    for word in words:
        assert word in reply.error
    assert "top-secret" not in reply.error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer("overloaded", 500), 'status 500: "overloaded" (3 tries)'),
        (Answer(raw=b"<html>busy</html>"), "is not JSON: '<html>busy</html>' (3 tries)"),
        (Answer({"a": "long answer"}, hang_up=True), "RemoteProtocolError"),
    ],
)
def test_patience_ends(answer: Answer, words: str) -> None:
    (reply,), service = ask(in_turn(answer), max_retries=2)
    assert reply.error is not None
    assert words in reply.error
    assert not reply.error.startswith("timeout:")
    assert len(service.bodies) == reply.tries == 3


def test_a_service_that_is_not_there() -> None:
    client = JsonClient("http://127.0.0.1:9/v1", ServiceOptions(**QUICK, max_retries=1))
    (reply,) = client.post([{}])
    client.close()
    assert reply.error is not None
    assert "ConnectError" in reply.error


@pytest.mark.long
def test_a_try_that_takes_too_long_is_a_timeout_and_the_next_may_do() -> None:
    (reply,), _ = ask(in_turn(Answer(stall=True), GOOD), request_timeout=1.0)
    assert reply == Reply({"score": 1}, tries=2)
    (reply,), _ = ask(in_turn(Answer(stall=True)), request_timeout=0.05, max_retries=1)
    assert reply.error is not None
    assert reply.error.startswith("timeout: ")
    assert "(2 tries)" in reply.error


@pytest.mark.long
def test_a_request_has_a_deadline_over_all_tries() -> None:
    (reply,), _ = ask(in_turn(Answer({}, 500), Answer(stall=True)), timeout=1.5)
    assert reply.error is not None
    assert reply.error.startswith("timeout: no answer within 1.5 s (2 tries; before that: ")
    assert "status 500" in reply.error


def test_retry_after_is_obeyed_up_to_the_longest_pause() -> None:
    pauses: list[float] = []
    busy = [Answer({}, 429, {"Retry-After": "3"}), Answer({}, 503, {"Retry-After": "100"})]
    with serving(in_turn(*busy, GOOD)) as service:
        client = JsonClient(service.url, ServiceOptions(backoff=0.001, max_backoff=5.0))
        original = client._pause

        def noted(state: Any) -> float:
            pauses.append(original(state))
            return 0.0

        client._pause = noted  # type: ignore[method-assign]
        (reply,) = client.post([{}])
        client.close()
    assert reply.body == {"score": 1}
    assert pauses == [3.0, 5.0]


def test_no_more_requests_than_slots_whoever_asks() -> None:
    waiting = threading.Barrier(4)

    def together(number: int, body: Any) -> Answer:
        waiting.wait(10)
        return GOOD

    with serving(together) as service:
        client = JsonClient(service.url, ServiceOptions(**QUICK, concurrency=4))
        threads = [threading.Thread(target=client.post, args=([{}] * 4,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        assert len(service.bodies) == 12
        assert service.most_running == 4


def compressed_bomb() -> bytes:
    """600 MB of spaces inside a JSON object, compressed to some 600 kB."""
    packer = zlib.compressobj(9, wbits=31)
    pieces = [packer.compress(b'{"score": 1')]
    pieces += [packer.compress(b" " * 2**20) for _ in range(600)]
    return b"".join([*pieces, packer.compress(b"}"), packer.flush()])


@pytest.mark.long
def test_answers_are_bounded_before_they_are_held() -> None:
    bomb = Answer(raw=compressed_bomb(), headers={"Content-Encoding": "gzip"})
    long = Answer(raw=b'{"a": "' + b"x" * (MAX_REPLY + 1) + b'"}')
    in_an_error = Answer(raw=b"x" * (MAX_REPLY + 1), status=500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for answer, words in ((bomb, "compressed"), (long, "longer than"), (in_an_error, "longer than")):
        (reply,), service = ask(in_turn(answer))
        assert words in (reply.error or "")
        assert len(service.bodies) == 1
        assert service.headers[0]["Accept-Encoding"] == "identity"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB, also of the service in this process
    assert grown < 300 * 1024
    (reply,), _ = ask(in_turn(Answer(raw=b'{"a": "' + b"x" * (MAX_REPLY - 10) + b'"}')))
    assert reply.error is None


@pytest.mark.parametrize("raw", [b"[" * 10**6, b"9" * 10_000, b"\xff", b'{"a":' * 10**5])
def test_answers_that_break_a_parser_are_errors(raw: bytes) -> None:
    (reply,), _ = ask(in_turn(Answer(raw=raw)), max_retries=0)
    assert "is not JSON" in (reply.error or "")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-5", "1e999", "soon"])
def test_a_nonsensical_retry_after_neither_hangs_nor_fails(seconds: str) -> None:
    (reply,), _ = ask(in_turn(Answer({}, 429, {"Retry-After": seconds}), GOOD))
    assert reply == Reply({"score": 1}, tries=2)
