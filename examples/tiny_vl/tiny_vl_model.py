"""Tiny vision-language models in Hugging Face format: Qwen3-VL (316k weights), Qwen3-VL-MoE and Qwen2.5-VL.

Tokenizer, image processor and weights are made here; nothing is downloaded, and torchvision is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

Kind = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
MAX_LENGTH = 2048
VOCABULARY_LIMIT = 448
VOCABULARY_MULTIPLE = 64
PATCH, MERGE = 8, 2
"""A token of an image is a square of 16 x 16 pixels."""
LAYERS, HEADS, KEY_HEADS = 2, 4, 2
VISION_LAYERS, VISION_HIDDEN, VISION_HEADS = 2, 48, 4
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
INITIALIZER_RANGE = 0.06

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def make_tokenizer(texts: Iterable[str]) -> Any:
    """Learn a byte-level BPE vocabulary from ``texts``; normaliser and split are those of Qwen2, which
    ``AutoTokenizer`` rebuilds from the model's type."""
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
    special = [PAD, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE, VIDEO]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT,
        special_tokens=special,
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
        extra_special_tokens=[TURN_START, VISION_START, VISION_END, IMAGE, VIDEO],
        model_max_length=MAX_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: Any, kind: Kind = "qwen3_vl", hidden: int = 64, vision_hidden: int = VISION_HIDDEN) -> Any:
    """The model's configuration; ``hidden`` is divided among four heads."""
    import transformers

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    head = hidden // HEADS
    sections = [head // 8, 3 * head // 16, head // 2 - head // 8 - 3 * head // 16]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    text: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": INITIALIZER_RANGE,
    }
    vision: dict[str, Any] = {
        "depth": VISION_LAYERS,
        "hidden_size": vision_hidden,
        "intermediate_size": 3 * vision_hidden,
        "num_heads": VISION_HEADS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "initializer_range": INITIALIZER_RANGE,
    }
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [VISION_LAYERS - 1]}
        config_class = transformers.Qwen2_5_VLConfig
    else:
        rope["mrope_interleaved"] = True
        text["head_dim"] = head
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config_class = transformers.Qwen3VLConfig
    if kind == "qwen3_vl_moe":
        text |= {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN}
        # Not as wide as the model: transformers tells an expert's matrix from its transpose by the shape.
        text |= {"moe_intermediate_size": hidden * 3 // 4, "decoder_sparse_step": 1, "norm_topk_prob": True}
        config_class = transformers.Qwen3VLMoeConfig
    return config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=token(IMAGE),
        video_token_id=token(VIDEO),
        vision_start_token_id=token(VISION_START),
        vision_end_token_id=token(VISION_END),
        tie_word_embeddings=False,
    )


def make_model(
    tokenizer: Any, seed: int, kind: Kind = "qwen3_vl", hidden: int = 64, vision_hidden: int = VISION_HIDDEN
) -> Any:
    """A freshly initialised float32 model; ``seed`` decides its weights."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = make_config(tokenizer, kind, hidden, vision_hidden)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model, tokenizer and image processor."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    qwen2_5 = model.config.model_type == "qwen2_5_vl"
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor" if qwen2_5 else "Qwen3VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 96 * 96},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1), encoding="utf-8")
    if not qwen2_5:  # whose limits are of all frames of a video together
        videos = {
            **processor,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 16 * 96 * 96},
        }
        del videos["image_processor_type"]
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=1), encoding="utf-8")
