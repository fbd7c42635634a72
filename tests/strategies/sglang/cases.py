"""What the tests run in the engine process. An engine takes a minute to start, so a case asks it many things: each
function returns plain values of all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from roll.strategies.generation import (
    GenerationOutput,
    GenerationRequest,
    GenerationStrategy,
    SamplingParams,
    interrupted,
)
from roll.weight_sync.checksum import tensor_checksum
from tests.strategies.hf_infer import helpers
from tests.strategies.vllm.cases import MAX_MODEL_LEN, jolt, load, log_prob_gap, update
from tests.strategies.vllm.cases import start as start_engine

OPTIONS = {"max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN}
KEY = "model.layers.0.self_attn.k_proj.weight"
VALUE = KEY.replace("k_proj", "v_proj")
SETTINGS = [
    SamplingParams(20, seed=1),
    SamplingParams(20, temperature=0.5, seed=2),
    SamplingParams(20, temperature=1.3, top_k=10, seed=3),
    SamplingParams(20, top_p=0.7, seed=4),
    SamplingParams(20, min_p=0.05, seed=5),
    SamplingParams(20, repetition_penalty=1.5, seed=6),
    SamplingParams(20, temperature=0.7, top_p=0.9, top_k=20, min_new_tokens=8, seed=7),
    SamplingParams(20, temperature=0.0, top_p=0.5),
    SamplingParams(20, seed=8, top_log_probs=3),
]
Outputs = dict[tuple[str, int], GenerationOutput]


@contextmanager
def engine(folder: Path, dtype: str = "fp32", strategy: str = "sglang", **options: Any) -> Iterator[GenerationStrategy]:
    started = start_engine(folder, dtype, strategy, **OPTIONS, **options)
    try:
        yield started
    finally:
        started.shutdown()


def greedy_after_updates(folder: Path, dtype: str, **options: Any) -> list[dict[str, Any]]:
    """After 0, 1 and 10 updates: tokens of SGLang, of ``hf_infer`` and of ``model.generate``, and the log-prob gap."""
    with engine(folder, dtype, **options) as started:
        return _greedy_after_updates(started, folder, dtype)


def _greedy_after_updates(started: GenerationStrategy, folder: Path, dtype: str) -> list[dict[str, Any]]:
    model, prompts = load(folder, dtype), helpers.random_prompts([5, 9, 33, 60], seed=4)
    requests = [GenerationRequest(str(i), prompt, helpers.greedy(20)) for i, prompt in enumerate(prompts)]
    found = []
    with engine(folder, dtype, "hf_infer") as embedded:
        for version in range(11):
            wrong = []
            if version:
                jolt(model, version)
                wrong = update(started, model, version) + update(embedded, model, version)
            if version not in (0, 1, 10):
                continue
            ours, theirs = helpers.run(started, requests), helpers.run(embedded, requests)
            for i, prompt in enumerate(prompts):
                output = ours[str(i), 0]
                found.append(
                    {
                        "sglang": output.token_ids,
                        "hf_infer": theirs[str(i), 0].token_ids,
                        "generate": helpers.generate_greedy(model, prompt, 20),
                        "gap": log_prob_gap(model, prompt, output.token_ids, output.log_probs),
                        "wrong": wrong,
                        "versions": output.weight_versions == [(version, 0, len(output.token_ids))],
                    }
                )
    return found


def everything(folder: Path) -> dict[str, Any]:
    """One engine: sampling, interruptions, aborts, refusals, an update in flight, faulty updates."""
    with engine(folder) as started, engine(folder, strategy="hf_infer") as embedded:
        found: dict[str, Any] = {
            "sampled": sampled(started, embedded, folder),
            "interrupted": interrupted_samples(started, folder),
            "aborted": aborted(started, folder),
            "unnoticed": ended_unnoticed(started),
            "lengths": cut_to_fit(started),
            "refusals": refusals(started),
            "in flight": update_in_flight(started, folder),
            "faults": faulty_updates(started, folder),
        }
        found["processes"] = len(multiprocessing.active_children())
    found["left"] = len(multiprocessing.active_children())
    return found


def sampled(started: GenerationStrategy, embedded: GenerationStrategy, folder: Path) -> list[dict[str, Any]]:
    """For each setting three samples: do they equal those of ``hf_infer``, and how far are the log-probs from those of
    the distribution that the settings make of the model's logits."""
    model, (prompt,) = load(folder, "fp32"), helpers.random_prompts([11])
    requests = [GenerationRequest(str(i), prompt, params, 3) for i, params in enumerate(SETTINGS)]
    ours, theirs = helpers.run(started, requests), helpers.run(embedded, requests)
    found = []
    for i, params in enumerate(SETTINGS):
        gap, alike, top = 0.0, [], 0.0
        for sample in range(3):
            output, other = ours[str(i), sample], theirs[str(i), sample]
            want = helpers.reference_log_probs(model, prompt, output.token_ids, params, (model.config.eos_token_id,))
            gap = max(gap, max(abs(a - b) for a, b in zip(want, output.log_probs, strict=True)))
            alike.append(output.token_ids == other.token_ids and output.finish_reason == other.finish_reason)
            pairs = zip(output.top_log_probs, other.top_log_probs, strict=True)
            top = max([top, *(abs(a[1] - b[1]) for mine, his in pairs for a, b in zip(mine, his, strict=True))])
        found.append({"gap": gap, "alike": alike, "top": top, "num_top": len(ours[str(i), 0].top_log_probs)})
    return found


