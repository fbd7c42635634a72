"""Tiny random models and the slow, obvious way to compute what the engine computes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams
from roll.strategies.hf_infer.decoder import Decoder, FusedDecoder
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import GenericDecoder

EOS = 1
VOCAB_SIZE = 100
MAX_MODEL_LEN = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # wide, so that tokens differ from one another and no two logits tie
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON, tie_word_embeddings=False),
    "llama": LlamaConfig(
        **_COMMON,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    ),
}


def build_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():  # biases and norms start as constants, which would hide mistakes
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def build_engine(
    model: Any,
    kind: str = "fused",
    max_num_seqs: int = 8,
    seed: int = 42,
    decode_text: Callable[[list[int]], str] = str,
) -> GenerationEngine:
    decoder: Decoder = FusedDecoder(model, MAX_MODEL_LEN) if kind == "fused" else GenericDecoder(model)
    return GenerationEngine(decoder, decode_text, (EOS,), max_num_seqs, MAX_MODEL_LEN, seed)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def run(
    engine: Any, requests: Sequence[GenerationRequest], started: int = 0
) -> dict[tuple[str, int], GenerationOutput]:
    """Everything to its end; outputs by (request id, sample index). ``started``: samples that are running already."""
    engine.add_requests(requests)
    outputs = run_out(engine)
    by_sample = {(output.request_id, output.sample_index): output for output in outputs}
    assert len(by_sample) == len(outputs) == started + sum(request.num_samples for request in requests)
    return by_sample


def run_out(engine: Any) -> list[GenerationOutput]:
    """The outputs of all that is unfinished."""
    outputs: list[GenerationOutput] = []
    while engine.num_unfinished:
        outputs += engine.step()
    return outputs


def greedy(max_new_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature=0, **options)


def generate_greedy(model: Any, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **options
        )
    return out[0, len(prompt) :].tolist()


def sampling_distribution(
    logits: torch.Tensor,
    context: Sequence[int],
    num_generated: int,
    params: SamplingParams,
    end_token_ids: Sequence[int] = (EOS,),
) -> torch.Tensor:
    """Apply the settings to one row of logits (V,), token by token: log-probs float64 (V,)."""
    values = logits.double().tolist()
    for token in set(context):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    if num_generated < params.min_new_tokens:
        for token in (*end_token_ids, *params.stop_token_ids):
            values[token] = -float("inf")
    scores = torch.tensor(values, dtype=torch.float64)
    if params.temperature == 0:
        return scores.log_softmax(-1)
    probs = (scores / params.temperature).softmax(-1)
    keep = probs >= params.min_p * probs.max()
    probs = torch.where(keep, probs, 0)
    order = probs.argsort(descending=True).tolist()
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, nucleus = sum(float(probs[t]) for t in order), 0.0, []
    for token in order:
        if mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += float(probs[token])
    kept = torch.zeros_like(probs)
    kept[nucleus] = probs[nucleus]
    return (kept / kept.sum()).log()


def reference_log_probs(
    model: Any, prompt: list[int], token_ids: list[int], params: SamplingParams, end_token_ids: Sequence[int] = (EOS,)
) -> list[float]:
    """The log-prob of each token by one full forward pass over prompt and response."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0].float()
    result = []
    for i, token in enumerate(token_ids):
        context = prompt + token_ids[:i]
        row = logits[len(prompt) + i - 1]
        result.append(float(sampling_distribution(row, context, i, params, end_token_ids)[token]))
    return result


def make_tokenizer() -> Any:
    """Byte-level BPE as Qwen2 has it, built from Qwen2's own normaliser and split so that AutoTokenizer agrees."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the quick brown fox says: the answer is 42. stop here"] * 20, trainer)
    parts = json.loads(raw.to_str())["model"]
    merges = [tuple(merge) for merge in parts["merges"]]
    return Qwen2Tokenizer(vocab=parts["vocab"], merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def save_model(folder: Path, tokenizer: Any, seed: int = 0) -> None:
    """Write a tied Qwen2 and its tokenizer."""
    torch.manual_seed(seed)
    options = {**_COMMON, "vocab_size": 320, "eos_token_id": tokenizer.eos_token_id}
    Qwen2ForCausalLM(Qwen2Config(**options, tie_word_embeddings=True)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
