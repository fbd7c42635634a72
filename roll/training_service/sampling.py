"""Samples of the base model and of saved adapters, by the ``hf_infer`` engine in this process.

The engine holds a copy of the base model, into whose weights the adapter that samples next is merged.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from roll.config.roles import StrategyArguments, WorkerConfig
from roll.models.lora import merged_weight
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, PromptScore, SamplingParams
from roll.strategies.hf_infer import HfInferStrategy
from roll.training_service.adapters import ADAPTER_FILE, AdapterWeights, Base
from roll.training_service.wire import LENGTH, STOP, sample_output

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
MAX_SAMPLES = 1024  # samples of one request


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples of one prompt."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    num_samples: int
    prompt_log_probs: bool
    prompt_top: int
    last_n: int | None  # prompt tokens that are scored; None: all but the first


class Sampler:
    """The engine, and the adapter that is in it. ``folder``: where an engine's copy of a model with tied embeddings is
    written."""

    def __init__(self, base: Base, max_seqs: int, folder: Path) -> None:
        from transformers import AutoTokenizer

        path = str(base.args.model_name_or_path)
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=base.args.trust_remote_code)
        if base.was_tied:
            base.model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
            path = str(folder)
        options = {"max_num_seqs": max_seqs, "max_model_len": base.max_length}
        args = replace(base.args, model_name_or_path=path)
        role = WorkerConfig(name="sampler", model_args=args, strategy_args=StrategyArguments("hf_infer", options))
        self._base, self._engine = base, HfInferStrategy(role)
        self._engine.initialize()
        self._versions = itertools.count(1)
        self._key: str | None = None
        self._adapted: set[str] = set()

    def use(self, key: str | None, read: Callable[[], AdapterWeights] | None) -> None:
        """Sample with an adapter from now on, known by ``key`` and read if it is another; None: the base model."""
        if key == self._key:
            return
        merged: dict[str, Tensor] = {}
        if read is not None:
            weights = read()
            for stem in (name.removesuffix(_DOWN) for name in weights.tensors if name.endswith(_DOWN)):
                weight = f"{stem.removeprefix(_PREFIX)}.weight"
                own = self._base.model.get_parameter(weight)
                down, up = (weights.tensors[stem + end].to(own.device) for end in (_DOWN, _UP))
                merged[weight] = merged_weight(own, down, up, weights.scaling)
        self._engine.start_weight_update(next(self._versions))
        restored = {name: self._base.model.get_parameter(name) for name in self._adapted - merged.keys()}
        self._engine.update_weights({**restored, **merged})
        self._engine.finish_weight_update()
        self._key, self._adapted = key, set(merged)

    def sample(self, requests: Sequence[SampleRequest]) -> dict[str, bytes | str]:
        """``SampleResponse`` of each request, or why it has failed."""
        answers: dict[str, bytes | str] = {}
        outputs: dict[str, list[GenerationOutput]] = {}
        # Clients that sample for each rollout by itself send a prompt many times: it is computed once. Samples of equal
        # seeds would be equal, so only requests that bring none share a request of the engine.
        groups: dict[object, list[SampleRequest]] = {}
        for request in requests:
            same = (tuple(request.prompt), request.params) if request.params.seed is None else request.request_id
            groups.setdefault(same, []).append(request)
        for group in groups.values():
            first = group[0]
            try:
                count = sum(request.num_samples for request in group)
                self._engine.add_requests([GenerationRequest(first.request_id, first.prompt, first.params, count)])
                outputs[first.request_id] = []
            except ValueError as error:
                answers |= {request.request_id: str(error) for request in group}
        while self._engine.num_unfinished:
            try:
                finished = self._engine.step()
            except Exception:
                self._engine.recover()
                raise
            for output in finished:
                outputs[output.request_id].append(output)
            for request_id, why in self._engine.take_failures().items():
                answers[request_id] = why
        for group in groups.values():
            name = group[0].request_id
            if name in answers:
                answers |= {request.request_id: answers[name] for request in group}
                continue
            drawn = iter(sorted(outputs[name], key=lambda output: output.sample_index))
            for request in group:
                answers[request.request_id] = self._answer(request, list(itertools.islice(drawn, request.num_samples)))
        return answers

    def _answer(self, request: SampleRequest, outputs: list[GenerationOutput]) -> bytes:
        top = request.params.top_log_probs
        samples = [
            (STOP if one.finish_reason == "stop" else LENGTH, one.token_ids, one.log_probs, one.top_log_probs)
            for one in outputs
        ]
        if not request.prompt_log_probs and not request.prompt_top:
            return sample_output(samples, top, None, (), 0)
        score = PromptScore([], [])
        if len(request.prompt) > 1:
            score = self._engine.prompt_scores([request.prompt], request.prompt_top)[0]
        log_probs = np.array([np.nan, *score.log_probs], np.float32)
        tops: list[Sequence[tuple[int, float]]] = [(), *score.top]
        if request.last_n is not None:
            log_probs[: -request.last_n] = np.nan
            tops[: -request.last_n] = [()] * (len(tops) - request.last_n)
        own = log_probs if request.prompt_log_probs else None
        return sample_output(samples, top, own, tops, request.prompt_top)


def read_adapter(folder: Path) -> AdapterWeights:
    """The adapter of a checkpoint."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    return AdapterWeights(load_file(folder / ADAPTER_FILE), config["lora_alpha"] / config["r"])
