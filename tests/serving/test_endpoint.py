"""The HTTP endpoint over real engines: tokens in, tokens out, as the engines themselves give them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from roll.rollout.engines import EngineClient
from roll.rollout.groups import FinishedGroup
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.serving.local_cluster import LocalCluster

PROMPT = [10, 20, 30, 40]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=5)
SAME = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5, "return_token_ids": True}
HI = [{"role": "user", "content": "Hi"}]


def from_engines(cluster: LocalCluster, params: SamplingParams, num_samples: int) -> FinishedGroup:
    async def ask() -> FinishedGroup:
        return await EngineClient(cluster, 8).submit(GenerationRequest("direct", PROMPT, params, num_samples))

    return asyncio.run(ask())


def test_completions_are_what_the_engines_give(shared: Any) -> None:
    direct = from_engines(shared.cluster, PARAMS, 3)
    body = shared.complete(**SAME, n=3, logprobs=0)
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    tokens = direct.split(direct.token_ids)
    for choice, ids, values, text in zip(choices, tokens, direct.split(direct.log_probs), direct.texts, strict=True):
        assert choice["token_ids"] == ids.tolist()
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["text"] == text
        np.testing.assert_array_equal(np.float32(choice["logprobs"]["token_logprobs"]), values)
        assert "".join(choice["logprobs"]["tokens"]) == shared.tokenizer.decode(ids)
    total = int(direct.lengths.sum())
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": total, "total_tokens": total + 4}
    # Text in gives what its token ids give.
    text = shared.tokenizer.decode(PROMPT)
    if shared.tokenizer(text).input_ids == PROMPT:
        assert shared.complete(**SAME | {"prompt": text})["choices"][0]["token_ids"] == choices[0]["token_ids"]
    several = shared.complete(**SAME | {"prompt": [PROMPT, [7, 8]]}, n=2)["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in several[:2]] == [choice["token_ids"] for choice in choices[:2]]
    assert several[2]["prompt_token_ids"] == [7, 8]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chat_uses_the_models_template_and_gives_top_log_probs(shared: Any, temperature: float) -> None:
    """Of the distribution that was sampled; greedy samples are its most probable tokens."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "How many "}, {"type": "text", "text": "bags?"}]}]
    asked = {"max_tokens": 5, "temperature": temperature, "seed": 2, "n": 3, "logprobs": True, "top_logprobs": 4}
    body = shared.chat(messages=messages, return_token_ids=True, **asked)
    plain = [{"role": "user", "content": "How many bags?"}]
    prompt = shared.tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert body["prompt_token_ids"] == prompt
    assert body["usage"]["prompt_tokens"] == len(prompt)
    model = shared.cluster.workers[0].engine._decoder.model
    for choice in body["choices"]:
        assert choice["message"]["role"] == "assistant"
        with torch.no_grad():
            logits = model(torch.tensor([prompt + choice["token_ids"]])).logits[0]
        for position, token in enumerate(choice["logprobs"]["content"]):
            row = (logits[len(prompt) - 1 + position] / (temperature or 1.0)).log_softmax(-1)
            best, own = row.topk(4), choice["token_ids"][position]
            assert temperature or int(row.argmax()) == own, "greedy"
            assert token["logprob"] == pytest.approx(float(row[own]), abs=1e-4)
            assert [top["logprob"] for top in token["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
            texts = [shared.tokenizer.decode([index]) for index in best.indices]
            assert [top["token"] for top in token["top_logprobs"]] == texts
            assert bytes(token["bytes"]).decode() == token["token"]


def test_conversations_with_calls_and_developers(shared: Any) -> None:
    """Messages as OpenAI's clients keep them: a response that only calls, its arguments as JSON, and its result."""
    call = {"id": "a", "type": "function", "function": {"name": "calc", "arguments": '{"x": "1+1"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "2"}
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    read = call | {"function": {"name": "calc", "arguments": {"x": "1+1"}}}
    made = called | {"content": "", "tool_calls": [read]}
    plain = [asked[0] | {"role": "system"}, asked[1], made, result | {"name": "calc"}]
    wanted = shared.tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    answer = shared.chat(messages=[*asked, called, result], max_tokens=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == wanted
    for calls in ("calc", [{"function": {}}], [None]):
        refused = shared.post("chat/completions", messages=[{**called, "tool_calls": calls}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert shared.chat(messages=[*asked, {**result, "tool_call_id": ["a"]}], max_tokens=2)["choices"]


def test_stops_and_reasons(shared: Any) -> None:
    whole = shared.complete(**SAME)["choices"][0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][3:5]
    cut = shared.complete(**SAME, stop=[stop])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    ended = shared.complete(**SAME, stop_token_ids=[whole["token_ids"][2]])["choices"][0]
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(whole["token_ids"][2]) + 1]


def events(response: Any) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_streams_say_the_same(shared: Any) -> None:
    question = {"messages": HI, "max_tokens": 6, "seed": 1, "n": 2}
    whole = shared.chat(**question)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = events(shared.post("chat/completions", **question, **options))
    for choice in whole["choices"]:
        firsts = [piece["choices"][0] for piece in pieces if piece["choices"]]
        mine = [piece for piece in firsts if piece["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(piece["delta"].get("content", "") for piece in mine) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in mine][-1] == choice["finish_reason"]
    assert pieces[-1]["usage"] == whole["usage"]
    assert len({piece["id"] for piece in pieces}) == 1


LONG = SAME | {"max_tokens": 200, "logprobs": 2}


@pytest.mark.long_rows("True")
@pytest.mark.parametrize("stops", [False, True])
def test_streams_grow_token_by_token(shared: Any, stops: bool) -> None:
    whole = shared.complete(**LONG)["choices"][0]
    question = LONG | ({"stop": [whole["text"][100:103]]} if stops else {})
    whole = shared.complete(**question)["choices"][0]
    pieces = [event["choices"][0] for event in events(shared.post("completions", **question, stream=True))]
    assert len(pieces) > 3, "they come while the engine is at work"
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece["logprobs"][name] or ()] == whole["logprobs"][name]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [whole["finish_reason"]]


@pytest.mark.long
def test_models_health_key_and_metrics_for_prometheus(make_serving: Any) -> None:
    serving = make_serving(api_key="sesame")
    assert serving.client.get("/v1/models").status_code == 401
    assert serving.post("completions", **SAME).json()["error"]["type"] == "authentication_error"
    assert serving.client.get("/v1/models", headers={"x-api-key": "sesame"}).status_code == 200
    serving.client.headers["Authorization"] = "Bearer sesame"
    assert [model["id"] for model in serving.client.get("/v1/models").json()["data"]] == ["tiny"]
    body = serving.complete(prompt=[5, 6, 7], max_tokens=4, n=2, seed=1)
    health = serving.client.get("/health").json()
    assert (health["status"], health["engines"], health["finished"], health["open_requests"]) == ("ok", 2, 1, 0)
    assert serving.post("completions", prompt=[10_000]).status_code == 400
    del serving.client.headers["Authorization"]
    response = serving.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    outcomes = {one.labels["outcome"]: one.value for one in families["roll_serve_requests"].samples}
    assert outcomes == {"finished": 1, "refused": 1, "turned_away": 0, "cancelled": 0}
    values = {name.removeprefix("roll_serve_"): family.samples[0].value for name, family in families.items()}
    assert (values["prompt_tokens"], values["generation_tokens"]) == (3, body["usage"]["completion_tokens"])
    assert (values["requests_running"], values["requests_waiting"], values["engines"]) == (0, 0, 2)
    latency = families["roll_serve_request_latency_seconds"]
    buckets = [one.value for one in latency.samples if one.name.endswith("_bucket")]
    assert latency.type == "histogram" and buckets == sorted(buckets) and buckets[-1] == 1
    assert {one.name[-4:] for one in latency.samples} == {"cket", "_sum", "ount"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {}, 400, "prompt: is needed"),
        ("completions", {"prompt": []}, 400, "prompt: is needed"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt: is needed"),
        ("completions", {"prompt": [10_000]}, 400, "prompt token ids run from"),
        ("completions", {"prompt": [1] * 300}, 400, "the prompt has 300 tokens, must have 1 to 255"),
        ("completions", {"prompt": "a", "model": "gpt-9"}, 404, "'gpt-9' is not served here, only 'tiny'"),
        ("completions", {"prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature is -1.0"),
        ("completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens: must be int"),
        ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens: must be int"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n: must be from 1"),
        ("completions", {"prompt": "a", "stop": ["", "b"]}, 400, "stop: must be"),
        ("completions", {"prompt": "a", "logit_bias": {"1": 5}}, 400, "logit_bias: is not available"),
        ("chat/completions", {"messages": []}, 400, "messages: is needed"),
        ("chat/completions", {"messages": [{"content": "a"}]}, 400, "role and content"),
        ("chat/completions", {"messages": [HI[0] | {"content": [{"type": "image_url"}]}]}, 400, "type text"),
        ("chat/completions", {"messages": HI, "top_logprobs": 3}, 400, "needs logprobs"),
    ],
)
def test_what_cannot_be_answered_says_why(shared: Any, path: str, body: Any, status: int, words: str) -> None:
    response = shared.post(path, **body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    neutral = {"presence_penalty": 0, "user": "me", "logit_bias": None, "response_format": {"type": "text"}}
    assert shared.complete(**SAME, **neutral)["choices"], "the engines are none the worse"


@pytest.mark.long
def test_many_at_once_are_spread_over_the_engines_and_too_many_are_turned_away(make_serving: Any) -> None:
    serving = make_serving(max_open_requests=10)
    serving.cluster.free.clear()
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append((i, serving.post("completions", **SAME | {"seed": i}))))
        for i in range(10)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: serving.service.num_open == 10)
    turned_away = serving.post("completions", **SAME)
    assert turned_away.status_code == 429
    assert turned_away.headers["retry-after"] == "1"
    serving.cluster.free.set()
    for thread in threads:
        thread.join()
    assert len(answers) == 10
    assert min(serving.cluster.turns) > 0
    for seed, response in answers:
        assert response.status_code == 200
        direct = serving.complete(**SAME | {"seed": seed})
        assert response.json()["choices"] == direct["choices"], "who else was in the batch does not matter"


def wait_until(condition: Any) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_whoever_hangs_up_has_the_request_dropped(shared: Any) -> None:
    """Also in the middle of a stream."""
    before = shared.service.counts["cancelled"]
    shared.cluster.free.clear()
    with pytest.raises(Exception, match="timed out"):
        shared.client.post("/v1/completions", json=SAME, timeout=0.2)
    wait_until(lambda: shared.service.counts["cancelled"] == before + 1)
    shared.cluster.free.set()
    with shared.client.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True} | LONG) as response:
        next(response.iter_lines())
        shared.cluster.free.clear()
    shared.cluster.free.set()
    wait_until(lambda: shared.service.counts["cancelled"] == before + 2 and shared.service.num_open == 0)
    wait_until(lambda: all(not worker.engine.num_unfinished for worker in shared.cluster.workers))
    assert shared.complete(**SAME)["choices"]


def test_a_pause_drops_what_is_under_way_and_holds_what_comes(shared: Any) -> None:
    long = SAME | {"max_tokens": 200, "min_tokens": 200}
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(shared.post("completions", **long)))
    shared.cluster.free.clear()
    first.start()
    wait_until(lambda: shared.service.num_open == 1)
    shared.cluster.free.set()
    shared.server.call(shared.service.pause())
    first.join()
    assert answers[0].status_code == 503
    assert all(not worker.engine.num_unfinished for worker in shared.cluster.workers)
    second = threading.Thread(target=lambda: answers.append(shared.post("completions", **SAME)))
    second.start()
    wait_until(lambda: shared.service.num_open == 1)
    assert len(answers) == 1
    shared.server.call(shared.service.resume())
    second.join()
    assert answers[1].status_code == 200


@pytest.mark.long
def test_a_dead_engine_is_done_without_and_the_last_ones_death_is_told(serving: Any) -> None:
    before = serving.complete(**SAME, n=2)["choices"]
    serving.cluster.dead = {0}
    for _ in range(3):
        assert serving.complete(**SAME, n=2)["choices"] == before
    assert serving.client.get("/health").json()["engines"] == 1
    serving.cluster.dead = {0, 1}
    response = serving.post("completions", **SAME)
    assert response.status_code == 503
    assert "killed" in response.json()["error"]["message"]
    assert serving.post("completions", **SAME).status_code == 503
    health = serving.client.get("/health")
    assert health.status_code == 503
    assert "killed" in health.json()["reason"]


def test_a_prompt_comes_back_with_its_log_probs(shared: Any) -> None:
    """As clients that compare texts by their log-likelihood ask for it."""
    model = AutoModelForCausalLM.from_pretrained(shared.tokenizer.name_or_path, dtype=torch.float32)
    prompts = [list(range(5, 25)), list(range(40, 47))]
    body = shared.complete(prompt=prompts, max_tokens=1, echo=True, logprobs=2, temperature=0)
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        found = choice["logprobs"]
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        own = wanted.gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist()
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-5)
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == len(prompt) + 1
        best = [max(top.values()) for top in found["top_logprobs"][1:-1]]
        assert best == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-5)
        assert choice["text"].startswith(shared.tokenizer.decode(prompt))
    plain = shared.complete(prompt=prompts[0], max_tokens=1, temperature=0)["choices"][0]["text"]
    echoed = shared.complete(prompt=prompts[0], max_tokens=1, temperature=0, echo=True)["choices"][0]
    assert echoed["text"] == shared.tokenizer.decode(prompts[0]) + plain and echoed["logprobs"] is None
    assert shared.post("completions", model="tiny", prompt="a", echo=True, stream=True).status_code == 400


