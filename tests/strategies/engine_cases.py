"""Questions to every engine that is an optional package. The functions run in the engine's own process and
return plain values; :mod:`tests.strategies.engine_checks` says what these must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.models.stored import StoredLayout
from roll.strategies.base import create_generation_strategy
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from roll.weight_sync.encoding import tensor_checksum
from tests.strategies.engine_models import jolt
from tests.strategies.hf_infer import helpers
from tests.strategies.moe_models import write_moe

MAX_MODEL_LEN = 96
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


def start(folder: Path, strategy: str, dtype: str = "fp32", **options: Any) -> GenerationStrategy:
    role = WorkerConfig(
        name="actor_infer",
        model_args=ModelArguments(model_name_or_path=str(folder), dtype=dtype),
        strategy_args=StrategyArguments(strategy, OPTIONS | options),
    )
    started = create_generation_strategy(role)
    started.initialize()
    return started


@contextmanager
def engine(folder: Path, strategy: str, dtype: str = "fp32", **options: Any) -> Iterator[GenerationStrategy]:
    started = start(folder, strategy, dtype, **options)
    try:
        yield started
    finally:
        started.shutdown()


def update(
    started: GenerationStrategy, model: Any, version: int, bucket: int = 3, with_buffers: bool = False
) -> list[str]:
    """Send the model's weights in buckets of so many tensors, which cut fused layers apart; names that differ there."""
    live = model.state_dict() if with_buffers else dict(model.named_parameters())
    live = {name: tensor.detach() for name, tensor in live.items()}
    weights = list(StoredLayout(model).on_the_way().views(live).items())
    started.start_weight_update(version)
    for begin in range(0, len(weights), bucket):
        started.update_weights(dict(weights[begin : begin + bucket]))
    held = started.finish_weight_update()
    return [name for name, tensor in weights if held.get(name) != tensor_checksum(tensor)]


def log_prob_gap(model: Any, prompt: list[int], token_ids: list[int], log_probs: Sequence[float]) -> float:
    """Largest distance between the engine's log-probs and those of a forward pass over the whole sample."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0].float()
    own = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
    return float((own - torch.tensor(log_probs)).abs().max())


def distribution_gaps(model: Any, prompt: list[int], output: GenerationOutput, params: SamplingParams) -> list[float]:
    """By token, the distance between the log-prob that an engine reports and that under the distribution which the
    settings make of the model's logits."""
    want = helpers.reference_log_probs(model, prompt, output.token_ids, params, (model.config.eos_token_id,))
    return [abs(a - b) for a, b in zip(want, output.log_probs, strict=True)]


