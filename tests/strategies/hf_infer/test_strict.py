"""The engine's log-probs and a trainer's, to the last bit (``strict_on_policy``)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.models.experts import sparse_layers
from roll.models.invariant import make_invariant
from roll.models.layouts import packed_layout, row_layout, tree_layout
from roll.models.log_probs import ResponseModel
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from roll.strategies.hf_infer.cache import PrefixCache
from tests.strategies.hf_infer.helpers import VOCAB_SIZE, build_engine, build_model, random_prompts, run, run_out
from tests.strategies.moe_models import moe_config

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = {"padded": row_layout, "packed": packed_layout, "shared prompts": tree_layout}
OTHER_EXPERTS = [
    *(("qwen3_moe", torch.float32), ("qwen2_moe", torch.bfloat16), ("qwen2_moe", torch.float32)),
    *((family, dtype) for family in ("mixtral", "olmoe", "glm4_moe") for dtype in (torch.float32, torch.bfloat16)),
]
Sampled = list[tuple[list[int], GenerationOutput]]


def strict_model(name: str, dtype: torch.dtype, seed: int = 0) -> Any:
    model = build_model(name, dtype, seed)
    make_invariant(model)
    return model


def strict_experts(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = moe_config(family, vocab_size=VOCAB_SIZE, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for layer in sparse_layers(model):
        layer.router.weight.normal_(std=0.5)
    make_invariant(model)
    return model


def unequal(trainer: ResponseModel, sampled: Sampled, layout: str, temperature: float = 1.0) -> int:
    """Tokens whose log-probs are not the same, of the rows in an order of the trainer's own."""
    rows = sorted(sampled, key=lambda one: (one[0], one[1].token_ids))
    width = max(len(prompt) + len(output.token_ids) for prompt, output in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.bool)
    engine = torch.zeros(len(rows), width)
    for row, (prompt, output) in enumerate(rows):
        begin, end = len(prompt), len(prompt) + len(output.token_ids)
        ids[row, :end] = torch.tensor([*prompt, *output.token_ids])
        mask[row, begin:end], engine[row, begin:end] = True, torch.tensor(output.log_probs)
    laid_out = LAYOUTS[layout](ids, mask)
    found = laid_out.scatter(trainer(laid_out, ("log_probs",), temperature)["log_probs"], ids.shape).detach()
    assert int(mask.sum()) > 50, "too few tokens to tell"
    return int((found != engine).sum())


@pytest.mark.long_rows("qwen3-generic-dtype1")
@pytest.mark.default_rows("qwen2-fused-dtype1", "llama-fused-dtype0", "qwen3-generic-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2", "fused"), ("qwen3", "fused"), ("llama", "fused"), ("qwen3", "generic")]
)
def test_every_token_in_every_layout(name, kind, dtype):
    model = strict_model(name, dtype)
    trainer, params = ResponseModel(copy.deepcopy(model)), SamplingParams(60, temperature=0.7, seed=1)
    prompts = random_prompts([5, 30, 1, 17])
    # Three rows for ten samples: rows come and go, and prompts are admitted between decoding steps.
    engine = build_engine(model, kind, max_num_seqs=3)
    outputs = run(engine, [GenerationRequest(str(i), prompt, params, 3) for i, prompt in enumerate(prompts)])
    sampled = [(prompts[int(name)], output) for (name, _), output in outputs.items()]
    assert {layout: unequal(trainer, sampled, layout, 0.7) for layout in LAYOUTS} == dict.fromkeys(LAYOUTS, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", torch.bfloat16),
        *(pytest.param(family, dtype, marks=pytest.mark.matrix) for family, dtype in OTHER_EXPERTS),
    ],
)
def test_experts(family, dtype):
    """Also those of a conversation whose first turn is in the prefix cache."""
    model = strict_experts(family, dtype)
    trainer, params = ResponseModel(copy.deepcopy(model)), SamplingParams(30, temperature=0.7, seed=1)
    prompts = random_prompts([5, 30, 17])
    engine = build_engine(model, "generic", max_num_seqs=4)
    engine._prefixes = PrefixCache(1000)
    outputs = run(engine, [GenerationRequest(str(i), prompt, params, 3) for i, prompt in enumerate(prompts)])
    sampled = [(prompts[int(name)], output) for (name, _), output in outputs.items()]
    turn = [*sampled[3][0], *sampled[3][1].token_ids, 7, 8]
    sampled += [(turn, output) for output in run(engine, [GenerationRequest("4", turn, params, 2)]).values()]
    assert engine._prefixes.num_reused > 30
    assert {layout: unequal(trainer, sampled, layout, 0.7) for layout in LAYOUTS} == dict.fromkeys(LAYOUTS, 0)


def test_without_the_mode_log_probs_are_rounded_otherwise():
    model, params = build_model("qwen2"), SamplingParams(60, seed=1)
    trainer, (prompt,) = ResponseModel(copy.deepcopy(model)), random_prompts([30])
    outputs = run(build_engine(model), [GenerationRequest("0", prompt, params, 6)])
    assert unequal(trainer, [(prompt, output) for output in outputs.values()], "padded") > 0


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_a_conversation_whose_turns_are_in_the_prefix_cache(kind):
    model = strict_model("qwen3", torch.float32)
    trainer, params = ResponseModel(copy.deepcopy(model)), SamplingParams(25, seed=2)
    engine = build_engine(model, kind)
    engine._prefixes = PrefixCache(1000)
    prompt, further = random_prompts([50, 7])
    first = run(engine, [GenerationRequest("1", prompt, params, 3)])
    turns = [[*prompt, *output.token_ids, *further] for output in first.values()]
    second = run(engine, [GenerationRequest(str(i), turn, params, 2) for i, turn in enumerate(turns)])
    assert engine._prefixes.num_reused > 40
    sampled = [(turns[int(name)], output) for (name, _), output in second.items()]
    # With the first turns the second ones are the deeper part of a tree.
    sampled += [(prompt, output) for output in first.values()]
    assert {layout: unequal(trainer, sampled, layout) for layout in LAYOUTS} == dict.fromkeys(LAYOUTS, 0)


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_samples_that_go_on_in_another_engine_and_after_new_weights(kind):
    model, params = strict_model("qwen2", torch.float32), SamplingParams(50, seed=3)
    (prompt,) = random_prompts([11])
    engine = build_engine(model, kind)
    engine.add_requests([GenerationRequest("0", prompt, params, 4)])
    for _ in range(12):
        engine.step()
    request = interrupted(GenerationRequest("0", prompt, params, 4), engine.abort(), [])
    other = build_engine(copy.deepcopy(model), kind)
    other.add_requests([request])
    for _ in range(9):
        other.step()
    later = strict_model("qwen2", torch.float32, seed=5)
    for name, tensor in other._decoder.weights.items():
        tensor.copy_(later.state_dict()[name])
    other.set_version(1)
    other.recompute_running()
    outputs = run_out(other)
    for weights, trained in ((0, model), (1, later)):
        spans = [(one, start, end) for one in outputs for own, start, end in one.weight_versions if own == weights]
        parts: Sampled = [
            (
                [*prompt, *one.token_ids[:start]],
                GenerationOutput("", 0, one.token_ids[start:end], one.log_probs[start:end], "length"),
            )
            for one, start, end in spans
        ]
        assert unequal(ResponseModel(copy.deepcopy(trained)), parts, "padded") == 0
