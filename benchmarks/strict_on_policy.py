"""Cost of ``strict_on_policy``: CPU seconds of generation and of a training pass, with and without it.

    python -m benchmarks.strict_on_policy [--model FOLDER] [--prompts 32] [--samples 8] [--rounds 6]

One process with one thread generates with the ``hf_infer`` engine, then computes log-probs, entropies and gradients of
as many samples with shared prompts.  Both variants take turns and figures are the least of all rounds, so that other
work on the host counts little.  Weight updates, rewards and orchestration do not depend on the mode and are left out;
so is the pass for old log-probs, which the mode saves where a run needs it.

Needs a model folder: the tiny warm start (``make run`` makes it), or any other model that the mode works with.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from roll.models.invariant import make_invariant
from roll.models.kernels import use_products
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import tree_layout
from roll.models.log_probs import ResponseModel
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.strategy import create_decoder

MODEL = Path(__file__).resolve().parent.parent / "examples/tiny/artifacts/seed0/warm_start/model"
PROMPT, RESPONSE = 40, 24
"""Tokens of a prompt, and of the longest response."""


def works(
    model: Any, strict: bool, num_prompts: int, num_samples: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Generation, and a training pass."""
    if strict:
        make_invariant(model)
    learning = copy.deepcopy(model)
    if not strict:
        use_products(learning)
        use_layout_attention(learning, "use_prefix_sharing")
    trainer = ResponseModel(learning)
    decoder = create_decoder(model, PROMPT + RESPONSE)
    engine = GenerationEngine(decoder, str, (), num_prompts * num_samples, PROMPT + RESPONSE)
    rows, random = num_prompts * num_samples, torch.Generator().manual_seed(0)
    ids = torch.randint(5, decoder.vocab_size, (rows, PROMPT + RESPONSE), generator=random)
    ids[:, :PROMPT] = ids[::num_samples, :PROMPT].repeat_interleave(num_samples, 0)
    lengths = [RESPONSE - row % (RESPONSE // 2) for row in range(rows)]
    mask = torch.arange(PROMPT + RESPONSE) < PROMPT + torch.tensor(lengths)[:, None]
    mask[:, :PROMPT] = False

    def generate() -> None:
        engine.add_requests(
            GenerationRequest(str(row), ids[row, :PROMPT].tolist(), SamplingParams(lengths[row], seed=row), num_samples)
            for row in range(0, rows, num_samples)
        )
        while engine.num_unfinished:
            engine.step()

    def learn() -> None:
        outputs = trainer(tree_layout(ids, mask), ("log_probs", "entropy"))
        outputs["log_probs"].sum().backward()

    return generate, learn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write("| dtype | generation | training pass | together |\n|---|---|---|---|\n")
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        variants = [
            works(copy.deepcopy(model), strict, arguments.prompts, arguments.samples) for strict in (False, True)
        ]
        least = [[float("inf")] * 2 for _ in variants]
        for _ in range(arguments.rounds + 1):  # the first builds kernels, and is never the least
            for own, parts in zip(least, variants, strict=True):
                for index, work in enumerate(parts):
                    begin = time.process_time()
                    work()
                    own[index] = min(own[index], time.process_time() - begin)
        plain, strict = ([*own, sum(own)] for own in least)
        cells = [
            f"{one:.3f} -> {other:.3f} s ({other / one - 1:+.0%})" for one, other in zip(plain, strict, strict=True)
        ]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
