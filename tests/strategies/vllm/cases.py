"""Functions that the tests run in the engine process: each function starts an engine and returns plain values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config

from roll.config.strategies.engines import adapter_engine_args
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from roll.weight_sync.encoding import tensor_checksum
from roll.workers.generation import Quarantine
from tests.strategies import engine_cases, stream_cases
from tests.strategies.adapter_cases import RANK, Policy, World, adapters_alone, in_flight, spoilt_on_the_way
from tests.strategies.engine_cases import MAX_MODEL_LEN, distribution_gaps, message, steps, update
from tests.strategies.engine_models import COMMON, jolt, load
from tests.strategies.greedy_answers import PROMPTS, engine_answers
from tests.strategies.hf_infer import helpers

_shared: dict[Path, GenerationStrategy] = {}


@contextmanager
def engine(folder: Path, dtype: str = "fp32", **options: Any) -> Iterator[GenerationStrategy]:
    """An engine of a case's own; there is one vLLM in the process at a time."""
    drop_shared_engine()
    with engine_cases.engine(folder, "vllm", dtype, max_num_batched_tokens=MAX_MODEL_LEN, **options) as started:
        yield started


def shared_engine(folder: Path) -> GenerationStrategy:
    """An engine for cases that leave its weights alone and nothing in it."""
    if folder not in _shared:
        drop_shared_engine()
        _shared[folder] = engine_cases.start(folder, "vllm", max_num_batched_tokens=MAX_MODEL_LEN)
    assert not _shared[folder].num_unfinished
    return _shared[folder]


def drop_shared_engine() -> None:
    while _shared:
        _shared.popitem()[1].shutdown()


def greedy_after_updates(folder: Path, dtype: str) -> list[dict[str, Any]]:
    with engine(folder, dtype) as started, engine_cases.engine(folder, "hf_infer", dtype) as embedded:
        return engine_cases.greedy_after_updates(started, embedded, load(folder, dtype))


def greedy_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    drop_shared_engine()
    with engine_cases.engine(folder, "vllm", max_num_seqs=PROMPTS, max_model_len=128) as started:
        return engine_answers(started, prompts)


