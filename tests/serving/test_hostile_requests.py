"""Hundreds of hostile requests to a real server over real engines: each is refused or answered, the others as ever."""

from __future__ import annotations

import json
import random
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from roll.serving.http import MAX_BODY, MAX_DEPTH

HONEST = {"prompt": [10, 20, 30, 40], "max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "seed": 1}

NUMBERS: list[Any] = [
    -1, 0, 1, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), -(2**64), 10**400, 1e-45, 1e-40, 1e-5, 5e-324, 1e20, 1e38,
    1e308, -1e308, -0.0, 0.5, True, "1", [], {}, [1], "NaN",
]  # fmt: skip
NUMERIC = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n", "max_tokens", "min_tokens", "logprobs",
    "max_completion_tokens", "frequency_penalty", "presence_penalty", "best_of",
)  # fmt: skip
FIELDS: dict[str, list[Any]] = {
    "stop_token_ids": [
        [10**6], [2**31], [2**63], [-1], list(range(100_000)), ["a"], [True], [1.5], [[1]], "1", {"a": 1},
    ],
    "stop": ["", [""], ["a"] * 17, ["a" * 5000], [1], {"a": "b"}, "\x00", ["\u0000" * 900], [None]],
    "logit_bias": [{"1": 100}, {"1": 1e308}, [1], "a"],
    "prompt": [
        "", [], [[]], [-1], [10**9], [2**63], [1.5], ["a", 1], [[1], "a"], {"a": 1}, None, ["a"] * 2000, [[1]] * 2000,
        [True], "\x00" * 100, "a" * 100_000, [0] * 300, list(range(10**5)),
    ],
    "stream": ["yes", 1, [True]],
    "stream_options": ["a", [1], {"include_usage": "maybe", "x": 1}],
    "model": ["other", 7, ["tiny"], "../../etc/passwd", "x" * 10_000],
    "echo": [True], "suffix": ["a"], "tools": [[{"type": "function"}]], "response_format": [{"type": "json_object"}],
    "chat_template": ["{{ 1 }}"], "prompt_embeds": ["AAAA"], "lora_path": ["/etc"], "custom_params": [{"a": 1}],
    "sampling_params": [{"n": 1}], "priority": [10**9], "": [1], "a" * 10_000: [1], "__class__": ["x"],
}  # fmt: skip
CHAT_FIELDS: dict[str, list[Any]] = {
    "messages": [
        [], [1], [{}], [{"role": "user"}], [{"role": 1, "content": "a"}], [{"role": "user", "content": None}], "a",
        [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": "a"}] * 5000,
        [{"role": "user", "content": "a" * 100_000}], [{"role": "{{ 1/0 }}", "content": "{% for %}"}], [[[]]],
    ],
    "chat_template_kwargs": [
        {"chat_template": "{{ 1 }}"}, {"chat_template": None}, {"tokenize": False}, {"conversation": []}, {"tools": []},
        {"return_dict": True}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"max_length": 1},
        {"truncation": True}, {"return_tensors": "pt"}, {"padding": "max_length"}, {"bos_token": "x"}, {"a": {"b": 1}},
        {"a": [1]}, {"a": "x" * 2000}, {f"k{i}": 1 for i in range(100)}, {"not a name": 1}, {"": 1}, {"messages": "x"},
        [1], {"documents": [1]}, {"tokenizer_kwargs": {}},
    ],
    "chat_template": ["{{ 1 }}", None],
    "top_logprobs": NUMBERS,
    "logprobs": [1, "a", []],
}  # fmt: skip


def hostile_bodies() -> list[tuple[str, bytes]]:
    """Every hostile value of every field by itself, then 120 bodies with several."""
    cases = [("completions", HONEST | {name: value}) for name in NUMERIC for value in NUMBERS]
    cases += [("completions", HONEST | {name: value}) for name, values in FIELDS.items() for value in values]
    cases += [("chat/completions", CHAT | {name: value}) for name in NUMERIC for value in NUMBERS[::5]]
    cases += [("chat/completions", CHAT | {name: value}) for name, values in CHAT_FIELDS.items() for value in values]
    cases += [("chat/completions", CHAT | {"logprobs": True, "top_logprobs": value}) for value in NUMBERS]
    rng = random.Random(0)
    for _ in range(120):
        body: dict[str, Any] = dict(HONEST)
        for name in rng.sample(NUMERIC, 4):
            body[name] = rng.choice(NUMBERS)
        cases.append(("completions", body))
    return [(path, json.dumps(body).encode()) for path, body in cases] + RAW


RAW: list[tuple[str, bytes]] = [
    ("completions", content)
    for content in (
        b"", b"null", b"[]", b"1", b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"\\udfff": 1}', b"[" * 10**6,
        b'{"a":' * 10**5, b'{"prompt": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}",
        b'{"prompt": [1], "temperature": NaN}', b'{"prompt": [1], "temperature": Infinity}',
        b'{"prompt": [1], "temperature": 1e999}', b'{"prompt": [1], "seed": ' + b"9" * 5000 + b"}", b" " * 10**6,
        b'{"prompt": "a"' + b' , "prompt": "a"' * 10**5 + b"}",
    )
]  # fmt: skip


