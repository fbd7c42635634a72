"""What the tests run in the engine process: each function starts an engine and returns plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.strategies.factory import create_generation_strategy
from roll.strategies.generation import (
    GenerationOutput,
    GenerationRequest,
    GenerationStrategy,
    SamplingParams,
    interrupted,
)
from roll.weight_sync.checksum import tensor_checksum
from tests.strategies.hf_infer import helpers

MAX_MODEL_LEN = 96
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COMMON: dict[str, Any] = {
    **helpers._COMMON,
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,  # smaller heads have no kernel
}
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**{**_COMMON, "num_key_value_heads": 2}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**{**_COMMON, "num_key_value_heads": 1}, tie_word_embeddings=False),
}


def save_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = helpers.make_tokenizer()
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).requires_grad_(False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    jolt(model, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval().requires_grad_(False)


def jolt(model: Any, seed: int) -> None:
    """Move every weight, so that no tensor is constant and none stays what it was."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


OPTIONS = {"max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_MODEL_LEN}
_shared: dict[Path, GenerationStrategy] = {}


def start(folder: Path, dtype: str = "fp32", strategy: str = "vllm", **options: Any) -> GenerationStrategy:
    role = WorkerConfig(
        name="actor_infer",
        model_args=ModelArguments(model_name_or_path=str(folder), dtype=dtype),
        strategy_args=StrategyArguments(strategy, OPTIONS | options),
    )
    started = create_generation_strategy(role)
    started.initialize()
    return started


@contextmanager
def engine(folder: Path, dtype: str = "fp32", strategy: str = "vllm", **options: Any) -> Iterator[GenerationStrategy]:
    """An engine of a case's own; there is one vLLM in the process at a time."""
    if strategy == "vllm":
        drop_shared_engine()
    started = start(folder, dtype, strategy, **options)
    yield started
    started.shutdown()


def shared_engine(folder: Path) -> GenerationStrategy:
    """An engine for cases that leave its weights alone and nothing in it."""
    if folder not in _shared:
        drop_shared_engine()
        _shared[folder] = start(folder)
    assert not _shared[folder].num_unfinished
    return _shared[folder]


def drop_shared_engine() -> None:
    while _shared:
        _shared.popitem()[1].shutdown()


def update(started: GenerationStrategy, model: Any, version: int, bucket: int = 3) -> list[str]:
    """Send the model's weights in buckets of so many tensors, which cut fused layers apart; names that differ there."""
    weights = list(model.named_parameters())
    started.start_weight_update(version)
    for begin in range(0, len(weights), bucket):
        started.update_weights({name: tensor.detach() for name, tensor in weights[begin : begin + bucket]})
    held = started.finish_weight_update()
    return [name for name, tensor in weights if held.get(name) != tensor_checksum(tensor)]


def log_prob_gap(model: Any, prompt: list[int], token_ids: list[int], log_probs: Sequence[float]) -> float:
    """Largest distance between the engine's log-probs and those of a forward pass over the whole sample."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0].float()
    own = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
    return float((own - torch.tensor(log_probs)).abs().max())


def greedy_after_updates(folder: Path, dtype: str) -> list[dict[str, Any]]:
    """After 0, 1 and 10 updates: tokens of vLLM, of ``hf_infer`` and of ``model.generate``, and the log-prob gap."""
    model, prompts = load(folder, dtype), helpers.random_prompts([5, 9, 33, 60], seed=4)
    requests = [GenerationRequest(str(i), prompt, helpers.greedy(20)) for i, prompt in enumerate(prompts)]
    found = []
    with engine(folder, dtype) as started, engine(folder, dtype, "hf_infer") as embedded:
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
                        "vllm": output.token_ids,
                        "hf_infer": theirs[str(i), 0].token_ids,
                        "generate": helpers.generate_greedy(model, prompt, 20),
                        "gap": log_prob_gap(model, prompt, output.token_ids, output.log_probs),
                        "wrong": wrong,
                        "versions": output.weight_versions == [(version, 0, len(output.token_ids))],
                    }
                )
    return found


def faulty_updates(folder: Path) -> dict[str, list[str]]:
    """What the checksums find in updates that lost a bucket, changed an element, swapped two tensors, or are old."""
    model = load(folder, "fp32")
    names = [name for name, _ in model.named_parameters()]
    key = "model.layers.0.self_attn.k_proj.weight"
    value = key.replace("k_proj", "v_proj")
    found = {}
    with engine(folder) as started:
        for version, fault in enumerate(("none", "lost", "element", "swapped", "old", "put right"), start=1):
            old = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
            jolt(model, version)
            meant = {name: tensor.detach() for name, tensor in model.named_parameters()}
            sent = dict(old if fault == "old" else meant)
            if fault == "lost":
                del sent[key]
            if fault == "element":
                sent[key] = sent[key].clone()
                sent[key][3, 5] += 1e-3
            if fault == "swapped":
                sent[key], sent[value] = sent[value], sent[key]
            started.start_weight_update(version)
            for name in names:
                if name in sent:
                    started.update_weights({name: sent[name]})
            held = started.finish_weight_update()
            found[fault] = [name for name in names if held.get(name) != tensor_checksum(meant[name])]
        model.get_parameter(key)[1, 2] = float("nan")
        found["no number"] = update(started, model, 7)
    return found


def other_dtype(folder: Path) -> tuple[list[str], list[str]]:
    """Names found wrong when a float32 model goes to a bf16 engine, right and with one element changed on the way."""
    model = load(folder, "fp32")
    with engine(folder, "bf16") as started:
        jolt(model, 1)
        right = update(started, model, 1)
        held = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        name = "model.layers.1.mlp.up_proj.weight"
        held[name][2, 3] += 1
        started.start_weight_update(2)
        started.update_weights(held)
        checksums = started.finish_weight_update()
    sent = {key: tensor_checksum(tensor) for key, tensor in model.named_parameters()}
    return right, [key for key, checksum in sent.items() if checksums[key] != checksum]


def mixed_up_by_the_loader(folder: Path) -> list[str]:
    """Names found wrong when vLLM puts keys where values belong."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    load_shard, other = QKVParallelLinear.weight_loader_v2, {"k": "v", "v": "k"}

    def mixed_up(self: Any, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        load_shard(self, param, loaded_weight, other.get(loaded_shard_id, loaded_shard_id))

    QKVParallelLinear.weight_loader_v2 = mixed_up
    try:
        with engine(folder) as started:
            return update(started, load(folder, "fp32"), 1)
    finally:
        QKVParallelLinear.weight_loader_v2 = load_shard


def left_unpacked(folder: Path) -> str:
    """The error of an update after which a layer goes on multiplying with its old packed matrix."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model = load(folder, "fp32")
    with engine(folder) as started:
        held = started._engine.model_executor.driver_worker.model_runner.model
        layer = next(layer for layer in held.modules() if isinstance(layer, MergedColumnParallelLinear))
        layer.quant_method.process_weights_after_loading = lambda layer: None
        jolt(model, 1)
        try:
            update(started, model, 1)
        except RuntimeError as error:
            return str(error)
    return ""


def together_and_alone(folder: Path) -> list[dict[tuple[str, int], Any]]:
    """Three prompts at once, which a step has no room for; one of them by itself; the same with the next seed."""
    prompts = helpers.random_prompts([60, 43, 71])
    requests = [GenerationRequest(str(i), prompt, SamplingParams(20, seed=11), 3) for i, prompt in enumerate(prompts)]
    neighbour = GenerationRequest("1", prompts[1], SamplingParams(20, seed=12), 3)
    return [helpers.run(shared_engine(folder), batch) for batch in (requests, requests[1:2], [neighbour])]


def sampled_gaps(folder: Path, settings: list[SamplingParams]) -> list[float]:
    """For each setting, the largest distance between the reported log-probs and those of the distribution that the
    settings make of the model's logits."""
    model, (prompt,) = load(folder, "fp32"), helpers.random_prompts([11])
    requests = [GenerationRequest(str(i), prompt, params, 3) for i, params in enumerate(settings)]
    gaps = []
    outputs = helpers.run(shared_engine(folder), requests)
    for i, params in enumerate(settings):
        gap = 0.0
        for sample in range(3):
            output = outputs[str(i), sample]
            want = helpers.reference_log_probs(model, prompt, output.token_ids, params)
            gap = max(gap, max(abs(a - b) for a, b in zip(want, output.log_probs, strict=True)))
        gaps.append(gap)
    return gaps


def update_in_flight(folder: Path, mode: str) -> dict[str, Any]:
    """A greedy sample that is half done when the weights change: spans, the log-prob gaps before and after the change,
    and whether it went on as the new model does behind what was there."""
    old, new, (prompt,) = load(folder, "fp32"), load(folder, "fp32"), helpers.random_prompts([40])
    jolt(new, 1)
    with engine(folder, in_flight_update=mode) as started:
        started.add_requests([GenerationRequest("r", prompt, helpers.greedy(40, min_new_tokens=40))])
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
    tokens, log_probs = output.token_ids, output.log_probs
    rest = helpers.generate_greedy(new, prompt + tokens[:split], 40 - split, min_new_tokens=40 - split)
    return {
        "wrong": wrong,
        "spans": output.weight_versions,
        "continued": tokens[split:] == rest,
        "before": greedy_gap(old, prompt, tokens[:split], log_probs[:split]),
        "after": greedy_gap(new, prompt + tokens[:split], tokens[split:], log_probs[split:]),
        "again": again.token_ids == helpers.generate_greedy(new, prompt, 10),
    }


def greedy_gap(model: Any, prompt: list[int], token_ids: list[int], log_probs: Sequence[float]) -> float:
    """As :func:`log_prob_gap`, for tokens before which the end token was banned."""
    params = helpers.greedy(40, min_new_tokens=40, stop_token_ids=(model.config.eos_token_id,))
    want = helpers.reference_log_probs(model, prompt, token_ids, params, ())
    return max(abs(a - b) for a, b in zip(want, log_probs, strict=True))


def interrupted_samples(folder: Path) -> list[list[Any]]:
    """Greedy samples to their end in one go, and stopped and given to the engine again every few steps; the last ends
    in a stop string that a stop may cut apart."""
    from transformers import AutoTokenizer

    started, prompts = shared_engine(folder), helpers.random_prompts([7, 19, 4], seed=2)
    free = helpers.run(started, [GenerationRequest("f", prompts[2], helpers.greedy(30))])["f", 0]
    text = AutoTokenizer.from_pretrained(folder).decode(free.token_ids)
    params = [
        helpers.greedy(30, min_new_tokens=25, repetition_penalty=1.3),
        helpers.greedy(30),
        helpers.greedy(30, stop_strings=(text[8:12],)),
    ]
    requests = [GenerationRequest(str(i), p, params[i], 2) for i, p in enumerate(prompts)]
    whole = helpers.run(started, requests)
    pieces: dict[tuple[str, int], GenerationOutput] = {}
    while requests:
        started.add_requests(requests)
        for _ in range(3):
            pieces |= {(output.request_id, output.sample_index): output for output in started.step()}
        stopped = {request.request_id: started.abort([request.request_id]) for request in requests}
        requests = [
            interrupted(request, left, [o for key, o in pieces.items() if key[0] == request.request_id])
            for request in requests
            if (left := stopped[request.request_id])
        ]
    return [
        [(o.token_ids, o.finish_reason, o.weight_versions) for _, o in sorted(outputs.items())]
        + [np.concatenate([o.log_probs for _, o in sorted(outputs.items())])]
        for outputs in (whole, pieces)
    ]


def aborted(folder: Path) -> dict[str, Any]:
    """Two requests of two samples, one aborted after five steps, with one more that had no room yet."""
    model, prompts = load(folder, "fp32"), helpers.random_prompts([7, 9, 4])
    params, started = SamplingParams(30, seed=3), shared_engine(folder)
    started.add_requests([GenerationRequest(str(i), prompt, params, 2) for i, prompt in enumerate(prompts)])
    for _ in range(5):
        started.step()
    gone = started.abort(["1", "2", "no such"])
    left = started.num_unfinished
    outputs = []
    while started.num_unfinished:
        outputs += started.step()
    started.add_requests([GenerationRequest("1", prompts[1], params)])
    rest = started.abort()
    return {
        "aborted": [(o.request_id, o.sample_index, len(o.token_ids), o.finish_reason) for o in gone],
        "gap": max(log_prob_gap(model, prompts[1], o.token_ids, o.log_probs) for o in gone[:2]),
        "left": left,
        "finished": [(o.request_id, o.sample_index, len(o.token_ids)) for o in outputs],
        "rest": [(o.request_id, o.token_ids, o.finish_reason) for o in rest],
    }


def refusals(folder: Path) -> list[str]:
    """Messages of what an engine refuses."""
    attempts = [
        lambda e: e.add_requests([GenerationRequest("r", [5] * MAX_MODEL_LEN, helpers.greedy(4))]),
        lambda e: e.add_requests([GenerationRequest("r", [5, 320], helpers.greedy(4))]),
        lambda e: e.add_requests([GenerationRequest("r", [5], SamplingParams(4, top_p=0.0))]),
        lambda e: e.update_weights({}),
        lambda e: e.finish_weight_update(),
        lambda e: (e.start_weight_update(1), e.step()),
        lambda e: e.update_weights({"model.no_such.weight": torch.zeros(2)}),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt(shared_engine(folder))
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    drop_shared_engine()  # its update is half done
    return messages


def refused_at_start(folder: Path) -> str:
    """The message for a model whose heads have no kernel on a CPU."""
    config = Qwen2Config(**{**_COMMON, "num_attention_heads": 4, "head_dim": 16})
    config.save_pretrained(folder)
    helpers.make_tokenizer().save_pretrained(folder)
    try:
        start(folder)
    except ValueError as error:
        return str(error)
    return ""


def cut_to_fit(folder: Path) -> tuple[list[int], str]:
    """A response that is longer than the engine's sequences."""
    (prompt,) = helpers.random_prompts([90])
    request = GenerationRequest("r", prompt, SamplingParams(50, min_new_tokens=50))
    output = helpers.run(shared_engine(folder), [request])["r", 0]
    return output.token_ids, output.finish_reason


def stop_strings(folder: Path) -> list[tuple[list[int], str]]:
    """The same prompt with the stop string that ``hf_infer`` and vLLM are to find at the same token."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("the quick brown fox")["input_ids"]
    with engine(folder, strategy="hf_infer") as embedded:
        free = helpers.run(embedded, [GenerationRequest("r", prompt, helpers.greedy(20))])["r", 0]
        text = tokenizer.decode(free.token_ids)
        request = GenerationRequest("s", prompt, helpers.greedy(20, stop_strings=(text[4:7],)))
        outputs = [helpers.run(one, [request])["s", 0] for one in (embedded, shared_engine(folder))]
    return [(output.token_ids, output.finish_reason) for output in outputs]
