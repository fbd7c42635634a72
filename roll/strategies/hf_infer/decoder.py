"""The interface between the engine and a model, and the decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3.

The query, key and value matrices of a layer are one matrix there, so are gate and up. The model's own parameters become
views of these, so loading a weight by its Hugging Face name changes what is computed and nothing is held twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from roll.models import invariant
from roll.models.experts import RoutingRecorder
from roll.models.invariant import KEYS, computes_invariantly
from roll.models.kernels import Product, linear
from roll.protocol.vision import VisionInputs, check_images
from roll.strategies.hf_infer.rows import CacheShape, DecodeSlots

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class PromptStates:
    """Computed prompts.

    ``keys_values``: (num_layers, 2, num_prompts, num_kv_heads, longest prompt, head_dim), anything past a prompt's end.
    ``logits``: (num_prompts, vocab_size), of the token after each prompt.
    ``offsets``: by prompt, how far the rotary position of a later token is ahead of its place in the sequence: the
    tokens of an image share positions. Empty: nothing.
    ``routes``: (num_prompts, longest prompt, layers, k), experts of each token, where they are recorded.
    ``states``: (num_prompts, ...) each, of layers of linear attention after the prompt.
    """

    keys_values: torch.Tensor
    logits: torch.Tensor
    offsets: Sequence[int] = ()
    routes: np.ndarray | None = None
    states: Sequence[torch.Tensor] = ()

    def only(self, prompt: int) -> PromptStates:
        """A copy of one prompt's states (which does not keep the others in memory)."""
        return PromptStates(
            self.keys_values[:, :, prompt : prompt + 1].clone(),
            self.logits[prompt : prompt + 1].clone(),
            self.offsets[prompt : prompt + 1],
            None if self.routes is None else self.routes[prompt : prompt + 1].copy(),
            [state[prompt : prompt + 1].clone() for state in self.states],
        )


Images = Sequence[VisionInputs | None]  # one for each prompt; None: a prompt of text


class Decoder(ABC):
    """A causal language model computed token by token."""

    cache_shape: CacheShape
    masked_token_ids: tuple[int, ...] = ()  # tokens that are never sampled

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.weights: dict[str, torch.Tensor] = model.state_dict()
        """Tensors that the engine computes with, by Hugging Face name (tied weights under every one of their names)."""
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.is_invariant = computes_invariantly(model)
        """A token's log-probs are those of a trainer with ``strict_on_policy``, to the last bit."""
        self.key_multiple = KEYS if self.is_invariant else 1
        """Keys that a decoding step reads are as many as a multiple of this."""
        self.cache_dtype = torch.float32 if self.is_invariant else self.dtype
        """Dtype of keys and values. Invariant attention is float32 and would otherwise convert all in every step."""
        self.routing: RoutingRecorder | None = None  # set where experts' choices are recorded
        self.chosen: np.ndarray | None = None  # (tokens, layers, k), of the last pass, padding included
        self.features: OrderedDict[str, tuple[torch.Tensor, list[torch.Tensor]]] = OrderedDict()
        """Of each image that was seen with these weights: (tokens, hidden size), and the same for some layers."""

    def check_images(self, name: str, prompt: Sequence[int], vision: VisionInputs | None) -> None:
        """ValueError for images that the model does not see, or that do not go with the placeholders of ``prompt``."""
        if vision is not None:
            check_images(name, prompt, vision, self.model.config)

    def prefix_key(self, token_ids: Sequence[int], vision: VisionInputs | None) -> Sequence[int]:
        """Return numbers that identify a sequence in the prefix cache: equal only if keys and values are."""
        return token_ids

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]], images: Images | None = None) -> PromptStates:
        """Compute whole prompts; ``images`` are those of each, None where all are text."""

    @abstractmethod
    def extend(
        self,
        keys_values: torch.Tensor,
        known: Sequence[int],
        prompts: Sequence[Sequence[int]],
        images: Images | None = None,
    ) -> PromptStates:
        """Compute the rest of prompts whose first tokens are there, ``known`` of each; at least one is not.
        ``keys_values``: (num_layers, 2, num_prompts, num_kv_heads, longest prompt, head_dim), finite everywhere; those
        of the rest are filled in."""

    @abstractmethod
    def decode(self, tokens: torch.Tensor, slots: DecodeSlots) -> torch.Tensor:
        """Logits (size, vocab_size) after one more token (int64, (size,)) in each of the rows of ``slots``."""


