"""Tokens per CPU-second of the hf_infer engine compared with ``model.generate`` in padded batches and with vLLM.

All generate the same requests: prompts of 32 tokens, groups of 8 samples, temperature 1, with log-probs except under
``model.generate``.  Lengths are forced (end-of-sequence is banned until the wanted length): all equal (64 tokens), or
spread evenly from 8 to 64 (1:8) and shuffled.  There are four times as many samples as run at a time.
``model.generate`` gets as many rows a call as the engine runs at a time; at varied lengths it runs each call to its
longest row, which is what a padded batch must do, and only wanted tokens count.
The runs alternate and each figure is the median.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--repeats 5] [--models tiny,10m,smollm2] [--concurrency 64,256]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.strategies.base import create_generation_strategy
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.strategy import create_decoder

GROUP_SIZE = 8
PROMPT_LENGTH = 32
MAX_NEW_TOKENS = 64
MIN_NEW_TOKENS = MAX_NEW_TOKENS // 8
EOS = 1

COMMON: dict[str, Any] = {
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": None,
}
MODELS = {
    "tiny": Qwen2Config(
        vocab_size=448,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 32: vLLM has no smaller ones on a CPU
        num_key_value_heads=2,
        intermediate_size=192,
        **COMMON,
    ),
    "10m": Qwen2Config(
        vocab_size=2048,
        hidden_size=320,
        num_hidden_layers=7,
        num_attention_heads=5,
        num_key_value_heads=5,
        intermediate_size=1024,
        **COMMON,
    ),
    "smollm2": LlamaConfig(  # of the shape of SmolLM2-135M; what its weights are costs nothing
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        **COMMON,
    ),
}


@dataclass(frozen=True)
class Workload:
    """``lengths[i]`` new tokens for each of the samples of prompt i."""

    prompts: list[list[int]]
    lengths: list[int]
    concurrency: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) * GROUP_SIZE


def make_workload(vocab_size: int, concurrency: int, varied: bool, rounds: int) -> Workload:
    """``rounds`` times as many samples as run at a time; lengths in an order that has nothing to do with the batch."""
    generator = torch.Generator().manual_seed(0)
    count = rounds * concurrency // GROUP_SIZE
    prompts = torch.randint(2, vocab_size, (count, PROMPT_LENGTH), generator=generator).tolist()
    if not varied:
        return Workload(prompts, [MAX_NEW_TOKENS] * count, concurrency)
    spread = torch.linspace(MIN_NEW_TOKENS, MAX_NEW_TOKENS, count).round().long()
    order = torch.randperm(count, generator=generator)
    return Workload(prompts, spread[order].tolist(), concurrency)


def run_engine(model: PreTrainedModel, work: Workload) -> Callable[[], None]:
    decoder = create_decoder(model, PROMPT_LENGTH + MAX_NEW_TOKENS)
    engine = GenerationEngine(decoder, str, (EOS,), work.concurrency, PROMPT_LENGTH + MAX_NEW_TOKENS)

    def run() -> None:
        engine.add_requests(
            GenerationRequest(str(i), prompt, SamplingParams(length, min_new_tokens=length), GROUP_SIZE)
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        )
        produced = 0
        while engine.num_unfinished:
            produced += sum(len(output.token_ids) for output in engine.step())
        assert produced == work.num_tokens

    return run


def run_generate(model: PreTrainedModel, work: Workload) -> Callable[[], None]:
    groups_a_batch = work.concurrency // GROUP_SIZE
    model.eval()

    def run() -> None:
        for begin in range(0, len(work.prompts), groups_a_batch):
            ids = torch.tensor(work.prompts[begin : begin + groups_a_batch])
            longest = max(work.lengths[begin : begin + groups_a_batch])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=GROUP_SIZE,
                max_new_tokens=longest,
                min_new_tokens=longest,
            )
            assert out.shape[1] == PROMPT_LENGTH + longest

    return run


def start_vllm(model: PreTrainedModel, work: Workload, folder: str) -> GenerationStrategy:
    """The ``vllm`` strategy in this process (one thread, eager), on the same weights."""
    path = os.path.join(folder, "model")
    model.save_pretrained(path)
    words = models.WordLevel({str(token): token for token in range(model.config.vocab_size)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=str(EOS)).save_pretrained(path)
    longest = PROMPT_LENGTH + MAX_NEW_TOKENS
    options = {"max_num_seqs": work.concurrency, "max_model_len": longest, "enable_prefix_caching": False}
    role = WorkerConfig(
        model_args=ModelArguments(model_name_or_path=path, dtype="fp32"),
        strategy_args=StrategyArguments("vllm", options),
    )
    engine = create_generation_strategy(role)
    engine.initialize()
    return engine


def run_vllm(engine: GenerationStrategy, work: Workload) -> Callable[[], None]:
    """Every request is seeded, as in a pipeline."""

    def run() -> None:
        engine.add_requests(
            GenerationRequest(str(i), prompt, SamplingParams(length, min_new_tokens=length, seed=i), GROUP_SIZE)
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        )
        produced = 0
        while engine.num_unfinished:
            produced += sum(len(output.token_ids) for output in engine.step())
        assert produced == work.num_tokens

    return run


def cpu_seconds(run: Callable[[], None]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median CPU-seconds of each, the runs taking turns after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            taken = cpu_seconds(run)
            if repeat:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)


def vllm_is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="samples, as a multiple of those that run at a time")
    parser.add_argument("--models", default="tiny,10m")
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--no-vllm", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with_vllm = vllm_is_installed() and not args.no_vllm
    names = ["hf_infer", "generate", *(["vllm"] if with_vllm else [])]
    print(f"{'model':7} {'rows':>5} {'lengths':8} " + " ".join(f"{name + ' tok/CPU-s':>20}" for name in names), end="")
    print(" " + " ".join(f"{'x ' + name:>11}" for name in names[1:]))
    for model_name in args.models.split(","):
        for concurrency in map(int, args.concurrency.split(",")):
            for varied in (False, True):
                line(model_name, concurrency, varied, args, with_vllm)


def line(model_name: str, concurrency: int, varied: bool, args: argparse.Namespace, with_vllm: bool) -> None:
    """Measure one setting and print its row."""
    import tempfile

    work = make_workload(MODELS[model_name].vocab_size, concurrency, varied, args.rounds)
    runs = {"hf_infer": run_engine(build(model_name), work), "generate": run_generate(build(model_name), work)}
    with tempfile.TemporaryDirectory() as folder:
        engine = start_vllm(build(model_name), work, folder) if with_vllm else None
        if engine is not None:
            runs["vllm"] = run_vllm(engine, work)
        seconds = measure(runs, args.repeats)
        if engine is not None:
            engine.shutdown()
    rates = {name: work.num_tokens / value for name, value in seconds.items()}
    print(f"{model_name:7} {concurrency:5} {'1:8' if varied else 'equal':8} ", end="")
    print(" ".join(f"{rate:20,.0f}" for rate in rates.values()), end=" ")
    print(
        " ".join(f"{rates['hf_infer'] / rate:11.2f}" for name, rate in rates.items() if name != "hf_infer"), flush=True
    )


if __name__ == "__main__":
    main()
