"""How Megatron's parameters and Hugging Face's tensors correspond.

Megatron fuses query, key and value matrices, and the gate and up matrices of an MLP, and cuts matrices over
tensor-parallel ranks.  A :class:`Layout` cuts whole Hugging Face tensors into a rank's parameter and joins the ranks'
parameters into whole tensors again; both only move numbers, so moments of an optimizer go the same way as weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roll.models.lora import adapter_names
from roll.strategies.base import ModelHead
from roll.strategies.megatron.transformer_config import head_dim

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig


LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Megatron's linear layers, within a transformer layer."""

_ADAPTERS = ".adapters."


class Layout(ABC):
    """How one parameter is made from one or more Hugging Face tensors."""

    @abstractmethod
    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """The parameter of tensor-parallel rank ``rank`` of ``size``, from whole tensors."""

    @abstractmethod
    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors, from the parameters of all tensor-parallel ranks in order."""


@dataclass(frozen=True)
class Replicated(Layout):
    """The same on all ranks."""

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return tensors[0]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Cut(Layout):
    """Cut into equal parts along one dimension."""

    dim: int

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return tensors[0].chunk(size, self.dim)[rank]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class CutVocabulary(Layout):
    """Rows of the vocabulary, padded with zeros to a multiple of the ranks."""

    vocab_size: int

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        rows = -(-self.vocab_size // size)
        own = tensors[0][rank * rows : (rank + 1) * rows]
        return torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.vocab_size]]


@dataclass(frozen=True)
class CutTogether(Layout):
    """Several tensors, each cut along its rows, a rank's parts one below the other (gate and up)."""

    count: int

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        parts = zip(*(shard.chunk(self.count) for shard in shards), strict=True)
        return [torch.cat(part) for part in parts]


@dataclass(frozen=True)
class CutByGroup(Layout):
    """Queries, keys and values: for each group, its query heads, its key head and its value head; cut over groups."""

    groups: int
    head_dim: int

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        by_group = [tensor.reshape(self.groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(by_group, 1).chunk(size)[rank].flatten(0, 1)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        fused = torch.cat(list(shards))
        fused = fused.reshape(self.groups, -1, *fused.shape[1:])
        queries = fused.shape[1] - 2 * self.head_dim
        parts = fused.split([queries, self.head_dim, self.head_dim], 1)
        return [part.flatten(0, 1).contiguous() for part in parts]


@dataclass(frozen=True)
class Correspondence:
    """One parameter's name, the same for every way of cutting the model, and where its numbers come from."""

    name: str
    sources: tuple[str, ...]
    layout: Layout
    is_copy: bool = False
    """The output matrix of a last stage that copies the embeddings of the first one."""


def parameters_of(
    chunk: GPTModel, hf: PretrainedConfig, head: ModelHead
) -> Iterator[tuple[Correspondence, nn.Parameter]]:
    """Every parameter of a model chunk with its correspondence."""
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            index, _, inner = name.removeprefix("decoder.layers.").partition(".")
            layer = chunk.decoder.layers[int(index)].layer_number - 1
            sources, layout = in_layer(inner, hf)
            own = tuple(f"model.layers.{layer}.{source}" for source in sources)
            yield Correspondence(f"decoder.layers.{layer}.{inner}", own, layout), parameter
        else:
            yield _outside_layers(name, hf, head, bool(getattr(parameter, "shared", False))), parameter


def in_layer(name: str, hf: PretrainedConfig) -> tuple[tuple[str, ...], Layout]:
    """The sources and the layout of a parameter of a transformer layer, by its name there."""
    if _ADAPTERS in name:
        return _of_adapter(name, hf)
    kind = name.rpartition(".")[2]
    table: dict[str, tuple[tuple[str, ...], Layout]] = {
        "input_layernorm": (("input_layernorm",), Replicated()),
        "self_attention.linear_qkv": (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            CutByGroup(hf.num_key_value_heads, head_dim(hf)),
        ),
        "self_attention.q_layernorm": (("self_attn.q_norm",), Replicated()),
        "self_attention.k_layernorm": (("self_attn.k_norm",), Replicated()),
        "self_attention.linear_proj": (("self_attn.o_proj",), Cut(1)),
        "pre_mlp_layernorm": (("post_attention_layernorm",), Replicated()),
        "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), CutTogether(2)),
        "mlp.linear_fc2": (("mlp.down_proj",), Cut(1)),
    }
    sources, layout = table[name.rpartition(".")[0]]
    return tuple(f"{source}.{kind}" for source in sources), layout


def _of_adapter(name: str, hf: PretrainedConfig) -> tuple[tuple[str, ...], Layout]:
    """A is cut where the inputs of its layer are, B where the outputs are."""
    path, _, rest = name.partition(_ADAPTERS)
    projection, _, part = rest.partition(".")
    weights, layout = in_layer(f"{path}.weight", hf)
    (weight,) = (one for one in weights if one.endswith(f".{projection}.weight"))
    down, up = adapter_names(weight)
    cuts_inputs = isinstance(layout, Cut)
    if part == "down":
        return (down,), Cut(1) if cuts_inputs else Replicated()
    return (up,), Replicated() if cuts_inputs else Cut(0)


def _outside_layers(name: str, hf: PretrainedConfig, head: ModelHead, is_copy: bool) -> Correspondence:
    embeddings = "model.embed_tokens.weight"
    if name == "decoder.final_layernorm.weight":
        return Correspondence(name, ("model.norm.weight",), Replicated())
    if name == "embedding.word_embeddings.weight":
        return Correspondence(name, (embeddings,), CutVocabulary(hf.vocab_size))
    assert name in ("output_layer.weight", "output_layer.bias"), name
    if head is ModelHead.VALUE:
        return Correspondence(name, (f"score.{name.rpartition('.')[2]}",), Replicated())
    source = embeddings if is_copy else "lm_head.weight"
    return Correspondence(name, (source,), CutVocabulary(hf.vocab_size), is_copy)
