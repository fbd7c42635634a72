"""Mismatch of engine and trainer with and without router replay: a tiny Qwen3-MoE, 32 experts of which 4, 4 layers.

The engine (``hf_infer``'s, in bf16) samples and records the experts of every token; the trainer's model computes the
same tokens in one pass, choosing anew or replaying.

    python benchmarks/router_replay.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from roll.models.experts import RoutingRecorder, sparse_layers
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import GenericDecoder

VOCABULARY, PROMPT, NEW = 256, 12, 48


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is an attribute without a field
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.08,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.15)
    return model


def sample(model: Any, prompts: Sequence[list[int]]) -> list[GenerationOutput]:
    decoder = GenericDecoder(model)
    decoder.routing = RoutingRecorder(sparse_layers(model))
    engine = GenerationEngine(decoder, str, (), max_num_seqs=len(prompts), max_model_len=PROMPT + NEW)
    params = SamplingParams(max_new_tokens=NEW, seed=1)
    engine.add_requests([GenerationRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    return sorted(outputs, key=lambda output: int(output.request_id))


@torch.no_grad()
def compare(
    model: Any, prompts: Sequence[list[int]], outputs: Sequence[GenerationOutput], replays: bool
) -> list[float]:
    """Share of (token, layer) and of tokens routed differently; mean and largest difference of log-probs."""
    recorder = RoutingRecorder(sparse_layers(model))
    ids = torch.tensor([[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)])
    routes = torch.stack([torch.from_numpy(output.routes) for output in outputs]).long()
    recorder.routes = routes.flatten(0, 1) if replays else None
    with recorder.recording() as recorded:
        logits = model(ids[:, :-1]).logits.float()
    chosen = torch.stack([choices for _, choices in recorded], 1).view_as(routes)
    differs = (chosen.sort(-1).values != routes.sort(-1).values).any(-1)
    log_probs = logits.log_softmax(-1)[:, PROMPT - 1 :].gather(-1, ids[:, PROMPT:, None])[..., 0]
    gap = (log_probs - torch.tensor([output.log_probs for output in outputs])).abs()
    return [float(differs.float().mean()), float(differs.any(-1).float().mean()), float(gap.mean()), float(gap.max())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print("| engine, trainer | replay | (token, layer) elsewhere | tokens | mean gap of log-probs | largest |")
    print("|---|---|---|---|---|---|")
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for seed in range(seeds):
        model = make_model(seed)
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, VOCABULARY, (32, PROMPT), generator=generator).tolist()
        half = copy.deepcopy(model).bfloat16()
        for pair, engine, trainer in (("bf16, fp32", half, model), ("bf16, bf16", half, half)):
            outputs = sample(copy.deepcopy(engine), prompts)
            for replays in (False, True):
                found = compare(copy.deepcopy(trainer), prompts, outputs, replays)
                rows.setdefault((pair, "R3" if replays else "none"), []).append(found)
    for (pair, mode), found in rows.items():
        layers, tokens, mean, largest = torch.tensor(found).mean(0).tolist()
        print(f"| {pair} | {mode} | {layers:.2%} | {tokens:.1%} | {mean:.4f} | {largest:.3f} |")


if __name__ == "__main__":
    main()
