"""Correspondence of a Megatron model's parameters with Hugging Face's tensors.

Megatron fuses query, key and value matrices, and the gate and up matrices of an MLP, and shards matrices over
tensor-parallel ranks.  A :class:`Layout` splits whole Hugging Face tensors into a rank's parameter and joins the ranks'
parameters into whole tensors again; both only move numbers, so they serve for an optimizer's moments as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roll.models.layout_setup import head_dim
from roll.models.lora import adapter_names
from roll.models.stored import StoredLayout
from roll.strategies.base import ModelHead
from roll.strategies.megatron.parallel import num_experts

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig


LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Megatron's linear layers, within a transformer layer."""
SHARED_LINEARS = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
"""Those of the expert that every token visits."""

_ADAPTERS = ".adapters."
_EXPERTS, _EXPERT_ADAPTERS = "mlp.experts.local_experts.", "mlp.experts.adapters."

Region = tuple[slice, slice]
"""Rows and columns of a tensor; of a vector, all of whose elements are rows, the columns are all."""

_ALL = slice(None)


@dataclass(frozen=True)
class Layout:
    """Conversion between one parameter and one or more Hugging Face tensors.

    They are sharded into equal parts along ``dim`` (as ``torch.chunk`` makes them), or (None) the same on all ranks.
    """

    dim: int | None = None

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        """Part of a tensor of this shape on tensor-parallel rank ``rank`` of ``size``."""
        if self.dim is None or size == 1:
            return _ALL, _ALL
        own = _share(shape[self.dim], rank, size)
        return (own, _ALL) if self.dim == 0 else (_ALL, own)

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """A rank's parameter, from its :meth:`region` of each tensor."""
        return parts[0]

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        """The inverse of :meth:`fuse`."""
        return [parameter]

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """The parameter of tensor-parallel rank ``rank`` of ``size``, from whole tensors."""
        regions = [self.region(tensor.shape, rank, size) for tensor in tensors]
        return self.fuse([tensor[_index(tensor, own)] for tensor, own in zip(tensors, regions, strict=True)], size)

    def join(self, shards: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """New tensors of these shapes, from the parameters of all tensor-parallel ranks in order."""
        wholes = [shards[0].new_empty(*shape) for shape in shapes]
        for rank, shard in enumerate(shards):
            for whole, part in zip(wholes, self.unfuse(shard, rank, len(shards)), strict=True):
                whole[_index(whole, self.region(whole.shape, rank, len(shards)))] = part
        return wholes


def _share(count: int, rank: int, size: int) -> slice:
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def _index(tensor: Tensor, region: Region) -> Region | slice:
    # A vector has rows only.
    return region[0] if tensor.ndim < 2 else region


@dataclass(frozen=True)
class ShardedVocabulary(Layout):
    """Rows of the vocabulary, padded with zeros to a multiple of the ranks."""

    dim: int | None = 0
    vocab_size: int = 0

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        (own,) = parts
        rows = -(-self.vocab_size // size)
        return torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])])

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        own = _share(self.vocab_size, rank, size)
        return [parameter[: own.stop - own.start]]


@dataclass(frozen=True)
class FusedRows(Layout):
    """``count`` tensors, each sharded along its rows, a rank's parts one below the other (gate and up)."""

    dim: int | None = 0
    count: int = 2

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        return torch.cat(list(parts))

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        return list(parameter.chunk(self.count))


