"""Passes that speculative decoding saves.

    python -m benchmarks.speculation --method suffix                                 # in vLLM, and what it costs there
    python -m benchmarks.speculation --recorded FOLDER/train-*.jsonl --tokenizer MODEL

In vLLM SmolLM2-135M-Instruct (``make run-real`` or ``examples/smollm2/prepare.py`` has written its prompts) answers
the same instructions in several epochs, 48 tokens at temperature 1 in float32; the drafts of ``suffix`` come from
earlier ones, too.  Passes are counted by sample: a token costs one, unless it was accepted from a draft.

Of recorded samples (``rollout_dump_dir``) it counts what any engine would save: all samples of a group grow together,
and each is drafted up to four tokens, the most frequent ones after its last five to two tokens in its prompt, its group
and the steps before.  A drafted token is accepted where it is the one that was sampled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.models.gguf_reading import dequantised_path
from roll.strategies.base import create_generation_strategy
from roll.strategies.engines.requests import GenerationRequest, SamplingParams

ARTIFACTS = Path(__file__).resolve().parents[1] / "examples/smollm2/artifacts"
SPECULATIONS: dict[str, Any] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}
DRAFTED, LONGEST, SHORTEST = 4, 5, 2
"""Tokens of a draft, and of the contexts that are looked up."""


class Continuations:
    """Which tokens followed each context of ``SHORTEST`` to ``LONGEST`` tokens."""

    def __init__(self) -> None:
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def add(self, tokens: Sequence[int], begin: int = 0) -> None:
        """Those from place ``begin`` on."""
        for place in range(max(begin, SHORTEST), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, place) + 1):
                self._after[tuple(tokens[place - length : place])][tokens[place]] += 1

    def after(self, context: tuple[int, ...]) -> int | None:
        followed = self._after.get(context)
        return followed.most_common(1)[0][0] if followed else None


def drafted(context: Sequence[int], near: Continuations, far: Continuations) -> int | None:
    """The token after the longest known end of a context, in ``near`` before ``far``."""
    for length in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
        end = tuple(context[-length:])
        for continuations in (near, far):
            if (token := continuations.after(end)) is not None:
                return token
    return None


def grow_group(prompt: list[int], responses: Iterable[list[int]], far: Continuations) -> int:
    """The passes that a group takes."""
    near, passes = Continuations(), 0
    near.add(prompt)
    places = [(prompt + response, len(prompt)) for response in responses]
    while places:
        further = []
        for tokens, place in places:
            end = place
            while end - place < DRAFTED and end < len(tokens) and drafted(tokens[:end], near, far) == tokens[end]:
                end += 1
            end = min(end + 1, len(tokens))  # the pass's own token, after those accepted
            near.add(tokens[:end], place)
            passes += 1
            if end < len(tokens):
                further.append((tokens, end))
        places = further
    return passes


def of_recorded(files: Sequence[str], tokenizer: Any) -> float:
    """Tokens a pass over all steps."""
    far, num_tokens, passes = Continuations(), 0, 0

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    for file in sorted(files):
        groups = defaultdict(list)
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            groups[row["prompt"]].append(ids(row["response"]))
        for prompt, responses in groups.items():
            passes += grow_group(ids(prompt), responses, far)
            num_tokens += sum(map(len, responses))
        for responses in groups.values():
            for response in responses:
                far.add(response)
    return num_tokens / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=SPECULATIONS, default="none")
    parser.add_argument("--recorded", nargs="+", metavar="FILE", help="samples of a run, a file a step")
    parser.add_argument("--tokenizer", help="folder or hub name of the tokenizer of recorded samples")
    counts = {"prompts": 8, "samples": 4, "epochs": 3}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.recorded and not args.tokenizer:
        parser.error("--recorded needs --tokenizer: the folder or hub name of the model that sampled them")
    if args.recorded:
        print(f"{of_recorded(args.recorded, AutoTokenizer.from_pretrained(args.tokenizer)):.3f} tokens a pass")
    else:
        in_vllm(args)


def in_vllm(args: argparse.Namespace) -> None:
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
