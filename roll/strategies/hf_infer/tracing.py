"""Results of single operations of an engine and a trainer for the tokens of one sequence, by the names of a model's
modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from roll.models.layouts import TokenLayout
from roll.models.lora import base_name
from roll.strategies.base import TensorBatch
from roll.strategies.hf_infer.decoder import LAST_ROWS, FusedDecoder, Images, PromptStates, filled_tokens, round_up
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.rows import DecodeSlots
from roll.strategies.training.data_parallel import DataParallelStrategy

Trace = dict[str, dict[int, Tensor]]
"""By operation (``<module> in`` and ``<module> out``), in the order of computation: by position its row."""

_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|^module\.|language_model\.(?=model\.|lm_head)")
_INSIDE_ADAPTER = re.compile(r"\.(base_layer|lora_\w+)(\.|$)")


@dataclass
class Recorder:
    """Keeps the rows of one sequence of tokens."""

    sequence: list[int]
    trace: Trace = field(default_factory=dict)
    places: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Where the sequence's tokens are in the pass that is being computed: (row of flattened tokens, position), by every
    number of rows that its operations may have."""

    def add(self, name: str, tensor: Tensor) -> None:
        rows = tensor.detach().flatten(0, -2) if tensor.ndim > 1 else tensor.detach()
        if len(rows) in self.places:
            held = self.trace.setdefault(name, {})
            held |= {position: rows[row].clone() for row, position in self.places[len(rows)]}


@contextmanager
def watching_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Record inputs and outputs of the modules that compute something themselves."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            path = base_name(f"{_WRAPPERS.sub('', name)}.").rstrip(".")
            is_inner = any(module.children()) and not hasattr(module, "lora_A")
            if not path or _INSIDE_ADAPTER.search(name) or is_inner:
                continue
            stack.callback(module.register_forward_hook(partial(_record, recorder, path)).remove)
        yield


def _record(recorder: Recorder, path: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
    for side, value in (("in", inputs[0] if inputs else None), ("out", output)):
        if isinstance(value, Tensor) and value.is_floating_point():
            recorder.add(f"{path} {side}", value)


@contextmanager
def watching_engine(engine: GenerationEngine, recorder: Recorder) -> Iterator[None]:
    """Record the operations of an engine's decoder, of rows that compute the sequence or a beginning of it."""
    decoder: Any = engine._decoder
    plain = {name: getattr(decoder, name) for name in ("prefill", "decode")}

    def prefill(prompts: Sequence[Sequence[int]], images: Images | None = None) -> PromptStates:
        recorder.places.clear()
        longest, flat, tokens, grid, last = max(map(len, prompts)), 0, [], [], []
        for row, prompt in enumerate(prompts):
            if recorder.sequence[: len(prompt)] == list(prompt):
                tokens += [(flat + position, position) for position in range(len(prompt))]
                grid += [(row * longest + position, position) for position in range(len(prompt))]
                last.append((row, len(prompt) - 1))
            flat += len(prompt)
        if isinstance(decoder, FusedDecoder):
            recorder.places[filled_tokens(flat)] = tokens
            recorder.places.setdefault(round_up(len(prompts), LAST_ROWS), last)
        else:
            recorder.places[len(prompts) * longest] = grid
        return cast("PromptStates", plain["prefill"](prompts, images))

    def decode(tokens: Tensor, slots: DecodeSlots) -> Tensor:
        recorder.places.clear()
        rows = [(row, engine._rows.token_ids(row)) for row in range(len(engine._rows.samples))]
        own = [(row, len(ids) - 1) for row, ids in rows if recorder.sequence[: len(ids)] == ids]
        recorder.places[slots.size] = own
        return cast("Tensor", plain["decode"](tokens, slots))

    with ExitStack() as stack:
        for name, watched in (("prefill", prefill), ("decode", decode)):
            setattr(decoder, name, watched)
            stack.callback(delattr, decoder, name)
        if isinstance(decoder, FusedDecoder):
            _watch_products(decoder, recorder, stack)
        else:
            stack.enter_context(watching_modules(decoder.model, recorder))
        yield


def _watch_products(decoder: FusedDecoder, recorder: Recorder, stack: ExitStack) -> None:
    """Record what goes into and comes out of the fused matrices, by the names of the model's own modules."""

    def watch(owner: object, attribute: str, given: str, *modules: str) -> None:
        product = getattr(owner, attribute)
        sizes = [cast("nn.Linear", decoder.model.get_submodule(name)).out_features for name in modules]

        def watched(x: Tensor) -> Tensor:
            recorder.add(given, x)
            out: Tensor = product(x)
            for name, part in zip(modules, out.split(sizes, -1) if sizes else (), strict=True):
                recorder.add(f"{name} out", part)
            return out

        setattr(owner, attribute, watched)
        stack.callback(setattr, owner, attribute, product)

    for index, layer in enumerate(decoder.layers):
        path, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
        watch(layer, "qkv", f"{path}.input_layernorm out", *(f"{attention}.{one}_proj" for one in "qkv"))
        watch(layer, "output", f"{attention}.o_proj in", f"{attention}.o_proj")
        halves = f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"
        watch(layer, "gate_up", f"{path}.post_attention_layernorm out", *halves)
        watch(layer, "down", f"{path}.mlp.down_proj in", f"{path}.mlp.down_proj")
    watch(decoder, "head", "model.norm out")


@contextmanager
def watching_trainer(strategy: DataParallelStrategy, recorder: Recorder) -> Iterator[None]:
    """Record the operations of a trainer's model, in any layout; of a shared prompt only with its first response."""
    plain, replaced = strategy._outputs, cast("Any", strategy)

    def outputs(layout: TokenLayout, names: Collection[str], temperature: float, shape: torch.Size) -> TensorBatch:
        recorder.places.clear()
        found: dict[int, list[tuple[int, int]]] = {}
        for flat, (source, token) in enumerate(
            zip(layout.sources.flatten().tolist(), layout.input_ids.flatten().tolist(), strict=True)
        ):
            row, position = divmod(source, shape[1])
            known = position < len(recorder.sequence) and recorder.sequence[position] == token
            if source >= 0:
                found.setdefault(row, []).append((flat, position if known else -1))
        whole = [places for places in found.values() if all(position >= 0 for _, position in places)]
        end = len(recorder.sequence) - 2  # the last token is predicted, and never an input
        places = next((places for places in whole if any(position == end for _, position in places)), [])
        recorder.places[layout.input_ids.numel()] = places
        return plain(layout, names, temperature, shape)

    replaced._outputs = outputs
    try:
        with watching_modules(strategy.model.language_model, recorder):
            yield
    finally:
        del replaced._outputs
