"""Proof that a reloaded vLLM model holds the tensors that were sent.

Experts of a sparse layer, by the names under which vLLM takes them:

| as sent                                     | as vLLM's loaders take it                                            |
|---------------------------------------------|----------------------------------------------------------------------|
| ``experts.e.gate_proj.weight`` ...          | the same                                                             |
| ``experts.gate_up_proj[e]`` (2I, H)         | ``experts.e.gate_proj.weight``, ``experts.e.up_proj.weight`` (I, H)  |
| ``experts.down_proj[e]`` (H, I)             | ``experts.e.down_proj.weight``                                       |
| gpt-oss: ``experts.gate_up_proj[e]`` (H, 2I)| ``experts.e.gate_up_proj``, which it transposes                      |
| gpt-oss: ``experts.gate_up_proj_bias`` (E, 2I) | ``experts.e.gate_up_proj_bias`` (2I)                              |

A tensor of all experts cannot be sent: for gpt-oss vLLM 0.32 copies it bypassing the loaders that a reload watches, and
it is lost without an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.models.utils import is_pp_missing_parameter

from roll.weight_sync.encoding import tensor_checksum

logger = logging.getLogger(__name__)

_ROWS = 8192  # rows of a matrix that are taken to float32 at a time
_MASK = (1 << 64) - 1
Shard = str | int | tuple[int, ...]
_MATRIX = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)\[(\d+)\]")
_BIASES = re.compile(r"(.*\.experts)\.((?:gate_up|down)_proj_bias)")
_GPT_OSS = "gpt_oss"


def quieten() -> None:
    """Silence vLLM's warnings of every layer without own tensors, at each update; what arrived is compared by name."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)


@dataclass(frozen=True)
class _Held:
    """Place of a rank's part of a tensor of the checkpoint."""

    layer: nn.Module
    parameter_name: str
    checksum: int  # checksum of the tensor as sent, if the part was right

    @property
    def key(self) -> tuple[int, str]:
        return id(self.layer), self.parameter_name