@pytest.mark.long
def test_the_service_outlives_hostile_requests(make_serving: Any) -> None:
    serving = make_serving(max_open_requests=5000)
    expected = [choice["token_ids"] for choice in serving.complete(**HONEST)["choices"]]
    bodies = hostile_bodies()
    streams = [(path, body[:-1] + b', "stream": true}') for path, body in bodies if body.endswith(b"}")][::6]
    assert len(bodies) > 500 and len(streams) > 100
    bodies += streams

    def send(case: tuple[str, bytes]) -> tuple[int, str]:
        path, body = case
        response = serving.client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
        return response.status_code, response.text

    with ThreadPoolExecutor(8) as threads:
        neighbours = [threads.submit(serving.complete, **HONEST) for _ in range(3)]
        answers = list(threads.map(send, bodies))
        neighbours += [threads.submit(serving.complete, **HONEST) for _ in range(3)]
    for (path, body), (status, text) in zip(bodies, answers, strict=True):
        assert status in (200, 400, 404, 413, 429), (path, body[:300], status, text[:300])
        if status != 200:
            error = json.loads(text)["error"]
            assert error["type"] in ("invalid_request_error", "rate_limit_error"), (path, body[:300], text[:300])
            assert len(error["message"]) < 20_000
    refused = sum(status != 200 for status, _ in answers)
    assert refused > len(bodies) // 2
    for neighbour in neighbours:
        assert [choice["token_ids"] for choice in neighbour.result()["choices"]] == expected, (
            "no neighbour is disturbed"
        )
    assert [choice["token_ids"] for choice in serving.complete(**HONEST)["choices"]] == expected
    health = serving.client.get("/health").json()
    assert health["status"] == "ok"
    assert health["engines"] == 2
    assert health["open_requests"] == 0


@pytest.mark.long
def test_what_an_engine_does_not_refuse_in_time_is_the_requests_own_failure(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = shared.complete(**HONEST)["choices"]
    # As if the bounds were missing: the engines meet such values, and 1e-40 makes logits infinite.
    monkeypatch.setattr("roll.serving.dialects.requests.check_sampling_params", lambda *_: None)
    monkeypatch.setattr("roll.strategies.engines.requests.check_sampling_params", lambda *_: None)
    with ThreadPoolExecutor(8) as threads:
        hostile = [{"temperature": 1e-40}, {"top_k": 2**63}, {"repetition_penalty": 1e-44}, {"temperature": 1e-40}]
        failing = [threads.submit(shared.post, "completions", **HONEST | fields) for fields in hostile * 3]
        honest = [threads.submit(shared.complete, **HONEST) for _ in range(6)]
    for future in failing:
        assert future.result().status_code in (200, 400), future.result().text
    assert any(future.result().status_code == 400 for future in failing)
    for future in honest:
        assert future.result()["choices"] == expected
    assert shared.client.get("/health").json()["engines"] == 2


def test_a_body_without_end_is_read_no_further_than_the_limit(shared: Any) -> None:
    host, port = shared.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent, piece = 0, b"100000\r\n" + b" " * 2**20 + b"\r\n"
        try:
            while sent < 4 * MAX_BODY:
                connection.sendall(piece)
                sent += 2**20
        except OSError:
            pass  # the server has hung up
        answer = connection.recv(100)
    assert sent < 4 * MAX_BODY or b"413" in answer
    assert shared.complete(**HONEST)["choices"]


def test_templates_belong_to_the_server(shared: Any) -> None:
    for body in ({"chat_template_kwargs": {"chat_template": "{{ 'x' }}"}}, {"chat_template": "{{ 'x' }}"}):
        answer = shared.post("chat/completions", **CHAT, **body)
        assert answer.status_code == 400
        assert "chat_template" in answer.json()["error"]["message"]
    # A variable of the template's own is the client's to set.
    plain = shared.chat(**CHAT, return_token_ids=True)["choices"]
    assert (
        shared.chat(**CHAT, return_token_ids=True, chat_template_kwargs={"enable_thinking": False})["choices"] == plain
    )


@pytest.mark.long
def test_what_cannot_fit_costs_others_little(shared: Any) -> None:
    """Texts of 30 MB, millions of lists, log-probs of everything: refused in a moment, while others are served."""
    wanted = shared.complete(**HONEST)["choices"]
    long = json.dumps({"model": "tiny", "prompt": "one two " * 3_500_000})
    lists = '{"model": "tiny", "prompt": [' + "[]," * 9_000_000 + "[]]}"
    chat = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "ab" * 14_000_000}]})
    bodies = [(long, "completions"), (lists, "completions"), (chat, "chat/completions")]
    everything = {"prompt": [list(range(10, 200))] * 1000, "prompt_logprobs": -1, "max_tokens": 1}

    def attack(body: tuple[str, str]) -> tuple[int, float]:
        began = time.perf_counter()
        with httpx2.Client(timeout=60, trust_env=False) as client:
            return client.post(f"{shared.server.url}/v1/{body[1]}", content=body[0]).status_code, began

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(3) as threads:
        refused = [threads.submit(attack, body) for body in bodies]
        latencies = []
        while not all(one.done() for one in refused):
            began = time.perf_counter()
            assert shared.complete(**HONEST)["choices"] == wanted
            latencies.append(time.perf_counter() - began)
        assert {one.result()[0] for one in refused} <= {400, 413}
    assert max(latencies, default=0.0) < 5, "another client waits for none of it"
    assert shared.post("completions", model="tiny", **everything).status_code == 400
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 1500, f"{grown:.0f} MiB more at the peak, client and server in one process"