def not_finite_and_faulty(folder: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    with engine(folder) as started:
        alone = engine_cases.not_finite_alone(started, load(folder), 1)
        return alone, engine_cases.faulty_updates(started, load(folder), first=2)


def other_dtype(folder: Path) -> tuple[list[str], list[str]]:
    """Names found wrong when a float32 model goes to a bf16 engine, right and with one element changed on the way."""
    model = load(folder)
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

    usual = engine_cases.mix_up(QKVParallelLinear, "weight_loader_v2")
    try:
        with engine(folder) as started:
            return update(started, load(folder), 1)
    finally:
        QKVParallelLinear.weight_loader_v2 = usual


def left_unpacked(folder: Path) -> str:
    """The error of an update after which a layer goes on multiplying with its old packed matrix."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model = load(folder)
    with engine(folder) as started:
        held = started._engine.model_executor.driver_worker.model_runner.model
        layer = next(layer for layer in held.modules() if isinstance(layer, MergedColumnParallelLinear))
        layer.quant_method.process_weights_after_loading = lambda layer: None
        jolt(model, 1)
        return message(lambda: update(started, model, 1))


def together_and_alone(folder: Path) -> list[dict[tuple[str, int], Any]]:
    """Three prompts at once, which a step has no room for; one of them by itself; the same with the next seed."""
    prompts = helpers.random_prompts([60, 43, 71])
    requests = [GenerationRequest(str(i), prompt, SamplingParams(20, seed=11), 3) for i, prompt in enumerate(prompts)]
    neighbour = GenerationRequest("1", prompts[1], SamplingParams(20, seed=12), 3)
    return [helpers.run(shared_engine(folder), batch) for batch in (requests, requests[1:2], [neighbour])]


def sampled_gaps(folder: Path, settings: list[SamplingParams]) -> list[float]:
    """For each setting, the largest distance between the reported log-probs and those of the distribution that the
    settings make of the model's logits."""
    model, (prompt,) = load(folder), helpers.random_prompts([11])
    requests = [GenerationRequest(str(i), prompt, params, 3) for i, params in enumerate(settings)]
    outputs = helpers.run(shared_engine(folder), requests)
    return [
        max(gap for sample in range(3) for gap in distribution_gaps(model, prompt, outputs[str(i), sample], params))
        for i, params in enumerate(settings)
    ]


def repeating_prompt(model: Any, temperature: float) -> tuple[list[int], torch.Tensor]:
    """A prompt ``[a, b, ...]`` that a is likely to follow and after that b; the probabilities of what comes then."""
    (prompt,) = helpers.random_prompts([11])

    def after(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return (model(rows).logits[:, -1] / temperature).softmax(-1)

    tokens = torch.arange(model.config.vocab_size)
    rows = torch.tensor(prompt).repeat(len(tokens), 1)
    rows[:, 0] = tokens
    a = int(after(rows).diagonal().argmax())
    rows[:, 0], rows[:, 1] = a, tokens
    then = after(torch.cat([rows, torch.full((len(rows), 1), a)], 1))
    b = int((after(rows)[:, a] * then.diagonal().clamp(max=0.5)).argmax())
    return rows[b].tolist(), then[b]


def speculating(folder: Path, settings: list[SamplingParams], method: str, **options: Any) -> dict[str, Any]:
    """With drafts of what followed a token before: greedy tokens before and after an update, the largest gap of
    :func:`sampled_gaps`, the engine's counts, and what is sampled where the draft of :func:`repeating_prompt` is."""
    model = load(folder)
    prompt, wanted = repeating_prompt(model, temperature=0.3)
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with engine(folder, speculative_config=speculation, **options) as started:
        found: dict[str, Any] = {"greedy": [], "wanted": wanted.tolist(), "prompt": prompt}
        pairs = GenerationRequest("pairs", prompt, SamplingParams(2, temperature=0.3, seed=5), 1000)
        sampled = [output.token_ids for output in helpers.run(started, [pairs]).values()]
        found["pair_counts"] = dict(started.counts)
        found["second"] = Counter(second for first, second in sampled if first == prompt[0])
        for version in range(2):
            if version:
                jolt(model, version)
                found["wrong"] = update(started, model, version)
            outputs = helpers.run(started, [GenerationRequest("greedy", prompt, helpers.greedy(60))])
            found["greedy"].append((outputs["greedy", 0].token_ids, helpers.generate_greedy(model, prompt, 60)))
        requests = [GenerationRequest(str(i), prompt, params, 3) for i, params in enumerate(settings)]
        outputs = helpers.run(started, requests)
    found["gap"] = max(
        gap
        for i, params in enumerate(settings)
        for sample in range(3)
        for gap in distribution_gaps(model, prompt, outputs[str(i), sample], params)
    )
    return found


def update_in_flight(folder: Path, mode: str) -> dict[str, Any]:
    old, new = load(folder), load(folder)
    jolt(new, 1)
    with engine(folder, in_flight_update=mode) as started:
        return engine_cases.update_in_flight(started, steps(12), old, new, 5)


def interrupted_samples(folder: Path) -> dict[str, Any]:
    return engine_cases.interrupted_samples(shared_engine(folder), folder, helpers.greedy(30), num_steps=3)


def aborted(folder: Path) -> dict[str, Any]:
    return engine_cases.aborted(shared_engine(folder), steps(5), load(folder))


def growing_samples(folder: Path) -> dict[str, Any]:
    return stream_cases.growing_samples(shared_engine(folder), steps(9), folder)


def refusals(folder: Path) -> list[str]:
    """Messages of what an engine refuses, also in the course of an update."""
    started = shared_engine(folder)
    more = [
        lambda: (started.start_weight_update(1), started.step()),
        lambda: started.update_weights({"model.no_such.weight": torch.zeros(2)}),
    ]
    messages = engine_cases.refusals(started, more)
    drop_shared_engine()  # its update is half done
    return messages


def refused_at_start(folder: Path) -> str:
    """The message for a model whose heads have no kernel on a CPU."""
    config = Qwen2Config(**{**COMMON, "num_attention_heads": 4, "head_dim": 16})
    config.save_pretrained(folder)
    helpers.make_tokenizer().save_pretrained(folder)
    return message(lambda: engine_cases.start(folder, "vllm"))


def cut_to_fit(folder: Path) -> tuple[int, str]:
    return engine_cases.cut_to_fit(shared_engine(folder))


def stop_strings(folder: Path) -> list[tuple[list[int], str]]:
    """The same prompt with the stop string that ``hf_infer`` and vLLM are to find at the same token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("the quick brown fox")["input_ids"]
    with engine_cases.engine(folder, "hf_infer") as embedded:
        free = helpers.run(embedded, [GenerationRequest("r", prompt, helpers.greedy(20))])["r", 0]
        text = tokenizer.decode(free.token_ids)
        request = GenerationRequest("s", prompt, helpers.greedy(20, stop_strings=(text[4:7],)))
        outputs = [helpers.run(one, [request])["s", 0] for one in (embedded, shared_engine(folder))]
    return [(output.token_ids, output.finish_reason) for output in outputs]


def failing_alone(folder: Path) -> dict[str, Any]:
    """Six requests of which two make vLLM's step raise, and one beyond vLLM's own limit: what became of them,
    and what the others are without them."""
    started = shared_engine(folder)
    prompts = helpers.random_prompts([4, 40, 7, 40, 9, 6])
    prompts[3] = list(prompts[1])  # the cache must not give what a failed step was to compute
    names = ["a", "bad 1", "b", "c", "bad 2", "d"]
    params = SamplingParams(12, temperature=0.9, seed=3)
    requests = [GenerationRequest(name, prompt, params, 2) for name, prompt in zip(names, prompts, strict=True)]
    good = [request for request in requests if not request.request_id.startswith("bad")]
    alone = helpers.run(started, good)
    started.recover()
    executor = started._engine.engine_core.engine_core.model_executor  # type: ignore[attr-defined]
    execute = executor.execute_model

    def poisoned(scheduled: Any, *args: Any, **options: Any) -> Any:
        if any(name.startswith("bad") for name in scheduled.num_scheduled_tokens):
            raise RuntimeError("poison")
        return execute(scheduled, *args, **options)

    open_requests = {request.request_id: request for request in requests}
    done: dict[tuple[str, int], Any] = {}
    failed: dict[str, str] = {}

    def begun(outputs: Sequence[GenerationOutput]) -> list[GenerationRequest]:
        here = [r for name, r in open_requests.items() if name not in failed and quarantine.waiting(name) is None]
        finished = {r.request_id: [o for (name, _), o in done.items() if name == r.request_id] for r in here}
        return [
            interrupted(r, [o for o in outputs if o.request_id == r.request_id], finished[r.request_id])
            for r in here
            if len(finished[r.request_id]) < r.num_samples
        ]

    quarantine = Quarantine(started, begun)
    executor.execute_model = poisoned
    try:
        for request in requests:
            started.add_requests([request])
        too_much = GenerationRequest("too much", prompts[0], replace(params, top_log_probs=100), 2)
        try:
            started.add_requests([too_much])
        except Exception as error:  # vLLM's own, which is no ValueError
            failed["too much"] = str(error)
        while quarantine.has_work:
            for output in quarantine.step(failed):
                done[output.request_id, output.sample_index] = output
    finally:
        executor.execute_model = execute
    pairs = [(output.log_probs, alone[key].log_probs) for key, output in done.items()]
    close = [abs(a - b) for own, other in pairs for a, b in zip(own, other, strict=True)]
    tokens = {key: output.token_ids == alone[key].token_ids for key, output in done.items()}
    return {"failed": failed, "tokens": tokens, "largest": max(close), "left": started.num_unfinished}


def experts_after_updates(folder: Path, **options: Any) -> tuple[list[tuple[list[str], bool, float]], list[str]]:
    """See :func:`engine_cases.experts_after_updates`; and the names that were not read back from vLLM's model."""
    from roll.strategies.vllm.verification import ReloadVerifier

    unread: list[str] = []
    finish = ReloadVerifier.finish

    def finish_watched(self: ReloadVerifier, remember: bool = False) -> dict[str, int]:
        held = finish(self, remember)
        unread.extend(self._received)
        return held

    with engine(folder, **options) as started, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReloadVerifier, "finish", finish_watched)
        return engine_cases.experts_after_updates(started, load(folder)), unread


def prompt_scores(folder: Path) -> dict[str, Any]:
    """Of prompts that are asked for while a sample is in flight, which goes on as if nothing had been asked."""
    prompts, model = [[5, 9, 13, 40, 7], [8, 3]], load(folder)
    with engine(folder, engine_args={"max_logprobs": -1}) as started:
        request = GenerationRequest("sample", [4, 5, 6], SamplingParams(12, temperature=0.0))
        started.add_requests([request])
        plain = [output.token_ids for output in helpers.run_out(started)]
        started.add_requests([request])
        started.step()
        scores, whole = started.prompt_scores(prompts, 3), started.prompt_scores(prompts[:1], -1)
        outputs = helpers.run_out(started)
        gaps, same = [], []
        for prompt, score in zip(prompts, scores, strict=True):
            with torch.no_grad():
                table = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
            own = table.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            gaps.append(float((own - torch.tensor(score.log_probs)).abs().max()))
            best = table.topk(3)
            listed = [[value for _, value in row] for row in score.top]
            gaps.append(float((best.values - torch.tensor(listed)).abs().max()))
            same.append([[token for token, _ in row] for row in score.top] == best.indices.tolist())
            same.append(score.ranks == ((table > own[:, None]).sum(-1) + 1).tolist())
        started.add_requests([GenerationRequest("aborted", [4, 5, 6], SamplingParams(1))])
        started.prompt_scores(prompts, 3)  # the sample ends meanwhile
        started.abort(["aborted"])
        undisturbed = [output.token_ids for output in outputs] == plain
        refused = message(lambda: started.prompt_scores([[1] * (MAX_MODEL_LEN + 1)], 1))
        found = {"gap": max(gaps), "same": all(same), "whole": [len(row) for row in whole[0].top]}
        return found | {"undisturbed": undisturbed, "refused": refused, "left": started.num_unfinished}


def target_columns(folder: Path) -> dict[str, float]:
    """Largest distances of a teacher's columns under vLLM from those of the plain model."""
    from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
    from roll.distributed import WorkerContext
    from roll.methods.base import Ask
    from roll.models.layouts import TopTokens
    from roll.protocol import DataProto
    from roll.workers.model import ScoringWorker

    drop_shared_engine()
    options = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    args = ModelArguments(model_name_or_path=str(folder), dtype="fp32")
    role = WorkerConfig(name="teacher", model_args=args, strategy_args=StrategyArguments("vllm", options))
    worker = ScoringWorker(WorkerContext("teacher", role, 0, 1))
    worker.initialize()
    generator = torch.Generator().manual_seed(0)
    ids, attention = torch.randint(5, 300, (3, 12), generator=generator), torch.ones(3, 12, dtype=torch.bool)
    attention[1, 9:] = False
    response = attention.clone()
    response[:, :5] = False
    response[2, 7] = False
    batch = DataProto.from_dict({"input_ids": ids * attention, "attention_mask": attention, "response_mask": response})
    found = worker.forward(batch, Ask(top=TopTokens(4, 320))).batch
    own = worker.forward(batch).batch["log_probs"]
    worker.offload_states([])
    worker.load_states([])
    worker.close()
    with torch.no_grad():
        table = load(folder)(batch.batch["input_ids"], attention_mask=attention.long()).logits.log_softmax(-1)
    table = torch.nn.functional.pad(table[:, :-1], (0, 0, 1, 0))
    best = table.topk(4)
    mine = table.gather(2, batch.batch["input_ids"][..., None])[..., 0]
    gap = {"top": found["top_log_probs"] - best.values, "ids": (found["top_ids"] != best.indices).float()}
    gap |= {"tail": found["tail_log_prob"].exp() - (1 - best.values.exp().sum(-1)), "own": own - mine}
    return {name: float(values[response].abs().max()) for name, values in gap.items()}


def following_a_schema(folder: Path) -> dict[str, Any]:
    """Responses of an untrained model to requests with a JSON schema, alone and beside plain ones."""
    started = shared_engine(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = {"properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "additionalProperties": False}
    schema = json.dumps({"type": "object", **fields})
    held = SamplingParams(40, seed=3, json_schema=schema)
    plain = GenerationRequest("plain", [5, 6, 7], replace(held, json_schema=None), 2)
    started.add_requests([plain])
    alone = {(one.request_id, one.sample_index): one.token_ids for one in helpers.run_out(started)}
    started.add_requests([GenerationRequest("held", [5, 6, 7], held, 4), plain])
    outputs = helpers.run_out(started)
    bad = [replace(held, json_schema=text) for text in ('{"type": "nothing"}', '{"multipleOf": 123456789}')]
    refused = [message(lambda one=one: started.add_requests([GenerationRequest("bad", [5], one)])) for one in bad]
    mine = [one for one in outputs if one.request_id == "held"]
    texts = [(tokenizer.decode(one.token_ids, skip_special_tokens=True), one.finish_reason) for one in mine]
    same = all(alone["plain", one.sample_index] == one.token_ids for one in outputs if one.request_id == "plain")
    log_probs = [value for one in mine for value in one.log_probs]
    return {"texts": texts, "same": same, "refused": refused, "log_probs": log_probs}


def wrong_arguments() -> list[str]:
    """Messages about engine arguments of wrong types, by the engine's own class."""
    from vllm.engine.arg_utils import EngineArgs as declared

    from roll.strategies.engines.base import typed_arguments

    found = []
    for name, right in {"optimization_level": 1, "disable_custom_all_reduce": True}.items():
        typed_arguments({name: right}, declared, "actor_infer")
        with pytest.raises(ValueError, match=name) as raised:
            typed_arguments({name: "fast"}, declared, "actor_infer")
        found.append(str(raised.value).rpartition(": must")[2])
    return found


def adapters(folder: Path, **options: Any) -> dict[str, Any]:
    """Adapters alone, one of them in flight; then faults of the adapter and of the base."""
    with engine(folder, engine_args=adapter_engine_args(RANK), **options) as started:
        world = World(started, Policy(folder), folder)
        found = adapters_alone(world, folder)
        found["in flight"] = in_flight(world, steps(10))
        found["faults"] = faults(world)
        world.engines.close()
    return found


def faults(world: World) -> list[str]:
    """Messages of updates with a changed element of A, an adapter that its layer does not get, a plain parameter and a
    packed one that changed on their own, and of one that puts the adapter right."""
    found = [spoilt_on_the_way(world)]
    if world.engine._num_ranks > 1:
        return found
    world.send(1)
    rank = world.engine._engine.model_executor.driver_worker.model_runner
    layer = next(layer for name, layer in rank.lora_manager._adapter_manager.modules.items() if "down_proj" in name)
    set_lora, layer.set_lora = layer.set_lora, lambda *arguments: None
    world.policy.train(5)
    found.append(world.complaint(2))
    layer.set_lora = set_lora
    world.send(1)
    rank.model.model.norm.weight.data[3] += 1
    found.append(world.complaint(2))
    world.send(1)
    packed = layer.base_layer.cpu_linear
    layer.base_layer.cpu_linear = lambda x, weight, bias: packed(x, weight, bias) * 1.01
    found.append(world.complaint(2))
    layer.base_layer.cpu_linear = packed
    world.send(1)
    return [*found, world.complaint(2)]