def decode_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax attention of a single query position per row, (B, num_heads * head_dim).

    Args:
        queries: (B, num_heads, head_dim).
        keys, values: (B, num_kv_heads, T, head_dim); consecutive query heads share a key head.
        bias: (B, T), added to the scores of all heads.
    """
    batch, num_heads, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if queries.dtype == torch.float32 and queries.device.type == "cpu":
        # 1.5 times as fast as the CPU flash kernel, which is made for many queries a row.
        scores = torch.bmm(grouped.flatten(0, 1) * scale, keys.flatten(0, 1).transpose(1, 2))
        if bias is not None:
            scores.view(batch, num_heads, length).add_(bias[:, None])
        out = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    else:
        mask = None if bias is None else bias[:, None, None]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, num_heads * head_dim)


_Linear = Callable[[torch.Tensor], torch.Tensor]


class _Layer:
    def __init__(self, layer: Any, product: Product) -> None:
        attention, mlp, fuse = layer.self_attn, layer.mlp, partial(_fuse, product)
        self.input_norm = layer.input_layernorm.weight.detach()
        self.qkv = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_norms: list[torch.Tensor] = []  # of queries and of keys, in families that have them (Qwen3)
        if hasattr(attention, "q_norm"):
            self.head_norms = [attention.q_norm.weight.detach(), attention.k_norm.weight.detach()]
        self.output = fuse(attention.o_proj)
        self.mlp_norm = layer.post_attention_layernorm.weight.detach()
        self.gate_up, self.down = fuse(mlp.gate_proj, mlp.up_proj), fuse(mlp.down_proj)


class FusedDecoder(Decoder):
    """Computes the model with a third of the operations of transformers' forward pass; rotary angles are prepared for
    ``max_model_len`` positions.

    On a CPU that is 1.1 (SmolLM2-135M) to 1.4 times (two layers of width 64) as fast as
    :class:`~roll.strategies.hf_infer.generic.GenericDecoder`.
    """

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        config, body, head = model.config, cast("Any", model.model), cast("Any", model.lm_head)
        self._head_dim = int(body.layers[0].self_attn.head_dim)
        self._num_heads, self._num_kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._split = (self._num_heads, self._num_kv_heads, self._num_kv_heads)  # heads of queries, keys and values
        self._epsilon = float(config.rms_norm_eps)
        self._scale = self._head_dim**-0.5
        product = invariant.linear if computes_invariantly(model) else linear
        self.layers = [_Layer(layer, product) for layer in body.layers]
        self.cache_shape = CacheShape(len(self.layers), self._num_kv_heads, self._head_dim)
        # After the layers are fused: it takes the model's tensors, which have become views of the fused ones.
        super().__init__(model)
        # After each operation, as transformers does; on an accelerator, where each would be a kernel, once at the end.
        self._rounds_each = self.is_invariant or (self.dtype != torch.float32 and self.device.type == "cpu")
        self._embedding = body.embed_tokens.weight.detach()
        self._final_norm = body.norm.weight.detach()
        self.head = _fuse(product, head)
        positions = torch.arange(max_model_len, device=self.device)[None]
        cos, sin = body.rotary_emb(torch.zeros(1, dtype=self.dtype, device=self.device), positions)
        # The first half has the sign of the rotation already, so a step only swaps the halves of a head.
        sin = sin[0].clone()
        sin[:, : self._head_dim // 2].neg_()
        self._cos, self._sin = (cos[0][:, None].contiguous(), sin[:, None].contiguous())

    def prefill(self, prompts: Sequence[Sequence[int]], images: Images | None = None) -> PromptStates:
        grid = _PromptGrid(prompts, self.device)
        x = F.embedding(grid.tokens, self._embedding)
        cos, sin = self._cos[grid.positions], self._sin[grid.positions]
        shape = (len(self.layers), 2, grid.num_prompts, self._num_kv_heads, grid.longest, self._head_dim)
        keys_values = torch.empty(shape, dtype=self.dtype, device=self.device)
        for index, layer in enumerate(self.layers):
            queries, keys, values = grid.pad(self._heads(layer, x, cos, sin)).transpose(1, 2).split(self._split, 1)
            keys_values[index, 0], keys_values[index, 1] = keys, values
            # Padding comes after the prompt, where causal attention does not see it.
            x = self._attend(index, grid, x, (queries, keys, values))
        return PromptStates(keys_values, self.head(self._rms_norm(x, self._final_norm))[: grid.num_prompts])

    def extend(
        self,
        keys_values: torch.Tensor,
        known: Sequence[int],
        prompts: Sequence[Sequence[int]],
        images: Images | None = None,
    ) -> PromptStates:
        rests = [prompt[count:] for prompt, count in zip(prompts, known, strict=True)]
        return PromptStates(keys_values, self._continue(keys_values, known, rests, True)[: len(prompts)])

    def verify(self, keys_values: torch.Tensor, known: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits after each of some more tokens in sequences of ``known`` ones: (number of all, vocab_size). The first
        argument as in :meth:`extend`."""
        return self._continue(keys_values, known, tokens, False)[: sum(map(len, tokens))]

    def _continue(
        self, keys_values: torch.Tensor, known: Sequence[int], rests: Sequence[Sequence[int]], only_last: bool
    ) -> torch.Tensor:
        """Logits after each of the tokens in ``rests``, or only after the last of each; more rows fill the batch."""
        grid = _PromptGrid(rests, self.device)
        begins = torch.tensor(known, device=self.device)
        rows, places = grid.rows, grid.positions[: len(grid.rows)] + begins[grid.rows]
        x = F.embedding(grid.tokens, self._embedding)
        positions = F.pad(places, (0, len(grid.positions) - len(places)))
        cos, sin = self._cos[positions], self._sin[positions]
        mask = None
        if not self.is_invariant:
            queried = torch.arange(grid.longest, device=self.device) + begins[:, None]
            hidden = torch.arange(keys_values.shape[4], device=self.device) > queried[:, None, :, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        for index, layer in enumerate(self.layers):
            heads = self._heads(layer, x, cos, sin)
            _, keys, values = heads.split(self._split, 1)
            for part, new in zip(keys_values[index], (keys, values), strict=True):
                part[rows, :, places] = new[: len(rows)].to(part.dtype)
            queries = grid.pad(heads).transpose(1, 2)[:, : self._num_heads]
            of_layer = (queries, keys_values[index, 0], keys_values[index, 1])
            x = self._attend(index, grid, x, of_layer, mask, begins, only_last)
        return self.head(self._rms_norm(x, self._final_norm))

    def _attend(
        self,
        index: int,
        grid: _PromptGrid,
        x: torch.Tensor,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None = None,
        begins: torch.Tensor | int = 0,
        only_last: bool = True,
    ) -> torch.Tensor:
        """The output of layer ``index`` for a grid of prompts, from queries, keys and values; ``only_last``: after the
        last layer, of the prompts' last tokens only."""
        if self.is_invariant:
            mixed = invariant.attention(*heads, self._scale, begins)
        else:
            groups = self._num_heads != self._num_kv_heads
            mixed = F.scaled_dot_product_attention(
                *heads, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=groups
            )
        mixed = mixed.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, grid.cells)
        if only_last and index == len(self.layers) - 1:
            x, mixed = x[grid.last], mixed[grid.last]
        return self._finish_layer(self.layers[index], x, mixed)

    def decode(self, tokens: torch.Tensor, slots: DecodeSlots) -> torch.Tensor:
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._cos[slots.positions], self._sin[slots.positions]
        bias = slots.bias()
        for index, layer in enumerate(self.layers):
            queries, keys, values = self._heads(layer, x, cos, sin).split(self._split, 1)
            all_keys, all_values = slots.append(index, keys, values)
            if self.is_invariant:
                seen = queries.new_zeros(1, all_keys.shape[2]) if bias is None else bias
                mixed = invariant.attention(
                    queries[:, :, None], all_keys, all_values, self._scale, bias=seen[:, None, None]
                ).flatten(1)
            else:
                mixed = decode_attention(queries, all_keys, all_values, bias, self._scale)
            x = self._finish_layer(layer, x, mixed)
        return self.head(self._rms_norm(x, self._final_norm))

    def _heads(self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotated queries and keys, and values: (N, num_heads + 2 * num_kv_heads, head_dim)."""
        heads = layer.qkv(self._rms_norm(x, layer.input_norm)).unflatten(-1, (-1, self._head_dim))
        rotated = heads[:, : -self._num_kv_heads]
        if layer.head_norms:
            parts = zip(rotated.split(self._split[:2], 1), layer.head_norms, strict=True)
            rotated.copy_(torch.cat([self._rms_norm(part, norm) for part, norm in parts], 1))
        half = self._head_dim // 2
        swapped = torch.cat((rotated[..., half:], rotated[..., :half]), -1)
        if self._rounds_each:
            rotated.mul_(cos).add_(swapped.mul_(sin))
        else:
            rotated.mul_(cos).addcmul_(swapped, sin)
        return heads

    def _finish_layer(self, layer: _Layer, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = layer.output(mixed).add_(x)
        gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up)).add_(x)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._rounds_each and x.dtype != torch.float32:
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
            return weight * (wide * scale).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self._epsilon)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def filled_tokens(count: int) -> int:
    """Rows that so many tokens of prompts are computed in."""
    return round_up(count, 16 if count <= 256 else 128)


LAST_ROWS = 8  # the last tokens of prompts are computed in rows of a multiple of this number


class _PromptGrid:
    """Prompts of different lengths as one row of tokens, and as a right-padded grid for attention.

    ``tokens`` and ``positions``: int64 (filled-up number of tokens,); ``last``: where each prompt ends in them;
    ``rows``: int64 (number of tokens,), the prompt of each; ``cells``: the place of each token in the flattened grid.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        counts = torch.tensor([len(prompt) for prompt in prompts])
        self.num_prompts, self.longest = len(prompts), int(counts.max())
        self._num_tokens = int(counts.sum())
        # Padded to a few sizes with copies of a token, whose results are discarded: oneDNN builds a kernel per size.
        filler = filled_tokens(self._num_tokens) - self._num_tokens
        flat = [token for prompt in prompts for token in prompt] + [prompts[0][0]] * filler
        positions = torch.cat([torch.arange(length) for length in counts.tolist()] + [torch.zeros(filler).long()])
        first_cell = (torch.arange(self.num_prompts) * self.longest).repeat_interleave(counts)
        cells = positions.clone()
        cells[: self._num_tokens] += first_cell
        rows = torch.arange(self.num_prompts).repeat_interleave(counts)
        last = F.pad(counts.cumsum(0) - 1, (0, round_up(self.num_prompts, LAST_ROWS) - self.num_prompts))
        self.tokens, self.rows = torch.tensor(flat).to(device), rows.to(device)
        self.positions, self.cells, self.last = positions.to(device), cells.to(device), last.to(device)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """(filled-up number of tokens, ...) -> (num_prompts, longest, ...)."""
        x, num_cells = x[: self._num_tokens], self.num_prompts * self.longest
        if self._num_tokens != num_cells:
            grid = x.new_zeros((num_cells, *x.shape[1:]))
            x = grid.index_copy_(0, self.cells[: self._num_tokens], x)
        return x.unflatten(0, (self.num_prompts, self.longest))


def _fuse(product: Product, *modules: nn.Linear) -> _Linear:
    """One matrix of several that take the same input; their parameters become views of its rows."""
    biases = [None if module.bias is None else module.bias.detach() for module in modules]
    weight, bias = modules[0].weight.detach(), biases[0]
    if len(modules) > 1:
        sizes = [module.out_features for module in modules]
        weight = torch.cat([module.weight.detach() for module in modules])
        for module, part in zip(modules, weight.split(sizes), strict=True):
            module.weight.data = part
        if bias is not None:
            bias = torch.cat([part for part in biases if part is not None])
            for module, part in zip(modules, bias.split(sizes), strict=True):
                module.bias.data = part
    return lambda x: product(x, weight, bias)