def interrupted_samples(started: GenerationStrategy, folder: Path) -> list[list[Any]]:
    """Samples to their end in one go, and stopped and given to the engine again every few tokens; the last ends in a
    stop string that a stop may cut apart."""
    from transformers import AutoTokenizer

    prompts = helpers.random_prompts([7, 19, 4], seed=2)
    free = helpers.run(started, [GenerationRequest("f", prompts[2], helpers.greedy(30))])["f", 0]
    text = AutoTokenizer.from_pretrained(folder).decode(free.token_ids)
    params = [
        helpers.greedy(30, min_new_tokens=25, repetition_penalty=1.3),
        SamplingParams(30, seed=9, top_p=0.9),
        helpers.greedy(30, stop_strings=(text[8:12],)),
    ]
    requests = [GenerationRequest(str(i), p, params[i], 2) for i, p in enumerate(prompts)]
    whole = helpers.run(started, requests)
    pieces: Outputs = {}
    rounds = 0
    while requests:
        rounds += 1
        started.add_requests(requests)
        for _ in range(4):
            pieces |= {(output.request_id, output.sample_index): output for output in started.step()}
        stopped = {request.request_id: started.abort([request.request_id]) for request in requests}
        requests = [
            interrupted(request, left, [o for key, o in pieces.items() if key[0] == request.request_id])
            for request in requests
            if (left := stopped[request.request_id])
        ]
    compared: list[list[Any]] = [[rounds]]
    for key, output in sorted(whole.items()):
        other = pieces[key]
        gap = max(abs(a - b) for a, b in zip(output.log_probs, other.log_probs, strict=True))
        compared.append([output.token_ids == other.token_ids, output.finish_reason, other.finish_reason, gap])
        compared[-1].append(output.weight_versions == other.weight_versions)
    return compared


def aborted(started: GenerationStrategy, folder: Path) -> dict[str, Any]:
    """Three requests of two samples, two of them aborted after some tokens, one with no room yet in a batch of four."""
    model, prompts = load(folder, "fp32"), helpers.random_prompts([7, 9, 4])
    params = SamplingParams(60, min_new_tokens=60, seed=3)
    started.add_requests([GenerationRequest(str(i), prompt, params, 2) for i, prompt in enumerate(prompts)])
    for _ in range(5):
        started.step()
    gone = started.abort(["1", "2", "no such"])
    left = started.num_unfinished
    outputs = []
    while started.num_unfinished:
        outputs += started.step()
    gap = 0.0
    for output in gone[:2]:
        want = helpers.reference_log_probs(model, prompts[1], output.token_ids, params, (model.config.eos_token_id,))
        gap = max([gap, *(abs(a - b) for a, b in zip(want, output.log_probs, strict=True))])
    started.add_requests([GenerationRequest("1", prompts[1], params)])
    rest = started.abort()
    return {
        "aborted": [(o.request_id, o.sample_index, o.finish_reason) for o in gone],
        "tokens": [len(o.token_ids) for o in gone],
        "gap": gap,
        "left": left,
        "finished": [(o.request_id, o.sample_index, len(o.token_ids)) for o in outputs],
        "rest": [(o.request_id, o.token_ids, o.finish_reason) for o in rest],
    }


def ended_unnoticed(started: Any) -> tuple[int, str, bool]:
    """A sample that ends before a step could say so, taken back and given again."""
    (prompt,) = helpers.random_prompts([12])
    request = GenerationRequest("u", prompt, SamplingParams(6, min_new_tokens=6, seed=5))
    whole = helpers.run(started, [request])["u", 0]
    started.add_requests([request])
    while not all(task.done() for task in started._following.values()):
        started._run(started._wait_for_tokens())
    (back,) = started.abort()
    again = helpers.run(started, [interrupted(request, [back], [])])["u", 0]
    return len(back.token_ids), back.finish_reason, again.token_ids == whole.token_ids


def cut_to_fit(started: GenerationStrategy) -> tuple[int, str]:
    """A response that is longer than the engine's sequences."""
    (prompt,) = helpers.random_prompts([90])
    output = helpers.run(started, [GenerationRequest("r", prompt, SamplingParams(50, min_new_tokens=50))])["r", 0]
    return len(output.token_ids), output.finish_reason


