"""Groups and unfinished requests as they stand in a checkpoint: plain values and arrays, prompts by their ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from roll.datasets.types import PromptRow
from roll.rewards.base import RewardResult
from roll.rollout.groups import SampleGroup
from roll.rollout.messages import FinishedGroup
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, PartialSample

FindPrompt = Callable[[str, str], PromptRow]
"""Gives the prompt of a domain by its id, the mark of its epoch included."""
State = dict[str, Any]


def prompt_state(prompt: PromptRow) -> State:
    return {"domain": prompt.domain, "prompt_id": prompt.prompt_id}


def prompt_from(state: Mapping[str, Any], find: FindPrompt) -> PromptRow:
    return find(state["domain"], state["prompt_id"])


def group_state(group: SampleGroup) -> State:
    """A group with all of its samples, scored or not."""
    finished = group.finished
    given = {} if finished.given is None else {"given": finished.given}
    return (
        prompt_state(group.prompt)
        | given
        | {
            "order": group.order,
            "token_ids": finished.token_ids,
            "log_probs": finished.log_probs,
            "lengths": finished.lengths,
            "finish_reasons": list(finished.finish_reasons),
            "texts": list(finished.texts),
            "weight_versions": _spans(finished.weight_versions),
            "rewards": [asdict(result) for result in group.rewards],
        }
    )


def group_from(state: Mapping[str, Any], find: FindPrompt) -> SampleGroup:
    """The inverse of :func:`group_state`."""
    finished = FinishedGroup(
        request_id=str(state["order"]),
        token_ids=state["token_ids"],
        log_probs=state["log_probs"],
        lengths=state["lengths"],
        finish_reasons=state["finish_reasons"],
        texts=state["texts"],
        weight_versions=_tuples(state["weight_versions"]),
        given=state.get("given"),
    )
    rewards = [RewardResult(**result) for result in state["rewards"]]
    return SampleGroup(int(state["order"]), prompt_from(state, find), finished, rewards)


def progress_state(request: GenerationRequest) -> State:
    """What the samples of an unfinished request have so far; sampling parameters are the configuration's."""
    return {
        "partial": [
            {"index": index, "weight_versions": _spans([sample.weight_versions])[0]} | _tokens(sample)
            for index, sample in request.partial.items()
        ],
        "finished": [
            {
                "index": output.sample_index,
                "finish_reason": output.finish_reason,
                "weight_versions": _spans([output.weight_versions])[0],
            }
            | _tokens(output)
            for output in request.finished
        ],
    }


def with_progress(request: GenerationRequest, state: Mapping[str, Any]) -> GenerationRequest:
    """``request`` with what :func:`progress_state` wrote down."""
    partial = {
        int(entry["index"]): PartialSample(
            entry["token_ids"].tolist(), entry["log_probs"].tolist(), _tuples([entry["weight_versions"]])[0]
        )
        for entry in state["partial"]
    }
    finished = tuple(
        GenerationOutput(
            request_id=request.request_id,
            sample_index=int(entry["index"]),
            token_ids=entry["token_ids"].tolist(),
            log_probs=entry["log_probs"].tolist(),
            finish_reason=entry["finish_reason"],
            weight_versions=_tuples([entry["weight_versions"]])[0],
        )
        for entry in state["finished"]
    )
    return replace(request, partial=partial, finished=finished)


def _tokens(sample: PartialSample | GenerationOutput) -> State:
    return {
        "token_ids": np.asarray(sample.token_ids, dtype=np.int32),
        "log_probs": np.asarray(sample.log_probs, dtype=np.float32),
    }


def _spans(versions: Any) -> list[list[list[int]]]:
    return [[list(map(int, span)) for span in spans] for spans in versions]


def _tuples(versions: Any) -> list[list[tuple[int, int, int]]]:
    return [[(span[0], span[1], span[2]) for span in spans] for spans in versions]