def moe_folder(folder: Path, family: str, **changes: Any) -> Path:
    """A tiny model with experts, of sizes that engines have kernels for on a CPU."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    widths = {"intermediate_size": 64} | ({} if family == "mixtral" else {"head_dim": 32})
    if family in ("qwen3_moe", "glm4_moe"):
        widths["moe_intermediate_size"] = 32
    write_moe(folder, family, **{**sizes, **widths, **changes})
    helpers.make_tokenizer().save_pretrained(folder)
    return folder


def experts_after_updates(started: GenerationStrategy, model: Any) -> list[tuple[list[str], bool, float]]:
    """After 0, 1 and 2 updates of all weights as they travel: names found wrong, whether greedy tokens are the model's,
    and the largest distance of a log-prob."""
    found, prompts = [], helpers.random_prompts([5, 9], seed=4)
    for version in range(3):
        wrong = []
        if version:
            jolt(model, version)
            wrong = update(started, model, version, bucket=5, with_buffers=True)  # experts are cut apart
        requests = [GenerationRequest(f"{version}.{i}", p, helpers.greedy(10)) for i, p in enumerate(prompts)]
        outputs = helpers.run(started, requests)
        mine = [outputs[f"{version}.{i}", 0] for i in range(len(prompts))]
        tokens = [helpers.generate_greedy(model, prompt, 10) for prompt in prompts]
        pairs = zip(prompts, mine, strict=True)
        gaps = [log_prob_gap(model, prompt, output.token_ids, output.log_probs) for prompt, output in pairs]
        found.append((wrong, [output.token_ids for output in mine] == tokens, max(gaps)))
    return found


def greedy_after_updates(started: GenerationStrategy, embedded: GenerationStrategy, model: Any) -> list[dict[str, Any]]:
    """After 0, 1 and 10 updates of ``model``: tokens of the engine, of ``hf_infer`` (``embedded``) and of
    ``model.generate``, and the log-prob gap."""
    prompts, found, wrong = helpers.random_prompts([5, 9, 33, 60], seed=4), [], []
    requests = [GenerationRequest(str(i), prompt, helpers.greedy(20)) for i, prompt in enumerate(prompts)]
    for version in range(11):
        if version:
            jolt(model, version)
            wrong += update(started, model, version) + update(embedded, model, version)
        if version not in (0, 1, 10):
            continue
        ours, theirs = helpers.run(started, requests), helpers.run(embedded, requests)
        for i, prompt in enumerate(prompts):
            output = ours[str(i), 0]
            tokens = {"tokens": output.token_ids, "hf_infer": theirs[str(i), 0].token_ids}
            tokens["generate"] = helpers.generate_greedy(model, prompt, 20)
            gap = log_prob_gap(model, prompt, output.token_ids, output.log_probs)
            versions = output.weight_versions == [(version, 0, len(output.token_ids))]
            found.append({**tokens, "gap": gap, "wrong": list(wrong), "versions": versions})
    return found


Advance = Callable[[GenerationStrategy, Sequence[str]], None]
"""Let an engine work until the samples of these requests have begun, none of them is done."""


def steps(count: int) -> Advance:
    """For an engine that computes a token a step."""

    def advance(started: GenerationStrategy, _: Sequence[str]) -> None:
        for _ in range(count):
            assert not started.step()

    return advance


def until_begun(started: GenerationStrategy, request_ids: Sequence[str]) -> None:
    """For an engine that works on between the steps, and may have done much more than one of them has seen."""
    while any(not output.token_ids for output in started.running(request_ids)):
        assert not started.step()


def update_in_flight(started: GenerationStrategy, advance: Advance, old: Any, new: Any, version: int) -> dict[str, Any]:
    """A greedy sample that is half done when the weights change: spans, the log-prob gaps before and after the change,
    and whether it went on as the new model does behind what was there."""
    (prompt,), params = helpers.random_prompts([30]), helpers.greedy(60, min_new_tokens=60)
    started.add_requests([GenerationRequest("r", prompt, params)])
    advance(started, ["r"])
    wrong = update(started, new, version)
    outputs = helpers.run_out(started)
    # The prefix cache holds nothing of the old weights.
    again = helpers.run(started, [GenerationRequest("again", prompt, helpers.greedy(10))])["again", 0]
    (output,) = outputs
    split = output.weight_versions[0][2]
    rest = helpers.generate_greedy(new, prompt + output.token_ids[:split], 60 - split, min_new_tokens=60 - split)
    return {
        "wrong": wrong,
        "spans": output.weight_versions,
        "continued": output.token_ids[split:] == rest,
        "before": max(distribution_gaps(old, prompt, output, params)[:split]),
        "after": max(distribution_gaps(new, prompt, output, params)[split:]),
        "again": again.token_ids == helpers.generate_greedy(new, prompt, 10),
    }


def interrupted_samples(
    started: GenerationStrategy, folder: Path, drawn: SamplingParams, num_steps: int
) -> dict[str, Any]:
    """Samples to their end in one go, and stopped and given to the engine again every ``num_steps``; the last ends in a
    stop string that a stop may cut apart, one has the settings ``drawn``, the others are greedy."""
    prompts = helpers.random_prompts([7, 19, 4], seed=2)
    free = helpers.run(started, [GenerationRequest("f", prompts[2], helpers.greedy(30))])["f", 0]
    text = AutoTokenizer.from_pretrained(folder).decode(free.token_ids)
    params = [
        helpers.greedy(30, min_new_tokens=25, repetition_penalty=1.3),
        drawn,
        helpers.greedy(30, stop_strings=(text[8:12],)),
    ]
    requests = [GenerationRequest(str(i), p, params[i], 2) for i, p in enumerate(prompts)]
    whole = helpers.run(started, requests)
    pieces: dict[tuple[str, int], GenerationOutput] = {}
    rounds = 0
    while requests:
        rounds += 1
        started.add_requests(requests)
        for _ in range(num_steps):
            pieces |= {(output.request_id, output.sample_index): output for output in started.step()}
        stopped = {request.request_id: started.abort([request.request_id]) for request in requests}
        requests = [
            interrupted(request, left, [o for key, o in pieces.items() if key[0] == request.request_id])
            for request in requests
            if (left := stopped[request.request_id])
        ]
    pairs = [(whole[key].log_probs, pieces[key].log_probs) for key in whole]
    return {
        "rounds": rounds,
        "whole": [(o.token_ids, o.finish_reason, o.weight_versions) for _, o in sorted(whole.items())],
        "pieces": [(o.token_ids, o.finish_reason, o.weight_versions) for _, o in sorted(pieces.items())],
        "gap": max(abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True)),
    }


def aborted(started: GenerationStrategy, advance: Advance, model: Any) -> dict[str, Any]:
    """Three requests of two samples, two of them aborted after some tokens, one with no room yet in a batch of four."""
    prompts, params = helpers.random_prompts([7, 9, 4]), SamplingParams(60, min_new_tokens=60, seed=3)
    started.add_requests([GenerationRequest(str(i), prompt, params, 2) for i, prompt in enumerate(prompts)])
    advance(started, ["0", "1"])
    running = started.running(["1", "2", "no such"])
    gone = started.abort(["1", "2", "no such"])
    left = started.num_unfinished
    outputs = helpers.run_out(started)
    started.add_requests([GenerationRequest("1", prompts[1], params)])
    rest = started.abort()
    return {
        "told before": running == gone,
        "aborted": [(o.request_id, o.sample_index, o.finish_reason) for o in gone],
        "tokens": [len(o.token_ids) for o in gone],
        "gap": max(gap for o in gone[:2] for gap in distribution_gaps(model, prompts[1], o, params)),
        "left": left,
        "finished": [(o.request_id, o.sample_index, len(o.token_ids)) for o in outputs],
        "rest": [(o.request_id, o.token_ids, o.finish_reason) for o in rest],
    }


def cut_to_fit(started: GenerationStrategy) -> tuple[int, str]:
    """A response that is longer than the engine's sequences."""
    (prompt,) = helpers.random_prompts([90])
    output = helpers.run(started, [GenerationRequest("r", prompt, SamplingParams(50, min_new_tokens=50))])["r", 0]
    return len(output.token_ids), output.finish_reason