def test_log_probs_of_prompts_in_vllms_form(shared: Any) -> None:
    prompts = [PROMPT, [7, 8, 9]]
    choices = shared.complete(prompt=prompts, max_tokens=1, prompt_logprobs=3)["choices"]
    model = shared.cluster.workers[0].engine._decoder.model
    for prompt, choice in zip(prompts, choices, strict=True):
        rows = choice["prompt_logprobs"]
        assert len(rows) == len(prompt) and rows[0] is None
        with torch.no_grad():
            table = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for place, (token, row) in enumerate(zip(prompt[1:], rows[1:], strict=True)):
            best = table[place].topk(3)
            assert set(map(int, row)) == {token, *best.indices.tolist()}
            for rank, (other, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), 1):
                assert row[str(other)]["logprob"] == pytest.approx(value, abs=1e-5)
                assert row[str(other)]["rank"] == rank
            own = table[place][token]
            said = row[str(token)]
            assert said["logprob"] == pytest.approx(float(own), abs=1e-5)
            assert said["rank"] == int((table[place] > own).sum()) + 1
            assert said["decoded_token"] == shared.tokenizer.decode([token])
    whole = shared.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=-1)["choices"][0]["prompt_logprobs"]
    assert len(whole[1]) == model.config.vocab_size
    for wrong in ({"prompt_logprobs": -2}, {"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 1 << 20}):
        response = shared.post("completions", model="tiny", prompt=PROMPT, **wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"
