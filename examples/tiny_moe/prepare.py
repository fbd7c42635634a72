"""Make what the mixture-of-experts example needs, on first use: data and tokenizer of the tiny example, an untrained
Qwen3-MoE of 357,760 weights (8 experts, 2 a token), and its warm start by the SFT pipeline.

    python examples/tiny_moe/prepare.py [--seed 0]

Everything lies in ``examples/tiny_moe/artifacts/seed<N>``; what is there already is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "tiny"))

import prepare as tiny  # noqa: E402  the tiny example's

from roll.cli import run  # noqa: E402
from roll.config.loader import load_config  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3MoeForCausalLM

EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 8, 2, 96
HIDDEN_SIZE, LAYERS, HEADS = 64, 2, 4
INITIALIZER_RANGE = 0.08


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3MoeForCausalLM:
    """A freshly initialised float32 model; ``seed`` decides its weights."""
    import tiny_model
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    multiple = tiny_model.VOCABULARY_MULTIPLE
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is an attribute without a field
        vocab_size=-(-len(tokenizer) // multiple) * multiple,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * EXPERT_SIZE,
        moe_intermediate_size=EXPERT_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN_SIZE // HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=tiny_model.MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
        for layer in model.model.layers:
            # transformers begins with routers of zeros, for which all experts are the same.
            torch.nn.init.normal_(layer.mlp.gate.weight, std=INITIALIZER_RANGE)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def make_untrained(seed: int) -> Path:
    """The folder of the untrained model of ``seed``."""
    import tiny_model
    from transformers import AutoTokenizer

    folder = FOLDER / "artifacts" / f"seed{seed}" / "init"
    dense = tiny.prepare(tiny.DEFAULT_OUTPUT, [seed]).model_folder(seed)
    if not (folder / "model.safetensors").is_file():
        tokenizer = AutoTokenizer.from_pretrained(dense)
        tiny_model.save(make_model(tokenizer, seed), tokenizer, folder)
    return folder


def make_warm_start(seed: int) -> Path:
    """The folder of the warm-started model of ``seed``."""
    model = make_untrained(seed).parent / "warm_start" / "model"
    if not model.is_dir():
        status = run(load_config(None, FOLDER / "sft_config.yaml", overrides=[f"seed={seed}"]))
        if status:
            sys.exit(status)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    make_warm_start(parser.parse_args().seed)