def refusals(started: GenerationStrategy, more: Sequence[Callable[[], Any]] = ()) -> list[str]:
    """Messages of what an engine refuses."""
    attempts: list[Callable[[], Any]] = [
        lambda: started.add_requests([GenerationRequest("r", [5] * MAX_MODEL_LEN, helpers.greedy(4))]),
        lambda: started.add_requests([GenerationRequest("r", [5, 320], helpers.greedy(4))]),
        lambda: started.add_requests([GenerationRequest("r", [5], SamplingParams(4, top_p=0.0))]),
        lambda: started.update_weights({}),
        lambda: started.finish_weight_update(),
    ]
    return [message(attempt) for attempt in [*attempts, *more]]


def not_finite_alone(started: GenerationStrategy, model: Any, version: int) -> dict[str, Any]:
    """Requests of which two have a token in their prompts that the model computes nan from: what became of them, and
    whether the others are what they are without them. The model's embeddings must not be tied."""
    prompts = dict(zip(("a", "bad 1", "b", "bad 2", "c"), helpers.random_prompts([4, 21, 7, 5, 9]), strict=True))
    params = SamplingParams(12, temperature=0.9, seed=3)
    good = [GenerationRequest(name, prompts[name], params, 2) for name in "abc"]
    alone = helpers.run(started, good)
    known = {token for output in alone.values() for token in output.token_ids}.union(*prompts.values())
    token = next(token for token in range(3, model.config.vocab_size) if token not in known)
    model.model.embed_tokens.weight[token] = torch.nan
    wrong = update(started, model, version)
    bad = [
        GenerationRequest(name, [*prompts[name], token], SamplingParams(12, temperature=temperature, seed=4), 2)
        for name, temperature in (("bad 1", 0.9), ("bad 2", 0.0))
    ]
    started.add_requests([good[0], bad[0], good[1], bad[1], good[2]])
    failed: dict[str, str] = {}
    done: dict[tuple[str, int], Any] = {}
    while started.num_unfinished:
        for output in started.step():
            done[output.request_id, output.sample_index] = output
        failed |= started.take_failures()
    same = {key: output.token_ids == alone[key].token_ids for key, output in done.items()}
    return {"wrong": wrong, "failed": failed, "same": same}


def message(attempt: Callable[[], Any]) -> str:
    """Of the error with which an attempt is refused; empty: it is not."""
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def faulty_updates(started: GenerationStrategy, model: Any, first: int = 1) -> dict[str, list[str]]:
    """Findings of the checksums in updates that lost a bucket, changed an element, swapped two tensors, or are old;
    ``first``: version of the first of seven."""
    names = [name for name, _ in model.named_parameters()]
    found = {}
    for version, fault in enumerate(("none", "lost", "element", "swapped", "old", "put right"), start=first):
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
    model.get_parameter(KEY)[1, 2] = float("nan")
    found["no number"] = update(started, model, first + 6)
    return found


def mix_up(layers: Any, loader: str) -> Callable[..., None]:
    """Make a class of fused queries, keys and values put keys where values belong, in its method ``loader``, which is
    returned as it was."""
    load_shard, other = getattr(layers, loader), {"k": "v", "v": "k"}

    def mixed_up(self: Any, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        load_shard(self, param, loaded_weight, other.get(loaded_shard_id, loaded_shard_id))

    setattr(layers, loader, mixed_up)
    return load_shard  # type: ignore[no-any-return]
