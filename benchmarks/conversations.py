"""Savings of ``hf_infer``'s prefix cache: turns of conversations, and samples over a weight update.

Conversations: 16 at a time, a first prompt of 256 tokens, then turns of 32 new tokens and 32 tokens of an answer from
outside.  CPU-seconds of all turns with ``prefix_cache_tokens`` 0 and with room for everything, and the share of prompt
tokens that were not computed.

A long conversation: 50 turns of 100 new tokens and 100 generated ones. CPU-seconds of a turn as it grows, with those of
copying keys and values and of computing the new tokens of the prompt; the rest is decoding.

Weight update in flight: 64 samples, half done.  CPU-seconds of computing their cache anew (``in_flight_update:
recompute``), next to those of generating the same tokens again, which is what aborting them would cost.

    OMP_NUM_THREADS=1 python -m benchmarks.conversations [--model 10m] [--turns 8] [--repeats 5]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.generation import EOS, MODELS, cpu_seconds
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.strategy import create_decoder

CONVERSATIONS, FIRST, ANSWER, NEW = 16, 256, 32, 32
SAMPLES, PROMPT, HALF = 64, 64, 128
TURN = 100


def new_engine(name: str, rows: int, max_len: int, kept: int = 0) -> GenerationEngine:
    config = copy.deepcopy(MODELS[name])
    config.max_position_embeddings = max_len
    torch.manual_seed(0)
    decoder = create_decoder(AutoModelForCausalLM.from_config(config, dtype=torch.float32), max_len)
    return GenerationEngine(decoder, str, (EOS,), rows, max_len, prefix_cache_tokens=kept)


def finish(engine: GenerationEngine) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while engine.num_unfinished:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    return outputs


def converse(engine: GenerationEngine, turns: int, seed: int) -> int:
    """All turns of all conversations; how many prompt tokens they had."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(2, engine._decoder.vocab_size, (count,), generator=generator).tolist()

    texts, asked = {str(i): words(FIRST) for i in range(CONVERSATIONS)}, 0
    for _ in range(turns):
        params = SamplingParams(NEW, min_new_tokens=NEW, seed=1)
        engine.add_requests(GenerationRequest(name, text, params) for name, text in texts.items())
        asked += sum(len(text) for text in texts.values())
        texts = {name: texts[name] + new + words(ANSWER) for name, new in finish(engine).items()}
    return asked


def measure_turns(name: str, turns: int, repeats: int) -> None:
    longest = FIRST + turns * (NEW + ANSWER)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for keeps in seconds:
            engine = new_engine(name, CONVERSATIONS, longest, CONVERSATIONS * longest if keeps else 0)
            asked: list[int] = []
            spent = cpu_seconds(lambda e=engine, a=asked, r=repeat: a.append(converse(e, turns, r)))
            if repeat:  # the first run makes kernels
                seconds[keeps].append(spent)
            if keeps:
                share = engine._prefixes.num_reused / asked[0]
    without, kept = (statistics.median(seconds[keeps]) for keeps in (False, True))
    print(f"{turns} turns: {without:.2f} s without, {kept:.2f} s with the prefix cache: {without / kept:.2f} times as")
    print(f"fast; {share:.0%} of prompt tokens were there already")


def measure_growth(name: str, turns: int = 50) -> None:
    """One conversation of 200 tokens a turn, half of them generated: what a turn costs as it grows."""
    longest = (turns + 1) * 2 * TURN
    engine = new_engine(name, 1, longest, longest)
    spent = {"copies": 0.0, "new prompt": 0.0}

    def timed(owner: object, method: str, kind: str) -> None:
        function = getattr(owner, method)

        def measured(*arguments: object) -> object:
            begin = time.process_time()
            try:
                return function(*arguments)
            finally:
                spent[kind] += time.process_time() - begin

        setattr(owner, method, measured)

    for owner, method in ((engine._prefixes, "put"), (engine._cache, "write_prompts")):
        timed(owner, method, "copies")
    timed(engine._decoder, "extend", "new prompt")
    generator = torch.Generator().manual_seed(0)
    text: list[int] = []
    for turn in range(1, turns + 1):
        text += torch.randint(2, engine._decoder.vocab_size, (TURN,), generator=generator).tolist()
        spent.update(dict.fromkeys(spent, 0.0))
        engine.add_requests([GenerationRequest("0", text, SamplingParams(TURN, min_new_tokens=TURN, seed=1))])
        before = time.process_time()
        text += finish(engine)["0"]
        if turn % 10 == 0:
            parts = ", ".join(f"{seconds * 1e3:.0f} ms {kind}" for kind, seconds in spent.items())
            print(f"turn {turn} ({len(text):,} tokens): {time.process_time() - before:.2f} s, of which {parts}")


def measure_update(name: str, repeats: int) -> None:
    generated, again = [], []
    for repeat in range(repeats + 1):
        engine = new_engine(name, SAMPLES, PROMPT + 2 * HALF)
        params = SamplingParams(2 * HALF, min_new_tokens=2 * HALF, seed=repeat)
        engine.add_requests(GenerationRequest(str(i), [2 + i] * PROMPT, params) for i in range(SAMPLES))
        spent = cpu_seconds(lambda e=engine: [e.step() for _ in range(HALF)] and None)
        engine.set_version(1)
        anew = cpu_seconds(engine.recompute_running)
        if repeat:
            generated.append(spent)
            again.append(anew)
    half, cache = statistics.median(generated), statistics.median(again)
    print(f"{SAMPLES} samples of {HALF} tokens: {half:.2f} s to generate, {cache:.2f} s to compute their cache anew: ")
    print(f"{cache / half:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), default="10m")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_turns(options.model, options.turns, options.repeats)
    measure_growth(options.model)
    measure_update(options.model, options.repeats)


if __name__ == "__main__":
    main()