class ReloadVerifier:
    """Watches layer-by-layer reloads of ``model`` and compares what arrives in the layers with what was sent.

    The checksum of a tensor is that of the model's own parameter (its part of it, where the model fuses several). A
    rank of several holds a part of the tensor, and an engine of another dtype converted values: where these are, bit
    for bit, that part of the tensor sent, or what it converts to, the checksum is that of the tensor sent.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._model_type = str(cast("Any", model.config).model_type)
        self._held: dict[str, _Held] = {}
        self._as_loaded: dict[tuple[int, str], int] = {}  # checksums of parameters as they are computed with
        self._received: dict[str, int] = {}  # checksums of tensors that cannot be found again
        self._probes: dict[int, Probe] = {}  # probes of the packed layers, by identity
        self._sent: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        """Names of tensors sent, by their address in memory: loaders pass views of them on."""
        self._wholes: dict[str, tuple[int, dict[str, int]]] = {}
        """Tensors as sent that vLLM takes under other names: their checksum, and those of the tensors there."""
        self._checksums: dict[str, int] = {}
        self._processed: set[int] = set()
        self._watched: list[Any] = []

    def start(self) -> None:
        """A reload begins."""
        self._checksums, self._processed = {}, set()
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading") and method not in self._watched:
                self._watch(method)

    def expect(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Register a tensor that is about to be loaded; return what to load, in these very objects: the comparison
        finds tensors again by address."""
        parts = checkpoint_tensors(self._model_type, name, tensor)
        if [part for part, _ in parts] != [name]:
            self._wholes[name] = tensor_checksum(tensor), {part: tensor_checksum(content) for part, content in parts}
        self._sent.update(parts)
        self._names.update((content.data_ptr(), part) for part, content in parts)
        return parts

    def _watch(self, method: Any) -> None:
        """Compare the layers of ``method`` once they are loaded and before, on a CPU, they are packed: oneDNN's packed
        form cannot be read back."""
        process: Callable[[Any], None] = method.process_weights_after_loading

        def process_watched(layer: Any) -> None:
            self._compare_loaded(layer)
            probe = Probe.of(layer.weight) if is_packed(layer) else None
            packed_before = getattr(method, "moe_kernel", None)
            process(layer)
            if packed_before is not None and layer.w13_weight.device.type == "cpu":
                # vLLM 0.32 packs experts when the kernel is made, at the first load only, and would read the plain
                # matrices of a reload as packed ones: other numbers, without an error.
                packed_before.fused_experts.process_weights_after_loading(layer)
            self._processed.add(id(layer))
            if probe is not None:
                check_packing(layer, probe)
                self._probes[id(layer)] = probe

        method.process_weights_after_loading = process_watched
        self._watched.append(method)

    def _compare_loaded(self, layer: Any) -> None:
        for parameter_name, bound in get_layerwise_info(layer).loaded_weights:
            arguments = bound.arguments
            loaded = arguments.get("loaded_weight")
            if not isinstance(loaded, Tensor):
                continue
            name = self._names.get(loaded.data_ptr())
            if name is None or loaded.numel() != self._sent[name].numel():
                continue
            if "expert_id" not in arguments:
                self._compare(name, layer, parameter_name, arguments.get("loaded_shard_id"))
                continue
            sent, shard = self._taken(name), arguments["shard_id"]
            local = layer._map_global_expert_id_to_local_expert_id(arguments["expert_id"])
            if local >= 0:  # else another rank has the expert
                # Gate (w1) and up (w3) are above one another; down (w2) and those of gpt-oss are alone.
                held = getattr(layer, parameter_name).data[local]
                if shard in ("w1", "w3"):
                    held = held.chunk(2)[shard == "w3"]
                whole = sent
                if shard.startswith(_GPT_OSS):  # transposed; the bias of an output on one rank only
                    is_repeated = shard == "gpt_oss_w2" and layer.moe_config.moe_parallel_config.tp_rank > 0
                    whole = sent.t() if sent.ndim == 2 else torch.zeros_like(sent) if is_repeated else sent
                self._note(name, layer, parameter_name, sent, held, whole)

    def _compare(self, name: str, layer: nn.Module, parameter_name: str, shard: Shard | None = None) -> None:
        sent = whole = self._taken(name)
        held = held_part(layer, getattr(layer, parameter_name), shard, len(sent))
        if isinstance(shard, tuple):  # several tensors of a fused parameter in one, each of which ranks share by rows
            own: Any = layer
            sizes = [own.output_partition_sizes[index] for index in shard]
            parts = zip(sent.split([size * own.tp_size for size in sizes]), sizes, strict=True)
            whole = torch.cat([part.narrow(0, own.tp_rank * size, size) for part, size in parts])
        if shard is None and held.shape != sent.shape:
            parameter = getattr(layer, parameter_name)
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, FunctionType):
                # The parameter's own, not the layer's. It takes for instance some channels each of queries, keys and
                # values for a convolution over all of them.
                alone = nn.Parameter(torch.empty_like(parameter.data), requires_grad=False)
                loader(alone, sent)
                whole = alone.data
        self._note(name, layer, parameter_name, sent, held, whole)

    def _note(
        self, name: str, layer: nn.Module, parameter_name: str, sent: Tensor, held: Tensor, whole: Tensor
    ) -> None:
        """Record the checksum of a part; ``whole`` is the tensor sent, in the layer's orientation."""
        checksum = tensor_checksum(held)
        meant = meant_part(layer, whole, held).to(held.dtype)
        if meant is not sent and checksum == tensor_checksum(meant):
            checksum = tensor_checksum(sent)
        self._held[name] = _Held(layer, parameter_name, checksum)
        self._checksums[name] = checksum

    def finish(self, remember: bool = False) -> dict[str, int]:
        """The checksums of the tensors that the model holds; to be called when the reload is over. A stage of several
        leaves out those of the others. ``remember``: :meth:`held` will be called."""
        for method in self._watched:
            del method.process_weights_after_loading
        self._watched.clear()
        # An output matrix tied to the embeddings has no tensor of its own in the checkpoint, so the reload leaves its
        # packed copy as it was: pack it again.
        layer: Any
        for layer in self._model.modules():
            if is_packed(layer) and layer.weight.numel() and id(layer) not in self._processed:
                layer.quant_method.process_weights_after_loading(layer)
                check_packing(layer, Probe.of(layer.weight))
        parameters = dict(self._model.named_parameters())
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        for name in list(self._sent):
            own = name if mapper is None else mapper.map_name(name) or name
            if is_pp_missing_parameter(own, self._model):
                self._taken(name)
            elif own.endswith(".sinks") and own in parameters:
                # vLLM's loader of gpt-oss writes the attention sinks bypassing the reload, which then discards them.
                parameter = parameters[own]
                sent, heads = self._taken(name), len(parameter)
                part = sent.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
                parameter.data.copy_(part)
                path, _, parameter_name = own.rpartition(".")
                self._note(name, self._model.get_submodule(path), parameter_name, sent, parameter.data, part)
            elif own in parameters and parameters[own].shape == self._sent[name].shape:
                path, _, parameter_name = own.rpartition(".")
                self._compare(name, self._model.get_submodule(path), parameter_name)
        if self._sent:
            # Renamed or rearranged by the model's own loader, so there is nothing to compare them with.
            logger.warning(
                "%d tensors (%s, ...) cannot be found again in vLLM's model: they are verified as received only",
                len(self._sent),
                next(iter(self._sent)),
            )
        received = {name: tensor_checksum(tensor) for name, tensor in self._sent.items()}
        self._sent.clear()
        self._names.clear()
        self._received |= received
        if remember:
            self._as_loaded = {held.key: self._now(held) for held in self._held.values()}
        return self._as_sent(self._checksums | received)

    def _taken(self, name: str) -> Tensor:
        """A tensor that was sent, which is no longer waited for."""
        sent = self._sent.pop(name)
        del self._names[sent.data_ptr()]
        return sent

    def _as_sent(self, found: dict[str, int]) -> dict[str, int]:
        """The checksums by the names that were sent: that of the whole if those of all its parts are right."""
        for name, (whole, parts) in self._wholes.items():
            if own := {part: found.pop(part) for part in parts if part in found}:
                is_right = all(parts[part] == checksum for part, checksum in own.items())
                found[name] = whole if is_right else ~whole & _MASK
        return found

    def _now(self, held: _Held) -> int:
        """State of what is computed with: 1 for a packed layer that is right, a checksum for another parameter."""
        if held.parameter_name == "weight" and id(held.layer) in self._probes:
            return int(computes_with(held.layer, self._probes[id(held.layer)]))
        return tensor_checksum(getattr(held.layer, held.parameter_name))

    def held(self, names: Iterable[str]) -> dict[str, int]:
        """The checksums of tensors of earlier reloads, as sent, where the rank computes with what it did then."""
        wanted = [part for name in names for part in (self._wholes[name][1] if name in self._wholes else (name,))]
        known = {name: self._held[name] for name in wanted if name in self._held}
        now = {held.key: self._now(held) for held in known.values()}
        found = {
            name: held.checksum if now[held.key] == self._as_loaded[held.key] else ~held.checksum & _MASK
            for name, held in known.items()
        }
        return self._as_sent(found | {name: self._received[name] for name in wanted if name in self._received})


