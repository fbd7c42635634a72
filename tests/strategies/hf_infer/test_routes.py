"""The engine's record of experts is what a plain pass over the same tokens chooses, whatever rows do meanwhile."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.models.experts import RoutingRecorder, sparse_layers
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import GenericDecoder
from tests.strategies.hf_infer.helpers import run_out
from tests.strategies.moe_models import moe_config

PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11, 12, 13], "c": [3]}


def _model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(moe_config(family)).eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.gate.weight.normal_(std=0.5)
    return model


def _engine(model: torch.nn.Module) -> GenerationEngine:
    decoder = GenericDecoder(model)
    decoder.routing = RoutingRecorder(sparse_layers(model))
    return GenerationEngine(decoder, str, [1], max_num_seqs=4, max_model_len=40)


def _wanted(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    recorder = RoutingRecorder(sparse_layers(model))
    with recorder.recording() as recorded:
        model(torch.tensor([tokens[:-1]]))
    return torch.stack([choices for _, choices in recorded], 1)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_routes_are_those_of_a_plain_pass(family):
    """Ragged prompts, groups, more samples than rows, and a stop half way that another engine continues from."""
    model = _model(family)
    engine, outputs = _engine(model), []
    requests = {
        name: GenerationRequest(name, prompt, SamplingParams(max_new_tokens=9, min_new_tokens=2, seed=number), 3)
        for number, (name, prompt) in enumerate(PROMPTS.items())
    }
    engine.add_requests(requests.values())
    for _ in range(4):
        outputs += engine.step()
    stopped = engine.abort()
    other = _engine(model)
    for name, request in requests.items():
        aborted = [output for output in stopped if output.request_id == name]
        finished = [output for output in outputs if output.request_id == name]
        other.add_requests([interrupted(request, aborted, finished)])
    outputs += run_out(other)
    assert len(outputs) == 9 and any(output.token_ids for output in stopped)
    for output in outputs:
        _check(model, output)


def _check(model: torch.nn.Module, output: GenerationOutput) -> None:
    tokens = [*PROMPTS[output.request_id], *output.token_ids]
    assert output.routes is not None and output.routes.shape == (len(tokens) - 1, 2, 2)
    assert torch.equal(torch.from_numpy(output.routes).long(), _wanted(model, tokens))
