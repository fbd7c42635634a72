"""Functions that the tests run in the engine process. An engine takes a minute to start, so a case asks it many
things: each function returns plain values of all of them."""

from __future__ import annotations

import multiprocessing
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationRequest, SamplingParams, interrupted
from tests.strategies import engine_cases, stream_cases
from tests.strategies.adapter_cases import Policy, World, adapters_alone, in_flight, spoilt_on_the_way
from tests.strategies.engine_cases import KEY, SETTINGS, distribution_gaps, message, until_begun, update
from tests.strategies.engine_models import jolt, load
from tests.strategies.greedy_answers import PROMPTS, engine_answers
from tests.strategies.hf_infer import helpers


def engine(folder: Path, dtype: str = "fp32", **options: Any) -> AbstractContextManager[GenerationStrategy]:
    return engine_cases.engine(folder, "sglang", dtype, **options)


def greedy_after_updates(folder: Path, dtype: str, **options: Any) -> list[dict[str, Any]]:
    with engine(folder, dtype, **options) as started, engine_cases.engine(folder, "hf_infer", dtype) as embedded:
        return engine_cases.greedy_after_updates(started, embedded, load(folder, dtype))


def greedy_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with engine(folder, max_num_seqs=PROMPTS, max_model_len=128) as started:
        return engine_answers(started, prompts)


def experts_after_updates(folder: Path) -> list[tuple[list[str], bool, float]]:
    with engine(folder) as started:
        return engine_cases.experts_after_updates(started, load(folder))


def everything(folder: Path) -> dict[str, Any]:
    """One engine: sampling, interruptions, aborts, refusals, an update in flight, faulty updates."""
    drawn = SamplingParams(30, seed=9, top_p=0.9)
    with engine(folder) as started, engine_cases.engine(folder, "hf_infer") as embedded:
        found: dict[str, Any] = {
            "sampled": sampled(started, embedded, folder),
            "interrupted": engine_cases.interrupted_samples(started, folder, drawn, num_steps=2),
            "aborted": engine_cases.aborted(started, until_begun, load(folder)),
            "growing": stream_cases.growing_samples(started, until_begun, folder),
            "unnoticed": ended_unnoticed(started),
            "lengths": engine_cases.cut_to_fit(started),
            "refusals": engine_cases.refusals(started),
            "in flight": update_in_flight(started, folder),
            "adapters": adapters(started, folder),
            "faults": engine_cases.faulty_updates(started, load(folder), first=11),
            "half done": half_done_update(started),
        }
        found["processes"] = len(multiprocessing.active_children())
    found["left"] = len(multiprocessing.active_children())
    return found


def sampled(started: GenerationStrategy, embedded: GenerationStrategy, folder: Path) -> list[dict[str, Any]]:
    """For each setting three samples: do they equal those of ``hf_infer``, and how far are the log-probs from those of
    the distribution that the settings make of the model's logits."""
    model, (prompt,) = load(folder), helpers.random_prompts([11])
    requests = [GenerationRequest(str(i), prompt, params, 3) for i, params in enumerate(SETTINGS)]
    ours, theirs = helpers.run(started, requests), helpers.run(embedded, requests)
    found = []
    for i, params in enumerate(SETTINGS):
        gap, alike, top = 0.0, [], 0.0
        for sample in range(3):
            output, other = ours[str(i), sample], theirs[str(i), sample]
            gap = max(gap, *distribution_gaps(model, prompt, output, params))
            alike.append(output.token_ids == other.token_ids and output.finish_reason == other.finish_reason)
            pairs = zip(output.top_log_probs, other.top_log_probs, strict=True)
            top = max([top, *(abs(a[1] - b[1]) for mine, his in pairs for a, b in zip(mine, his, strict=True))])
        found.append({"gap": gap, "alike": alike, "top": top, "num_top": len(ours[str(i), 0].top_log_probs)})
    return found


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


def update_in_flight(started: GenerationStrategy, folder: Path) -> dict[str, Any]:
    """Afterwards the engine's weights are put back."""
    old, new = load(folder), load(folder)
    jolt(new, 1)
    found = engine_cases.update_in_flight(started, until_begun, old, new, 5)
    return found | {"put back": update(started, old, 6)}


def adapters(started: GenerationStrategy, folder: Path) -> dict[str, Any]:
    """Updates of an adapter alone, one of them in flight, one of them spoilt."""
    world = World(started, Policy(folder), folder)
    found = adapters_alone(world, folder)
    found["in flight"] = in_flight(world, until_begun)
    found["spoilt"] = spoilt_on_the_way(world)
    world.engines.close()
    return found


def keep_in_flight(folder: Path) -> dict[str, Any]:
    """The same with an engine that keeps what it has computed; and afterwards requests that fail by themselves."""
    with engine(folder, in_flight_update="keep") as started:
        found = update_in_flight(started, folder)
        failures = {
            "given up": given_up_alone(started),
            "not finite": engine_cases.not_finite_alone(started, load(folder), 20),
        }
        return {"in flight": found} | failures


def given_up_alone(started: Any) -> tuple[dict[str, str], bool]:
    """Two requests of which SGLang gives one up: its failure, and whether the other one is what it is by itself."""
    prompts, params = helpers.random_prompts([8, 12]), SamplingParams(60, min_new_tokens=60, seed=2)
    requests = [GenerationRequest(name, prompt, params, 2) for name, prompt in zip(("a", "bad"), prompts, strict=True)]
    alone = helpers.run(started, requests[:1])
    started.add_requests(requests)
    until_begun(started, ["a", "bad"])
    started._manager.abort_request(f"{started._num_started}.")  # the last sample that was begun
    done, failed = {}, {}
    while started.num_unfinished:
        done |= {(output.request_id, output.sample_index): output for output in started.step()}
        failed |= started.take_failures()
    return failed, {key: o.token_ids for key, o in done.items()} == {key: o.token_ids for key, o in alone.items()}


def half_done_update(started: GenerationStrategy) -> list[str]:
    """Messages of a step in the course of an update, and of an update with a tensor that does not fit."""
    started.start_weight_update(20)
    messages = [message(started.step)]
    started.update_weights({KEY: torch.zeros(3, 3), "model.no_such.weight": torch.zeros(2)})
    return [*messages, message(started.finish_weight_update)]


def mixed_up_scheduler(*arguments: Any) -> None:
    """A scheduler process whose model puts keys where values belong."""
    from sglang.srt.layers.linear import QKVParallelLinear

    from roll.strategies.sglang.scheduler import run_scheduler

    engine_cases.mix_up(QKVParallelLinear, "weight_loader")
    run_scheduler(*arguments)


def mixed_up_by_the_loader(folder: Path) -> list[str]:
    """Names found wrong when SGLang's model puts keys where values belong."""
    from roll.strategies.sglang.scheduler import TokenEngine

    usual = TokenEngine.run_scheduler_process_func
    TokenEngine.run_scheduler_process_func = staticmethod(mixed_up_scheduler)
    try:
        with engine(folder) as started:
            return update(started, load(folder), 1)
    finally:
        TokenEngine.run_scheduler_process_func = staticmethod(usual)


def wrong_arguments() -> list[str]:
    """Messages about engine arguments of wrong types, by the engine's own class."""
    from sglang.srt.server_args import ServerArgs as declared

    from roll.strategies.engines.base import typed_arguments

    typed_arguments({"chunked_prefill_size": 512}, declared, "actor_infer")
    with pytest.raises(ValueError, match="chunked_prefill_size") as raised:
        typed_arguments({"chunked_prefill_size": "fast"}, declared, "actor_infer")
    return [str(raised.value).rpartition(": must")[2]]