def is_packed(layer: Any) -> bool:
    """True for a matrix that is multiplied in a packed form on a CPU."""
    # vars(), since vLLM's LoRA wrapper forwards all attributes of its layer and would be found packed as well.
    return "cpu_linear" in vars(layer) and getattr(layer, "weight", None) is not None and layer.weight.ndim == 2


@dataclass(frozen=True)
class Probe:
    """One product of a matrix (out, in), computed the plain way; float32."""

    vector: Tensor  # random signs, (in,)
    product: Tensor  # (out,)
    magnitude: Tensor  # sum of the magnitudes of each row, (out,): what rounding is relative to

    @staticmethod
    def of(weight: Tensor) -> Probe:
        generator = torch.Generator().manual_seed(1)
        vector = torch.randint(0, 2, (weight.shape[1],), generator=generator).mul_(2).sub_(1).float()
        products, magnitudes = [], []
        for rows in weight.data.split(_ROWS):
            rows = rows.float()
            products.append(rows @ vector)
            magnitudes.append(rows.abs().sum(1))
        return Probe(vector, torch.cat(products), torch.cat(magnitudes))


def check_packing(layer: nn.Module, probe: Probe) -> None:
    """Compare the product that a packed layer computes with that of its plain matrix. Raises RuntimeError: they differ
    by more than rounding."""
    if not computes_with(layer, probe):
        raise RuntimeError(f"vLLM's {type(layer).__name__} does not compute with the weights it was loaded with")