@dataclass(frozen=True)
class FusedHeads(Layout):
    """Queries, keys and values: for each group, its query heads, its key and value head; sharded over groups."""

    dim: int | None = 0
    groups: int = 1
    head_dim: int = 1

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        groups = self.groups // size
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        fused = parameter.reshape(self.groups // size, -1, *parameter.shape[1:])
        queries = fused.shape[1] - 2 * self.head_dim
        return [part.flatten(0, 1) for part in fused.split([queries, self.head_dim, self.head_dim], 1)]


@dataclass(frozen=True)
class ShardedExperts(Layout):
    """A matrix of all experts of a layer: its experts, along ``dim``, are sharded over expert-parallel ranks, and the
    other dimension over the ``tensor_size`` ranks, next to each other, that share an expert."""

    dim: int = 0
    tensor_size: int = 1

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        expert, tensor = divmod(rank, self.tensor_size)
        experts = _share(shape[self.dim], expert, size // self.tensor_size)
        others = _share(shape[1 - self.dim], tensor, self.tensor_size)
        return (others, experts) if self.dim else (experts, others)


@dataclass(frozen=True)
class Correspondence:
    """One parameter's name, the same under all parallel sizes, and the tensors that it is made of."""

    name: str
    sources: tuple[str, ...]
    layout: Layout
    is_copy: bool = False
    """The output matrix of a last stage that copies the embeddings of the first one."""
    of_expert: bool = False
    """On the ranks of one expert only, or of some."""


def parameters_of(
    chunk: GPTModel, hf: PretrainedConfig, head: ModelHead, stored: StoredLayout
) -> Iterator[tuple[Correspondence, nn.Parameter]]:
    """Every parameter of a model chunk with its correspondence; sources are stored tensors."""
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            index, _, inner = name.removeprefix("decoder.layers.").partition(".")
            layer = chunk.decoder.layers[int(index)].layer_number - 1
            prefix, path = f"model.layers.{layer}.", f"decoder.layers.{layer}"
            if inner.startswith(_EXPERTS):
                number, _, part = inner.removeprefix(_EXPERTS).partition(".")
                expert = chunk.decoder.layers[int(index)].mlp.local_expert_indices[int(number)]
                is_first = part == "linear_fc1.weight"
                parts = stored.parts(f"{prefix}mlp.experts.{'gate_up_proj' if is_first else 'down_proj'}")
                count = len(parts) // num_experts(hf)
                own = tuple(one.name for one in parts[expert * count : (expert + 1) * count])
                layout = FusedRows(count=count) if is_first else Layout(1)
                yield Correspondence(f"{path}.mlp.experts.{expert}.{part}", own, layout, of_expert=True), parameter
            elif inner.startswith(_EXPERT_ADAPTERS):
                part = inner.removeprefix(_EXPERT_ADAPTERS)
                tensor, _, which = part.partition(".")
                # A is (E r, in), its experts along the rows; B is taken as (out r, E), its experts along the columns.
                is_up = int(which != "down")
                source = adapter_names(f"{prefix}mlp.experts.{tensor}")[is_up]
                layout = ShardedExperts(is_up, chunk.config.expert_tensor_parallel_size)
                yield Correspondence(f"{path}.mlp.expert_adapters.{part}", (source,), layout, of_expert=True), parameter
            else:
                sources, layout = in_layer(inner, hf)
                own = tuple(stored.parts(f"{prefix}{source}")[0].name for source in sources)
                yield Correspondence(f"{path}.{inner}", own, layout), parameter
        else:
            is_copy, source = bool(getattr(parameter, "shared", False)), "model.embed_tokens.weight"
            layout = ShardedVocabulary(vocab_size=hf.vocab_size)
            if name == "decoder.final_layernorm.weight":
                source, layout = "model.norm.weight", Layout()
            elif name != "embedding.word_embeddings.weight":
                assert name in ("output_layer.weight", "output_layer.bias"), name
                if head is ModelHead.VALUE:
                    source, layout = f"score.{name.rpartition('.')[2]}", Layout()
                elif not is_copy:
                    source = "lm_head.weight"
            yield Correspondence(name, (source,), layout, is_copy), parameter


def in_layer(name: str, hf: PretrainedConfig) -> tuple[tuple[str, ...], Layout]:
    """The sources and the layout of a parameter of a transformer layer, by its name there."""
    if _ADAPTERS in name:
        # A is sharded where the inputs of its layer are, B where the outputs are.
        path, _, rest = name.partition(_ADAPTERS)
        projection, _, part = rest.partition(".")
        weights, layout = in_layer(f"{path}.weight", hf)
        (weight,) = (one for one in weights if one.endswith(f".{projection}.weight"))
        is_sharded = (layout.dim == 1) == (part == "down")
        own = Layout(1 if part == "down" else 0) if is_sharded else Layout()
        return (adapter_names(weight)[part != "down"],), own
    if name == "mlp.shared_experts.gate_weight":
        return ("mlp.shared_expert_gate.weight",), Layout()
    kind = name.rpartition(".")[2]
    # OLMoE normalises the queries of all heads together, others those of each head alone.
    of_heads = Layout(0 if hf.model_type == "olmoe" else None)
    table: dict[str, tuple[tuple[str, ...], Layout]] = {
        "input_layernorm": (("input_layernorm",), Layout()),
        "self_attention.linear_qkv": (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            FusedHeads(groups=hf.num_key_value_heads, head_dim=head_dim(hf)),
        ),
        "self_attention.q_layernorm": (("self_attn.q_norm",), of_heads),
        "self_attention.k_layernorm": (("self_attn.k_norm",), of_heads),
        "self_attention.linear_proj": (("self_attn.o_proj",), Layout(1)),
        "pre_mlp_layernorm": (("post_attention_layernorm",), Layout()),
        "mlp.router": (("mlp.gate",), Layout()),
        "mlp.shared_experts.linear_fc1": (("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), FusedRows()),
        "mlp.shared_experts.linear_fc2": (("mlp.shared_expert.down_proj",), Layout(1)),
        "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), FusedRows()),
        "mlp.linear_fc2": (("mlp.down_proj",), Layout(1)),
    }
    sources, layout = table[name.rpartition(".")[0]]
    return tuple(f"{source}.{kind}" for source in sources), layout
