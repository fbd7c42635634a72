"""Tests of growing samples for every engine that is an optional package, in the engine's own process."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from tests.strategies.engine_cases import Advance
from tests.strategies.hf_infer import helpers


def growing_samples(started: GenerationStrategy, advance: Advance, folder: Path) -> dict[str, Any]:
    """Samples that are asked for after every step next to the same ones without interruption: two of a seed with most
    probable tokens, one that ends in a stop string, one that was begun before, and one that has no room at first."""
    requests = _requests(started, advance, folder)
    calm = helpers.run(started, requests)
    started.add_requests(requests)
    waiting = started.running([request.request_id for request in requests])
    seen: dict[tuple[str, int], list[GenerationOutput]] = {(o.request_id, o.sample_index): [o] for o in waiting}
    ends = {}
    while started.num_unfinished:
        ends |= {(output.request_id, output.sample_index): output for output in started.step()}
        for output in started.running(["late", "stop", "begun", "seeded", "no such"]):
            seen[output.request_id, output.sample_index].append(output)
    return {
        "same": {key: asdict(ends[key]) == asdict(calm[key]) for key in calm},
        "alike": {key: _without_numbers(ends[key]) == _without_numbers(calm[key]) for key in calm},
        "grows": {key: _grows([*outputs, ends[key]]) for key, outputs in seen.items()},
        "lengths": {key: [len(output.token_ids) for output in outputs] for key, outputs in seen.items()},
        "reasons": {output.finish_reason for outputs in seen.values() for output in outputs},
        "versions": seen["begun", 0][-1].weight_versions,
        "begun": len(requests[2].partial[0].token_ids),
    }


def _requests(started: GenerationStrategy, advance: Advance, folder: Path) -> list[GenerationRequest]:
    """Five samples, of which four run at a time."""
    prompts = helpers.random_prompts([7, 19, 4, 11], seed=6)
    free = helpers.run(started, [GenerationRequest("f", prompts[1], helpers.greedy(30))])["f", 0]
    text = AutoTokenizer.from_pretrained(folder).decode(free.token_ids)
    begun = GenerationRequest("begun", prompts[2], helpers.greedy(30, min_new_tokens=30))
    started.add_requests([begun])
    advance(started, ["begun"])
    (stopped,) = started.abort()
    old = replace(stopped, weight_versions=[(-1, 0, len(stopped.token_ids))])
    return [
        GenerationRequest("seeded", prompts[0], SamplingParams(30, min_new_tokens=30, seed=3, top_log_probs=2), 2),
        GenerationRequest("stop", prompts[1], helpers.greedy(30, stop_strings=(text[8:12],))),
        interrupted(begun, [old], []),
        GenerationRequest("late", prompts[3], helpers.greedy(12, min_new_tokens=12)),
    ]


def _without_numbers(output: GenerationOutput) -> GenerationOutput:
    """Values that do not depend on how samples are put together to batches."""
    return replace(output, log_probs=[], top_log_probs=[])


def _grows(outputs: list[GenerationOutput]) -> bool:
    """True where each account is a beginning of the next, in all that it says."""
    return all(_begins(before, after) for before, after in pairwise(outputs))


def _begins(before: GenerationOutput, after: GenerationOutput) -> bool:
    size = len(before.token_ids)
    versions = [(version, begin, min(end, size)) for version, begin, end in after.weight_versions if begin < size]
    return (
        (before.token_ids, before.log_probs) == (after.token_ids[:size], after.log_probs[:size])
        and before.top_log_probs == after.top_log_probs[: len(before.top_log_probs)]
        and len(before.top_log_probs) in (0, size)
        and (not size or before.weight_versions == versions)
    )
