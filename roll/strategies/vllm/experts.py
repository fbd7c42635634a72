"""Experts of a sparse layer in vLLM: their tensors by the names it takes them under, their place, their packing.

| as sent                                     | as vLLM's loaders take it                                            |
|---------------------------------------------|----------------------------------------------------------------------|
| ``experts.e.gate_proj.weight`` ...          | the same                                                             |
| ``experts.gate_up_proj[e]`` (2I, H)         | ``experts.e.gate_proj.weight``, ``experts.e.up_proj.weight`` (I, H)  |
| ``experts.down_proj[e]`` (H, I)             | ``experts.e.down_proj.weight``                                       |
| gpt-oss: ``experts.gate_up_proj[e]`` (H, 2I)| ``experts.e.gate_up_proj``, which it transposes                      |
| gpt-oss: ``experts.gate_up_proj_bias`` (E, 2I) | ``experts.e.gate_up_proj_bias`` (2I)                              |

A tensor of all experts is no choice: of gpt-oss vLLM 0.32 copies it past the loaders that a reload watches, where it is
lost without an error.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

_MATRIX = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)\[(\d+)\]")
_BIASES = re.compile(r"(.*\.experts)\.((?:gate_up|down)_proj_bias)")
_GPT_OSS = "gpt_oss"
_OUTPUT = "gpt_oss_w2"


def checkpoint_tensors(model_type: str, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor as it was sent, under the names of a checkpoint that vLLM loads: views, several of some."""
    if found := _MATRIX.fullmatch(name):
        layer, matrix, expert = found.groups()
        if model_type == _GPT_OSS:
            return [(f"{layer}.{expert}.{matrix}", tensor)]
        if matrix == "down_proj":
            return [(f"{layer}.{expert}.down_proj.weight", tensor)]
        gate, up = tensor.chunk(2)
        return [(f"{layer}.{expert}.gate_proj.weight", gate), (f"{layer}.{expert}.up_proj.weight", up)]
    if found := _BIASES.fullmatch(name):
        layer, biases = found.groups()
        return [(f"{layer}.{expert}.{biases}", bias) for expert, bias in enumerate(tensor)]
    return [(name, tensor)]


def expert_part(parameter: Tensor, expert: int, shard: str) -> Tensor:
    """The part of experts' fused parameter (experts, rows, columns) that one tensor of the checkpoint went to.

    Args:
        shard: ``w1`` (gate) and ``w3`` (up) are above one another; ``w2`` (down) and those of gpt-oss are alone.
    """
    whole = parameter.data[expert]
    if shard not in ("w1", "w3"):
        return whole
    rows = len(whole) // 2
    return whole[:rows] if shard == "w1" else whole[rows:]


def oriented(layer: Any, sent: Tensor, shard: str) -> Tensor:
    """One tensor of an expert as the layer holds it: of gpt-oss transposed; the bias of an output on one rank only."""
    if not shard.startswith(_GPT_OSS):
        return sent
    if sent.ndim == 2:
        return sent.t()
    is_repeated = shard == _OUTPUT and layer.moe_config.moe_parallel_config.tp_rank > 0
    return torch.zeros_like(sent) if is_repeated else sent


def pack_experts(layer: Any, kernel: Any) -> None:
    """Pack reloaded experts for a CPU's kernel. vLLM 0.32 does so when the kernel is made, at the first load only, and
    after a reload would read the plain matrices as packed ones: other numbers, without an error."""
    if layer.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(layer)