def refusals(started: GenerationStrategy) -> list[str]:
    """Messages of what an engine refuses."""
    attempts = [
        lambda: started.add_requests([GenerationRequest("r", [5] * MAX_MODEL_LEN, helpers.greedy(4))]),
        lambda: started.add_requests([GenerationRequest("r", [5, 320], helpers.greedy(4))]),
        lambda: started.update_weights({}),
        lambda: started.finish_weight_update(),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def update_in_flight(started: GenerationStrategy, folder: Path) -> dict[str, Any]:
    """A greedy sample that is half done when the weights change: spans, the log-prob gaps before and after the change,
    and whether it went on as the new model does behind what was there. The engine's weights are put back."""
    old, new, (prompt,) = load(folder, "fp32"), load(folder, "fp32"), helpers.random_prompts([30])
    jolt(new, 1)
    params = helpers.greedy(60, min_new_tokens=60)
    ends = (old.config.eos_token_id,)
    started.add_requests([GenerationRequest("r", prompt, params)])
    for _ in range(12):
        assert not started.step()
    wrong = update(started, new, 5)
    outputs = []
    while started.num_unfinished:
        outputs += started.step()
    # The prefix cache holds nothing of the old weights.
    again = helpers.run(started, [GenerationRequest("again", prompt, helpers.greedy(10))])["again", 0]
    (output,) = outputs
    split = output.weight_versions[0][2]
    want = [helpers.reference_log_probs(model, prompt, output.token_ids, params, ends) for model in (old, new)]
    rest = helpers.generate_greedy(new, prompt + output.token_ids[:split], 60 - split, min_new_tokens=60 - split)
    return {
        "wrong": wrong,
        "spans": output.weight_versions,
        "continued": output.token_ids[split:] == rest,
        "before": max(abs(a - b) for a, b in zip(want[0][:split], output.log_probs[:split], strict=True)),
        "after": max(abs(a - b) for a, b in zip(want[1][split:], output.log_probs[split:], strict=True)),
        "again": again.token_ids == helpers.generate_greedy(new, prompt, 10),
        "put back": update(started, old, 6),
    }


def keep_in_flight(folder: Path) -> dict[str, Any]:
    """The same with an engine that keeps what it has computed."""
    with engine(folder, in_flight_update="keep") as started:
        return update_in_flight(started, folder)


def faulty_updates(started: GenerationStrategy, folder: Path) -> dict[str, Any]:
    """What the checksums find in updates that lost a bucket, changed an element, swapped two tensors, or are old."""
    model = load(folder, "fp32")
    names = [name for name, _ in model.named_parameters()]
    found: dict[str, Any] = {}
    for version, fault in enumerate(("none", "lost", "element", "swapped", "old", "put right"), start=11):
        old = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        jolt(model, version)
        meant = {name: tensor.detach() for name, tensor in model.named_parameters()}
        sent = dict(old if fault == "old" else meant)
        if fault == "lost":
            del sent[KEY]
        if fault == "element":
            sent[KEY] = sent[KEY].clone()
            sent[KEY][3, 5] += 1e-3
        if fault == "swapped":
            sent[KEY], sent[VALUE] = sent[VALUE], sent[KEY]
        started.start_weight_update(version)
        for name in names:
            if name in sent:
                started.update_weights({name: sent[name]})
        held = started.finish_weight_update()
        found[fault] = [name for name in names if held.get(name) != tensor_checksum(meant[name])]
    started.start_weight_update(20)
    try:
        started.step()
    except RuntimeError as error:
        found["step"] = str(error)
    started.update_weights({KEY: torch.zeros(3, 3), "model.no_such.weight": torch.zeros(2)})
    try:
        started.finish_weight_update()
    except RuntimeError as error:
        found["shape"] = str(error)
    return found


def mixed_up_scheduler(*arguments: Any) -> None:
    """A scheduler process whose model puts keys where values belong."""
    from sglang.srt.layers.linear import QKVParallelLinear

    from roll.strategies.sglang.engine import run_scheduler

    load_shard, other = QKVParallelLinear.weight_loader_v2, {"k": "v", "v": "k"}

    def mixed_up(self: Any, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        load_shard(self, param, loaded_weight, other.get(loaded_shard_id, loaded_shard_id))

    QKVParallelLinear.weight_loader_v2 = mixed_up
    run_scheduler(*arguments)


def mixed_up_by_the_loader(folder: Path) -> list[str]:
    """Names found wrong when SGLang's model puts keys where values belong."""
    from roll.strategies.sglang.engine import TokenEngine

    usual = TokenEngine.run_scheduler_process_func
    TokenEngine.run_scheduler_process_func = staticmethod(mixed_up_scheduler)
    try:
        with engine(folder) as started:
            return update(started, load(folder, "fp32"), 1)
    finally:
        TokenEngine.run_scheduler_process_func = staticmethod(usual)