def computes_with(layer: Any, probe: Probe) -> bool:
    """Return True if a packed layer computes the product of its plain matrix, up to rounding."""
    dtype = layer.weight.dtype
    computed = layer.cpu_linear(probe.vector.to(dtype)[None], layer.weight, None)[0].float()
    # Sums are float32 in any order, and the result is rounded once to its dtype.
    allowed = probe.product.abs() * torch.finfo(dtype).eps + probe.magnitude * 1e-5
    # Rows that are not finite prove nothing: weights may be so, and rows never sent hold uninitialised memory.
    agrees = ((computed - probe.product).abs() <= allowed) | ~probe.product.isfinite()
    return bool(agrees.all())


def held_part(layer: Any, parameter: Tensor, shard: Shard | None, num_rows: int) -> Tensor:
    """The part of a layer's parameter that one tensor of the checkpoint went to, as far as this rank has any of it.
    ``shard``: which of a fused parameter's tensors: ``q``, ``k``, ``v``, an index, or consecutive ones that the
    checkpoint has as one; None: the parameter is not fused. ``num_rows``: of the tensor."""
    if hasattr(layer, "shard_indices"):  # a vocabulary matrix, padded to more rows
        own = layer.shard_indices
        return parameter.data[: own.org_vocab_end_index - own.org_vocab_start_index]
    if shard is None:
        return parameter.data[:num_rows]
    if isinstance(shard, str):
        begin, size = layer._get_shard_offset_mapping(shard), layer._get_shard_size_mapping(shard)
    else:
        sizes, (first, *more) = layer.output_partition_sizes, shard if isinstance(shard, tuple) else (shard,)
        begin, size = sum(sizes[:first]), sum(sizes[index] for index in (first, *more))
    return parameter.data[begin : begin + size]


def meant_part(layer: nn.Module, whole: Tensor, held: Tensor) -> Tensor:
    """The part of a tensor that belongs into ``held``; the whole where sizes do not tell, which is then no match."""
    if hasattr(layer, "shard_indices"):
        own: Any = layer.shard_indices
        return whole[own.org_vocab_start_index : own.org_vocab_end_index]
    experts = getattr(layer, "moe_config", None)
    ranks: object = layer if experts is None else experts.moe_parallel_config
    rank, size = getattr(ranks, "tp_rank", 0), getattr(ranks, "tp_size", 1)
    if held.ndim != whole.ndim:
        return whole
    for dim, (all_of_it, own) in enumerate(zip(whole.shape, held.shape, strict=True)):
        # Ranks share heads of keys and values that are fewer than they.
        sharing = own * size // all_of_it if all_of_it else 0
        if own != all_of_it and sharing and rank // sharing * own + own <= all_of_it:
            whole = whole.narrow(dim, rank // sharing * own, own)
    return whole


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
