"""The tiny language model in Hugging Face format: a byte-level BPE tokenizer and a two-layer Qwen2 of 136k weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_LENGTH = 2048
VOCABULARY_LIMIT = 512
VOCABULARY_MULTIPLE = 64
HIDDEN_SIZE = 64
LAYERS = 2
HEADS = 4
"""Of size 16. Two heads of 32 were measured too: on some seeds they learn far less in the same number of steps."""
MLP_SIZE = 192
INITIALIZER_RANGE = 0.08
"""The usual 0.02 is far too small at this width: it doubles the warm start."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Learn a byte-level BPE vocabulary from ``texts``.

    Normaliser and split are those of Qwen2: ``AutoTokenizer`` rebuilds them from the model type next to the files and
    ignores what ``tokenizer.json`` says, so any other choice would tokenise differently after a reload.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        model_max_length=MAX_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """A freshly initialised float32 model for ``tokenizer``; ``seed`` decides its weights."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=MLP_SIZE,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    # Spelled out, because an engine that fills in its own top-k would sample from another distribution.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
