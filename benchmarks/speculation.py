"""Passes that speculative decoding saves.

    python -m benchmarks.speculation --method suffix                                 # in vLLM, and what it costs there
    python -m benchmarks.speculation --method suffix --strategy hf_infer
    python -m benchmarks.speculation --recorded FOLDER/train-*.jsonl --tokenizer MODEL

SmolLM2-135M-Instruct (``make run-real`` or ``examples/smollm2/prepare.py`` has written its prompts) answers the same
instructions in several epochs, 48 tokens at temperature 1 in float32; the drafts of ``suffix`` come from earlier ones,
too.  Passes are counted by sample: a token costs one, unless it was accepted from a draft.

Of recorded samples (``rollout_dump_dir``) it counts what the drafts of ``hf_infer`` would save in passes without a
limit: all samples of a step grow together, up to four tokens of each are drafted, and a drafted token is accepted where
it is the one that was sampled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.models.gguf_reading import dequantised_path
from roll.strategies.base import create_generation_strategy
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.drafts import Drafter

ARTIFACTS = Path(__file__).resolve().parents[1] / "examples/smollm2/artifacts"
NO_LIMIT = 1 << 20
SPECULATIONS: dict[str, dict[str, dict[str, Any] | None]] = {
    "vllm": {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    },
    "hf_infer": {"none": None, "suffix": {}},
}


def grow(drafter: Drafter, prompts: list[list[int]], responses: list[list[int]]) -> int:
    """Passes of the samples of a step, which run at the same time, counted by sample."""
    samples = [drafter.begin(prompt, response[:1]) for prompt, response in zip(prompts, responses, strict=True)]
    ends, passes = np.ones(len(samples), np.int64), len(samples)
    lengths = np.array([len(response) for response in responses])
    while (running := np.flatnonzero(ends < lengths)).size:
        drafts = drafter.propose([samples[row] for row in running], (lengths - ends)[running] - 1)
        for row, draft in zip(running.tolist(), drafts, strict=True):
            rest = responses[row][ends[row] :]
            agreed = next((i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
            # The pass's own token, after those accepted.
            drafter.extend(samples[row], rest[: agreed + 1])
            ends[row] += agreed + 1
            passes += 1
    return passes


def of_recorded(files: Sequence[str], tokenizer: Any) -> float:
    """Tokens a pass over all steps."""
    drafter, num_tokens, passes = Drafter(4, 0.1, NO_LIMIT), 0, 0

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    for file in sorted(files):
        rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        responses = [ids(row["response"]) for row in rows]
        kept = [(ids(row["prompt"]), response) for row, response in zip(rows, responses, strict=True) if response]
        passes += grow(drafter, [prompt for prompt, _ in kept], [response for _, response in kept])
        num_tokens += sum(map(len, responses))
    return num_tokens / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=SPECULATIONS, default="vllm")
    parser.add_argument("--method", choices=SPECULATIONS["vllm"], default="none")
    parser.add_argument("--recorded", nargs="+", metavar="FILE", help="samples of a run, a file a step")
    parser.add_argument("--tokenizer", help="folder or hub name of the tokenizer of recorded samples")
    parser.add_argument("--max-batch-tokens", type=int, metavar="N", help="of hf_infer's speculative_config")
    counts = {"prompts": 8, "samples": 4, "epochs": 3}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.method not in SPECULATIONS[args.strategy]:
        parser.error(f"--method {args.method}: {args.strategy} has {', '.join(SPECULATIONS[args.strategy])}")
    if args.max_batch_tokens is not None and args.strategy != "hf_infer":
        parser.error("--max-batch-tokens goes with --strategy hf_infer")
    if args.recorded and not args.tokenizer:
        parser.error("--recorded needs --tokenizer: the folder or hub name of the model that sampled them")
    if args.recorded:
        print(f"{of_recorded(args.recorded, AutoTokenizer.from_pretrained(args.tokenizer)):.3f} tokens a pass")
    else:
        in_an_engine(args)


def in_an_engine(args: argparse.Namespace) -> None:
    folder = dequantised_path(str(ARTIFACTS / "SmolLM2-135M-Instruct.gguf"))
    lines = (ARTIFACTS / "instructions_train.jsonl").read_text(encoding="utf-8").splitlines()[: args.prompts]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True, return_dict=False)
        for line in lines
    ]
    options: dict[str, Any] = {"max_num_seqs": args.prompts * args.samples, "max_model_len": 256}
    options |= {"max_num_batched_tokens": 4096} if args.strategy == "vllm" else {}
    options["speculative_config"] = speculation = SPECULATIONS[args.strategy][args.method]
    if speculation is not None and args.max_batch_tokens is not None:
        options["speculative_config"] = speculation | {"max_batch_tokens": args.max_batch_tokens}
    role = WorkerConfig(
        model_args=ModelArguments(model_name_or_path=folder, dtype="fp32"),
        strategy_args=StrategyArguments(args.strategy, options),
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
    per_pass, milliseconds = num_tokens / (num_tokens - accepted), 1000 * seconds / num_tokens
    print(f"{args.strategy}, {args.method}: {num_tokens} tokens, {per_pass:.3f} a pass, {milliseconds:.1f} CPU-ms each")


if __name__ == "__main__":
    main()
