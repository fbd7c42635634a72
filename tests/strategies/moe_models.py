"""Tiny mixture-of-experts models: of the families in transformers, and one whose experts are modules, as remote code
and transformers 4 have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.strategies.samples import VOCABULARY

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
NUM_EXPERTS = 6
_EXPERTS: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {**_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,  # the fourth has full attention
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": _SHARED,
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": _EXPERTS,
    "deepseek_v3": {
        **_GROUPED,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {**_GROUPED, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "qwen3_next": {**_SHARED, **_LINEAR_ATTENTION},
    "qwen3_5_moe_text": {**_SHARED, **_LINEAR_ATTENTION},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 64},
}
"""Keys of each family's configuration, by ``model_type``."""
DENSE: dict[str, dict[str, Any]] = {"qwen3_5_text": _LINEAR_ATTENTION}
"""The same for a family without experts."""
EVERYWHERE = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
"""Families that every training strategy computes."""


def moe_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **(FAMILIES | DENSE)[family], **changes})


def write_moe(folder: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    """A model of ``family`` in its published layout, every weight random (routers and biases too).

    Args:
        changes: keys of its configuration.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(moe_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" not in name and not tensor.any():
                tensor.normal_(std=0.1)
            if ".gate.weight" in name or ".router.weight" in name:
                # Far enough from a tie that rounding never changes the choice.
                tensor.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


def divided(folder: Path) -> Path:
    """A copy of a model that sends token ids below half of the vocabulary to the first half of the experts,
    and the others to the second."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    half = VOCABULARY // 2
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:half, 0], embeddings[half:, 0] = 5.0, -5.0
        for layer in model.model.layers:
            layer.mlp.gate.weight[: NUM_EXPERTS // 2, 0], layer.mlp.gate.weight[NUM_EXPERTS // 2 :, 0] = 5.0, -5.0
    model.save_pretrained(folder.with_name(f"{folder.name}_divided"))
    return folder.with_name(f"{folder.name}_divided")


SEPARATE = "separate_experts"


def register_separate() -> None:
    """Let transformers know ``separate_experts``: Qwen2 whose MLP layers are experts in a ``ModuleList``, of which a
    pass calls those that have tokens."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    class SeparateConfig(Qwen2Config):
        model_type = SEPARATE
        num_experts = NUM_EXPERTS
        num_experts_per_tok = NUM_EXPERTS // 2

    class SeparateMLP(Qwen2MLP):
        pass

    class SeparateBlock(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
            self.experts = nn.ModuleList(SeparateMLP(config) for _ in range(config.num_experts))
            self.top_k = config.num_experts_per_tok

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            tokens = hidden_states.flatten(0, -2)
            weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.top_k, -1)
            output = torch.zeros_like(tokens)
            for index in chosen.unique():
                rows, places = (chosen == index).nonzero(as_tuple=True)
                weighted = self.experts[index](tokens[rows]) * weights[rows, places, None].to(tokens.dtype)
                output = output.index_add(0, rows, weighted)
            return output.view_as(hidden_states)

    class SeparateForCausalLM(Qwen2ForCausalLM):
        config_class = SeparateConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = SeparateBlock(config)
            self.post_init()

    AutoConfig.register(SEPARATE, SeparateConfig, exist_ok=True)
    AutoModelForCausalLM.register(SeparateConfig, SeparateForCausalLM, exist_ok=True)


FAMILIES[SEPARATE] = {}
