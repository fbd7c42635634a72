"""Passes that speculative decoding saves in vLLM, and what it costs: ``python -m benchmarks.speculation [--method M]``.

SmolLM2-135M-Instruct (``make run-real`` or ``examples/smollm2/prepare.py`` has written its prompts) answers the same
instructions in several epochs, 48 tokens at temperature 1 in float32; the drafts of ``suffix`` come from earlier ones,
too.  Passes are counted by sample: a token costs one, unless it was accepted from a draft.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.models.gguf_reading import dequantised_path
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.factory import create_generation_strategy

ARTIFACTS = Path(__file__).resolve().parents[1] / "examples/smollm2/artifacts"
SPECULATIONS: dict[str, Any] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=SPECULATIONS, default="none")
    counts = {"prompts": 8, "samples": 4, "epochs": 3}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    folder = dequantised_path(str(ARTIFACTS / "SmolLM2-135M-Instruct.gguf"))
    lines = (ARTIFACTS / "instructions_train.jsonl").read_text(encoding="utf-8").splitlines()[: args.prompts]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True, return_dict=False)
        for line in lines
    ]
    options = {"max_num_seqs": args.prompts * args.samples, "max_model_len": 256, "max_num_batched_tokens": 4096}
    options["speculative_config"] = SPECULATIONS[args.method]
    role = WorkerConfig(
        model_args=ModelArguments(model_name_or_path=folder, dtype="fp32"),
        strategy_args=StrategyArguments("vllm", options),
    )
    engine = create_generation_strategy(role)
    engine.initialize()
    num_tokens, began = 0, time.process_time()
    for epoch in range(args.epochs):
        engine.add_requests(
            GenerationRequest(f"{epoch}.{i}", prompt, SamplingParams(48, seed=1000 * epoch + i), args.samples)
            for i, prompt in enumerate(prompts)
        )
        while engine.num_unfinished:
            num_tokens += sum(len(output.token_ids) for output in engine.step())
    seconds, accepted = time.process_time() - began, engine.counts.get("accepted_tokens", 0)
    engine.shutdown()
    print(f"{args.method}: {num_tokens} tokens, {num_tokens / (num_tokens - accepted):.3f} tokens a pass,", end=" ")
    print(f"{1000 * seconds / num_tokens:.1f} CPU-ms a token")


if __name__ == "__main__":
    main()
