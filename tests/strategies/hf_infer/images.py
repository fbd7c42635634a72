"""An engine for prompts with images, and what transformers computes of them."""

from __future__ import annotations

from typing import Any

import torch

from roll.protocol.vision import vision_token_ids
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import VisionDecoder
from roll.strategies.hf_infer.strategy import create_decoder
from tests.strategies.vision_cases import vision_keywords
from tests.vision_models import VisionPrompt

MAX_MODEL_LEN = 160


def build_engine(model: Any, prefix_cache_tokens: int = 0, max_num_seqs: int = 8) -> GenerationEngine:
    decoder = create_decoder(model, MAX_MODEL_LEN)
    assert isinstance(decoder, VisionDecoder)
    return GenerationEngine(decoder, str, (), max_num_seqs, MAX_MODEL_LEN, prefix_cache_tokens=prefix_cache_tokens)


def forward(model: Any, prompt: VisionPrompt, response: list[int]) -> torch.Tensor:
    """Log-probs of every response token under transformers' own positions, placeholders masked."""
    ids = torch.tensor([[*prompt.token_ids, *response]])
    images = {} if prompt.vision is None else vision_keywords([prompt.vision], ids, model.config)
    model.model.rope_deltas = None
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **images).logits[0, len(prompt.token_ids) - 1 :]
    logits[:, list(vision_token_ids(model.config))] = -torch.inf
    return logits[:-1].log_softmax(-1)
